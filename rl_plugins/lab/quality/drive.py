"""One batch of a world through the real classes: plan, rounds, selection, advantages, loss; out comes a gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.estimators import Scale, batch_std, grpo_advantages
from rl_plugins.core.losses import TRL_AGGREGATION, aggregate, ppo_clip, weighted_logprob
from rl_plugins.core.rollouts import PlanRow, Rollouts, Rows, Terms, TokenIds, Tokens, TurnTable, weighted_reward
from rl_plugins.kit.masked import MASKED_OPTIONS, MaskedOptions
from rl_plugins.lab.quality.programs import Player
from rl_plugins.runtime import update
from rl_plugins.runtime.decide import Decision, decide
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.rounds import Rounds, in_rounds
from rl_plugins.runtime.stack import build_stack
from rl_plugins.testing.data import make_rollouts, make_run
from rl_plugins.tools.gradient_quality import Answers, ExactWorld

Params = Mapping[str, Mapping[str, Any]]
FOREVER = 10**9  # batches of the run: schedules stay where they begin
CLIP, CISPO_MAX, TIS_MAX = 0.2, 5.0, 2.0  # of TRL; of its papers and examples; of verl's examples
NOW = 1000  # the newest version


@dataclass(frozen=True)
class QualityVariant:
    """Methods, and what the host does.

    Args:
        label: its name on the page.
        methods: name -> parameters, in order; empty: the host alone.
        group: rollouts per prompt that are trained.
        scale: of the host's advantages: GRPO's, or the mean and deviation of the batch ("reinforce").
        loss: TRL's `loss_type`.
        old: policy of the old log-probs; none: that of the world. "trained" makes every ratio of the loss 1.
        tis: the host weights tokens by the truncated ratio to the policy that sampled.
        warm: epochs before the measurement, for methods that remember prompts.
        times, longer: in training, as many times the rollouts of a step, and as many times the steps.
    """

    label: str
    methods: Params = field(default_factory=dict)
    group: int = 8
    scale: Scale | Literal["reinforce"] = "group"
    loss: str = "dapo"
    old: Literal["trained", "sampled"] | None = None
    tis: bool = False
    warm: float = 0
    times: int = 1
    longer: int = 1


@dataclass(frozen=True)
class Estimate:
    """What one batch made.

    Attributes:
        gradient: (dims,) of ascent, learning-rate factors included.
        generated: rollouts. tokens: of all of them. signal: rows that are trained with an advantage.
        advantages: (rows,), NaN where one is not trained. group: (rows,).
    """

    gradient: NDArray[np.float64]
    generated: int
    tokens: int
    signal: int
    advantages: NDArray[np.float64]
    group: NDArray[np.int64]


class _Dataset:
    """The columns of a world."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self._columns, self.column_names = columns, list(columns)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, key: Any) -> Any:
        return self._columns[key] if isinstance(key, str) else {n: v[key] for n, v in self._columns.items()}


