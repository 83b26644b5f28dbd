"""State of methods on disk: what goes in comes out, anything else is refused, and a crash leaves no half state."""

from __future__ import annotations

import json
import math
import os
import pickletools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import raises

from rl_plugins import __version__
from rl_plugins.core.errors import StateError
from rl_plugins.runtime.state import FOLDER, FORMAT, copy_plain, load_state, save_state, snapshot

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def equal(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list) and len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, float) and math.isnan(a):
        return isinstance(b, float) and math.isnan(b)
    return type(a) is type(b) and a == b


def round_trip(content, folder):
    save_state(folder, content)
    return load_state(folder)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_and_shape_come_back(dtype, tmp_path):
    tensors = [(torch.arange(12) % 2).to(dtype).reshape(shape) for shape in ((12,), (3, 4), (2, 1, 6))]
    content = {"some": [*tensors, torch.tensor(1).to(dtype), torch.empty((0, 3), dtype=dtype)]}
    assert equal(content, round_trip(content, tmp_path))


def test_nested_plain_data_comes_back_with_its_types(tmp_path):
    content = {
        "none": None,
        "flags": [True, False],
        "numbers": [0, -3, 2**70, 0.1, -0.0, 1e-300, math.inf, -math.inf, math.nan],
        "text": ["", "a.b", 'quote " and \\', "ünï\ncode"],
        "deep": {"a": {"b": [{"c": [[], {}, [torch.tensor([1.5])]]}]}},
        "tuple": (1, (2, torch.tensor([3]))),
        "numpy": [np.float64(0.25), np.int32(4), np.bool_(True), np.float32(0.5)],
        "": {"": torch.tensor([7])},
    }
    back = round_trip(content, tmp_path)
    assert back["numpy"] == [0.25, 4, True, 0.5] and [type(x) for x in back["numpy"]] == [float, int, bool, float]
    assert equal({**content, "numpy": [0.25, 4, True, 0.5]}, back)
    assert equal({}, round_trip({}, tmp_path))


def test_keys_with_dots_do_not_mix_up_tensors(tmp_path):
    content = {
        "a": {"b": torch.tensor([1]), "0": torch.tensor([2])},
        "a.b": torch.tensor([3]),
        "c": [torch.tensor([4])],
        "c.0": torch.tensor([5]),
        "__metadata__": torch.tensor([6]),
    }
    assert equal(content, round_trip(content, tmp_path))


plain = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=5),
        st.lists(st.floats(width=32), max_size=4).map(lambda v: torch.tensor(v, dtype=torch.float32)),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=12,
)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(max_size=3), plain, max_size=4))
def test_any_plain_data_comes_back(tmp_path_factory, content):
    back = round_trip(content, tmp_path_factory.mktemp("state"))
    assert json.dumps(_listed(back)) == json.dumps(_listed(content))


def _listed(value):
    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype), "values": value.tolist()}
    if isinstance(value, dict):
        return {k: _listed(v) for k, v in value.items()}
    return [_listed(v) for v in value] if isinstance(value, list) else value


def test_views_shared_memory_and_gradients_are_saved_as_values(tmp_path):
    base = torch.arange(10.0)
    content = {"view": base[2:8:2], "same": base, "again": base, "transposed": base.reshape(2, 5).T}
    content["parameter"] = torch.nn.Parameter(torch.ones(2))
    back = round_trip(content, tmp_path)
    assert equal({k: v.detach() for k, v in content.items()}, back) and not back["parameter"].requires_grad
    base.zero_()
    assert back["same"].tolist() == list(range(10))


class Thing:
    pass


