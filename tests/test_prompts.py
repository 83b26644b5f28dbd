"""Texts from outside on their way into a prompt: every kind a template or a tokenizer would choke on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.params import build_params
from rl_plugins.core.requests import Prompt
from rl_plugins.kit.agents import Observation
from rl_plugins.kit.prompts import appended, as_content, as_text
from rl_plugins.kit.services import fill, prompt_text, with_task
from rl_plugins.methods.fission_grpo.method import _extended
from rl_plugins.methods.m_grpo_rollout.method import MGrpoRollout
from rl_plugins.methods.scope import Scope
from rl_plugins.methods.training_free_grpo.library import parse_operations, read_library, write_library
from rl_plugins.methods.turn_control import TurnControl
from rl_plugins.methods.ui_s1_rollout import UiS1Rollout
from rl_plugins.runtime.chat import TokenizerChat
from rl_plugins.testing.engine import EOS, TableEngine, make_prompt, run_program

PART = {"type": "text", "text": "hello"}
DIRTY = {
    "half a pair": ("a\ud83d", "a\ufffd"),
    "the other half": ("\ude00b", "\ufffdb"),
    "two halves": ("\ud83d\ude00", "😀"),
    "in the wrong order": ("\ude00\ud83d", "\ufffd\ufffd"),
    "bytes": (b"caf\xc3\xa9", "café"),
    "bytes that are no text": (b"\xff\xfea", "\ufffd\ufffda"),
    "nothing": (None, ""),
    "zero byte": ("a\x00b", "a\ufffdb"),
    "colors of a terminal": ("\x1b[31mred", "\ufffd[31mred"),
    "tabs and ends of lines": ("a\tb\r\nc\x0bd\x0c", "a\tb\r\nc\x0bd\x0c"),
    "C1": ("\x9b31m", "\ufffd31m"),
    "a part": ([PART], "hello"),
    "several parts": ([PART, {"type": "text", "text": " you\ud83d"}], "hello you\ufffd"),
    "an array of parts": (np.array([PART, {"type": "text", "text": "!", "image": None}], dtype=object), "hello!"),
    "an image": ([{"type": "image"}, PART], "[image]hello"),
    "no parts": ([], ""),
    "a number": (3, "3"),
    "other lists": ([1, 2], "[1, 2]"),
}


@pytest.mark.parametrize("kind", DIRTY)
def test_as_text(kind: str) -> None:
    given_, clean = DIRTY[kind]
    assert as_text(given_) == clean == as_text(clean)


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_categories=[])))
def test_any_text_becomes_one_that_can_be_written(text: str) -> None:
    clean = as_text(text)
    clean.encode()
    assert as_text(clean) == clean
    if text.isprintable():
        assert clean == text


def test_content_keeps_what_is_no_text() -> None:
    image = {"type": "image", "image": object()}
    assert as_content([image, {"type": "text", "text": "a\ud83d"}]) == [image, {"type": "text", "text": "a\ufffd"}]
    assert as_content([PART, PART]) == "hellohello"


BEGUN = [{"role": "user", "content": "task"}, {"role": "assistant", "content": "Sure, "}]


@pytest.mark.parametrize(
    ("prompt", "messages"),
    [
        ("task", [{"role": "user", "content": "task\nseen"}]),
        (BEGUN, [{"role": "user", "content": "task\nseen"}, BEGUN[1]]),
        ([*BEGUN, {"role": "tool", "content": "x"}], [*BEGUN, {"role": "tool", "content": "x\nseen"}]),
        ([{"role": "system", "content": "s"}], [{"role": "system", "content": "s\nseen"}]),
        (BEGUN[1:], [{"role": "user", "content": "seen"}, BEGUN[1]]),
        ([{"role": "user", "content": None}], [{"role": "user", "content": "seen"}]),
        (
            [{"role": "user", "content": [PART]}],
            [{"role": "user", "content": [PART, {"type": "text", "text": "\nseen"}]}],
        ),
        ([], [{"role": "user", "content": "seen"}]),
    ],
)
def test_where_an_observation_goes(prompt: Any, messages: Any) -> None:
    before = repr(prompt)
    assert appended(prompt, "seen") == messages
    assert repr(prompt) == before


def test_texts_of_prompts_and_templates() -> None:
    assert prompt_text([{"role": "user", "content": [PART]}]) == "hello" == prompt_text(b"hello")
    assert prompt_text([*BEGUN, {"role": "user", "content": [PART]}]).endswith("user: hello")
    assert with_task([{"role": "user", "content": b"a"}], lambda text: f"{text}\ud83d")[0]["content"] == "a\ufffd"
    assert with_task([{"role": "user", "content": None}], lambda text: f"<{text}>")[0]["content"] == "<>"
    assert fill("{a} {b} {c}", {"a": b"x", "b": [PART], "c": "\ud83d"}) == "x hello \ufffd"


# ---- a real tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    from rl_plugins.lab.demo import policy

    return AutoTokenizer.from_pretrained(str(policy.load_policy()))


@pytest.mark.parametrize("kind", DIRTY)
def test_the_chat_of_a_tokenizer_takes_all_of_it(tokenizer: Any, kind: str) -> None:
    chat = TokenizerChat(tokenizer)
    given_, clean = DIRTY[kind]
    if kind not in ("an image", "nothing"):  # which are the template's to write
        assert chat.prompt([{"role": "user", "content": given_}]) == chat.prompt([{"role": "user", "content": clean}])
        assert chat.reply([{"role": "tool", "content": given_}]) == chat.reply([{"role": "tool", "content": clean}])
    if isinstance(given_, str):
        assert chat.encode(given_) == chat.encode(clean)


def test_names_of_special_tokens_in_an_observation_are_text(tokenizer: Any) -> None:
    chat = TokenizerChat(tokenizer)
    ids, plain = (chat.reply([{"role": "user", "content": f"1{name}2"}]) for name in ("<eos><asst>", ""))
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    assert [i for i in ids if i in special] == [i for i in plain if i in special]
    assert chat.decode(ids) == "1<eos><asst>2"


# ---- methods


def policy(reward: Any = None) -> TableEngine:
    """Writes `a`."""
    return TableEngine(lambda text: {EOS: 1.0} if text[-1] == "a" else {"a": 1.0}, reward)


def prompt_of(engine: TableEngine, messages: Any, **options: Any) -> Prompt:
    made = replace(make_prompt(engine.chat, "", n=1, max_tokens=500, **options), messages=messages)
    return replace(made, tokens=engine.chat.prompt(messages))


def read_by(engine: TableEngine) -> str:
    """All that the policy was given to read."""
    return "\n".join(engine.chat.decode(r.trajectory.context) for r in engine.requests)


def clean(text: str) -> bool:
    text.encode()
    return not any(bad in text for bad in ("\\ud83d", "\x1b", "b'", "{'"))


@pytest.mark.parametrize("kind", ["half a pair", "two halves", "bytes that are no text", "colors of a terminal"])
def test_observations(kind: str) -> None:
    given_, text = DIRTY[kind]

    class Says:
        def reset(self, columns: Any) -> Observation:
            return Observation(given_)

        def act(self, action: str) -> Observation:
            return Observation(given_)

        def close(self) -> None: ...

    engine = policy()
    params = {"environment": Says, "limit": 2, "remind_from": 0}
    prompt = prompt_of(engine, [{"role": "user", "content": [PART]}, BEGUN[1]])
    method = TurnControl(build_params(TurnControl.Params, params, "turn_control"))
    ((row,),) = run_program(method, prompt, engine)
    assert engine.chat.decode(row.prompt) == f"<hello\n{text}>Sure, "
    assert f"<{text}>" in engine.chat.decode(row.tokens) and clean(read_by(engine))


def test_hints_of_scope_go_into_a_prompt_of_parts() -> None:
    engine = policy(lambda text, columns: 0.0)
    params = {"prm": lambda messages, steps, columns: [0.0] * len(steps), "min_prefix": 0, "min_step": 0}
    method = Scope(build_params(Scope.Params, params, "scope"))
    messages = [{"role": "user", "content": [PART]}, BEGUN[1]]
    prompt = prompt_of(engine, messages, columns={"solution": "b\ud83d"})
    run_program(method, prompt, engine)
    assert "<hello\n\nA correct solution, which must not be mentioned in the answer:\nb\ufffd>Sure, " in read_by(engine)
    assert clean(read_by(engine))


def test_recorded_turns_of_ui_s1() -> None:
    engine = policy()
    expert = [([PART, {"type": "image"}], "a"), (b"two\xff", "b\ud83d"), ("three\x1b", "a")]
    prompt = prompt_of(engine, [{"role": "user", "content": [PART]}], columns={"expert": expert})
    ((*rows,),) = run_program(UiS1Rollout(), prompt, engine)
    assert len(rows) == 3 and clean(read_by(engine))
    assert read_by(engine).endswith("<hello><hello[image]>a<two\ufffd>b\ufffd<three\ufffd>")


def test_tasks_of_sub_agents() -> None:
    engine = policy()
    found = {"parse": lambda text: [b"dig\xff", "look\ud83d", [PART]]}
    rows = run_program(
        MGrpoRollout(build_params(MGrpoRollout.Params, found, "m_grpo_rollout")),
        make_prompt(engine.chat, "x", n=1, max_tokens=500),
        engine,
    )[0]
    assert [engine.chat.decode(row.prompt) for row in rows[:3]] == ["<dig\ufffd>", "<look\ufffd>", "<hello>"]


@pytest.mark.parametrize("answer", ["a task", b"a task", 3, {"task": "x"}, None, {"a", "b"}])
def test_a_parser_that_gives_no_list_delegates_nothing(answer: Any) -> None:
    engine = policy()
    method = MGrpoRollout(build_params(MGrpoRollout.Params, {"parse": lambda text: answer}, "m_grpo_rollout"))
    logged: dict[str, float] = {}
    (rows,) = run_program(method, make_prompt(engine.chat, "x", n=1), engine, logged)
    assert [row.meta["agent"] for row in rows] == ["main"]
    assert logged["m_grpo_rollout/parse_failed"] == float(answer is not None)


def test_recovery_prompts_and_experiences(tmp_path: Any) -> None:
    assert _extended([{"role": "user", "content": [PART]}], "a", "tool", "f")[0]["content"] == [PART]
    reply = '[{"operation": "ADD", "content": "half \\ud83d of \\ud83d\\ude00"}]'
    (operation,) = parse_operations(reply)
    assert operation["content"] == "half \ufffd of 😀"
    path = tmp_path / "library.json"
    path.write_text('{"format": 1, "experiences": {"x": "half \\ud83d"}}')
    assert read_library(path) == {"G0": "half \ufffd"}
    write_library(path, read_library(path), 1, "practice")
