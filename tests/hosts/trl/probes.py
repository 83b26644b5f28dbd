"""Methods that exist to stress the adapter: each does one awkward thing. Found by name in the tests of this folder."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import torch

from rl_plugins.core.groups import Groups
from rl_plugins.core.losses import ppo_clip, weighted_logprob
from rl_plugins.core.method import Method
from rl_plugins.core.params import MethodParams, param
from rl_plugins.core.rollouts import Completion, PlanRow, Shape, Update
from rl_plugins.runtime import registry


class Probe(Method):
    fidelity = "paper"


def flaw(prompt: str, answer: str, completion: str) -> str:
    """A judge of flaws: it objects to texts of odd length, in words, and depends on all that it is shown."""
    if not (prompt and answer):
        raise ValueError("nothing to compare with")
    return f"I looked at {answer}. \\boxed{{{len(completion) // 2 if len(completion) % 2 else -1}}}"


class Noop(Probe):
    """Only looks."""

    name = "noop"

    def observe(self, rollouts, tokens, stats):
        self.log("reward", rollouts.reward.nanmean())


class Together(Noop):
    """Needs whole batches."""

    name = "together"
    needs = {"whole_batches"}


class Filter(Probe):
    """The longest row of every group and all of the groups 0, 3, 6, .. leave."""

    name = "filter"

    def shape(self, rollouts, tokens):
        g = rollouts.groups
        longest = g.median_row(rollouts.length.double() * 1000 + torch.arange(len(rollouts)), upper=True)
        keep = rollouts.group % 3 != 0
        keep[longest] = False
        return Shape(keep_rows=keep)


class Uneven(Probe):
    """All rows of the first three groups leave: on two ranks, mostly from the first."""

    name = "uneven"

    def shape(self, rollouts, tokens):
        return Shape(keep_rows=rollouts.group >= 3)


class NoneLeft(Probe):
    """Every row of the second batch leaves."""

    name = "none_left"

    def shape(self, rollouts, tokens):
        return Shape(keep_rows=torch.full((len(rollouts),), rollouts.batch != 1))


class Half(Probe):
    """`select` keeps the groups below 4."""

    name = "half"

    def select(self, rollouts):
        return rollouts.group < 4


class Over(Probe):
    """Half as many prompts again; `select` then keeps as many groups as the batch takes, all of them at one end."""

    name = "over"

    @dataclass(frozen=True)
    class Params(MethodParams):
        first: bool = param(True, "keep the first groups instead of the last")

    def plan(self, plan):
        k = len(plan.rows)
        more = tuple(
            PlanRow((r.prompt_index + 7) % 200, k + i, 0, spare=r.n) for i, r in enumerate(plan.rows[: k // 2])
        )
        return plan.replace(rows=plan.rows + more)

    def select(self, rollouts):
        return rollouts.group < 8 if self.params.first else rollouts.group >= 4


class Odd(Probe):
    """Ragged groups of 7 to 10 rollouts, of which 8 at most are trained; row 5 leaves as well."""

    name = "odd"

    def plan(self, plan):
        sizes = [7 + r.group % 4 for r in plan.rows]
        rows = [r.replace(n=min(k, 8), spare=max(0, k - 8)) for r, k in zip(plan.rows, sizes, strict=True)]
        return plan.replace(rows=tuple(rows))

    def shape(self, rollouts, tokens):
        return Shape(keep_rows=(rollouts.rollout < 8) & (torch.arange(len(rollouts)) != 5))


class Small(Probe):
    """Five rollouts per prompt instead of eight: the batch is filled with further prompts."""

    name = "small"

    def plan(self, plan):
        return plan.replace(rows=tuple(r.replace(n=5) for r in plan.rows))


class ZeroSpare(Probe):
    """A plan that differs from TRL's own in one spare rollout, which leaves again: our estimator takes over."""

    name = "zero_spare"

    def plan(self, plan):
        return plan.replace(rows=(*plan.rows[:-1], plan.rows[-1].replace(spare=1)))

    def select(self, rollouts):
        return rollouts.rollout < 8


