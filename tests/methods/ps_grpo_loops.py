"""What `ps_grpo` must give, in plain loops: similarities, rewards, and the check of a batch of a real trainer."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

COLUMN = "paraphrase_set_id"


def by_loops(kind: str, hypothesis: str, reference: str) -> float:
    a, b = (re.findall(r"\w+|[^\w\s]", t.lower()) for t in (hypothesis, reference))
    if not a or not b:
        return 0.0
    if kind == "em":
        return float(a == b)
    both = sum((Counter(a) & Counter(b)).values())
    if kind == "f1":
        precision, recall = both / len(a), both / len(b)
        return 2 * precision * recall / (precision + recall) if both else 0.0
    if kind == "rougeL":
        table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
        for i, x in enumerate(a):
            for j, y in enumerate(b):
                table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
        precision, recall = table[-1][-1] / len(a), table[-1][-1] / len(b)
        return 2 * precision * recall / (precision + recall) if table[-1][-1] else 0.0
    logs = [math.log(both / len(a)) if both else -math.inf]
    if kind == "bleu2":
        pairs = [Counter(itertools.pairwise(t)) for t in (a, b)]
        logs.append(math.log((sum((pairs[0] & pairs[1]).values()) + 1) / (len(a) - 1 + 1)))
    penalty = 1.0 if len(a) >= len(b) else math.exp(1 - len(b) / len(a))
    return penalty * math.exp(sum(logs) / len(logs))


def exact_by_loops(kind: str, texts: Any, wording: Any, sets: Any, rewards: Any) -> list[float]:
    """Mean over the other wordings of the set of the mean over their rollouts."""
    found = []
    for i in range(len(texts)):
        if math.isnan(rewards[i]):
            found.append(math.nan)
            continue
        means = []
        for u in sorted(set(wording) - {wording[i]}):
            values = [
                by_loops(kind, texts[i], texts[m])
                for m in range(len(texts))
                if wording[m] == u and sets[m] == sets[i] and sets[i] is not None and not math.isnan(rewards[m])
            ]
            if values:
                means.append(math.fsum(values) / len(values))
        found.append(math.fsum(means) / len(means) if means else math.nan)
    return found


def check_ps_grpo(decision: Any, sets: Sequence[Any], alpha: float = 1.0, gamma: float = 1.0) -> list[Any]:
    """Whole sets, and exact rewards with BLEU-2 beside the run's own reward. The sets, in order.

    Args:
        sets: of every row of the dataset.
    """
    r = decision.rollouts
    prompts = r.prompt_index.tolist()
    found = list(dict.fromkeys(sets[i] for i in prompts))
    for name in found:
        wanted = [i for i, s in enumerate(sets) if s == name]
        assert sorted({i for i in prompts if sets[i] == name}) == wanted, "a set was torn apart"
    own = (r.rewards * r.reward_weights).sum(1).tolist()
    similar = exact_by_loops("bleu2", r.text, prompts, [sets[i] for i in prompts], own)
    assert len({round(x, 9) for x in similar}) > 2, "the texts differ, and so do their similarities"
    for x, y, z in zip(r.reward.tolist(), similar, own, strict=True):
        assert abs(x - (alpha * y + gamma * z)) < 1e-9
    return found
