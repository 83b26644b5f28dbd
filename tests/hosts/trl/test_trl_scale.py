"""What travels between ranks and driver grows with what was asked for, and with nothing else: counted in bytes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from harness import make, policy
from operations import allocated, exponent, instructions

from rl_plugins.commands.doctor import dry_run
from rl_plugins.core.requests import Generated, Trajectory
from rl_plugins.runtime.ranks import dumps
from rl_plugins.trl.generation.decided import _moves
from rl_plugins.trl.generation.work import ProgramRow

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))  # behind tests/, which has a `messages`, too
from scale_driver import Batch
from scale_ranks import BY_ROWS, BY_TOKENS, TOGETHER, launch
from scale_start import SMALL, rows_read
from scale_state import dataset_of


def travelled(names: list[str], rows: int, tokens: int, ranks: int) -> tuple[int, int]:
    """Bytes of all ranks to the driver, and back."""
    batch = Batch(names, rows, tokens, ranks)
    parts = [batch.part(k) for k in range(ranks)]
    decision = batch.decided(batch.joined(parts))
    back = batch.split(decision)
    return sum(len(dumps(p)) for p in parts), sum(len(dumps(p)) for p in back)


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


@pytest.mark.parametrize("name", ["gdpo", "mssr_shaping", "d3s"])
def test_the_split_does_not_grow_with_the_ranks(name: str) -> None:
    """Bytes and instructions: every rank takes its own rows and tokens, and nobody looks at those of the others."""
    made, executed = [], []
    for ranks in (2, 64):
        batch = Batch([name], 512, 256, ranks)
        decision = batch.decided(batch.joined([batch.part(k) for k in range(ranks)]))
        made.append(allocated(lambda batch=batch, decision=decision: batch.split(decision)))
        executed.append(instructions(lambda batch=batch, decision=decision: batch.split(decision)))
    assert made[1] < made[0] + 62 * 64, "nothing but a few numbers for each rank more"
    assert executed[1] - executed[0] < 62 * 1000, "a loop over the ranks, not over rows"


def test_what_a_rank_gets_does_not_grow_with_the_ranks() -> None:
    few, many = (travelled(["gdpo"], 8 * ranks, 16, ranks)[1] / ranks for ranks in (8, 256))
    assert many < 1.05 * few


def test_rows_beyond_a_share_go_to_the_first_ranks_with_room() -> None:
    assert _moves(torch.tensor([4, 0, 3, 1]), 2) == [{0: 1, 1: 1}, {}, {2: 3}, {}]
    assert _moves(torch.tensor([2, 0, 1]), 2) == [None] * 3, "no rank enters an exchange"


@pytest.mark.parametrize("name", BY_TOKENS)
@pytest.mark.parametrize("what", ["tokens", "rows"])
def test_deciding_per_token_is_linear(name: str, what: str) -> None:
    """Bytes that are allocated to join, decide and split; a token has 30 of them on the driver."""

    def count(factor: int) -> int:
        rows, tokens = (128, 128 * factor) if what == "tokens" else (128 * factor, 128)
        batch = Batch([name], rows, tokens, 4)
        parts = [batch.part(k) for k in range(4)]
        return allocated(lambda: batch.split(batch.decided(batch.joined(parts))))

    few, many = count(1), count(8)
    assert exponent(few, many, 8) < 1.05
    assert many / (8 * 128 * 128) < {"mssr_shaping": 300, "d3s": 400}[name], "bytes a token"


@pytest.mark.parametrize("name", BY_ROWS)
def test_deciding_per_row_does_not_grow_with_the_tokens(name: str) -> None:
    def count(tokens: int) -> int:
        batch = Batch([name], 256, tokens, 4)
        parts = [batch.part(k) for k in range(4)]
        return allocated(lambda: batch.split(batch.decided(batch.joined(parts))))

    assert count(512) == count(16)


@pytest.mark.long
@pytest.mark.host
@pytest.mark.ranks
def test_two_processes_receive_what_they_need() -> None:
    """Bytes torch's collectives hand to the driver (first) and to the other process, by tokens of a completion."""
    rows, short, long = 128, 64, 256
    found = launch([*BY_ROWS, *BY_TOKENS, *TOGETHER], rows, [short, long], 2)
    got = {(one["case"], one["tokens"]): one["received"] for one in found}

    def growth(case: str, rank: int) -> int:
        return int(got[case, long][rank] - got[case, short][rank])

    for name in BY_ROWS:
        assert max(growth(name, 0), growth(name, 1)) < 0.01 * got[name, short][1], "no token"
    for name in BY_TOKENS:
        of_ranks = [Batch([name], rows, n).length.view(2, -1).sum(1) for n in (long, short)]
        largest = int(torch.stack([of.max() for of in of_ranks]).diff().abs())  # parts are padded to the largest
        assert growth(name, 0) == pytest.approx(4 * largest, rel=0.01), "one float32 column"
        assert growth(name, 1) < 1.2 * largest, "which tokens stay, or nothing but rows"
    tokens = rows * (long - short)
    # 25 bytes a token of a trajectory. A half of the trained ones, and of the waiting ones, which are half as long.
    assert growth("queue", 1) < 25 * 0.8 * tokens
    assert growth("programs", 0) < 0.01 * tokens, "its programs made its rows, and more"
    assert growth("rounds", 0) + growth("rounds", 1) < 1.0 * tokens, "3 bytes a token, of rows that move"


