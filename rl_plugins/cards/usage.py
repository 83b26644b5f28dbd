"""A config to copy for one method or bundle: everything that it needs and that the paper set, for every host."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_plugins.cards.catalog import HOSTS, MODES, OURS, Card, example_of, indexed, modes_of, parts_of
from rl_plugins.core.method import Bundle, Method
from rl_plugins.kit.masked import MASKED_OPTIONS
from rl_plugins.runtime import registry
from rl_plugins.runtime.card_file import card_file

# What a run must have for a signal to exist, where no paper says otherwise.
_FOR_SIGNAL: dict[str, dict[str, dict[str, Any]]] = {
    "several_updates": {
        "trl": {"num_iterations": 2},
        "verl": {"actor_rollout_ref.actor.ppo_epochs": 2},
        "diffusion": {"updates_per_batch": 2},
    },
    "off_policy": {
        "trl": {"num_iterations": 2},
        "verl": {"actor_rollout_ref.actor.ppo_epochs": 2},
        "diffusion": {"updates_per_batch": 2},
    },
    "ref_logprobs": {
        "trl": {"beta": 0.04},
        "verl": {"actor_rollout_ref.actor.use_kl_loss": True},
        "diffusion": {"beta": 0.04},
    },
    "several_rewards": {"verl": {"+rl_plugins.rewards.accuracy": 1, "+rl_plugins.rewards.format": 0.5}},
    "engine": {"verl": {"actor_rollout_ref.rollout.name": "hf_cpu"}},
}
# The method that plays agents where these need turns, with the parameters that make it the host's plain loop.
_LOOP, _PLAIN = "turn_control", {"strategy": "unlimited"}
# A whole line of verl, so that the doctor finds nothing missing in it. Files and model stand for the user's own.
VERL_BASE: dict[str, Any] = {
    "data.train_files": "train.parquet",
    "data.val_files": "test.parquet",
    "data.train_batch_size": 128,
    "actor_rollout_ref.model.path": "Qwen/Qwen2.5-1.5B-Instruct",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 128,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 8,
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.n": 8,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 8,
    "algorithm.adv_estimator": "grpo",
}
# Options that TRL's asynchronous trainer alone has.
ASYNCHRONOUS = {
    "max_staleness",
    "token_budget",
    "weight_sync_steps",
    "weight_sync_timeout",
    "max_inflight_tasks",
    "queue_maxsize",
    "fork_threshold_tokens",
    "heartbeat_stale_after_s",
}


@dataclass(frozen=True)
class Usage:
    """A config that serves one method.

    Attributes:
        methods: names in order; further methods that it cannot do without come first.
        params: method -> the parameters that must be given.
        options: host -> option -> value.
        notes: what a config cannot say.
        hosts: those that serve it.
        masked: TRL's trainer of masked diffusion language models is meant.
    """

    methods: tuple[str, ...]
    params: Mapping[str, Mapping[str, Any]]
    options: Mapping[str, Mapping[str, Any]]
    notes: tuple[str, ...]
    hosts: tuple[str, ...]
    masked: bool = False

    @property
    def to_copy(self) -> dict[str, dict[str, Any]]:
        """The parameters as a user would write them: a function or environment of the demo is one of his own."""
        return {method: {k: _own(k, v) for k, v in values.items()} for method, values in self.params.items()}

    @property
    def needs(self) -> dict[str, Any]:
        """Options of TRL, and parameters as "METHOD.PARAMETER"."""
        params = {f"{method}.{key}": value for method, values in self.to_copy.items() for key, value in values.items()}
        return {**self.options["trl"], **params}

    @property
    def command_of_trl(self) -> str:
        """The command that trains with it in TRL."""
        return f"rl-plugins trl {'masked_grpo' if self.masked else 'grpo'}"

    def yaml(self) -> str:
        """For the YAML config of `trl grpo`."""
        lines = [f"methods: [{', '.join(self.methods)}]"]
        if self.params:
            lines.append(f"method_params: {json.dumps(self.to_copy)}")
        return "\n".join([*lines, *(f"{k}: {_yaml(v)}" for k, v in self.options["trl"].items())])

    def flags(self) -> str:
        """The same as options of `command_of_trl`."""
        words = [f"--methods {' '.join(self.methods)}"]
        if self.params:
            words.append(f"--method_params '{json.dumps(self.to_copy)}'")
        return " ".join([*words, *(f"--{k} {_yaml(v)}" for k, v in self.options["trl"].items())])

    def python(self) -> str:
        """The same as arguments of the config."""
        words = [f"methods={list(self.methods)!r}"]
        if self.params:
            words.append(f"method_params={self.to_copy!r}")
        words += [f"{k}={v!r}" for k, v in self.options["trl"].items()]
        return f"{'Masked' * self.masked}GRPOConfig({', '.join(words)})"

    def python_of_diffusion(self) -> str:
        """Arguments of the config of the diffusion trainer."""
        words = [f"methods={list(self.methods)!r}"]
        if self.params:
            words.append(f"method_params={self.to_copy!r}")
        words += [f"{k}={v!r}" for k, v in self.options["diffusion"].items()]
        return f"DiffusionConfig({', '.join(words)})"

    def overrides(self, base: bool = True) -> list[str]:
        """Words of `python -m verl.trainer.main_ppo`, quoted for a shell.

        Args:
            base: with the data, the model and the batch, so that the line is whole.
        """
        options = {**(VERL_BASE if base else {}), **self.options["verl"]}
        mode = {"trainer.v1.trainer_mode": options.pop("trainer.v1.trainer_mode", "rl_plugins_sync")}
        words = [_word(f"{k}={hydra(v)}") for k, v in {**options, **mode}.items()]
        words.append(f'"+rl_plugins.methods=[{",".join(self.methods)}]"')
        return words + [
            _word(f"+rl_plugins.method_params.{method}.{key}={hydra(value)}")
            for method, values in self.to_copy.items()
            for key, value in values.items()
        ]

    def python_of_async(self) -> str:
        """Arguments of the config of TRL's asynchronous trainer with methods."""
        words = [f"methods={list(self.methods)!r}", "token_budget=0"]
        if self.params:
            words.append(f"method_params={self.to_copy!r}")
        return f"AsyncGRPOConfig({', '.join(words)})"

    def command(self) -> str:
        """The whole command of a run of verl, an override a line."""
        return " \\\n  ".join(["python -m verl.trainer.main_ppo", *self.overrides()])


