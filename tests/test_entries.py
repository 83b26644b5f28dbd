"""Trajectories that grow: what is copied, what is held, and that branches do not see each other."""

from __future__ import annotations

import gc
import math
import pickle
import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from operations import CountingArray, exponent, instructions

import rl_plugins.core.entries as entries
from rl_plugins.core.entries import Entries
from rl_plugins.core.method import Method
from rl_plugins.core.requests import Generate, Generated, Trajectory, together
from rl_plugins.runtime.programs import Running, run
from rl_plugins.testing.engine import CharChat, make_prompt

NAN = math.nan


class Turns(Method):
    """n rollouts of some turns, with something read between them."""

    name = "turns"

    def __init__(self, turns: int, size: int) -> None:
        super().__init__()
        self.turns, self.size = turns, size

    def rollout(self, prompt):
        return (yield from together([self.one(prompt) for _ in range(prompt.n)]))

    def one(self, prompt):
        t = prompt.start()
        for _ in range(self.turns):
            (made,) = yield Generate(t)
            start = len(t)
            t = t.add(made).turn(start).observe((7,) * self.size)
        return t


class Instant:
    """An engine that answers at once."""

    def __init__(self, size: int) -> None:
        self.size = size

    def anybody(self, wants):
        return wants

    def score(self, requests):
        return []

    def generate(self, requests):
        tokens, logprobs = tuple(range(1000, 1000 + self.size)), tuple(-0.5 - k for k in range(self.size))
        return [[Generated(tokens, logprobs, "eos", 3)] for _ in requests]


def rollouts(turns: int, n: int = 4, size: int = 20):
    prompt = make_prompt(CharChat(), "hi", n=n, max_tokens=100_000)
    program = Running(Turns(turns, size), prompt)
    run([program], Instant(size))
    return [t for (t,) in program.rows]


def test_growing_copies_what_is_new(monkeypatch):
    """With tuples each turn copied everything before it: 16 times as much for 4 times the turns."""
    monkeypatch.setattr(entries, "array", CountingArray)

    def copied(turns):
        CountingArray.copied = 0
        made = rollouts(turns)
        assert [len(t) for t in made] == [40 * turns] * 4
        return CountingArray.copied

    few, many = copied(16), copied(64)
    assert exponent(few, many, 4) < 1.05
    assert many < 4 * 4 * 64 * 40 * 3, "four columns of every token, each looked at once"


@pytest.mark.parametrize("what", ["turns", "rollouts"])
def test_instructions_are_linear(what):
    def count(size):
        return instructions(lambda: rollouts(size, 4) if what == "turns" else rollouts(4, size))

    assert exponent(count(8), count(64), 8) < 1.1


def test_a_token_takes_its_numbers():
    """Of tuples a token took 74 to 100 bytes: four references, an integer and a float."""
    rollouts(2)
    gc.collect()
    tracemalloc.start()
    try:
        made = rollouts(32, 16, 100)
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held / sum(map(len, made)) < 32


OPS = st.lists(st.tuples(st.integers(0, 30), st.sampled_from(["add", "force", "observe", "cut"]), st.integers(0, 5)))


@given(OPS)
def test_branches_do_not_see_each_other(ops):
    """Any tree of trajectories holds what the same tree of tuples does."""
    tree, model = [Trajectory((1, 2))], [()]
    for k, (parent, what, n) in enumerate(ops):
        t, rows = tree[parent % len(tree)], model[parent % len(tree)]
        tokens = tuple(range(10 * k, 10 * k + n))
        if what == "add":
            tree.append(t.add(Generated(tokens, (-0.5,) * n, "eos", k)))
            model.append(rows + tuple((x, 1, -0.5, k) for x in tokens))
        elif what == "cut":
            tree.append(t.cut(n))
            model.append(rows[:n])
        else:
            tree.append(getattr(t, what)(tokens))
            model.append(rows + tuple((x, 2 if what == "force" else 0, NAN, -1) for x in tokens))
    for t, rows in zip(tree, model, strict=True):
        columns = list(zip(*rows, strict=True)) or [()] * 4
        assert (t.tokens, t.kinds, t.logprobs, t.versions) == tuple(columns)
        assert t.context == (1, 2, *columns[0]) and t.context_array.tolist() == [1, 2, *columns[0]]
        assert len(t.tokens) == len(rows) == len(t)


def test_threads_that_grow_the_same_one_each_get_their_own():
    for _ in range(20):
        base = Trajectory((1,)).force(range(50))
        found, ready = {}, threading.Barrier(8)

        def grow(k, base=base, found=found, ready=ready):
            ready.wait()
            found[k] = base.force((k,) * 40).force((100 + k,) * 3)

        threads = [threading.Thread(target=grow, args=(k,)) for k in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for k, t in found.items():
            assert t.tokens == (*range(50), *(k,) * 40, *(100 + k,) * 3)
        assert base.tokens == tuple(range(50))


def test_entries_are_like_a_tuple():
    e = Entries((3, 4), "q").grown((5, 6)).grown((7,), 2)
    same = (3, 4, 5, 6, 7, 7)
    assert e == same and same == e and hash(e) == hash(same) and repr(e) == repr(same)
    assert e != same[:5] and e != [*same]
    assert [e[i] for i in range(-6, 6)] == [same[i] for i in range(-6, 6)]
    for place in (slice(None), slice(1, 4), slice(-3, None), slice(4, 1), slice(None, None, -2), slice(1, 99, 3)):
        assert e[place] == same[place] and isinstance(e[place], tuple)
    one = (1,)
    assert e + one == same + one and one + e == one + same and [*e] == e.tolist() == [*same]
    assert 5 in e and 8 not in e and e.count(7) == 2 and e.index(7) == 4 and sorted([e, Entries((1,), "q")])[0] == (1,)
    with pytest.raises(IndexError, match="place 6 of 6"):
        e[6]
    assert np.asarray(e).tolist() == [*same] and np.asarray(e).dtype == np.int64
    view = np.asarray(e)
    e.grown((9,))
    view[0] = 0
    assert e == same, "an array is a copy"
    assert Entries((NAN, -0.5), "d") == Entries((float("nan"), -0.5), "d") != Entries((NAN, 0.5), "d")
    back = pickle.loads(pickle.dumps(e))
    assert back == e and back.code == "q" and pickle.loads(pickle.dumps(Entries(("a", None)))) == ("a", None)


def test_a_value_that_is_no_number_leaves_all_as_it_was():
    t = Trajectory((1,)).force((4, 5))
    with pytest.raises(TypeError):
        t.force(("x",))
    assert t.tokens == (4, 5) and t.force((6,)).tokens == (4, 5, 6)


def test_a_trajectory_pickles_as_bytes():
    (t,) = rollouts(32, 1, 100)
    data = pickle.dumps(t)
    back = pickle.loads(data)
    assert (back.tokens, back.logprobs, back.kinds) == (t.tokens, t.logprobs, t.kinds) and len(data) / len(t) < 26


def test_bounds_look_at_what_is_new(monkeypatch):
    monkeypatch.setattr(entries, "array", CountingArray)
    e = Entries((5, 3, 9), "q")
    assert e.bounds() == (3, 9)
    CountingArray.copied = 0
    longer = e.grown((4, 11))
    assert longer.bounds() == longer.bounds() == (3, 11) and CountingArray.copied == 4, "two appended, two read"
    assert e.grown((1,)).bounds() == (1, 9) and e.bounds() == (3, 9)
    with pytest.raises(ValueError, match="no entries"):
        Entries((), "q").bounds()
