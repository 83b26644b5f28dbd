"""The lineage guard: its rules, policies, retries, what callables may do to it, and logs that tell it all again."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.tools.messages import (
    Lineage,
    LineageGuard,
    check_arithmetic,
    compare_claims,
    endpoint_entailment,
    endpoint_splitter,
    endpoint_verifier,
    endpoints,
    estimate_rates,
    find_hubs,
    marker_run,
    read_logs,
    replay,
    split_claims,
    write_log,
)
from rl_plugins.tools.messages.guard import WITHHELD
from rl_plugins.tools.messages.rules import entail_by_words, read_verdict, verify_arithmetic

FACTS = {"The tower is 300 m high.": True, "The tower is in Rome.": False, "The river is long.": None}


class Verifier:
    """Knows what FACTS says, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, fields: dict[str, str]) -> bool | None:
        self.asked.append(fields["claim"])
        return FACTS.get(fields["claim"])


def run(guard: LineageGuard, message: str, sender: str = "a", revise: Any = None) -> str:
    return asyncio.run(guard.process(sender, "b", message, revise))[0]


# ---- rules


def test_claims_are_sentences_lines_or_fields() -> None:
    assert split_claims("It is 3.5 m. Is it?\n- yes\n\n---") == ["It is 3.5 m.", "Is it?", "- yes"]
    assert split_claims('{"high": 3, "names": ["a"]}') == ['{"high": 3}', '{"names": ["a"]}']
    assert split_claims("{broken. Text.") == ["{broken.", "Text."] and split_claims(" \n") == [] == split_claims(
        "{}!"[:2]
    )


@pytest.mark.parametrize(
    ("claim", "premise", "verdict"),
    [
        ("the tower is  300 m high", "The tower is 300 m high.", "green"),
        ("[unverified] The tower is 300 m high.", "The tower is 300 m high.", "green"),
        ("The tower is 310 m high.", "The tower is 300 m high.", "red"),
        ("The tower was 310 m high in 2020.", "The tower was 300 m high in 2010.", "yellow"),
        ("The tower is not high.", "The tower is high.", "red"),
        ("It isn't not high.", "It isn't high.", "red"),
        ('{"high": 310}', '{"high":  300}', "red"),
        ('{"high": 300}', '{"wide": 300}', "yellow"),
        ("Something else.", "The tower is high.", "yellow"),
    ],
)
def test_claims_are_compared_by_their_words(claim: str, premise: str, verdict: str) -> None:
    assert compare_claims(claim, ["Unrelated.", premise]) == (verdict, () if verdict == "yellow" else (1,))


@pytest.mark.parametrize(
    ("claim", "verdict"),
    [
        ("So 12 * 3 = 36.", "green"),
        ("So 12 * 3 = 37.", "red"),
        ("1 + 1 = 2 but 2 × 2 = 5", "red"),
        ("1/3 = 0.33", "green"),
        ("1/3 = 0.34", "red"),
        ("1/3 = 0", "green"),
        ("2 + 2 = 5.0", "red"),
        ("(1,000 - 1) * 2 = 1,998", "green"),
        ("x2 + 3 = 9", "yellow"),
        ("-2 - -3 = 1", "green"),
        ("x = 5", "yellow"),
        ("2 + 2 = 4 * 1", "yellow"),
        ("2 + 2 = 4x", "yellow"),
        ("1 / 0 = 3", "yellow"),
        ("9**9 = 1", "yellow"),
        ("007 + 1 = 8", "yellow"),
        ("(" * 300 + "1 + 1 = 2", "yellow"),
        ("no sum", "yellow"),
    ],
)
def test_arithmetic(claim: str, verdict: str) -> None:
    assert check_arithmetic(claim) == verdict


@given(st.integers(-999, 999), st.integers(-999, 999), st.sampled_from("+-*"), st.integers(-2, 2))
def test_arithmetic_of_any_sum(a: int, b: int, sign: str, off: int) -> None:
    right = {"+": a + b, "-": a - b, "*": a * b}[sign]
    assert check_arithmetic(f"We get {a} {sign} {b} = {right + off}.") == ("red" if off else "green")


@given(st.text(alphabet="0123456789.,+-*/×()= xé\n", max_size=60))
def test_no_text_breaks_the_rules(text: str) -> None:
    assert check_arithmetic(text) in ("green", "yellow", "red")
    for c in split_claims(text):
        assert compare_claims(c, [text, c])[0] == "green" or c.startswith("{")