def line_of(card: Card, host: str) -> str:
    """What to add to a command line of the host."""
    if card.entry.distribution == OURS and (known := indexed(card.name)):
        return str(known["use"][host])
    usage = usage_of(card.found, paper=False)
    return usage.flags() if host == "trl" else " ".join(usage.overrides(base=False))


def asynchronous_lines(found: type[Method] | Bundle) -> dict[str, str]:
    """Host -> what to write in an asynchronous run, of a name that needs rollouts of an older policy. `line_of` gets
    them by several updates on a batch."""
    parts = parts_of(found)
    if not _reuses_batches([example_of(cls) for cls in parts]):
        return {}
    modes = set.intersection(*(set(modes_of(cls)) for cls in parts))
    usage = usage_of(found, paper=False, asynchronous=True)
    lines = {"trl": f"rl_plugins.trl.asynchronous.{usage.python_of_async()}"}
    lines["verl"] = " ".join(usage.overrides(base=False))
    return {host: lines[host] for host, mode in zip(lines, MODES, strict=True) if mode in modes}


def _reuses_batches(made: Sequence[Method]) -> bool:
    """Whether rollouts of an older policy are needed, and none of these methods makes rollouts wait."""
    needed = any("off_policy" in m.needs for m in made)
    return needed and not any("admit" in m.claims() or "off_policy" in m.brings for m in made)


@dataclass(frozen=True)
class Needs:
    """What a config of TRL must have for a method.

    Attributes:
        values: option, or "METHOD.PARAMETER", -> an example of its value.
        notes: what a config does not tell, as sentences.
    """

    values: Mapping[str, Any]
    notes: tuple[str, ...]

    def beyond(self, run: Mapping[str, Any]) -> Needs:
        """Those that a config does not have. A number has to be as large, if it is whole."""
        params = registry.parse_method_params(run.get("method_params"))

        def lacks(name: str, value: Any) -> bool:
            method, _, key = name.partition(".")
            given = params.get(method, {}).get(key) if key else run.get(name)
            return not given or (isinstance(value, int) and isinstance(given, int) and given < value)

        return Needs({name: value for name, value in self.values.items() if lacks(name, value)}, self.notes)

    @property
    def text(self) -> str:
        return " ".join([*(f"{name}: {json.dumps(value)}." for name, value in self.values.items()), *self.notes])


def needs_of_run(card: Card, asynchronous: bool = False) -> Needs:
    """What a run of TRL must have for a method or bundle.

    Args:
        asynchronous: a run of TRL's asynchronous trainer; another trainer, if that one does not serve it.
    """
    if card.entry.distribution == OURS and (known := indexed(card.name)):
        values, notes = known["asynchronous" if asynchronous else "needs"], tuple(known["notes"])
    else:
        usage = usage_of(card.found, paper=False)
        values, notes = needs_of_async(card.found) if asynchronous else usage.needs, usage.notes
    if values is None:
        return Needs({"trainer": "GRPOTrainer"}, ("TRL's asynchronous trainer does not serve it.",))
    return Needs(values, notes)


def needs_of_async(found: type[Method] | Bundle) -> dict[str, Any] | None:
    """What a config of TRL's asynchronous trainer must have; None if it cannot serve this."""
    of_trl, _ = MODES
    if not all(of_trl in modes_of(cls) for cls in parts_of(found)):
        return None
    return usage_of(found, paper=False, asynchronous=True).needs


