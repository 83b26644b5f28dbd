"""`rl-plugins doctor --host verl`: what a command line of verl would do with methods, without starting Ray.

Its config is composed by hydra and its classes are read from their source. verl is imported, which takes seconds, only
for its own check of a run's config.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_plugins.core.errors import ConfigError, RLPluginsError, pip_command, told
from rl_plugins.core.files import parquet_of
from rl_plugins.core.rollouts import Plan
from rl_plugins.runtime.report import (
    VARIABLES,
    plan_lines,
    print_environment,
    print_versions,
    stage_lines,
)
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.verl import capabilities, compat, host_config, start
from rl_plugins.verl.config import MODES, Settings, compose, read_settings, verl_folder
from rl_plugins.verl.prompts import flat_columns

SHOWN = ("torch", "transformers", "verl", "TransferQueue", "ray", "vllm", "sglang", "trl")
POLICY, GROUP, NAME = "VERL_USE_EXTERNAL_PLUGINS", "verl.plugins", "rl_plugins"
SEAMS = {
    "V1": "separate_async starts with actor_rollout_ref.hybrid_engine=False; else that is refused",
    "V3": "a TRL without value head is no error; else verl is told that TRL is missing",
    "V6": "verl reports plugins that fail; else only rl-plugins reports its own failure",
    "V9": "trainers state the mode they follow; else a property of our trainers does",
    "V11": "trainer.v1.sampler.poll_interval exists; else rl-plugins sets it on the replay buffer",
    "V12": "columns reach verl's policy loss; rl-plugins gives verl a loss function of its own either way",
}
ENGINES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm"}  # rollout.name -> module


def examine(words: Sequence[str], print_found: Callable[[bool], None] = lambda brief: None) -> list[str]:
    """Prints the state of the installation, and what a run would do if its command line is given.

    Args:
        words: overrides of `python -m verl.trainer.main_ppo`, or the whole command.
        print_found: prints the methods that were found, at the end of the installation; before a run, in brief.

    Returns:
        What would fail.

    Raises:
        ConfigError: the words are no overrides.
    """
    given, own = own_config(_split(words))
    overrides = read_command(given)
    problems = [*_print_installation(brief=bool(words))]
    print_found(bool(words))
    if words and importlib.util.find_spec("verl") is not None:
        problems += _print_run(overrides, own)
    elif not words:
        print("\nTo see what a run would do, give its overrides: rl-plugins doctor --host verl -- OVERRIDES")
    return problems


def _split(words: Sequence[str]) -> list[str]:
    """The words of a command that was pasted in quotes, with its line breaks; others as they are."""
    if len(words) != 1 or "main_ppo" not in words[0]:
        return list(words)
    found = shlex.split(words[0].replace("\\\n", " "), comments=True)
    return found[: next((i for i, w in enumerate(found) if re.fullmatch(r"\||\|\||&|&&|;|\d*>.*", w)), len(found))]


CONFIG_OPTIONS = {"--config-name": "name", "-cn": "name", "--config-path": "path", "-cp": "path"}


def own_config(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The words without hydra's options for a config of one's own, and what `compose` gets of these."""
    rest, own, left = [], dict[str, str](), iter(words)
    for word in left:
        option, given, value = word.partition("=")
        if option in CONFIG_OPTIONS:
            own[CONFIG_OPTIONS[option]] = value if given else next(left, "")
        else:
            rest.append(word)
    return rest, own


def read_command(words: Sequence[str]) -> list[str]:
    """The overrides in a command line. Variables set in front of the program are set here, too.

    Raises:
        ConfigError: an option of hydra, which would change more than the values of verl's own config.
    """
    words = _split(words)
    program = next((i for i, w in enumerate(words) if re.search(r"(^|[./])main_ppo(\.py)?$", w)), -1)
    for word in words[: program + 1]:
        if not re.match(r"[A-Za-z_]\w*=", word):
            break
        variable, _, value = word.partition("=")
        os.environ[variable] = value
    overrides = [w for w in words[program + 1 :] if w not in ("$@", "\\")]
    for word in overrides:
        if word.startswith("-"):
            raise ConfigError(
                f"`{word}` is an option of hydra. Here only overrides of verl's config `ppo_trainer` are read, like "
                f"data.train_batch_size=64, and by the doctor --config-name and --config-path. Remove it."
            )
    return overrides


# ---- the installation


