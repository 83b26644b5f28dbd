"""What one verl run offers to methods, and the combinations that cannot be exact and are therefore refused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.method import HOOKS, Method, SameAs
from rl_plugins.core.rollouts import Plan, Run
from rl_plugins.runtime.chat import NO_TEMPLATE, has_template
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.preflight import NO_TURN_LIMITS, HostCapabilities, no_redundancy, preflight
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.verl.compat import needs_newer, runs_without_hybrid_engine, untested_allowed, verl_version
from rl_plugins.verl.config import MODES, Settings, compose

LOGPROBS = "actor_rollout_ref.rollout.calculate_log_probs"
ENTROPY = "actor_rollout_ref.actor.calculate_entropy"
TESTED_ENGINES = ("fsdp", "fsdp2")
SINGLE_TURN = "single_turn_agent"
TOOLS = ("tool_config_path", "function_tool_path", "interaction_config_path")
MANAGER = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
PROGRAM_MANAGER = "rl_plugins.verl.workers.ProgramManager"
CORRECTION = "algorithm.rollout_correction"
QUANTIZATION = "actor_rollout_ref.rollout.quantization"
MAX_VERSIONS = "trainer.v1.sampler.max_off_policy_threshold"
EXACT_ENGINES = ("hf_cpu",)  # rollout.name whose log-probs are those of the trained weights
TOP_LOGPROBS = ("hf_cpu",)  # rollout.name that reports the most likely tokens


@dataclass(frozen=True)
class Reader:
    """Values of a verl config by dotted name.

    Args:
        config: the whole config.
        follows: the mode of verl that the trainer follows, where its class is known; else its name says it.
    """

    config: Any
    follows: str | None = None

    def __call__(self, name: str, default: Any = None) -> Any:
        from omegaconf import OmegaConf

        value = OmegaConf.select(self.config, name)
        return default if value is None else value

    @property
    def mode(self) -> str:
        """The mode of verl this run follows."""
        named = self("trainer.v1.trainer_mode", "sync")
        return self.follows or MODES.get(named, named)

    @property
    def bypass(self) -> bool:
        return bool(self(f"{CORRECTION}.bypass_mode", False))

    @property
    def group_size(self) -> int:
        return int(self("actor_rollout_ref.rollout.n", 1))

    @property
    def batches_per_global_step(self) -> int:
        """Generation batches of what verl calls a global step."""
        asynchronous = self.mode == "separate_async"
        return max(1, self("trainer.v1.separate_async.parameter_sync_step", 1)) if asynchronous else 1

    @property
    def optimizer_steps_per_batch(self) -> int:
        mini = self("actor_rollout_ref.actor.ppo_mini_batch_size", 1)
        batch = self("data.train_batch_size", mini) // self.batches_per_global_step
        return max(1, batch // max(1, mini)) * self("actor_rollout_ref.actor.ppo_epochs", 1)

    @property
    def rows_per_update(self) -> int:
        return int(self("actor_rollout_ref.actor.ppo_mini_batch_size", 1)) * self.group_size

    @property
    def batch_rows(self) -> int:
        return int(self("data.train_batch_size", 1)) * self.group_size // self.batches_per_global_step


@dataclass(frozen=True)
class Known:
    """What is known of a run: in the trainer everything, elsewhere what the config and the files of a machine say.

    Args:
        read: values of the config.
        settings: what the config names.
        dataset: its rows by number; None if they are not on this machine.
        prompts: rows of the dataset.
        global_steps: of the whole run, as verl counts them.
    """

    read: Reader
    settings: Settings
    dataset: Any
    prompts: int
    global_steps: int

    def run(self) -> Run:
        """What `start` of the methods is told."""
        batches = self.global_steps * self.read.batches_per_global_step
        return Run(
            host="verl",
            host_version=verl_version(),
            dataset=self.dataset,
            dataset_size=self.prompts,
            columns=tuple(dataset_columns(self.read) or ()),
            reward_names=tuple(self.settings.rewards) or ("score",),
            group_size=self.read.group_size,
            total_steps=batches * self.read.optimizer_steps_per_batch,
            total_batches=batches,
            max_completion_length=self.read("data.max_response_length"),
            rows_per_update=self.read.rows_per_update,
            batch_rows=self.read.batch_rows,
            buffered=self.read.mode != "sync",
            keeps_versions=self.read.mode == "separate_async",
        )

    def plan(self, stack: MethodStack, proposal: Sequence[int]) -> Plan:
        """The first plan of a batch, of the prompts verl would take."""
        size = self.read.group_size
        return first_plan(stack, proposal, size, len(proposal) * size, self.prompts, self.dataset)

    def check_plan(self, stack: MethodStack, plan: Plan, prompts: int) -> None:
        """Raises MethodError for a plan that an asynchronous mode cannot take in place of `prompts` equal groups."""
        read, size = self.read, self.read.group_size
        regular = len(plan.rows) == prompts and all(r.n == size for r in plan.rows)
        if regular or read.mode not in ("colocate_async", "separate_async"):
            return
        names = ", ".join(f"`{m.name}`" for m in stack.claims["plan"])
        raise MethodError(
            f"{names} plans {len(plan.rows)} prompts with {sorted({r.n for r in plan.rows})} trained rollouts each, "
            f"where {prompts} with {size} were asked for. {read.mode} takes batches out of a buffer of groups and "
            f"needs one group of {size} per prompt (`spare` rollouts may be added). Use "
            f"trainer.v1.trainer_mode=rl_plugins_sync."
        )


def check(stack: MethodStack, settings: Settings, config: Any) -> dict[str, Any]:
    """Everything that can be known before Ray starts.

    Returns:
        Options of the config to set for the methods.

    Raises:
        ConfigError: with one paragraph per problem.
    """
    read = Reader(config)
    options: dict[str, Any] = {}
    problems: list[str] = []
    try:
        options = preflight(stack, verl_capabilities(stack, settings, config))
    except ConfigError as e:  # all problems are told at once
        problems.append(str(e))
    problems += [text for rule in REFUSED if (text := rule(stack, read))]
    problems += [
        f"{name} is {value}, which needs verl 0.9.1 or newer; {verl_version()} is installed. Upgrade verl, or choose "
        f"another value{' by the parameters of the method that sets it' if name in options else ''}."
        for name, value in {MAX_VERSIONS: read(MAX_VERSIONS, 1), **options}.items()
        if needs_newer(name, value)
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    if "current_entropies" in stack.needs and not read(ENTROPY, False):
        options[ENTROPY] = True
    if stack.claimed("rollout"):
        options[MANAGER] = PROGRAM_MANAGER
    if stack.teacher is not None:  # verl then loads a second model, and its own penalty is 0
        options |= {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.0}
    return options


def verl_capabilities(stack: MethodStack, settings: Settings, config: Any) -> HostCapabilities:
    """What this run offers."""
    read = Reader(config)
    missing_hooks = _missing(HOOK_RULES, stack, read)
    columns = dataset_columns(read)
    wanted = [o for m in stack.methods for o in m.host_options.get("verl", {}).items()]
    asked = {option for option, _ in wanted} | {value.option for _, value in wanted if isinstance(value, SameAs)}
    return HostCapabilities(
        name="verl",
        version=verl_version(),
        hooks=[h for h in HOOKS if h not in missing_hooks],
        missing_hooks=missing_hooks,
        eval_hooks=("plan", "rollout"),
        missing_signals=_missing(SIGNAL_RULES, stack, read) | ({} if len(settings.rewards) > 1 else _ONE_REWARD),
        columns=columns,
        row_columns=stack.claimed("rollout") or _own_agent_loop(read, columns),
        importance_weights=_corrections(read, "rollout_is"),
        sampling_probabilities=_corrections(read, "rollout_rs", "bypass_mode"),
        rollout_as_old=f"{CORRECTION}.bypass_mode=True" if read.bypass else "",
        options={o: read(o) for o in asked if _exists(config, o)},
        defaults={o: Reader(_default_config())(o) for o in asked} if asked else {},
        run=_early_run(read, settings),
        group_option="actor_rollout_ref.rollout.n",
        batch_rows=read.batch_rows,
    )


def _early_run(read: Reader, settings: Settings) -> Run:
    """What is known of a run before its dataset is read."""
    known = Known(read, settings, None, 0, int(read("trainer.total_training_steps", 1)))
    return replace(known.run(), dataset_size=None)


def has_critic(read: Reader) -> bool:
    return bool(read("critic.enable", read("algorithm.adv_estimator") == "gae"))


def tool_files(read: Reader) -> list[str]:
    """Files of tools and interactions that the run's agent loops read."""
    return [str(file) for name in TOOLS if (file := read(f"{ROLLOUT}.multi_turn.{name}"))]


