"""Decisions on one batch: on rollouts of every kind, with unscorable rows, and in another order of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_plugins.core.method import Method
from rl_plugins.core.rollouts import Rollouts, Tokens, TurnTable
from rl_plugins.runtime.decide import Decision
from rl_plugins.testing.contract.compare import differences
from rl_plugins.testing.contract.kit import BUDGET, GROUPS, NAN, Kit, short_error
from rl_plugins.testing.contract.results import row_of_each
from rl_plugins.testing.contract.scenarios import scenarios
from rl_plugins.testing.data import one_row_per_turn, take_rows


def check_ordinary(kit: Kit) -> None:
    """decisions on ordinary rollouts"""
    try:
        stack = kit.stack()
        rollouts = kit.rollouts([1.0, 0, 0, 1] * GROUPS)
        kit.decide(stack, rollouts, kit.tokens(rollouts))
    except Exception as e:
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
    if rollouts.turns is None and rollouts.step_rewards is None:  # lengths that show in any statistic of lengths
        longer = torch.where(torch.isnan(rewards), 9 * rollouts.length, rollouts.length)
        rollouts = rollouts.replace(length=longer)
    found = []
    with kit.at("partly NaN groups"):
        for rows in (rollouts, rollouts.subset(~torch.isnan(rollouts.reward))):
            stack = kit.stack()
            kit.decide(stack, rows, kit.tokens(rows))
            for hook, args, result in kit.calls:
                if hook == "advantages":
                    found.append(_by_rollout(kit.cls, args[0], torch.as_tensor(result)))
        with_nan, without = found
        if with_nan.keys() == without.keys() and any(differences(with_nan[k], without[k], close=True) for k in without):
            kit.fail("`advantages` of rows that have a reward change when unscorable rows (reward NaN) are added.")
    return True


def _by_rollout(method: type[Method], rollouts: Rollouts, advantages: Tensor) -> dict[Any, list[float]]:
    """Advantages of the scored rows by group and rollout."""
    row = row_of_each(method, rollouts)
    out: dict[Any, list[float]] = {}
    for i, a in zip(row.tolist(), advantages.tolist(), strict=True):
        if not torch.isnan(rollouts.reward[i]):
            out.setdefault((int(rollouts.group[i]), int(rollouts.rollout[i])), []).append(a)
    return out


def check_layouts(kit: Kit) -> bool:
    """a row per turn and a row per rollout give the same advantages"""
    if "advantages" not in kit.cls.claims() or "turns" not in kit.needs:
        return False
    rewards = [0.9, NAN, 0.1, 0.4, 0.7, 0.2, 0.3, 0.7, 0.8, 0.7, 0.1, 0.6, 0.5, 0.0, 0.25, 0.65]
    rollouts = kit.rollouts(rewards, [0, 1, 1, 2, 2, 2, 0, 0, 0, 3, 3, 3, 3, 3, 1, 1])
    with kit.at("turns"):
        per_rollout = rollouts, kit.tokens(rollouts)
        of_turns = []
        for rows, tokens in (per_rollout, one_row_per_turn(*per_rollout)):
            kit.decide(kit.stack(), rows, tokens)
            given, result = next((args[0], result) for hook, args, result in kit.calls if hook == "advantages")
            of_turns.append(result if kit.cls.advantages_per == "turn" else result[given.turns.row])
        if differences(of_turns[0], of_turns[1], close=True):
            kit.fail(
                "`advantages` of the same turns differ with one row per rollout and with one row per turn. A rollout "
                "is all rows with its `group` and `rollout`; take what is per rollout once, and turns from `steps`."
            )
    return True


def check_row_order(kit: Kit) -> None:
    """decisions do not depend on the order of the rows"""
    rng = np.random.default_rng(1)
    group = [0, 1, 1, 2, 2, 2, 0, 0, 0, 3, 3, 3, 3, 3, 1, 1]
    distinct = (rng.permutation(BUDGET) / 10).tolist()
    order = torch.from_numpy(rng.permutation(BUDGET))
    rollouts = kit.rollouts(distinct, group)
    given = {"graded rewards": (rollouts, kit.tokens(rollouts))}
    if "turns" in kit.needs:
        given["one row per turn"] = one_row_per_turn(*given["graded rewards"])
    for name, (rows, row_tokens) in given.items():
        with kit.at(name):
            any_order = torch.from_numpy(rng.permutation(len(rows)))
            moved, moved_tokens, token_order = _permute(rows, row_tokens, any_order)
            one = decided(kit.decide(kit.stack(), rows, row_tokens), any_order, token_order)
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
    """Rows in another order, turns too, and the order of the tokens that follows from it."""
    place = torch.argsort(order)  # old row -> new row
    moved = take_rows(rollouts, order)
    token_order = torch.sort(place[tokens.row], stable=True).indices
    moved_tokens = tokens.subset(token_order, place)
    if rollouts.turns is not None and moved_tokens.turn is not None:
        s = rollouts.turns
        turns = torch.from_numpy(np.random.default_rng(3).permutation(len(s.row)))
        anchors = [s.anchor[i] for i in turns]
        moved = moved.replace(
            turns=TurnTable(place[s.row[turns]], s.turn[turns], anchors, s.reward[turns], s.valid[turns])
        )
        moved_tokens = moved_tokens.replace(turn=torch.argsort(turns)[moved_tokens.turn])
    return moved, moved_tokens, token_order
