"""PS-GRPO (arXiv 2510.04392): rewards for saying the same to every wording of a question."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_plugins import ConfigError, Idle, Method, MethodError, MethodParams, from_params, signals
from rl_plugins.core.errors import shown
from rl_plugins.core.rollouts import Plan, PromptPool, Rollouts, Run
from rl_plugins.kit.columns import cell
from rl_plugins.kit.priors import dataset_of
from rl_plugins.kit.prompt_memory import SMALL
from rl_plugins.kit.services import number
from rl_plugins.methods.ps_grpo.params import PsGrpoParams
from rl_plugins.methods.ps_grpo.sets import Compared, Sets, numbered, weights
from rl_plugins.methods.ps_grpo.texts import Ids, Matrix, Texts, Vocabulary

_SIMILARITY = number(0, 1)


class PsGrpo(Method):
    """Rewards a rollout for its mean text similarity to the rollouts of the other wordings of its question.

    A set holds n wordings of one question, prompts of their own in the dataset. o_ij is rollout j of wording i, and g
    rollouts are made of each wording.

        exact     r_ij = mean over wordings u != i of mean over m = 1..g of sim(o_ij, o_um)
        sampled   the same over `kappa` of the other wordings and `s` rollouts of each, drawn anew for every o_ij
        reward    alpha r_ij + gamma Acc(o_ij)

    Rollouts of the own wording never count. The sampled reward has the mean of the exact one, and equals it with kappa
    = n - 1 and s = g. Acc is the token F1 to the answer in `answer_column` (the best of several answers), or the run's
    own reward without that column. The host makes the advantages, per wording.

    sim compares lower-case words and punctuation marks, o_ij as hypothesis with o_um as reference:

        bleu1, bleu2   brevity penalty x geometric mean of the clipped precisions of orders 1 to N; order 2 with 1 added
                       to both counts
        rougeL, f1     F1 of the longest common subsequence, of the tokens in common
        em             1 if all tokens are equal, else 0
        a function     similarity(hypotheses, references), two lists of texts -> as many numbers in [0, 1]

    Every epoch goes through all sets once, in an order of its own. A batch takes the next sets as wholes, as long as
    they fit, and then later sets of the epoch that fit into the rest. Places that no set fits into stay empty. A set
    that did not fit comes first in the next batch.

    Symbols: r, Acc and the reward are (rows,) float64.

    Special cases: wordings without a rollout in the batch are left out of the mean. A rollout that is alone, because
    its set has no other wording or its column is empty, has no reward (NaN). If all of a batch are alone, the reward is
    0 and the batch trains nothing, with a warning. A row without a reward (NaN) has none afterwards, and no other is
    compared with it. A rollout of several rows is its last row's text and counts once. A text without a word is similar
    to none (0). A wording without an answer in `answer_column` has Acc = 0.

    State: the epoch, its order, and what is still to come of it. The order of an epoch and the
    sampled comparisons come from `self.rng`.

    Raises:
        ConfigError: a set larger than the batch; no set of two wordings; rows that name no set.
        MethodError: a set larger than the batch; an answer that is no text; not one similarity in [0, 1] per pair.

    Source: arXiv 2510.04392 (Con-RAG), without code.
    """

    name = "ps_grpo"
    fidelity = "paper"
    state_version = 2  # the order of an epoch, and what is left of it
    does = "Rewards answers that agree with those to other wordings of the same question"
    problems = ("no_verifier",)
    needs = from_params(
        lambda p: signals(
            "prompt_index",
            "text",
            "whole_batches",
            f"column:{p.set_column}",
            columns=[p.answer_column if p.gamma > 0 else None],
        )
    )
    idle = (Idle({"collapsed": 1.0}, "all sets have the same answer. Raise `gamma`, or add a KL term."),)
    Params = PsGrpoParams

    def __init__(self, params: MethodParams | None = None) -> None:
        super().__init__(params)
        self._left_out: set[int] = set()
        self._too_large = 0

    # ---- sets

    def check(self, run: Run) -> None:
        if self._whole_column(run):
            self._check_sets(self._sets(run), run)

    def start(self, run: Run) -> None:
        self._of = self._sets(run)
        self._check_sets(self._of, run)
        alone = int((self._of.size == 1).sum())
        if alone:
            self.warn(
                f"{alone} of the {len(self._of.size)} sets have one wording, so their rollouts get no reward. Remove "
                f"these rows, or give further wordings."
            )
        self._smallest = int(self._of.size.min())
        self.state = {"epoch": 0}
        self._shuffle()

    def _sets(self, run: Run) -> Sets:
        column = self.params.set_column
        dataset, size = dataset_of(run), run.dataset_size or 0
        return Sets.of(
            dataset[column][:] if self._whole_column(run) else [cell(dataset, i, column) for i in range(size)],
            column,
        )

    def _whole_column(self, run: Run) -> bool:
        """Whether the sets of all rows can be read at once: not from a list of rows."""
        names = getattr(run.dataset, "column_names", None) or ()
        return not isinstance(run.dataset, list) and self.params.set_column in names

    def _check_sets(self, sets: Sets, run: Run) -> None:
        largest = int(sets.size.max(initial=0))
        if largest < 2:
            raise ConfigError(
                f"no two rows of the dataset have the same value in the column `{self.params.set_column}`, so there "
                f"is nothing to compare with. Set method_params.ps_grpo.set_column to the column of the sets."
            )
        if run.batch_rows is not None and largest > run.batch_rows // run.group_size:
            raise ConfigError(_too_large(largest, run.batch_rows // run.group_size))

    # ---- batches

    def select_prompts(self, pool: PromptPool, n: int) -> Sequence[int]:
        """The wordings of the next sets; then any others, which `plan` leaves out."""
        sets = self._of
        taken = np.array([i for i in pool.taken if i >= 0], dtype=np.int64)
        if not len(taken):
            self._too_large = 0 if n >= sets.size.max() else n
        chosen = sets.members(self._next_sets(n, taken))
        left = {*taken.tolist(), *chosen.tolist()}
        rest = list(islice((i for i in range(pool.size) if i not in left), n - len(chosen)))
        self._left_out = set(rest)
        return [*chosen.tolist(), *rest]

    def _next_sets(self, room: int, taken: Ids) -> Ids:
        """Numbers of the sets that come next, together at most `room` prompts, none of them among those taken."""
        sets, state, chosen = self._of, self.state, [np.empty(0, dtype=np.int64)]
        free = np.ones(len(sets.size), dtype=bool)
        free[sets.number[taken]] = False
        while True:
            late, order, place = state["late"].numpy(), state["order"].numpy(), state["place"]
            if place == len(order) and not len(late):
                self._shuffle()
                continue
            if room < self._smallest:
                break
            looked, fitting = late, self._fitting(late, free, room)
            while len(fitting) < room and len(looked) - len(late) < len(order) - place:  # the first fill the batch
                looked = np.append(looked, order[place + len(looked) - len(late) :][:SMALL])
                fitting = self._fitting(looked, free, room)
            fitting = fitting[: np.searchsorted(np.cumsum(sets.size[looked[fitting]]), room, side="right")]
            if not len(fitting):
                break
            chosen.append(looked[fitting])
            room -= int(sets.size[chosen[-1]].sum())
            free[chosen[-1]] = False
            seen = max(fitting[-1] + 1, len(late))
            state["late"] = torch.from_numpy(np.delete(looked[:seen], fitting))
            state["place"] = place + int(seen) - len(late)
        return np.concatenate(chosen)

    def _fitting(self, sets: Ids, free: NDArray[np.bool_], room: int) -> Ids:
        """Places of those that are free and not too large."""
        return np.flatnonzero(free[sets] & (self._of.size[sets] <= room))

    def _shuffle(self) -> None:
        """Begins an epoch. Its order is not changed any more: `place` and `late` say which sets are left."""
        epoch = self.state["epoch"] + 1
        order = torch.from_numpy(self.rng(f"epoch {epoch}").permutation(len(self._of.size)))
        self.state |= {"epoch": epoch, "order": order, "place": 0, "late": order[:0]}

    def plan(self, plan: Plan) -> Plan | None:
        """Without the prompts that no set was chosen for."""
        if self._too_large:
            raise MethodError(_too_large(int(self._of.size.max()), self._too_large))
        rows = tuple(row for row in plan.rows if row.prompt_index not in self._left_out)
        self.log("empty_places", len(plan.rows) - len(rows))
        return plan.replace(rows=rows) if len(rows) < len(plan.rows) else None

    # ---- rewards

    def rewards(self, rollouts: Rollouts) -> Tensor:
        p, each = self.params, rollouts.per_rollout
        prompt, group = each.prompt_index.numpy(), each.group.numpy()
        wording = np.where(prompt >= 0, prompt, -1 - group)
        order = np.lexsort((each.rollout.numpy(), group, wording))  # random numbers do not depend on the order of rows
        order = order[~np.isnan(each.reward.numpy()[order])]
        rows = each.last.numpy()[order].tolist()
        assert rollouts.text is not None  # in `needs`
        texts = [rollouts.text[i] for i in rows]
        vocabulary = Vocabulary()
        sets = self._compared(texts, wording[order], [rollouts.meta[p.set_column][i] for i in rows])
        found = [Texts([vocabulary(text) for text in one.texts]) for one in sets]
        r, accuracy = np.full(len(each.reward), np.nan), each.reward.numpy().copy()
        for one, similarity in zip(sets, self._similarities(sets, found), strict=True):
            r[order[one.rows]] = one.mean(similarity)
        if p.answer_column is not None and p.gamma > 0:
            answers = [_answers(rollouts.meta[p.answer_column][i], p.answer_column) for i in rows]
            for one in sets:
                accuracy[order[one.rows]] = one.accuracy([answers[i] for i in one.rows], vocabulary)
        self._log(r[order], accuracy[order], [one.most_frequent(vocabulary) for one in sets])
        if len(rows) and bool(np.isnan(r).all()):
            self.warn("no rollout of a batch has another wording to be compared with, so all rewards are 0.")
            return torch.where(torch.isnan(rollouts.reward), torch.nan, 0.0)
        reward = torch.from_numpy(p.alpha * r + (p.gamma * accuracy if p.gamma > 0 else 0.0))
        if self.traced:
            values = {"consistency": torch.from_numpy(r), "accuracy": torch.from_numpy(accuracy)}
            text = "consistency {consistency:.2f} with other wordings, accuracy {accuracy:.2f}"
            self.note(None, text, **{name: each.rows.rows(value) for name, value in values.items()})
        return torch.where(torch.isnan(rollouts.reward), torch.nan, each.rows.rows(reward))

    def _compared(self, texts: Sequence[str], wording: Ids, values: Sequence[Any]) -> list[Compared]:
        """The sets of the batch, and which rollouts are compared. All arguments are sorted by wording."""
        p, rng = self.params, self.rng("comparisons")
        number = numbered(values, p.set_column)
        sets = []
        for rows in np.split(np.argsort(number, kind="stable"), np.cumsum(np.bincount(number))[:-1]) if texts else ():
            if p.compare == "exact":
                weight = weights(wording[rows])
            else:
                weight = weights(wording[rows], p.kappa, p.s, rng)
            ids: dict[str, int] = {}
            text = np.array([ids.setdefault(texts[i], len(ids)) for i in rows], dtype=np.int64)
            sets.append(Compared(rows, text, list(ids), weight))
        return sets

    def _similarities(self, sets: Sequence[Compared], found: Sequence[Texts]) -> list[Matrix]:
        """Of the different texts of every set, (texts, texts) each."""
        function = self.params.similarity
        if not callable(function):
            return [texts.similarity(function) for texts in found]
        pairs = [one.pairs(texts.length > 0) for one, texts in zip(sets, found, strict=True)]
        asked = [(one.texts[i], one.texts[j]) for one, both in zip(sets, pairs, strict=True) for i, j in both.tolist()]
        answers = _checked(function([a for a, _ in asked], [b for _, b in asked]), asked) if asked else []
        matrices, begin = [np.zeros((len(one.texts),) * 2) for one in sets], 0
        for matrix, both in zip(matrices, pairs, strict=True):
            matrix[both[:, 0], both[:, 1]] = answers[begin : begin + len(both)]
            begin += len(both)
        return matrices

    def _log(self, r: Matrix, accuracy: Matrix, answers: Sequence[bytes]) -> None:
        known = ~np.isnan(r)
        if known.any():
            self.log("consistency", r[known].mean())
        if len(r):
            self.log("accuracy", accuracy.mean())
            self.log("alone", 1 - known.mean())
        if len(answers) > 1:
            self.log("distinct_answers", len(set(answers)) / len(answers))
            self.log("collapsed", float(len(set(answers)) == 1))


def _answers(value: Any, column: str) -> list[str]:
    """The answers of a row."""
    several = value if isinstance(value, (list, tuple, np.ndarray)) else [] if value is None else [value]
    wrong = next((v for v in several if not isinstance(v, (str, int, float)) or isinstance(v, bool)), None)
    if wrong is not None:
        raise MethodError(
            f"the column `{column}` has the value {shown(value)}; it must be a text, a number, a list of these, or "
            f"None. Change the column, or method_params.ps_grpo.answer_column."
        )
    return [str(v) for v in several]


def _checked(answers: Any, asked: Sequence[tuple[str, str]]) -> list[float]:
    """What a similarity function returned, as numbers."""
    try:
        found = [_SIMILARITY(answer) for answer in answers]
    except (TypeError, ValueError) as e:
        raise MethodError(
            f"the function `similarity` was given {len(asked)} pairs of texts and returned {shown(answers)}: {e} It "
            f"must return one number in [0, 1] per pair."
        ) from None
    if len(found) != len(asked):
        raise MethodError(
            f"the function `similarity` was given {len(asked)} pairs of texts and returned {len(found)} numbers. It "
            f"must return one per pair."
        )
    return found


def _too_large(largest: int, prompts: int) -> str:
    return (
        f"the largest set has {largest} wordings, and a batch has {prompts} prompts. All wordings of a set must be in "
        f"one batch: make the batch larger, or remove wordings."
    )