def _print_installation(brief: bool) -> Iterator[str]:
    """
    Args:
        brief: only what a run cannot do without, because a report of the run follows.
    """
    states = print_versions(SHOWN, brief)
    if states["verl"][1] == "missing":
        yield f"verl is not installed. Install it: {pip_command('verl')}"
        return
    try:
        compat.check_verl_version()
    except ConfigError as e:
        yield str(e)
    print("\nThe plugin")
    yield from _print_plugin()
    folder = Path(verl_folder())
    moved = compat.moved_symbols(folder)
    if moved or not brief:
        print(f"  what the adapter uses of verl: {'as expected' if not moved else '; '.join(moved)}")
    if moved and not compat.untested_allowed():
        yield f"verl moved what rl-plugins builds on: {'; '.join(moved)}. Install a version it was tested with."
    if states["trl"][1] != "missing" and not brief:
        print(f"  TRL in the same environment: {_value_head(folder)}")
    if not brief:
        print("\nOptional changes of verl, nothing to do (patches/README.md)")
    for name, there in _seams(folder).items() if not brief else ():
        print(f"  {name:<5}{'there' if there else 'not there':<11}{SEAMS[name]}")
    print_environment((*VARIABLES, POLICY, "VERL_USE_EXTERNAL_MODULES", "VERL_PLATFORM"), brief)


def _print_plugin() -> Iterator[str]:
    """Whether verl would load the entry point, and whether loading it works."""
    with _working_directory_first():  # as `python -m` has it
        found = {e.name: e for e in importlib.metadata.entry_points(group=GROUP)}
    policy = os.environ.get(POLICY, "auto").strip()
    # verl compares names with the variable in lower case
    allowed = set(found) if policy.lower() == "auto" else {n.strip() for n in policy.lower().split(",")}
    if policy.lower() == "none":
        allowed = set()
    for name, entry in sorted(found.items()):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "unknown package"
        print(f"  {GROUP}: {name} = {entry.value} ({package}), {'loaded' if name in allowed else 'LEFT OUT'}")
    missing = sorted(allowed - set(found))
    if missing:
        print(f"  {POLICY} names {', '.join(missing)}, which nothing offers; verl says nothing about it")
    if NAME not in found:
        print(f"  {GROUP}: nothing of rl-plugins")
        yield (
            f"verl finds no entry point `{NAME}` in the group {GROUP}, so it would run without rl-plugins. Install the "
            f"package where verl runs, in the folder of its source: pip install . (an old rl_plugins.egg-info in the "
            f"working directory hides the package that is installed: delete it)."
        )
    elif NAME not in allowed:
        yield (
            f"{POLICY}={policy} leaves rl-plugins out. Unset it, or name {NAME} in it "
            f"({POLICY}={','.join(sorted({NAME, *allowed} & set(found)))})."
        )
    try:
        importlib.import_module("rl_plugins.verl.plugin")
    except Exception as e:
        yield f"the verl plugin of rl-plugins cannot be loaded: {type(e).__name__}: {e}"


@contextlib.contextmanager
def _working_directory_first() -> Iterator[None]:
    sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.path.pop(0)


def _seams(folder: Path) -> dict[str, bool]:
    def text(*path: str) -> str:
        file = folder.joinpath(*path)
        return file.read_text() if file.is_file() else ""

    trainer, policy_loss = "verl.trainer.ppo.v1.trainer_base:PPOTrainer", "verl.workers.config.actor:PolicyLossConfig"
    return {
        "V1": "flush=True" not in text("trainer", "ppo", "v1", "trainer_separate_async.py"),
        "V3": not _asks_for_trl(folder),
        "V6": re.search(r"\.debug\(\s*f?\"Failed to load plugin", text("__init__.py")) is None,
        "V9": compat.states(trainer, "base_mode", folder),
        "V11": "poll_interval:" in text("trainer", "config", "ppo_trainer.yaml"),
        "V12": compat.states(policy_loss, "extra_fields", folder),
    }


def _asks_for_trl(folder: Path) -> bool:
    file = folder / "models" / "transformers" / "monkey_patch.py"
    return file.is_file() and "is_trl_available" in file.read_text()


def _value_head(folder: Path) -> str:
    from rl_plugins.verl import plugin

    if plugin.trl_has_value_head():
        return "it has the value head that verl asks for"
    if not _asks_for_trl(folder):
        return "it has no value head, and this verl does not ask for one"
    return "it has no value head; in runs with methods verl's model builder is told that TRL is not there"


# ---- a run