class Merged(Probe):
    """Every two prompts form one group, with TRL's own numbers of rollouts."""

    name = "merged"

    def plan(self, plan):
        return plan.replace(rows=tuple(r.replace(group=r.group // 2) for r in plan.rows))


class Hinting(Probe):
    """Other words in every batch, for the same prompts."""

    name = "hinting"

    def plan(self, plan):
        return plan.replace(rows=tuple(r.replace(edit={"prompt": f"{plan.batch} 1 2"}) for r in plan.rows))


class Restless(Probe):
    """Asks for one more rollout in every round, for ever."""

    name = "restless"
    rounds = True

    def plan(self, plan):
        rows = plan.rows or (plan.so_far[0].row.replace(n=0, spare=1),)
        return plan.replace(rows=tuple(r.replace(n=min(r.n, 1)) for r in rows))


class Forcing(Probe):
    """Trains tokens that were not sampled."""

    name = "forcing"
    brings = {"forced_tokens"}

    def observe(self, rollouts, tokens, stats):
        pass


class One(Probe):
    """One rollout per prompt."""

    name = "one"

    def plan(self, plan):
        return plan.replace(rows=tuple(r.replace(n=1) for r in plan.rows))

    def advantages(self, rollouts):
        return rollouts.reward - 0.5


class Probing(Probe):
    """Rounds: 4 rollouts for every prompt, then the rest of the batch where the mean reward is lowest."""

    name = "probing"
    rounds = True

    def plan(self, plan):
        if plan.round == 0:
            return plan.replace(rows=tuple(r.replace(n=4) for r in plan.rows))
        if plan.round > 1:
            return plan
        means = torch.stack([g.rewards.nanmean() for g in plan.so_far])
        extra = torch.zeros(len(means), dtype=torch.int64)
        order = torch.argsort(means, stable=True)
        extra[order[: len(order) // 2]] = plan.budget // (len(order) // 2)
        rows = tuple(g.row.replace(n=int(k)) for g, k in zip(plan.so_far, extra, strict=True) if k)
        return plan.replace(rows=rows)


class Payloads(Probe):
    """Rounds whose rows carry payloads: 4 rollouts a prompt, then twice one more, the last group first."""

    name = "payloads"
    rounds = True
    read: ClassVar[list[Any]] = []

    def plan(self, plan):
        if plan.round == 0:
            Payloads.read = []
            return plan.replace(rows=tuple(r.replace(n=4, payload=(r.group, 0)) for r in plan.rows))
        if plan.round > 2:
            return plan
        Payloads.read.append([g.row.payload for g in plan.so_far])
        more = [g.row.replace(n=1, payload=(g.row.payload[0], plan.round)) for g in reversed(plan.so_far)]
        return plan.replace(rows=tuple(more))

    def observe(self, rollouts, tokens, stats):
        Payloads.seen = rollouts


class Helpings(Probe):
    """A first round that is all spare: the lower half of the groups goes on, with other words, in the room of those
    that leave."""

    name = "helpings"
    rounds = True
    needs = frozenset({"tokens", "token_ids"})

    def plan(self, plan):
        if plan.round == 0:
            rows = [r.replace(n=0, spare=4, payload={"planned": r.prompt_index}) for r in plan.rows]
            return plan.replace(rows=tuple(rows))
        if plan.round > 1:
            return None
        if any(g.row.payload != {"planned": g.row.prompt_index} for g in plan.so_far):
            raise ValueError(f"not the rows as planned: {[g.row for g in plan.so_far]}")
        means = torch.stack([g.rewards.mean() for g in plan.so_far])
        low = torch.argsort(means, stable=True)[: len(means) // 2].sort().values.tolist()
        each = plan.budget // len(low) - 4  # nothing of the budget is spent so far; the first four stay
        return plan.replace(rows=tuple(self.helping(plan.so_far[i].row, each) for i in low))

    def helping(self, row, n):
        words = [{"role": "user", "content": f"d:{row.prompt_index:04d}"}]
        return row.replace(n=n, spare=0, edit={"prompt": words}, payload={**row.payload, "helping": 1})

    def select(self, rollouts):
        return rollouts.groups.rows(rollouts.groups.size > 4)

    def observe(self, rollouts, tokens, stats):
        Helpings.seen = rollouts


class HalfRight(Probe):
    """The same prompts in every batch: those in even dataset rows are solved once each, the others never."""

    name = "half_right"

    def select_prompts(self, pool, n):
        return [i for i in range(pool.size) if i not in pool.taken][:n]

    def rewards(self, rollouts):
        return ((rollouts.prompt_index % 2 == 0) & (rollouts.rollout == 0)).double()


class Twice(Probe):
    """The first half of the prompts, each in two groups of its own."""

    name = "twice"

    def plan(self, plan):
        half = plan.rows[: len(plan.rows) // 2]
        return plan.replace(rows=(*half, *(r.replace(group=r.group + len(half)) for r in half)))


class Given(Probe):
    """Every kind of row a plan can ask for."""

    name = "given"
    needs = frozenset({"tokens", "rollout_logprobs", "text", "column:level", "old_logprobs"})

    def plan(self, plan):
        rows = list(plan.rows)
        rows[0] = rows[0].replace(given=(Completion((7, 8, 9, 1), (-1.0, -2.0, -3.0, -4.0)), Completion((6, 6, 1))))
        rows[1] = rows[1].replace(prefix=(10, 11), payload={"hint": 2})
        rows[2] = rows[2].replace(max_tokens=3)
        rows[3] = rows[3].replace(edit={"prompt": [{"role": "user", "content": "a:21"}], "level": 77})
        foreign = {"prompt": [{"role": "user", "content": "d:12"}], "answer": "21", "level": 99, "task": "d"}
        rows[4] = PlanRow(-1, rows[4].group, rows[4].n, edit=foreign)
        return plan.replace(rows=tuple(rows))

    def observe(self, rollouts, tokens, stats):
        Given.seen = (rollouts, tokens)


class Prefixed(Probe):
    """Every completion starts with the same token."""

    name = "prefixed"

    def plan(self, plan):
        return plan.replace(rows=tuple(r.replace(prefix=(10,)) for r in plan.rows))


class PPO(Probe):
    """TRL's own surrogate, made by us: must equal TRL's."""

    name = "ppo"

    @dataclass(frozen=True)
    class Params(MethodParams):
        low: float = param(0.2, "clip range below")
        high: float = param(0.2, "clip range above")
        level: str = param("token", "importance ratio of the token or of the sequence")
        form: str = param("ppo", "ppo or cispo")

    def policy_loss(self, terms):
        p, lp, old = self.params, terms.logprobs, terms.old_logprobs
        if p.level == "sequence":
            ratio = ((lp - old) * terms.mask).sum(-1, keepdim=True) / terms.mask.sum(-1, keepdim=True).clamp(min=1)
            loss = ppo_clip(ratio, torch.zeros_like(ratio), terms.advantages[:, :1], p.low, p.high)
            return loss.expand_as(lp)
        if p.form == "cispo":
            return weighted_logprob(lp, (lp - old).exp().clamp(max=p.high), terms.advantages)
        self.log(
            "ratio",
            ((lp - old).exp() * terms.mask).sum().detach() / terms.mask.sum().clamp(min=1),
            weight=terms.mask.sum(),
        )
        self.log("rows", (terms.mask.sum(1) > 0).sum(), reduce="sum")
        return ppo_clip(lp, old, terms.advantages, p.low, p.high)


class Corridor(Probe):
    """A term on the entropy, with gradient."""

    name = "corridor"
    needs = frozenset({"current_entropies"})

    def regularize(self, terms):
        return 0.1 * (torch.relu(2.0 - terms.entropies) + torch.relu(terms.entropies - 2.5))


class Softmax(Probe):
    """A group-level objective (as in DRPO): softmax over the negatives of a group, coefficients at current weights."""

    name = "softmax"
    needs = frozenset({"old_logprobs", "current_logprobs", "whole_groups"})
    aggregation = "sum"

    @dataclass(frozen=True)
    class Params(MethodParams):
        tau: float = param(1.0, "temperature", gt=0)
        lr_scale: float = param(1.0, "factor on the learning rate")

    def shape(self, rollouts, tokens):
        return Shape(row_columns={"positive": (rollouts.reward > 0.5).double()})

    def before_update(self, rows):
        score = rows.logprobs / rows.length
        g = Groups(rows.group)
        positive = rows.columns["positive"] > 0
        e = torch.where(positive, 0.0, (score / self.params.tau).exp())
        share = e / g.rows(g.sum(e)).clamp(min=1e-30)
        p = positive.double()
        share_positive = p / g.rows(g.sum(p)).clamp(min=1)
        mixed = g.rows((g.sum(p) > 0) & (g.sum(1 - p) > 0)).double()
        self.log("groups", g.count)
        return Update(
            lr_scale=self.params.lr_scale,
            columns={"coefficient": mixed * (share_positive - share) / g.count / rows.length},
        )

    def policy_loss(self, terms):
        return -terms.columns["coefficient"] * terms.logprobs


class Counter(Probe):
    """Keeps state of every kind."""

    name = "counter"
    needs = frozenset({"prompt_index"})

    def start(self, run):
        self.state = {"steps": 0, "seen": torch.zeros(run.dataset_size, dtype=torch.float64), "stream": []}

    def select_prompts(self, pool, n):
        draw = self.rng("prompts").random(pool.size) + self.state["seen"].numpy()
        return draw.argsort(kind="stable")[:n].tolist()

    def observe(self, rollouts, tokens, stats):
        self.state["steps"] += 1
        self.state["seen"].index_add_(0, rollouts.prompt_index, rollouts.reward.nan_to_num())
        self.state["stream"].append(rollouts.prompt_index[::8].tolist())


class Walked(Probe):
    """Keeps what it saw of every batch: prompts, numbers, versions."""

    name = "walked"
    needs = frozenset({"prompt_index"})

    def start(self, run):
        self.state = {"stream": [], "batches": [], "versions": []}

    def observe(self, rollouts, tokens, stats):
        self.state["stream"].append(rollouts.prompt_index[::8].tolist())
        self.state["batches"].append(rollouts.batch)
        self.state["versions"].append(int(rollouts.version[0]))


class Boom(Probe):
    """Fails where it is told to."""

    name = "boom"

    @dataclass(frozen=True)
    class Params(MethodParams):
        where: str = param("driver", "driver, or rank1: in the loss of rank 1")

    def observe(self, rollouts, tokens, stats):
        if self.params.where == "driver" and rollouts.batch > 0:
            raise ValueError("the driver hook went wrong")

    def regularize(self, terms):
        if self.params.where == "rank1" and os.environ.get("RANK") == "1":
            raise ValueError("the loss hook went wrong")
        return 0 * terms.logprobs


class Judge(Probe):
    """An asynchronous judge that withdraws the rewards of short completions."""

    name = "judge"

    async def rewards(self, rollouts):
        return torch.where(rollouts.length < 4, torch.nan, rollouts.reward * 2)


class Halve(Probe):
    """A second method that changes rewards."""

    name = "halve"

    def rewards(self, rollouts):
        return rollouts.reward / 2


class PerToken(Probe):
    """Token advantages, and every third token leaves."""

    name = "per_token"
    needs = frozenset({"tokens"})

    def shape(self, rollouts, tokens):
        return Shape(advantages=tokens.advantages * (1 + tokens.position % 2), keep_tokens=tokens.position % 3 != 2)


class ByPosition(Probe):
    """Token advantages alone."""

    name = "by_position"
    needs = frozenset({"tokens"})

    def shape(self, rollouts, tokens):
        return Shape(advantages=tokens.advantages * (1 + tokens.position % 2))


class Thinned(Probe):
    """Every third token leaves."""

    name = "thinned"
    needs = frozenset({"tokens"})

    def shape(self, rollouts, tokens):
        return Shape(keep_tokens=tokens.position % 3 != 2)


class SpareOfItsOwn(Probe):
    """One more rollout for every prompt, which leaves again."""

    name = "spare_of_its_own"
    keeps_batch_size = True

    def plan(self, plan):
        return plan.replace(rows=tuple(r.replace(spare=1) for r in plan.rows))

    def select(self, rollouts):
        return rollouts.rollout < 8


class Unfilled(Probe):
    """Says that the batch stays full, and takes a row out of it."""

    name = "unfilled"
    keeps_batch_size = True

    def select(self, rollouts):
        return torch.arange(len(rollouts)) != 3


class Steep(Probe):
    """A term that is finite, as its gradient is, which the model's is not, in the batches `first` to `last`."""

    name = "steep"

    @dataclass(frozen=True)
    class Params(MethodParams):
        first: int = param(1, "batch")
        last: int = param(1000, "batch")

    def shape(self, rollouts, tokens):
        batch = torch.full((len(rollouts),), rollouts.batch, dtype=torch.float64)
        return Shape(row_columns={"batch": batch})

    def regularize(self, terms):
        batch = int(terms.columns["batch"].max())
        scale = 1e37 if self.params.first <= batch <= self.params.last else 0.0
        return scale * (terms.logprobs - terms.logprobs.detach())


class Nearly(Probe):
    """In the batch `empty` one row stays of all; in the one behind it none."""

    name = "nearly"

    @dataclass(frozen=True)
    class Params(MethodParams):
        empty: int = param(1, "batch")

    def select(self, rollouts):
        stay = torch.zeros(len(rollouts), dtype=torch.bool)
        stay[0] = rollouts.batch == self.params.empty
        return stay | (rollouts.batch < self.params.empty)


class Stored(Probe):
    """The first group of the first batch comes again in the second, with all that is known of it; of its first rollout
    the second token counts as read."""

    name = "stored"
    needs = {"tokens", "token_ids", "token_versions", "rollout_logprobs"}
    brings = {"off_policy"}
    seen: list = []
    updates: list = []
    losses: list = []

    def plan(self, plan):
        if plan.batch != 1 or plan.round:
            return None
        rows = list(plan.rows)
        rows[0] = rows[0].replace(prompt_index=self.state["prompt"], given=Stored.kept)
        return plan.replace(rows=tuple(rows))

    def observe(self, rollouts, tokens, stats):
        Stored.seen.append((rollouts, tokens))
        if rollouts.batch:
            return
        self.state = {"prompt": int(rollouts.prompt_index[0])}
        Stored.kept = []
        for row in range(8):
            ids = rollouts.token_ids.completion[row].tolist()
            of = tokens.row == row
            given = Completion(
                tuple(ids),
                tuple(tokens.rollout_logprobs[of].tolist()),
                tuple(tokens.version[of].tolist()),
                {"score": float(rollouts.reward[row])},
                tuple(row == 0 and k == 1 for k in range(len(ids))),
            )
            Stored.kept.append(given)
        Stored.kept = tuple(Stored.kept)

    def before_update(self, rows):
        Stored.updates.append(rows)

    def policy_loss(self, terms):
        Stored.losses.append(terms.replace(logprobs=terms.logprobs.detach()))
        return -terms.advantages * terms.logprobs


class Replayed(Stored):
    """The same beside a method that brings the loss."""

    name = "replayed"
    before_update = Method.before_update
    policy_loss = Method.policy_loss


class Squares(Probe):
    """Wants the sum of squared probabilities in the place of every token."""

    name = "squares"
    needs = {"tokens", "token_ids", "sum_squared_probs"}

    def observe(self, rollouts, tokens, stats):
        Squares.seen = (rollouts, tokens)


class Signals(Probe):
    """Keeps what it sees of every batch, with every log-prob there is."""

    name = "signals"
    needs = frozenset({"tokens", "token_ids", "text", "old_logprobs", "rollout_logprobs", "ref_logprobs", "entropies"})

    def start(self, run):
        Signals.seen = []

    def observe(self, rollouts, tokens, stats):
        Signals.seen.append((rollouts, tokens))


class Hinted(Probe):
    """A teacher reads hints of different lengths, in every third row none, and not the rows that leave."""

    name = "hinted"
    needs = frozenset({"tokens", "token_ids", "old_logprobs", "teacher_logprobs", "column:prompt"})

    def select(self, rollouts):
        return rollouts.rollout != 7

    def teacher_prompts(self, rollouts):
        Hinted.prompts = [
            None if i % 3 == 2 else [*prompt, {"role": "user", "content": "=" + "123" * (i % 5)}]
            for i, prompt in enumerate(rollouts.meta["prompt"])
        ]
        return Hinted.prompts

    def observe(self, rollouts, tokens, stats):
        Hinted.seen = (rollouts, tokens)


class Quotes(Probe):
    """Trains on a text of another source, tokenized by the run's tokenizer."""

    name = "quotes"
    needs = {"tokens", "text"}

    def start(self, run):
        self.chat = run.chat

    def plan(self, plan):
        tokens = (*self.chat.encode("21 = 21"), self.chat.eos[0])
        return plan.replace(rows=(plan.rows[0].replace(given=(Completion(tokens),)), *plan.rows[1:]))

    def observe(self, rollouts, tokens, stats):
        Quotes.seen = (rollouts, tokens)


def register() -> None:
    """Lets the registry find the probes, as if a package had brought them."""
    import program_probes

    found = [(m, c) for m in (sys.modules[__name__], program_probes) for c in vars(m).values() if _is_probe(m, c)]
    known: Any = [EntryPoint(c.name, f"{m.__name__}:{c.__name__}", registry.ENTRY_POINT_GROUP) for m, c in found]
    installed = registry._entry_points
    registry._entry_points = lambda: [*installed(), *known]


def _is_probe(module: Any, c: Any) -> bool:
    return isinstance(c, type) and issubclass(c, Probe) and c is not Probe and c.__module__ == module.__name__
