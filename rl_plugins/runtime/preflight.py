"""Checks before a run starts: can this host, with these options, give the named methods what they need?

A flag never stays without effect: what cannot act is an error here, with the change that fixes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.method import HOOKS, SIGNALS, Bundle, Method, SameAs
from rl_plugins.core.rollouts import Run
from rl_plugins.runtime import registry
from rl_plugins.runtime.stack import MethodStack

NO_TURN_LIMITS = (
    "no method of the run plays agents, and no host limits the turns of a prompt. Name one that does (turn_control)."
)


def no_redundancy(stack: MethodStack, waits: str) -> str:
    """Why nothing in a run closes redundant rollouts, unless its program brings that.

    Args:
        waits: who waits for all rollouts of a prompt where no program makes them, and what to change.
    """
    makers = stack.claims["rollout"]
    if not makers:
        return f"without a rollout program {waits}"
    name = makers[0].name
    return (
        f"`{name}` makes the rollouts and does not say that each is alone, so none of them can be closed. Remove one "
        f"of the two. If `{name}` is yours, make its rollouts with rl_plugins.core.redundancy.independent and set "
        f'`brings = {{"redundancy"}}`.'
    )


@dataclass(frozen=True)
class HostCapabilities:
    """What one run of a host offers.

    Args:
        name, version: "trl" or "verl".
        hooks: the hooks this adapter serves in this run.
        missing_hooks: hook -> why it is not served here and what to change.
        eval_hooks: hooks served in evaluation.
        missing_signals: signal -> why this run does not have it and what to change. Signals not listed exist.
        columns: columns of the dataset, None if they are not known before the first row.
        row_columns: rollouts may bring columns of their own (programs, agent loops), so one that is not in the dataset
            shows only in the first batch.
        importance_weights: host options that are on and weight tokens by the probability they were sampled with.
        sampling_probabilities: further ones that read that probability (a rejection of tokens, say).
        weighs_old: the host's own loss weighs rollouts of older policies by the probability they were sampled with.
        rollout_as_old: the one by which rollout log-probs stand in for old ones; empty if it is off.
        options: the host's options as set by the user.
        defaults: the host's own defaults of the same options.
        missing_options: option -> where it is instead, for options of another trainer of the same host.
        run: what is known of the run, None if nothing is.
        group_option: the host's option for the rollouts per prompt.
        batch_rows: rows a batch trains, None if that is not known.
    """

    name: str
    version: str
    hooks: Collection[str]
    missing_hooks: Mapping[str, str]
    eval_hooks: Collection[str]
    missing_signals: Mapping[str, str]
    columns: Collection[str] | None
    options: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    row_columns: bool = False
    importance_weights: Mapping[str, Any] = field(default_factory=dict)
    sampling_probabilities: Mapping[str, Any] = field(default_factory=dict)
    rollout_as_old: str = ""
    weighs_old: bool = False
    missing_options: Mapping[str, str] = field(default_factory=dict)
    run: Run | None = None
    group_option: str = ""
    batch_rows: int | None = None


def preflight(stack: MethodStack, host: HostCapabilities) -> dict[str, Any]:
    """Checks a stack against a run.

    Returns:
        Host options to set: those that methods ask for and that the user left at the host's default.

    Raises:
        ConfigError: one paragraph per problem, all problems at once.
    """
    problems = [*stack.problems]
    options: dict[str, Any] = {}
    wanted: dict[str, tuple[str, Any]] = {}  # option -> the method that asked first, and its value
    brought = {"off_policy"} if stack.claims["admit"] else set()  # groups that were begun before
    brought = brought.union(*(m.brings for m in stack.methods))
    for m in stack.methods:
        problems += _other_policies(m, host.name)
        problems += _not_offered(m, host, brought)
        for option, value in m.host_options.get(host.name, {}).items():
            problem = _set_option(m, option, value, host, options, wanted)
            if problem:
                problems.append(problem)
        if host.run is not None:
            problems += _wrong_sizes(m, host.run, host)
    if host.run is not None:
        try:
            stack.check(host.run)
        except ConfigError as e:
            problems.append(str(e))
    problems += _wrong_corrections(stack, host, options)
    rounds = ", ".join(f"`{m.name}`" for m in stack.methods if m.rounds)
    for m in stack.claims["rollout"] if rounds else ():
        problems.append(
            f"{rounds} generates in rounds, and `{m.name}` makes the rollouts of a prompt with a program, which runs "
            f"once. Remove one of them."
        )
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    replaying = next((m.name for m in stack.methods if "off_policy" in m.brings), None)
    weighed = host.weighs_old or any(m.corrects_sampling for m in stack.methods) or _weights_on(host, options)
    if replaying and not weighed:
        stack.warn_once(
            f"`{replaying}` trains on rollouts of older policies, and nothing in this run weighs them: they are "
            f"trained as if they were fresh. Name a method whose loss corrects for that (decoupled_ppo, minpro, vcpo)."
        )
    return options


def _other_policies(m: Method, host: str) -> Iterator[str]:
    """A program is written for language models or for diffusion policies, and some methods for the latter only."""
    of_diffusion = "diffusion" in m.hosts
    if host in m.hosts or not (of_diffusion or (host == "diffusion" and "rollout" in m.claims())):
        return
    made, trained = ("samples of diffusion policies", "language models"), ("text", "diffusion policies")
    what, policies = made if of_diffusion else trained
    yield (
        f"`{m.name}` is for {what}, and {host} trains {policies} here. It runs on: {', '.join(m.hosts)}. Remove it, or "
        f"take one of these hosts."
    )


def _not_offered(m: Method, host: HostCapabilities, brought: Collection[str]) -> Iterator[str]:
    """Hooks that the host does not call, and signals that neither it nor a method has.

    Args:
        brought: signals of methods.
    """
    for hook in m.claims():
        if hook not in host.hooks:
            why = host.missing_hooks.get(hook, f"this version of the {host.name} adapter does not serve it.")
            yield f"`{m.name}` changes `{hook}`, and {host.name} cannot do that here: {why}"
    for hook in m.in_eval:
        if hook not in host.eval_hooks:
            yield f"`{m.name}` acts with `{hook}` in evaluation, which {host.name} does not serve."
    for signal in sorted(m.needs - set(brought)):
        why_not = _missing(signal, host)
        if why_not:
            yield f"`{m.name}` needs {SIGNALS.get(signal, f'`{signal}`')}: {why_not}"


def _wrong_sizes(m: Method, run: Run, host: HostCapabilities) -> Iterator[str]:
    """Batches that are too small for a method."""
    rows = m.rows_per_rollout * run.group_size
    if m.rows_per_rollout > 1 and host.batch_rows is not None and rows > host.batch_rows:
        yield (
            f"`{m.name}` makes up to {m.rows_per_rollout} rows of a rollout, so a group of {run.group_size} rollouts "
            f"needs {rows} rows, and the batch holds {host.batch_rows}. Make the batch larger, or the group or the "
            f"number of rows of a rollout smaller."
        )


def _wrong_corrections(stack: MethodStack, host: HostCapabilities, options: Mapping[str, Any]) -> list[str]:
    """Importance weights that count twice, and those of tokens that nobody sampled.

    Args:
        options: those that methods set.
    """
    weights = _weights_on(host, options)
    problems = _counted_twice(stack, weights)
    for m in stack.methods:
        if m.old_policy != "host" and host.rollout_as_old:
            problems.append(
                f"`{m.name}` needs log-probs of the policy at the start of the step in addition to those of the policy "
                f"that sampled, and {host.rollout_as_old} makes them the same. Turn it off, or remove `{m.name}`."
            )
    forcing = next((m.name for m in stack.methods if "forced_tokens" in m.brings), None)
    if forcing is None:
        return problems
    why = (
        f"`{forcing}` puts tokens into rollouts that were not sampled in their place, so no sampling probability of "
        f"them exists, and a weight made of one would be wrong"
    )
    problems += [
        f"{why}: `{m.name}` needs it. Remove one of the two." for m in stack.methods if "rollout_logprobs" in m.needs
    ]
    if weights or host.sampling_probabilities:
        asking = _listed({**weights, **host.sampling_probabilities})
        problems.append(f"{why}: {asking} asks for that. Turn it off, or remove `{forcing}`.")
    return problems


def _counted_twice(stack: MethodStack, weights: Mapping[str, Any]) -> list[str]:
    """More than one weight of the sampling policy."""
    first, *others = [m.name for m in stack.methods if m.corrects_sampling] or [""]
    if not first:
        return []
    why = f"`{first}` holds the weight of the policy that sampled"
    problems = [f"{why}, and so does `{other}`: it would count twice. Remove one of them." for other in others]
    if weights:
        problems.append(f"{why}, and so does {_listed(weights)}: it would count twice. Turn that off.")
    return problems


def _weights_on(host: HostCapabilities, options: Mapping[str, Any]) -> dict[str, Any]:
    """The host's own weights of the sampling policy that stay on."""
    return {k: v for k, v in host.importance_weights.items() if options.get(k, True)}