def _own_agent_loop(read: Reader, columns: Sequence[str] | None) -> bool:
    """Whether an agent loop of the user's, or one of verl's with several turns, makes rollouts."""
    named = read("actor_rollout_ref.rollout.agent.default_agent_loop", SINGLE_TURN) != SINGLE_TURN
    return named or (columns is not None and "agent_name" in columns)


def _corrections(read: Reader, *names: str) -> dict[str, Any]:
    """Those of verl's options that are on: they weight or take out tokens by the probability they were sampled with."""
    given = {f"{CORRECTION}.{n}": read(f"{CORRECTION}.{n}") for n in names}
    return {option: value for option, value in given.items() if value}


def without_effect(stack: MethodStack, config: Any) -> list[str]:
    """Options the user changed that the methods make meaningless, as `option=value (method)`."""
    options = {
        "advantages": ("algorithm.norm_adv_by_std_in_grpo", "algorithm.gamma", "algorithm.lam"),
        "policy_loss": (
            "actor_rollout_ref.actor.policy_loss.loss_mode",
            "actor_rollout_ref.actor.clip_ratio",
            "actor_rollout_ref.actor.clip_ratio_low",
            "actor_rollout_ref.actor.clip_ratio_high",
            "actor_rollout_ref.actor.clip_ratio_c",
        ),
    }
    found, now, default = [], Reader(config), None
    for hook, names in options.items():
        for name in names if stack.claims[hook] else ():
            default = default or Reader(_default_config())
            if now(name) != default(name):
                found.append(f"{name}={now(name)} ({stack.claims[hook][0].name})")
    actor = "actor_rollout_ref.actor"
    alone = not now(f"{actor}.use_kl_loss", False) and not now(f"{actor}.entropy_coeff", 0)
    if stack.claims["policy_loss"] and stack.aggregation == "sum" and alone:
        name = f"{actor}.loss_agg_mode"
        default = default or Reader(_default_config())
        if now(name) != default(name):
            found.append(f"{name}={now(name)} ({stack.claims['policy_loss'][0].name} brings its own sum)")
    return found


