"""What travels between ranks and driver grows with what was asked for, and with nothing else: counted in bytes."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from scale_driver import Batch


def travelled(names: list[str], rows: int, tokens: int, ranks: int) -> tuple[int, int]:
    """Bytes of all ranks to the driver, and back."""
    batch = Batch(names, rows, tokens, ranks)
    parts = [batch.part(k) for k in range(ranks)]
    decision = batch.decided(batch.joined(parts))
    back = batch.split(decision)
    return sum(len(pickle.dumps(p)) for p in parts), sum(len(pickle.dumps(p)) for p in back)


@pytest.mark.parametrize("name", ["gdpo", "vade", "mc_grpo"])
def test_decisions_by_rows_travel_as_rows(name: str) -> None:
    short, long = travelled([name], 256, 16, 4), travelled([name], 256, 512, 4)
    assert long[0] < 1.05 * short[0] and long[1] < 1.05 * short[1]
    more = travelled([name], 1024, 16, 4)
    assert more[0] < 4.2 * short[0] and more[1] < 4.2 * short[1]


@pytest.mark.parametrize(("name", "columns"), [("mssr_shaping", 1), ("d3s", 1)])
def test_tokens_travel_once_and_only_their_columns(name: str, columns: int) -> None:
    sent = {}
    for tokens in (256, 1024):
        for ranks in (2, 32):
            sent[tokens, ranks] = travelled([name], 256, tokens, ranks)
    per_token_up, per_token_back = ((sent[1024, 2][i] - sent[256, 2][i]) / (256 * 768) for i in (0, 1))
    assert per_token_up == pytest.approx(4 * columns, rel=0.05)  # float32 log-probs or entropies; no place, no mask
    assert per_token_back < 4.3  # float32 advantages, or which tokens stay
    for one, way in zip(sent[1024, 2], (0, 1), strict=True):
        assert sent[1024, 32][way] - one < 30 * 4096, "thirty ranks more are thirty heads more, and no token twice"
