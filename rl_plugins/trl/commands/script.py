"""`rl-plugins trl grpo` and `trl sft`: TRL's own scripts with our configs and trainers, launched by accelerate.

The same scripts run under any other launcher: `accelerate launch -m rl_plugins.trl.commands.script --config run.yaml`
(GRPO), and `-m rl_plugins.trl.commands.sft` (SFT).
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import trl

from rl_plugins.core.errors import ConfigError, RLPluginsError, did_you_mean, shortened, shown
from rl_plugins.runtime import processes
from rl_plugins.runtime.config_text import read_yaml
from rl_plugins.runtime.stack import build_stack
from rl_plugins.trl.changes import changed
from rl_plugins.trl.commands import heads
from rl_plugins.trl.trainer import GRPOTrainer


@dataclass(frozen=True)
class Script:
    """One of TRL's scripts, as we run it.

    Args:
        name: of the module in `trl.scripts`.
        module: of ours that a launcher starts.
        config, arguments: "module:class" of the config of training, and of TRL's arguments of the script.
        command: of `rl-plugins trl`; empty: the name.
        model: "module:class" of the options of the model.
    """

    name: str
    module: str
    config: str
    arguments: str
    command: str = ""
    model: str = "trl:ModelConfig"

    @property
    def called(self) -> str:
        return self.command or self.name

    def run(self, *parsed: Any) -> None:
        importlib.import_module(f"trl.scripts.{self.name}").main(*parsed)


GRPO = Script(
    "grpo",
    "rl_plugins.trl.commands.script",
    "rl_plugins.trl.config:GRPOConfig",
    "trl.scripts.grpo:GRPOScriptArguments",
    model="rl_plugins.trl.commands.heads:AdapterModelConfig",
)
MASKED_GRPO = Script(
    "grpo",
    "rl_plugins.trl.commands.masked_script",
    "rl_plugins.trl.masked:MaskedGRPOConfig",
    "trl.scripts.grpo:GRPOScriptArguments",
    "masked_grpo",
)
SFT = Script("sft", "rl_plugins.trl.commands.sft", "rl_plugins.trl.commands.sft:SFTConfig", "trl:ScriptArguments")
# What other tools and scripts call an option of `trl grpo`.
_CALLED = {
    "model": "model_name_or_path",
    "dataset": "dataset_name",
    "rewards": "reward_funcs",
    "reward_functions": "reward_funcs",
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "steps": "max_steps",
    "batch_size": "per_device_train_batch_size",
    "group_size": "num_generations",
    "max_new_tokens": "max_completion_length",
    "max_response_length": "max_completion_length",
    "kl_coef": "beta",
    "params": "method_params",
}
_ACCELERATE_CONFIG = "accelerate_config"  # of TRL: a file, or one of the configs that come with it


@dataclass(frozen=True)
class Arguments:
    """A command line, sorted.

    Attributes:
        script: what the training script gets, `--config` included.
        launch: options of `accelerate launch` on the command line.
        launch_of_file: those in the config file.
        methods, method_params: as given.
    """

    script: list[str]
    launch: list[str]
    launch_of_file: list[str]
    methods: Any
    method_params: Any


class Parser(trl.TrlParser):
    """TRL's parser of a script, with our config or another one."""

    def __init__(self, script: Script = GRPO, config: type | None = None) -> None:
        self.script = script
        types = (_class(script.arguments), config or _class(script.config), _class(script.model))
        super().__init__((*types, trl.DatasetMixtureConfig), prog=f"rl-plugins trl {script.called}")

    def error(self, message: str) -> None:
        _refuse(message, self.script)


def sort_arguments(argv: Sequence[str], script: Script = GRPO, problems: list[str] | None = None) -> Arguments:
    """Tells the arguments of the script from those of `accelerate launch`, without building a config (which would
    check batch sizes against the one process that runs here).

    Sets the environment variables under `env` of the config file, as TRL does.

    Args:
        problems: gets a text for each argument or key of the config file that neither knows; these are left out.

    Raises:
        ConfigError: such arguments or keys where no `problems` are given, or a value that cannot be read.
    """
    argv = [part for a in argv for part in (a.split("=", 1) if a.startswith("--config=") else [a])]
    parser = Parser(script)
    of_file = parser.set_defaults_with_config(**_config_file(argv))
    at = argv.index("--config") if "--config" in argv else len(argv)
    namespace, rest = parser.parse_known_args([*argv[:at], *argv[at + 2 :]])

    launch = _launch_options()
    names = ("--config", *parser._option_string_actions, *launch)
    known = {name.lstrip("-").replace("-", "_") for name in names}
    unknown: list[str] = []
    of_launch: list[str] = []
    keep = True  # a value belongs to the option before it
    for argument in rest:
        if argument.startswith("-"):
            name = argument.split("=", 1)[0]
            keep = name in launch
            unknown += [] if keep else [_unknown(name, known, False, script)]
        elif not of_launch and keep:
            unknown.append(f"The argument {shown(argument)} belongs to no option. Write `--option value`.")
            continue
        of_launch += [argument] if keep else []
    unknown += [_unknown(name, known, True, script) for name in of_file[::2] if name not in launch]
    if problems is not None:
        problems += unknown
    elif unknown:
        raise ConfigError("\n".join(unknown))
    return Arguments(
        script=_without(argv, rest),
        launch=of_launch,
        launch_of_file=_launch_arguments(of_file, launch),
        methods=getattr(namespace, "methods", None),
        method_params=getattr(namespace, "method_params", None),
    )