@pytest.mark.parametrize(
    ("content", "path", "what"),
    [
        ({"methods": {"vade": {"x": [1, Thing()]}}}, "methods.vade.x.1", "a Thing"),
        ({"a": {"b": {3}}}, "a.b", "a set"),
        ({"a": b"bytes"}, "a", "a bytes"),
        ({"a": [np.zeros(3)]}, "a.0", "a ndarray"),
        ({"a": 1 + 2j}, "a", "a complex"),
        ({"a": np.complex64(1)}, "a", "a complex"),
        ({"a": torch.Generator()}, "a", "a Generator"),
        ({"a": print}, "a", "a builtin_function_or_method"),
        ({"a": {"b": {1: 2}}}, "a.b", r"has the key 1 \(int\); keys must be text"),
        ({"a": [{None: 2}]}, "a.0", r"has the key None \(NoneType\); keys must be text"),
        ({"a": {("x", 1): 2}}, "a", r"has the key \('x', 1\) \(tuple\)"),
        ({"a": {"__tensor__": "x"}}, "a", r"has the key '__tensor__', which is reserved"),
    ],
)
def test_what_is_not_plain_data_is_refused_with_its_place(content, path, what, tmp_path):
    with raises(StateError, match=f"The state at `{path}` (is )?{what}"):
        save_state(tmp_path, content)
    assert list(tmp_path.iterdir()) == []


def test_no_folder_is_no_state(tmp_path):
    assert load_state(tmp_path) is None and load_state(tmp_path / "nowhere") is None


def files(folder: Path) -> tuple[Path, Path]:
    return folder / FOLDER / "state.json", folder / FOLDER / "state.safetensors"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def edit(path: Path, **changes) -> None:
    header = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in header.items() if v is not None}))