@functools.cache
def _default_config() -> Any:
    return compose([])


def _exists(config: Any, option: str) -> bool:
    """Whether the config has this key, set to None or to a value."""
    from omegaconf import OmegaConf

    parent, _, key = option.rpartition(".")
    node = OmegaConf.select(config, parent) if parent else config
    return OmegaConf.is_dict(node) and key in node


def dataset_columns(read: Reader) -> list[str] | None:
    """Columns of local parquet files, with the fields of `extra_info` and `reward_model`; None if not known yet."""
    files = read("data.train_files")
    first = str(files if isinstance(files, str) or not files else next(iter(files)))
    file = Path(first).expanduser()
    if read("data.custom_cls.path") or file.suffix != ".parquet" or not file.is_file():
        return None
    import pyarrow.parquet

    columns: list[str] = []
    for column in pyarrow.parquet.read_schema(file):
        columns.append(column.name)
        if column.name in NESTED_COLUMNS and hasattr(column.type, "fields"):
            columns += [f.name for f in column.type.fields]
    return columns


NESTED_COLUMNS = ("extra_info", "reward_model")
"""Columns of verl's data sets whose fields count as columns of their own."""


# ---- what a run cannot serve: a rule looks at the stack and the config, and says why; empty where it does not apply

Rule = Callable[[MethodStack, Reader], str]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_SYNC = "Use trainer.v1.trainer_mode=rl_plugins_sync."
_ONE_REWARD = {
    "several_rewards": "verl has one reward function. Let it return a dict and say which of its keys are rewards, with "
    "weights: +rl_plugins.rewards.accuracy=1 +rl_plugins.rewards.format=0.5."
}


