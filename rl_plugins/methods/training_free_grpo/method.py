"""Training-Free GRPO (arXiv 2510.08191): a language model compares rollouts in words, which go into the prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rl_plugins import (
    ConfigError,
    Idle,
    Method,
    Plan,
    Rollouts,
    Run,
    Tokens,
    from_params,
    signals,
)
from rl_plugins.kit.columns import cell, rewritten
from rl_plugins.kit.services import fill, prompt_text
from rl_plugins.methods.training_free_grpo import library
from rl_plugins.methods.training_free_grpo.advisor import HIDDEN, Advisor, Attempt
from rl_plugins.methods.training_free_grpo.params import TrainingFreeParams

MOST_EXPERIENCES = 1000


class TrainingFreeGrpo(Method):
    """Lets a language model compare the rollouts of a group and edit a short list of experiences; nothing is trained.

    The policy pi stays frozen. It is a method and no tool because it acts through the hooks of a host's run, with the
    host's rollouts and rewards. Its state is a list E of texts, in the prompt of every rollout, also in evaluation:

        o_1 .. o_G ~ pi(. | template(q, E)),  r_i = reward
        group g is compared if reward_low < mean(r) < reward_high     (without `ground_truth`: always)
        s_i = LLM(q, o_i, r_i, answer)                                summary of each rollout
        variant `practice`:  A_g = LLM(s_1 .. s_G, r)                 "semantic advantage": `per_group` rules at most
                             D_g = LLM(E, A_g)                        operations ADD, UPDATE, DELETE on E
                             E  <- apply(LLM(E, all D_g))             one consistent plan, carried out in order
        variant `paper`:     D_g = LLM(E, s_1 .. s_G, r), cut to `per_group` operations add, modify
                             E  <- E + all adds; apply(LLM(E, modifications)), a plan of modify and merge
        E  <- renumbered G0, G1, ..

    E is edited once per batch. The language model may be the policy. While E is empty the template says "None"
    (`paper`: nothing).

    Symbols: r (rows,) float64. A rollout of several rows counts once: their texts in order, the reward of the last.

    Special cases: rows without a reward (NaN) or that `select` took out, rollouts without a summary, and groups without
    a comparison or without JSON are left out. If there is no plan after all tries, E is unchanged (`paper`: additions
    stay). A group of one is compared only if its reward lies between the bounds. Of more than 1,000 experiences the
    oldest leave (ours).

    Raises:
        ConfigError: no language model or two, a template without its fields, an unreadable library.
        MethodError: no rollout of a batch could be summarized, or a prompt is not known.

    Source: arXiv 2510.08191; TencentCloudADP/youtu-agent, main (bef6ba5) and branch training_free_GRPO (7612f86).
    """

    name = "training_free_grpo"
    fidelity = "code"
    does = "Lets a language model compare rollouts and write experiences into the prompt; no weights change"
    problems = ("few_prompts", "forgetting")
    in_eval = ("plan",)
    aggregation = "none"
    needs = from_params(
        lambda p: signals("text", f"column:{p.prompt_column}", columns=[p.answer_column], several_rollouts=p.learn)
    )
    idle = (Idle({"operations": 0}, "the library did not change. Look at `mixed`, `reward_low` and `reward_high`."),)
    Params = TrainingFreeParams

    def check(self, run: Run) -> None:
        p = self.params
        if not p.learn and not Path(p.library).exists():
            raise ConfigError(f"there is no library {p.library}, and `learn` is false. Name a file that exists.")
        _ = p.language_model  # refuses an endpoint that cannot be asked

    def start(self, run: Run) -> None:
        p = self.params
        self._dataset, self._group_size = run.dataset, run.group_size
        found = {}
        if p.library is not None and Path(p.library).exists():
            found = library.read_library(p.library, p.max_words)
            self.warn(f"starts with the {len(found)} experiences of {p.library}.")
        self.state = {"experiences": list(found.values())}
        if p.learn:
            self._advisor = Advisor(p, p.language_model, self.log, self.warn)

    @property
    def experiences(self) -> dict[str, str]:
        """The library, by id. On the driver only."""
        return {f"G{i}": text for i, text in enumerate(self.state["experiences"])}

    # ---- the prompt

    def plan(self, plan: Plan) -> Plan | None:
        """Puts the experiences into every prompt."""
        p, experiences = self.params, self.experiences
        if not experiences and p.variant == "paper":
            return None
        shown = library.listed(experiences)

        def told(problem: str) -> str:
            return fill(p.prompt_template, {"problem": problem, "experiences": shown})

        return plan.replace(rows=tuple(rewritten(self._dataset, row, p.prompt_column, told) for row in plan.rows))

    # ---- the update

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        """One edit of the library: summaries, comparison of each mixed group, one revision of the library."""
        p = self.params
        if not p.learn:
            return
        groups = self._attempts(rollouts)
        mixed = [group for group in groups if self._compared(group)]
        self.log("mixed", len(mixed) / len(groups) if groups else math.nan)
        operations = []
        if mixed:
            summarized = self._advisor.summarize(mixed)
            comparable = [group for group in summarized if self._compared([attempt for attempt, _ in group])]
            operations = self._advisor.propose(self.experiences, comparable)
        self.log("operations", len(operations), "sum")
        if operations:
            revised = self._advisor.revise(self.experiences, operations)
            if len(revised) > MOST_EXPERIENCES:
                self.warn(f"the language model seldom deletes: of {len(revised)} experiences the oldest leave.")
            self.state["experiences"] = revised[-MOST_EXPERIENCES:]
        self.log("experiences", len(self.state["experiences"]))
        if p.library is not None:
            library.write_library(p.library, self.experiences, rollouts.batch + 1, p.variant)

    def _attempts(self, rollouts: Rollouts) -> list[list[Attempt]]:
        """The rollouts with a reward, group by group in the order of their numbers."""
        p = self.params
        assert rollouts.text is not None  # it is in `needs`
        groups: dict[int, list[Attempt]] = {}
        of_groups = rollouts.per_rollout.members(rollouts, rollouts.kept & ~rollouts.reward.isnan())
        for group, mine in ((group, rows) for group, members in of_groups.items() for rows in members):
            last = mine[-1]
            index = int(rollouts.prompt_index[last])
            known = index >= 0 and self._dataset is not None
            column = p.prompt_column  # the rollout's own has our edit
            prompt = cell(self._dataset, index, column) if known else rollouts.meta[column][last]
            groups.setdefault(group, []).append(
                Attempt(
                    question=prompt_text(prompt),
                    answer=str(rollouts.meta[p.answer_column][last]) if p.answer_column else HIDDEN,
                    text="\n".join(rollouts.text[i] for i in mine),
                    reward=float(rollouts.reward[last]),
                )
            )
        return list(groups.values())

    def _compared(self, group: Sequence[Attempt]) -> bool:
        """Whether a group tells success from failure."""
        p = self.params
        if not p.ground_truth or (p.variant == "paper" and self._group_size == 1):
            return bool(group)
        return bool(group) and p.reward_low < sum(a.reward for a in group) / len(group) < p.reward_high
