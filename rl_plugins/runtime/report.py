"""What the doctors of all hosts print: versions, the environment, problems, and how many rollouts a plan has."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rl_plugins.core.rollouts import Plan
from rl_plugins.core.version import full_version
from rl_plugins.runtime import registry
from rl_plugins.runtime.rounds import in_rounds, most_in_rounds
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.runtime.tested import ALLOW_VARIABLE, bounds, inside, number, ran, wanted

VARIABLES = (registry.VETO_VARIABLE, ALLOW_VARIABLE, "RL_PLUGINS_DEBUG", "RL_PLUGINS_CACHE")
ONLY_FOR = {"trl": "runs of TRL", "peft": "LoRA in TRL", "verl": "runs of verl", "vllm": "generation with vLLM"}
"""Package that may be missing -> what needs it."""


def print_versions(names: Sequence[str], brief: bool) -> dict[str, tuple[str, str]]:
    """Versions of packages, those that are allowed, and the number of GPUs; returns the state of each package.

    Args:
        brief: the versions alone, in a line, of what is installed. A version that was not tested is told at the end.
    """
    states = {name: package_state(name) for name in names}
    if brief:
        there = [f"{name} {version}" for name, (version, state) in states.items() if state != "missing"]
        ours, python = full_version(), platform.python_version()
        print(f"Versions: {', '.join((f'rl-plugins {ours}', f'python {python}', *there, f'CUDA {_devices(states)}'))}")
        return states
    ours, python = full_version(), platform.python_version()
    rows = [("Versions", "installed", "allowed", "tested", ""), ("  rl-plugins", ours, "", "", "")]
    rows.append(("  python", python, wanted("python"), ", ".join(ran("python")), ""))
    for name, (version, state) in states.items():
        allowed = "" if bounds(name) == ("0", None) else wanted(name)
        if state == "missing":
            version, state = "-", f"not installed{f' (only for {ONLY_FOR[name]})' if name in ONLY_FOR else ''}"
        rows.append((f"  {name}", version, allowed, ", ".join(ran(name)), state))
    rows.append(("  CUDA", _devices(states), "", "", ""))
    for what, version, allowed, tested, state in rows:
        print(f"{what:<16}{version:<14}{allowed:<17}{tested:<26}{state}".rstrip())
    return states


def _devices(states: Mapping[str, tuple[str, str]]) -> str:
    if states["torch"][1] == "missing":
        return "not known without torch"
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return f"{count} device(s)" if count else "no device"


def print_environment(variables: Sequence[str], brief: bool) -> None:
    """What variables are set to; in brief only of those that are set."""
    shown = [variable for variable in variables if variable in os.environ or not brief]
    if shown:
        print("\nEnvironment")
    for variable in shown:
        print(f"  {variable:<28}{os.environ.get(variable, 'not set')}")


def package_state(name: str) -> tuple[str, str]:
    """Installed version, and what that means: nothing for a package of which no version is asked for."""
    for distribution in (name, f"{name}-cpu"):  # vLLM for the CPU has a name of its own
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        if bounds(name) == ("0", None):
            return version, ""
        if not inside(name, version):
            return version, "not allowed"
        passed = ran(name)
        if not passed or number(version)[:2] in {number(v)[:2] for v in passed}:
            return version, "ok"
        return version, "ok, not tested"
    return "-", "missing"


def without_tests(names: Sequence[str]) -> list[str]:
    """Packages installed in a version that the tests did not run with: "transformers 5.23.0 (tests: 5.10.4)"."""
    states = {name: package_state(name) for name in names}
    return [
        f"{name} {version} (tests: {', '.join(ran(name)) or wanted(name)})"
        for name, (version, state) in states.items()
        if state not in ("", "ok", "missing")
    ]


def print_problems(problems: Sequence[str], packages: Sequence[str]) -> int:
    """The end of every report.

    Args:
        packages: those whose versions matter; a version that was not tested is named, so that nobody reads "no problem"
            as "tested".

    Returns:
        1 if there is a problem, else 0.
    """
    untested = without_tests(packages)
    if untested:
        wanted = " ".join(f"'{name}=={ran(name)[-1]}'" for text in untested if ran(name := text.split()[0]))
        print(
            f"\nNot tested in this version: {', '.join(untested)}. The tested set is in constraints.txt of the "
            f"repository{f'; here: pip install {wanted}' if wanted else ''}."
        )
    if not problems:
        print(f"\nNo problem found{', but this set of versions was not tested' if untested else ''}.")
        return 0
    print(f"\n{len(problems)} problem{'s' if len(problems) > 1 else ''}:")
    for problem in problems:
        print("  - " + problem.strip().replace("\n", "\n    "))
    return 1


def per_prompt(rows: Sequence[Any], rounds: bool = False) -> str:
    """ "9 (8 trained, 1 made to leave)", or ranges where prompts differ. In rounds a method may train spare ones."""
    trained: dict[int, int] = {}
    spare: dict[int, int] = {}
    for r in rows:
        trained[r.group] = trained.get(r.group, 0) + r.n
        spare[r.group] = spare.get(r.group, 0) + r.spare
    made = [trained[g] + spare[g] for g in trained]
    if not any(spare.values()):
        return _range(made)
    if rounds:
        return f"{_range(made)} (at least {_range(trained.values())} trained)"
    return f"{_range(made)} ({_range(trained.values())} trained, {_range(spare.values())} made to leave)"


def _range(values: Any) -> str:
    low, high = min(values, default=0), max(values, default=0)
    return f"{low}" if low == high else f"{low} to {high}"


def plan_lines(stack: MethodStack, plan: Plan, rows: int, prompts: str) -> Iterator[tuple[str, str]]:
    """What the first plan comes to, one line per fact.

    Args:
        rows: the batch trains.
        prompts: how many, and how many the host alone would take.
    """
    rounds = in_rounds(stack)
    first = " in the first round" if rounds else ""
    missing = rows - plan.trained
    left = "; later rounds may fill it" if rounds else f"; {missing} stay empty" if missing else ""
    yield "prompts", prompts
    most = min(rows, plan.generated) if rounds else plan.trained  # spare ones, too, if a method takes them
    yield "rollouts", f"{per_prompt(plan.rows, rounds)} per prompt{first}"
    yield "rows generated", f"{plan.generated}{first}"
    if rounds:
        at_most, made = most_in_rounds(stack, plan)
        yield "rounds", f"at most {at_most}: up to {made} rollouts, {made / max(1, rows):.3g} times the batch"
    yield "rows trained", f"{_range((plan.trained, most))} of {rows}{first}{left}"
    if stack.methods:
        n = stack.max_unrewarded_batches
        skipped = f"{n} in a row are skipped, one more ends the run" if n else "the first ends the run"
        yield "without a reward", f"batches: {skipped} (max_unrewarded_batches)"
    agents = [m.name for m in stack.claims["rollout"] if getattr(m.params, "environment", None)]
    if agents:
        yield "rewards read", f"an episode of {', '.join(agents)} as one text, the environment's words included"
    choosers = [m.name for m in stack.claims["select"] + stack.claims["shape"]]
    if choosers:
        yield "rows that leave", f"{', '.join(choosers)} may take rows out, depending on the rewards"


def stage_lines(stack: MethodStack, plan_of: Callable[[], Plan], rows: int) -> Iterator[tuple[str, str]]:
    """What batches come to in which a method begins another part of its schedule, planned without a reward.

    Args:
        plan_of: makes the plan of the stack's batch.
        rows: the batch trains.

    Raises:
        MethodError: from a hook, or for an illegal plan.
    """
    for batch in sorted({batch for m in stack.methods for batch in stack.call("stages", m)} - {0}):
        stack.batch, stack.draw = batch, 0
        plan = plan_of()
        limits = {row.max_tokens for row in plan.rows} - {None}
        tokens = f", at most {_range(limits)} tokens" if limits else ""
        yield (
            f"from batch {batch}",
            f"{len({row.group for row in plan.rows})} groups with {per_prompt(plan.rows)} rollouts each{tokens}; "
            f"{plan.generated} rows generated, {plan.trained} of {rows} trained",
        )