def _missing(rules: Sequence[tuple[str, Rule]], stack: MethodStack, read: Reader) -> dict[str, str]:
    """Hook or signal -> why it is missing; of several reasons the last one."""
    return {what: why for what, rule in rules if (why := rule(stack, read))}


def _no_buffer(stack: MethodStack, read: Reader) -> str:
    if read.mode != "sync":  # verl's own buffer carries groups over, as the method's host options say
        return ""
    return (
        "groups that go on in a later batch are verl's own in its asynchronous trainer modes. Set "
        "trainer.v1.trainer_mode=rl_plugins_colocate_async, or rl_plugins_separate_async."
    )


def _tools_make_completions(stack: MethodStack, read: Reader) -> str:
    given = [f"{ROLLOUT}.multi_turn.{t}" for t in TOOLS if read(f"{ROLLOUT}.multi_turn.{t}")]
    if read(f"{ROLLOUT}.multi_turn.enable", False):
        given.append(f"{ROLLOUT}.multi_turn.enable=True")
    loop = read(f"{ROLLOUT}.agent.default_agent_loop", SINGLE_TURN)
    if loop != SINGLE_TURN:
        given.append(f"{ROLLOUT}.agent.default_agent_loop={loop}")
    if not given:
        return ""
    return (
        f"the run has {', '.join(given)}, and a rollout program makes the completions itself. Give what it "
        f"needs as parameters of the method, and remove the option."
    )


def _another_manager(stack: MethodStack, read: Reader) -> str:
    manager = read(MANAGER)
    if manager in (None, PROGRAM_MANAGER):
        return ""
    return f"{MANAGER}={manager} is given, and rollout programs need {PROGRAM_MANAGER}. Remove the option."


def _tools_in_prompts(stack: MethodStack, read: Reader) -> str:
    columns = dataset_columns(read) or ()
    media = [name for kind in ("image", "video", "audio") if (name := read(f"data.{kind}_key", f"{kind}s")) in columns]
    given = [f"{ROLLOUT}.multi_turn.enable=True"] if read(f"{ROLLOUT}.multi_turn.enable", False) else media
    if not given:
        return ""
    return f"prompts of a teacher are texts, and with {', '.join(given)} a prompt holds more. Remove one of them."


HOOK_RULES: tuple[tuple[str, Rule], ...] = (
    ("admit", _no_buffer),
    ("teacher_prompts", _tools_in_prompts),
    ("rollout", _another_manager),
    ("rollout", _tools_make_completions),
)


def _groups_are_split(stack: MethodStack, read: Reader) -> str:
    steps = read.optimizer_steps_per_batch
    if steps <= 1 or not read(f"{ACTOR}.shuffle", False):
        return ""
    return f"the batch is shuffled before it is cut into {steps}. Set {ACTOR}.shuffle=False."


