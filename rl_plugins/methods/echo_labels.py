"""ECHO's labels, which are TTRL's: the majority answer of a prompt's rollouts counts as right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_plugins import Idle, Method, MethodParams, Plan, Rollouts, from_params, param
from rl_plugins.methods.echo.answers import boxed_answer


class EchoLabels(Method):
    r"""Rewards without labels: a rollout is right if it answers what most rollouts of its prompt answer.

    For every prompt `n_votes` rollouts are generated, and as many as the host's group size are trained:

        answer_i = extract(text_i)                     # None: no answer
        label    = the most frequent answer            # of several, the one that came first; none if nobody answers
        r_i      = 1 if answer_i == label else 0

    All rollouts vote, then the n rollouts of each group that were generated first stay. Name other methods that
    generate spare rollouts before this one. The rewards replace those of the reward functions (NaN included). A run
    still needs a reward function; one that returns None is enough.

    `extract(text)` gives the answer in a canonical form, or None; answers are compared as texts. The default reads the
    last \boxed{...}, without spaces, dollar signs and thousands separators, and writes numbers alike (4, 4.0 and +4).

    Symbols: rewards (rows,) float64. A rollout of several rows (turns, agents) votes with the text of its last row, and
    all of its rows get its reward.

    Special cases: `extract` is called in the driver's own thread, once per rollout, so it must return. If it raises,
    the rollout has no answer.


    Source: arXiv 2602.02150, and `_majority_vote`, `select_top_k_per_prompt` in `verl/trainer/ppo/ttrl_utils.py` of the
    authors' code; the idea is TTRL's, arXiv 2504.16084.
    """

    name = "echo_labels"
    fidelity = "code"
    does = "Rewards rollouts that give the majority answer of their prompt, without labels"
    problems = ("no_verifier",)
    idle = (Idle({"answered": 0}, "no answer was found in any completion, so all rewards are 0. Look at `extract`."),)
    keeps_batch_size = True  # what leaves is what `plan` asked for in addition

    @dataclass(frozen=True)
    class Params(MethodParams):
        n_votes: int = param(32, "rollouts per prompt that vote; the host's group size if that is larger", ge=1)
        extract: Callable[..., Any] = param(boxed_answer, "function extract(text): an answer in canonical form or None")
        label_column: str | None = param(None, "dataset column with the true answer, for metrics only")

    @from_params
    def needs(self) -> set[str]:
        column = self.params.label_column
        return {"text"} | ({f"column:{column}"} if column else set())

    def plan(self, plan: Plan) -> Plan:
        """More rollouts, made to leave again; the first row of a group brings them."""
        asked: Counter[int] = Counter()
        for row in plan.rows:
            asked[row.group] += row.n + row.spare
        rows, seen = [], set()
        for row in plan.rows:
            if row.group not in seen:
                seen.add(row.group)
                trained = asked[row.group]
                more = max(0, self.params.n_votes - trained)
                row = row.replace(spare=row.spare + more).marked(self.name, trained)
            rows.append(row)
        return plan.replace(rows=tuple(rows))

    def rewards(self, rollouts: Rollouts) -> Tensor:
        assert rollouts.text is not None  # in `needs`
        group, rollout = rollouts.group.tolist(), rollouts.rollout.tolist()
        once = rollouts.per_rollout
        last = dict(zip(zip(once.group.tolist(), once.rollout.tolist(), strict=True), once.last.tolist(), strict=True))
        answer = {who: self._answer(rollouts.text[i]) for who, i in last.items()}
        votes: dict[int, Counter[str]] = {g: Counter() for g, _ in last}
        size: Counter[int] = Counter()
        for (g, _), a in answer.items():
            size[g] += 1
            if a is not None:
                votes[g][a] += 1
        label = {g: counted.most_common(1)[0] if counted else (None, 0) for g, counted in votes.items()}
        right = [
            answer[who] is not None and answer[who] == label[who[0]][0] for who in zip(group, rollout, strict=True)
        ]
        if label:
            self.log("majority_ratio", sum(n / size[g] for g, (_, n) in label.items()) / len(label))
            self.log("answered", sum(a is not None for a in answer.values()) / len(answer))
            self._log_truth(rollouts, last, answer, {g: of for g, (of, _) in label.items()})
        if self.traced:
            own = [str(answer[who]) for who in zip(group, rollout, strict=True)]
            first, votes_for = [str(label[g][0]) for g in group], [label[g][1] for g in group]
            text = "answered {}; the label {} has {votes} of {size} votes"
            self.note(None, text, own, first, votes=votes_for, size=[size[g] for g in group])
        return torch.tensor(right, dtype=torch.float64)

    def select(self, rollouts: Rollouts) -> Tensor:
        """The first n rollouts of every group stay; a group that this method did not plan is unchanged."""
        given = [torch.nan if n is None else n for n in rollouts.marks(self.name)]
        groups = rollouts.groups
        trained = groups.rows(groups.max(torch.tensor(given, dtype=torch.float64)))
        return torch.isnan(trained) | (rollouts.rollout < trained)

    def _answer(self, text: str) -> str | None:
        try:
            found = self.params.extract(text)
        except Exception as e:
            self.warn(
                f"the extractor raised {type(e).__name__}: {e}. The rollout counts as one without an answer; return "
                f"None where a text has none."
            )
            return None
        found = None if found is None else str(found).strip()
        return found or None

    def _log_truth(
        self,
        rollouts: Rollouts,
        last: dict[tuple[int, int], int],
        answer: dict[tuple[int, int], str | None],
        label: dict[int, str | None],
    ) -> None:
        column = self.params.label_column
        if not column:
            return
        truth = {g: str(rollouts.meta[column][i]).strip() for (g, _), i in last.items()}
        self.log("label_accuracy", sum(label[g] == truth[g] for g in label) / len(label))
        agree = [(a is not None and a == label[g]) == (a == truth[g]) for (g, _), a in answer.items()]
        self.log("reward_accuracy", sum(agree) / len(agree))