def test_long_text_takes_no_time() -> None:
    start = time.perf_counter()
    check_arithmetic("1" * 100_000 + " = " + "1 + 1 = " * 10_000)
    check_arithmetic("=" * 20_000)
    assert time.perf_counter() - start < 5


def test_verdicts() -> None:
    assert [read_verdict(v) for v in ("Green ", True, 1, 1.0)] == ["green"] * 4
    assert [read_verdict(v) for v in ("yellow", None, 0)] == ["yellow"] * 3
    assert [read_verdict(v) for v in ("red", False, -1)] == ["red"] * 3
    for v in ("maybe", 0.7, 7, float("nan"), [1], {}):
        with pytest.raises(ValueError, match="is no verdict"):
            read_verdict(v)


# ---- policies


def test_speed_verifies_nothing_and_blocks_contradictions() -> None:
    verifier = Verifier()
    guard = LineageGuard("speed", verifier=verifier, given=["The tower is 300 m high."])
    assert run(guard, "The tower is 300 m high. The river is long. The tower is 310 m high.") == (
        "The tower is 300 m high. [unverified] The river is long."
    )
    assert not verifier.asked and guard.counts["red"] == guard.counts["broken"] == 1
    assert [c.status for c in guard.lineage.claims] == ["confirmed", "confirmed", "unverified", "rejected"]
    assert [c.released for c in guard.lineage.claims] == [True, True, True, False]


def test_balanced_verifies_hubs_only() -> None:
    verifier = Verifier()
    guard = LineageGuard("balanced", verifier=verifier, hubs=["hub"])
    assert run(guard, "The tower is in Rome.", "leaf") == "[unverified] The tower is in Rome."
    assert not verifier.asked
    assert run(guard, "The tower is in Rome.", "hub") == WITHHELD
    assert verifier.asked == ["The tower is in Rome."]
    assert run(guard, "the tower is in rome", "leaf") == WITHHELD  # now it is known for all


def test_strict_asks_once_for_each_claim() -> None:
    verifier = Verifier()
    guard = LineageGuard("strict", verifier=verifier, retries=0)
    for _ in range(3):
        assert run(guard, " ".join(FACTS)) == "The tower is 300 m high. [unverified] The river is long."
    assert sorted(verifier.asked) == sorted(FACTS) and guard.counts["verified"] == 3
    assert {c.text for c in guard.lineage.confirmed()} == {"The tower is 300 m high."}
    assert run(guard, "The tower is 310 m high.") == WITHHELD  # contradicts a verified claim


def test_messages_at_the_same_time_wait_for_each_other() -> None:
    verifier = Verifier()
    guard = LineageGuard("strict", verifier=verifier, retries=0)

    async def both() -> list[Any]:
        return await asyncio.gather(*(guard.process(s, "b", "The tower is in Rome. Fine.") for s in "acd"))

    assert [text for text, _ in asyncio.run(both())] == ["[unverified] Fine."] * 3
    assert sorted(verifier.asked) == ["Fine.", "The tower is in Rome."], "each claim was asked about once"
    assert [r["sender"] for r in guard.log] == ["a", "c", "d"]
    assert run(guard, "Fine.") == "[unverified] Fine."  # in another event loop


def test_arithmetic_is_the_default_verifier() -> None:
    guard = LineageGuard("strict", retries=0)
    assert run(guard, "We have 2 * 3 = 6. And 2 * 3 = 7.") == "We have 2 * 3 = 6."
    assert "the calculation is wrong" in json.dumps(guard.log)
    same = LineageGuard("strict", retries=0, verifier=verify_arithmetic, entailment=entail_by_words)
    assert run(same, "We have 2 * 3 = 6. And 2 * 3 = 7.") == "We have 2 * 3 = 6."
    assert same.counts["verified"] == 2 and same.counts["failed"] == 0


def test_a_red_claim_goes_back_with_its_evidence_at_most_k_times() -> None:
    for retries in range(3):
        told: list[str] = []
        guard = LineageGuard("speed", retries=retries, given=["It is 3 m."])
        message = "It is 4 m. Fine."
        assert (
            run(guard, message, revise=lambda feedback, m=message, t=told: t.append(feedback) or m)
            == "[unverified] Fine."
        )
        assert len(told) == guard.counts["sent_back"] == retries and guard.counts["broken"] == 1
    assert told[0].splitlines()[1] == "- It is 4 m. (against it: It is 3 m.)"

    guard = LineageGuard("speed", retries=3, given=["It is 3 m."])

    async def corrects(feedback: str) -> str:
        return "It is 3 m."

    assert run(guard, "It is 4 m.", revise=corrects) == "It is 3 m."
    assert guard.counts["sent_back"] == 1 and guard.counts["broken"] == 0


