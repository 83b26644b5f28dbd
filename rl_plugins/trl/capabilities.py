"""What one TRL run offers to methods, and the combinations that cannot be exact and are therefore refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import trl
from huggingface_hub import snapshot_download
from trl.data_utils import is_conversational
from trl.trainer.utils import get_callable_name, get_config_model_id

from rl_plugins.core.errors import ConfigError, shown
from rl_plugins.core.losses import TRL_AGGREGATION
from rl_plugins.core.method import HOOKS, Method
from rl_plugins.core.rollouts import Plan, Run
from rl_plugins.kit.masked import MASKED_OPTIONS, MaskedOptions
from rl_plugins.kit.services import empty_column
from rl_plugins.runtime.chat import NO_TEMPLATE, TEMPLATE_FILES, has_template
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.preflight import NO_TURN_LIMITS, HostCapabilities, no_redundancy, preflight
from rl_plugins.runtime.rounds import in_rounds
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.trl.compat import HEAD, Seams, missing, trl_version
from rl_plugins.trl.config import GRPOConfig
from rl_plugins.trl.host import Trainer, has_numbers
from rl_plugins.trl.hosts import Loss, unknown_loss

NO_MASKED_OPTIONS = dict.fromkeys(
    MASKED_OPTIONS,
    "it is one of masked diffusion language models: take `rl-plugins trl masked_grpo`, or MaskedGRPOConfig and "
    "MaskedGRPOTrainer of rl_plugins.trl.masked",
)
"""Options of another trainer, and where they are."""

ROW_LOSSES = ("grpo", "sapo", "dr_grpo", "luspo")  # divided by a number of rows, not of tokens

# Options that a hook makes meaningless; listed at start if the user changed them.
_WITHOUT_EFFECT = {
    "advantages": ("scale_rewards", "multi_objective_aggregation"),
    "policy_loss": (
        "epsilon",
        "epsilon_high",
        "delta",
        "importance_sampling_level",
        "sapo_temperature_pos",
        "sapo_temperature_neg",
        "vespo_k_pos",
        "vespo_k_neg",
        "vespo_lambda_pos",
        "vespo_lambda_neg",
    ),
}
_OWN_SURROGATE = ("cispo", "sapo", "vespo")  # loss types of TRL that are more than a way to average

# `generation_kwargs` that leave the distribution of each token as it is: neutral values, and what says where to end.
_SAME_DISTRIBUTION = {
    "do_sample": True,
    "temperature": None,  # that of the config
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "length_penalty": 1.0,
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "min_new_tokens": 0,
    "min_tokens": 0,
}
_NO_MATTER = frozenset(
    {
        "bos_token_id",
        "cache_config",
        "cache_implementation",
        "compile_config",
        "detokenize",
        "disable_compile",
        "eos_token_id",
        "include_stop_str_in_output",
        "logprobs",
        "max_length",
        "max_new_tokens",
        "max_time",
        "max_tokens",
        "pad_token_id",
        "prefill_chunk_size",
        "return_dict_in_generate",
        "seed",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_strings",
        "stop_token_ids",
        "use_cache",
    }
)


@dataclass(frozen=True)
class KnownRun:
    """What is known of a run: by a trainer everything, by a dry run what stands in its config.

    Args:
        args: the training arguments.
        dataset: None if nobody knows it.
        size: its rows; None for a stream, and where an environment owns the data.
        rewards: names of the reward functions.
        rollout_func, tools: whether the trainer has one, tools or environments.
        model: name of the model.
        template: whether its tokenizer has a chat template; None if that is not known.
        total_steps: optimizer steps of the whole run; None: by the dataset and the arguments.
        own_loss: the loss that runs, if the trainer is known.
    """

    args: GRPOConfig
    dataset: Any = None
    size: int | None = None
    rewards: tuple[str, ...] = ("reward",)
    rollout_func: bool = False
    tools: bool = False
    model: str = "the model"
    template: bool | None = None
    total_steps: int | None = None
    own_loss: Loss | None = None

    @property
    def loss(self) -> Loss:
        return self.own_loss or Loss(self.args.loss_type)

    @property
    def columns(self) -> Sequence[str] | None:
        return getattr(self.dataset, "column_names", None)

    @property
    def generator(self) -> str:
        """What of the trainer generates in TRL's place; empty if nothing does."""
        return "rollout_func" if self.rollout_func else "tools or environments of its own" if self.tools else ""

    @property
    def has_images(self) -> bool:
        return any(c in (self.columns or ()) and not empty_column(self.dataset, c) for c in ("image", "images"))

    @property
    def has_messages(self) -> bool:
        """Whether prompts are conversations; those of a stream are not looked at."""
        return (
            bool(self.size)
            and self.dataset is not None
            and is_conversational({"prompt": self.dataset[0].get("prompt")})
        )

    @property
    def steps(self) -> int:
        """Optimizer steps of the run; of one generation batch if neither they nor the dataset are known."""
        a = self.args
        if self.total_steps is not None or a.max_steps > 0:
            return int(self.total_steps or a.max_steps)
        batches = 1
        if self.dataset is not None and self.size is not None:
            batches = math.ceil(self.size * a.num_generations // a.generation_batch_size * a.num_train_epochs)
        return max(1, math.ceil(batches * optimizer_steps_per_batch(a)))


def known_of(trainer: Trainer) -> KnownRun:
    """What a trainer knows of its run."""
    dataset = trainer.train_dataset
    return KnownRun(
        args=trainer.args,
        dataset=dataset,
        size=len(dataset) if has_numbers(dataset) else None,
        rewards=tuple(trainer.reward_func_names),
        rollout_func=trainer.rollout_func is not None,
        tools=bool(trainer.tools),
        total_steps=trainer.state.max_steps,
        own_loss=trainer.host_loss,
    )


def reward_names(functions: Any) -> tuple[str, ...]:
    """Names that TRL gives to reward functions: a function's own, and of a model the last part of its path."""
    given = functions if isinstance(functions, list) else [] if functions is None else [functions]
    return tuple(
        f.split("/")[-1]
        if isinstance(f, str)
        else model_name(f).split("/")[-1]
        if isinstance(f, torch.nn.Module)
        else get_callable_name(f)
        for f in given
    )


def model_name(model: Any) -> str:
    """The name or folder a model was loaded from."""
    return str(get_config_model_id(model.config))


def template_of(model: str, processor: Any, revision: str | None = None) -> bool | None:
    """Whether a run will have a chat template; None if that cannot be known before its tokenizer is loaded.

    Args:
        model: a folder, or a name on the Hugging Face Hub, from which a few small files are read.
        processor: a tokenizer or processor that the trainer was given.
    """
    if processor is not None:
        return any(getattr(p, "chat_template", None) for p in (processor, getattr(processor, "tokenizer", None)))
    if not model:  # made in memory, and TRL will not find its tokenizer
        return None
    if Path(model).is_dir():
        return has_template(model)
    try:
        return has_template(snapshot_download(model, revision=revision, allow_patterns=list(TEMPLATE_FILES)))
    except Exception:  # TRL says what is wrong with the model
        return None


def run_of(known: KnownRun) -> Run:
    """What methods are told of the run."""
    return Run(
        host="trl",
        host_version=trl_version(),
        dataset=None if known.size is None else known.dataset,
        dataset_size=known.size,
        columns=tuple(known.columns or ()),
        reward_names=known.rewards,
        group_size=known.args.num_generations,
        total_steps=known.steps,
        total_batches=math.ceil(known.steps / optimizer_steps_per_batch(known.args)),
        max_completion_length=known.args.max_completion_length,
        rows_per_update=known.args.generation_batch_size
        * known.args.gradient_accumulation_steps
        // known.args.steps_per_generation,
        batch_rows=known.args.generation_batch_size,
    )


def first_plan_of(stack: MethodStack, known: KnownRun, proposal: Sequence[int]) -> Plan:
    """The plan of a batch, from the methods themselves.

    Args:
        proposal: the prompts TRL would take.

    Raises:
        MethodError: see `first_plan`.
    """
    a = known.args
    dataset = None if known.size is None else known.dataset
    return first_plan(stack, proposal, a.num_generations, a.generation_batch_size, known.size, dataset)


def optimizer_steps_per_batch(args: GRPOConfig) -> float:
    """Optimizer steps taken on one generation batch; above 1 the later ones are off-policy."""
    return float(args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps)


def has_entropy_bonus(args: GRPOConfig) -> bool:
    return bool(args.entropy_coef != 0.0 or args.use_adaptive_entropy)


def check(stack: MethodStack, known: KnownRun, seams: Seams, offered: HostCapabilities | None = None) -> dict[str, Any]:
    """Everything that can be known before the model is loaded.

    Args:
        offered: what the trainer offers; None: what TRL's does.

    Returns:
        Options of the config to set for the methods.

    Raises:
        ConfigError: with one paragraph per problem.
    """
    options: dict[str, Any] = {}
    problems: list[str] = []
    try:
        options = preflight(stack, offered or trl_capabilities(stack, known))
    except ConfigError as e:  # all problems are told at once
        problems.append(str(e))
    if not known.args.use_vllm:  # nothing reads them
        options = {name: value for name, value in options.items() if not name.startswith("vllm_")}
    problems += _loss_problems(stack, known.loss, known.args, seams)
    problems += [text for rule in REFUSED if (text := rule(stack, known))]
    if problems:
        raise ConfigError("\n".join(problems))
    return options


def too_few_prompts(args: GRPOConfig, rows: int) -> str:
    """Why a dataset of so many rows cannot be trained; empty if it can. An evaluation needs no training batch, so this
    is asked by a dry run and when training starts."""
    prompts = args.generation_batch_size // args.num_generations
    if rows >= prompts:
        return ""
    return (
        f"The dataset has {rows} prompts and a generation batch takes {prompts} (generation_batch_size="
        f"{args.generation_batch_size}, num_generations={args.num_generations}). TRL leaves out a batch that is not "
        f"full, so it would train no step at all. Make the batch smaller, num_generations larger, or give more prompts."
    )


def trl_capabilities(stack: MethodStack, known: KnownRun) -> HostCapabilities:
    """What this run offers."""
    args = known.args
    missing_hooks = _missing(HOOK_RULES, stack, known)
    return HostCapabilities(
        name="trl",
        version=trl_version(),
        hooks=[h for h in HOOKS if h not in missing_hooks],
        missing_hooks=missing_hooks,
        eval_hooks=("plan", "rollout"),
        missing_signals=_missing(SIGNAL_RULES, stack, known),
        columns=known.columns,
        options=vars(args),
        defaults=_defaults(),
        missing_options=NO_MASKED_OPTIONS,
        row_columns=bool(stack.claims["rollout"]),
        importance_weights={"vllm_importance_sampling_correction": True}
        if args.use_vllm and args.vllm_importance_sampling_correction
        else {},
        # the reward functions of an environment are not known before the trainer has made it
        run=replace(run_of(known), reward_names=() if known.tools else known.rewards),
        group_option="num_generations",
        batch_rows=args.generation_batch_size,
    )


def without_effect(stack: MethodStack, args: GRPOConfig, loss: Loss | None = None) -> list[str]:
    """Options the user changed that the methods make meaningless, as `option=value (method)`; and the cache of rollout
    programs where none reads it.

    Args:
        loss: the loss that runs; None: TRL's own.
    """
    idle = []
    if args.rollout_cache_gb != GRPOConfig.rollout_cache_gb:
        if args.use_vllm:
            idle = [f"rollout_cache_gb={args.rollout_cache_gb} (vLLM has a prefix cache of its own)"]
        elif not stack.claimed("rollout", "admit"):
            idle = [f"rollout_cache_gb={args.rollout_cache_gb} (no method makes rollouts by a program)"]
    defaults = _defaults()
    idle += _idle_vllm(stack, args, defaults)
    idle += [
        f"{option}={getattr(args, option)} ({stack.claims[hook][0].name})"
        for hook, names in _WITHOUT_EFFECT.items()
        if stack.claims[hook]
        for option in names
        if getattr(args, option) != defaults[option]
    ]
    if loss is not None and loss.own:
        idle += [f"loss_type={args.loss_type} (the loss of {loss.own})"] * (args.loss_type != defaults["loss_type"])
    elif stack.claims["policy_loss"]:
        idle += _idle_loss_type(stack, args, defaults["loss_type"])
    return idle


def _idle_vllm(stack: MethodStack, args: GRPOConfig, defaults: Mapping[str, Any]) -> list[str]:
    """Options of vLLM without it, and of its correction where that is off."""
    switch, prefix, why = "vllm_importance_sampling_correction", "vllm_", "use_vllm is off"
    if args.use_vllm:
        if getattr(args, switch):
            return []
        off = [m.name for m in stack.methods if m.host_options.get("trl", {}).get(switch) is False]
        prefix, why = "vllm_importance_sampling_", f"{off[0] if off else 'the config'} turns {switch} off"
    return [
        f"{option}={value} ({why})"
        for option, value in vars(args).items()
        if option.startswith(prefix) and (option != switch or not args.use_vllm) and value != defaults.get(option)
    ]


def _idle_loss_type(stack: MethodStack, args: GRPOConfig, default: str) -> list[str]:
    name, given = stack.claims["policy_loss"][0].name, args.loss_type
    if stack.aggregation == "sum" and args.beta == 0.0 and not has_entropy_bonus(args):
        return [f"loss_type={given} ({name} brings its own sum)"] if given != default else []
    return [f"the surrogate of loss_type={given} ({name}; its average stays)"] if given in _OWN_SURROGATE else []


def _defaults() -> dict[str, Any]:
    return {f.name: f.default for config in (MaskedOptions, trl.GRPOConfig) for f in fields(config)}


# ---- what a run cannot serve: a rule looks at the stack and the run, and says why; empty where it does not apply

Rule = Callable[[MethodStack, KnownRun], str]


def _missing(rules: Sequence[tuple[str, Rule]], stack: MethodStack, known: KnownRun) -> dict[str, str]:
    """Hook or signal -> why it is missing; of several reasons the last one."""
    return {what: why for what, rule in rules if (why := rule(stack, known))}


def _nothing_pauses(stack: MethodStack, known: KnownRun) -> str:
    what = (
        "vLLM, which TRL does not let interrupt"
        if known.args.use_vllm
        else "images"
        if known.has_images
        else "a method that makes rollouts with a program or in rounds"
        if stack.claims["rollout"] or in_rounds(stack)
        else ""
    )
    return what and (
        f"groups that go on in a later batch are decoded by transformers' generate, and the run has {what}. Set "
        f"use_vllm=False, or remove one of the methods."
    )


def _generates_itself(stack: MethodStack, known: KnownRun) -> str:
    own = known.generator
    return own and f"the trainer has {own}, which generates by itself. Remove {own}."


def _continuous_batching(stack: MethodStack, known: KnownRun) -> str:
    if not known.args.use_transformers_continuous_batching:
        return ""
    return (
        "continuous batching of transformers has one limit and no log-probs for all requests. Set "
        "use_transformers_continuous_batching=False."
    )


def _images_beside_programs(stack: MethodStack, known: KnownRun) -> str:
    return "programs see token ids only, and the dataset has images. Remove the method." if known.has_images else ""


def _completions_made_already(stack: MethodStack, known: KnownRun) -> str:
    own = known.generator
    return own and (
        f"the trainer has {own}, and a rollout program makes the completions itself. Give what it needs as "
        f"parameters of the method, and remove {own}."
    )


def _steps_over_two_batches(stack: MethodStack, known: KnownRun) -> str:
    spg, ga = known.args.steps_per_generation, known.args.gradient_accumulation_steps
    if spg % ga == 0:
        return ""
    return (
        f"an optimizer step would span two generation batches (gradient_accumulation_steps={ga}, "
        f"steps_per_generation={spg}). Make steps_per_generation a multiple of gradient_accumulation_steps."
    )


HOOK_RULES: tuple[tuple[str, Rule], ...] = (
    ("admit", _nothing_pauses),
    ("admit", _generates_itself),
    ("rollout", _continuous_batching),
    ("rollout", _images_beside_programs),
    ("rollout", _completions_made_already),
    ("before_update", _steps_over_two_batches),
)


def _groups_are_split(stack: MethodStack, known: KnownRun) -> str:
    spg, ga = known.args.steps_per_generation, known.args.gradient_accumulation_steps
    if spg == ga or spg % ga:
        return ""
    both = any({"off_policy", "whole_groups"} <= m.needs for m in stack.methods)
    return (
        f"TRL shuffles rows before it splits a generation batch into {spg // ga} steps. Set steps_per_generation="
        f"{ga}, equal to gradient_accumulation_steps."
    ) + (
        " Rollouts of another policy then come from num_iterations, use_vllm, rollout_precision, or a method that "
        "carries or replays groups."
        if both
        else ""
    )


def _vllm_reports_at_a_temperature(stack: MethodStack, known: KnownRun) -> str:
    if not known.args.use_vllm or known.args.temperature == 1.0:
        return ""
    return (
        f"vLLM in TRL reports log-probs with the temperature ({known.args.temperature}), and those at temperature 1 "
        f"are needed. Set temperature=1.0, or use_vllm=False."
    )


def _one_turn(stack: MethodStack, known: KnownRun) -> str:
    if stack.claims["rollout"] or known.generator:
        return ""
    return (
        "the run has neither tools nor an environment, so a completion is one turn. Give the trainer tools or an "
        "environment_factory, or name a method that plays one (turn_control)."
    )


def _no_limit_of_turns(stack: MethodStack, known: KnownRun) -> str:
    return "" if stack.claims["rollout"] else NO_TURN_LIMITS


def _nothing_closes_rollouts(stack: MethodStack, known: KnownRun) -> str:
    if stack.claims["admit"]:
        return ""
    return no_redundancy(
        stack,
        "TRL generates all rollouts in one batch and waits for the longest. Name a method that plays agents "
        "(turn_control), or one that lets groups wait (april).",
    )


def _changed_distribution(args: GRPOConfig) -> list[str]:
    """Options that change what is sampled from, with their values."""
    truncations = {
        "top_p": (args.top_p, 1.0),
        "top_k": (args.top_k, 0),
        "min_p": (args.min_p, None),
        "repetition_penalty": (args.repetition_penalty, 1.0),
    }
    changed = [f"{k}={v}" for k, (v, neutral) in truncations.items() if v != neutral and not (k == "min_p" and v == 0)]
    if isinstance(args.generation_kwargs, dict):
        same = {**_SAME_DISTRIBUTION, "temperature": args.temperature}
        changed += [
            f"generation_kwargs {k}={shown(v)}"
            for k, v in args.generation_kwargs.items()
            if k not in _NO_MATTER and not (v is None or (k in same and v == same[k]) or (k == "top_k" and v == -1))
        ]
    if args.use_vllm and args.vllm_structured_outputs_regex is not None:
        changed.append("vllm_structured_outputs_regex")
    return changed


def _vllm_reports_what_was_cut(stack: MethodStack, known: KnownRun) -> str:
    changed = _changed_distribution(known.args)
    if not changed or not known.args.use_vllm:
        return ""
    return (
        f"vLLM in TRL reports top log-probs of what was sampled from, and {', '.join(changed)} changes that. "
        f"Remove {'it' if len(changed) == 1 else 'them'}, or set use_vllm=False."
    )


def _sampled_from_another_distribution(stack: MethodStack, known: KnownRun) -> str:
    changed = _changed_distribution(known.args)
    if not changed:
        return ""
    return (
        f"with {', '.join(changed)} the distribution that was sampled is not the policy's. Remove "
        f"{'it' if len(changed) == 1 else 'them'}."
    )


def _rollout_func_samples(stack: MethodStack, known: KnownRun) -> str:
    return "a rollout_func samples in its own way. Remove it." if known.rollout_func else ""


def _no_template(stack: MethodStack, known: KnownRun) -> str:
    return NO_TEMPLATE.format(model=known.model) if known.template is False else ""


def _no_reference(stack: MethodStack, known: KnownRun) -> str:
    return "there is no reference model with beta=0. Set beta > 0." if known.args.beta == 0.0 else ""


def _stream(stack: MethodStack, known: KnownRun) -> str:
    if known.size is not None:
        return ""
    return "the dataset is a stream (or owned by an environment). Use a dataset with an index."


def _one_reward(stack: MethodStack, known: KnownRun) -> str:
    if len(known.rewards) >= 2:
        return ""
    return (
        f"the run has {len(known.rewards)} reward function. Pass two or more in reward_funcs, e.g. one for "
        f"the answer and one for the format."
    )


def _one_update(stack: MethodStack, known: KnownRun) -> str:
    if optimizer_steps_per_batch(known.args) > 1:
        return ""
    return (
        "every generation batch is used for one optimizer step, so the ratio of current to old log-probs is 1. "
        "Set num_iterations=2 or more, or steps_per_generation to a multiple of gradient_accumulation_steps."
    )


def _nothing_to_correct(stack: MethodStack, known: KnownRun) -> str:
    a = known.args
    if optimizer_steps_per_batch(a) > 1 or a.use_vllm or a.rollout_precision != "policy":
        return ""
    several = "Set num_iterations=2 or more"
    if "whole_groups" not in stack.needs:  # with them steps_per_generation cannot be raised
        several += ", or steps_per_generation to a multiple of gradient_accumulation_steps"
    return (
        f"every generation batch is used for one optimizer step and sampled by the trained model itself, so "
        f"there is nothing to correct. {several}, or use_vllm, or rollout_precision, or name a method that "
        f"carries or replays groups."
    )


def _no_head(stack: MethodStack, known: KnownRun) -> str:
    return missing(HEAD)


def _no_other_prompt(stack: MethodStack, known: KnownRun) -> str:
    if known.has_images:
        return "prompts of a teacher are texts, and the dataset has images. Remove the method."
    return missing(HEAD) if stack.teacher else ""


SIGNAL_RULES: tuple[tuple[str, Rule], ...] = (
    ("whole_groups", _groups_are_split),
    ("engine", _vllm_reports_at_a_temperature),
    ("engine", _vllm_reports_what_was_cut),
    ("turns", _one_turn),
    ("turn_limits", _no_limit_of_turns),
    ("redundancy", _nothing_closes_rollouts),
    ("rollout_logprobs", _sampled_from_another_distribution),
    ("rollout_logprobs", _rollout_func_samples),
    ("chat_template", _no_template),
    ("ref_logprobs", _no_reference),
    ("teacher_logprobs", _no_other_prompt),
    ("prompt_index", _stream),
    ("several_rewards", _one_reward),
    ("several_updates", _one_update),
    ("off_policy", _nothing_to_correct),
    ("sum_squared_probs", _no_head),
    ("current_entropies", _no_head),
)


def _conversations_without_template(stack: MethodStack, known: KnownRun) -> str:
    why = _no_template(stack, known)
    return f"The prompts of the dataset are conversations, and {why}" if why and known.has_messages else ""


def _rounds_of_the_trainer(stack: MethodStack, known: KnownRun) -> str:
    if not in_rounds(stack) or not known.generator:
        return ""
    what = "rollout_func" if known.rollout_func else "tools or environments"
    return (
        f"{_in_rounds(stack)} generates in rounds, which cannot be served with {what}: TRL runs those once per batch. "
        f"Remove {what} or the method."
    )


def _rounds_of_images(stack: MethodStack, known: KnownRun) -> str:
    if not in_rounds(stack) or not known.has_images:
        return ""
    return (
        f"{_in_rounds(stack)} generates in rounds, and the dataset has images: rows of image batches cannot be added "
        f"or cut. Remove the method."
    )


def _precision_of_the_trainer(stack: MethodStack, known: KnownRun) -> str:
    if known.args.rollout_precision == "policy" or not known.generator:
        return ""
    what = "a rollout_func" if known.rollout_func else "tools or environments"
    return (
        f"rollout_precision={known.args.rollout_precision} is served where TRL generates each completion in one "
        f"call, and the trainer has {what}. Remove {what} or the option."
    )


REFUSED: tuple[Rule, ...] = (
    _conversations_without_template,
    _rounds_of_the_trainer,
    _rounds_of_images,
    _precision_of_the_trainer,
)


def _in_rounds(stack: MethodStack) -> str:
    return _names(m.name for m in stack.methods if m.rounds)


def droppers(stack: MethodStack) -> list[Method]:
    """Methods whose hooks say before a run that rows will leave."""
    return [m for m in stack.claims["plan"] + stack.claims["select"] if not m.keeps_batch_size]


def _loss_problems(stack: MethodStack, loss: Loss, args: GRPOConfig, seams: Seams) -> list[str]:
    drops = droppers(stack)
    terms = stack.claims["policy_loss"] + stack.claims["regularize"]
    averaged = terms if stack.aggregation == "host" else []  # a sum is the same whatever the host divides by
    problems = []
    if not loss.like and (drops or terms):
        problems.append(unknown_loss(loss, _names(m.name for m in drops + terms)))
    elif loss.like == "bnpo" and (drops or averaged):
        problems.append(
            f"loss_type='bnpo' divides by the tokens of each micro-batch, so its result depends on how rows are split; "
            f"{_names(m.name for m in drops + averaged)} cannot be exact with it. Use loss_type='dapo'."
        )
    elif averaged and loss.like not in TRL_AGGREGATION:
        problems.append(f"loss_type={loss.like!r} is not known to rl-plugins; known: {', '.join(TRL_AGGREGATION)}.")
    if drops:
        problems += _rescaled(stack, loss, seams, has_entropy_bonus(args))
    return problems


def refuse_inexact_loss(trainer: Trainer) -> None:
    """Raises ConfigError if rows may not leave under this loss, because it cannot be rescaled to those that stay."""
    stack, loss = trainer.methods, trainer.host_loss
    if not loss.like:
        raise ConfigError(f"Rows or tokens left the batch. {unknown_loss(loss, _names(stack.names))}")
    if loss.like == "bnpo":
        raise ConfigError(
            "Rows left the batch under loss_type='bnpo', whose result depends on how rows are split into "
            "micro-batches and cannot be exact then. Use loss_type='dapo'."
        )
    bonus = has_entropy_bonus(trainer.args)
    for text in _rescaled(stack, loss, trainer.seams, bonus, trainer.aux_loss_enabled):
        raise ConfigError(text)


def refuse_token_advantages(trainer: Trainer) -> None:
    """Raises ConfigError if tokens of one row have different advantages and the loss takes one per row."""
    if trainer.host_loss.own:
        raise ConfigError(
            f"{_names(trainer.methods.names)} gives the tokens of a row different advantages, and the loss of "
            f"{trainer.host_loss.own} takes one per row. Use rl_plugins.trl.GRPOTrainer, or remove the method."
        )


def _rescaled(stack: MethodStack, loss: Loss, seams: Seams, bonus: bool, aux: bool = False) -> list[str]:
    """Other terms in a loss that is rescaled when rows leave."""
    if loss.like not in ROW_LOSSES or seams.select_completions:
        return []
    droppers = stack.claims["plan"] + stack.claims["select"] + stack.claims["shape"]
    names = _names(m.name for m in droppers if not m.keeps_batch_size)
    terms = [(bonus, "an entropy bonus"), (aux, "the auxiliary loss of a mixture of experts")]
    return [
        f"{names} removes rows. With {loss.about} the loss is then rescaled to the rows that stayed, and "
        f"{what} would be rescaled with it. Use loss_type='dapo', or do without {what} (or apply patches/trl/T5)."
        for on, what in terms
        if on
    ]


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{n}`" for n in dict.fromkeys(names))
