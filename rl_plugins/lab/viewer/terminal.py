"""A trace in the terminal. Texts of completions are data: no escape sequence of theirs reaches the terminal."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rl_plugins.core.errors import printable
from rl_plugins.core.requests import Kind
from rl_plugins.lab.viewer.comparison import SamePrompt, word_differences
from rl_plugins.lab.viewer.folder import TraceFolder
from rl_plugins.lab.viewer.summary import deeds

LONGEST = 2000  # characters of a text that are printed
ROUNDING = 1e-12  # a number below it is what rounding left of 0


def visible(text: str, most: int = LONGEST) -> str:
    """A text in which characters that a terminal acts on, or that change the direction of others, are written out."""
    cut = text if len(text) <= most else f"{text[:most]} [{len(text) - most} further characters]"
    return printable(cut).replace("\n", "\\n")


def print_run(trace: TraceFolder, console: Console) -> None:
    """Every batch in a line."""
    last = trace.batches[-1]
    methods = ", ".join(last["methods"]) or "no method"
    console.print(f"{len(trace.batches)} batches in {trace.path}, {last['host']}, {methods}", markup=False)
    table = Table(
        "batch", "step", "rows", "trained", "reward", "groups without signal", "largest change", "age", "rollouts"
    )
    recorded = set(trace.recorded)
    for b in trace.batches:
        groups = b["groups"]
        flat = sum(g["spread"] == 0 for g in groups)
        table.add_row(
            str(b["batch"]),
            str(step_of(b)),
            str(b["rows"]),
            str(b["trained_rows"]),
            _number(_mean([g["reward"] for g in groups])),
            f"{flat} of {len(groups)}",
            _number(_most([g["change"] for g in groups])),
            str(max((g["age"] for g in groups), default=0)),
            "recorded" if b["batch"] in recorded else "-",
        )
    console.print(table)
    for method, n in Counter(b["selected_by"] for b in trace.batches if b["selected"]).items():
        if method in last["methods"]:
            console.print(f"{method} chose the prompts of {n} of {len(trace.batches)} batches.", markup=False)
    console.print(
        "Step: the host's first step that trains the batch; batches count from 0, steps from 1. Change: largest "
        "difference of a row's advantage to that of plain GRPO. What else methods did: --batch N",
        markup=False,
    )


def step_of(summary: Mapping[str, Any]) -> int:
    """The host's step, counted from 1, that is the first to train a batch: it changes the weights published last."""
    return int(summary["current_version"]) + 1


def print_batch(trace: TraceFolder, batch: int, console: Console) -> None:
    """Every group of a batch in a line."""
    summary = next(b for b in trace.batches if b["batch"] == batch) if batch in trace.numbers else None
    trace.rollouts(batch)  # an error names what is there
    assert summary is not None
    columns = ["group", "dataset row", "rows", "trained", "reward", "spread", "change", "truncated", "age"]
    why = trace.why_chosen(batch)
    if any(why.values()):
        columns.append("chosen or planned by")
    table = Table(*columns)
    for g in summary["groups"]:
        name = str(g["group"]) + ("" if g["recorded"] else " (summary)")
        numbers = (_number(g[k]) for k in ("reward", "spread", "change"))
        counts = (str(g[k]) for k in ("prompt_index", "rows", "trained"))
        chosen = [Text(visible("; ".join(why[g["group"]]), 300))] if any(why.values()) else []
        table.add_row(name, *counts, *numbers, str(g["truncated"]), str(g["age"]), *chosen)
    console.print(table)
    for method, said in deeds(trace, summary).items():
        console.print(Text(visible(f"{method}: {'; '.join(said) or 'nothing of it is in the record of this batch'}")))
    stages = " -> ".join(summary["stages"])
    console.print(
        f"Advantages: {stages}. Host's step {step_of(summary)}. Next: --batch {batch} --group N", markup=False
    )


def print_group(trace: TraceFolder, batch: int, group: int, console: Console) -> None:
    """The rollouts of a group, what became of each, and why."""
    rows = trace.rollouts(batch, group)
    console.print(Text(f"Prompt (dataset row {rows[0]['prompt_index']}): {visible(rows[0]['prompt'])}"))
    for said in trace.why_chosen(batch)[group]:
        console.print(Text(f"Chosen or planned by {visible(said, 300)}"))
    if not all(_sampled(row) for row in rows):
        console.print(
            Text.assemble(
                "Completions: sampled, ", *_marked("read", Kind.OBSERVED), ", ", *_marked("forced", Kind.FORCED)
            )
        )
    for row in rows:
        rewards = ", ".join(f"{visible(r['name'], 60)} {_number(r['value'])}" for r in row["rewards"])
        if row["rewarded"]:
            rewards += "".join(f", {r['method']}: {_number(r['reward'])}" for r in row["rewarded"])
        console.rule(f"rollout {row['rollout']}", align="left", characters="-")
        console.print(completion_of(row, trace.texts))
        tokens, reward = len(row["completion_ids"]), _number(row["raw_reward"])
        console.print(Text(f"  {row['origin']}, {tokens} tokens, reward {reward} ({rewards})"))
        stages = "".join(f", {s['stage']} {_number(s['advantage'])}" for s in row["advantages"])
        console.print(Text(f"  advantage: plain GRPO {_number(row['grpo'])}{stages}"))
        for left in row["left"]:
            console.print(Text(f"  {left['tokens']} tokens left: {left['method']} in {left['hook']}"))
        for note in row["notes"]:
            console.print(Text(f"  {note['method']}: {visible(note['text'], 300)}"))
        if not row["trained"]:
            console.print(Text("  not trained"))