@pytest.mark.host
@pytest.mark.parametrize(
    "methods",
    [
        {"vade": {}, "mc_grpo": {"mad_eps": 0.1}},
        {"v0": {"prior": "running_mean"}, "mssr_prompts": {"rho": 0.9}},
        {"april": {}},
    ],
    ids="+".join,
)
def test_a_start_reads_no_rows(tmp_path: Path, monkeypatch: Any, methods: dict[str, dict[str, object]]) -> None:
    """Dry run, trainer, the fingerprint of its dataset and one step: rows taken by Python, and instructions of the
    package, with 1,000 and with 100,000 rows."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    policy(tmp_path / "policy")
    counts = []
    for rows in (1_000, 100_000):
        dataset, data = dataset_of(rows), tmp_path / f"data{rows}"
        data.mkdir()
        dataset.to_parquet(data / "train.parquet")
        run = {**SMALL, "model_name_or_path": str(tmp_path / "policy"), "dataset_name": str(data)}
        run |= {"reward_funcs": ["rl_plugins.lab.demo.rewards.format"], "methods": [*methods], "method_params": methods}
        config = tmp_path / f"{rows}.yaml"
        config.write_text(json.dumps({**run, "output_dir": str(tmp_path / "out")}))

        def start(config: Path = config, dataset: Any = dataset) -> None:
            assert dry_run(["--config", str(config)]) == 0
            small = {**SMALL, "per_device_train_batch_size": 8}
            trainer = make(tmp_path, [*methods], dataset=dataset, method_params=methods, **small)
            trainer.train()

        start()  # what is done once in a process
        with rows_read() as count:
            executed = instructions(start)
        counts.append((count[0], executed))
    (few, short), (many, long) = counts
    assert few > 0 and many <= few + 8, "the rows of a batch"
    assert long < 1.05 * short, "no loop over rows"


def test_rows_of_programs_cost_no_instruction_per_token() -> None:
    """What stands in their trajectories is read as arrays."""
    executed = []
    for tokens in (64, 1024):
        batch = Batch(["april"], 64, tokens, 1, {"april": {"correction": "token_tis"}})
        made = [Trajectory((1,)).add(Generated(tuple(range(n)), (-0.5,) * n, "eos", 0)) for n in batch.length.tolist()]
        rows = batch.work.rows[0]
        rows[:] = [
            replace(r, made=ProgramRow(r.plan, r.plan.group, r.number, 0, t))
            for r, t in zip(rows, made, strict=True)
            if r.plan is not None
        ]
        executed.append(instructions(lambda batch=batch: batch.part(0)))
    assert executed[0] == executed[1] > 64
