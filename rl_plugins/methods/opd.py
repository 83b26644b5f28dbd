"""On-policy distillation (GKD, arXiv 2306.13649): a larger model grades every token that the policy samples."""

from __future__ import annotations

from dataclasses import dataclass

from rl_plugins import ConfigError, Method, MethodParams, Rollouts, Shape, Tokens, from_params, param
from rl_plugins.kit.distillation import taught


class Opd(Method):
    """Lowers the reverse KL divergence to a teacher on the policy's own rollouts.

    For a token y_t that the policy sampled for prompt x:

        A_t = w A + log p_T(y_t | x, y_<t) - log pi_old(y_t | x, y_<t)

    with the teacher's model p_T, and A the advantage that rewards make. With w = 0 rewards play no part, and the
    expected gradient is that of - sum_t KL(pi(. | x, y_<t) || p_T(. | x, y_<t)) at the prefixes the policy reaches.

    Symbols: A, A_t (tokens,) float64. Only the log-prob of the sampled token is taken of each distribution.

    Special cases: a log-ratio beyond 20 nats counts as 20. A reward function must be there; one that returns 0 serves.

    Raises:
        ConfigError: no teacher is named, or its tokenizer gives other token ids.

    Source: arXiv 2306.13649, section 3 (on-policy data, reverse KL); in this form by Thinking Machines, "On-Policy
    Distillation" (2025).
    """

    name = "opd"
    fidelity = "abstract"
    does = "Distils a larger model on the policy's own rollouts, token by token"
    problems = ("no_verifier", "no_signal")
    needs = frozenset({"tokens", "old_logprobs", "teacher_logprobs"})
    teacher = from_params(lambda p: p.teacher)

    @dataclass(frozen=True)
    class Params(MethodParams):
        teacher: str = param("", "path or name of the teacher's model, which has the policy's tokenizer")
        reward_weight: float = param(0.0, "w, weight of the advantages that rewards make, beside the teacher's", ge=0)

        def check(self) -> None:
            if not self.teacher:
                raise ConfigError("`teacher` is empty. Name the model to learn from, of the policy's family.")

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape:
        return taught(self, tokens)
