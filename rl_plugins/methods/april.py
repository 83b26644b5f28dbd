"""APRIL (arXiv 2509.18521): start more groups than are trained, resume those that are not complete later."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rl_plugins import (
    Admission,
    ConfigError,
    Idle,
    Method,
    MethodParams,
    Queue,
    Rollouts,
    Run,
    Shape,
    Tokens,
    from_params,
    param,
    signals,
)
from rl_plugins.core.params import GIVEN

WARMUP = "trainer.v1.colocate_async.num_warmup_batches"
SEPARATE_WARMUP = "trainer.v1.separate_async.num_warmup_batches"
THRESHOLD = "trainer.v1.sampler.max_off_policy_threshold"
STRATEGY = "trainer.v1.sampler.max_off_policy_strategy"
CORRECTION = "algorithm.rollout_correction.rollout_is"


def _verl_options(p: Any) -> dict[str, dict[str, Any]]:
    # rounded: verl takes the whole part of warm-up batches times groups, and 1.15 - 1 is less than 0.15
    ahead = round(p.over_sampling - 1, 9)
    stale = None if p.max_staleness is None else p.max_staleness + 1
    options = {WARMUP: ahead, SEPARATE_WARMUP: ahead, THRESHOLD: stale}
    if stale is not None:
        options[STRATEGY] = "drop"
    if p.correction == "token_tis":
        options[CORRECTION] = None  # the same weight twice
    return {"verl": options}


class April(Method):
    """Active Partial Rollouts: a batch does not wait for its longest rollouts, which are resumed in a later batch.

    Each batch trains N groups and works on N' = floor(over_sampling * N):

        resume the waiting groups, longest waiting first; start new ones until there are N'
        decode all of them; stop as soon as N are complete (every rollout ended or reached the length limit)
        train these N; all others wait with their tokens, log-probs and policy versions

    A group is never split, and it may mix policy versions, as may a rollout. A resumed rollout keeps the rest of its
    length limit. With `correction: none`, as the authors do, older tokens are trained with old log-probs of the current
    weights, so the ratio starts at 1. The alternatives:

        mask        tokens older than the batch's newest leave the update (their reward still counts for the group)
        token_tis   A_t <- A_t * min(exp(lp_t^old - lp_t^rollout), tis_cap)

    A group started more than `max_staleness` batches ago is restarted (`stale: restart`) or dropped (`drop`).

    Symbols: tokens (tokens,) flat, over rows; lp^old of the policy before the update, lp^rollout of the sampling one,
    float32, nats; advantages float64. Versions are published weights: in TRL every optimizer step publishes.

    Special cases: further groups that are complete when decoding stops are trained in the next batch; `mask` keeps
    their newest tokens. A token without a known rollout log-prob has weight 1.

    Raises:
        MethodError: verl with `stale: restart`.

    Source: arXiv 2509.18521; RLsys-Foundation/APRIL slime/rollout/sglang_example.py and slime/ray/buffer.py (commit
    a72b585), the golden cases; `mask_offpolicy` of THUDM/slime, and token_tis of verl-recipe `partial_rollout`.
    """

    name = "april"
    fidelity = "code"
    does = "Starts more groups than it trains, stops when enough are complete and resumes the rest later"
    problems = ("long_tail",)
    needs = from_params(
        lambda p: signals(
            "prompt_index",
            "tokens",
            old_logprobs=p.correction == "token_tis",
            rollout_logprobs=p.correction == "token_tis",
            token_versions=p.correction == "mask",
        )
    )
    corrects_sampling = from_params(lambda p: p.correction == "token_tis")
    host_options = from_params(lambda p: _verl_options(p))
    idle = (Idle({"waiting": 0}, "no group waits: completions have similar lengths, or `over_sampling` is 1."),)

    @dataclass(frozen=True)
    class Params(MethodParams):
        over_sampling: float = param(2.0, "N'/N, groups in progress per group trained; 1: no others", ge=1, le=64)
        max_staleness: int | None = param(None, "batches after which `stale` acts on a group; none: never", ge=0)
        stale: Literal["restart", "drop"] = param(
            "restart", "treatment of such a group", only_if={"max_staleness": GIVEN}
        )
        correction: Literal["none", "mask", "token_tis"] = param("none", "treatment of tokens of an older policy")
        tis_cap: float = param(2.0, "largest importance weight of a token", ge=1, only_if={"correction": "token_tis"})

    def check(self, run: Run) -> None:
        p = self.params
        if run.host == "verl" and p.max_staleness is not None and p.stale == "restart":
            raise ConfigError(
                "verl drops groups that are too old and cannot restart them. Set `stale: drop`, or "
                "remove `max_staleness`."
            )

        prompts = run.batch_prompts
        if run.host == "trl" and p.over_sampling > 1 and prompts and self._in_the_making(prompts) == prompts:
            raise ConfigError(
                f"`over_sampling` is {p.over_sampling:g}, and a batch has {prompts} groups, so no other is begun. Set "
                f"it to {1 + 1 / prompts:.3g} or more, or make the batch larger."
            )

    def admit(self, queue: Queue) -> Admission:
        p = self.params
        total = self._in_the_making(queue.groups)
        old = {
            i
            for i, group in enumerate(queue.carried)
            if p.max_staleness is not None
            and queue.batch - group.drawn > p.max_staleness
            and max(group.versions, default=-1) >= 0  # it has a token
        }
        drop = tuple(sorted(old)) if p.stale == "drop" else ()
        go = [i for i in range(len(queue.carried)) if i not in drop][:total]
        resume, restart = tuple(i for i in go if i not in old), tuple(i for i in go if i in old)
        answer = Admission(total - len(go), resume, restart, drop)
        self.log("waiting", len(queue.carried))
        for name, value in (
            ("fresh", answer.fresh),
            ("resumed", len(resume)),
            ("restarted", len(restart)),
            ("dropped", len(drop)),
        ):
            self.log(name, value)
        return answer

    def _in_the_making(self, groups: int) -> int:
        return max(groups, math.floor(self.params.over_sampling * groups + 1e-6))  # 1.16 * 25 is less than 29

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape | None:
        p = self.params
        if not len(tokens):
            return None
        self.log("stale_rows", (rollouts.staleness > 0).double().mean())
        self.log("staleness", rollouts.staleness.max(), reduce="max")
        stale = None
        if tokens.version is not None:
            age = rollouts.current_version - tokens.version
            stale = age > 0
            self.log("stale_tokens", stale.double().mean())
            self.log("token_age", _mean(age.double(), stale))
        if p.correction == "mask":
            assert tokens.version is not None  # in `needs`
            # of the batch: where all of it waited, or was made a fixed time ago, nothing would be trained otherwise
            older = tokens.version < tokens.version.max()
            self.log("masked", older.double().mean())
            if self.traced:
                rows = torch.bincount(tokens.row[older], minlength=len(rollouts))
                text = "{tokens} tokens are of older weights, {age} versions old"
                self.note(rows > 0, text, tokens=rows, age=rollouts.staleness)
            return Shape(keep_tokens=~older)
        if p.correction == "token_tis":
            weight = self._weight(tokens)
            self.log("weight", weight.mean())
            self.log("capped", (weight >= p.tis_cap * (1 - 1e-9)).double().mean())
            if stale is not None:
                self.log("weight_stale", _mean(weight, stale))
            return Shape(advantages=tokens.advantages * weight)
        return None

    def _weight(self, tokens: Tokens) -> Tensor:
        """(tokens,) float64 truncated importance weight."""
        assert tokens.old_logprobs is not None and tokens.rollout_logprobs is not None  # in `needs`
        log_ratio = tokens.old_logprobs.double() - tokens.rollout_logprobs.double()
        known = torch.isfinite(log_ratio) & ~tokens.forced
        limit = math.log(self.params.tis_cap)
        return torch.where(known, log_ratio.clamp(max=limit), 0.0).exp()


def _mean(values: Tensor, where: Tensor) -> Tensor:
    """Mean where `where`; NaN, which is not logged, if that is nowhere."""
    return values[where].mean()
