"""XRPO's seeding (arXiv 2510.06672): retries failed prompts with solved examples of similar problems in the context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rl_plugins import (
    ConfigError,
    Idle,
    Method,
    MethodError,
    MethodParams,
    Plan,
    PlanRow,
    Rollouts,
    Run,
    Tokens,
    from_params,
    param,
)
from rl_plugins.kit.columns import cell, rewritten
from rl_plugins.kit.prompt_memory import SuccessParams
from rl_plugins.kit.services import fill, media_of, prompt_text
from rl_plugins.methods.xrpo.similarity import tfidf_cosine, words

TEMPLATE = (
    "Here are similar problems with their solutions.\n\n{examples}\n\nSolve this problem in the same way.\n\n{problem}"
)
EXAMPLE = "Problem:\n{problem}\n\nSolution:\n{solution}"
MOST_TEXTS = 65536  # prompts whose words or embeddings are kept in memory


class XrpoSeeds(Method):
    """Puts solved examples of similar problems into the context of prompts whose rollouts all failed.

    A corpus C holds right answers of earlier batches, the newest of each prompt. In every round but the first, for a
    prompt q without a success so far:

        E  = the `examples` prompts of C that are most similar to q, q itself never among them
        o ~ pi(. | template(E with their answers, q))        instead of pi(. | q)

    Similarity is the cosine of TF-IDF vectors of the prompts, or of what `embed` makes of them; a prompt with a
    similarity of 0 or less is not an example. Without an example q is unchanged. Rollouts are trained under the prompt
    they were made with and join the plain ones' group.

    With `second_round` half of every prompt's rollouts (rounded down) are made in a second round; the total stays.
    Without it, the method plans no rollouts and changes the prompts of rows that other methods plan in later rounds
    (`xrpo_allocate`, `dars`, `v0_5`). Name it after them.

    Symbols: a success is a reward >= success_threshold; in a batch, of the reward functions, before `rewards` hooks; in
    the corpus, after them. A rollout of several rows is one answer.

    Special cases: prompts without any reward (NaN), foreign prompts (-1) and rows with given completions are not
    seeded. An answer longer than `max_characters` is cut. A corpus larger than `corpus_size` loses its oldest answers.

    State: the answers by dataset row, oldest first; of the batch, the rows left for the second round and the seeded
    rollouts.

    Raises:
        ConfigError: prompts with images, a template without its fields.
        MethodError: no such prompt column, or `embed` returns something else than a row of finite numbers per text.

    Source: arXiv 2510.06672, as read through third parties: the rule, K = 2, and a fixed template.
    """

    name = "xrpo_seeds"
    fidelity = "abstract"
    does = "Retries failed prompts with solved examples of similar problems in the context"
    problems = ("too_hard", "no_signal", "exploration")
    rounds = True
    keeps_batch_size = True
    needs = from_params(lambda p: {"prompt_index", "text", f"column:{p.prompt_column}"})
    decides_rollouts = from_params(lambda p: bool(p.second_round))
    idle = (
        Idle({"later": 0}, "no later round was planned. Set `second_round`, or name a method with rounds before it."),
    )

    @dataclass(frozen=True)
    class Params(SuccessParams):
        examples: int = param(2, "K, number of solved prompts in the context", ge=1)
        second_round: bool = param(True, "a second round with half of the rollouts")
        corpus_size: int = param(1024, "number of prompts whose answers are kept", ge=1)
        max_characters: int = param(2000, "most characters of an answer; a longer one is cut", ge=1)
        embed: Callable[..., Any] | None = param(None, "function embed(texts): a row of numbers per text; none: TF-IDF")
        prompt_column: str = param("prompt", "dataset column with the prompt")
        template: str | None = param(None, "prompt with {examples} and {problem}; none: our English text")

        def check(self) -> None:
            missing = [f for f in ("{examples}", "{problem}") if f not in (self.template or TEMPLATE)]
            if missing:
                raise ConfigError(f"`template` lacks {' and '.join(missing)}; the policy must see both.")

    def __init__(self, params: MethodParams | None = None) -> None:
        super().__init__(params)
        self._dataset: Any = None
        self._known: dict[int, Any] = {}  # dataset row -> its words, or its embedding

    def check(self, run: Run) -> None:
        media = media_of(run)
        if media:
            raise ConfigError(
                f"the prompts have {media}, and examples of several prompts with images cannot be put into one. Use a "
                f"dataset of texts, or remove `{self.name}`."
            )

    def start(self, run: Run) -> None:
        self._dataset = run.dataset
        self.state = {"answers": {}, "left": {}, "seeded": []}

    def plan(self, plan: Plan) -> Plan:
        """Of the first round the half, if it is to be split; in later rounds the rest, and examples for those that
        failed."""
        if plan.round == 0:
            self.state["left"], self.state["seeded"] = {}, []  # of a batch that was skipped
            return self._split(plan) if self.params.second_round else plan
        rows, so_far = plan.rows, {g.row.group: g for g in plan.so_far}
        if plan.round == 1:
            left = self.state["left"]
            rest = [(g.row, left.get(str(g.row.group), 0)) for g in plan.so_far]
            rows += tuple(row.replace(n=n, spare=0, given=()) for row, n in rest if n)
            self.note([row.group for row, n in rest if n], "the second half of its rollouts")
        self.log("later", sum(row.n + row.spare for row in rows), "sum")
        seeded, count = [], {g: len(of.rewards) for g, of in so_far.items()}
        failed = {g for g, of in so_far.items() if self.params.successes(of.rewards).nanmean() == 0}
        retried = [row.group in failed and not row.given and row.prompt_index >= 0 for row in rows]
        examples = self._examples({row.prompt_index for row, again in zip(rows, retried, strict=True) if again})
        for row, again in zip(rows, retried, strict=True):
            new = self._seeded(row, examples[row.prompt_index]) if again else row
            size = row.n + row.spare
            if new is not row:
                text = "{examples} solved examples after {failed} rollouts without a success"
                self.note([row.group], text, examples=len(examples[row.prompt_index]), failed=count[row.group])
                self.state["seeded"].append([row.group, count[row.group], size])
            if row.group in count:
                count[row.group] += size
            seeded.append(new)
        return plan.replace(rows=tuple(seeded))

    def further_rounds(self, plan: Plan) -> tuple[int, int]:
        return (min(1, plan.budget), plan.budget) if self.params.second_round else (0, 0)

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        self._report(rollouts)
        self._remember(rollouts)
        self.state["left"], self.state["seeded"] = {}, []
        self.log("corpus", len(self.state["answers"]))

    # ---- the plan

    def _split(self, plan: Plan) -> Plan:
        rows, left = [], self.state["left"]
        for row in plan.rows:
            later = 0 if row.given else row.n // 2
            if later:
                left[str(row.group)] = left.get(str(row.group), 0) + later
            rows.append(row.replace(n=row.n - later))
        return plan.replace(rows=tuple(rows))

    def _seeded(self, row: PlanRow, examples: Sequence[int]) -> PlanRow:
        """The row with examples in its prompt; the row itself without any."""
        if not examples:
            return row
        p, answers = self.params, self.state["answers"]
        shown = "\n\n".join(fill(EXAMPLE, {"problem": self._text(i), "solution": answers[str(i)]}) for i in examples)

        def told(task: str) -> str:
            return fill(p.template or TEMPLATE, {"examples": shown, "problem": task})

        return rewritten(self._dataset, row, p.prompt_column, told)

    def _examples(self, prompts: Set[int]) -> dict[int, list[int]]:
        """For each of these prompts the dataset rows of the most similar solved ones, the most similar first, of equal
        ones the newest."""
        asked, solved = sorted(prompts), [int(i) for i in reversed(self.state["answers"])]
        if not asked or not solved:
            return {prompt: [] for prompt in asked}
        likeness = self._likeness(asked, solved)
        order = np.argsort(-likeness, axis=1, kind="stable")[:, : self.params.examples + 1]  # one may be the prompt
        found = {
            prompt: [solved[i] for i in of_prompt if row[i] > 0 and solved[i] != prompt]
            for prompt, row, of_prompt in zip(asked, likeness, order, strict=True)
        }
        return {prompt: of_prompt[: self.params.examples] for prompt, of_prompt in found.items()}

    def _likeness(self, asked: Sequence[int], solved: Sequence[int]) -> Any:
        """(asked, solved) similarities."""
        named = dict.fromkeys((*asked, *solved))
        if len(self._known) > MOST_TEXTS:
            self._known = {i: self._known[i] for i in named if i in self._known}
        missing = [i for i in named if i not in self._known]
        if self.params.embed is None:
            self._known |= {i: words(self._text(i)) for i in missing}
            place = {prompt: k for k, prompt in enumerate(solved)}
            known = self._known
            return tfidf_cosine([known[i] for i in asked], [known[i] for i in solved], [place.get(i) for i in asked])
        if missing:
            self._known |= dict(zip(missing, self._embedded([self._text(i) for i in missing]), strict=True))
        ours, theirs = (torch.stack([self._known[i] for i in of]) for of in (asked, solved))
        return (ours @ theirs.T).numpy()

    def _embedded(self, texts: list[str]) -> Any:
        """(texts, size) vectors of length 1, or 0."""
        assert self.params.embed is not None
        found = self.params.embed(texts)
        try:
            made = (
                found.detach().cpu().double()
                if isinstance(found, torch.Tensor)
                else torch.tensor(np.array(found, float))
            )
        except (TypeError, ValueError) as e:
            raise MethodError(
                f"`embed` returned no table of numbers for {len(texts)} texts ({e}); a row of finite numbers for each "
                f"is needed."
            ) from e
        if made.ndim != 2 or len(made) != len(texts) or not bool(torch.isfinite(made).all()):
            raise MethodError(
                f"`embed` returned the shape {tuple(made.shape)} for {len(texts)} texts; a row of finite numbers for "
                f"each is needed."
            )
        return made / made.norm(dim=1, keepdim=True).clamp(min=1e-30)

    def _text(self, prompt: int) -> str:
        return prompt_text(cell(self._dataset, prompt, self.params.prompt_column))

    # ---- what became of it

    def _remember(self, rollouts: Rollouts) -> None:
        """The first right answer of each prompt takes the place of its older one, as the newest."""
        p, answers = self.params, self.state["answers"]
        assert rollouts.text is not None  # in `needs`
        each = rollouts.per_rollout
        right = each.rows.rows(p.successes(each.reward) == 1) & (rollouts.prompt_index >= 0)
        new: dict[str, str] = {}
        for of_rollouts in each.members(rollouts, right).values():
            for rows in of_rollouts:
                text = "\n".join(rollouts.text[i] for i in rows)[: p.max_characters]
                if text.strip():
                    new.setdefault(str(int(rollouts.prompt_index[rows[0]])), text)
        for prompt, text in new.items():
            answers.pop(prompt, None)
            answers[prompt] = text
        for prompt in list(answers)[: max(0, len(answers) - p.corpus_size)]:
            del answers[prompt]

    def _report(self, rollouts: Rollouts) -> None:
        each = rollouts.per_rollout
        seeded = torch.zeros(len(each.group), dtype=torch.bool)
        for group, start, size in self.state["seeded"]:
            seeded |= (each.group == group) & (each.rollout >= start) & (each.rollout < start + size)
        self.log("seeded", int(seeded.sum()), "sum")
        scored = ~torch.isnan(each.reward)
        success = self.params.successes(each.reward) == 1
        if bool((seeded & scored).any()):
            self.log("right", success[seeded & scored].double().mean())
        with_examples = each.groups.max((success & seeded).double()) > 0
        self.log("rescued", int(with_examples.sum()), "sum")