def _filter_takes_prompts_out(stack: MethodStack, read: Reader) -> str:
    if not read("algorithm.filter_groups.enable", False):
        return ""
    return (
        "algorithm.filter_groups takes some of the prompts out and draws others. Set "
        "algorithm.filter_groups.enable=False, or remove the method."
    )


def _buffer_mixes_plans(stack: MethodStack, read: Reader) -> str:
    if read.mode == "sync":
        return ""
    return f"{read.mode} takes groups one by one out of a buffer, so they may be trained in different batches. {_SYNC}"


def _engine_reports_one_token(stack: MethodStack, read: Reader) -> str:
    engine = read(f"{ROLLOUT}.name")
    if engine in TOP_LOGPROBS:
        return ""
    return (
        f"verl reports only the sampled token's log-prob with {ROLLOUT}.name={engine}; the most likely tokens come "
        f"from {', '.join(TOP_LOGPROBS)} alone. Remove the method, or its option that needs them."
    )


def _client_drops_top_logprobs(stack: MethodStack, read: Reader) -> str:
    if read.mode == "sync" or read(f"{ROLLOUT}.name") not in TOP_LOGPROBS:
        return ""
    return f"verl's client of {read.mode}, which resumes interrupted requests, drops them. {_SYNC}"


def _one_turn(stack: MethodStack, read: Reader) -> str:
    columns = dataset_columns(read)
    if stack.claimed("rollout") or _own_agent_loop(read, columns):
        return ""
    unread = " (data.train_files cannot be read here, so a column `agent_name` in it is not known)"
    return (
        f"every completion is one turn of single_turn_agent{unread if columns is None else ''}. Use an agent loop with "
        f"several turns ({ROLLOUT}.agent.default_agent_loop), or name a method that plays one (turn_control)."
    )


def _no_limit_of_turns(stack: MethodStack, read: Reader) -> str:
    return "" if stack.claimed("rollout") else NO_TURN_LIMITS


def _nothing_closes_rollouts(stack: MethodStack, read: Reader) -> str:
    return no_redundancy(
        stack, "verl waits for all rollouts of a prompt. Name a method that plays agents (turn_control)."
    )


def _sampled_from_another_distribution(stack: MethodStack, read: Reader) -> str:
    truncations = {"top_p": 1.0, "top_k": -1}
    changed = [f"{k}={read(f'{ROLLOUT}.{k}')}" for k, v in truncations.items() if read(f"{ROLLOUT}.{k}", v) != v]
    if not changed:
        return ""
    return (
        f"with {', '.join(changed)} the distribution that was sampled is not the policy's. Remove "
        f"{'it' if len(changed) == 1 else 'them'}."
    )


def _no_rollout_logprobs(stack: MethodStack, read: Reader) -> str:
    return "" if read(LOGPROBS, True) else f"{LOGPROBS}=False is given. Set it to True."


def _no_reference(stack: MethodStack, read: Reader) -> str:
    if read(f"{ACTOR}.use_kl_loss", False) or read("algorithm.use_kl_in_reward", False):
        return ""
    return f"there is no reference policy. Set {ACTOR}.use_kl_loss=True."


_SEVERAL = f"Set {ACTOR}.ppo_epochs=2 or more, or a smaller ppo_mini_batch_size"


def _one_update(stack: MethodStack, read: Reader) -> str:
    if read.optimizer_steps_per_batch * read.batches_per_global_step > 1 or read.bypass:
        return ""
    return f"every batch is used for one optimizer step, so the ratio of current to old log-probs is 1. {_SEVERAL}."


def _nothing_to_correct(stack: MethodStack, read: Reader) -> str:
    engine = read(f"{ROLLOUT}.name")
    several = read.optimizer_steps_per_batch * read.batches_per_global_step > 1
    if several or read.mode != "sync" or engine not in EXACT_ENGINES or read(QUANTIZATION):
        return ""
    return (
        f"every batch is used for one optimizer step and sampled by the trained weights ({ROLLOUT}.name="
        f"{engine}), so there is nothing to correct. {_SEVERAL}, or an asynchronous trainer_mode, or "
        f"{QUANTIZATION}, or name a method that replays groups."
    )