class Driver:
    """A run of a variant in a world, whose policy never changes.

    Args:
        rollouts: trained rows of a batch.
        seed: of prompts, rollouts and methods.
        batches: of the run, for schedules; by default they stay where they begin.

    Raises:
        ConfigError: the methods do not fit this world.
    """

    def __init__(
        self, world: ExactWorld, variant: QualityVariant, rollouts: int, seed: int, batches: int = FOREVER
    ) -> None:
        self.variant = variant
        self.stack = build_stack(list(variant.methods), dict(variant.methods), seed)
        options: dict[str, Any] = {}
        for m in self.stack.methods:
            options |= m.host_options.get("trl", {})
        if of_masks := {k: v for k, v in options.items() if k in MASKED_OPTIONS}:
            world = replace(world, options=MaskedOptions(**of_masks))  # type: ignore[type-var]  # a `Masked`
        self.world = world
        self.rng = np.random.default_rng([seed, rollouts])
        self.prompts = len(world.pass_rate)
        self.count = rollouts // variant.group
        columns = {"prompt": [f"question {i}" for i in range(self.prompts)], **world.columns}
        self.dataset = _Dataset(columns)
        self.budget = self.count * variant.group * self.stack.rows_per_rollout
        brought = set[str]().union(*(m.brings for m in self.stack.methods))
        if lacks := [
            n for n in self.stack.needs - brought if n.startswith("column:") and n[7:] not in (*columns, "agent")
        ]:
            raise ConfigError(f"{world.name} has no {', '.join(sorted(lacks))}, which {variant.label} needs.")
        if world.entropies is None and (self.stack.reads_tokens or self.stack.claimed("policy_loss", "regularize")):
            raise ConfigError(f"{world.name} has rows without tokens, and {variant.label} reads tokens.")
        if "current_entropies" in self.stack.needs and world.entropy_scores is None:
            raise ConfigError(f"{variant.label} needs the gradient of entropies, which {world.name} does not have.")
        run = make_run(
            dataset=self.dataset,
            dataset_size=self.prompts,
            columns=tuple(columns),
            reward_names=tuple(world.reward_names),
            group_size=variant.group,
            total_steps=batches,
            total_batches=batches,
            max_completion_length=world.max_length,
            batch_rows=self.budget,
            rows_per_update=self.budget,
            keeps_versions=True,
        )
        self.stack.check(run)
        self.stack.start(run)
        self.player = Player(self.stack, world, seed) if self.stack.claims["rollout"] else None
        self.notes: Mapping[str, Any] = {}
        self.scale = options.get("scale_rewards", variant.scale)
        self.loss = options.get("loss_type", variant.loss)
        asked = {m.old_policy for m in self.stack.methods} - {"host"}
        theirs = "sampled" if "generating" in asked else "trained"
        self.old = variant.old or (theirs if asked else world.old)

    def batch(self, measured: bool = True) -> Estimate:
        """The next batch; without its gradient unless it is `measured`."""
        planned, answers = self._generate()
        generated = len(planned)
        if "column:agent" in self.stack.needs:
            planned, answers, self.notes = by_agent(planned, answers)
        rollouts = self._rollouts(planned, answers)
        tokens = self._tokens(rollouts, answers) if self.stack.reads_tokens else None
        decision = decide(self.stack, rollouts, tokens, None, self._host_advantages, self.budget)
        self.stack.stats.update(combine([self.stack.metrics.take()]))
        gradient = self._gradient(decision, answers) if measured else np.zeros(self.world.scores.shape[1])
        signal = decision.trained & (decision.row_advantages != 0)
        advantages = torch.where(decision.trained, decision.row_advantages, torch.nan).numpy()
        group = decision.rollouts.group.numpy()
        return Estimate(gradient, generated, int(answers.length.sum()), int(signal.sum()), advantages, group)

    def warm(self) -> None:
        """Batches before the measurement."""
        for _ in range(int(np.ceil(self.variant.warm * self.prompts / self.count))):
            self.batch(measured=False)

    def _generate(self) -> tuple[list[PlanRow], Answers]:
        """The plan row of each rollout, group by group, and the rollouts."""
        stack, v = self.stack, self.variant
        epochs, rest = divmod(self.count, self.prompts)
        proposal = [*range(self.prompts)] * epochs + self.rng.choice(self.prompts, rest, replace=False).tolist()
        plan = first_plan(stack, proposal, v.group, self.budget, self.prompts, self.dataset)
        rounds = Rounds(stack, plan.rows, v.group, self.budget, self.prompts) if in_rounds(stack) else None
        rows, planned, parts = plan.rows, list[PlanRow](), list[Answers]()
        while rows:
            if any(r.given or r.prefix or r.edit or r.max_tokens or r.max_turns for r in rows):
                raise ConfigError(f"{v.label} plans completions, prefixes, edits or limits, and no world obeys them.")
            if self.player is not None:
                planned, answers, self.notes = self.player.play(rows)
                return planned, answers
            new = [r for r in rows for _ in range(r.n + r.spare)]
            planned += new
            parts.append(self.world.draw(_numbers(new, "prompt_index"), _numbers(new, "group"), self.rng))
            if rounds is None:
                break
            told = self._weighted(np.concatenate([part.rewards for part in parts]))
            rows = rounds.more(torch.from_numpy(_numbers(planned, "group")), told)
        order = np.argsort(_numbers(planned, "group"), kind="stable")
        return [planned[i] for i in order.tolist()], _joined(parts, order)

    def _weighted(self, rewards: NDArray[np.float64]) -> Tensor:
        return weighted_reward(torch.from_numpy(rewards), torch.tensor(self.world.reward_weights).double())

    def _rollouts(self, planned: list[PlanRow], answers: Answers) -> Rollouts:
        stack, more = self.stack, dict[str, Any]()
        group, prompt = _numbers(planned, "group"), _numbers(planned, "prompt_index")
        if {"text", "raw_text"} & stack.needs:
            texts = self.world.texts(prompt, answers)
            more |= {name: texts for name in ("text", "raw_text") if name in stack.needs}
        columns = [need[7:] for need in stack.needs if need.startswith("column:")]
        of_dataset = {
            n: [self.dataset[n][p] for p in prompt.tolist()] for n in columns if n in self.dataset.column_names
        }
        more["meta"] = {**of_dataset, **self.notes}
        if "token_ids" in stack.needs:
            pieces = torch.from_numpy(answers.piece)
            one = [torch.tensor([p]) for p in prompt.tolist()]
            more["token_ids"] = TokenIds.cat(one, [p[m] for p, m in zip(pieces, answers.mask, strict=True)])
        if answers.age is not None:
            more |= {"version": torch.from_numpy(NOW - answers.age), "current_version": NOW}
        made = make_rollouts(
            answers.rewards,
            group.tolist(),
            weights=self.world.reward_weights,
            lengths=answers.length.tolist(),
            prompt_index=prompt.tolist(),
            payload=[row.payload for row in planned],
            batch=stack.batch,
            **more,
        ).replace(reward_names=tuple(self.world.reward_names))
        if answers.index is not None:
            index = torch.from_numpy(answers.index)
            begun = torch.cumsum(index == 0, 0)
            first = made.groups.rows(made.groups.min(begun.double())).long()
            made = made.replace(index=index, rollout=begun - first)
        return made.replace(turns=_turns(answers)) if "turns" in stack.needs else made

    def _old(self, answers: Answers) -> NDArray[np.float64]:
        found = answers.sampled if self.old == "sampled" else answers.logprobs
        assert found is not None
        return found

    def _tokens(self, rollouts: Rollouts, answers: Answers) -> Tokens:
        """As a host gives them to a stack that reads them."""
        world, mask = self.world, answers.mask
        row, position = (torch.from_numpy(x) for x in mask.nonzero())
        piece = answers.piece[mask]
        assert answers.logprobs is not None and answers.sampled is not None
        assert world.entropies is not None and world.sum_squared_probs is not None

        def token(values: NDArray[Any]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).float()

        return Tokens(
            row=row,
            position=position,
            turn=torch.arange(len(row)) if "turns" in self.stack.needs else None,
            advantages=torch.zeros(len(row), dtype=torch.float64),
            keep=torch.ones(len(row), dtype=torch.bool),
            forced=torch.from_numpy(np.zeros_like(mask) if answers.forced is None else answers.forced)[mask],
            version=rollouts.version[row],
            old_logprobs=token(self._old(answers)[mask]),
            rollout_logprobs=token(answers.sampled[mask]),
            ref_logprobs=token(answers.logprobs[mask]),
            entropies=token(world.entropies[piece]),
            sum_squared_probs=token(world.sum_squared_probs[piece]),
        )

    def _host_advantages(self, rollouts: Rollouts) -> Tensor:
        if self.scale == "reinforce":
            reward = rollouts.reward
            return ((reward - reward.nanmean()) / (batch_std(reward) + 1e-4)).nan_to_num(0.0)
        return grpo_advantages(rollouts, self.scale)

    def _gradient(self, decision: Decision, answers: Answers) -> NDArray[np.float64]:
        """Of the loss on the rows that are trained, as the host aggregates it."""
        take = decision.trained.numpy()
        if not take.any():
            return np.zeros(self.world.scores.shape[1])
        terms, scale = self._terms(decision, answers, take)
        stack = self.stack
        own, parts = update.regularizer(stack, terms), list[Tensor]()
        if stack.claims["policy_loss"]:
            surrogate = update.surrogate(stack, terms)
            own = surrogate if own is None else own + surrogate
        else:
            parts.append(self._mean(self._host_loss(terms), terms))
        if own is not None:
            adds_up = stack.aggregation == "sum"
            parts.append(update.masked_sum(own, terms.mask) if adds_up else self._mean(own, terms))
        loss = torch.stack(parts).sum()
        stack.metrics.take()
        mask, piece = (terms.mask > 0).numpy(), answers.piece[take]
        leaves = [terms.logprobs] if terms.entropies is None else [terms.logprobs, terms.entropies]
        slope, *more = torch.autograd.grad(loss, leaves)
        weight = slope.numpy()[mask]
        if answers.logprobs is None and TRL_AGGREGATION[self.loss] == "seq-mean-token-mean":
            weight = weight / answers.length[take]  # a row is one place here, whatever its length
        made = weight @ self.world.scores[piece[mask]]
        for of_entropies in more:
            made = made + of_entropies.numpy()[mask] @ self.world.entropy_scores[piece[mask]]  # type: ignore[index]
        return -scale * made.astype(np.float64)

    def _terms(self, decision: Decision, answers: Answers, take: NDArray[np.bool_]) -> tuple[Terms, float]:
        """The rows that are trained as one micro-batch, and the factor on the learning rate."""
        mask = torch.from_numpy(answers.mask)

        def padded(flat: Tensor) -> Tensor:
            out = torch.zeros(mask.shape, dtype=flat.dtype)
            out[mask] = flat
            return out[rows]

        rows = torch.from_numpy(take.nonzero()[0])
        live = mask[rows] if decision.keep_tokens is None else padded(decision.keep_tokens)
        known = answers.logprobs is not None  # where pieces are whole rows, every ratio is 1
        zero = np.zeros(answers.piece.shape)
        given = (answers.logprobs, answers.sampled, self._old(answers)) if known else (zero, zero, zero)
        now, sampled, old = (torch.from_numpy(np.asarray(x))[rows].double() for x in given)
        sampled = torch.where(torch.isnan(sampled), old, sampled)
        if decision.old_logprobs is not None:
            old = padded(decision.old_logprobs).double()
        flat, rowwise = decision.advantages, decision.row_advantages[rows][:, None].expand(live.shape)
        r, stack = decision.rollouts, self.stack
        of_rows = Rows(
            group=r.group[rows],
            length=live.sum(1),
            columns={k: v[rows].double() for k, v in decision.row_columns.items()},
            version=r.version[rows],
            newest_version=r.newest_version[rows],
            current_version=r.current_version,
            logprobs=update.row_sums(now, live),
            old_logprobs=update.row_sums(old, live),
            rollout_logprobs=update.row_sums(sampled, live),
        )
        asked = update.before_update(stack, [of_rows], 0)
        columns = {k: v[rows][:, None] for k, v in decision.row_columns.items()}
        columns |= {k: padded(v) for k, v in decision.token_columns.items()}
        columns |= {k: v[:, None] for k, v in asked.columns.items()}
        weight = 1 if answers.weight is None else torch.from_numpy(answers.weight)[rows]
        terms = Terms(
            mask=live * weight,
            logprobs=now.requires_grad_(),
            advantages=rowwise if flat is None else padded(flat),
            old_logprobs=old,
            rollout_logprobs=sampled,
            ref_logprobs=now.detach(),
            entropies=self._entropies(answers.piece[take]),
            columns=columns,
            num_tokens=(live.sum() if known else r.length[rows].sum()).double(),
            num_rows=torch.tensor(float(len(rows)), dtype=torch.float64),
            max_length=self.world.max_length,
            versions=r.version[rows][:, None].expand(live.shape),
            current_version=r.current_version,
        )
        return terms, asked.lr_scale

    def _mean(self, per_token: Tensor, terms: Terms) -> Tensor:
        """Of a loss, as the host takes it."""
        return aggregate(
            per_token,
            terms.mask,
            TRL_AGGREGATION[self.loss],
            num_tokens=terms.num_tokens,
            num_rows=terms.num_rows,
            max_length=terms.max_length,
        )

    def _entropies(self, piece: NDArray[np.int64]) -> Tensor | None:
        if "current_entropies" not in self.stack.needs:
            return None
        assert self.world.entropies is not None
        return torch.from_numpy(self.world.entropies[piece]).requires_grad_()

    def _host_loss(self, terms: Terms) -> Tensor:
        now, old, advantages = terms.logprobs, terms.old_logprobs, terms.advantages
        if self.loss == "cispo":
            return weighted_logprob(now, torch.exp(now - old).clamp(max=CISPO_MAX), advantages)
        if self.variant.tis:
            assert terms.rollout_logprobs is not None
            advantages = advantages * torch.exp(old - terms.rollout_logprobs).clamp(max=TIS_MAX)
        return ppo_clip(now, old, advantages, CLIP, CLIP)


