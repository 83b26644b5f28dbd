"""What is asked of the language model, and what becomes of its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_plugins import MethodError
from rl_plugins.kit.services import Failure, NotAsked, Service, failures, fill
from rl_plugins.methods.training_free_grpo import library, texts

HIDDEN = "[REDACTED]"


@dataclass(frozen=True)
class Attempt:
    """A rollout as the language model is told of it."""

    question: str
    answer: str
    text: str
    reward: float


Summarized = Sequence[tuple[Attempt, str]]  # attempts of a group with their summaries


class Advisor:
    """The language model in its roles. Every answer it does not give, or not usably, is left out.

    Args:
        params: of the method.
        ask: takes a text and returns a text.
        log, warn: of the method.
    """

    def __init__(
        self, params: Any, ask: Callable[[str], Any], log: Callable[..., None], warn: Callable[[str], None]
    ) -> None:
        self.params, self._log, self._warn = params, log, warn
        options = {"timeout": params.llm_timeout, "retries": params.llm_retries, "concurrency": params.llm_concurrency}
        name = "the language model"
        self._texts = Service(ask, name, answer=_reply, **options)
        self._operations = Service(ask, name, answer=lambda x: library.parse_operations(_reply(x)), **options)

    def summarize(self, groups: Sequence[Sequence[Attempt]]) -> list[Summarized]:
        """The attempts of each group that could be summarized.

        Raises:
            MethodError: not one could.
        """
        found = self._ask(self._texts, [self._filled(texts.SUMMARY, a) for group in groups for a in group])
        if all(isinstance(s, Failure) for s in found):
            asked = sum(not isinstance(s, NotAsked) for s in found)
            of = f" that it was asked about, spread over the {len(found)}" if asked < len(found) else ""
            error = failures(found)[0].error.rstrip(".")
            raise MethodError(
                f"The language model summarized none of the {asked} rollouts{of} of this batch, so nothing can be "
                f"learned from it. Its first error: {error}. Check that it works by itself; if it is only slow, raise "
                f"`llm_timeout`."
            )
        summary = iter(found)
        pairs = [[(attempt, next(summary)) for attempt in group] for group in groups]
        return [[(a, s) for a, s in group if not isinstance(s, Failure)] for group in pairs]

    def propose(self, experiences: Mapping[str, str], groups: Sequence[Summarized]) -> list[dict[str, Any]]:
        """The operations all groups propose, in their order."""
        p, shown = self.params, library.listed(experiences)
        if p.variant == "paper":
            asked = [
                self._filled(texts.PAPER_CRITIQUE, group[0][0], attempts=self._shown(group), experiences=shown)
                for group in groups
            ]
            return [o for found in _answered(self._ask(self._operations, asked)) for o in found[: p.per_group]]
        asked = [self._filled(texts.CRITIQUE, group[0][0], attempts=self._shown(group)) for group in groups]
        findings = [f for f in map(library.parse_experiences, _answered(self._ask(self._texts, asked))) if f]
        asked = [self._filled(texts.GROUP, experiences=shown, findings=f) for f in findings]
        return [o for found in _answered(self._ask(self._operations, asked)) for o in found]

    def revise(self, experiences: Mapping[str, str], operations: Sequence[Mapping[str, Any]]) -> list[str]:
        """The texts of the library after one plan for all operations."""
        p = self.params
        if p.variant == "practice":
            proposals = library.by_experience(experiences, operations)
            plan = self._plan(self._filled(texts.REVISION, proposals=proposals))
            return list(library.revise(experiences, plan).values())
        candidates, changes = library.candidates(experiences, operations)
        shown, proposals = library.listed(candidates), library.by_experience({}, changes) or "None"
        plan = self._plan(self._filled(texts.PAPER_REVISION, experiences=shown, proposals=proposals))
        return list(library.merge(candidates, plan, p.merge_without_text).values())

    def _plan(self, question: str) -> list[dict[str, Any]]:
        (plan,) = self._ask(self._operations, [question])
        self._log("revised", float(not isinstance(plan, Failure)))
        return [] if isinstance(plan, Failure) else plan

    def _ask(self, service: Service, questions: Sequence[str]) -> list[Any]:
        """An answer or a `Failure` for each."""
        if not questions:
            return []
        answers = service.ask(questions, strict=False)
        failed, asked = failures(answers), [a for a in answers if not isinstance(a, NotAsked)]
        self._log("calls", len(asked), "sum")
        self._log("failed", len(failed) / len(asked), weight=len(asked))
        if failed:
            self._warn(f"the language model gave no usable answer to some questions: {failed[0].error}")
        if len(asked) < len(answers):
            self._warn("the language model seems to be down: further questions of the batch were not asked.")
        if service is not self._operations:
            return answers
        limit = self.params.max_words
        cut = [a if isinstance(a, Failure) else library.within(a, limit) for a in answers]
        if cut != answers:
            self._warn(f"an experience of more than `max_words` ({limit}) words was cut.")
        return cut

    def _filled(self, template: str, attempt: Attempt | None = None, **fields: str) -> str:
        p = self.params
        fields |= {"objective": p.objective, "learning_objective": p.learning_objective}
        fields |= {"limit": str(p.per_group), "words": str(p.max_words)}
        if attempt is not None:
            reward = f"{attempt.reward:g}" if p.ground_truth else HIDDEN
            fields |= {
                "question": attempt.question,
                "answer": attempt.answer,
                "attempt": attempt.text,
                "reward": reward,
            }
        return fill(template, fields)

    def _shown(self, group: Summarized) -> str:
        """The summaries of a group with their rewards; in the paper's variant with correct or wrong."""
        p, parts = self.params, []
        for i, (attempt, summary) in enumerate(group, start=1):
            label = f"reward {attempt.reward:g}"
            if not p.ground_truth:
                label = f"reward {HIDDEN}"
            elif p.variant == "paper":
                label = "correct" if attempt.reward > p.reward_low else "wrong"
            parts.append(f"Attempt {i} ({label}):\n{summary}")
        return "\n\n".join(parts)


def _answered(answers: Sequence[Any]) -> list[Any]:
    return [a for a in answers if not isinstance(a, Failure)]


def _reply(value: Any) -> str:
    """A reply that says something.

    Raises:
        ValueError: it is no text, or empty.
    """
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is no reply; it must be a text.")
    return value
