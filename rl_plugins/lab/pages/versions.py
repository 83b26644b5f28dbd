"""The table of versions in docs/install.md: those that pyproject.toml allows, and those the tests passed with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_plugins.lab.pages.parts import renewed
from rl_plugins.runtime.tested import records, wanted

COLUMNS = ("trl", "verl", "diffusers", "transformers", "torch", "numpy", "python")


def install(text: str) -> str:
    """`docs/install.md` with its table renewed.

    Raises:
        ConfigError: the marks around the table are missing.
    """
    return renewed(text, "versions", table())


def table() -> str:
    """A row of what may be installed, and one per environment that the suites of the hosts were run in."""
    found = records()
    shown = [c for c in COLUMNS if any(c in r["versions"] for r in found)]
    rows = [("environment", *shown, "passed", "failed", "skipped", "date"), ("---",) * (len(shown) + 5)]
    rows.append(("allowed", *(f"`{wanted(c)}`" for c in shown), "", "", "", ""))
    rows += [_row(r, shown) for r in found]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", _what_ran(found)])


def _what_ran(found: Sequence[dict[str, Any]]) -> str:
    """Why the counts differ: the files of tests that each environment ran."""
    ran: dict[str, list[str]] = {}
    for record in found:
        files = ", ".join(f"`{file.removesuffix('.py')}`" for file in record["tests"])
        ran.setdefault(files, []).append(f"`{record['environment']}`")
    return "The counts differ because the files of tests do:\n\n" + "\n".join(
        f"- {', '.join(names)}: {files}" for files, names in ran.items()
    )


def _row(record: dict[str, Any], shown: list[str]) -> tuple[str, ...]:
    versions = [record["versions"].get(c, "").split("+")[0] for c in shown]
    counts = [record["passed"], len(record["failed"]), len(record["skipped"])]
    return (f"`{record['environment']}`", *versions, *map(str, counts), record["date"])
