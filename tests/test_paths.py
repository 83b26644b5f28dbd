"""Paths that cannot be made or read, and files that are damaged: one paragraph that names them, no traceback."""

from __future__ import annotations

import json

import pytest
import yaml
from typer.testing import CliRunner

from rl_plugins.commands.cli import app
from rl_plugins.core.errors import ConfigError
from rl_plugins.core.files import parquet_of, read_json
from rl_plugins.lab.demo.trl_data import write


def refused(*words: object) -> str:
    result = CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "400"})
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit | type(None)), result.exception
    assert "Traceback" not in result.output
    return result.stderr


@pytest.fixture(scope="module")
def laptop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("paths")
    write(folder / "laptop")
    (folder / "file").write_text("in the way")
    config = {
        "dataset_name": str(folder / "laptop/data"),
        "reward_funcs": ["rl_plugins.lab.demo.rewards.exact"],
        "methods": ["vade"],
        "model_name_or_path": str(folder / "laptop/policy"),
        "output_dir": str(folder / "out"),
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ["audit", "run.yaml", "--max-rows", "4", "--out", "file/out"],
        ["compare", "run.yaml", "mc_grpo", "--seeds", "1", "--out", "file/out"],
        ["demo", "--seeds", "1", "--out", "file/out"],
        ["bench", "vade", "--seeds", "1", "--out", "file/out"],
        ["export", "vade", "--host", "trl", "--into", "file/out"],
        ["fuse", "laptop/policy", "laptop/policy", "--out", "file/out"],
        ["inspect", "file"],
        ["new", "my_method", "--into", "file/out"],
    ],
    ids=lambda words: words[0],
)
def test_a_path_that_cannot_be_made(laptop, monkeypatch, words):
    monkeypatch.chdir(laptop)
    assert refused(*words)
    assert (laptop / "file").read_text() == "in the way"


def test_a_damaged_parquet_file_is_named(tmp_path):
    import pyarrow
    import pyarrow.parquet as pq

    path = tmp_path / "rows.parquet"
    pq.write_table(pyarrow.table({"a": list(range(1000))}), path)
    whole = path.read_bytes()
    for damaged in (b"", b"PAR1", whole[:-1], whole[: len(whole) // 2], b"not parquet at all" * 10):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"rows\.parquet"), parquet_of(path):
            pq.read_table(path)
    path.unlink()
    with pytest.raises(FileNotFoundError), parquet_of(path):
        pq.read_table(path)


@pytest.mark.parametrize("deep", ["[" * 100_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000])
def test_json_that_is_nested_deep_is_no_json(tmp_path, deep):
    with pytest.raises(ValueError):
        read_json(deep)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"a": 1}) + "\n" + deep + "\n")
    assert "rows.jsonl" in refused("check", "gdpo", "--rows", rows)
    assert "rows.jsonl" in refused("mode-pairs", rows, tmp_path / "pairs.jsonl")
    assert "rows.jsonl" in refused("suggest", "--logs", rows)
