"""Random damage of a saved state: whatever is resumed is exactly what was saved, or it is refused and nothing changed.

python tests/faults/damage.py --cases 5000 --seed 1
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rl_plugins.core.errors import StateError
from rl_plugins.methods.april import April
from rl_plugins.runtime.resume import resume, save_run
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.runtime.state import FOLDER
from rl_plugins.testing import make_run, start_stack
from rl_plugins.testing.generation import Simulation

STEP, FINGERPRINT = 8, "24 rows, 0123456789abcdef"
JSON, TENSORS = "state.json", "state.safetensors"


def fresh() -> MethodStack:
    """A stack with state, and with groups that may wait."""
    methods = build_stack(["april", "vade", "gdpo"]).methods
    return start_stack(*methods, run=make_run(dataset_size=24))


def trained(batches: int) -> MethodStack:
    run = Simulation(
        April(April.Params()),
        lambda prompt, drawn: [2 + prompt % 5, 9, 5 * (prompt % 7) + 3],
        groups=2,
        group_size=3,
        max_tokens=40,
        dataset_size=24,
    )
    for _ in range(batches):
        run.batch()
    stack = fresh()
    stack.batch, stack.extra_prompts, stack.carried = batches, run.stack.extra_prompts, run.stack.carried
    stack.stats = {"april/fresh": 3.5, "vade/x": 1e-7}
    for name, value in stack.methods[1].state.items():
        if isinstance(value, torch.Tensor):
            value += 0.25 * batches
        elif isinstance(value, int):
            stack.methods[1].state[name] = value + batches
    assert stack.carried and stack.methods[1].state
    return stack


def plain(value: Any) -> Any:
    """Tensors as lists."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list) else value


def seen(stack: MethodStack) -> str:
    """Everything the stack holds, as text."""
    return repr(plain(stack.state_dict(FINGERPRINT)))


class Case:
    """A saved state, a second one of an older step, and folders to damage copies of the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        save_run(folder / "a", trained(4).state_dict(FINGERPRINT), STEP)
        save_run(folder / "b", trained(3).state_dict(FINGERPRINT), STEP - 2)
        self.a, self.b = ({f.name: f.read_bytes() for f in (folder / n / FOLDER).iterdir()} for n in "ab")
        self.untouched, self.original = seen(fresh()), seen(trained(4))
        self.stack = fresh()
        assert self.outcome(lambda files: None) == "as it was saved" and self.untouched != self.original

    def outcome(self, damage: Callable[[Path], Any]) -> str:
        """Resumes from a damaged copy.

        Raises:
            AssertionError: another content, another error, or a change beside an error.
        """
        copy = self.folder / "copy"
        (copy / FOLDER).mkdir(parents=True, exist_ok=True)
        for name, data in self.a.items():
            if (copy / FOLDER / name).is_dir():
                (copy / FOLDER / name).rmdir()
            (copy / FOLDER / name).write_bytes(data)
        damage(copy / FOLDER)
        try:
            resume(self.stack, copy, fingerprint=FINGERPRINT, step=STEP, batch=4)
        except StateError:
            assert seen(self.stack) == self.untouched, "changed beside an error"
            return "refused"
        assert seen(self.stack) == self.original, "another content was taken over"
        self.stack = fresh()
        return "as it was saved"


# ---- damages: each changes a folder with the two files


def _bytes(change: Callable[[random.Random, bytes], bytes]) -> Callable[[random.Random, Case, Path], None]:
    def damage(rng: random.Random, case: Case, folder: Path) -> None:
        file = folder / rng.choice([JSON, JSON, TENSORS])
        file.write_bytes(change(rng, file.read_bytes()))

    return damage


def _span(rng: random.Random, data: bytes) -> tuple[int, int]:
    start = rng.randrange(len(data))
    return start, min(len(data), start + rng.choice([1, 2, 8, 64, 512]))


def _flip(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 4, 32])):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def _delete(rng: random.Random, data: bytes) -> bytes:
    a, b = _span(rng, data)
    return data[:a] + data[b:]


def _double(rng: random.Random, data: bytes) -> bytes:
    a, b = _span(rng, data)
    return data[:b] + data[a:]


def _zero(rng: random.Random, data: bytes) -> bytes:
    a, b = _span(rng, data)
    return data[:a] + bytes(b - a) + data[b:]


def _insert(rng: random.Random, data: bytes) -> bytes:
    a, b = _span(rng, data)
    return data[:a] + rng.randbytes(b - a) + data[a:]


def _line(rng: random.Random, data: bytes) -> bytes:
    """A line of text twice, or none of it."""
    lines = data.split(b"\n")
    i = rng.randrange(len(lines))
    return b"\n".join([*lines[:i], *[lines[i]] * rng.choice([0, 2]), *lines[i + 1 :]])


def _digit(rng: random.Random, data: bytes) -> bytes:
    """Another digit in the place of one, so that the structure stays right."""
    places = [i for i, b in enumerate(data) if chr(b).isdigit()]
    if not places:
        return data
    i = rng.choice(places)
    return data[:i] + rng.choice(b"0123456789".decode()).encode() + data[i + 1 :]


def _swap(rng: random.Random, case: Case, folder: Path) -> None:
    """Files of another save, or the two files in each other's place."""
    kind = rng.randrange(4)
    if kind == 3:
        (folder / JSON).write_bytes(case.a[TENSORS])
        (folder / TENSORS).write_bytes(case.a[JSON])
    for name in {0: [JSON], 1: [TENSORS], 2: [JSON, TENSORS], 3: []}[kind]:
        (folder / name).write_bytes(case.b[name])