def parse(argv: Sequence[str], config: type | None = None, script: Script = GRPO) -> tuple[Any, Any, Any, Any]:
    """Arguments of the script, of training (a `config`, or that of the script), of the model and of the dataset."""
    parsed = Parser(script, config).parse_args_and_config(list(argv), fail_with_unknown_args=False)
    script_args, training_args, model_args, dataset_args = parsed
    return script_args, training_args, model_args, dataset_args


def launch(argv: Sequence[str], script: Script = GRPO) -> int:
    """Starts the script in as many processes as `accelerate launch` makes of the arguments and its config.

    Returns:
        The exit status: that of the first process that failed, or 0.

    Raises:
        ConfigError: what can be known before a process is started.
    """
    from accelerate.commands.launch import launch_command
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    arguments = sort_arguments(argv, script)
    build_stack(arguments.methods, arguments.method_params)
    os.environ.update(processes.environment())
    try:
        launch_command(_launch_namespace(arguments, script))
    except subprocess.CalledProcessError as e:
        return _status(e.returncode)
    except ChildFailedError as e:
        return _status(e.get_first_failure()[1].exitcode)
    return 0


def run(argv: Sequence[str]) -> None:
    """Trains with GRPO in this process, one of those a launcher has started.

    Raises:
        ConfigError: see `run_script`.
    """
    run_script(GRPO, argv, _of_grpo)


def _of_grpo(args: Any, model_args: Any) -> dict[str, Any]:
    """What stands in `trl` while its script runs."""
    heads.check_adapter(model_args, args)
    if model_args.use_peft and model_args.adapter != heads.LORA:
        peft_config = heads.peft_config_of(model_args)
        return {"GRPOTrainer": heads.trainer_of(model_args), "get_peft_config": lambda _: peft_config}
    return (
        {"GRPOTrainer": GRPOTrainer}
        if args.methods or args.count_costs or args.trace or args.resume_from_checkpoint
        else {}
    )


def run_script(script: Script, argv: Sequence[str], ours: Callable[[Any, Any], dict[str, Any]]) -> None:
    """Runs one of TRL's scripts in this process.

    Args:
        ours: the parsed config, options of the model -> name in `trl` -> what of ours stands there while the script
            runs.

    Raises:
        ConfigError: an argument that nobody knows, or one of `accelerate launch` (which comes before the `-m`).
    """
    arguments = sort_arguments(argv, script)
    if arguments.launch:
        raise ConfigError(
            f"`{' '.join(arguments.launch)}` is for `accelerate launch`, which comes first: accelerate launch "
            f"{' '.join(arguments.launch)} -m {script.module} ..."
        )
    parsed = parse(arguments.script, script=script)
    own = ours(parsed[1], parsed[2])
    with changed(trl, **own) if own else contextlib.nullcontext():
        script.run(*parsed)
    if torch.distributed.is_initialized():  # without this gloo sometimes aborts a process that is done ("terminate ..")
        torch.distributed.destroy_process_group()


@dataclass(frozen=True)
class Launch:
    """What `accelerate launch` would start: how many processes, and whether they are DeepSpeed's.

    Args:
        asked: processes that were asked for and that it would not start.
    """

    processes: int
    deepspeed: bool
    asked: int | None = None


def planned_launch(arguments: Arguments) -> Launch:
    """What `accelerate launch` would start: it is asked, with launchers that only note how they are called.

    Raises:
        ConfigError: it would refuse its options.
    """
    from accelerate.commands import launch as accelerate_launch

    called: list[tuple[str, Any]] = []

    def noting(name: str) -> Callable[..., None]:
        return lambda *args: called.append((name, args[-1]))

    launchers = {name: noting(name) for name in vars(accelerate_launch) if name.endswith("_launcher")}
    log = logging.getLogger(accelerate_launch.__name__)  # it lists every default it takes
    with changed(accelerate_launch, **launchers), changed(log, disabled=True):
        try:
            accelerate_launch.launch_command(_launch_namespace(arguments, GRPO))
        except (ValueError, OSError) as e:
            raise ConfigError(f"`accelerate launch` refuses its options: {shown(str(e))}") from None
    ((name, options),) = called
    asked = int(options.num_processes)
    if name == "simple_launcher":  # one process, whatever `num_processes` says
        return Launch(1, deepspeed=False, asked=asked if asked > 1 else None)
    return Launch(asked, name == "deepspeed_launcher")


