"""ECHO's tree: one rollout of each prompt branches at an uncertain token, and unpromising branches may be cut."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rl_plugins import ConfigError, Generate, Idle, Method, MethodParams, Program, Prompt, Trajectory, param
from rl_plugins.core.params import GIVEN, above
from rl_plugins.core.requests import BranchOrigin, Generated, Pruned
from rl_plugins.methods.echo.controller import Top, branch_at, penalty, prune_at, statistics

_BRANCHES = {"max_branches": above(1)}
_GROUP = (_BRANCHES, {"prune_threshold": GIVEN})
_TAIL, _RISE = {"tail_threshold": GIVEN}, {"delta_upper": GIVEN}
_ENTROPY = (_BRANCHES, _RISE)


class EchoTree(Method):
    """Branches the first rollout of a prompt once, at its first uncertain token; unpromising branches may be cut.

    With p_t the `logprob_top_k` largest probabilities in place t, renormalized:

        H_t   = entropy of p_t
        c_t   = -mean log of the confidence_top_k largest of p_t      # large: sure
        G_t, L_t = mean c of the last group_window, tail_window places (t included, fewer at the start)
        dH_t  = H_t - mean H of the entropy_window places before t (0 at the start)

    Branch at the first t >= min(min_depth, length - 1) with H_t >= entropy_high, G_t <= branch_threshold and dH_t >=
    entropy_delta_threshold, into

        w = min_branches + alpha (H_t - entropy_low) / (entropy_high - entropy_low)
                         - beta (G_t - branch_threshold) / |branch_threshold|      # rounded, min_branches..max_branches

    responses; with w <= 1 it does not branch. The branches start with the w most likely tokens in place t, the sampled
    one included; the other tokens are appended to the common prefix and continued by sampling. Then each response is
    cut after the first place t where

        low_confidence   G_t < prune_threshold
        tail_decline     L_t fell tail_decline_steps times in a row, and L_t <= tail_threshold
        entropy_spike    dH was positive delta_rise_steps times in a row, and dH_t > delta_upper

    (in this order; all three are off by default). The rest of the n rollouts is sampled independently and never cut.

    Symbols: a branch's places count from its branching token on. Its prefix was sampled in exactly its context and
    keeps its log-probs; the branching token was not sampled (kind forced, log-prob NaN). `rollouts.meta` has
    `echo_branch` (its place, None for others), `echo_pruned` (reason or None), `echo_penalty`. A cut response counts as
    truncated.

    Raises:
        ConfigError: a parameter out of range, or one that could never act.

    Source: arXiv 2602.02150; `deepconf_branching.py` and `_generate_sequences_deepconf` in
    `verl/workers/rollout/vllm_rollout/vllm_rollout_spmd.py` of the authors' code.
    """

    name = "echo_tree"
    fidelity = "code"
    does = "Branches one rollout of each prompt at its first uncertain token"
    problems = ("exploration",)
    idle = (
        Idle(
            {"branches": 0, "pruned": 0},
            "no rollout branched or was cut. Raise `branch_threshold`, or lower `entropy_low`.",
        ),
    )

    @dataclass(frozen=True)
    class Params(MethodParams):
        logprob_top_k: int = param(10, "number of most likely tokens that the engine reports", ge=2)
        confidence_top_k: int = param(5, "number of these that make the confidence", ge=1, only_if=(*_GROUP, _TAIL))
        min_depth: int = param(4, "first place that may branch", ge=0, only_if=_BRANCHES)
        entropy_high: float = param(
            1.9, "lowest entropy that branches, below ln logprob_top_k", gt=0, only_if=_BRANCHES
        )
        entropy_low: float = param(0.55, "entropy without extra width", ge=0, only_if={**_BRANCHES, "alpha": above(0)})
        entropy_delta_threshold: float = param(0.2, "smallest rise of the entropy that branches", only_if=_BRANCHES)
        branch_threshold: float = param(
            4.0, "largest G that branches; above ln confidence_top_k", gt=0, only_if=_BRANCHES
        )
        min_branches: int = param(1, "smallest number of branches", ge=1, only_if=_BRANCHES)
        max_branches: int = param(4, "largest number of branches; 1: nothing branches", ge=1)
        alpha: float = param(2.0, "growth of the width with entropy", ge=0, only_if=_BRANCHES)
        beta: float = param(1.0, "growth of the width with lack of confidence", ge=0, only_if=_BRANCHES)
        entropy_window: int = param(4, "places before a token that dH looks at", ge=1, only_if=_ENTROPY)
        group_window: int = param(4, "number of places of G", ge=1, only_if=_GROUP)
        tail_window: int = param(8, "number of places of L", ge=1, only_if=_TAIL)
        prune_threshold: float | None = param(None, "group confidence below which a response is cut; none: never", gt=0)
        tail_threshold: float | None = param(None, "largest L at which a falling tail is cut; none: never", gt=0)
        tail_decline_steps: int = param(3, "places in a row that L must have fallen", ge=1, only_if=_TAIL)
        delta_upper: float | None = param(None, "rise of the entropy above which a response is cut; none: never", ge=0)
        delta_rise_steps: int = param(3, "places in a row that the entropy must have risen", ge=1, only_if=_RISE)

        def check(self) -> None:
            highest, least = math.log(self.logprob_top_k), math.log(self.confidence_top_k)
            if self.confidence_top_k > self.logprob_top_k or self.max_branches > self.logprob_top_k:
                raise ConfigError(
                    f"`logprob_top_k` is {self.logprob_top_k}; `confidence_top_k` ({self.confidence_top_k}) and "
                    f"`max_branches` ({self.max_branches}) are taken from these tokens and cannot be more."
                )
            branches = self.max_branches > 1
            if branches and not self.entropy_low < self.entropy_high < highest:
                raise ConfigError(
                    f"`entropy_low` is {self.entropy_low:g} and `entropy_high` {self.entropy_high:g}; the first must "
                    f"be less, and the second below ln logprob_top_k = {highest:.3g}, the largest there can be: else "
                    f"nothing ever branches. Lower them, or raise `logprob_top_k`."
                )
            if self.min_branches > self.max_branches:
                raise ConfigError(
                    f"`min_branches` is {self.min_branches}, more than `max_branches` ({self.max_branches}). Lower it."
                )
            for name in ("branch_threshold", "prune_threshold", "tail_threshold"):
                value = getattr(self, name)
                if value is not None and value <= least and (branches or name != "branch_threshold"):
                    raise ConfigError(
                        f"`{name}` is {value:g}, but the confidence is never below ln confidence_top_k = {least:.3g}, "
                        f"so it would never act. Give a larger value{' or none' * (name != 'branch_threshold')}."
                    )

    def __init__(self, params: MethodParams | None = None) -> None:
        super().__init__(params)
        self.needs = frozenset({f"engine:logprobs={self.params.logprob_top_k}"})
        self.forces_tokens = self.params.max_branches > 1
        self.min_group_size = 2 if self.params.max_branches > 1 else 1

    def rollout(self, prompt: Prompt) -> Program:
        top_k = self.params.logprob_top_k
        (base,) = yield Generate(prompt.start(), top=top_k)
        first = prompt.start().add(base)
        begun, at = self._branches(prompt, base)
        # a branch that ends with its token has nothing to generate
        open_ = [i for i, t in enumerate(begun) if t.tokens[-1] not in prompt.chat.eos]
        missing = prompt.n - 1 - len(begun)
        asked = [Generate(begun[i], top=top_k) for i in open_]
        asked += [Generate(prompt.start(), n=missing)] if missing else []
        answers: list[list[Generated]] = yield asked
        branches = [replace(t, finish="eos") for t in begun]
        tops: list[Top] = [base.top[at : at + 1]] * len(begun)
        for i, (made,) in zip(open_, answers, strict=False):
            branches[i], tops[i] = begun[i].add(made), [*tops[i], *made.top]
        fresh = answers[-1] if missing else []
        place = len(prompt.start()) + at
        if prompt.traced:
            first = replace(first, origin=BranchOrigin())
            branches = [replace(t, origin=self._origin(base.top, at, place)) for t in branches]
        rows = [self._pruned(first, base.top).noted(echo_branch=None)]
        rows += [self._pruned(t, top).noted(echo_branch=place) for t, top in zip(branches, tops, strict=True)]
        whole = len(first) + sum(map(len, branches))
        self.log("branches", len(branches))
        self.log("pruned", sum(r.meta["echo_pruned"] is not None for r in rows) / len(rows))
        self.log("kept_tokens", sum(map(len, rows)) / whole if whole else 1.0)
        unpruned = {"echo_branch": None, "echo_pruned": None, "echo_penalty": 0.0}
        return rows + [prompt.start().add(made).noted(**unpruned) for made in fresh]

    def _branches(self, prompt: Prompt, base: Generated) -> tuple[list[Trajectory], int]:
        """The beginnings of the branches, up to their branching token, and its place among the generated tokens."""
        found = branch_at(statistics(base.top, self.params), self.params)
        if found is None:
            return [], 0
        at, width = found
        candidates = [token for token, _ in base.top[at][:width]]
        if base.tokens[at] not in candidates:
            candidates = [base.tokens[at], *candidates][:width]
        others = [token for token in candidates if token != base.tokens[at]][: prompt.n - 1]
        prefix = prompt.start().add(base.cut(at))
        return [prefix.force([token]) for token in others], at

    def _origin(self, top: Top, at: int, place: int) -> BranchOrigin:
        """Of a branch, for the trace."""
        entropy = float(statistics(top, self.params).entropy[at])
        return BranchOrigin(0, place, entropy, "entropy of the place")

    def _pruned(self, trajectory: Trajectory, top: Top) -> Trajectory:
        """Cut where a rule says so. `top` belongs to the last tokens."""
        s = statistics(top, self.params)
        found = prune_at(s, self.params)
        if found is None:
            return trajectory.noted(echo_pruned=None, echo_penalty=0.0)
        t, reason = found
        cut = trajectory.cut(len(trajectory) - len(s) + t + 1)
        if trajectory.origin is not None:
            value = float({"entropy_spike": s.delta, "tail_decline": s.tail}.get(reason, s.group)[t])
            tail = Pruned(len(cut), tuple(trajectory.tokens[len(cut) :]), value, reason.replace("_", " "))
            cut = replace(cut, origin=replace(trajectory.origin, pruned=(tail,)))
        return cut.noted(echo_pruned=reason, echo_penalty=penalty(s, t))
