"""Training-Free GRPO (arXiv 2510.08191): a language model compares groups of rollouts in words, and the words go into
the prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl_plugins import ConfigError, Idle, Method, MethodError, MethodParams, Plan, PlanRow, Rollouts, Run, Tokens, param
from rl_plugins.core.params import GIVEN
from rl_plugins.kit.services import ChatEndpoint, fill, prompt_text, with_task
from rl_plugins.methods.training_free_grpo import library, texts
from rl_plugins.methods.training_free_grpo.advisor import HIDDEN, Advisor, Attempt

_LEARN, _URL = {"learn": True}, {"learn": True, "llm_url": GIVEN}
_GRADED, _PAPER = {"learn": True, "ground_truth": True}, {"learn": True, "variant": "paper"}
Function = Callable[..., Any] | None


class TrainingFreeGrpo(Method):
    """Lets a language model compare the rollouts of a group and edit a short list of experiences; nothing is trained.

    The policy pi stays frozen. The method learns a list E of texts, which is in the prompt of every rollout, also in
    evaluation:

        o_1 .. o_G ~ pi(. | template(q, E)),  r_i = reward
        group g is compared if reward_low < mean(r) < reward_high     (without `ground_truth`: always)
        s_i = LLM(q, o_i, r_i, answer)                                summary of each rollout
        variant `practice`:  A_g = LLM(s_1 .. s_G, r)                 "semantic advantage": `per_group` rules at most
                             D_g = LLM(E, A_g)                        operations ADD, UPDATE, DELETE on E
                             E  <- apply(LLM(E, all D_g))             one consistent plan, carried out in order
        variant `paper`:     D_g = LLM(E, s_1 .. s_G, r), cut to `per_group` operations add, modify
                             E  <- E + all adds; apply(LLM(E, modifications)), a plan of modify and merge
        E  <- renumbered G0, G1, ..

    E is edited once per generation batch. The language model is `llm(text) -> text`, `async` or not, or the endpoint of
    `llm_url` and `llm_model`; the policy can be that model itself, because its weights do not change. While E is empty
    the template says "None" (variant `paper`: the prompt is left as it is).

    Symbols: r (rows,) float64. A rollout of several rows counts once: their texts in order, the reward of the last.

    Special cases: a rollout without a summary is left out, and so is its group if it becomes uniform. A group without a
    comparison or without JSON is left out. If there is no plan after all tries, E is unchanged (variant `paper`:
    additions stay). Rows without a reward (NaN), and rows that `select` took out, are left out. A group of one is
    compared only if its reward lies between the bounds.

    State: the texts of E.

    Raises:
        ConfigError: no language model or two, a template without its fields, an unreadable library. MethodError: no
        rollout of a batch could be summarized, or a prompt is not known.

    Source: arXiv 2510.08191; TencentCloudADP/youtu-agent, `practice` is utu/practice of main (bef6ba5), `paper`
    training_free_grpo of the branch training_free_GRPO (7612f86).
    """

    name = "training_free_grpo"
    fidelity = "code"
    does = "Lets a language model compare rollouts and write experiences into the prompt; no weights change"
    problems = ("few_prompts", "forgetting")
    needs = frozenset({"text", "column:prompt"})
    in_eval = ("plan",)
    trains = False
    idle = (
        Idle(
            {"operations": 0},
            "the library did not change. Look at `mixed`, `reward_low`, `reward_high` and `ground_truth`.",
        ),
    )

    @dataclass(frozen=True)
    class Params(MethodParams):
        llm: Function = param(None, "function llm(text) -> reply, `async` or not; none: an endpoint", only_if=_LEARN)
        llm_url: str | None = param(None, "OpenAI-compatible endpoint instead: http://host:8000/v1", only_if=_LEARN)
        llm_model: str | None = param(None, "name of the model at the endpoint", only_if=_URL)
        llm_key_env: str | None = param(None, "environment variable with its key; none: no key", only_if=_URL)
        llm_temperature: float = param(0.7, "temperature of the endpoint", ge=0, only_if=_URL)
        llm_max_tokens: int = param(4096, "most tokens of the endpoint's reply", ge=1, only_if=_URL)
        llm_timeout: float = param(300.0, "time limit of one try, in seconds", gt=0, only_if=_LEARN)
        llm_retries: int = param(2, "further tries of a call that failed", ge=0, only_if=_LEARN)
        llm_concurrency: int = param(16, "number of calls at the same time", ge=1, only_if=_LEARN)
        variant: Literal["practice", "paper"] = param(
            "practice", "update rule of the published code, or of the paper's code"
        )
        library: str | None = param(None, "JSON file of the experiences, read at the start, written after each batch")
        learn: bool = param(True, "permission to change the library; false: it is only used")
        per_group: int = param(1, "most experiences (or operations) of a group", ge=1, only_if=_LEARN)
        max_words: int = param(32, "most words of an experience; a longer one is cut (ours)", ge=1, only_if=_LEARN)
        ground_truth: bool = param(True, "only groups with some success; false: all, answers hidden", only_if=_LEARN)
        answer_column: str | None = param(None, "column with the answer; none: hidden", only_if=_GRADED)
        reward_low: float = param(0.0, "reward of a failure (ours)", only_if=_GRADED)
        reward_high: float = param(1.0, "reward of a success (ours)", only_if=_GRADED)
        objective: str = param("It solves the task it is given.", "purpose of the agent", only_if=_LEARN)
        learning_objective: str = param("How to solve such tasks more often.", "purpose of learning", only_if=_LEARN)
        prompt_template: str = param(texts.PROMPT, "prompt of a rollout, with {experiences} and {problem}")
        prompt_column: str = param("prompt", "dataset column with the prompt")
        merge_without_text: Literal["skip", "delete"] = param(
            "skip", "a merge without text: no change, or deletion (code)", only_if=_PAPER
        )

        def check(self) -> None:
            if not self.learn and self.library is None:
                raise ConfigError(
                    "`learn` is false and there is no `library`, so nothing is left to do. Set "
                    "`library` to a file, or set `learn` to true."
                )
            if self.learn and self.llm is None and self.llm_url is None:
                raise ConfigError(
                    "neither `llm` nor `llm_url` is given. Give the parameter `llm`, a function "
                    "llm(text) as module:attribute (to try a run: rl_plugins.lab.demo.advisor:canned), "
                    "or `llm_url` and `llm_model` of an endpoint, which may serve the policy "
                    "itself."
                )
            if self.llm is not None and self.llm_url is not None:
                raise ConfigError(f"`llm` and `llm_url` ({self.llm_url}) are both given. Remove one of them.")
            if self.llm_url is not None and not self.llm_model:
                raise ConfigError("`llm_url` is given without `llm_model`. Add the name of the model at the endpoint.")
            missing = [f for f in ("{problem}", "{experiences}") if f not in self.prompt_template]
            if missing:
                raise ConfigError(f"`prompt_template` lacks {' and '.join(missing)}; the policy must see both.")
            if self.reward_low >= self.reward_high:
                raise ConfigError(
                    f"`reward_low` is {self.reward_low:g} and `reward_high` {self.reward_high:g}; the first must be "
                    f"lower. They are the rewards of a failure and of a success."
                )

    def __init__(self, params: MethodParams | None = None) -> None:
        super().__init__(params)
        p = self.params
        self.min_group_size = 2 if p.learn else 1
        columns = [p.prompt_column, *([p.answer_column] if p.answer_column else [])]
        self.needs = frozenset({"text", *(f"column:{name}" for name in columns)})

    def check(self, run: Run) -> None:
        p = self.params
        if not p.learn and not Path(p.library).exists():
            raise ConfigError(f"there is no library {p.library}, and `learn` is false. Name a file that exists.")
        self._language_model()

    def start(self, run: Run) -> None:
        p = self.params
        self._dataset, self._group_size = run.dataset, run.group_size
        found = {}
        if p.library is not None and Path(p.library).exists():
            found = library.read_library(p.library, p.max_words)
            self.warn(f"starts with the {len(found)} experiences of {p.library}.")
        self.state = {"experiences": list(found.values())}
        if p.learn:
            self._advisor = Advisor(p, self._language_model(), self.log, self.warn)

    def _language_model(self) -> Any:
        """What is asked; None if nothing is learned."""
        p = self.params
        if not p.learn or p.llm is not None:
            return p.llm
        return ChatEndpoint(
            p.llm_url,
            p.llm_model,
            api_key_env=p.llm_key_env or "",
            temperature=p.llm_temperature,
            max_tokens=p.llm_max_tokens,
            timeout=p.llm_timeout,
        )

    @property
    def experiences(self) -> dict[str, str]:
        """The library, by id. On the driver only."""
        return {f"G{i}": text for i, text in enumerate(self.state["experiences"])}

    # ---- the prompt

    def plan(self, plan: Plan) -> Plan | None:
        """Puts the experiences into every prompt."""
        experiences = self.experiences
        if not experiences and self.params.variant == "paper":
            return None
        shown = library.listed(experiences)
        return plan.replace(rows=tuple(self._with_experiences(row, shown) for row in plan.rows))

    def _with_experiences(self, row: PlanRow, shown: str) -> PlanRow:
        column, edit = self.params.prompt_column, dict(row.edit or {})
        prompt = edit[column] if column in edit else self._cell(row.prompt_index)

        def told(problem: str) -> str:
            return fill(self.params.prompt_template, {"problem": problem, "experiences": shown})

        return row.replace(edit={**edit, column: with_task(prompt, told)})

    def _cell(self, prompt: int) -> Any:
        """The prompt of a dataset row.

        Raises:
            MethodError: it is not known.
        """
        column = self.params.prompt_column
        if prompt < 0 or self._dataset is None:
            raise MethodError(
                f"the prompt of row {prompt} is not known: the dataset is a stream, or the row is foreign and its "
                f"`edit` lacks the column `{column}`. Use a dataset with random access."
            )
        row = self._dataset[prompt]
        if column not in row:
            raise MethodError(
                f"the dataset has no column `{column}` (it has: {', '.join(sorted(row))}). Set `prompt_column`."
            )
        return row[column]

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
            self.state["experiences"] = self._advisor.revise(self.experiences, operations)
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
            prompt = self._cell(index) if known else rollouts.meta[p.prompt_column][last]  # the latter with our edit
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
