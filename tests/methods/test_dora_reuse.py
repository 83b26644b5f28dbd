"""Reuse of surplus groups: a plain list next to the buffer, no group lost or trained twice, age, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rollout_replay import PROMPTS, SIZE, Host

from rl_plugins.errors import ConfigError
from rl_plugins.methods.dora import DoraReuse
from rl_plugins.params import build_params
from rl_plugins.rollouts import PlanRow, Rollouts, Tokens
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.state import load_state, save_state
from rl_plugins.testing import make_run, one_step


def reuse(**params: Any) -> DoraReuse:
    return DoraReuse(build_params(DoraReuse.Params, params, "dora_reuse"))


class Spares(Host):
    """Generates spare rollouts, too. One reward function, so that many groups have no signal."""

    def generate(self, plan: list[PlanRow], rng: np.random.Generator) -> tuple[Rollouts, Tokens]:
        return super().generate([p.replace(n=p.n + p.spare, spare=0) for p in plan], rng)

    def step(self) -> tuple[list[PlanRow], Rollouts, Any, dict[str, float]]:
        stack, rng = self.stack, np.random.default_rng([7, self.stack.batch])
        proposal = rng.permutation(PROMPTS)[: self.groups].tolist()
        plan = list(first_plan(stack, proposal, SIZE, SIZE * self.groups, PROMPTS).rows)
        rollouts, tokens = self.generate(plan, rng)
        decision = one_step(stack, rollouts, tokens, budget=SIZE * self.groups)
        logged = {k.removeprefix("dora_reuse/"): v for k, v in combine([stack.metrics.take()]).items()}
        return plan, rollouts, decision, logged


def groups_of(rollouts: Rollouts, rows: torch.Tensor) -> list[int]:
    return sorted(set(rollouts.group[rows].tolist()))


@given(
    seed=st.integers(0, 5),
    ratio=st.sampled_from([0.0, 0.25, 0.5, 0.75]),
    spare=st.sampled_from([0.0, 0.5, 1.0]),
    staleness=st.integers(1, 3),
    most=st.sampled_from([1, 3, 512]),
    levels=st.integers(1, 2),
)
@settings(max_examples=40, deadline=None)
def test_every_group_is_accounted_for(
    seed: int, ratio: float, spare: float, staleness: int, most: int, levels: int
) -> None:
    """Against a plain list of stored groups: (prompt, tokens of its first rollout, version)."""
    kept = {} if ratio == 0 else {"max_staleness": staleness, "buffer_groups": most}
    host = Spares(reuse(reuse_ratio=ratio, spare_share=spare, **kept), seed, levels=levels)
    buffer: list[tuple[int, tuple[int, ...], int]] = []
    for now in range(7):
        plan, rollouts, decision, logged = host.step()
        drawn = [p for p in plan if p.given]
        eligible = [b for b in buffer if (now if now else 0) - b[2] <= staleness]
        assert len(drawn) == min(len(eligible), int(ratio * host.groups))
        for p in drawn:  # as it was stored, and once
            key = (p.prompt_index, p.given[0].tokens, min(v for c in p.given for v in c.versions or ()))
            assert now - key[2] <= staleness
            buffer.remove(key)
        made = [p for p in plan if not p.given]
        asked = host.groups + int(spare * host.groups)  # one less where all but one of the trained groups are reused
        assert asked - (len(drawn) == host.groups - 1) <= len(made) <= asked
        assert sum(p.n for p in plan) == SIZE * host.groups, "as many rows as the batch holds"
        number = [p.group for p in plan]
        assert len(set(number)) == len(number) and sorted({p.prompt_index for p in made}) == sorted(
            p.prompt_index for p in made
        )

        rewards = {g: rollouts.reward[rollouts.group == g].tolist() for g in number}
        signal = [p.group for p in sorted(made, key=lambda p: p.group) if len(set(rewards[p.group])) > 1]
        room = host.groups - len(drawn)
        expected = sorted([*signal[:room], *(p.group for p in drawn)])
        assert groups_of(rollouts, decision.trained) == expected
        surplus = signal[room:] if ratio else []
        of = {p.group: p for p in plan}
        for g in surplus:
            rows = (rollouts.group == g).nonzero()[:, 0]
            ids = rollouts.token_ids
            assert ids is not None
            first = tuple(ids.completion[int(rows[0])].tolist())
            if bool((rollouts.length[rows] > 0).all()):
                buffer.append((of[g].prompt_index, first, int(rollouts.version[rows].min())))
        stored = len(buffer)
        young = [b for b in buffer if now + 1 - b[2] <= staleness]
        buffer = young[-most:] if ratio else []
        assert logged["made"] == len(made) and logged["reused"] == len(drawn)
        assert logged["trained"] == len(expected) and logged["no_signal"] == len(made) - len(signal)
        if ratio:
            before = stored - int(logged["stored"]) + len(drawn)
            assert logged["buffer"] == len(buffer)
            gone = logged["no_signal"] + logged["trained"] + logged["dropped"] + logged["expired"] + logged["buffer"]
            assert logged["made"] + before == gone


def test_a_resumed_run_reuses_the_same_groups(tmp_path: Any) -> None:
    params = dict(spare_share=1.0, reuse_ratio=0.5)
    whole = Spares(reuse(**params))
    for _ in range(3):
        whole.step()
    save_state(tmp_path, whole.stack.state_dict("data"))
    rest = [whole.step() for _ in range(3)]
    other = Spares(reuse(**params))
    saved = load_state(tmp_path)
    assert saved is not None
    other.stack.load_state_dict(saved, "data")
    reused = 0
    for plan, rollouts, decision, _ in rest:
        again, same, chosen, _ = other.step()
        assert [(p.prompt_index, p.group, p.n, p.spare, p.given) for p in again] == [
            (p.prompt_index, p.group, p.n, p.spare, p.given) for p in plan
        ]
        assert torch.equal(same.reward, rollouts.reward) and torch.equal(chosen.trained, decision.trained)
        reused += sum(bool(p.given) for p in plan)
    assert reused > 0


def test_neither_ratio_nor_spares_only_filter() -> None:
    host = Spares(reuse(reuse_ratio=0.0, spare_share=0.0))
    plan, rollouts, decision, logged = host.step()
    assert [(p.n, p.spare) for p in plan] == [(SIZE, 0)] * host.groups and not reuse(reuse_ratio=0.0).replays
    spread = rollouts.groups.max(rollouts.reward) > rollouts.groups.min(rollouts.reward)
    assert torch.equal(decision.trained, rollouts.groups.rows(spread)) and "buffer" not in logged


def test_a_buffer_of_the_host_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"takes batches out of a buffer of its own.*algorithm\.filter_groups"):
        reuse().check(make_run(buffered=True))