CONTENT = {"methods": {"vade": {"alpha": torch.arange(6.0)}}, "step": 3, "written_by": "0.0.7"}
DAMAGE = {
    "no json": lambda j, t: j.unlink(),
    "no tensors": lambda j, t: t.unlink(),
    "half json": lambda j, t: truncate(j),
    "half tensors": lambda j, t: truncate(t),
    "empty json": lambda j, t: j.write_text(""),
    "empty tensors": lambda j, t: t.write_bytes(b""),
    "one bit": lambda j, t: t.write_bytes(t.read_bytes()[:-1] + bytes([t.read_bytes()[-1] ^ 1])),
    "binary json": lambda j, t: j.write_bytes(b"\xff\xfe\x00"),
    "a list": lambda j, t: j.write_text("[]"),
    "a number": lambda j, t: j.write_text("3"),
    "foreign json": lambda j, t: j.write_text('{"epoch": 1}'),
    "no checksum": lambda j, t: edit(j, sha256=None),
    "no content": lambda j, t: edit(j, content=None),
    "no such tensor": lambda j, t: edit(j, content={"a": {"__tensor__": "9:a"}}),
    "other format": lambda j, t: j.write_text(j.read_text().replace('"format": 3', '"format": 4', 1)),
    "older format": lambda j, t: edit(j, format=1),
    "json is a folder": lambda j, t: (j.unlink(), j.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_and_foreign_files_are_refused(damage, tmp_path):
    save_state(tmp_path, CONTENT)
    DAMAGE[damage](*files(tmp_path))
    with raises(StateError) as e:
        load_state(tmp_path)
    assert str(tmp_path / FOLDER) in str(e.value)
    assert "start a new run" in str(e.value)
    assert e.value.__cause__ is None and (e.value.__suppress_context__ or e.value.__context__ is None), "one traceback"
    if damage in ("other format", "older format"):
        other = {"other format": "format 4", "older format": "format 1"}[damage]
        for named in (other, f"format {FORMAT}", "rl-plugins 0.0.7", f"rl-plugins {__version__}", "that wrote it"):
            assert named in str(e.value), named


def test_the_two_files_of_different_saves_are_refused(tmp_path):
    save_state(tmp_path / "old", CONTENT)
    save_state(tmp_path / "new", {"methods": {"vade": {"alpha": torch.zeros(6)}}, "step": 4})
    files(tmp_path / "new")[1].write_bytes(files(tmp_path / "old")[1].read_bytes())
    with raises(StateError, match=r"state\.safetensors.*state\.json"):
        load_state(tmp_path / "new")


def test_a_refused_save_leaves_the_older_state_alone(tmp_path):
    save_state(tmp_path, CONTENT)
    with raises(StateError):
        save_state(tmp_path, {"a": Thing()})
    assert equal(CONTENT, load_state(tmp_path))


def test_there_is_no_pickle(tmp_path, monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("pickle was used")

    for owner, name in ((torch, "save"), (torch, "load"), (np, "save"), (np, "load")):
        monkeypatch.setattr(owner, name, forbidden)
    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(f"pickle.{name}", forbidden)
    folder = save_state(tmp_path, CONTENT)
    assert equal(CONTENT, load_state(tmp_path))
    assert sorted(p.name for p in folder.iterdir()) == ["state.json", "state.safetensors"]
    for path in folder.iterdir():
        with pytest.raises(ValueError, match=r".+"):
            list(pickletools.genops(path.read_bytes()))


def test_a_copy_is_not_reached_by_later_changes():
    original = {"t": torch.zeros(2), "l": [1, {"x": [torch.ones(1)]}], "p": (1, torch.ones(1)), "s": "text"}
    copy = copy_plain(original)
    original["t"].add_(1)
    original["l"][1]["x"][0].zero_()
    original["l"].append(2)
    original["p"][1].zero_()
    assert copy["t"].tolist() == [0.0, 0.0] and copy["l"] == [1, {"x": [torch.ones(1)]}] and copy["s"] == "text"
    assert copy["p"][1].item() == 1.0


def _numpy(x):
    x.numpy()[3] = 7


CHANGES = {
    "an index": lambda x: x.__setitem__(3, 7),
    "indices": lambda x: x.__setitem__(torch.tensor([1, 2]), 5.0),
    "a mask": lambda x: x.__setitem__(x > 3, 0.0),
    "add_": lambda x: x.add_(1),
    "zero_": lambda x: x.zero_(),
    "copy_": lambda x: x.copy_(torch.zeros(1000)),
    "index_add_": lambda x: x.index_add_(0, torch.tensor([1]), torch.ones(1, dtype=torch.float64)),
    "scatter_": lambda x: x.scatter_(0, torch.tensor([1]), 5.0),
    "a view": lambda x: x.view(10, 100)[0].zero_(),
    "data": lambda x: x.data.__setitem__(4, 1),
    "out": lambda x: torch.add(x, 1, out=x),
    "numpy": _numpy,
    "asarray": lambda x: np.asarray(x).__setitem__(3, 8),
    "dlpack": lambda x: torch.from_dlpack(x).__setitem__(3, 8),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("made_by", ["torch", "numpy", "a view of it made before", "a gradient"])
def test_a_snapshot_is_not_reached_by_any_change(change, made_by):
    x = torch.arange(1000, dtype=torch.float64)
    if made_by == "numpy":
        x = torch.from_numpy(np.arange(1000.0))
    if made_by == "a gradient":
        x.requires_grad_(True)
    state = {"nested": [{"x": x}], "n": 1}
    changed = x[:] if made_by == "a view of it made before" else x
    first = snapshot(state)
    with torch.no_grad():
        CHANGES[change](changed.detach() if made_by == "a gradient" else changed)
        second = snapshot(state)
        after = x.detach().clone()
        x.add_(3)
    assert torch.equal(first["nested"][0]["x"], torch.arange(1000, dtype=torch.float64))
    assert torch.equal(second["nested"][0]["x"], after) and not torch.equal(x, after)
    state["nested"].append(2)
    state["nested"][0]["y"] = 3
    assert len(first["nested"]) == 1 and set(first["nested"][0]) == {"x"}


def test_a_snapshot_copies_no_tensor():
    """By the memory of the process: 64 MB of state, twenty boundaries."""

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    state = {"alpha": torch.ones(4_000_000, dtype=torch.float64), "beta": torch.ones(4_000_000, dtype=torch.float64)}
    before = resident()
    kept = [snapshot(state) for _ in range(20)]
    assert float(state["alpha"].sum()) == float((state["beta"] * state["alpha"]).sum()) == len(state["alpha"])
    assert resident() - before < 40e6, "one result of 32 MB"
    assert len(kept) == 20


def test_many_small_tensors_are_few_in_the_file(tmp_path):
    content = {"queue": [{"tokens": torch.arange(k), "kinds": torch.ones(k, dtype=torch.int8)} for k in range(2000)]}
    save_state(tmp_path, content)
    size = (tmp_path / FOLDER / "state.safetensors").stat().st_size
    assert size < 9 * 2000 * 1999 / 2 + 300, "the numbers and a short head"
    assert equal(content, load_state(tmp_path))
