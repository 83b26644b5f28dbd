"""Trees of completions: BranchGRPO's rollouts (arXiv 2509.06040) for language models."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl_plugins import ConfigError, Generate, Idle, Method, MethodParams, Program, Prompt, Run, Trajectory, param
from rl_plugins.core.requests import Generated
from rl_plugins.methods.branch_grpo.trees import COLUMN, note, origins_of, shares


class BranchTextRollout(Method):
    """Samples the rollouts of a prompt as a tree: completions split at given token places, and share what is before.

    Reconstruction: the paper branches denoising steps of images. Splits of completions at token places are ours.

        begin with the prompt's n rollouts in one branch
        for every place b of `places`, in order:
            sample every branch on, up to b tokens
            split a branch of r rollouts into min(children, r) branches of about r / children rollouts each, and at the
            last place into r branches
        sample all branches to their end

    Every token is an ordinary sample of the policy in its context, with its log-prob, so each completion is distributed
    like an independent one.

    Symbols: the depth of a token is the number of splits before it. A node is what a branch samples between two splits.
    Column `branches` of a row: the nodes on its way, one per depth, and where the tokens of each end
    (`rl_plugins.methods.branch_grpo.trees`).

    Special cases: a branch that ends before a split becomes r equal rows, and `branch_advantages` trains one of them.
    Of several places inside a prefix of the plan one split remains, after the prefix. Places beyond the end of a
    completion are not reached. What the engine interrupts goes on. Evaluation samples independent rollouts.

    Raises:
        ConfigError: `places` is empty, does not rise, lies beyond the completion length, or makes too few branches.

    Source: arXiv 2509.06040, carried over to text.
    """

    name = "branch_text_rollout"
    fidelity = "reconstruction"
    does = "Splits completions at given token places, so that rollouts of a prompt form a tree"
    problems = ("few_rollouts",)
    needs = frozenset({"several_rollouts", f"column:{COLUMN}"})
    brings = frozenset({f"column:{COLUMN}"})
    idle = (Idle({"saved": 0}, "no token was shared. Lower `places`, or let completions be longer."),)

    @dataclass(frozen=True)
    class Params(MethodParams):
        places: tuple[int, ...] = param(
            (0, 32, 64, 96), "numbers of tokens of a completion after which it splits", ge=0
        )
        children: int = param(2, "K, number of branches that a split makes", ge=2)

        def check(self) -> None:
            if not self.places or any(b <= a for a, b in itertools.pairwise(self.places)):
                raise ConfigError(
                    f"`places` is {list(self.places)}. It must have at least one place, and they must rise. Give the "
                    f"tokens after which completions split, for example (0, 32, 64, 96)."
                )

    def check(self, run: Run) -> None:
        p = self.params
        if p.places[-1] >= run.max_completion_length:
            raise ConfigError(
                f"`places` has {p.places[-1]}, and a completion has at most {run.max_completion_length} tokens. Give "
                f"places below that (method_params.branch_text_rollout.places)."
            )
        most = p.children ** len(p.places)
        if run.group_size > most:
            raise ConfigError(
                f"{len(p.places)} splits into {p.children} branches make {most} completions, and the run has "
                f"{run.group_size} of a prompt. Give more `places` or `children`, or fewer rollouts per prompt."
            )

    def rollout(self, prompt: Prompt) -> Program:
        start, n = prompt.start(), prompt.n
        if not prompt.training:
            made = yield Generate(start, n=n)
            return [start.add(g) for g in made]
        places = sorted({max(b, len(start)) for b in self.params.places})
        open_, ended = [_Branch(start, n, (0,), (len(start),))], list[_Branch]()
        numbers = itertools.count(1)
        if places[0] > len(start):
            made = yield Generate(start, max_tokens=places[0] - len(start))
            open_ = yield from resumed([open_[0].grown(made[0])], places[0])
        for place, until in itertools.zip_longest(places, places[1:]):
            ended += [b for b in open_ if not reached(b, place, prompt)]
            open_ = [b for b in open_ if reached(b, place, prompt)]
            widths = [min(self.params.children, b.rollouts) if until else b.rollouts for b in open_]
            asked = [
                Generate(b.trajectory, n=k, max_tokens=None if until is None else until - place)
                for b, k in zip(open_, widths, strict=True)
            ]
            answers: list[list[Generated]] = yield asked
            begun = [
                b.split(next(numbers), share).grown(g)
                for b, made in zip(open_, answers, strict=True)
                for g, share in zip(made, shares(b.rollouts, len(made)), strict=True)
            ]
            open_ = yield from resumed(begun, until)
        return self._rows(sorted(ended + open_, key=lambda b: b.nodes), len(start), prompt.traced)

    def _rows(self, leaves: Sequence[_Branch], prefix: int, traced: bool) -> list[Trajectory]:
        """One row per rollout, with its way."""
        of_row = [b for b in leaves for _ in range(b.rollouts)]
        rows = [b.trajectory.noted(**{COLUMN: note(b.nodes, b.stops)}) for b in of_row]
        if traced:
            origins = origins_of([b.nodes for b in of_row], [b.stops for b in of_row])
            rows = [replace(row, origin=origin) for row, origin in zip(rows, origins, strict=True)]
        ways = [zip(b.nodes, (prefix, *b.stops[:-1]), b.stops, strict=True) for b in leaves]
        sampled = {node: stop - begin for way in ways for node, begin, stop in way}
        tokens = sum(len(row) - prefix for row in rows)
        self.log("leaves", len(leaves))
        self.log("copies", 1 - len(leaves) / len(rows))
        self.log("saved", 1 - sum(sampled.values()) / tokens if tokens else 0.0, weight=tokens)
        return rows


@dataclass(frozen=True)
class _Branch:
    """A completion in the making, and how many rollouts it stands for.

    Attributes:
        nodes, stops: of its way from the root on.
    """

    trajectory: Trajectory
    rollouts: int
    nodes: tuple[int, ...]
    stops: tuple[int, ...]

    def left(self, until: int | None) -> int | None:
        """Tokens up to a place; None: to the end."""
        return None if until is None else until - len(self.trajectory)

    def split(self, node: int, rollouts: int) -> _Branch:
        """A child that has no token yet."""
        return _Branch(self.trajectory, rollouts, (*self.nodes, node), (*self.stops, len(self.trajectory)))

    def grown(self, made: Generated) -> _Branch:
        """With what was sampled for its last node."""
        longer = self.trajectory.add(made)
        return _Branch(longer, self.rollouts, self.nodes, (*self.stops[:-1], len(longer)))


def resumed(branches: Sequence[_Branch], until: int | None) -> Generator[Any, Any, list[_Branch]]:
    """Goes on with branches that the engine interrupted, up to `until` tokens, as long as it makes any."""
    found = list(branches)
    waiting = list(range(len(found)))
    while waiting := [i for i in waiting if found[i].trajectory.finish == "abort" and found[i].left(until) != 0]:
        answers: list[list[Generated]] = yield [
            Generate(found[i].trajectory, max_tokens=found[i].left(until)) for i in waiting
        ]
        for i, (made,) in zip(waiting, answers, strict=True):
            found[i] = found[i].grown(made)
        waiting = [i for i, (made,) in zip(waiting, answers, strict=True) if made.tokens]
    return found


def reached(branch: _Branch, place: int, prompt: Prompt) -> bool:
    """Whether a branch goes on after this place."""
    t = branch.trajectory
    return len(t) == place and t.finish != "eos" and prompt.room(t) > 0
