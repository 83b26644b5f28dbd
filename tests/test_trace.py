"""The trace of a run: what its files say of a batch equals what the driver decided, and what a killed run leaves."""

from __future__ import annotations

import contextvars
import math
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from traces import by_name

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.method import Method
from rl_plugins.core.requests import Kind
from rl_plugins.core.rollouts import Completion, Rollouts, RowRatio, Shape, TokenIds, Tokens
from rl_plugins.runtime.decide import decide
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.runtime.trace import schema, trace_of
from rl_plugins.testing.data import make_rollouts, make_run

GROUP = 4


class Letters:
    """`Chat` of an alphabet."""

    eos = (0,)

    def decode(self, tokens: Any, special: bool = False) -> str:
        return "".join(chr(97 + t) for t in tokens)

    def piece(self, token: int) -> str:
        return self.decode((token,))


class Plans(Method):
    name = "plans"

    def plan(self, plan):
        given = Completion(tokens=(1, 2))
        first, *others = plan.rows
        return plan.replace(rows=(first.replace(spare=1, given=(given,), edit={"prompt": "b"}), *others))


class Halves(Method):
    """Halves rewards above 1 and says so."""

    name = "halves"

    def rewards(self, rollouts):
        high = rollouts.reward > 1
        self.note(high, "was {:.1f}", rollouts.reward)
        return torch.where(high, rollouts.reward / 2, rollouts.reward)


class Drops(Method):
    """The second row leaves."""

    name = "drops"

    def select(self, rollouts):
        self.note(1, "too {}", "long")
        keep = torch.ones(len(rollouts), dtype=torch.bool)
        keep[1] = False
        return keep


class Ranks(Method):
    name = "ranks"

    def advantages(self, rollouts):
        return torch.arange(len(rollouts)).double()


class Doubles(Method):
    """Reads no token."""

    name = "doubles"

    def shape(self, rollouts, tokens):
        return Shape(row_factor=torch.full((len(rollouts),), 2.0))


class Shapes(Method):
    """Later tokens count more; the first token of each row and the last row leave; a column for each."""

    name = "shapes"
    needs = frozenset({"tokens"})

    def shape(self, rollouts, tokens):
        rows = torch.ones(len(rollouts), dtype=torch.bool)
        rows[-1] = False
        self.note([0], "first")
        return Shape(
            advantages=tokens.advantages * (1 + tokens.position),
            keep_tokens=tokens.position > 0,
            keep_rows=rows,
            row_columns={"length": rollouts.length.double()},
            token_columns={"place": tokens.position.double()},
        )


def batch_of(number: int = 0, rows: int = 8) -> tuple[Rollouts, Tokens]:
    """Groups of 4 with rewards of two functions; every completion ends in a token that was only read."""
    rewards = torch.stack([torch.arange(rows) % 3, torch.full((rows,), 0.5)], 1).double()
    rewards[3] = math.nan
    r = make_rollouts(rewards, group_size=GROUP, lengths=[2 + i % 3 for i in range(rows)], batch=number)
    lengths = r.length.tolist()
    ids = TokenIds.cat(
        prompt=tuple(torch.tensor([int(g), 3]) for g in r.group),
        completion=tuple(torch.arange(n + 1) for n in lengths),
        observed=tuple(torch.tensor([False] * n + [True]) for n in lengths),
    )
    row = torch.repeat_interleave(torch.arange(rows), r.length)
    position = torch.cat([torch.arange(n) for n in lengths])
    tokens = Tokens(
        row=row,
        position=position,
        advantages=torch.zeros(len(row), dtype=torch.float64),
        keep=torch.ones(len(row), dtype=torch.bool),
        forced=position == 1,
        entropies=position.float() / 7,
    )
    return r.replace(token_ids=ids), tokens


def started(folder: Path, *methods: Method, run: Any = None, **options: Any) -> MethodStack:
    watchers = trace_of({"signals": ["entropies"], **options}, "trace", str(folder))
    stack = MethodStack([*methods, *watchers])
    stack.start(run or make_run(chat=Letters(), total_batches=1))
    return stack


def traced(stack: MethodStack, number: int = 0, rows: int = 8) -> Any:
    return decide(stack, *batch_of(number, rows), None, grpo_advantages, 10**6)


