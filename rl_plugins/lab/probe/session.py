"""What `rl-plugins probe` does: the plan, the pool, the answer."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from rl_plugins.core.errors import RLPluginsError
from rl_plugins.core.files import write_text
from rl_plugins.lab.probe import report
from rl_plugins.lab.probe.answer import Line, ProbeAnswer, answer, batch_of
from rl_plugins.lab.probe.candidates import ProbedCandidate, every_method, of_host, of_methods
from rl_plugins.lab.probe.pool import PoolPlan, RunPool
from rl_plugins.lab.probe.runs import ProbedRun
from rl_plugins.runtime import registry
from rl_plugins.runtime.bars import tracked
from rl_plugins.runtime.stack import build_stack


def probe_run(
    console: Console,
    words: Sequence[str],
    methods: Sequence[str],
    plan: PoolPlan,
    k: int,
    out: Path,
    rollouts: int | None = None,
    checkpoints: Sequence[Path] = (),
    as_json: bool = False,
    dry_run: bool = False,
) -> None:
    """Draws what the pools lack, and prints what is found in them.

    Args:
        words: a config of TRL and its options, or a command line of verl.
        methods: names; all without any.
        k: of pass@k.
        rollouts: of a batch, if not those of the run.
        checkpoints: later policies, each with a pool of its own.

    Raises:
        ConfigError: what the run names cannot be had, or a pool is too small.
    """
    run = ProbedRun.of(words)
    if rollouts is not None:
        run = dataclasses.replace(run, host=dataclasses.replace(run.host, rollouts=rollouts))
    pools = [RunPool(run, plan, out)]
    pools += [RunPool(run.at(c), plan, out / f"{i}-{c.name}") for i, c in enumerate(checkpoints, 1)]
    names = list(registry.select(list(methods)).classes) or every_method()
    why_not = _refused(run, names)
    usable = [name for name in names if name not in why_not]
    if dry_run:
        for pool in pools:
            _plan(console, pool, usable)
        report.print_absent(console, [Line(name, why_not=why) for name, why in why_not.items()])
        return
    refused = [Line(name, why_not=why) for name, why in why_not.items()]
    found = [_answered(pool, usable, k, refused) for pool in pools]
    if as_json:
        print(
            json.dumps(
                [dataclasses.asdict(a) for a in found] if checkpoints else dataclasses.asdict(found[0]), indent=1
            )
        )
        return
    prompts, each = len(pools[0].prompts), plan.rollouts
    console.print(f"{prompts} prompts x {each} rollouts: reward {found[0].reward:.3f}, solved {found[0].solved:.2f}.")
    report.print_answer(console, found[0], f"the run without methods ({run.host.group} rollouts per prompt)")
    report.print_later(console, found, [c.name for c in checkpoints])
    console.print(f"\nWritten: {out / 'probe.json'}", highlight=False)


def _answered(pool: RunPool, usable: Sequence[str], k: int, refused: Sequence[Line]) -> ProbeAnswer:
    """Draws, answers and writes."""
    pool.draw(lambda missing: tracked(missing, "Rollouts and gradients", Console(stderr=True)))
    run, drawn, out = pool.run, pool.read(), pool.out
    batch_of(drawn, run.host)
    reward = drawn.rewards @ drawn.reward_weights
    low, high = float(reward.min()), float(reward.max())
    candidates = [*of_host(run.host), *of_methods(run.host, usable, run.params, low, high)]
    if len(run.methods) > 1:
        stack = {name: run.params.get(name, {}) for name in run.methods}
        candidates.append(ProbedCandidate("+".join(run.methods), [run.host.variant("the run's methods", stack)]))

    def bar(of: Iterable[ProbedCandidate]) -> Iterable[ProbedCandidate]:
        return tracked(list(of), "Comparing", Console(stderr=True))

    found = answer(drawn, run.host, candidates, k, pool.plan.seed, bar)
    found = dataclasses.replace(found, lines=[*found.lines, *refused])
    write_text(out / "probe.json", json.dumps(dataclasses.asdict(found), indent=1) + "\n")
    told = [t for t in found.targets if t not in found.unclear]
    if told and importlib.util.find_spec("matplotlib"):
        report.draw(found, told[0], out / "probe.png")
    return found


def _refused(run: ProbedRun, names: Sequence[str]) -> dict[str, str]:
    """Method -> why the run cannot use it."""
    found = {}
    for name in names:
        try:
            run.check(build_stack([name], {name: run.params[name]} if name in run.params else {}))
        except RLPluginsError as e:
            found[name] = str(e).splitlines()[0]
    return found


def _plan(console: Console, pool: RunPool, usable: Sequence[str]) -> None:
    host, plan, missing = pool.run.host, pool.plan, len(pool.missing)
    rollouts = missing * plan.rollouts
    gigabytes = len(pool.prompts) * plan.rollouts * plan.dims * 4 / 1e9
    rewards = ", ".join(f.name for f in pool.functions)
    lines = {
        "policy": str(pool.run.trained or pool.run.sampling.model),
        "to draw": f"{missing} of {len(pool.prompts)} prompts, {plan.rollouts} rollouts each",
        "tokens": f"{rollouts * pool.run.sampling.generation['max_new_tokens']:,} at most, decoded and read again once",
        "rewards": f"{rollouts:,} completions in {missing} calls of each function: {rewards}",
        "backward passes": f"{rollouts:,} rollouts at most, equal ones once; {plan.batch} at a time where layers allow",
        "sketches": f"{plan.dims:,} numbers of a rollout, {gigabytes:.2g} GB; cosines within {plan.accuracy:g}",
        "batch": f"{host.rollouts} rollouts, {host.group} per prompt, and 1/4, 4 and 16 times as many",
        "compared": ", ".join(usable) or "no method",
    }
    for name, value in lines.items():
        console.print(f"  {name:<17}{value}", markup=False, highlight=False, soft_wrap=True)
