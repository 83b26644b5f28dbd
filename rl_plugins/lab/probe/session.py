"""What `rl-plugins probe` does: the plan, the pool, the answer."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from rl_plugins.core.errors import RLPluginsError
from rl_plugins.core.files import write_text
from rl_plugins.lab.probe import report
from rl_plugins.lab.probe.answer import Line, ProbeAnswer, answer, batch_of
from rl_plugins.lab.probe.candidates import HostBatch, ProbedCandidate, every_method, of_host, of_methods
from rl_plugins.lab.probe.pool import PoolPlan, RunPool
from rl_plugins.runtime import registry
from rl_plugins.runtime.stack import build_stack

Params = Mapping[str, Mapping[str, Any]]


def probe_run(
    console: Console,
    argv: Sequence[str],
    methods: Sequence[str],
    plan: PoolPlan,
    k: int,
    out: Path,
    rollouts: int | None = None,
    as_json: bool = False,
    dry_run: bool = False,
) -> None:
    """Draws what the pool lacks, and prints what is found in it.

    Args:
        argv: arguments of `rl-plugins trl grpo`.
        methods: names; all without any.
        k: of pass@k.
        rollouts: of a batch, if not those of the run.

    Raises:
        ConfigError: what the run names cannot be had, or the pool is too small.
    """
    pool = RunPool(argv, plan, out)
    host = pool.host if rollouts is None else dataclasses.replace(pool.host, rollouts=rollouts)
    given = pool.known.args
    params = registry.parse_method_params(given.method_params)
    own, names = registry.parse_methods(given.methods), list(registry.select(list(methods)).classes) or every_method()
    why_not = _refused(pool, names, params)
    usable = [name for name in names if name not in why_not]
    if dry_run:
        _plan(console, pool, host, usable, why_not)
        return
    pool.draw(lambda missing: track(missing, "Rollouts and gradients", console=Console(stderr=True)))
    drawn = pool.read()
    batch_of(drawn, host)
    reward = drawn.rewards @ drawn.reward_weights
    candidates = [*of_host(host), *of_methods(host, usable, params, float(reward.min()), float(reward.max()))]
    if len(own) > 1:
        stack = {name: params.get(name, {}) for name in own}
        candidates.append(ProbedCandidate("+".join(own), [host.variant("the run's methods", stack)]))

    def tracked(of: Iterable[ProbedCandidate]) -> Iterable[ProbedCandidate]:
        return track(list(of), "Comparing", console=Console(stderr=True))

    found = answer(drawn, host, candidates, k, plan.seed, tracked)
    refused = [Line(name, why_not=why) for name, why in why_not.items()]
    found = dataclasses.replace(found, lines=[*found.lines, *refused])
    _tell(console, found, drawn, host, out, as_json)


def _tell(console: Console, found: ProbeAnswer, drawn: Any, host: HostBatch, out: Path, as_json: bool) -> None:
    text = json.dumps(dataclasses.asdict(found), indent=1) + "\n"
    write_text(out / "probe.json", text)
    told = [t for t in found.targets if t not in found.unclear]
    if told and importlib.util.find_spec("matplotlib"):
        report.draw(found, told[0], out / "probe.png")
    if as_json:
        print(text, end="")
        return
    prompts, each = drawn.prob.shape
    reward = (drawn.rewards @ drawn.reward_weights).mean()
    console.print(f"{prompts} prompts x {each} rollouts: reward {reward:.3f}, solved {drawn.right.mean():.2f}.")
    report.print_answer(console, found, f"the run without methods (GRPO, {host.group} rollouts per prompt)")
    console.print(f"\nWritten: {out / 'probe.json'}", highlight=False)


def _refused(pool: RunPool, names: Sequence[str], params: Params) -> dict[str, str]:
    """Method -> why the run cannot use it."""
    import trl

    from rl_plugins.trl import capabilities
    from rl_plugins.trl.compat import Seams

    found, seams = {}, Seams.of(trl.GRPOTrainer)
    for name in names:
        try:
            capabilities.check(build_stack([name], {name: params[name]} if name in params else {}), pool.known, seams)
        except RLPluginsError as e:
            found[name] = str(e).splitlines()[0]
    return found


def _plan(console: Console, pool: RunPool, host: HostBatch, usable: Sequence[str], why_not: Mapping[str, str]) -> None:
    plan, missing = pool.plan, len(pool.missing)
    rollouts = missing * plan.rollouts
    gigabytes = len(pool.prompts) * plan.rollouts * plan.dims * 4 / 1e9
    rewards = ", ".join(f.name for f in pool.functions)
    lines = {
        "to draw": f"{missing} of {len(pool.prompts)} prompts, {plan.rollouts} rollouts each",
        "tokens": f"{rollouts * pool.known.args.max_completion_length:,} at most, decoded and read again once",
        "rewards": f"{rollouts:,} completions in {missing} calls of each function: {rewards}",
        "backward passes": f"{rollouts:,} rollouts at most, equal ones once; {plan.batch} at a time where layers allow",
        "sketches": f"{plan.dims:,} numbers of a rollout, {gigabytes:.2g} GB; cosines within {plan.accuracy:g}",
        "batch": f"{host.rollouts} rollouts, {host.group} per prompt, and 1/4, 4 and 16 times as many",
        "compared": ", ".join(usable) or "no method",
    }
    for name, value in lines.items():
        console.print(f"  {name:<17}{value}", markup=False, highlight=False, soft_wrap=True)
    report.print_absent(console, [Line(name, why_not=why) for name, why in why_not.items()])