def _no_pass_before_the_update(stack: MethodStack, read: Reader) -> str:
    if not read.bypass:
        return ""
    return "with algorithm.rollout_correction.bypass_mode the policy is not run before the update. Remove it."


def _fused_kernels(stack: MethodStack, read: Reader) -> str:
    if not read("actor_rollout_ref.model.use_fused_kernels", False):
        return ""
    return "the fused kernels of verl make no logits. Set actor_rollout_ref.model.use_fused_kernels=False."


def _no_template(stack: MethodStack, read: Reader) -> str:
    """A tokenizer on this machine has no chat template, with which verl writes every prompt."""
    model = "actor_rollout_ref.model"
    folder = read(f"{model}.tokenizer_path") or read(f"{model}.path") or ""
    if read(f"{model}.custom_chat_template") or has_template(Path(folder).expanduser()) is not False:
        return ""
    return f"{NO_TEMPLATE.format(model=folder)} Or set {model}.custom_chat_template."


def _no_conversations(stack: MethodStack, read: Reader) -> str:
    if not read(f"{ROLLOUT}.multi_turn.enable", False):
        return ""
    return "conversations with tools are not kept by verl's agent loops."


SIGNAL_RULES: tuple[tuple[str, Rule], ...] = (
    ("whole_groups", _groups_are_split),
    ("whole_batches", _filter_takes_prompts_out),
    ("whole_batches", _buffer_mixes_plans),
    ("engine", _engine_reports_one_token),
    ("engine", _client_drops_top_logprobs),
    ("turns", _one_turn),
    ("turn_limits", _no_limit_of_turns),
    ("redundancy", _nothing_closes_rollouts),
    ("rollout_logprobs", _sampled_from_another_distribution),
    ("rollout_logprobs", _no_rollout_logprobs),
    ("ref_logprobs", _no_reference),
    ("several_updates", _one_update),
    ("off_policy", _nothing_to_correct),
    ("entropies", _no_pass_before_the_update),
    ("sum_squared_probs", _no_pass_before_the_update),
    ("sum_squared_probs", _fused_kernels),
    ("chat_template", _no_template),
    ("messages", _no_conversations),
)


def _rounds_ahead_of_time(stack: MethodStack, read: Reader) -> str:
    names = _who(stack, lambda m: m.rounds)
    if not names or read.mode == "sync":
        return ""
    return f"{names} generates in rounds, and a batch of {read.mode} is generated ahead of time. {_SYNC}"


def _groups_of_one_size(stack: MethodStack, read: Reader) -> str:
    names = _who(stack, lambda m: m.decides_rollouts and not m.rounds)
    if not names or read.mode == "sync":
        return ""
    return (
        f"{names} decides how many rollouts prompts get, and {read.mode} takes batches out of a buffer of "
        f"groups, each of {read.group_size} rollouts. {_SYNC}"
    )


def _fixed_number_of_prompts(stack: MethodStack, read: Reader) -> str:
    if stack.rows_per_rollout == 1 or read.mode == "sync":
        return ""
    return (
        f"{_who(stack, lambda m: m.rows_per_rollout > 1)} makes up to {stack.rows_per_rollout} rows of a rollout, so a "
        f"batch holds fewer prompts, and {read.mode} takes a fixed number of prompts out of its buffer. {_SYNC}"
    )


def _media_beside_programs(stack: MethodStack, read: Reader) -> str:
    columns = dataset_columns(read) or ()
    media = [name for kind in ("image", "video", "audio") if (name := read(f"data.{kind}_key", f"{kind}s")) in columns]
    if not media or not stack.claimed("rollout"):
        return ""
    return (
        f"{_names(stack, 'rollout')} is a rollout program, which sees token ids only, and the dataset has the "
        f"columns {', '.join(media)}. Remove the method."
    )


