"""LATR (arXiv 2510.24302): rollouts branch where the policy is unsure, and branches that stay similar are pruned."""

from __future__ import annotations

from dataclasses import replace

from rl_plugins import ConfigError, Generate, Idle, Method, Plan, Program, Prompt, Run, from_params
from rl_plugins.core.params import has_effect
from rl_plugins.core.requests import BranchOrigin
from rl_plugins.kit.start_checks import refuse_beyond_completion
from rl_plugins.methods.latr.params import LatrParams
from rl_plugins.methods.latr.tree import grow


class Latr(Method):
    """Makes the rollouts of a prompt with a lookahead tree instead of n independent samples.

    Of n rollouts k = round(n eta) come from the tree (half to even), the others are sampled. p_1 >= ... >= p_m are the
    probabilities of the most likely tokens at temperature 1. For each place s from 0 on

        1. every row that has not ended takes its most likely token, and for j = 2..m token j opens a branch if
               p_j > tau_abs  and  p_1 - p_j < tau_rel
           as long as the prompt has fewer than k rows: all second choices in the order of the rows, then third ones
        2. a branch of age r in `lookahead` is pruned, with all that grew on it, if its r tokens a since birth are still
           like the tokens b of its parent in the same places, that is if any test that is on holds:
               edit_distance(a, b) / r < tau_ed,  suffix_match(a, b) / r > tau_sm,  ROUGE-L(a, b) > tau_rl
           but never after an end of sequence in either
        3. the tree ends if every row has ended, at `max_tree_tokens`, or when it is full: at least
           round(k (full_share - full_decay s / completion length)) rows, all born more than max(lookahead) places ago

    Then copies of the first (greedy) row fill up to k rows, and every unfinished row is completed by ordinary sampling.
    Rows freed by pruning are used again. eta is `eta[i]` starting with generation batch `eta_steps[i]`, counted from 0.
    Evaluation always uses plain sampling.

    A request brings up to `decode_ahead` tokens of a row, and the lines above are replayed on them: the tree is the
    same for any `decode_ahead` unless it samples (`sample_nk`).

    Symbols: a, b token ids; probabilities in [0, 1]. Suffix match is the longest suffix of one that occurs anywhere in
    the other. Tokens of the tree are `Kind.FORCED`: they were not sampled from a distribution of the engine, so
    corrections by its log-probs are refused.

    Raises:
        ConfigError: a parameter out of range, `eta` and `eta_steps` that do not fit; a lookahead that no branch
            reaches, shares that make no tree of two rows.
        MethodError: the engine does not report the most likely tokens.

    Source: arXiv 2510.24302; model/generation.py, sample_filter.py, metrics.py, utils.py of the authors' code, 2adb0ed.
    """

    name = "latr"
    fidelity = "code"
    does = "Grows a tree of rollouts that branches at uncertain tokens and prunes near copies"
    problems = ("exploration", "no_signal")
    brings = frozenset({"forced_tokens"})
    needs = from_params(lambda p: {"several_rollouts", f"engine:logprobs={p.candidates}"})
    idle = (
        Idle({"branches": 1}, "no tree branched: its rollouts are copies of one. Lower `tau_abs` or raise `tau_rel`."),
    )
    Params = LatrParams

    def check(self, run: Run) -> None:
        p, length = self.params, run.max_completion_length
        if max(p.eta) == 0:  # no tree
            return
        if has_effect(p, "lookahead"):
            why = "no branch becomes as old in the tree"
            refuse_beyond_completion(run, "lookahead", max(p.lookahead), why, min(length, p.max_tree_tokens or length))
        if round(run.group_size * max(p.eta)) < 2:
            raise ConfigError(
                f"the largest share of `eta` is {max(p.eta):g}, which is {round(run.group_size * max(p.eta))} of the "
                f"{run.group_size} rollouts of a prompt, and a tree branches from 2 on. Raise it, or the group size."
            )

    def plan(self, plan: Plan) -> Plan:
        eta = self.params.eta_at(plan.batch)
        self.log("eta", eta)
        return plan.replace(rows=tuple(row.marked(self.name, eta) for row in plan.rows))

    def rollout(self, prompt: Prompt) -> Program:
        # rows that another method adds in a later round have no share of ours: the schedule is the same
        planned = prompt.mark(self.name)
        share = self.params.eta_at(prompt.batch) if planned is None else planned
        k = round(prompt.n * share) if prompt.training else 0
        wanted = [(prompt.start(), prompt.n - k)]
        if k:
            tree = yield from grow(prompt, self.params, k)
            branches = tree.branches
            copies = k - len(branches)
            start = prompt.start()
            grown = [b.trajectory(start) for b in branches]
            copied = grown[0]
            if prompt.traced:
                origins = tree.origins(len(start))
                grown = [replace(t, origin=o) for t, o in zip(grown, origins, strict=True)]
                copied = replace(copied, origin=BranchOrigin(0, len(copied), why="copy of the first row"))
            wanted = [(t, 1) for t in grown] + [(copied, copies), *wanted]
            self.log("branches", len(branches))
            self.log("copies", copies / k)
            self.log("tree_tokens", tree.length)
            self.log("pruning_ratio", tree.pruned / max(tree.tests, 1), weight=tree.tests)
            self.log("unused", 1 - tree.used / max(tree.decoded, 1), weight=tree.decoded)

        wanted = [(trajectory, n) for trajectory, n in wanted if n]
        answers = iter((yield [Generate(t, n=n) for t, n in wanted if t.finish != "eos"]))
        return [
            t if made is None else t.add(made)
            for t, n in wanted
            for made in ([None] * n if t.finish == "eos" else next(answers))
        ]