class ParquetRows:
    """Rows of parquet files, read when they are asked for, with the columns verl gives to methods.

    Args:
        files: local files.
        prompt_key: column of the messages.
    """

    def __init__(self, files: Sequence[Path], prompt_key: str) -> None:
        import pyarrow.parquet  # type: ignore[import-untyped]

        self.prompt_key = prompt_key
        opened = []
        for file in files:
            with parquet_of(file):
                opened.append(pyarrow.parquet.ParquetFile(file))
        self._groups = [(f, g) for f in opened for g in range(f.metadata.num_row_groups)]
        self._ends = [0]
        for file, group in self._groups:
            self._ends.append(self._ends[-1] + file.metadata.row_group(group).num_rows)
        self._rows = functools.lru_cache(maxsize=4)(self._read)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, i: int) -> dict[str, Any]:
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        group = bisect.bisect_right(self._ends, i) - 1
        row = self._rows(group)[i - self._ends[group]]
        return flat_columns({**row, "raw_prompt": row.get(self.prompt_key)})

    def _read(self, number: int) -> list[dict[str, Any]]:
        file, group = self._groups[number]
        return file.read_row_group(group).to_pylist()  # type: ignore[no-any-return]


@dataclass
class _Examined:
    """A run as far as it is known without a model.

    Attributes:
        config: the whole config, with the options that methods set.
        dataset: None if it is not on this machine.
        prompts: rows of the dataset that are used, None if it is not on this machine.
    """

    config: Any
    settings: Settings
    stack: MethodStack
    dataset: ParquetRows | None = None
    prompts: int | None = None
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def read(self) -> capabilities.Reader:
        return capabilities.Reader(self.config)

    @property
    def global_steps(self) -> int | None:
        """Of the whole run, as verl counts them; None if that is not known."""
        given = self.read("trainer.total_training_steps")
        if given is not None:
            return int(given)
        if self.prompts is None:
            return None
        return int(self.prompts // self.read("data.train_batch_size") * self.read("trainer.total_epochs"))

    def known(self) -> capabilities.Known:
        """What methods are told. A dataset that is not here is taken to be large enough for any plan."""
        read = self.read
        prompts = self.prompts if self.prompts is not None else read("data.train_batch_size") * read.group_size
        return capabilities.Known(read, self.settings, self.dataset, prompts, self.global_steps or 1)


def _print_run(overrides: Sequence[str], own: Mapping[str, str]) -> list[str]:
    """What the run would do; returns what would fail."""
    from omegaconf import OmegaConf

    try:
        config = compose(overrides, **own)
    except ConfigError as e:
        return [str(e)]
    problems = _missing_values(config)
    settings: Settings | None = None
    stack = build_stack([])
    with told(problems):
        settings = read_settings(config, problems)
        with told(problems):
            start.check_mode(settings, config, None)
        if settings is not None:
            stack = settings.stack(refuse=False)
    run = _Examined(config, settings or Settings(()), stack, problems=problems)
    options: dict[str, Any] = {}
    if stack and settings is not None:
        found: list[str] = []
        with told(found):
            options = start.apply(stack, settings, config)
        problems += "\n".join(found).splitlines()
        if not stack.problems:
            print(f"\n{start.describe(stack, options, config)}")
    elif settings is None or not settings.methods:
        whose = "verl's own" if settings is None else "GRPO with the weights of rl_plugins.rewards, if it names any"
        print(f"\nNo methods are named: the run is {whose}.")
    run.problems += host_config.problems(run.read, Path(verl_folder()))
    if settings is None and run.read("trainer.use_v1", True) and (unknown := start.unknown_mode(config)):
        run.problems.append(unknown)
    if not (stack and capabilities.untested_engine(stack, run.read)):  # that is told, and whose keys verl misses
        run.problems += filter(None, [host_config.check_of_verl(config)])
    _look_at_dataset(run)
    _look_at_files(run)
    print("\nThe run")
    for what, text in _describe(run, settings):
        print(f"  {what:<18}{text}")
    _add_notes(run, bool(OmegaConf.select(config, "trainer.nnodes") != 1))
    if run.notes:
        print("\nNotes")
    for note in run.notes:
        print(f"  {note}")
    return list(dict.fromkeys(run.problems))


def _missing_values(config: Any) -> list[str]:
    """What verl's config demands and nobody gave."""
    from omegaconf import OmegaConf

    wanted = ["actor_rollout_ref.rollout.name"]
    if OmegaConf.select(config, "reward.reward_model.enable"):
        wanted.append("reward.reward_model.rollout.name")
    missing = OmegaConf.missing_keys(config)
    return [f"verl demands a value for {name}, for example {name}=vllm." for name in wanted if name in missing]


def _look_at_dataset(run: _Examined) -> None:
    files = run.read("data.train_files")
    paths = [files] if isinstance(files, str) else [str(f) for f in files or ()]
    if not paths or not all(p.endswith(".parquet") and Path(p).expanduser().is_file() for p in paths):
        run.notes.append(
            f"The data set {', '.join(paths)} is no parquet file on this machine: its columns and size are not checked."
        )
        return
    run.dataset = ParquetRows([Path(p).expanduser() for p in paths], run.read("data.prompt_key", "prompt"))
    most = run.read("data.train_max_samples", -1)
    run.prompts = min(len(run.dataset), most) if most > 0 else len(run.dataset)
    batch = run.read("data.train_batch_size")
    if run.prompts < batch:
        run.problems.append(
            f"the data set has {run.prompts} prompts and data.train_batch_size={batch}: verl drops incomplete batches, "
            f"so nothing would be trained. Use a larger data set or a smaller batch."
        )


def _look_at_files(run: _Examined) -> None:
    path = run.read("reward.custom_reward_function.path")
    if path and not str(path).startswith("pkg://") and not Path(str(path).removeprefix("file://")).exists():
        run.problems.append(
            f"reward.custom_reward_function.path={path} does not exist. Give the path of a Python file."
        )
    for file in capabilities.tool_files(run.read):
        if not Path(file).expanduser().is_file():
            run.notes.append(f"The tools {file} are no file on this machine: they are not checked.")


def _describe(run: _Examined, settings: Settings | None) -> Iterator[tuple[str, str]]:
    """One line per fact; adds a problem to the run if a method refuses to plan."""
    read = run.read
    named = read("trainer.v1.trainer_mode")
    legacy = read("trainer.use_v1", True) is False
    ours = "with methods" if settings and settings.methods else "of rl-plugins, without methods"
    whose = ours if named in MODES and not legacy else "verl's own"
    yield "trainer", f"{'the legacy trainer (trainer.use_v1=False)' if legacy else named}: {_mode(read)}, {whose}"
    nodes, per_node = read("trainer.nnodes"), read("trainer.n_gpus_per_node")
    rollout = ""
    if read.mode == "separate_async":
        own = [read(f"{capabilities.ROLLOUT}.{name}", 0) for name in ("nnodes", "n_gpus_per_node")]
        rollout = f"; rollouts on {own[0]} x {own[1]} of their own"
        if all(isinstance(n, int) for n in (nodes, per_node, *own)):
            rollout += f", {nodes * per_node + own[0] * own[1]} together"
    yield "devices", f"{nodes} x {per_node} {read('trainer.device')}{rollout}"
    critic = " with a critic" if capabilities.has_critic(read) else ""
    yield "engines", f"{read(f'{capabilities.ACTOR}.strategy')} trains{critic}, {_rollout_engine(read)} generates"
    if tools := capabilities.tool_files(read):
        yield "tools", ", ".join(tools)
    yield "precision", _precision(run)
    if settings is not None:
        parts = ", ".join(f"{name} (weight {weight:g})" for name, weight in settings.rewards.items())
        yield "rewards", f"{parts}: keys of the reward function's answer" if parts else "one, the reward function's"
    yield from _batch(run)


def _mode(read: capabilities.Reader) -> str:
    return {
        "sync": "a batch is generated, then trained",
        "colocate_async": "batches are generated ahead, on the devices that train",
        "separate_async": "batches are generated ahead, on devices of their own",
    }.get(read.mode, "a trainer of another package")


def _rollout_engine(read: capabilities.Reader) -> str:
    from omegaconf import OmegaConf

    if OmegaConf.is_missing(read.config.actor_rollout_ref.rollout, "name"):
        return "nothing"
    name = str(read("actor_rollout_ref.rollout.name"))
    module = ENGINES.get(name)
    if module is None or importlib.util.find_spec(module) is not None:
        return name
    return f"{name} (not installed here)"


def _precision(run: _Examined) -> str:
    """Of the rollouts, and what corrects for it."""
    read, rollout = run.read, "actor_rollout_ref.rollout"
    text = f"rollouts in {read(f'{rollout}.dtype')}"
    given = read(capabilities.QUANTIZATION)
    if not given:
        return text
    by = [m.name for m in run.stack.methods if m.corrects_sampling]
    if kind := read(f"{capabilities.CORRECTION}.rollout_is"):
        by.append(f"{capabilities.CORRECTION}.rollout_is={kind}")
    corrected = f"corrected by {', '.join(by)}" if by else (
        f"NOT corrected for: set {capabilities.CORRECTION}.rollout_is=token, or name a method that does (dart_tis)"
    )  # fmt: skip
    return f"{text}, quantized: {given}; {corrected}"


def _batch(run: _Examined) -> Iterator[tuple[str, str]]:
    read, stack = run.read, run.stack
    prompts, size, batches = read("data.train_batch_size"), read.group_size, read.batches_per_global_step
    rows = prompts * size
    plan, stages = None, list[tuple[str, str]]()
    try:
        if not stack.problems:
            plan = _first_plan(run, prompts)
            stages = list(stage_lines(stack, lambda: _plan(run, prompts), rows))
    except RLPluginsError as e:
        if run.prompts is None:
            yield "plan", f"not known without the data set ({str(e).splitlines()[0]})"
        else:
            run.problems.append(str(e))
    if plan is not None:
        groups = len({r.group for r in plan.rows})
        own = "" if groups == prompts else f" (verl alone: {prompts})"
        of = "batch" if batches == 1 else f"plan, of {batches} batches"
        yield from plan_lines(stack, plan, rows, f"{groups} per {of}{own}")
        yield from stages
        try:  # what the asynchronous trainers refuse at their first step
            run.known().check_plan(stack, plan, prompts)
        except RLPluginsError as e:
            run.problems.append(str(e))
    steps = read.optimizer_steps_per_batch
    yield "optimizer steps", f"{steps} per batch, of {read.rows_per_update} rows each"
    yield "policy", _policy(read, steps, batches)
    lag = _lag(run)
    if lag:
        yield "lag", lag
    if run.global_steps is not None:
        total = run.global_steps * batches
        yield "whole run", f"{total} batches, {total * steps} optimizer steps"
    yield "checkpoints", _checkpoints(read, bool(stack))


def _first_plan(run: _Examined, prompts: int) -> Plan:
    """The plan of the first batch, from the methods themselves, with the first rows of the data set as the proposal."""
    run.stack.start(run.known().run())
    return _plan(run, prompts)


def _plan(run: _Examined, prompts: int) -> Plan:
    known = run.known()
    return known.plan(run.stack, range(min(prompts, known.prompts)))


def _policy(read: capabilities.Reader, steps: int, batches: int) -> str:
    if read.bypass:
        text = "the sampled log-probs count as those of the policy (rollout_correction.bypass_mode)"
    elif steps > 1:
        text = f"the batch's own in the first optimizer step, off-policy in the {steps - 1} after it"
    else:
        text = "every batch is used for one optimizer step"
    if batches > 1:
        text += f"; the engine gets new weights every {batches} batches"
    if read.mode != "sync":
        text += "; sampled by older weights, from the second batch on"
    return text + "; sampled by an engine whose log-probs differ slightly"


def _lag(run: _Examined) -> str:
    read = run.read
    if read.mode not in ("colocate_async", "separate_async"):
        return ""
    ahead = read(f"trainer.v1.{read.mode}.num_warmup_batches", 1)
    threshold = read("trainer.v1.sampler.max_off_policy_threshold")
    limit = "any number of" if threshold is None else f"at most {threshold}"
    text = f"prompts are chosen {ahead} batch(es) before they are trained; a rollout may span {limit} versions"
    learns = set(run.stack.claims["observe"])
    blind = [m.name for m in run.stack.methods if m in learns and {"select_prompts", "plan"} & set(m.claims())]
    return text + (f"; {', '.join(blind)} decides without the rewards of that time" if blind else "")


def _checkpoints(read: capabilities.Reader, methods: bool) -> str:
    every = read("trainer.save_freq", -1)
    if every <= 0:
        return "none (trainer.save_freq)"
    every *= read.batches_per_global_step
    where = read("trainer.default_local_dir")
    state = ", the methods' state in its folder rl_plugins/" if methods else ""
    resume = read("trainer.resume_mode")
    return f"every {every} batches in {where}/global_step_*{state}; trainer.resume_mode={resume}"


def _add_notes(run: _Examined, several_nodes: bool) -> None:
    if several_nodes:
        run.notes.append(
            "Several nodes: install the same rl-plugins on each. Variables reach the workers of a running Ray with "
            "+ray_kwargs.ray_init.runtime_env.env_vars.NAME=value."
        )