def read(folder: Path, table: str, number: int = 0) -> Any:
    found = pq.read_table(folder / "trace" / table / f"batch-{number:08d}.parquet")
    expected = {
        "rollouts": schema.ROLLOUTS,
        "batches": schema.BATCHES,
        "tokens": schema.TOKENS,
        "updates": schema.UPDATES,
    }[table]
    assert found.schema.equals(expected)
    return found.to_pylist()


def test_files_say_what_was_decided(tmp_path: Path) -> None:
    stack = started(tmp_path, Plans(), Halves(), Drops(), Ranks(), Doubles(), Shapes())
    first_plan(stack, [0, 1], GROUP, 2 * GROUP, 16, None)
    d = traced(stack)
    rows, (rollouts, tokens) = read(tmp_path, "rollouts"), batch_of()
    assert [r["row"] for r in rows] == list(range(8))
    assert d.keep_tokens is not None and d.advantages is not None
    for i, row in enumerate(rows):
        mine = tokens.row == i
        assert row["prompt"] == "ad"[int(rollouts.group[i])].replace("d", "b") + "d"
        assert row["completion"] == "abcde"[: len(row["completion_ids"])]
        kinds = [int(Kind.SAMPLED)] * (len(row["kinds"]) - 1) + [int(Kind.OBSERVED)]
        if i != 1:  # of a row that `select` took out nobody hands on the tokens
            kinds[1] = int(Kind.FORCED)
        assert row["kinds"] == kinds
        np.testing.assert_equal([r["value"] for r in row["rewards"]], rollouts.rewards[i].tolist())
        np.testing.assert_equal(row["raw_reward"], float(rollouts.reward[i]))
        np.testing.assert_equal(row["reward"], float(d.rollouts.reward[i]))
        assert row["trained"] == bool(d.trained[i])
        assert row["advantage"] == float(d.row_advantages[i])
        live = d.keep_tokens[mine]
        if row["trained"]:
            assert row["token_left"] == [-1 if k else 0 for k in live.tolist()] + [-1]
            last = row["advantages"][-1]
            assert last["stage"] == "shapes.shape"
            kept = [
                x for x, k in zip(last["tokens"] or [last["advantage"]] * len(live), live.tolist(), strict=False) if k
            ]
            assert kept == d.advantages[mine][live].float().tolist()
            assert row["entropies"][:-1] == tokens.entropies[mine].tolist() and math.isnan(row["entropies"][-1])
            assert by_name(row["row_columns"]) == {"length": float(rollouts.length[i])}
            assert row["token_columns"][0]["values"][:-1] == tokens.position[mine].tolist()
    grpo = grpo_advantages(rollouts)
    assert [r["grpo"] for r in rows] == grpo.tolist()
    # what left, by whom, and why
    assert rows[1]["left"] == [{"method": "drops", "hook": "select", "tokens": 3}]
    assert rows[7]["left"] == [{"method": "shapes", "hook": "shape", "tokens": 3}] and not rows[7]["trained"]
    assert rows[0]["left"] == [{"method": "shapes", "hook": "shape", "tokens": 1}]
    assert rows[1]["notes"][1:] == [{"method": "drops", "hook": "select", "text": "too long", "values": []}]
    assert rows[2]["notes"] == [{"method": "halves", "hook": "rewards", "text": "was 2.5", "values": []}]
    assert rows[0]["notes"][-1] == {"method": "shapes", "hook": "shape", "text": "first", "values": []}
    assert [r["rewarded"][0]["reward"] for r in rows if r["row"] in (2, 5)] == [1.25, 1.25]
    # stages: `ranks` numbers the rows that stayed
    assert [r["advantages"][0]["advantage"] for r in rows if r["advantages"]] == [0, 1, 0, 3, 4, 5, 6]
    assert rows[0]["advantages"][0]["stage"] == "ranks.advantages"
    assert [r["advantages"][1]["advantage"] for r in rows if r["advantages"]] == [0, 2, 0, 6, 8, 10, 12]
    # the plan
    assert (
        rows[0]["plan"]["by"] == ["plans"] and rows[0]["origin"] == "given" and rows[0]["plan"]["edited"] == ["prompt"]
    )
    assert rows[4]["plan"]["by"] == [] and rows[4]["origin"] == "generated"
    (summary,) = read(tmp_path, "batches")
    assert summary["methods"] == ["plans", "halves", "drops", "ranks", "doubles", "shapes"]
    assert summary["rows"] == 8 and summary["trained_rows"] == int(d.trained.sum())
    assert summary["trained_tokens"] == int(d.keep_tokens.sum())
    change = (d.row_advantages - grpo).abs()
    for group in summary["groups"]:
        mine = rollouts.group == group["group"]
        assert group["rows"] == 4 and group["trained"] == int(d.trained[mine].sum()) and group["recorded"]
        assert group["change"] == pytest.approx(float(change[mine & d.trained].max()))
        assert group["spread"] == pytest.approx(2.0)
    assert {t["id"]: t["text"] for t in read(tmp_path, "tokens")} == dict(enumerate("abcde"))


