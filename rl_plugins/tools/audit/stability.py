"""Part A3 of an audit: does a reward depend on when, where in a batch, and with which neighbours it is asked for?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rl_plugins.tools.audit.contrast import Contrast
from rl_plugins.tools.audit.findings import Finding
from rl_plugins.tools.audit.rows import DatasetRows
from rl_plugins.tools.audit.scoring import BATCH, Floats, RewardCaller

PART = "determinism"
REPEATS = 4  # calls whose mean is compared where rewards are stochastic


def findings(
    rows: DatasetRows,
    c: Contrast,
    scorer: RewardCaller,
    places: Sequence[int],
    rng: np.random.Generator,
    tol_stochastic: float,
) -> Iterator[Finding]:
    """Compares a second call, another order, and rows one by one with the first call.

    Args:
        tol_stochastic: difference of means of four calls that is no finding, as a share of the function's span; 0: the
            functions give the same reward each time.
    """
    pairs = [(rows[int(c.rows[i])], t, int(c.rows[i])) for i in places for t in (c.rendered[i], *c.wrong[i][:1])]
    if not pairs:
        return
    asked, texts = [row for row, _, _ in pairs], [t for _, t, _ in pairs]
    order = rng.permutation(len(pairs))

    def means(take: Sequence[int], batch: int = BATCH) -> Floats:
        some, said = [asked[i] for i in take], [texts[i] for i in take]
        return np.mean([scorer.score(some, said, batch) for _ in range(REPEATS if tol_stochastic else 1)], axis=0)

    first = means(range(len(pairs)))
    moved = np.empty_like(first)
    moved[order] = means(order.tolist())
    others = {
        "again": (means(range(len(pairs))), "is not the same when it is asked for once more"),
        "order": (moved, "depends on the place of the row in the batch"),
        "alone": (means(range(len(pairs)), batch=1), "depends on the other rows of the batch"),
    }
    for k, name in enumerate(scorer.names):
        known = first[~np.isnan(first[:, k]), k]
        limit = tol_stochastic * float(np.ptp(known)) if len(known) else 0.0
        for kind, (found, what) in others.items():
            same = (np.abs(found[:, k] - first[:, k]) <= limit) | (np.isnan(found[:, k]) & np.isnan(first[:, k]))
            if same.all():
                continue
            numbers = sorted({pairs[i][2] for i in (~same).nonzero()[0]})
            yield Finding("warn", PART, kind, f"The reward of `{name}` {what}.", tuple(numbers), {"function": name})
            break  # one that is not the same twice differs in the other ways, too
