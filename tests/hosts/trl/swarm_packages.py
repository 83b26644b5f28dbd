"""Packages of another node for `swarm_sapo`, in the columns of the demo's tasks."""

from __future__ import annotations

from pathlib import Path

from rl_plugins.lab.demo.tasks import build_rows
from rl_plugins.methods.swarm_sapo import Files, Package
from rl_plugins.methods.swarm_sapo.packages import written_files

SIZE = 8


def fill(folder: Path, n: int = 20) -> dict[tuple[str, ...], Package]:
    """Packages of another node in an exchange, by their completions. Every fifth has equal rewards."""
    packages = []
    for i, row in enumerate(build_rows(n, seed=7)):
        answer = row["answer"]
        completions = [f"={answer}", *(f"={answer[:-1]}{k}" for k in range(7))] if i % 5 else [f"={answer}"] * SIZE
        columns = {k: row[k] for k in ("answer", "level", "task")}
        packages.append(Package(row["prompt"], columns, tuple(completions), (*[True] * 7, i % 2 == 0)))
    for name, data in written_files("other", 0, packages, 10**6).items():
        Files(folder / "swarm").put(name, data)
    return {(p.prompt[0]["content"], *p.completions): p for p in packages}
