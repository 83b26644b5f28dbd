"""The comparison on policies that are built here, in the trainer of a host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from rl_plugins.cards.usage import needs_masked
from rl_plugins.core.errors import ConfigError
from rl_plugins.core.files import claim
from rl_plugins.lab.compare.comparison import RunOptions, need_host, need_plots, run
from rl_plugins.lab.compare.plan import Comparison, Variant, make_plan, parse_variants
from rl_plugins.lab.compare.runs import is_finished
from rl_plugins.lab.compare.trl import Trl
from rl_plugins.runtime.bars import Bars, when_begun

TOY = (
    "A toy: it shows that the method acts and what it does here, not what it does on a large model. Nothing is "
    "downloaded: policy and tasks are made on this machine."
)
SETS = "Settings of every run: `{}/runs/*/config.yaml`. It also gets its seed, folder, methods and their parameters."


def headline(options: RunOptions, long: bool) -> None:
    """The demo without METHODS: GDPO, plain GRPO and a control on two rewards of different size."""
    from rl_plugins.lab.demo import headline, settings
    from rl_plugins.lab.demo.policy import policy_path

    need_plots()
    need_host("trl")
    data, console = options.out / "data", Console()
    values = headline.config(policy_path().absolute(), data.absolute(), long)
    if not options.dry_run:
        claim(options.out, "compare")
        _warm_start(console)
        settings.write_data(data)
    notes = [*headline.NOTES, _size(values), SETS.format(options.out), TOY, *options.notes]
    comparison = make_plan(_host(values), headline.VARIANTS, options.seeds, options.out, notes=notes)
    if not long and not options.dry_run:
        waiting = sum(not is_finished(planned) for planned in comparison.runs)
        minutes = waiting * headline.SECONDS / options.jobs / 60
        console.print(
            f"{waiting} runs, {options.jobs} at a time: about {minutes:.0f} minutes on two idle cores."
            if waiting
            else "All runs were finished before; the report is made again.",
            highlight=False,
        )
    run(
        comparison,
        headline.METRICS,
        options,
        console=console,
        watch="rewards/mark/mean",
        environment=settings.environment(options.out),
        labels=headline.LABELS,
    )
    told_how_to_look(comparison, options, console)


def demo_trl(methods: Sequence[str], options: RunOptions, long: bool) -> None:
    """Builds the embedded policy and compares methods with plain GRPO on it."""
    from rl_plugins.lab.demo import agents, flows, masked, settings
    from rl_plugins.lab.demo.masked_policy import load_masked_policy, masked_policy_path
    from rl_plugins.lab.demo.policy import load_policy, policy_path

    need_plots()
    variants = parse_variants(methods, options.baseline)
    names = _names(variants)
    console = Console()
    if flows.needed(names):
        _flows(variants, options, long, console)
        return
    need_host("trl")
    if agents.needed(names):
        _agents(variants, options, long, console)
        return
    data, diffusion = options.out / "data", needs_masked(names)
    path, load, made = (
        (masked_policy_path(), load_masked_policy, masked.config)
        if diffusion
        else (policy_path(), load_policy, settings.config)
    )
    values = made(path.absolute(), data.absolute(), names, long)
    if not options.dry_run:
        claim(options.out, "compare")
        _warm_start(console, lambda progress: load(progress=progress))
        settings.write_data(data)
    params = params_of(names)
    about = masked.NOTES if diffusion else (settings.ABOUT,)
    notes = [
        *about[:-1],
        f"{about[-1]} Reward: {_rewarded(values['reward_weights'])}. {_size(values)}",
        *settings.reasons(names),
        *_method_notes(params),
        SETS.format(options.out),
        TOY,
        *options.notes,
    ]
    comparison = make_plan(_host(values, diffusion), variants, options.seeds, options.out, params, notes)
    run(
        comparison,
        settings.metrics(values),
        options,
        console=console,
        watch="rewards/exact/mean",
        environment=settings.environment(options.out),
        labels=settings.LABELS,
    )
    told_how_to_look(comparison, options, console)


def _agents(variants: Sequence[Variant], options: RunOptions, long: bool, console: Console) -> None:
    """The demo of methods for agents: in an environment, with the plain agent loop where a variant has no other."""
    from rl_plugins.lab.demo import agents, settings
    from rl_plugins.lab.demo.environments.policy import agent_policy_path, load_agent_policy

    variants = agents.with_loop(variants)
    names = _names(variants)
    environment = agents.environment_of(names)
    data = options.out / "data"
    values = agents.config(agent_policy_path(environment).absolute(), data.absolute(), long)
    if not options.dry_run:
        claim(options.out, "compare")
        _warm_start(console, lambda progress: load_agent_policy(environment, progress=progress))
        agents.write_data(data, environment)
    params = params_of(names) | agents.params(names, environment)
    notes = [
        f"TRL's GRPOTrainer, a policy of 78,272 parameters, agents in `{environment}`, reward: its score. "
        f"{_size(values)} {variants[0].label} is the plain agent loop (`{agents.LOOP}`, unlimited).",
        *_method_notes(params),
        SETS.format(options.out),
        TOY,
        *options.notes,
    ]
    comparison = make_plan(_host(values), variants, options.seeds, options.out, params, notes)
    run(
        comparison,
        agents.METRICS,
        options,
        console=console,
        watch=agents.METRICS[0],
        environment=settings.environment(options.out),
        labels=agents.LABELS,
    )
    told_how_to_look(comparison, options, console)


def _flows(variants: Sequence[Variant], options: RunOptions, long: bool, console: Console) -> None:
    """The demo of methods for diffusion policies: reward curves, and samples before and after."""
    from rl_plugins.lab.demo import flows, settings
    from rl_plugins.lab.demo.shapes import load_shape_policy, shape_policy_path

    values = flows.config(shape_policy_path().absolute(), long)
    if not options.dry_run:
        claim(options.out, "compare")
        _warm_start(console, lambda progress: load_shape_policy(progress=progress))
    params = params_of(_names(variants))
    size = (
        f"Every run trains {values['batches']} batches of {values['prompts_per_batch']} prompts, "
        f"{values['group_size']} samples of {values['steps']} steps per prompt."
    )
    notes = [*flows.NOTES, size, *_method_notes(params)[:-1], SETS.format(options.out), TOY, *options.notes]
    host = flows.Flows(yaml.safe_dump(values, sort_keys=False))
    comparison = make_plan(host, variants, options.seeds, options.out, params, notes)
    run(
        comparison,
        flows.METRICS,
        options,
        console=console,
        watch="reward",
        environment=settings.environment(options.out),
        labels=flows.LABELS,
    )
    if not options.dry_run:
        flows.draw_samples(comparison, options.out / "samples.png")
        console.print(f"Samples from the same seeds, before and after: {options.out / 'samples.png'}", highlight=False)


def demo_verl(methods: Sequence[str], options: RunOptions, long: bool) -> None:
    """The demo in verl's trainer on the CPU: one run at a time, because one is 19 processes."""
    from rl_plugins.lab.compare.verl import Verl
    from rl_plugins.lab.demo import agents, flows, settings, verl_data
    from rl_plugins.lab.demo.policy import policy_path

    need_plots()
    need_host("verl")
    variants = parse_variants(methods, options.baseline)
    names = _names(variants)
    if agents.needed(names):
        raise ConfigError(
            f"{', '.join(names)}: agents are shown on TRL. Run `rl-plugins demo {' '.join(methods)}`; with verl, use "
            f"your own environment and `rl-plugins compare`."
        )
    if flows.needed(names):
        raise ConfigError(
            f"{', '.join(names)}: verl does not train diffusion policies. Run `rl-plugins demo {' '.join(methods)}`, "
            f"which has a trainer of its own for them."
        )
    if needs_masked(names):
        raise ConfigError(
            f"{', '.join(names)}: verl has no engine for masked diffusion models. Run `rl-plugins demo "
            f"{' '.join(methods)}`, which is on TRL."
        )
    console = Console()
    steps = verl_data.LONG_STEPS if long else verl_data.SHORT_STEPS
    data = options.out / "data"
    given = verl_data.overrides(data, policy_path(), options.out, steps=steps, test_every=steps // 2)
    host = Verl.of([*given, *verl_data.suited(names)])
    params = params_of(names)
    notes = [
        f"verl's trainer on the CPU (rollouts by transformers in place of vLLM), a policy of 78,272 parameters, tasks "
        f"of sorting digits, reward {_rewarded(verl_data.reward_weights(names))}. Every run trains {steps} steps of "
        f"{verl_data.PROMPTS * verl_data.SAMPLES} rollouts, {verl_data.SAMPLES} per prompt.",
        f"Every variant runs in the trainer `rl_plugins_sync`; for {options.baseline} it hands everything on to verl "
        f"and only counts what it costs. The replay buffer is asked every 0.2 s instead of verl's 2 s. Seconds are "
        f"those of the training steps, without start-up and evaluation.",
        *verl_data.reasons(names),
        *_method_notes(params),
        f"Settings of every run: `{options.out / 'runs'}/*/command.json`.",
        TOY,
    ]
    comparison = make_plan(host, variants, options.seeds, options.out, params, notes)
    waiting = sum(not is_finished(planned) for planned in comparison.runs)
    if not options.dry_run:
        claim(options.out, "compare")
        _warm_start(console)
        verl_data.write(data)
        if waiting:
            one = verl_data.SECONDS_TO_START + steps * verl_data.SECONDS_PER_STEP
            console.print(
                f"{waiting} runs of verl one after another, each about {one / 60:.1f} minutes on two idle cores (verl "
                f"starts 19 processes per run): about {waiting * one / 60:.0f} minutes. Ctrl-C stops; the same command "
                f"goes on after the last finished run.",
                highlight=False,
            )
    run(
        comparison,
        settings.metrics({"reward_weights": verl_data.reward_weights(names)}),
        options,
        console=console,
        watch="rewards/exact/mean",
        environment=verl_data.ENVIRONMENT,
        labels=settings.LABELS,
    )
    told_how_to_look(comparison, options, console)


def _names(variants: Sequence[Variant]) -> list[str]:
    return list(dict.fromkeys(name for variant in variants for name in variant.methods))


def _host(values: Mapping[str, Any], masked: bool = False) -> Trl:
    return Trl(yaml.safe_dump(dict(values), sort_keys=False), masked=masked, trace=not masked)


def told_how_to_look(comparison: Comparison, options: RunOptions, console: Console) -> None:
    """The last line of a demo: where its traces are."""
    traced = [r.folder / "trainer" for r in comparison.runs if (r.folder / "trainer" / "trace").is_dir()]
    if traced and not options.dry_run:
        console.print(
            f"What became of each rollout, and why: rl-plugins inspect {traced[0]} --html page", soft_wrap=True
        )


def params_of(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Parameters that the demo gives to methods, bundles taken apart."""
    from rl_plugins.lab.demo.settings import demo_params
    from rl_plugins.runtime import registry

    known = registry.all_names()
    parts = [p for name in names if name in known for p in getattr(registry.load(name), "parts", (name,))]
    return {name: dict(given) for name in parts if (given := demo_params(name))}


def _size(values: Mapping[str, Any]) -> str:
    return (
        f"Every run trains {values['max_steps']} steps of {values['per_device_train_batch_size']} rollouts, "
        f"{values['num_generations']} per prompt; what a method makes and does not train is in the table of costs."
    )


def _method_notes(params: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [
        *(f"`{name}` runs with {', '.join(f'{k}={v}' for k, v in given.items())}." for name, given in params.items()),
        "Nothing is learned in groups of equal rewards. Right answers on held-out prompts are comparable between "
        "variants. Right answers in training are those of the prompts and completions that each method chose.",
    ]


def _rewarded(weights: Sequence[float]) -> str:
    from rl_plugins.lab.demo.settings import REWARDS

    return " + ".join(name for name, weight in zip(REWARDS, weights, strict=True) if weight)


def _warm_start(console: Console, load: Callable[[Any], Any] | None = None) -> None:
    """Builds the policy of the demo, if it is not in the cache; `load` builds another one."""
    from rl_plugins.lab.demo.policy import load_policy

    with Bars(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console) as progress:
        update = when_begun(progress, "warm start of the policy (once, then cached)")
        (load or (lambda progress: load_policy(progress=progress)))(update)
