"""Damaged files of a state: exactly what was saved comes back, or a StateError and an unchanged stack."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
from damage import DAMAGES, FINGERPRINT, Case, attack, fresh, seen, trained

from rl_plugins.core.errors import StateError


def test_random_damage_is_refused_or_harmless() -> None:
    outcomes = attack(cases=480, seed=0)
    assert all(outcomes[kind]["refused"] > 0 for kind in DAMAGES)
    assert sum(n for kind in DAMAGES for n in outcomes[kind].values()) == 480
    for kind in ("truncated", "bytes deleted", "files swapped", "files lost", "JSON nested"):
        assert set(outcomes[kind]) == {"refused"}, kind
    assert outcomes["a digit"]["as it was saved"] > 0, "a digit replaced by itself changes nothing"


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("case"))


def test_every_single_bit_of_the_head_and_of_the_tensors_counts(case: Case) -> None:
    """Every bit of the first bytes, and of one tensor."""
    for name in ("state.json", "state.safetensors"):
        size = len(case.a[name])
        for place in [*range(110), *range(size - 30, size)]:

            def flip(folder: Path, place: int = place, name: str = name) -> None:
                data = bytearray((folder / name).read_bytes())
                data[place] ^= 1 << place % 8
                (folder / name).write_bytes(bytes(data))

            assert case.outcome(flip) == "refused", (name, place)


def test_content_with_a_right_checksum_and_wrong_types_is_refused_whole() -> None:
    """What another version might write: some value is of another type. Nothing is taken over beside an error."""
    rng, refused, original, stack = random.Random(0), 0, trained(2).state_dict(FINGERPRINT), fresh()
    for _ in range(300):
        saved = part = copy.deepcopy(original)
        before = seen(stack)
        while True:  # walk down to some place
            key = rng.choice(list(part))
            if not isinstance(part[key], dict) or not part[key] or rng.random() < 0.3:
                break
            part = part[key]
        part[key] = rng.choice([None, "x", 3, -1, 0.5, [], {}, [None], {"a": None}, True])
        try:
            stack.load_state_dict(saved, FINGERPRINT)
        except StateError:
            refused += 1
            assert seen(stack) == before
        else:
            assert type(stack.batch) is type(stack.extra_prompts) is type(stack.draw) is int
            assert isinstance(stack.carried, list) and isinstance(stack.stats, dict)
            assert all(isinstance(m.state, dict) for m in stack.methods)
            stack = fresh()
    assert refused > 150
