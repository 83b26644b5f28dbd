"""Reuse of surplus groups: a plain list next to the buffer, no group lost or trained twice, age, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from one_method import method
from test_rollout_replay import PROMPTS, SIZE, Host

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.method import Method
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import PlanRow, Rollouts
from rl_plugins.methods.dora_reuse import DoraReuse
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.state import load_state, save_state
from rl_plugins.testing import make_run, one_step, start_stack


def reuse(**params: Any) -> DoraReuse:
    return DoraReuse(build_params(DoraReuse.Params, params, "dora_reuse"))


class Spares(Host):
    """One reward function, so that many groups have no signal."""

    def step(self) -> tuple[list[PlanRow], Rollouts, Any, dict[str, float]]:
        stack, rng = self.stack, np.random.default_rng([7, self.stack.batch])
        proposal = rng.permutation(PROMPTS)[: self.groups].tolist()
        plan = list(first_plan(stack, proposal, SIZE, SIZE * self.groups, PROMPTS).rows)
        rollouts, tokens = self.as_rollouts(self.rows_of(plan, rng), stack.batch)
        decision = one_step(stack, rollouts, tokens, budget=SIZE * self.groups)
        logged = {k.removeprefix("dora_reuse/"): v for k, v in combine([stack.metrics.take()]).items()}
        return plan, rollouts, decision, logged


def made_by_hand(groups: int, reused: int, spare: int) -> int:
    """Groups that are made: in each call all prompts but one may be spare, in the first one all if some are reused."""
    left, made = reused + spare, groups
    spares = min(left, groups - (not reused))
    left, need = left - spares, spares - reused
    while need > 0:
        spares, made = min(left, need - 1), made + need
        left, need = left - spares, spares
    return made


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
        assert len(made) == made_by_hand(host.groups, len(drawn), int(spare * host.groups))
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


def alone_or_beside(*before: Method, **params: Any) -> Spares:
    host = object.__new__(Spares)
    host.stack = start_stack(*before, reuse(**params), run=make_run(group_size=SIZE))
    host.groups, host.levels, host.sizes, host.made = 4, 2, False, []
    return host


def test_a_group_that_loses_one_row_is_counted_once() -> None:
    last = method("last", select=lambda r: r.rollout < SIZE - 1)
    host, before, trained = alone_or_beside(last, spare_share=1.0, reuse_ratio=0.5), 0.0, 0.0
    for _ in range(6):
        _, _, _, logged = host.step()
        gone = sum(logged[name] for name in ("no_signal", "trained", "dropped", "expired", "buffer"))
        assert logged["made"] + before == gone
        before, trained = logged["buffer"], trained + logged["trained"]
    assert trained > 6


def test_a_grading_that_failed_does_not_return_as_a_wrong_answer() -> None:
    def rewards(rollouts: Rollouts) -> torch.Tensor:
        fresh = torch.tensor([p is None for p in rollouts.payload or ()])  # a given completion is not graded again
        return torch.where(fresh & (rollouts.rollout == 0) & (rollouts.group % 2 == 0), torch.nan, rollouts.reward)

    host, failed, reused = (
        alone_or_beside(method("grader", rewards=rewards), spare_share=1.0, reuse_ratio=0.5),
        set(),
        0,
    )
    for _ in range(8):
        plan, rollouts, decision, _ = host.step()
        reward, ids = decision.rollouts.reward, rollouts.token_ids
        assert ids is not None
        for row, payload in enumerate(rollouts.payload or ()):
            key = (int(rollouts.prompt_index[row]), tuple(ids.completion[row].tolist()))
            if payload is None and bool(torch.isnan(reward[row])):
                failed.add(key)
            assert payload is None or key not in failed
        reused += sum(bool(p.given) for p in plan)
    assert len(failed) > 8 and reused > 3


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_no_prompt_is_drawn_that_is_not_made(share: float) -> None:
    method = reuse(reuse_ratio=0.0, spare_share=share)
    stack = start_stack(method, run=make_run(group_size=8, dataset_size=10**5))
    plan = first_plan(stack, range(64), 8, 8 * 64, 10**5)
    spare = int(64 * share)
    assert len(plan.rows) == 64 + spare and plan.trained == 8 * 64
    assert spare <= stack.extra_prompts <= spare + 2, "but for those that the batch has already"


def test_another_number_of_rollouts_is_refused() -> None:
    one = method("doubled", plan=lambda plan: None, decides_rollouts=True)
    with pytest.raises(ConfigError, match="`doubled` and `dora_reuse` both decide how many rollouts prompts get"):
        start_stack(one, reuse())
    assert not reuse(reuse_ratio=0.0, spare_share=0.0).decides_rollouts and reuse(reuse_ratio=0.0).decides_rollouts
    assert "several_rollouts" in reuse().needs, "one rollout has no signal"


def test_neither_ratio_nor_spares_only_filter() -> None:
    host = Spares(reuse(reuse_ratio=0.0, spare_share=0.0))
    plan, rollouts, decision, logged = host.step()
    assert [(p.n, p.spare) for p in plan] == [(SIZE, 0)] * host.groups and not reuse(reuse_ratio=0.0).brings
    spread = rollouts.groups.max(rollouts.reward) > rollouts.groups.min(rollouts.reward)
    assert torch.equal(decision.trained, rollouts.groups.rows(spread)) and "buffer" not in logged


def test_a_buffer_of_the_host_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"takes batches out of a buffer of its own.*algorithm\.filter_groups"):
        reuse().check(make_run(buffered=True))
