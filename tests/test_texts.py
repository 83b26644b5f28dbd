"""Places in a text as numbers of tokens, whose pieces may be cut inside a character."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_plugins.core.params import build_params
from rl_plugins.kit.texts import tokens_before
from rl_plugins.methods.cleaner import Cleaner, call_start, merge_turns


def decoder(pieces: Sequence[bytes]):
    """Tokens are numbers of pieces, decoded as byte-level vocabularies do."""
    return lambda tokens: b"".join(pieces[t] for t in tokens).decode("utf-8", "replace")


def test_tokens_that_reach_beyond_are_not_before() -> None:
    pieces = [b"first", b" step\n", b"\nnext", b" ", b""]
    tokens, decode = [0, 1, 2, 3, 4], decoder(pieces)
    assert tokens_before(tokens, decode, len("first step\n\n")) == 2  # the third token has a part of the next step
    assert tokens_before(tokens, decode, len("first step\n")) == 2
    assert tokens_before(tokens, decode, 0) == 0 and tokens_before(tokens, decode, 10_000) == 5


@given(st.text("aé日🙂<", max_size=12), st.data())
def test_no_character_is_cut(text: str, data: st.DataObject) -> None:
    """Against every number of tokens, in order, for any cut of the bytes into pieces."""
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(raw) - 1)))) if raw else ())
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    length = data.draw(st.integers(0, len(text)))
    ends = [len(b"".join(pieces[:n])) for n in range(len(pieces) + 1)]
    whole = {len(text[:k].encode()) for k in range(length + 1)}
    expected = max(n for n, end in enumerate(ends) if end in whole)
    assert tokens_before(range(len(pieces)), decoder(pieces), length) == expected


@pytest.mark.parametrize(
    ("marker", "old", "new", "merged"),
    [
        # the marker's first byte is in a token with the end of the character before
        ("<call>", [b"\xe6\x97", b"\xa5<", b"call>1"], [b"x", b"<call>2"], "<call>2"),
        ("<call>", [b"so ", b"\xe6\x97", b"\xa5<", b"call>1"], [b"\xe6", b"\x97\xa5<", b"call>2"], "so 日<call>2"),
        # the marker's first character is itself cut
        ("調用", [b"so \xe8", b"\xaa\xbf\xe7\x94\xa8", b"1"], [b"\xe8\xaa", b"\xbf\xe7\x94\xa8", b"2"], "調用2"),
    ],
)
def test_a_marker_that_begins_inside_a_character(marker, old, new, merged) -> None:
    pieces = [*old, *new]
    a, b, decode = [*range(len(old))], [*range(len(old), len(pieces))], decoder([*old, *new])
    given = {"environment": "rl_plugins.lab.demo.environments:Calculator", "marker": marker, "gamma": 0.0}
    merge = merge_turns(a, b, decode, build_params(Cleaner.Params, given, "cleaner"))
    assert decode(a[: merge.keep] + b[merge.begin :]) == merged
    assert marker in decode(a[call_start(a, decode, marker, "exact") :])