def test_hubs_of_a_star() -> None:
    star = np.zeros((4, 4))
    star[0, 1:] = star[1:, 0] = 1
    assert find_hubs(star, ["hub", "x", "y", "z"]) == ["hub"]
    chain, mesh = np.eye(4, k=-1), np.ones((4, 4)) - np.eye(4)
    assert find_hubs(chain, list("abcd")) == find_hubs(mesh, list("abcd")) == []
    with pytest.raises(ConfigError, match="`names` has 1"):
        find_hubs(star, ["hub"])


# ---- properties

SENTENCES = st.sampled_from(
    [f"{what} is {'not ' * no}{n} m high." for what in ("It", "She") for no in (0, 1) for n in (3, 4)]
    + ["We get 1 + 1 = 2.", "We get 1 + 1 = 3."]
)
MESSAGES = st.lists(
    st.tuples(st.sampled_from(["a", "hub"]), st.lists(SENTENCES, min_size=1, max_size=4)), min_size=1, max_size=5
)


@given(MESSAGES, st.sampled_from(["speed", "balanced", "strict"]), st.integers(0, 2), st.integers(0, 9))
@settings(deadline=None, max_examples=40)
def test_what_always_holds(messages: Any, policy: Any, retries: int, salt: int) -> None:
    asked: list[str] = []

    def verifier(fields: Any) -> Any:
        asked.append(fields["claim"])
        return [True, False, None][(len(fields["claim"]) + salt + fields["claim"].count("4")) % 3]

    guard = LineageGuard(policy, verifier=verifier, hubs=["hub"], retries=retries)
    verified: set[str] = set()
    for sender, sentences in messages:
        message = " ".join(sentences)
        released, records = asyncio.run(guard.process(sender, "b", message, lambda _, m=message: m))
        last = records[-1]["claims"]
        verified |= {
            c["text"] for r in records for c in r["claims"] if (c["source"], c["verdict"]) == ("verifier", "green")
        }
        assert len(records) <= retries + 1
        if all(c["verdict"] == "green" for c in last):
            assert released == message
        kept = [c for c in last if c["verdict"] != "red"]
        tagged = [("[unverified] " if c["verdict"] == "yellow" else "") + c["text"] for c in kept]
        assert released == (" ".join(tagged) or WITHHELD)
    assert len(asked) == len(set(asked)) == guard.counts["verified"]
    assert policy != "speed" or not asked
    lineage = guard.lineage
    assert all(p < c.id for c in lineage.claims for p in c.parents)  # acyclic
    assert {c.text for c in lineage.confirmed()} <= verified  # only verified claims are promoted
    log = json.loads(json.dumps(guard.log))  # plain data
    assert Lineage.from_log(log).claims == lineage.claims
    again = guard.fresh()
    assert not again.log and not again.lineage.claims
    assert asyncio.run(replay(log, again)) == guard.log


def test_replay_under_another_policy() -> None:
    guard = LineageGuard("speed", given=["It is 3 m."])
    run(guard, "The tower is in Rome. Fine.")
    found = asyncio.run(replay(guard.log, LineageGuard("strict", verifier=Verifier(), retries=0)))
    assert [r["released"] for r in found] == [None, "[unverified] Fine."]
    assert [r["released"] for r in guard.log] == [None, "[unverified] The tower is in Rome. [unverified] Fine."]


# ---- lineage


def test_a_claim_is_traced_to_who_first_made_it() -> None:
    guard = LineageGuard("speed")
    run(guard, "The tower is in Rome.", "first")
    run(guard, "[unverified] The tower is in Rome. More.", "second")
    run(guard, "the tower is in Rome", "third")
    last = guard.lineage.claims[-1]
    assert [c.author for c in guard.lineage.ancestors(last.id)] == ["first", "second"]
    assert [c.author for c in guard.lineage.origins(last.id)] == ["first"]
    assert guard.log[1]["released"] == "[unverified] The tower is in Rome. [unverified] More."  # one tag, not two


