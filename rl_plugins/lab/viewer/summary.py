"""A batch in numbers: one column for each thing known of its groups, from the summary and from the recorded rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from rl_plugins.lab.viewer.folder import NOISE, Record, TraceFolder

COLUMNS = ("group", "prompt_index", "rows", "trained", "reward", "spread", "change", "truncated", "age", "recorded")
FLAT = 1e-6
"""A reward function varies in a group if its rewards lie further apart than this."""


def batch_summary(trace: TraceFolder, summary: Record) -> Record:
    """The record of a batch with its groups as columns.

    Args:
        summary: of `trace.batches`.

    Returns:
        The record, with `seconds` since the first batch, and `groups` as {name: values of all groups}. `lr_scale` has
        the factor of each update, `prompt_values` {"method name of a number": [smallest, mean, largest]} of what was
        noted of prompts. Where rollouts are recorded, there are also the columns `disagree` (lowest correlation of two
        reward functions in the group, None without two that vary) and `clipped` (share of the tokens that the loss
        clipped, where that is recorded), `rewards` ({function: mean}), and `left` ({"method.hook": [rows, tokens]}).
    """
    groups = {name: [g[name] for g in summary["groups"]] for name in COLUMNS}
    number = summary["batch"]
    found = {
        **summary,
        "seconds": (summary["time"] - trace.batches[0]["time"]).total_seconds(),
        "stats": {s["name"]: s["value"] for s in summary["stats"]},
        "groups": groups,
    }
    found |= {"rewards": {}, "left": {}, "prompt_values": _values(found.pop("prompts", None) or [])}
    updates = trace.updates(number)
    found["lr_scale"] = [u["lr_scale"] for u in updates if u["lr_scale"] is not None]
    if number not in trace.recorded:
        groups["recorded"] = [False] * len(groups["group"])
        return found
    try:
        table = trace.table("rollouts", number, ("group", "row", "rewards", "left"))
    except FileNotFoundError:  # it left while this was read
        groups["recorded"] = [False] * len(groups["group"])
        return found
    names, rewards = _rewards(table["rewards"].combine_chunks())
    of_row = table["group"].to_numpy()
    place = {g: k for k, g in enumerate(groups["group"])}
    if len(names) > 1:
        where = np.array([place[g] for g in of_row.tolist()], dtype=np.int64)
        groups["disagree"] = _lowest_correlations(rewards, where, len(place))
    if any(u["ratios"] for u in updates):
        groups["clipped"] = _clipped(updates, dict(zip(table["row"].to_pylist(), of_row.tolist(), strict=True)), place)
    known = ~np.isnan(rewards)
    totals = np.where(known, rewards, 0).sum(0) / np.maximum(1, known.sum(0))
    found["rewards"] = {n: float(v) if k else None for n, v, k in zip(names, totals, known.any(0), strict=True)}
    found["left"] = _left(table["left"].combine_chunks())
    return found


def deeds(trace: TraceFolder, summary: Record) -> dict[str, list[str]]:
    """Method -> what it did with the recorded rows of a batch, a phrase each. All of it is from the record of the
    batch, so a method says nothing of its own for it.

    Args:
        summary: of `trace.batches`.
    """
    number, methods = summary["batch"], summary["methods"]
    rows = trace.rollouts(number)
    found: dict[str, list[str]] = {m: [] for m in methods}
    if summary["selected"] and summary["selected_by"] in found:
        found[summary["selected_by"]].append(f"chose {counted(len(set(summary['selected'])), 'prompt')}")
    planned = {r["group"]: r["plan"]["by"] for r in rows if r["plan"]}
    changed = _changed(rows)
    left = _left(trace.rollout_table(number)["left"].combine_chunks())
    logged = {s["name"]: [s["value"]] for s in summary["stats"]}
    loss: dict[str, list[float]] = {}
    for s in (s for u in trace.updates(number) for s in u.get("stats") or []):
        loss.setdefault(s["name"], []).append(s["value"])
        logged.pop(s["name"], None)  # that one is of the updates before
    for m, said in found.items():
        if groups := sum(m in by for by in planned.values()):
            said.append(f"planned {counted(groups, 'group')}")
        for what in ("reward", "advantage"):
            if by := changed[what].get(m):
                said.append(f"changed the {what} of {counted(len(by), 'row')}, by up to {max(by):.4g}")
        gone = [v for name, v in left.items() if name.startswith(f"{m}.")]
        if gone:
            said.append(
                f"took {counted(sum(t for _, t in gone), 'token')} of {counted(sum(n for n, _ in gone), 'row')} out"
            )
        for where, values in (("logged", logged), ("in the loss", loss)):
            own = {n.removeprefix(f"{m}/"): v for n, v in values.items() if n.startswith(f"{m}/")}
            if own:
                said.append(f"{where}: " + ", ".join(f"{n} {sum(v) / len(v):.4g}" for n, v in own.items()))
    return found


def counted(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _changed(rows: list[Record]) -> dict[str, dict[str, list[float]]]:
    """ "reward" or "advantage" -> method -> of each row that it changed, by how much."""
    found: dict[str, dict[str, list[float]]] = {"reward": {}, "advantage": {}}

    def step(what: str, method: str, before: float | None, after: float | None) -> None:
        if before is not None and after is not None and abs(after - before) > NOISE:
            found[what].setdefault(method, []).append(abs(after - before))

    for row in rows:
        value = row["raw_reward"]
        for one in row["rewarded"]:
            step("reward", one["method"], value, one["reward"])
            value = one["reward"]
        value = row["grpo"]
        for stage in row["advantages"]:
            step("advantage", stage["stage"].rpartition(".")[0], value, stage["advantage"])
            value = stage["advantage"]
    return found


def _rewards(column: Any) -> tuple[list[str], np.ndarray]:
    """Names of the reward functions, (rows, functions) of their rewards."""
    entries = column.flatten()
    names = list(dict.fromkeys(entries.field("name").to_pylist()[:64]))
    values = entries.field("value").to_numpy(zero_copy_only=False).astype(float)
    if not names or len(values) != len(column) * len(names):
        return [], np.zeros((len(column), 0))
    return names, values.reshape(len(column), len(names))


def _lowest_correlations(rewards: np.ndarray, where: np.ndarray, groups: int) -> list[float | None]:
    """Of each group the lowest correlation of two functions that vary in it; None without two of them.

    Args:
        rewards: (rows, functions). where: (rows,) place of the row's group.
    """
    known = ~np.isnan(rewards).any(1)
    rewards, where = rewards[known], where[known]

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(where, values, minlength=groups)

    size = np.maximum(1, np.bincount(where, minlength=groups))
    apart = [r - (total(r) / size)[where] for r in rewards.T]
    spread = [np.sqrt(total(a * a)) for a in apart]
    lowest = np.full(groups, np.inf)
    for i in range(len(apart)):
        for j in range(i):
            both = (spread[i] > FLAT) & (spread[j] > FLAT)
            found = np.divide(
                total(apart[i] * apart[j]), spread[i] * spread[j], out=np.full(groups, np.inf), where=both
            )
            lowest = np.minimum(lowest, found)
    return [float(c) if np.isfinite(c) else None for c in lowest]


def _clipped(updates: list[Record], group_of: dict[int, int], place: dict[int, int]) -> list[float | None]:
    """Of each group the share of the tokens with a ratio that were clipped, over the updates that were recorded."""
    hit, count = np.zeros(len(place)), np.zeros(len(place))
    for record in (r for u in updates for r in u["ratios"] or [] if r["row"] in group_of and r["clipped"]):
        k = place[group_of[record["row"]]]
        count[k] += sum(v is not None and v == v for v in record["ratio"])
        hit[k] += sum(v == 1 for v in record["clipped"])
    return [float(h / n) if n else None for h, n in zip(hit, count, strict=True)]


def _values(prompts: list[Record]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for note in prompts:
        for entry in note["values"]:
            if entry["value"] == entry["value"]:
                found.setdefault(f"{note['method']}: {entry['name']}", []).append(entry["value"])
    return {name: [min(v), sum(v) / len(v), max(v)] for name, v in found.items()}


def _left(column: Any) -> dict[str, list[int]]:
    entries = column.flatten()
    found: dict[str, list[int]] = {}
    fields = (entries.field(name).to_pylist() for name in ("method", "hook", "tokens"))
    for method, hook, tokens in zip(*fields, strict=True):
        rows = found.setdefault(f"{method}.{hook}", [0, 0])
        rows[0] += 1
        rows[1] += tokens
    return found