def is_asynchronous(run: Mapping[str, Any]) -> bool:
    """Whether a config is one of TRL's asynchronous trainer."""
    return bool(ASYNCHRONOUS & set(run))


def usage_of(found: type[Method] | Bundle, paper: bool = True, asynchronous: bool = False) -> Usage:
    """A config in which this method or bundle takes effect.

    Args:
        paper: with the host options of the paper; False: only what it cannot do without.
        asynchronous: for a run whose rollouts are stale anyway.
    """
    parts = parts_of(found)
    helpers = [cls for name in _needed_beside(parts) for cls in parts_of(registry.load(name))]
    plain = {cls.name: _PLAIN for cls in helpers if cls.name == _LOOP}
    everything = [*helpers, *parts]
    made = [example_of(cls) for cls in everything]
    options: dict[str, dict[str, Any]] = {host: {} for host in HOSTS}
    signals = {signal.partition(":")[0] for m in made for signal in m.needs}
    if asynchronous or not _reuses_batches(made):
        signals.discard("off_policy")
    for signal in sorted(signals & set(_FOR_SIGNAL)):
        for host, values in _FOR_SIGNAL[signal].items():
            options[host].update(values)
    if paper:
        options["verl"]["actor_rollout_ref.rollout.n"] = VERL_BASE["actor_rollout_ref.rollout.n"]
    if asynchronous or any("admit" in m.claims() for m in made):
        options["verl"]["trainer.v1.trainer_mode"] = "rl_plugins_colocate_async"
    set_by_methods = {(host, option) for m in made for host, values in m.host_options.items() for option in values}
    for host, settings in card_file(found).paper_settings.items() if paper else ():
        options[host].update({k: v for k, v in settings.items() if (host, k) not in set_by_methods})
    notes = []
    if "several_rewards" in signals:
        notes.append("Pass two or more reward functions: in TRL `reward_funcs`, in verl keys of the answer.")
    if "step_rewards" in signals:
        notes.append("Let a reward function return a list for a completion, one number per step.")
    if plain:
        notes.append(
            f"Leave out `{_LOOP}` where the host plays the turns: in TRL tools or an environment, in verl an agent "
            "loop, which says of each turn what docs/verl_details.md#rollout-programs-and-turns shows."
        )
    columns = sorted({s.partition(":")[2] for m in made for s in m.needs if s.startswith("column:")} - {"prompt"})
    brought = {name.removeprefix("column:") for m in made for name in m.brings}
    if set(columns) - brought:
        notes.append(f"The dataset needs the columns: {', '.join(c for c in columns if c not in brought)}.")
    return Usage(
        methods=tuple([cls.name for cls in helpers] + [found.name]),
        params={
            cls.name: dict(e)
            for cls in everything
            if (e := {**card_file(cls).example_params, **plain.get(cls.name, {})})
        },
        options=options,
        notes=tuple(notes),
        hosts=tuple(h for h in HOSTS if all(h in cls.hosts for cls in everything)),
        masked=bool({option for _, option in set_by_methods} & MASKED_OPTIONS),
    )


def _needed_beside(parts: Sequence[type[Method]]) -> list[str]:
    """Methods without which these do nothing: one that plays agents, where they read turns or close rollouts; or
    one that makes the rows that they read."""
    signals = {signal for cls in parts for signal in example_of(cls).needs}
    if any("rollout" in cls.claims() for cls in parts):
        return []
    own = [f"{cls.name}_rollout" for cls in parts]
    known = [name for name in own if registry.origins_of(name)]
    if known:
        return known[:1]
    return [_LOOP] if {"turns", "redundancy"} & signals else []


def _own(key: str, value: Any) -> Any:
    """ "your_module:judge" for a judge of the demo, which would train on the demo's tasks unnoticed."""
    of_demo = isinstance(value, str) and value.startswith("rl_plugins.lab.demo")
    return f"your_module:{key}" if of_demo else value


def _yaml(value: Any) -> str:
    return json.dumps(value)


def _word(text: str) -> str:
    """An override as one word of a shell."""
    return f'"{text}"' if re.search(r"[^\w.=/:@%,-]", text) else text


def hydra(value: Any) -> str:
    """A value as hydra reads it back on a command line, between double quotes of the shell."""
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z_][\w./-]*", value):
        return "'" + value.replace("'", "\\'") + "'"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{hydra(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(hydra, value)) + "]"
    return "null" if value is None else str(value)


def needs_masked(names: Iterable[str]) -> bool:
    """Whether any of the methods sets an option of masked diffusion models."""
    for name in names:
        found = registry.load(name)
        if isinstance(found, Bundle):
            if needs_masked(found.parts):
                return True
        elif MASKED_OPTIONS & set(example_of(found).host_options.get("trl", {})):
            return True
    return False