@pytest.mark.parametrize(("host", "eps"), [("trl", 1e-4), ("verl", 1e-6)])
def test_plain_grpo_is_that_of_the_host(tmp_path: Path, host: str, eps: float) -> None:
    """Without a method nothing changes an advantage."""
    stack = started(tmp_path, run=make_run(chat=Letters(), total_batches=1, host=host))
    decide(stack, *batch_of(), None, partial(grpo_advantages, eps=eps), 10**6)
    assert [g["change"] for g in read(tmp_path, "batches")[0]["groups"]] == [0, 0]


def test_the_tracker_gets_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for W&B, which keeps one table of a step, and for trackio. tests/hosts/trl has the real ones."""
    batch, logged = 0, {"wandb": dict[int, Any](), "trackio": dict[int, Any]()}

    def table(columns: list[str], data: list[Any]) -> list[Any]:
        return [dict(zip(columns, row, strict=True)) for row in data]

    def wandb_log(metrics: Any, commit: bool) -> None:
        assert not commit
        (logged["wandb"][batch],) = metrics.values()

    def trackio_log(metrics: Any, step: int) -> None:
        assert current.get()
        (logged["trackio"][step],) = metrics.values()

    current = contextvars.ContextVar("current_run", default="")
    contexts = SimpleNamespace(current_run=current)
    wandb = SimpleNamespace(run=None, Table=table)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(context_vars=contexts, Table=table, log=trackio_log))

    def train(folder: str, **options: Any) -> None:
        nonlocal batch
        stack = started(tmp_path / folder, Halves(), run=make_run(chat=Letters(), total_batches=4), **options)
        for batch in range(4):
            traced(stack, batch)

    train("no tracker", table=3)
    current.set("run")
    wandb.run = SimpleNamespace(log=wandb_log)
    train("no table")
    assert not any(logged.values())
    train("on", table=3, every=2)
    for tables in logged.values():
        rows = [row for number in sorted(tables) for row in tables[number]]
        completions = [r["completion"] for number in (0, 2) for r in read(tmp_path / "on", "rollouts", number)[:3]]
        assert [r["completion"] for r in rows] == completions and [r["batch"] for r in rows] == [0] * 3 + [2] * 3
        assert rows[2]["notes"] == rows[5]["notes"] == "halves: was 2.5"


def test_the_hub_gets_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    class Api:
        def __getattr__(self, name: str) -> Any:
            return lambda **given: calls.append((name, given))

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    stack = started(tmp_path, Halves(), hub="me/run")
    traced(stack)
    assert not calls
    stack.watchers[0].ended()
    assert [name for name, _ in calls] == ["create_repo", "upload_folder", "upload_file"]
    assert all(given["repo_id"] == "me/run" and given["repo_type"] == "dataset" for _, given in calls)
    made, folder, card = (given for _, given in calls)
    assert made["private"] and made["exist_ok"] and folder["folder_path"] == tmp_path / "trace"
    head = yaml.safe_load(card["path_or_fileobj"].decode().split("---")[1])
    for config in head["configs"]:
        assert list((tmp_path / "trace").glob(config["data_files"])), config
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: 1 / 0)
    stack.watchers[0].ended()
    assert "me/run" in caplog.text and "ZeroDivisionError" in caplog.text


def test_datasets_reads_every_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain call of `datasets`, which knows no maps."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    stack = started(tmp_path, Halves(), Drops(), Logs(), Shapes(), run=make_run(chat=Letters(), total_batches=2))
    for number in range(2):
        traced(stack, number)
    (trace,) = stack.watchers
    stack.stats = {"loss/weight_mean": 0.75}
    trace.updated({"shapes": 0.5}, [RowRatio(0, torch.tensor([1.0, 1.25]), torch.tensor([False, True]))])  # type: ignore[attr-defined]
    assert trace._writer.wait() == ""  # type: ignore[attr-defined]

    def load(table: str) -> Any:
        return datasets.load_dataset("parquet", data_files=f"{tmp_path}/trace/{table}/*.parquet", split="train")

    rollouts, batches, updates, tokens = map(load, ("rollouts", "batches", "updates", "tokens"))
    assert (len(rollouts), len(batches), len(updates), len(tokens)) == (16, 2, 1, 5)
    assert [r["value"] for r in rollouts[2]["rewards"]] == batch_of()[0].rewards[2].tolist() == [2.0, 0.5]
    assert by_name(rollouts[2]["row_columns"]) == {"length": 4.0} and rollouts[10]["batch"] == 1
    assert by_name(batches[0]["stats"])["logs/batch"] == 3.0
    assert updates[0]["batch"] == 1 and updates[0]["lr_scale"] == 0.5
    assert by_name(updates[0]["stats"]) == {"loss/weight_mean": 0.75}
    assert updates[0]["ratios"] == [{"row": 0, "ratio": [1.0, 1.25], "clipped": [0, 1]}]
    assert dict(zip(tokens["id"], tokens["text"], strict=True)) == dict(enumerate("abcde"))


def test_a_host_that_knows_no_factor_says_what_was_logged_in_the_loss(tmp_path: Path) -> None:
    """As verl does, once after all steps of a batch; a step in which nothing was logged has no record."""
    stack = started(tmp_path, Halves(), run=make_run(chat=Letters(), total_batches=2))
    (trace,) = stack.watchers
    for number, values in enumerate(({}, {"loss/weight_mean": 0.75})):
        traced(stack, number)
        stack.stats = values
        trace.updated(None, ())
    assert trace._writer.wait() == ""  # type: ignore[attr-defined]
    (file,) = (tmp_path / "trace" / "updates").iterdir()
    (update,) = pq.read_table(file).to_pylist()
    assert (update["batch"], update["lr_scale"], update["scaled"], update["ratios"]) == (1, None, [], None)
    assert by_name(update["stats"]) == {"loss/weight_mean": 0.75}


def test_a_trace_decides_nothing(tmp_path: Path) -> None:
    methods = (Halves, Drops, Ranks, Shapes)
    plain = MethodStack([m() for m in methods])
    plain.start(make_run())
    one, two = traced(plain), traced(started(tmp_path, *(m() for m in methods)))
    for name in ("stays", "trained", "keep_tokens", "advantages", "row_advantages"):
        assert torch.equal(getattr(one, name), getattr(two, name))
    assert plain.notes is None


def test_batches_and_groups_are_sampled(tmp_path: Path) -> None:
    run = make_run(chat=Letters(), total_batches=5)
    stack = started(tmp_path, every=2, groups=1, run=run)
    for number in range(5):
        traced(stack, number, 16)
    assert sorted(os.listdir(tmp_path / "trace" / "rollouts")) == [f"batch-{n:08d}.parquet" for n in (0, 2, 4)]
    chosen = [{r["group"] for r in read(tmp_path, "rollouts", n)} for n in (0, 2, 4)]
    assert all(len(c) == 1 for c in chosen)
    recorded = [{g["group"] for g in read(tmp_path, "batches", n)[0]["groups"] if g["recorded"]} for n in (0, 2, 4)]
    assert recorded == chosen
    assert len(read(tmp_path, "batches", 4)[0]["groups"]) == 4, "every group has a summary"


def test_a_batch_that_is_not_recorded_is_asked_for_nothing(tmp_path: Path) -> None:
    """Its tokens and their ids are neither collected nor sent, and it is decided on by rows."""
    stack = started(tmp_path, Halves(), every=2, run=make_run(chat=Letters(), total_batches=4))
    for number in range(4):
        recorded = number % 2 == 0
        assert stack.needs_now == ({"tokens", "token_ids", "entropies"} if recorded else set())
        assert stack.reads_tokens is recorded and bool(stack.token_columns) is recorded
        rollouts, tokens = batch_of(number)
        if not recorded:
            rollouts, tokens = rollouts.replace(token_ids=None), None
        decide(stack, rollouts, tokens, None, grpo_advantages, 10**6)
    assert stack.needs == {"tokens", "token_ids", "entropies"}, "a run without one of them is refused before it starts"
    assert not stack.watchers[0]._writer.wait()
    assert [p.name for p in sorted((tmp_path / "trace" / "rollouts").iterdir())] == [
        f"batch-{number:08d}.parquet" for number in (0, 2)
    ]


def test_the_oldest_batches_leave(tmp_path: Path) -> None:
    run = make_run(chat=Letters(), total_batches=6)
    stack = started(tmp_path, max_gb=6e-5, run=run)
    for number in range(6):
        traced(stack, number)
    kept = sorted(os.listdir(tmp_path / "trace" / "rollouts"))
    assert kept[-1] == "batch-00000005.parquet" and 1 <= len(kept) < 6
    assert len(os.listdir(tmp_path / "trace" / "batches")) == 6, "summaries stay"


def test_a_run_takes_out_what_another_wrote_from_its_first_batch_on(tmp_path: Path) -> None:
    """A shorter run in the same folder, and one that is resumed, are not shown with batches of before."""

    def run(batches: range, *methods: Method) -> list[int]:
        stack = started(tmp_path, *methods)
        for number in batches:
            traced(stack, number, rows=4)
        return sorted(int(path.stem[-8:]) for path in (tmp_path / "trace" / "rollouts").iterdir())

    assert run(range(5)) == [0, 1, 2, 3, 4]
    assert run(range(3, 4)) == [0, 1, 2, 3]
    assert run(range(2)) == [0, 1]
    for table in ("batches", "tokens"):
        assert not [path for path in (tmp_path / "trace" / table).iterdir() if int(path.stem[-8:]) > 1]


def test_a_write_that_fails_is_told_and_ends_nothing(tmp_path: Path, caplog: Any) -> None:
    run = make_run(chat=Letters(), total_batches=3)
    stack = started(tmp_path, run=run)
    traced(stack, 0)
    stack.watchers[0]._writer.wait()
    (tmp_path / "trace" / "rollouts").rename(tmp_path / "elsewhere")
    (tmp_path / "trace" / "rollouts").write_text("a file in its place")
    traced(stack, 1)
    traced(stack, 2)
    assert "could not be written" in caplog.text and "Training goes on" in caplog.text
    whole = pq.read_table(tmp_path / "elsewhere" / "batch-00000000.parquet")
    assert len(whole) == 8


def test_a_batch_without_rewards_of_its_own_is_no_batch(tmp_path: Path) -> None:
    stack = started(tmp_path)
    r, t = batch_of()
    r = r.replace(reward=torch.full_like(r.reward, math.nan))
    decide(stack, r, t, None, grpo_advantages, 10**6)
    assert not os.listdir(tmp_path / "trace" / "rollouts")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (3, "`trace` is 3. Give true, false, or options"),
        ({"evry": 2}, "evry"),
        ({"every": 0}, "every"),
        ({"signals": ["entropy"]}, "`signals` names 'entropy'. Allowed are"),
    ],
)
def test_words_that_mean_nothing_are_refused(word: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        trace_of(word, "trace", "out")


def test_off_is_off() -> None:
    assert trace_of(None, "trace", "") == trace_of(False, "trace", "") == trace_of("", "trace", "") == []
    assert trace_of("true", "trace", "")[0].params == trace_of(True, "trace", "")[0].params


class Logs(Method):
    name = "logs"

    def advantages(self, rollouts):
        self.log("batch", 3.0 + rollouts.batch)
        return grpo_advantages(rollouts)


def test_what_methods_log_of_a_batch_is_in_its_summary(tmp_path: Path) -> None:
    stack = started(tmp_path, Logs())
    traced(stack)
    assert stack.watchers[0]._writer.wait() == ""  # type: ignore[attr-defined]
    (summary,) = read(tmp_path, "batches")
    assert by_name(summary["stats"])["logs/batch"] == 3.0
    assert stack.metrics.take()["logs/batch"] == ("mean", 3.0, 1.0), "the host still gets it"
