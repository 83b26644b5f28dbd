"""Decisions on one batch: on rollouts of every kind, with unscorable rows, and in another order of rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_plugins.driver import Decision
from rl_plugins.method import Method
from rl_plugins.rollouts import Rollouts, Steps, Tokens
from rl_plugins.testing.contract.compare import differences
from rl_plugins.testing.contract.kit import BUDGET, GROUPS, NAN, Kit, short_error
from rl_plugins.testing.contract.results import row_of_each
from rl_plugins.testing.contract.scenarios import scenarios


def check_ordinary(kit: Kit) -> None:
    """decisions on ordinary rollouts"""
    rewards = [1.0, 0, 0, 1] * GROUPS

    def attempt() -> None:
        stack = kit.stack()
        rollouts = kit.rollouts(rewards)
        kit.decide(stack, rollouts, kit.tokens(rollouts))

    try:
        attempt()
    except Exception as e:
        kit.turns = True  # a method for agents may want turns; if they do not help, the first error tells more
        try:
            attempt()
        except Exception:
            kit.fail(short_error(e))
            kit.usable = False


def check_every_kind(kit: Kit) -> None:
    """rollouts of every kind: ragged, interleaved, single, constant, unscorable, several rewards, turns, no tokens"""
    for name, rollouts, tokens in scenarios(kit):
        with kit.at(name):
            kit.decide(kit.stack(), rollouts, tokens)
    with kit.at("every row left"):
        rollouts = kit.rollouts([1.0, 0, 0, 1])
        kit.decide(kit.stack(_LeaveAll()), rollouts, kit.tokens(rollouts))


class _LeaveAll(Method):
    """Another method that takes every row out."""

    name = "leave_all"

    def select(self, rollouts: Rollouts) -> Tensor:
        return torch.zeros(len(rollouts), dtype=torch.bool)


def check_unscorable(kit: Kit) -> bool:
    """unscorable rows are out of every statistic"""
    if "advantages" not in kit.cls.claims():
        return False
    rewards = torch.tensor([0.9, NAN, 0.1, 0.4, NAN, 0.2, 0.3, NAN, 0.8, 0.7, NAN, 0.6, 0.5, 0.0, 0.25, 0.65])
    rollouts = kit.rollouts(rewards)
    found = []
    with kit.at("partly NaN groups"):
        for rows in (rollouts, rollouts.subset(~torch.isnan(rollouts.reward))):
            stack = kit.stack()
            kit.decide(stack, rows, kit.tokens(rows))
            for hook, args, result in kit.calls:
                if hook == "advantages":
                    found.append(_by_rollout(args[0], torch.as_tensor(result)))
        with_nan, without = found
        if with_nan.keys() == without.keys() and any(differences(with_nan[k], without[k], close=True) for k in without):
            kit.fail("`advantages` of rows that have a reward change when unscorable rows (reward NaN) are added.")
    return True


def _by_rollout(rollouts: Rollouts, advantages: Tensor) -> dict[Any, list[float]]:
    """Advantages of the scored rows by group and rollout."""
    row = row_of_each(rollouts, advantages)
    out: dict[Any, list[float]] = {}
    for i, a in zip(row.tolist(), advantages.tolist(), strict=True):
        if not torch.isnan(rollouts.reward[i]):
            out.setdefault((int(rollouts.group[i]), int(rollouts.rollout[i])), []).append(a)
    return out


def check_row_order(kit: Kit) -> None:
    """decisions do not depend on the order of the rows"""
    rng = np.random.default_rng(1)
    group = [0, 1, 1, 2, 2, 2, 0, 0, 0, 3, 3, 3, 3, 3, 1, 1]
    distinct = (rng.permutation(BUDGET) / 10).tolist()
    order = torch.from_numpy(rng.permutation(BUDGET))
    with kit.at("graded rewards"):
        rollouts = kit.rollouts(distinct, group)
        tokens = kit.tokens(rollouts)
        moved, moved_tokens, token_order = _permute(rollouts, tokens, order)
        one = decided(kit.decide(kit.stack(), rollouts, tokens), order, token_order)
        two = decided(kit.decide(kit.stack(), moved, moved_tokens))
        for changed in differences(one, two, close=True):
            kit.fail(f"decisions depend on the order of the rows (`{changed}`).")
    with kit.at("rewards 0 and 1"):  # which of several equal rows stays may depend on it, how many may not
        rollouts = kit.rollouts([float(i % 3 == 0) for i in range(BUDGET)], group)
        tokens = kit.tokens(rollouts)
        moved, moved_tokens, _ = _permute(rollouts, tokens, order)
        if _kept(kit.decide(kit.stack(), rollouts, tokens)) != _kept(kit.decide(kit.stack(), moved, moved_tokens)):
            kit.fail("how many rows of each group and reward stay depends on the order of the rows.")


def _kept(decision: Decision) -> list[tuple[float, float]]:
    r = decision.rollouts
    return sorted(zip(r.group[r.kept].tolist(), r.reward[r.kept].tolist(), strict=True))


def decided(decision: Decision, rows: Tensor | None = None, tokens: Tensor | None = None) -> dict[str, Any]:
    """What was decided, by name, in another order of rows and tokens if given."""

    def of(x: Any, order: Tensor | None) -> Any:
        return x if x is None or order is None else x[order]

    return {
        "reward": of(decision.rollouts.reward, rows),
        "kept": of(decision.rollouts.kept, rows),
        "trained": of(decision.trained, rows),
        "keep_tokens": of(decision.keep_tokens, tokens),
        "advantages": of(decision.advantages, tokens),
        "old_logprobs": of(decision.old_logprobs, tokens),
        "row_columns": {k: of(v, rows) for k, v in decision.row_columns.items()},
        "token_columns": {k: of(v, tokens) for k, v in decision.token_columns.items()},
    }


def _permute(rollouts: Rollouts, tokens: Tokens, order: Tensor) -> tuple[Rollouts, Tokens, Tensor]:
    """Rows in another order, and the order of the tokens that follows from it."""
    place = torch.argsort(order)  # old row -> new row
    changes: dict[str, Any] = {}
    for f in dataclasses.fields(rollouts):
        value = getattr(rollouts, f.name)
        if isinstance(value, Tensor) and len(value) == len(rollouts) and f.name != "reward_weights":
            changes[f.name] = value[order]
        elif isinstance(value, (list, tuple)) and len(value) == len(rollouts) and f.name != "reward_names":
            changes[f.name] = [value[i] for i in order]
    changes["meta"] = {k: [v[i] for i in order] for k, v in rollouts.meta.items()}
    token_order = torch.sort(place[tokens.row], stable=True).indices
    moved = tokens.subset(token_order, place)
    if rollouts.steps is not None:
        s = rollouts.steps
        step_order = torch.sort(place[s.row], stable=True).indices
        anchors = [s.anchor[i] for i in step_order]
        changes["steps"] = Steps(
            place[s.row[step_order]], s.turn[step_order], anchors, s.reward[step_order], s.valid[step_order]
        )
        moved = moved.replace(step=torch.argsort(step_order)[moved.step])
    return rollouts.replace(**changes), moved, token_order