def _listed(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in options.items())


def no_row_has(column: str, methods: Sequence[str]) -> MethodError:
    """A column that neither the dataset nor any row brought."""
    names = ", ".join(f"`{n}`" for n in methods)
    return MethodError(
        f"{names} needs the column `{column}`, and neither the dataset nor a row of this batch has it. Let the "
        f"dataset, the rollout program (`trajectory.noted({column}=..)`) or the agent loop give it."
    )


def makers_of(signal: str) -> list[str]:
    """Methods whose own rollouts or plans hold a signal, with some of their parameters or with all."""
    found = []
    for name in registry.all_names():
        cls = registry.load(name)
        if isinstance(cls, Bundle):
            continue
        try:
            brings = cls.brings if isinstance(cls.brings, Set) else cls().brings
        except ConfigError:  # parameters that must be given
            continue
        found += [name] if signal in brings else []
    return found


def _missing(signal: str, host: HostCapabilities) -> str | None:
    kind, _, detail = signal.partition(":")
    if kind == "column":
        if host.columns is not None and detail not in host.columns and not host.row_columns:
            there = f"the dataset has no column `{detail}` (it has: {', '.join(sorted(host.columns))})"
            makers = " or ".join(f"`{name}`" for name in makers_of(signal))
            return f"{there}. {f'Rollouts of {makers} have it: name it in `methods`.' if makers else 'Add it.'}"
        return None
    if signal == "several_rollouts" and host.run is not None and host.run.group_size < 2:
        return f"the run has {host.group_option}={host.run.group_size}. Set {host.group_option} to 2 or more."
    if signal not in SIGNALS and kind != "engine":
        return f"there is no such signal; known: {', '.join(SIGNALS)}, column:NAME, engine:logprobs=N."
    return host.missing_signals.get(signal, host.missing_signals.get(kind))