def test_a_lineage_refuses_a_circle() -> None:
    lineage = Lineage()
    lineage.add("x", "a", "unverified")
    with pytest.raises(MethodError, match="ids of earlier claims"):
        lineage.add("y", "a", "unverified", parents=[1])
    with pytest.raises(MethodError, match="must be one of confirmed"):
        lineage.add("y", "a", "true")  # type: ignore[arg-type]


# ---- faults


def raises(_: Any) -> Any:
    raise RuntimeError("down")


def hangs(_: Any) -> Any:
    time.sleep(1.5)


@pytest.mark.parametrize("bad", [raises, hangs, lambda _: "perhaps", lambda _: ("red", "a", "b"), lambda _: 7])
def test_a_verifier_that_fails_leaves_the_claim_yellow(bad: Any) -> None:
    guard = LineageGuard("strict", verifier=bad, timeout=0.3)
    start = time.perf_counter()
    assert run(guard, "It is so. Fine.") == "[unverified] It is so. [unverified] Fine."
    assert run(guard, "It is so.") == "[unverified] It is so."
    assert time.perf_counter() - start < 3
    assert guard.counts["failed"] == guard.counts["verified"] == 2  # each was asked once
    assert not guard.lineage.confirmed()


def test_a_verifier_that_is_down_is_not_asked_on_and_on() -> None:
    guard = LineageGuard("strict", verifier=raises, most_failures=2)
    for i in range(10):
        run(guard, f"Claim {'x' * i} here.")
    assert guard.counts["verified"] == 2 and guard.counts["yellow"] == 10
    assert guard.fresh()._failures_in_row == 0  # the next rollout asks again


@pytest.mark.parametrize("bad", [raises, hangs, lambda _: "one text", lambda _: [3], lambda _: None])
def test_a_splitter_that_fails_leaves_one_claim(bad: Any) -> None:
    guard = LineageGuard("speed", splitter=bad, timeout=0.3)
    assert run(guard, "It is so. Fine.") == "[unverified] It is so. Fine."
    assert guard.counts["claims"] == guard.counts["failed"] == 1


@pytest.mark.parametrize("bad", [raises, hangs, lambda _: "odd", lambda _: ("red", "places")])
def test_an_entailment_that_fails_leaves_the_claim_yellow(bad: Any) -> None:
    guard = LineageGuard("speed", entailment=bad, timeout=0.3, given=["Known."])
    assert run(guard, "Known. Fine.") == "Known. [unverified] Fine."
    assert guard.counts["failed"] == 1


@pytest.mark.parametrize("bad", [raises, hangs, lambda _: None])
def test_a_sender_that_cannot_write_again_loses_its_red_claims(bad: Any) -> None:
    guard = LineageGuard("speed", retries=5, timeout=0.3, given=["It is 3 m."])
    assert run(guard, "It is 4 m. Fine.", revise=bad) == "[unverified] Fine."
    assert guard.counts["broken"] == guard.counts["failed"] == 1


def test_callables_of_every_kind() -> None:
    async def entails(fields: Any) -> Any:
        assert fields["known"] == "Known."
        return ("red", [0, 99]) if "Bad" in fields["claim"] else "green"

    guard = LineageGuard("speed", splitter=lambda m: m.split("|"), entailment=entails, retries=0, given=["Known."])
    assert run(guard, "Bad|Good") == "|Good"
    assert [c.parents for c in guard.lineage.claims] == [(), (0,), ()]
    assert guard.lineage.claims[2].status == "entailed" and len(guard.lineage.confirmed()) == 1

    listed = LineageGuard("strict", splitter=lambda m: ["It rains", "It snows"], retries=0,
                          verifier=lambda f: ("red", "dry") if "rains" in f["claim"] else None)  # fmt: skip
    assert run(listed, "Rain and snow") == "[unverified] It snows"  # claims that are no parts of the text are listed
    assert "against it: dry" in asyncio.run(listed.check("a", "b", "x")).feedback


