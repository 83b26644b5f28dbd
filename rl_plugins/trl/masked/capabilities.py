"""What a run of a masked diffusion model does not offer to methods, and why."""

from __future__ import annotations

from dataclasses import replace

from rl_plugins.runtime.preflight import HostCapabilities
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.trl.masked.config import MaskedGRPOConfig

_NO_CONTINUATION = "a masked diffusion model decodes an answer as a whole and continues no text. Remove the method."
_EQUAL = (
    "with step_weight='equal' tokens have weights, and this hook works on plain tokens. Set step_weight='tokens' (of "
    "the method `cj_grpo`, if it is named)."
)


def masked_capabilities(capabilities: HostCapabilities, stack: MethodStack, args: MaskedGRPOConfig) -> HostCapabilities:
    """The capabilities of TRL's trainer, without what decoding in any order cannot serve."""
    hooks = dict.fromkeys(("rollout", "admit"), _NO_CONTINUATION)
    if _weight(stack, args) == "equal":
        hooks |= dict.fromkeys(("before_update", "policy_loss", "regularize"), _EQUAL)
    signals = dict(capabilities.missing_signals)
    signals.pop("current_entropies", None)  # it has entropies of its own, with a gradient
    signals["engine"] = "the decoding keeps no top log-probs. Remove the method."
    signals["sum_squared_probs"] = "log-probs are taken in many states, and this sum is not. Remove the method."
    signals["teacher_logprobs"] = "log-probs are taken in states of an answer's own prompt. Remove the method."
    changed = [
        f"{name}={getattr(args, name)}"
        for name, neutral in (("temperature", 1.0), ("guidance", 0.0), ("remasking", "confidence"))
        if getattr(args, name) != neutral
    ]
    if changed:
        signals["rollout_logprobs"] = (
            f"with {', '.join(changed)} the distribution that was sampled is not the policy's. Set the neutral value."
        )
    elif "logprobs_from" not in _options_of(stack) and args.logprobs_from == "one_step":
        signals["rollout_logprobs"] = (
            "log-probs of one step are no log-probs of what was sampled. Set logprobs_from='trajectory', or name the "
            "method `cj_grpo`."
        )
    return replace(
        capabilities,
        hooks=[h for h in capabilities.hooks if h not in hooks],
        missing_hooks={**capabilities.missing_hooks, **hooks},
        eval_hooks=[h for h in capabilities.eval_hooks if h != "rollout"],
        missing_signals=signals,
    )


def problems_of(stack: MethodStack) -> list[str]:
    """Methods that give tokens to the policy or generate more than once."""
    why = {
        "off_policy": "gives completions of an older policy without the order in which their tokens were unmasked",
        "forced_tokens": "puts tokens into answers without the order in which they were unmasked",
    }
    rounds = "generates in rounds, and the order in which tokens were unmasked does not travel between them yet"
    found = [(m.name, rounds) for m in stack.methods if m.rounds]
    found += [(m.name, text) for m in stack.methods for brought, text in why.items() if brought in m.brings]
    return [
        f"`{name}` {text}, so no state of a masked diffusion model can be rebuilt. Remove the method."
        for name, text in found
    ]


def _options_of(stack: MethodStack) -> dict[str, object]:
    return {name: v for m in stack.methods for name, v in m.host_options.get("trl", {}).items()}


def _weight(stack: MethodStack, args: MaskedGRPOConfig) -> object:
    return _options_of(stack).get("step_weight", args.step_weight)
