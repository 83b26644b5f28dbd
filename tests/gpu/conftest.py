"""The tier for a GPU: each test takes its device, and what it measures goes into one file and one table.

On a machine with CUDA everything runs there. Elsewhere everything runs on the CPU, smaller, and the parts on CUDA are
skipped by name.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
for folder in ("../hosts/diffusion", "../hosts/trl", ".."):
    sys.path.insert(0, str((HERE / folder).resolve()))

CARD = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
RESULTS = pytest.StashKey[dict[str, dict[str, Any]]]()


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """Where the test runs."""
    name: str = request.param
    if name == "cuda" and CARD == "CPU":
        pytest.skip("no CUDA device")
    if name == "cpu" and CARD != "CPU":
        pytest.skip("runs on the GPU that is here")
    return name


@pytest.fixture(autouse=True, scope="module")
def _probes() -> Any:
    """The registry finds the probes of the host tests, and only in these tests."""
    import flow_probes
    import probes

    from rl_plugins.runtime import registry

    entry_points = registry._entry_points
    probes.register()
    flow_probes.register()
    yield
    registry._entry_points = entry_points


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Any:
    """`note(table, row, **values)`: a row of a table of the results."""

    def noted(table: str, row: str, **values: Any) -> None:
        tables = request.config.stash.setdefault(RESULTS, {})
        tables.setdefault(table, {}).setdefault(row, {}).update(values)

    return noted


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the tables and writes them to the folder of `GPU_RESULTS`."""
    tables = terminalreporter.config.stash.get(RESULTS, {})
    if not tables:
        return
    folder = Path(os.environ.get("GPU_RESULTS", HERE.parents[1] / "build" / "gpu"))
    folder.mkdir(parents=True, exist_ok=True)
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    name = CARD.lower().replace(" ", "-")
    content = {"card": CARD, "versions": versions, "tables": tables}
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1))
    text = f"## {CARD}, torch {torch.__version__}\n" + "".join(map(_table, tables, tables.values()))
    (folder / f"{name}.md").write_text(text)
    terminalreporter.section(f"measured; also in {folder.name}/{name}.json and .md")
    terminalreporter.write_line(text)


def _table(title: str, rows: dict[str, dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(c for row in rows.values() for c in row))

    def cell(value: Any) -> str:
        return f"{value:.3g}" if isinstance(value, float) else "" if value is None else str(value)

    lines = [[title, *columns], ["---"] * (len(columns) + 1)]
    lines += [[name, *(cell(row.get(c)) for c in columns)] for name, row in rows.items()]
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)
