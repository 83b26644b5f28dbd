"""Message contracts: validate, repair once, reject; authority and the arbiter, whatever is sent."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.tools.messages.contracts import (
    LAYERS,
    PLAN,
    POLICY,
    SUMMARY,
    Contract,
    Contracts,
    Proposal,
    repaired,
    text_result,
)
from rl_plugins.tools.messages.schemas import KINDS, check_schema, schema_errors

ALLOWED = {"reflex": ["stop", "go"], "strategic": ["plan", "go"]}
FIELDS = st.sampled_from(["text", "confidence", "steps", "x"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(FIELDS, inner),
    max_leaves=8,
)


def test_a_valid_packet_is_delivered_as_it_is() -> None:
    contracts = Contracts()
    packet = {"text": "done", "confidence": 1}
    assert contracts.check("reflex", "summary", packet).packet is packet
    text = json.dumps(packet)
    assert contracts.check("tactical", "summary", text).packet is text  # JSON as text stays text
    assert contracts.check("institutional", "policy", {"rules": []}).outcome == "valid"
    assert contracts.counts == {"valid": 3} and contracts.invalid_share == 0.0
    assert [c.direction for c in (SUMMARY, PLAN, POLICY)] == ["up", "down", "broadcast"]
    assert tuple(contracts.of_layer) == LAYERS


@pytest.mark.parametrize(
    ("kind", "packet", "mended"),
    [
        ("summary", "plain text", {"text": "plain text"}),
        ("summary", "42", {"text": "42"}),
        ("summary", {"text": "a", "confidence": 1.5, "x": 1}, {"text": "a", "confidence": 1}),
        ("summary", {"text": "a", "confidence": " 0.5"}, {"text": "a", "confidence": 0.5}),
        ("summary", {"text": "a" * 1600}, {"text": "a" * 1500}),
        ("plan", {"steps": "one"}, {"steps": ["one"]}),
        ("plan", {"steps": ["s"] * 30}, {"steps": ["s"] * 20}),
        ("summary", {"confidence": 0.5}, None),
        ("summary", {"text": 3}, None),
        ("summary", {"text": "a", "confidence": math.nan}, None),
        ("summary", {"text": "a", "confidence": True}, None),
        ("plan", {"steps": ["s" * 400] * 20}, None),  # each field fits, the packet does not
        ("plan", "go", None),
        ("policy", {"rules": []}, None),  # the layer may not send it
        ("nothing", {}, None),
    ],
)
def test_a_wrong_packet_is_repaired_once_or_rejected(kind: str, packet: Any, mended: Any) -> None:
    contracts = Contracts()
    checked = contracts.check("strategic", kind, packet)
    assert (checked.outcome, checked.packet) == ("rejected" if mended is None else "repaired", mended)
    assert checked.errors and contracts.counts == {checked.outcome: 1}
    assert contracts.invalid_share == float(mended is None)


def test_a_text_result_is_cut() -> None:
    contracts = Contracts({"sub": (text_result(),)})
    assert contracts.check("sub", "result", "x" * 3000).packet == "x" * 1998
    assert contracts.check("sub", "result", "x" * 1998).outcome == "valid"


def test_errors_name_the_field() -> None:
    def wrong(packet: Any, contract: Contract = SUMMARY) -> str:
        return "; ".join(contract.errors(packet))

    assert wrong({"text": "a" * 1501}) == "packet.text has 1501 characters; 1500 are allowed"
    assert wrong({"x": 1}) == "packet has no field text; packet has the field 'x', which is not allowed"
    assert wrong({"steps": [1]}, PLAN) == "packet.steps[0] is 1, not of type string"
    assert wrong({"text": "a", "confidence": -1}) == "packet.confidence is -1; it must be at least 0"
    one = Contract("one", {"enum": ["a", "b"]})
    assert wrong("c", one) == "packet is 'c'; it must be one of ['a', 'b']"
    assert wrong("x" * 20, Contract("short", {"type": "string"}, size=10)) == "packet has 22 characters; 10 are allowed"


@given(ANYTHING, st.sampled_from(["summary", "plan"]))
@settings(deadline=None, max_examples=60)
def test_whatever_is_sent(packet: Any, kind: str) -> None:
    contracts = Contracts()
    contract = {"summary": SUMMARY, "plan": PLAN}[kind]
    checked = contracts.check("tactical", kind, packet)
    again = contracts.check("tactical", kind, packet)
    assert repr(again) == repr(checked)
    if checked.outcome == "rejected":
        assert checked.packet is None
    elif checked.outcome == "repaired":
        assert not contract.errors(checked.packet)
        assert repaired(checked.packet, contract) == checked.packet  # idempotent
    if checked.packet is not None:
        assert contracts.check("tactical", kind, checked.packet).outcome == "valid"


def test_a_repair_of_ones_own_has_one_try() -> None:
    tried = []

    def repair(packet: Any, errors: list[str]) -> Any:
        tried.append(errors)
        return {"text": packet.get("note", 0)}

    contracts = Contracts(repair=repair)
    assert contracts.check("reflex", "summary", {"note": "x"}).packet == {"text": "x"}
    assert contracts.check("reflex", "summary", {}).outcome == "rejected"
    failed = contracts.check("reflex", "summary", [1])  # the repair raises
    assert failed.outcome == "rejected" and "its repair failed: AttributeError" in failed.errors[-1]
    assert len(tried) == 3 and contracts.invalid_share == 2 / 3


def test_authority() -> None:
    contracts = Contracts(allowed=ALLOWED)
    assert [contracts.project("reflex", a) for a in ("stop", "plan", "none")] == ["stop", "none", "none"]
    assert contracts.project("tactical", "plan") == "plan"  # no list: any action
    assert contracts.counts == {"allowed": 3, "dropped": 1}


PROPOSALS = st.lists(
    st.builds(
        Proposal,
        agent=st.sampled_from(["a", "b", "c"]),
        layer=st.sampled_from(LAYERS),
        action=st.sampled_from(["stop", "go", "plan", "none"]),
        urgency=st.sampled_from([0.0, 0.5, 1.0]),
        confidence=st.sampled_from([0.0, 0.5, 1.0]),
    ),
    max_size=4,
)


@given(PROPOSALS)
@settings(deadline=None)
def test_the_arbiter_decides_alike_in_any_order(proposals: list[Proposal]) -> None:
    contracts = Contracts(allowed=ALLOWED)
    finals = {contracts.arbitrate(order) for order in itertools.permutations(proposals)}
    assert len(finals) == 1
    (final,) = finals
    legal = {contracts.project(p.layer, p.action) for p in proposals}
    assert final in legal | {"none"} and (final != "none" or legal <= {"none"})
    best = max(
        (contracts.priority(p) for p in proposals if contracts.project(p.layer, p.action) != "none"), default=None
    )
    if best is not None:
        top = [p for p in proposals if contracts.priority(p) == best and p.action == final]
        assert any(contracts.project(p.layer, p.action) == final for p in top)


def test_slow_layers_win_and_break_ties() -> None:
    contracts = Contracts()
    assert contracts.arbitrate([Proposal("a", "reflex", "go"), Proposal("b", "strategic", "stop")]) == "stop"
    urgent = Proposal("a", "reflex", "go", urgency=1.0)
    assert contracts.arbitrate([urgent, Proposal("b", "strategic", "stop")]) == "go"
    assert contracts.arbitrate([urgent, Proposal("b", "institutional", "stop")]) == "stop"  # 2 against 2: the slower
    assert contracts.priority(urgent) == 2.0 and contracts.priority(Proposal("b", "strategic", "x")) == 1 + 2 / 3
    assert contracts.arbitrate([]) == "none"


def test_errors_say_what_to_change() -> None:
    with pytest.raises(ConfigError, match="has maxlength. It may have"):
        Contract("x", {"maxlength": 3})
    with pytest.raises(ConfigError, match="The type in x.a is 'text'"):
        Contract("x", {"properties": {"a": {"type": "text"}}})
    with pytest.raises(ConfigError, match="`size` of the contract x is 0"):
        Contract("x", {}, size=0)
    with pytest.raises(ConfigError, match="must be up, down or broadcast"):
        Contract("x", {}, direction="left")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="`allowed` names the layer boss"):
        Contracts(allowed={"boss": []})
    with pytest.raises(ConfigError, match="three finite numbers"):
        Contracts(weights=(1, 1, -1))
    with pytest.raises(MethodError, match="The layer is 'boss'. The layers are reflex"):
        Contracts().check("boss", "plan", {})
    with pytest.raises(MethodError, match="`urgency` of a's proposal is 2"):
        Contracts().arbitrate([Proposal("a", "reflex", "go", urgency=2)])


@given(st.sampled_from(LAYERS), st.sampled_from(["stop", "go", "plan", "none", "x"]))
def test_projecting_again_changes_nothing(layer: str, action: str) -> None:
    contracts = Contracts(allowed=ALLOWED)
    once = contracts.project(layer, action)
    assert contracts.project(layer, once) == once and once in (action, "none")
    assert contracts.counts["dropped"] == (once != action), "the second time there is nothing to drop"


def test_ties_go_to_the_slower_layer_then_to_the_smaller_names() -> None:
    """Weights that make every proposal equal leave the tie to the layers, and within one to names."""
    contracts = Contracts(weights=(0, 0, 0))
    slow, fast = Proposal("z", "strategic", "z"), Proposal("a", "reflex", "a")
    for order in itertools.permutations([slow, fast, Proposal("b", "tactical", "b")]):
        assert contracts.arbitrate(order) == "z"
    same = [Proposal("b", "tactical", "go"), Proposal("a", "tactical", "halt"), Proposal("c", "tactical", "go")]
    for order in itertools.permutations(same):
        assert contracts.arbitrate(order) == "go"


def test_a_packet_of_any_depth_is_answered() -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    for packet in (deep, {"text": deep}, {"text": "x", "more": deep}, "[" * 5000 + "]" * 5000):
        assert Contracts({"a": (Contract("any", {}),)}).check("a", "any", packet).outcome == "rejected"
        assert Contracts().check("reflex", "summary", packet).outcome in ("rejected", "repaired")


def test_true_is_not_the_number_one() -> None:
    assert Contract("one", {"enum": [1, "a"]}).errors(True) and not Contract("one", {"enum": [1, "a"]}).errors(1)


# ---- verdicts, against jsonschema

NAMES = st.sampled_from(["a", "b", "c"])
NUMBERS = st.integers(-3, 3) | st.sampled_from([-1.5, 0.5, 2.25])  # 1.0 is an integer to jsonschema, and none here
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text("ab", max_size=4),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(NAMES, inside, max_size=3),
    max_leaves=8,
)
SCHEMAS = st.recursive(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(sorted(KINDS)),
            "enum": st.lists(VALUES, min_size=1, max_size=3),
            "minimum": NUMBERS,
            "maximum": NUMBERS,
            "maxLength": st.integers(0, 3),
            "maxItems": st.integers(0, 2),
            "required": st.lists(NAMES, max_size=2, unique=True),
        },
    ),
    lambda inside: st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["array", "object"]),
            "items": inside,
            "properties": st.dictionaries(NAMES, inside, max_size=3),
            "additionalProperties": st.booleans(),
        },
    ),
    max_leaves=5,
)


@settings(max_examples=60)
@given(schema=SCHEMAS, value=VALUES)
def test_what_is_valid_is_what_jsonschema_calls_so(schema: Any, value: Any) -> None:
    """It comes with Ray. It is no dependency, because its texts differ, which agents read, and it takes any keyword."""
    jsonschema = pytest.importorskip("jsonschema")
    check_schema(schema, "packet")
    assert (not list(schema_errors(value, schema, "packet"))) == jsonschema.Draft202012Validator(schema).is_valid(value)