def _lose(rng: random.Random, case: Case, folder: Path) -> None:
    """A file, both, or the folder is gone; or a folder bears a file's name."""
    kind = rng.randrange(4)
    if kind == 3:
        shutil.rmtree(folder)
        return
    for name in {0: [JSON], 1: [TENSORS], 2: [JSON, TENSORS]}[kind]:
        (folder / name).unlink()
        if rng.random() < 0.3:
            (folder / name).mkdir()


def _edit(rng: random.Random, case: Case, folder: Path) -> None:
    """One value of the JSON is another, or its key is; written as it was written, with or without its head."""
    body = json.loads(case.a[JSON])
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            places.append((value, key))
            walk(value[key])

    walk(body)
    inside, key = rng.choice(places)
    old = inside[key]
    values = [None, True, 0, 3, -1, 2.5, "", "x", [], {}, [1], {"a": 1}, [[[]]], 10**40, float("nan"), old, [old]]
    if rng.random() < 0.2:
        del inside[key]
    elif isinstance(inside, dict) and rng.random() < 0.2:
        inside[rng.choice(["x", "state", "__tensor__", key + "s"])] = inside.pop(key)
    elif type(old) in (int, float) and rng.random() < 0.5:
        inside[key] = old + 1
    else:
        inside[key] = rng.choice(values)
    (folder / JSON).write_text(json.dumps(body, indent=rng.choice([1, 1, 1, None])))


def _deep(rng: random.Random, case: Case, folder: Path) -> None:
    n = rng.choice([50, 5000, 200_000])
    (folder / JSON).write_text(rng.choice(["[" * n, "[" * n + "]" * n, '{"a":' * n + "1" + "}" * n]))


DAMAGES: dict[str, Callable[[random.Random, Case, Path], None]] = {
    "bits flipped": _bytes(_flip),
    "truncated": _bytes(lambda rng, data: data[: rng.randrange(len(data))]),
    "bytes deleted": _bytes(_delete),
    "bytes doubled": _bytes(_double),
    "bytes zero": _bytes(_zero),
    "bytes inserted": _bytes(_insert),
    "a line": _bytes(_line),
    "a digit": _bytes(_digit),
    "files swapped": _swap,
    "files lost": _lose,
    "JSON edited": _edit,
    "JSON nested": _deep,
}


def attack(cases: int, seed: int) -> dict[str, Counter[str]]:
    """Outcomes of so many random damages, by kind. The first that is neither refused nor harmless raises."""
    rng = random.Random(seed)
    outcomes: dict[str, Counter[str]] = {kind: Counter() for kind in DAMAGES}
    with tempfile.TemporaryDirectory() as folder:
        case = Case(Path(folder))
        for i in range(cases):
            kind = list(DAMAGES)[i % len(DAMAGES)]
            try:
                outcomes[kind][case.outcome(partial(DAMAGES[kind], rng, case))] += 1
            except BaseException as e:
                e.add_note(f"case {i} of seed {seed}: {kind}")
                raise
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for kind, outcomes in attack(arguments.cases, arguments.seed).items():
        print(f"{kind:16} {', '.join(f'{n} {outcome}' for outcome, n in sorted(outcomes.items()))}")


if __name__ == "__main__":
    main()
