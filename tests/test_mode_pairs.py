"""`rl-plugins mode-pairs`: the rules of the pairs against a loop, tables in every form, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from rl_plugins.commands.cli import app
from rl_plugins.commands.mode_pairs import read_rows
from rl_plugins.core.errors import ConfigError
from rl_plugins.tools.preferences import TEMPLATE, PairRule, mode_pairs


def attempt(prompt: Any, mode: str, completion: str, verified: Any) -> dict[str, Any]:
    return {"prompt": prompt, "mode": mode, "completion": completion, "verified": verified}


DIRECT_WORKS = [
    attempt("a", "direct", "7", True),
    attempt("a", "direct", "8", False),
    attempt("a", "cot", "so 7", True),
]
NEEDS_COT = [attempt("b", "direct", "1", False), attempt("b", "cot", "so 2", True), attempt("b", "cot", "so 3", False)]
UNSOLVED = [attempt("c", "direct", "1", False), attempt("c", "cot", "so 1", False)]
ROWS = [*DIRECT_WORKS, *NEEDS_COT, *UNSOLVED]


def call(*words: Any, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["mode-pairs", *map(str, words)])
    assert result.exit_code == status, (result.output, result.exception)
    return " ".join((result.stderr if status == 2 else result.stdout).split())


# ---- the rules


def test_by_hand() -> None:
    found = mode_pairs(ROWS)
    asked = [TEMPLATE.replace("{prompt}", p) for p in "ab"]
    assert found.rows == [
        {"prompt": asked[0], "chosen": "7", "rejected": "so 7", "mode": "direct"},
        {"prompt": asked[1], "chosen": "so 2", "rejected": "1", "mode": "reasoning"},
    ]
    assert (found.unsolved, found.nothing_rejected) == (1, 0)


def test_what_nobody_verified_is_never_chosen() -> None:
    """Nor is a direct attempt rejected that may be right."""
    rows = [attempt("a", "direct", "7", None), attempt("a", "cot", "so 7", True)]
    assert (mode_pairs(rows).rows, mode_pairs(rows).nothing_rejected) == ([], 1)
    rows = [attempt("a", "direct", "7", True), attempt("a", "cot", "so 7", None)]
    assert mode_pairs(rows).rows[0]["rejected"] == "so 7"
    assert mode_pairs([attempt("a", "direct", "7", None), attempt("a", "cot", "x", None)]).unsolved == 1
    assert mode_pairs([attempt("a", "direct", "7", True)]).nothing_rejected == 1
    assert mode_pairs([attempt("a", "direct", "7", True), attempt("a", "cot", "7", True)]).nothing_rejected == 1


ATTEMPT = st.tuples(
    st.sampled_from("abc"), st.sampled_from(["direct", "cot"]), st.sampled_from("uvwxyz"),
    st.sampled_from([True, False, None, 0.0, 0.4, 0.5, 1]),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(drawn=st.lists(ATTEMPT, max_size=30), seed=st.integers(0, 3), data=st.data())
def test_pairs_equal_the_loop(drawn: list[Any], seed: int, data: st.DataObject) -> None:
    rows = [attempt(*d) for d in drawn]
    found = mode_pairs(rows, PairRule(template="{prompt}", seed=seed))
    pairs = {row["prompt"]: row for row in found.rows}
    dropped = 0
    for prompt in {d[0] for d in drawn}:
        right = {m: {c for p, mode, c, v in drawn if (p, mode) == (prompt, m) and v is not None and v >= 0.5}
                 for m in ("direct", "cot")}  # fmt: skip
        wrong = {c for p, mode, c, v in drawn if (p, mode) == (prompt, "direct") and v is not None and v < 0.5}
        reasoned = {c for p, mode, c, v in drawn if (p, mode) == (prompt, "cot")}
        if right["direct"]:
            kind, chosen, rejected = "direct", right["direct"], reasoned
        else:
            kind, chosen, rejected = "reasoning", right["cot"], wrong
        pair = pairs.get(prompt)
        if pair is None:
            dropped += 1
            assert not any(c != r for c in chosen for r in rejected)
        else:
            assert pair["mode"] == kind and pair["chosen"] in chosen, "verified"
            assert pair["rejected"] in rejected and pair["rejected"] != pair["chosen"]
    assert dropped == found.unsolved + found.nothing_rejected
    # neither the order of the attempts, nor copies, nor other problems change a pair
    mixed = [
        *data.draw(st.permutations(rows)),
        *rows,
        attempt("d", "direct", "u", True),
        attempt("d", "cot", "v", True),
    ]
    again = {row["prompt"]: row for row in mode_pairs(mixed, PairRule(template="{prompt}", seed=seed)).rows}
    assert {k: v for k, v in again.items() if k != "d"} == pairs and "d" in again


def test_seeds_choose_among_several() -> None:
    rows = [attempt("a", "direct", str(i), True) for i in range(9)] + [
        attempt("a", "cot", f"so {i}", 0) for i in range(9)
    ]
    found = [mode_pairs(rows, PairRule(seed=s)).rows[0] for s in range(12)]
    assert len({row["chosen"] for row in found}) > 3 and len({row["rejected"] for row in found}) > 3
    assert found[0] == mode_pairs(rows, PairRule(seed=0)).rows[0]


def test_conversations_keep_their_form() -> None:
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "{x} 1+1"}]
    rows = [attempt(prompt, "direct", "2", 1), attempt(prompt, "cot", "so 2", 1)]
    (pair,) = mode_pairs(rows, PairRule(template="[{prompt}] any way")).rows
    assert pair["prompt"] == [prompt[0], {"role": "user", "content": "[{x} 1+1] any way"}]
    assert pair["chosen"] == [{"role": "assistant", "content": "2"}]
    assert pair["rejected"] == [{"role": "assistant", "content": "so 2"}] and prompt[1]["content"] == "{x} 1+1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "fast"}, "row 1 of the attempts has the mode 'fast'; it must be direct or cot. Change the column"),
        ({"verified": "yes"}, "row 1 of the attempts has 'yes' in `verified`; it must be true, false, a number"),
        ({"verified": float("nan")}, "has nan in `verified`"),
        ({"completion": None}, "row 1 of the attempts has the completion None; it must be a text"),
        ({"prompt": []}, "row 1 of the attempts has the prompt \\[\\]; it must be a text or messages"),
        ({"prompt": [{"role": "user", "content": None}]}, "it must be a text or messages"),
    ],
)
def test_rows_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mode_pairs([ROWS[0], {**ROWS[1], **change}])


def test_rows_that_lack_a_column_and_rules_without_sense() -> None:
    with pytest.raises(
        ConfigError, match="row 0 of the attempts has no verified \\(it has: completion, mode, prompt\\)"
    ):
        mode_pairs([{k: v for k, v in ROWS[0].items() if k != "verified"}])
    with pytest.raises(ConfigError, match="the template is 'Go.'; it must hold {prompt}"):
        PairRule(template="Go.")
    with pytest.raises(ConfigError, match="both modes are called 'x'"):
        PairRule(direct="x", reasoning="x")


# ---- the command


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "csv"])
@pytest.mark.parametrize("written", ["parquet", "jsonl"])
def test_tables_in_and_out(tmp_path: Path, suffix: str, written: str) -> None:
    path, out = tmp_path / f"attempts.{suffix}", tmp_path / "pairs" / f"train.{written}"
    rows = [*ROWS, attempt('d\n, "e"', "direct", "", None)]
    table = pyarrow.Table.from_pylist(rows)
    if suffix == "parquet":
        pyarrow.parquet.write_table(table, path)
    elif suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    else:
        pyarrow.csv.write_csv(table, path)
    text = call(path, out)
    assert "2 pairs: 1 prefer a direct answer, 1 prefer reasoning. No right attempt: 2 problems." in text
    found = read_rows(out)
    assert found == list(mode_pairs(ROWS).rows)
    before = out.read_bytes()
    assert "exists. Nothing was written" in call(path, out, status=2)
    call(path, out, "--force")
    assert out.read_bytes() == before, "the same bytes"
    call(path, out, "--force", "--template", "Q: {prompt}")
    assert read_rows(out)[0]["prompt"] == "Q: a"


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        (None, ["a.jsonl", "b.jsonl"], "is no file. Give a file with a row per attempt"),
        ("", ["a.txt", "b.jsonl"], "must end in .parquet, .jsonl, .csv"),
        ("{", ["a.jsonl", "b.jsonl"], "cannot be read (JSONDecodeError"),
        ("x", ["a.parquet", "b.jsonl"], "cannot be read (ArrowInvalid"),
        ("", ["a.jsonl", "b.jsonl"], "has a pair: 0 have no right attempt, 0 have none to reject. Nothing was written"),
        ("", ["a.jsonl", "b.csv"], "b.csv; it must end in .parquet or .jsonl"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, content: str | None, words: list[str], message: str) -> None:
    if content is not None:
        (tmp_path / words[0]).write_text(content)
    assert message in call(*(tmp_path / w for w in words), status=2)
    assert not (tmp_path / words[1]).exists()
