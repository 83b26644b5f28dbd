"""Metrics of staleness against a plain loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_plugins.runtime.staleness import staleness_metrics

ROWS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), min_size=1, max_size=30)


def loop(rows: list[tuple[int, int]]) -> dict[str, float]:
    """Rows as (staleness by the newest token, versions between its newest and its oldest)."""
    n, total, oldest_total, mixed, largest, oldest_largest = len(rows), 0.0, 0.0, 0.0, 0, 0
    bars = dict.fromkeys(("0", "1", "2_3", "4_7", "8_15", "16_up"), 0.0)
    for newest, further in rows:
        total, oldest_total = total + newest, oldest_total + newest + further
        largest, oldest_largest = max(largest, newest), max(oldest_largest, newest + further)
        mixed += further > 0
        bar = "16_up"
        for name, limit in (("8_15", 16), ("4_7", 8), ("2_3", 4), ("1", 2), ("0", 1)):
            if newest < limit:
                bar = name
        bars[bar] += 1
    found = {
        "staleness_mean": total / n,
        "staleness_max": float(largest),
        "staleness_oldest_mean": oldest_total / n,
        "staleness_oldest_max": float(oldest_largest),
        "mixed_version_rows": mixed / n,
    }
    if largest:
        found |= {f"staleness_share/{name}": count / n for name, count in bars.items()}
    return {f"rl_plugins/{name}": value for name, value in found.items()}


@given(ROWS)
def test_equal_to_a_loop(rows: list[tuple[int, int]]) -> None:
    newest = torch.tensor([a for a, _ in rows])
    assert staleness_metrics(newest, newest + torch.tensor([b for _, b in rows])) == pytest.approx(
        loop(rows), abs=1e-12
    )


def test_a_batch_of_its_own_weights_has_no_histogram() -> None:
    zero = torch.zeros(4, dtype=torch.int64)
    assert staleness_metrics(zero, zero) == dict.fromkeys(staleness_metrics(zero, zero), 0.0)
    assert not any("share" in name for name in staleness_metrics(zero, zero + 2))
    assert staleness_metrics(zero[:0], zero[:0]) == {}


def test_the_shares_are_a_histogram() -> None:
    newest = torch.tensor([0, 1, 2, 3, 4, 7, 8, 15, 16, 400])
    found = staleness_metrics(newest, newest)
    shares = {k.rpartition("/")[2]: v for k, v in found.items() if "share" in k}
    assert shares == {"0": 0.1, "1": 0.1, "2_3": 0.2, "4_7": 0.2, "8_15": 0.2, "16_up": 0.2}
