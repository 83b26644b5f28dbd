"""Rollout replay of DOTS + RR (arXiv 2506.05316): part of every batch consists of groups of earlier batches."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_plugins import Groups, Idle, Method, MethodError, MethodParams, from_params, param
from rl_plugins.core.groups import places
from rl_plugins.core.params import below
from rl_plugins.core.rollouts import Completion, Plan, PlanRow, Rollouts, Run, Tokens
from rl_plugins.methods.rollout_replay.buffer import Buffer

REPLAYS = {"fresh_share": below(1)}


class RolloutReplay(Method):
    """Generates only the share sigma of a batch; the rest are groups of earlier batches, drawn from a buffer.

    From generation batch `start_batch` on, of the B rows a batch trains:

        replayed = groups drawn from the buffer, uniformly without replacement, of (1 - sigma) B rows at most
        fresh    = the first prompts of the plan, for the rows that are left

    and when the batch is done, for each of its fresh groups:

        the older group of the same prompt leaves the buffer
        it enters the buffer if it is whole and the rewards of its rollouts differ
        of more than `buffer_groups` groups the oldest leave

    A replayed group brings its tokens, the log-probs of the policy that made them, their versions and its rewards. It
    is not scored again; its advantages are computed with those of the batch. The loss must correct for the older
    policy, as `decoupled_ppo` does; else the run warns.

    Symbols: sigma = `fresh_share`; rows are rollouts. Log-probs float32 in nats, rewards (rollouts, functions) float64;
    versions as in `Rollouts.version`.

    Special cases: a group is whole if as many rollouts stayed (`select`) as the host trains per prompt. Other groups
    are not stored, and not drawn after a resume with another group size. If there are fewer usable groups than wanted,
    fresh prompts fill the batch. Of several groups of one prompt the last storable one is stored. Tokens that were only
    read are replayed as such. A group is not stored (`unstorable`) if it has a token of unknown sampling probability,
    an empty rollout, or a prompt outside the dataset. Rollouts of several rows, or with turns that a method compares,
    are not stored either.

    `max_staleness` limits the age in the batch that is expected to train the group: the weights known when it is
    planned, plus those the last publication added, plus the largest delay seen so far between the two. The delay is 0
    except in verl's asynchronous modes, where the first `num_warmup_batches` batches may exceed the limit by it.

    State: the groups, as tensors, and the delay; the draw is from `self.rng`.

    Raises:
        MethodError: the prompt of a replayed group is not the one that its rollouts answered.

    Source: arXiv 2506.05316 and rl_training/verl/verl/trainer/ppo/ray_trainer.py of the authors' code (select_buffer).
    """

    name = "rollout_replay"
    fidelity = "paper"
    does = "Generates part of each batch and replays stored groups of earlier batches for the rest"
    problems = ("long_tail", "few_prompts")
    idle = (Idle({"replayed": 0}, "no stored group was replayed. Look at `stored`, `unstorable`, `max_staleness`."),)

    @dataclass(frozen=True)
    class Params(MethodParams):
        fresh_share: float = param(0.5, "sigma, share of a batch's rows that is generated; 1: no replay", gt=0, le=1)
        buffer_groups: int = param(512, "most groups in the buffer; the oldest leave", ge=1, only_if=REPLAYS)
        max_staleness: int | None = param(
            None, "largest age of a group in its batch, in weights", ge=1, only_if=REPLAYS
        )
        start_batch: int = param(2, "first batch with replay, from 0", ge=1, only_if=REPLAYS)

    _group_size = 0

    @from_params
    def needs(self) -> set[str]:
        signals = {"prompt_index", "tokens", "token_ids", "token_versions", "rollout_logprobs"}
        return signals if "off_policy" in self.brings else set()

    @from_params
    def brings(self) -> set[str]:
        return {"off_policy"} if self.params.fresh_share < 1 else set()

    def start(self, run: Run) -> None:
        self._group_size = run.group_size

    def plan(self, plan: Plan) -> Plan | None:
        p = self.params
        if p.fresh_share == 1 or plan.batch < p.start_batch or "groups" not in self.state or not plan.first:
            return None
        total = plan.trained or plan.budget
        stored = Buffer.of_state(self.state["groups"])
        chosen = self._drawn(stored, plan.group_size, int((1 - p.fresh_share) * total + 1e-6))
        rows, room = list(plan.rows), total - int(stored.rollouts[chosen].sum())
        numbers = []  # of groups that are replaced
        while sum(row.n for row in rows) > room:
            numbers.append(rows.pop(max(i for i, row in enumerate(rows) if row.n > 0)).group)
        free = max([row.group for row in plan.rows], default=-1) + 1
        numbers = [*reversed(numbers), *range(free, free + len(chosen))]
        rows += [self._planned(stored, i, number) for i, number in zip(chosen, numbers, strict=False)]
        return plan.replace(rows=tuple(rows))

    def select(self, rollouts: Rollouts) -> Tensor:
        """Keeps everything, if the prompts of replayed groups are those their rollouts answered."""
        ids = rollouts.token_ids
        for row, mark in enumerate(rollouts.marks(self.name)):
            if mark is not None and ids is not None and _digest(ids.prompt[row]) != mark[0]:
                raise MethodError(
                    f"prompt {int(rollouts.prompt_index[row])} is not the one that the stored rollouts answered, so "
                    f"their log-probs are of another text. Something edits prompts differently from batch to batch (a "
                    f"method, or a template with a date); remove it, or remove `{self.name}`."
                )
        return torch.ones(len(rollouts), dtype=torch.bool)

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        p = self.params
        if p.fresh_share == 1:
            return
        now, marks = rollouts.current_version, rollouts.marks(self.name)
        replayed = torch.tensor([m is not None for m in marks], dtype=torch.bool) & rollouts.kept
        if bool(rollouts.kept.any()):
            self.log("replayed", replayed[rollouts.kept].double().mean())
        if bool(replayed.any()):
            age = rollouts.staleness[replayed].double()
            self.log("staleness", age.mean())
            self.log("oldest", age.max(), "max")
        made, prompts = self._made(rollouts, tokens, rollouts.kept & ~replayed)
        stored = (
            Buffer.of_state(self.state["groups"]) if "groups" in self.state else Buffer.empty(made.rewards.shape[1])
        )
        again = (made.prompt[:, None] == made.prompt).triu(1).any(1)  # a later group of this batch has its prompt
        stored = stored.keep(~torch.isin(stored.prompt, prompts)).add(made.keep(~again))
        stays = torch.arange(len(stored)) >= len(stored) - p.buffer_groups
        if p.max_staleness is not None:
            stays &= now - stored.version <= p.max_staleness
        stored = stored.keep(stays).compact()
        # batches between two publications add none, and the next one is trained after a publication all the same
        pace = max(0, now - self.state.get("now", now - 1)) or self.state.get("pace", 0)
        delay = max([self.state.get("delay", 0), *(now - m[1] for m in marks if m is not None)])
        names = list(rollouts.reward_names)
        self.state = {"groups": stored.state(), "names": names, "now": now, "pace": pace, "delay": delay}
        self.log("stored", len(stored))

    def _drawn(self, stored: Buffer, size: int, room: int) -> list[int]:
        """Stored groups of this size, of at most so many rows together."""
        fit = stored.rollouts == size
        if self.params.max_staleness is not None:
            fit &= self._next() + self.state["delay"] - stored.version <= self.params.max_staleness
        places = fit.nonzero()[:, 0]
        order = torch.from_numpy(self.rng("replay").permutation(len(places)))
        chosen: list[int] = places[order][: room // size].tolist()
        return chosen

    def _next(self) -> int:
        """The weights that a batch planned now trains if nothing delays it."""
        return int(self.state["now"] + self.state["pace"])

    def _planned(self, stored: Buffer, group: int, number: int) -> PlanRow:
        """A stored group as a row of the plan."""
        names = self.state["names"]
        given = tuple(
            Completion(
                tokens=_listed(c["tokens"]),
                logprobs=_listed(c["logprobs"]),
                versions=_listed(c["versions"]),
                rewards=dict(zip(names, c["rewards"].tolist(), strict=True)),
                observed=_listed(c["observed"]) if bool(c["observed"].any()) else None,
            )
            for c in stored.completions(group)
        )
        row = PlanRow(int(stored.prompt[group]), number, len(given), given=given)
        return row.marked(self.name, (int(stored.question[group]), self._next()))

    def _one_row_each(self, rollouts: Rollouts) -> Tensor:
        """(rows,) bool: rows that a given completion can be; a group of others is not stored."""
        one = rollouts.groups.rows(rollouts.groups.max(rollouts.index.double())) == 0
        if rollouts.turns is not None:
            one = torch.zeros_like(one)
        if not bool(one.all()):
            what = "several rows" if rollouts.turns is None else "turns that a method of this run compares"
            self.warn(
                f"rollouts with {what} are not replayed, because a stored completion is one row and has no turns."
            )
        return one

    def _made(self, rollouts: Rollouts, tokens: Tokens, fresh: Tensor) -> tuple[Buffer, Tensor]:
        """The fresh groups that are stored, and the prompts of all fresh ones."""
        ids = rollouts.token_ids
        assert ids is not None and tokens.rollout_logprobs is not None and tokens.version is not None  # in `needs`
        if not bool(fresh.any()):
            return Buffer.empty(rollouts.rewards.shape[1]), torch.zeros(0, dtype=torch.int64)
        length, start = ids.completion.length, ids.completion.offsets[:-1]
        row = torch.repeat_interleave(torch.arange(len(length)), length)
        place = start[tokens.row] + tokens.position
        logprobs = torch.full((len(row),), torch.nan)
        logprobs[place] = torch.where(tokens.forced, torch.nan, tokens.rollout_logprobs.float())
        version = rollouts.version[row]
        version[place] = tokens.version
        observed = ids.observed.values
        unknown = torch.bincount(row, (~observed & ~torch.isfinite(logprobs)).double(), minlength=len(length))
        sampled = torch.bincount(row, (~observed).double(), minlength=len(length))
        whole = (unknown == 0) & (sampled > 0) & (rollouts.prompt_index >= 0) & self._one_row_each(rollouts)

        rows = fresh.nonzero()[:, 0]
        groups, reward = Groups(rollouts.group[rows]), rollouts.reward[rows]
        rows, place = rows[order := torch.sort(groups.index, stable=True).indices], groups.index[order]
        storable = (groups.min(whole[fresh].double()) > 0) & (groups.size == self._group_size)
        stored = storable & (groups.max(reward) > groups.min(reward))
        self._log_made(storable, stored)
        prompts = rollouts.prompt_index[rows]

        rows, place = rows[stored[place]], place[stored[place]]
        lengths, rollouts_of = length[rows], groups.size[stored]
        first = torch.cumsum(rollouts_of, 0) - rollouts_of  # rollout of each group
        tokens_of = torch.bincount(place, lengths.double(), minlength=groups.count).long()[stored]
        where = torch.repeat_interleave(start[rows], lengths) + places(lengths)
        numbers = torch.stack([ids.completion.values[where], version[where], observed[where].long()]).int()
        oldest = groups.min(rollouts.version[fresh].double()).long()
        return Buffer(
            prompt=rollouts.prompt_index[rows[first]],
            question=torch.tensor([_digest(ids.prompt[r]) for r in rows[first].tolist()], dtype=torch.int64),
            version=oldest[stored],
            rollouts=rollouts_of,
            store=torch.zeros_like(rollouts_of),
            start=torch.cumsum(tokens_of, 0) - tokens_of,
            lengths=lengths,
            rewards=rollouts.rewards[rows],
            # the log-prob of a token that was only read is not read either
            stores=({"numbers": numbers, "logprobs": logprobs[where].clamp(max=0.0).nan_to_num(nan=0.0)},),
        ), prompts

    def _log_made(self, storable: Tensor, stored: Tensor) -> None:
        self.log("unstorable", (~storable).double().mean())
        self.log("constant", (storable & ~stored).double().mean())


def _listed(values: Tensor) -> tuple[Any, ...]:
    return tuple(values.numpy().tolist())  # torch's own takes several times as long


def _digest(prompt: Tensor) -> int:
    return zlib.crc32(prompt.long().contiguous().numpy().tobytes())