def _set_option(
    m: Method,
    option: str,
    value: Any,
    host: HostCapabilities,
    options: dict[str, Any],
    wanted: dict[str, tuple[str, Any]],
) -> str | None:
    source = value.option if isinstance(value, SameAs) else option
    if {option, source} - set(host.options):
        why = host.missing_options.get(option)
        return (
            f"`{m.name}` sets {option}={value!r}, which this trainer does not have: {why}. Or remove the method."
            if why
            else f"`{m.name}` sets {option}={value!r}, which {host.name} {host.version} does not have. Remove the "
            f"method."
        )
    value = host.options[source] if isinstance(value, SameAs) else value
    current, default = host.options[option], host.defaults.get(option)
    first, needed = wanted.setdefault(option, (m.name, value))
    if needed != value:
        return (
            f"`{m.name}` needs {option}={value!r} and `{first}` needs {option}={needed!r}. Remove one of the methods."
        )
    if current == value:
        return None
    if current != default:
        return f"`{m.name}` sets {option}={value!r}, but the config has {option}={current!r}. Remove one of them."
    options[option] = value
    return None


def table(stack: MethodStack) -> list[tuple[str, str, str, str]]:
    """Rows (method, hooks in order, parameters, fidelity) of what is in effect, for the printed table."""
    rows: list[tuple[str, str, str, str]] = []
    for m in stack.methods:
        hooks = ", ".join(h for h in HOOKS if h in m.claims())
        params = ", ".join(f"{k}={v}" for k, v in _shown(m).items()) or "-"
        bundle = stack.bundle_of.get(m.name)
        rows.append((f"{m.name} ({bundle})" if bundle else m.name, hooks, params, m.fidelity))
    return rows


def render_table(stack: MethodStack, options: Mapping[str, Any]) -> str:
    """The methods in effect as plain text, printed by the driver at start."""
    rows = [("method", "hooks", "parameters", "fidelity"), *table(stack)]
    widths = [max(len(r[i]) for r in rows) for i in range(4)]
    lines = ["rl-plugins: methods in effect, in this order"]
    lines += ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    if options:
        lines.append("  host options set: " + ", ".join(f"{k}={v}" for k, v in options.items()))
    return "\n".join(lines)


def _shown(m: Method) -> dict[str, Any]:
    from rl_plugins.core.params import params_to_dict

    return params_to_dict(m.params)


def moved(cls: type, pinned: Mapping[str, tuple[str, ...]]) -> list[str]:
    """What an adapter relies on in a class of its host and does not find.

    Args:
        pinned: method -> its first parameters, as in the version the adapter was tested with.

    Returns:
        A text for each name that is gone or takes other parameters.
    """
    found = []
    for name, parameters in pinned.items():
        method = getattr(cls, name, None)
        if method is None:
            found.append(f"{cls.__name__}.{name} is gone")
            continue
        given = [p for p in inspect.signature(method).parameters if p != "self"]
        if tuple(given[: len(parameters)]) != parameters:
            found.append(f"{cls.__name__}.{name}({', '.join(given)}) used to be ({', '.join(parameters)})")
    return found
