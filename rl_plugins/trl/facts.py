"""What one TRL run offers to methods, and the combinations that cannot be exact and are therefore refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from rl_plugins.errors import ConfigError
from rl_plugins.losses import TRL_AGGREGATION
from rl_plugins.method import HOOKS
from rl_plugins.runtime.preflight import HostFacts, preflight
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.trl.compat import Seams, trl_version
from rl_plugins.trl.config import GRPOConfig

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


@dataclass(frozen=True)
class Inputs:
    """Arguments of the trainer that decide what is possible."""

    dataset: Any = None
    streaming: bool = False
    reward_functions: int = 1
    rollout_func: bool = False
    tools: bool = False

    @property
    def columns(self) -> Sequence[str] | None:
        return getattr(self.dataset, "column_names", None)

    @property
    def has_images(self) -> bool:
        return bool(self.columns) and bool({"image", "images"} & set(self.columns or ()))


def optimizer_steps_per_generation(args: Any) -> float:
    """Optimizer steps taken on one generation batch; above 1 the later ones are off-policy."""
    return float(args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps)


def check(stack: MethodStack, args: Any, inputs: Inputs, seams: Seams) -> dict[str, Any]:
    """Everything that can be known before the model is loaded.

    Returns:
        Options of the config to set for the methods.

    Raises:
        ConfigError: with one paragraph per problem.
    """
    options: dict[str, Any] = {}
    problems: list[str] = []
    try:
        options = preflight(stack, trl_facts(stack, args, inputs))
    except ConfigError as e:  # all problems are told at once
        problems.append(str(e))
    problems += _loss_problems(stack, args, seams)
    if any(m.rounds for m in stack.methods) and stack.claims["rollout"]:
        program = stack.claims["rollout"][0].name
        problems.append(
            f"{_names(m.name for m in stack.methods if m.rounds)} generates in rounds, and `{program}` makes the "
            f"rollouts of a prompt with a program, which runs once. Remove one of them."
        )
    if any(m.rounds for m in stack.methods) and (inputs.rollout_func or inputs.tools):
        what = "rollout_func" if inputs.rollout_func else "tools or environments"
        problems.append(
            f"{_names(m.name for m in stack.methods if m.rounds)} generates in rounds, which cannot be served with "
            f"{what}: TRL runs those once per batch. Remove {what} or the method."
        )
    if problems:
        raise ConfigError("\n".join(problems))
    return options


def too_few_prompts(args: Any, rows: int) -> str:
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


def trl_facts(stack: MethodStack, args: Any, inputs: Inputs) -> HostFacts:
    """What this run offers."""
    import trl

    missing_hooks: dict[str, str] = {}
    if args.use_vllm or stack.claims["rollout"] or any(m.rounds for m in stack.methods) or inputs.has_images:
        what = (
            "vLLM, which TRL does not let interrupt"
            if args.use_vllm
            else "images"
            if inputs.has_images
            else "a method that makes rollouts with a program or in rounds"
        )
        missing_hooks["admit"] = (
            f"groups that go on in a later batch are decoded by transformers' generate, and the run has {what}. Set "
            f"use_vllm=False, or remove one of the methods."
        )
    brings = "rollout_func" if inputs.rollout_func else "tools or environments of its own" if inputs.tools else ""
    if brings:
        missing_hooks["admit"] = f"the trainer has {brings}, which generates by itself. Remove {brings}."
        missing_hooks["rollout"] = (
            f"the trainer has {brings}, and a rollout program makes the completions itself. Give what it needs as "
            f"parameters of the method, and remove {brings}."
        )
    elif inputs.has_images:
        missing_hooks["rollout"] = "programs see token ids only, and the dataset has images. Remove the method."
    elif getattr(args, "use_transformers_continuous_batching", False):
        missing_hooks["rollout"] = (
            "continuous batching of transformers has one limit and no log-probs for all requests. Set "
            "use_transformers_continuous_batching=False."
        )
    spg, ga = args.steps_per_generation, args.gradient_accumulation_steps
    if spg % ga:
        missing_hooks["before_update"] = (
            f"an optimizer step would span two generation batches (gradient_accumulation_steps={ga}, "
            f"steps_per_generation={spg}). Make steps_per_generation a multiple of gradient_accumulation_steps."
        )
    elif any(m.whole_groups for m in stack.methods) and spg != ga:
        missing_hooks["before_update"] = (
            f"it needs whole groups in every optimizer step, and TRL shuffles rows before it splits a generation batch "
            f"into {spg // ga} steps. Set steps_per_generation={ga}, equal to gradient_accumulation_steps."
        )
    defaults = {f.name: f.default for f in fields(trl.GRPOConfig)}
    return HostFacts(
        name="trl",
        version=trl_version(),
        hooks=[h for h in HOOKS if h not in missing_hooks],
        missing_hooks=missing_hooks,
        eval_hooks=("plan", "rollout"),
        missing_signals=_missing_signals(stack, args, inputs),
        columns=inputs.columns,
        options=vars(args),
        defaults=defaults,
        row_columns=bool(stack.claims["rollout"]),
        importance_correction=(
            "vllm_importance_sampling_correction=True"
            if args.use_vllm and args.vllm_importance_sampling_correction
            else ""
        ),
    )


def without_effect(stack: MethodStack, args: Any) -> list[str]:
    """Options the user changed that the methods make meaningless, as `option=value (method)`; and the cache of rollout
    programs where none reads it."""
    import trl

    idle = []
    if args.rollout_cache_gb != GRPOConfig.rollout_cache_gb:
        if args.use_vllm:
            idle = [f"rollout_cache_gb={args.rollout_cache_gb} (vLLM has a prefix cache of its own)"]
        elif not stack.claimed("rollout", "admit"):
            idle = [f"rollout_cache_gb={args.rollout_cache_gb} (no method makes rollouts by a program)"]
    defaults = {f.name: f.default for f in fields(trl.GRPOConfig)}
    return idle + [
        f"{option}={getattr(args, option)} ({stack.claims[hook][0].name})"
        for hook, names in _WITHOUT_EFFECT.items()
        if stack.claims[hook]
        for option in names
        if getattr(args, option) != defaults[option]
    ]


def _missing_signals(stack: MethodStack, args: Any, inputs: Inputs) -> dict[str, str]:
    missing = {}
    if args.use_vllm and args.temperature != 1.0:
        missing["engine"] = (
            f"vLLM in TRL reports log-probs with the temperature ({args.temperature}), and those at temperature 1 are "
            f"needed. Set temperature=1.0, or use_vllm=False."
        )
    if not stack.claims["rollout"] and not inputs.tools and not inputs.rollout_func:
        missing["turns"] = (
            "the run has neither tools nor an environment, so a completion is one turn. Give the trainer tools or an "
            "environment_factory, or name a method that plays one (turn_control)."
        )
    truncations = {
        "top_p": (args.top_p, 1.0),
        "top_k": (args.top_k, 0),
        "min_p": (args.min_p, None),
        "repetition_penalty": (args.repetition_penalty, 1.0),
    }
    changed = [f"{k}={v}" for k, (v, neutral) in truncations.items() if v != neutral and not (k == "min_p" and v == 0)]
    if isinstance(args.generation_kwargs, dict):
        changed += [f"generation_kwargs {k}={v}" for k, v in args.generation_kwargs.items()]
    if args.use_vllm and args.vllm_structured_outputs_regex is not None:
        changed.append("vllm_structured_outputs_regex")
    if changed and args.use_vllm:
        missing["engine"] = (
            f"vLLM in TRL reports top log-probs of what was sampled from, and {', '.join(changed)} changes that. "
            f"Remove {'it' if len(changed) == 1 else 'them'}, or set use_vllm=False."
        )
    if changed:
        missing["rollout_logprobs"] = (
            f"with {', '.join(changed)} the distribution that was sampled is not the policy's. Remove "
            f"{'it' if len(changed) == 1 else 'them'}."
        )
    if inputs.rollout_func:
        missing["rollout_logprobs"] = "a rollout_func samples in its own way. Remove it."
    if args.beta == 0.0:
        missing["ref_logprobs"] = "there is no reference model with beta=0. Set beta > 0."
    if not stack.claims["admit"]:
        missing["token_versions"] = "every batch is made by one policy. Name a method that carries groups over (april)."
    if inputs.streaming or inputs.dataset is None:
        missing["prompt_index"] = "the dataset is a stream (or owned by an environment). Use a dataset with an index."
    if inputs.reward_functions < 2:
        missing["several_rewards"] = (
            f"the run has {inputs.reward_functions} reward function. Pass two or more in reward_funcs, e.g. one for "
            f"the answer and one for the format."
        )
    if optimizer_steps_per_generation(args) <= 1 and not args.use_vllm:
        missing["off_policy"] = (
            "every generation batch is used for one optimizer step and sampled by the trained model itself, so there "
            "is nothing to correct. Set num_iterations=2 or more, or steps_per_generation to a multiple of "
            "gradient_accumulation_steps, or use_vllm."
        )
    return missing


def _loss_problems(stack: MethodStack, args: Any, seams: Seams) -> list[str]:
    problems = []
    drops = stack.claims["plan"] + stack.claims["select"]
    losses = stack.claims["policy_loss"] + stack.claims["regularize"]
    if args.loss_type == "bnpo" and (drops or losses):
        problems.append(
            f"loss_type='bnpo' divides by the tokens of each micro-batch, so its result depends on how rows are split; "
            f"{_names(m.name for m in drops + losses)} cannot be exact with it. Use loss_type='dapo'."
        )
    elif losses and args.loss_type not in TRL_AGGREGATION:
        problems.append(
            f"loss_type={args.loss_type!r} is not known to rl-plugins; known: {', '.join(TRL_AGGREGATION)}."
        )
    if drops and not seams.select_completions and args.loss_type in ROW_LOSSES:
        bonus = args.entropy_coef != 0.0 or args.use_adaptive_entropy
        if bonus:
            problems.append(row_loss_problem(stack, args.loss_type, "an entropy bonus"))
    return problems


def row_loss_problem(stack: MethodStack, loss_type: str, what: str) -> str:
    """Why rows may not leave under a row loss with another term in the loss."""
    names = _names(m.name for m in stack.claims["plan"] + stack.claims["select"] + stack.claims["shape"])
    return (
        f"{names} removes rows. With loss_type={loss_type!r} the loss is then rescaled to the rows that stayed, and "
        f"{what} would be rescaled with it. Use loss_type='dapo', or do without {what} (or apply patches/trl/T5)."
    )


def _names(names: Any) -> str:
    return ", ".join(f"`{n}`" for n in dict.fromkeys(names))