def _config_file(argv: Sequence[str]) -> dict[str, Any]:
    if "--config" not in argv:
        return {}
    path = next(iter(argv[argv.index("--config") + 1 :]), "")
    content = read_yaml(Path(path), f"The config {shown(path)}")
    if not isinstance(content, dict):
        raise ConfigError(
            f"The config {shown(path)} holds no `key: value` lines. Give a YAML file with options of TRL."
        )
    variables = content.pop("env", None) or {}
    if not isinstance(variables, dict):
        raise ConfigError(f"`env` in the config {shown(path)} is {shown(variables)}; it must map variables to values.")
    os.environ.update({str(k): str(v) for k, v in variables.items()})
    return content


def _launch_options() -> dict[str, Any]:
    """Option -> whether a value follows, of `accelerate launch` and TRL's addition to it."""
    from accelerate.commands.launch import launch_command_parser

    options = {name: a.nargs != 0 for name, a in launch_command_parser()._option_string_actions.items()}
    for own in ("-m", "--module", "--no_python", "--no-python", "-h", "--help"):
        options.pop(own, None)
    return {**options, f"--{_ACCELERATE_CONFIG}": True}


def _launch_arguments(of_file: Sequence[str], options: dict[str, bool]) -> list[str]:
    """`key: value` of the config file as arguments; `key: true` of a switch is the switch alone."""
    out = []
    for name, value in zip(of_file[::2], of_file[1::2], strict=True):
        if options.get(name):
            out += [name, value]
        elif name in options and value == "True":
            out.append(name)
    return out


def _class(path: str) -> type:
    module, _, name = path.partition(":")
    found: type = getattr(importlib.import_module(module), name)
    return found


def _launch_namespace(arguments: Arguments, script: Script) -> Any:
    from accelerate.commands.launch import launch_command_parser
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    parser = launch_command_parser()
    parser.error = lambda message: _refuse(message, script)
    try:
        options = resolve_accelerate_config_argument(arguments.launch_of_file + arguments.launch)
    except ValueError as e:
        raise ConfigError(str(e)) from None
    return parser.parse_args([*options, "--module", script.module, *arguments.script])


def _without(argv: Sequence[str], rest: Sequence[str]) -> list[str]:
    """`argv` without `rest`, whose items it holds in this order."""
    left, out = list(rest), []
    for argument in argv:
        if left and argument == left[0]:
            left.pop(0)
        else:
            out.append(argument)
    return out


def _unknown(name: str, known: set[str], in_file: bool, script: Script) -> str:
    name = shortened(name, 80)
    bare = name.lstrip("-")
    what = f"The config file has the key `{bare}`" if in_file else f"The command line has the option `{name}`"
    meant = _CALLED.get(bare.replace("-", "_"))
    hint = f" Did you mean `{meant}`?" if meant in known else did_you_mean(bare, known)
    if bare in ("methods", "method_params", "method-params"):
        hint = " Methods act on rollouts; `rl-plugins trl grpo` takes them."
    elif "router" in bare:
        hint = " TRL has one address of a vLLM server, so there is nothing to route. verl has a router, see "
        hint += "docs/disaggregated.md."
    elif not in_file and not name.startswith("--"):
        hint = f" To take something out of `methods`, write it in one word with a name: --methods 'name,{name}'."
    return (
        f"{what}, which neither `trl {script.name}` nor `accelerate launch` knows.{hint} "
        f"`rl-plugins trl {script.called} --help` lists the options of a run, `accelerate launch --help` those of the "
        f"launcher."
    )


def _refuse(message: str, script: Script) -> None:
    raise ConfigError(
        f"The arguments cannot be read: {shortened(message, 300)}. See `rl-plugins trl {script.called} --help`."
    )


def _status(code: int) -> int:
    return code if code > 0 else 1  # a signal that ended a process is negative


def main_of(run: Callable[[Sequence[str]], None]) -> None:
    """One process of a run: an error of rl-plugins is one paragraph and status 2, any other keeps its traceback. It
    ends with the command that launched it."""
    processes.end_with_command()
    try:
        run(sys.argv[1:])
    except RLPluginsError as e:
        rank = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
        print(f"rl-plugins{rank}: {e}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def main() -> None:
    """The script of `rl-plugins trl grpo`."""
    main_of(run)


if __name__ == "__main__":
    main()