def test_guards_of_several_rollouts_at_a_time() -> None:
    verifier = Verifier()
    base = LineageGuard("strict", verifier=verifier, retries=0)
    guards = [base.fresh() for _ in range(6)]
    out: dict[int, str] = {}
    threads = [threading.Thread(target=lambda i=i: out.update({i: run(guards[i], " ".join(FACTS))})) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert set(out.values()) == {"The tower is 300 m high. [unverified] The river is long."}
    assert len(verifier.asked) == 18 and not base.log


class Server(BaseHTTPRequestHandler):
    """A chat endpoint: it knows what FACTS says, and one premise from which a claim follows."""

    asked: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
        self.asked.append(content)
        told = re.search("<verdict-[0-9a-f]{16}>", content)
        if content.startswith("Write every claim"):
            reply = "\n".join(f"{i}. {t}" for i, t in enumerate(split_claims(content.split("Message: ")[1]), 1))
        else:
            verdict = {"The tower is in Rome.": "-1", "Fine.": "2", "It is in Italy.": "1"}
            reply = next((v for c, v in verdict.items() if f"Claim: {c}" in content), "0")
            reply = f"I say {told[0]}{reply}{told[0].replace('<', '</')}" if told else reply
        body = json.dumps({"choices": [{"message": {"content": reply}}]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def test_all_three_parts_at_an_endpoint() -> None:
    http = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        at = f"http://127.0.0.1:{http.server_address[1]}/v1"
        guard = LineageGuard(
            "strict",
            splitter=endpoint_splitter(at, "m"),
            entailment=endpoint_entailment(at, "m"),
            verifier=endpoint_verifier(at, "m"),
            retries=0,
        )
        message = "The tower is in Rome. Fine. It is in Italy."
        assert run(guard, message) == "[unverified] Fine. It is in Italy."
        assert [a.startswith("Write") for a in Server.asked] == [True, False, False, False], "nothing is known yet"
        assert guard.counts["failed"] == 1 and guard.counts["verified"] == 3  # 2 is no verdict
        asked = len(Server.asked)
        assert run(guard, "It is in Rome.") == "[unverified] It is in Rome."
        entailed = next(a for a in Server.asked[asked:] if a.startswith("Known to be true"))
        assert entailed.startswith("Known to be true:\nIt is in Italy.\n\nClaim: It is in Rome.")
    finally:
        http.shutdown()
        http.server_close()


def test_an_endpoint_that_is_down_leaves_claims_yellow() -> None:
    down = "http://127.0.0.1:9/v1"
    guard = LineageGuard(
        "strict", splitter=endpoint_splitter(down, "m"), verifier=endpoint_verifier(down, "m"), timeout=5
    )
    assert run(guard, "It is so. Fine.") == "[unverified] It is so. Fine."
    assert guard.counts["failed"] == 2


def test_a_reply_without_a_claim_is_no_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints.ChatEndpoint, "__call__", lambda *_: " \n- \n")
    with pytest.raises(ValueError, match="no claim"):
        endpoint_splitter("http://localhost/v1", "m")("x")


# ---- logs


def test_logs_of_many_threads_are_whole_lines(tmp_path: Path) -> None:
    entry = {"records": [], "text": "x\udcff" * 40_000}
    threads = [threading.Thread(target=write_log, args=(tmp_path / "a", entry | {"n": i})) for i in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(e["n"] for e in read_logs(tmp_path / "a")) == list(range(16))
    with next((tmp_path / "a").iterdir()).open("a") as file:
        file.write('{"n": 1')  # a process was killed
    assert len(list(read_logs(tmp_path / "a"))) == 16
    with pytest.raises(ConfigError, match=r"has no file \*.jsonl. Name the folder that `guard_log`"):
        list(read_logs(tmp_path))


def test_where_a_marker_was() -> None:
    guard = LineageGuard("speed", given=["See page 7."])
    for round, sender, message in [
        (0, "a", "See PAGE 9."),
        (0, "b", "Fine."),
        (1, "b", "See page 9."),
        (3, "a", "No."),
    ]:
        asyncio.run(guard.process(sender, "c", message, round=round))
    has = marker_run(guard.log, ["a", "b", "c"], "page 9")
    assert has.astype(int).tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 0], [0, 1, 0]]
    rates = estimate_rates([has], [[0, 0, 0], [1, 0, 0], [0, 0, 0]])  # b reads a
    assert (rates.exposures, rates.adoption, rates.held, rates.correction) == (1, 1.0, 5, 0.2)
    assert marker_run([], ["a"], "x").shape == (0, 1)


def test_errors_say_what_to_change() -> None:
    with pytest.raises(ConfigError, match="must be one of speed, balanced, strict"):
        LineageGuard("fast")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="set `policy` to speed"):
        LineageGuard("balanced")
    with pytest.raises(ConfigError, match="`retries` is -1"):
        LineageGuard("speed", retries=-1)
    with pytest.raises(ConfigError, match="`timeout` of the verifier is 0"):
        LineageGuard("speed", verifier=raises, timeout=0)
