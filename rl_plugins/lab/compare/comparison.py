"""Runs a planned comparison and reports it: what `rl-plugins compare` and `rl-plugins demo` share."""

from __future__ import annotations

import importlib.util
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from rl_plugins.core.errors import ConfigError, pip_command
from rl_plugins.core.files import claim
from rl_plugins.lab.compare import attribution, costs, report
from rl_plugins.lab.compare.plan import Comparison
from rl_plugins.lab.compare.runs import is_finished, run_all
from rl_plugins.runtime.report import package_state
from rl_plugins.runtime.tested import ALLOW_VARIABLE, inside, wanted


@dataclass(frozen=True)
class RunOptions:
    """Options of both commands.

    Args:
        cost_unit: of :data:`rl_plugins.lab.compare.costs.COST_UNITS`, in which all variants have the same budget.
    """

    out: Path
    seeds: Sequence[int] = (0, 1, 2)
    baseline: str = "grpo"
    jobs: int = 1
    cost_unit: str = "steps"
    dry_run: bool = False

    @property
    def notes(self) -> list[str]:
        """What a reader must know of these options."""
        if self.cost_unit != "engine_seconds" or self.jobs == 1:
            return []
        return [
            f"{self.jobs} runs share this machine, which changes engine time from run to run. For a budget in it use "
            f"--jobs 1."
        ]


def need_plots() -> None:
    """Fails before anything is trained if the report could not be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "matplotlib is not installed, and the curves of the report are drawn with it. Nothing was trained. "
            f"Install it: {pip_command('plot')}"
        )


def need_host(host: str) -> None:
    """Fails before anything is made if the host is not there, or of a version that is not allowed.

    Raises:
        ConfigError: so it is.
    """
    version, state = package_state(host)
    if state == "missing":
        raise ConfigError(f"{host} is not installed. Nothing was trained. Install it: {pip_command(host)}")
    if not inside(host, version) and not os.environ.get(ALLOW_VARIABLE):
        raise ConfigError(
            f"{host} {version} is installed, and {wanted(host)} is allowed. Nothing was trained. Install one of those: "
            f"{pip_command(host)}, or set {ALLOW_VARIABLE}=1 to try."
        )


def run(
    comparison: Comparison,
    metrics: Sequence[str],
    options: RunOptions,
    *,
    console: Console | None = None,
    watch: str = "reward",
    environment: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    cube: attribution.Cube | None = None,
) -> None:
    """Says what is set, runs what is not finished, and writes and prints the report.

    Args:
        metrics: logged values of the report; none: rewards and each reward function.
        watch: the logged value shown next to the bars.
        cube: of methods, whose subsets are the variants; None: nothing is attributed.

    Raises:
        ConfigError: a finished run has not counted the cost unit.
    """
    console = console or Console()
    for note in comparison.notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    if options.dry_run:
        for planned in comparison.runs:
            state = "finished" if is_finished(planned) else "to run"
            console.print(
                f"{planned.variant.label} seed {planned.seed} ({state}): {shlex.join(planned.arguments)}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
        return
    claim(comparison.out, "compare")
    costs.require(comparison, options.cost_unit)
    seconds = run_all(comparison, options.jobs, watch, console, dict(environment or {}))
    summary = report.write(comparison, metrics or report.found_metrics(comparison), seconds, labels, options.cost_unit)
    console.print(Markdown(report.text(summary, brief=True)))
    if cube:
        console.print(Markdown(attribution.write(summary, cube, comparison.out)))
    console.print(
        f"With costs and settings: {comparison.out}{os.sep}{', '.join(summary['files'])} ({seconds:.0f} s)",
        highlight=False,
    )
