"""How old the rows of a batch are, as every host logs it."""

from __future__ import annotations

from torch import Tensor

SHARES = {"0": (0, 1), "1": (1, 2), "2_3": (2, 4), "4_7": (4, 8), "8_15": (8, 16), "16_up": (16, None)}
"""Name of a bar of the histogram -> the first staleness in it, and the first behind it."""


def staleness_metrics(newest: Tensor, oldest: Tensor) -> dict[str, float]:
    """Metrics of the rows that are trained, each row once.

    Args:
        newest, oldest: (rows,) int64 published weights between those that made the newest (oldest) token of a row and
            now: `current_version - newest_version`, `current_version - version`.

    Returns:
        Under `rl_plugins/`: `staleness_mean` and `staleness_max` by the newest token, `staleness_oldest_mean` and
        `staleness_oldest_max` by the oldest; `mixed_version_rows`, the share of rows made by more than one version;
        and where a row is stale, by its newest token, `staleness_share/..`: a histogram as shares of the rows. Nothing
        without a row.
    """
    if not len(newest):
        return {}
    values = {
        "staleness_mean": float(newest.double().mean()),
        "staleness_max": float(newest.max()),
        "staleness_oldest_mean": float(oldest.double().mean()),
        "staleness_oldest_max": float(oldest.max()),
        "mixed_version_rows": float((oldest > newest).double().mean()),
    }
    if bool((newest > 0).any()):
        for name, (first, behind) in SHARES.items():
            inside = (newest >= first) & (newest < behind if behind is not None else newest >= first)
            values[f"staleness_share/{name}"] = float(inside.double().mean())
    return {f"rl_plugins/{name}": value for name, value in values.items()}
