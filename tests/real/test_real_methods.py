"""Every method of the registry in TRL's real trainer on the shallow copy of the real model, beside the same run without
it: it acts, or is refused with the expected error. The table goes to `build/real/trl.json`, from which
`benchmarks/real_model.py` makes the one of benchmarks/README.md."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trl_arms import ARMS, Arm, Run, arm_of, outcome, train

from rl_plugins.core.method import Method
from rl_plugins.runtime import registry

pytestmark = [pytest.mark.real, pytest.mark.host]

TABLE = Path(__file__).parents[2] / "build" / "real" / "trl.json"
ACTED, REFUSED, NOT_APPLICABLE = "acted", "refused", "not applicable"


@pytest.fixture(scope="module")
def baselines() -> dict[Any, Run]:
    """Runs without the method, by what they have in common."""
    return {}


@pytest.fixture(scope="module")
def table() -> Iterator[list[dict[str, Any]]]:
    """The lines of this run. Those of methods that did not run stay as they are in the file."""
    found: list[dict[str, Any]] = []
    yield found
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    lines = {line["method"]: line for line in [*(json.loads(TABLE.read_text()) if TABLE.exists() else ()), *found]}
    TABLE.write_text(json.dumps([lines[name] for name in registry.all_names() if name in lines], indent=1) + "\n")


@pytest.mark.parametrize("name", registry.all_names())
def test_it_acts_on_the_real_model_or_is_refused(name: str, tmp_path: Path, baselines: Any, table: Any) -> None:
    line = outcome(name, tmp_path, baselines)
    table.append(line)
    arm = arm_of(name)
    if arm.refused:
        assert line["outcome"] == (NOT_APPLICABLE if arm.not_applicable else REFUSED), line
        assert arm.refused in line["error"]
        return
    assert line["outcome"] == ("watched" if arm.watches else ACTED), line
    assert math.isfinite(line["difference"])


def test_arms_are_of_methods_that_exist() -> None:
    assert set(ARMS) <= set(registry.all_names())


class Looks(Method):
    """A method that changes nothing."""

    name = "looks"
    needs = frozenset({"tokens", "token_ids", "text", "prompt_index"})

    def observe(self, rollouts: Any, tokens: Any, stats: Any) -> None:
        self.log("rows", len(rollouts))


def test_a_method_that_only_looks_changes_no_bit(tmp_path: Path, monkeypatch: Any) -> None:
    """Weights that differ from plain GRPO's are the method's doing: the run is the same to the last bit else. The
    runs of the table cannot be compared with: their products are in bfloat16."""
    from importlib.metadata import EntryPoint

    installed = registry._entry_points
    looks = EntryPoint("looks", f"{__name__}:Looks", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "_entry_points", lambda: [*installed(), looks])
    arm = Arm()
    plain = train(tmp_path / "plain", [], arm)
    looked = train(tmp_path / "looks", ["looks"], arm)
    assert looked.of("looks") == {"rows": [16.0]}
    assert torch.equal(plain.after, looked.after) and float(plain.update.norm()) > 0