def _filter_replaces_planned(stack: MethodStack, read: Reader) -> str:
    planned = ("plan", "select_prompts")
    filtering = read("algorithm.filter_groups.enable", False)
    if not filtering or "whole_batches" in stack.needs or not stack.claimed(*planned):
        return ""
    return (
        f"{_names(stack, *planned)} plans what is generated, and algorithm.filter_groups would "
        f"replace part of it behind its back. Set algorithm.filter_groups.enable=False, or remove the method."
    )


def _waves_as_groups(stack: MethodStack, read: Reader) -> str:
    names, estimator = _who(stack, lambda m: m.rounds), read("algorithm.adv_estimator")
    if not names or estimator == "grpo" or stack.claimed("advantages"):
        return ""
    return (
        f"{names} makes groups of several waves, which algorithm.adv_estimator={estimator} would see as groups of "
        f"their own. Use algorithm.adv_estimator=grpo or a method that makes advantages."
    )


def _critic_of_other_returns(stack: MethodStack, read: Reader) -> str:
    changing = ("plan", "select", "advantages", "shape")
    if not has_critic(read) or not stack.claimed(*changing):
        return ""
    return (
        f"{_names(stack, *changing)} changes rows or advantages, and the critic would be trained on returns that "
        f"do not belong to them. Use an estimator without critic (algorithm.adv_estimator=grpo), or remove the "
        f"method."
    )


def _prompts_without_template(stack: MethodStack, read: Reader) -> str:
    if "chat_template" in stack.needs or _own_agent_loop(read, dataset_columns(read) or ()):
        return ""
    why = _no_template(stack, read)
    return why and f"verl writes every prompt as a conversation, and {why}"


def _penalty_in_rewards(stack: MethodStack, read: Reader) -> str:
    rewarding = ("plan", "select", "rewards", "advantages")
    if not read("algorithm.use_kl_in_reward", False) or not stack.claimed(*rewarding):
        return ""
    return (
        f"{_names(stack, *rewarding)} works with rewards that do not contain the KL penalty of "
        f"algorithm.use_kl_in_reward. Set it to False and use {ACTOR}.use_kl_loss=True, or remove "
        f"the method."
    )


def _generating(stack: MethodStack) -> str:
    """Who needs log-probs of older weights; empty if nobody does."""
    names = _who(stack, lambda m: m.old_policy == "generating")
    return names and f"{names} needs log-probs of the weights that generated each token"


def _no_older_weights(stack: MethodStack, read: Reader) -> str:
    why = _generating(stack)
    if not why or read.mode != "colocate_async":
        return ""
    return (
        f"{why}, and {read.mode} keeps no older weights. Use trainer.v1.trainer_mode=rl_plugins_separate_async "
        f"or rl_plugins_sync."
    )


def _every_version_is_kept(stack: MethodStack, read: Reader) -> str:
    why = _generating(stack)
    if not why or read.mode != "separate_async" or read(MAX_VERSIONS) is not None:
        return ""
    return (
        f"{why}, and {MAX_VERSIONS} is not set, so rows may be of any age and the workers would keep every "
        f"version. Set it: as many copies of the weights are kept in CPU memory."
    )


def _weights_are_offloaded(stack: MethodStack, read: Reader) -> str:
    why, option = _generating(stack), f"{ACTOR}.fsdp_config.param_offload"
    if not why or read.mode != "separate_async" or not read(option, False):
        return ""
    return f"{why}, and verl can copy and restore weights only while they are on the device. Set {option}=False."