def print_pairs(a: TraceFolder, b: TraceFolder, found: list[SamePrompt], console: Console, most: int = 20) -> None:
    """Prompts that both sides have."""
    console.print(f"A: {a.path}, B: {b.path}. {len(found)} prompts have rollouts in both.", markup=False)
    table = Table("dataset row", "A, batch", "A, reward", "B, batch", "B, reward", "B - A")
    for p in found[:most]:
        sides = (x for batch, group in (p.a, p.b) for x in (str(batch), _number(group["reward"])))
        table.add_row(str(p.prompt), *sides, f"{p.difference:+.4g}")
    console.print(table)
    more = f"{len(found) - most} further ones. " if len(found) > most else ""
    console.print(f"{more}Next: --prompt N", markup=False)


def print_pair(a: TraceFolder, b: TraceFolder, pair: SamePrompt, console: Console) -> None:
    """The rollouts of a prompt on both sides, and where the texts of those with the same number differ."""
    rows = [trace.rollouts(batch, group["group"]) for trace, (batch, group) in ((a, pair.a), (b, pair.b))]
    console.print(Text(f"Prompt (dataset row {pair.prompt}): {visible(rows[0][0]['prompt'])}"))
    if rows[0][0]["prompt"] != rows[1][0]["prompt"]:
        console.print(Text(f"B has another prompt: {visible(rows[1][0]['prompt'])}"))
    console.print(Text("[-in A alone-] {+in B alone+}"))
    for k in range(max(map(len, rows))):
        sides = [side[k] if k < len(side) else None for side in rows]
        console.rule(f"rollout {k}", align="left", characters="-")
        for name, row in zip("AB", sides, strict=True):
            said = "-" if row is None else f"reward {_number(row['raw_reward'])}, advantage {_number(row['advantage'])}"
            console.print(Text(f"  {name}: {said}"))
        texts = ["" if row is None else row["completion"][:LONGEST] for row in sides]
        console.print(_differences(*texts))


MARKS = {Kind.OBSERVED: ("<<", ">>", "cyan"), Kind.FORCED: ("{{", "}}", "magenta")}


def completion_of(row: Mapping[str, Any], texts: Mapping[int, str]) -> Text:
    """The text of a completion, in which tokens that the policy did not sample are marked."""
    if _sampled(row):
        return Text(visible(row["completion"]))
    text, room = Text(), LONGEST
    for kind, run in itertools.groupby(zip(row["kinds"], row["completion_ids"], strict=True), key=itemgetter(0)):
        piece = _BYTES.sub(_characters, "".join(texts[token] for _, token in run))
        text.append_text(Text.assemble(*_marked(visible(piece, max(room, 0)), kind)))
        room -= len(piece)
    return text


_BYTES = re.compile(r"(\\x[89a-f][0-9a-f])+")  # as `Chat.piece` writes them


def _characters(found: re.Match[str]) -> str:
    return bytes.fromhex(found[0].replace("\\x", "")).decode("utf-8", "backslashreplace")


def _marked(text: str, kind: int) -> list[tuple[str, str]]:
    begin, end, color = MARKS.get(Kind(kind), ("", "", ""))
    return [(f"{begin}{text}{end}", color)]


def _sampled(row: Mapping[str, Any]) -> bool:
    return set(row["kinds"]) <= {Kind.SAMPLED}


def _differences(a: str, b: str) -> Text:
    text = Text()
    for kind, piece in word_differences(a, b):
        shown = visible(piece)
        if kind == "=":
            text.append(shown)
        elif kind == "-":
            text.append(f"[-{shown}-]", "red")
        else:
            text.append(f"{{+{shown}+}}", "green")
    return text


def _number(value: Any) -> str:
    if value is None or math.isnan(value):
        return "-"
    return f"{0.0 if abs(value) < ROUNDING else value:.4g}"


def _mean(values: list[float]) -> float:
    known = [v for v in values if v is not None and not math.isnan(v)]
    return sum(known) / len(known) if known else math.nan


def _most(values: list[float]) -> float:
    return max((v for v in values if v is not None and not math.isnan(v)), default=math.nan)
