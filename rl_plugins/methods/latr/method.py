"""LATR (arXiv 2510.24302): rollouts branch where the policy is unsure, and branches that stay similar are pruned."""

from __future__ import annotations

from dataclasses import replace

from rl_plugins.method import Idle, Measured, Method, Paper
from rl_plugins.methods.latr.params import LatrParams
from rl_plugins.methods.latr.tree import grow
from rl_plugins.params import MethodParams
from rl_plugins.requests import BranchOrigin, Generate, Program, Prompt
from rl_plugins.rollouts import Plan


class Latr(Method):
    """Makes the rollouts of a prompt with a lookahead tree instead of n independent samples.

    Of n rollouts k = round(n eta) come from the tree (Python's round, to the even number), the others are sampled as
    usual. p_1 >= ... >= p_m are the probabilities of the most likely tokens at temperature 1. For each place s from 0
    on

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
    eta = 0 is plain sampling; evaluation always uses plain sampling.

    A request brings up to `decode_ahead` tokens of a row with their alternatives, and the lines above are replayed on
    them. The tree is the same for any `decode_ahead` unless it samples (`sample_nk`).

    Symbols: a, b token ids; probabilities in [0, 1]. Suffix match is the longest suffix of one that occurs anywhere in
    the other. Tokens of the tree are `Kind.FORCED`: they were not sampled from a distribution of the engine, so
    corrections by its log-probs are refused. All other tokens are sampled and have log-probs.

    Logs: `eta`; per prompt `branches` (alive at the end, without copies), `copies` (share of k), `tree_tokens` (length
    of the tree); `pruning_ratio`, tests that fired / tests made; `unused`, share of the tokens decoded for the tree
    that no rollout has. If `branches` and `copies` are near 1, the policy is too sure for these thresholds.

    Raises:
        ConfigError: a parameter out of range, `eta` and `eta_steps` that do not fit.
        MethodError: the engine does not report the most likely tokens.

    Source: arXiv 2510.24302; model/generation.py, sample_filter.py, metrics.py, utils.py of the authors' code at commit
    2adb0ed.
    """

    name = "latr"
    paper = Paper(
        "2510.24302",
        "Lookahead Tree-Based Rollouts for Enhanced Trajectory-Level Exploration in Reinforcement Learning with "
        "Verifiable Rewards",
        "Shangyu Xing and Siyuan Wang and Chenyuan Yang and Xinyu Dai and Xiang Ren",
        2025,
        code="starreeze/latr",
    )
    fidelity = "code"
    does = "Grows a tree of rollouts that branches at uncertain tokens and prunes near copies"
    problems = ("exploration", "no_signal")
    measured = (
        Measured(
            "distinct ways among 8 rollouts, even forks, 30 % of them real",
            "better",
            "6.84 against 6.45 (plain sampling), +0.39 ± 0.17",
            "latr-8-seeds-arrol-scope-fission_grpo-3-seeds",
        ),
        Measured(
            "share of groups without variance, even forks",
            "not told apart",
            "0.33 against 0.34 (plain sampling)",
            "latr-8-seeds-arrol-scope-fission_grpo-3-seeds",
        ),
        Measured(
            "distinct ways among 8 rollouts, uneven forks",
            "worse",
            "4.3 against 6.2 (plain sampling)",
            "latr-8-seeds-arrol-scope-fission_grpo-3-seeds",
        ),
        Measured(
            "distinct answers of 8 in the demo",
            "worse",
            "1.3 against 6.4 (plain sampling), 85 % of the groups without variance against 25 %",
            "latr-8-seeds-arrol-scope-fission_grpo-3-seeds",
        ),
    )
    use_when = (
        "Rollouts of a prompt are near copies of each other, many groups have no variance, and completions are long."
    )
    avoid_when = (
        "Log-probs of the sampling policy are needed (truncated importance sampling, asynchronous training), the "
        "policy is nearly deterministic, or completions are shorter than the first lookahead."
    )
    cost = (
        "As many rollouts as plain sampling and .84 to .88 times the tokens decoded in our simulation, in 14 "
        "engine batches instead of one. Each request brings up to `decode_ahead` tokens, and there is one more "
        "wherever a branch starts; each request reads the prefix again unless the engine caches it. `latr/unused` "
        "is the share of tree tokens that no rollout uses. The engine must report the `candidates` most likely "
        "tokens."
    )
    disagreements = (
        "Before January 2026 the code branched where p_1 - p_j > tau_rel, the opposite of the "
        'paper\'s uncertainty; `rel_test="far"` gives that. It is not known which rule made the '
        "paper's tables.",
        "The authors stop all prompts of a batch together, when the sum of their branches is full "
        "and no branch is young. A program sees one prompt, so each prompt stops on its own: its "
        "greedy part is at most as long as theirs.",
        "Not included, because no run of the authors uses them: the filters for stop words and "
        "cumulative probability, the scheduler of thresholds, and random branching and pruning. "
        "Also not included: `keep_math_symbols`, which is on in their code and tests one branch "
        "but prunes another.",
        "The paper's settings for mathematics: tau_abs 0.15, tau_rel 0.25, tau_ed none, tau_sm 0.2, tau_rl "
        "0.5, eta 1, 0.75, 0.5, 0.25 from 0, 100, 200, 300, max_tree_tokens 1024; the defaults are those for "
        "countdown. The authors' count of batches starts at 1, here at 0.",
    )
    needs = frozenset({"engine:logprobs=2"})
    min_group_size = 2
    forces_tokens = True
    idle = (
        Idle(
            {"branches": 1},
            "no tree branched, so all rollouts of a tree are copies of one rollout (latr/copies). "
            "Lower `tau_abs`, raise `tau_rel`, set `sample_nk: always`, or let completions be "
            "longer.",
        ),
    )
    paper_settings = {
        "trl": {
            "num_generations": 8,
            "learning_rate": 1e-6,
            "beta": 0.01,
            "epsilon": 0.2,
            "epsilon_high": 0.28,
        },
        "verl": {
            "data.train_batch_size": 256,
            "actor_rollout_ref.rollout.n": 8,
            "actor_rollout_ref.actor.optim.lr": 1e-6,
            "actor_rollout_ref.actor.use_kl_loss": True,
            "actor_rollout_ref.actor.kl_loss_coef": 0.01,
            "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
            "actor_rollout_ref.actor.clip_ratio_low": 0.2,
            "actor_rollout_ref.actor.clip_ratio_high": 0.28,
        },
    }
    Params = LatrParams

    def __init__(self, params: MethodParams | None = None) -> None:
        super().__init__(params)
        self.needs = frozenset({f"engine:logprobs={self.params.candidates}"})

    def plan(self, plan: Plan) -> Plan:
        eta = self.params.eta_at(plan.batch)
        self.log("eta", eta)
        return plan.replace(rows=tuple(r.replace(payload={**(r.payload or {}), self.name: eta}) for r in plan.rows))

    def rollout(self, prompt: Prompt) -> Program:
        # rows that another method adds in a later round have no share of ours: the schedule is the same
        share = (prompt.payload or {}).get(self.name, self.params.eta_at(prompt.batch))
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
