"""ECHO's labels, which are TTRL's: the majority answer of a prompt's rollouts counts as right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_plugins import Idle, Method, MethodParams, Plan, Rollouts, from_params, param, signals
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
    needs = from_params(lambda p: signals("text", columns=[p.label_column]))
    idle = (Idle({"answered": 0}, "no answer was found in any completion, so all rewards are 0. Look at `extract`."),)
    keeps_batch_size = True  # what leaves is what `plan` asked for in addition

    @dataclass(frozen=True)
    class Params(MethodParams):
        n_votes: int = param(32, "rollouts per prompt that vote; the host's group size if that is larger", ge=1)
        extract: Callable[..., Any] = param(boxed_answer, "function extract(text): an answer in canonical form or None")
        label_column: str | None = param(None, "dataset column with the true answer, for metrics only")

    def plan(self, plan: Plan) -> Plan:
        """More rollouts, made to leave again; the first row of a group brings them."""
        asked: Counter[int] = Counter()
        for row in plan.rows:
            asked[row.group] += row.n + row.spare
        rows = []
        for row in plan.rows:
            if trained := asked.pop(row.group, 0):
                more = max(0, self.params.n_votes - trained)
                row = row.replace(spare=row.spare + more).marked(self.name, trained)
            rows.append(row)
        return plan.replace(rows=tuple(rows))

    def rewards(self, rollouts: Rollouts) -> Tensor:
        assert rollouts.text is not None  # in `needs`
        once = rollouts.per_rollout
        group, count = once.groups.index.tolist(), once.groups.count
        answers = [self._answer(rollouts.text[row]) for row in once.last.tolist()]
        votes = [Counter[str]() for _ in range(count)]
        for g, answer in zip(group, answers, strict=True):
            votes[g].update(() if answer is None else (answer,))
        labels, won = zip(*(v.most_common(1)[0] if v else (None, 0) for v in votes), strict=True) if count else ((), ())
        right = [a is not None and a == labels[g] for g, a in zip(group, answers, strict=True)]
        if count:
            size = once.groups.size.double()
            self.log("majority_ratio", (torch.tensor(won, dtype=torch.float64) / size).mean())
            self.log("answered", sum(a is not None for a in answers) / len(answers))
            self._log_truth(rollouts, answers, [labels[g] for g in group], right)
        if self.traced:
            of = [(str(answers[k]), str(labels[group[k]]), won[group[k]]) for k in once.rows.index.tolist()]
            own, label, votes_for = zip(*of, strict=True)
            text = "answered {}; the label {} has {votes} of {size} votes"
            self.note(None, text, own, label, votes=votes_for, size=once.rows.rows(once.groups.rows(once.groups.size)))
        return once.rows.rows(torch.tensor(right, dtype=torch.float64))

    def select(self, rollouts: Rollouts) -> Tensor:
        """The first n rollouts of every group stay; a group that this method did not plan is unchanged."""
        given = [torch.nan if n is None else n for n in rollouts.marks(self.name)]
        groups = rollouts.groups
        trained = groups.rows(groups.max(torch.tensor(given, dtype=torch.float64)))
        keep = torch.isnan(trained) | (rollouts.rollout < trained)
        self.note(~keep, "spare: it votes, and is not trained")
        return keep

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
        self, rollouts: Rollouts, answers: list[str | None], labels: list[str | None], right: list[bool]
    ) -> None:
        """Answer, label of the group and reward of every rollout against the true answers."""
        column, once = self.params.label_column, rollouts.per_rollout
        if not column:
            return
        truth = [str(rollouts.meta[column][row]).strip() for row in once.last.tolist()]
        found = torch.tensor([label == t for label, t in zip(labels, truth, strict=True)], dtype=torch.float64)
        self.log("label_accuracy", once.groups.mean(found).mean())
        agree = [r == (a == t) for r, a, t in zip(right, answers, truth, strict=True)]
        self.log("reward_accuracy", sum(agree) / len(agree))
