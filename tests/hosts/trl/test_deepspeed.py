"""DeepSpeed's ZeRO-2 and ZeRO-3 on two CPU ranks give what one process gives: `make test-deepspeed`."""

from __future__ import annotations

import importlib.util

import pytest
from rank_runs import QUEUE, SHARDED, check_sharded, launch

pytestmark = [
    pytest.mark.host,
    pytest.mark.ranks,
    pytest.mark.deepspeed,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="needs DeepSpeed; `make test-deepspeed` installs it and runs this",
    ),
]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    code, text, results = launch(tmp_path_factory.mktemp("one"), SHARDED, 1)
    assert code == 0, text
    return results


@pytest.mark.parametrize(
    ("stage", "files"),
    [
        (2, ("zero_pp_rank_1_mp_rank_00_optim_states.pt",)),
        (3, ("zero_pp_rank_1_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_model_states.pt")),
    ],
)
def test_zero_is_one_rank(tmp_path, one_rank, stage, files):
    code, text, results = launch(tmp_path, SHARDED + QUEUE, 2, f"zero{stage}")
    assert code == 0, text
    check_sharded(one_rank, results, f"DeepSpeedEngine {stage}", files)
