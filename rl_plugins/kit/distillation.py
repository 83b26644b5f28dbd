"""Learning from a teacher: token advantages of its log-probs, and prompts that hold more than the policy's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rl_plugins.core.method import Method
from rl_plugins.core.params import MethodParams, param
from rl_plugins.core.rollouts import Shape, Tokens
from rl_plugins.kit.prompts import appended

LARGEST = 20.0  # log-ratio, in nats


@dataclass(frozen=True)
class TeacherParams(MethodParams):
    """Parameters of a method whose teacher may be the policy itself."""

    teacher: str | None = param(None, "path or name of the teacher's model; null: the policy itself")
    reward_weight: float = param(0.0, "w, weight of the advantages that rewards make, beside the teacher's", ge=0)


def taught(method: Method, tokens: Tokens) -> Shape:
    """Token advantages w A + log p_T - log pi_old, limited to 20 nats; without a teacher (NaN) w A. Their sum over what
    the policy samples has the gradient of minus its KL divergence to the teacher.

    Logs `kl`, the mean of log pi_old - log p_T over trained tokens, and `taught`, the share of these with a teacher.
    """
    assert tokens.teacher_logprobs is not None and tokens.old_logprobs is not None  # in `needs`
    gap = tokens.teacher_logprobs.double() - tokens.old_logprobs.double()
    read = tokens.keep & ~torch.isnan(gap)
    if bool(read.any()):
        method.log("kl", -gap[read].mean(), weight=read.sum())
    if bool(tokens.keep.any()):
        method.log("taught", read.sum() / tokens.keep.sum(), weight=tokens.keep.sum())
    gap = gap.clamp(-LARGEST, LARGEST).nan_to_num(nan=0.0)
    return Shape(advantages=method.params.reward_weight * tokens.advantages + gap)


def told(prompt: Any, text: str) -> Any:
    """A prompt, text or messages, with a text behind it that only a teacher reads."""
    return f"{prompt}\n{text}" if isinstance(prompt, str) else appended(prompt, text)
