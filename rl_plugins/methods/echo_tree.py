"""ECHO's tree: one rollout of each prompt branches at an uncertain token, and unpromising branches may be cut."""

from __future__ import annotations

from dataclasses import replace

from rl_plugins import Generate, Idle, Method, Program, Prompt, Run, Trajectory, from_params, signals
from rl_plugins.core.requests import BranchOrigin, Generated, Pruned
from rl_plugins.kit.start_checks import refuse_beyond_completion
from rl_plugins.methods.echo.controller import Top, branch_at, penalty, prune_at, statistics
from rl_plugins.methods.echo.params import EchoTreeParams


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

    Source: arXiv 2602.02150; `deepconf_branching.py` and `_generate_sequences_deepconf` in
    `verl/workers/rollout/vllm_rollout/vllm_rollout_spmd.py` of the authors' code.
    """

    name = "echo_tree"
    fidelity = "code"
    does = "Branches one rollout of each prompt at its first uncertain token"
    problems = ("exploration",)
    needs = from_params(lambda p: signals(f"engine:logprobs={p.logprob_top_k}", several_rollouts=p.max_branches > 1))
    brings = from_params(lambda p: signals(forced_tokens=p.max_branches > 1))
    idle = (
        Idle(
            {"branches": 0, "pruned": 0},
            "no rollout branched or was cut. Raise `branch_threshold`, or lower `entropy_low`.",
        ),
    )
    Params = EchoTreeParams

    def check(self, run: Run) -> None:
        if self.params.max_branches > 1:
            most = run.max_completion_length - 1
            refuse_beyond_completion(run, "min_depth", self.params.min_depth, "nothing ever branches", most)

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
