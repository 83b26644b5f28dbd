"""Several batches: the same seed, a resumed run, the same feedback twice."""

from __future__ import annotations

import tempfile
from typing import Any

from rl_plugins.runtime.state import load_state, save_state
from rl_plugins.testing.contract.compare import differences
from rl_plugins.testing.contract.decisions import decided
from rl_plugins.testing.contract.host import DecidedBatch, run_batch
from rl_plugins.testing.contract.kit import Kit


def check_determinism(kit: Kit) -> None:
    """the same seed and data give the same decisions"""
    runs: list[list[Any]] = []
    for _ in range(2):
        stack = kit.stack()
        runs.append([_trace(run_batch(kit, stack)) for _ in range(2)] + [stack.methods[-1]._state])
    for changed in {path.split(".", 1)[-1] for path in differences(runs[0], runs[1])}:
        kit.fail(f"two runs with the same seed and data differ (`{changed}`); draw from `self.rng(purpose)` only.")


def check_resumption(kit: Kit) -> None:
    """state is plain data, and a resumed run decides like one that was not interrupted"""
    first = kit.stack()
    for _ in range(2):
        run_batch(kit, first)
    saved = first.state_dict("dataset")
    with tempfile.TemporaryDirectory() as folder:
        save_state(folder, saved)
        loaded = load_state(folder) or {}
    for changed in differences(saved, loaded):
        kit.fail(f"saving and loading changes the state (`{changed}`).")
    second = kit.stack()
    second.load_state_dict(loaded, "dataset")
    runs = [[_trace(run_batch(kit, s)) for _ in range(2)] + [s.methods[-1]._state] for s in (first, second)]
    for changed in {path.split(".", 1)[-1] for path in differences(runs[0], runs[1])}:
        kit.fail(
            f"a resumed run decides otherwise than one that was not interrupted (`{changed}`): whatever must survive "
            "belongs into `self.state`."
        )


def _trace(batch: DecidedBatch) -> dict[str, Any]:
    return {"plan": batch.plan, **decided(batch.decision)}


def check_observe_twice(kit: Kit) -> bool:
    """the same feedback twice does no harm, and the state stays plain data"""
    if "observe" not in kit.cls.claims():
        return False
    with kit.at("observe twice"), tempfile.TemporaryDirectory() as folder:
        stack = kit.stack()
        batch = run_batch(kit, stack)
        for _ in range(2):
            stack.call("observe", stack.methods[-1], batch.decision.rollouts, batch.tokens, dict(stack.stats))
        save_state(folder, stack.state_dict("dataset"))
    return True