def _numbers(rows: list[PlanRow], name: str) -> NDArray[np.int64]:
    return np.array([getattr(r, name) for r in rows], dtype=np.int64)


def _joined(parts: list[Answers], order: NDArray[np.int64]) -> Answers:
    names = Answers.__dataclass_fields__
    given = {n: [getattr(p, n) for p in parts] for n in names if getattr(parts[0], n) is not None}
    return Answers(**{n: np.concatenate(values)[order] for n, values in given.items()})


def by_agent(planned: list[PlanRow], answers: Answers) -> tuple[list[PlanRow], Answers, dict[str, list[str]]]:
    """A row for the main agent of a rollout, and one for each call of its sub-agent: tokens in a row that it made. The
    reward of a call is 1: it was well-formed. The column `agent` names the agent of a row."""
    if answers.helper is None:
        raise ConfigError("This world has no sub-agents.")
    begins = answers.helper & ~np.pad(answers.helper, ((0, 0), (1, 0)))[:, :-1]
    call = np.where(answers.helper, begins.cumsum(1), 0)  # 0: the main agent
    rows = call.max(1) + 1
    of = np.repeat(np.arange(len(call)), rows)
    index = np.arange(len(of)) - (rows.cumsum() - rows)[of]
    split = _joined([answers], of)
    mask = split.mask & (call[of] == index[:, None])
    rewards = np.where(index[:, None] == 0, split.rewards, 1.0)
    made = replace(split, mask=mask, length=mask.sum(1), rewards=rewards, index=index)
    return [planned[i] for i in of], made, {"agent": ["sub" if i else "main" for i in index]}


def _turns(answers: Answers) -> TurnTable:
    """Every token is a turn."""
    if answers.state is None or answers.turn_reward is None:
        raise ConfigError("This world has no turns.")
    row, turn = answers.mask.nonzero()
    return TurnTable(
        row=torch.from_numpy(row),
        turn=torch.from_numpy(turn),
        anchor=answers.state[answers.mask].tolist(),
        reward=torch.from_numpy(answers.turn_reward[answers.mask]).double(),
        valid=torch.ones(len(row), dtype=torch.bool),
    )