def _divided_by_padding(stack: MethodStack, read: Reader) -> str:
    losing = ("plan", "select", "shape", "policy_loss", "regularize")
    loss, factor = read(f"{ACTOR}.loss_agg_mode"), read(f"{ACTOR}.loss_scale_factor")
    if loss != "seq-mean-token-sum-norm" or factor is not None or not stack.claimed(*losing):
        return ""
    return (
        f"{_names(stack, *losing)} cannot be exact with loss_agg_mode={loss}: without loss_scale_factor verl "
        f"divides by the width of the padded micro-batch. Set {ACTOR}.loss_scale_factor, for "
        f"example to {read('data.max_response_length')} (data.max_response_length)."
    )


def _reward_model_scores_again(stack: MethodStack, read: Reader) -> str:
    names, model = _who(stack, lambda m: "off_policy" in m.brings), "reward.reward_model"
    if not names or not read(f"{model}.enable", False) or read(f"{model}.enable_resource_pool", False):
        return ""
    return (
        f"{names} gives completions with their rewards, and a reward model on the devices of the trainer "
        f"scores every row again. Give it devices of its own ({model}.enable_resource_pool=True), or remove the "
        f"method."
    )


def _teacher_is_the_reference(stack: MethodStack, read: Reader) -> str:
    penalty = read(f"{ACTOR}.use_kl_loss", False) and read(f"{ACTOR}.kl_loss_coef", 0.0)
    lora = read("actor_rollout_ref.model.lora_rank", 0) or read("actor_rollout_ref.model.lora_adapter_path")
    if stack.teacher is None or not (penalty or lora or read("algorithm.use_kl_in_reward", False)):
        return ""
    why = "with LoRA there is none" if lora else "a KL penalty needs it for the reference policy"
    return (
        f"{_who(stack, lambda m: m.teacher is not None)} has the teacher {stack.teacher}, for which verl has one model "
        f"beside the policy: {why}. Train without {'an adapter' if lora else 'the penalty'}, or remove the teacher."
    )


def _distillation(stack: MethodStack, read: Reader) -> str:
    if not read("distillation.enabled", False):
        return ""
    names = ", ".join(f"`{n}`" for n in stack.names)
    return f"{names}: methods are not served together with distillation, which has a loss of its own. Set it off."


def untested_engine(stack: MethodStack, read: Reader) -> str:
    strategy = read(f"{ACTOR}.strategy")
    if strategy in TESTED_ENGINES or untested_allowed():
        return ""
    return (
        f"{ACTOR}.strategy={strategy} was never run with rl-plugins; tested: "
        f"{', '.join(TESTED_ENGINES)}. Use one of those (model_engine=dp), or set RL_PLUGINS_ALLOW_UNTESTED=1 to try."
    )


def _no_hybrid_engine(stack: MethodStack, read: Reader) -> str:
    if read.mode != "separate_async" or read("actor_rollout_ref.hybrid_engine", True) or runs_without_hybrid_engine():
        return ""
    return (
        "actor_rollout_ref.hybrid_engine=False in separate_async is ignored by verl 0.9.0, and ends verl 0.9.1 with a "
        "TypeError (a logging call), after everything was started. Leave it True, or apply patches/verl/V1 to 0.9.1."
    )


REFUSED: tuple[Rule, ...] = (
    _rounds_ahead_of_time,
    _groups_of_one_size,
    _fixed_number_of_prompts,
    _media_beside_programs,
    _filter_replaces_planned,
    _waves_as_groups,
    _critic_of_other_returns,
    _prompts_without_template,
    _penalty_in_rewards,
    _no_older_weights,
    _every_version_is_kept,
    _weights_are_offloaded,
    _divided_by_padding,
    _reward_model_scores_again,
    _teacher_is_the_reference,
    _distillation,
    untested_engine,
    _no_hybrid_engine,
)
"""Combinations that cannot be exact."""


def _who(stack: MethodStack, test: Callable[[Method], bool]) -> str:
    return ", ".join(f"`{m.name}`" for m in stack.methods if test(m))


def _names(stack: MethodStack, *hooks: str) -> str:
    return ", ".join(f"`{n}`" for n in dict.fromkeys(m.name for h in hooks for m in stack.claims[h]))
