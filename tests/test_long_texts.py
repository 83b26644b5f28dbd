"""Texts of a degenerate policy, 100,000 characters of one kind: whatever reads a completion takes time in proportion.

A pattern such as `<answer>\\s*(.*?)\\s*</answer>` takes minutes for `<answer>` and newlines, and so does any search
that begins anew at every opening. Here each reader gets each text, and has `LIMIT` seconds.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from rl_plugins.kit import services
from rl_plugins.lab.bench import chains
from rl_plugins.lab.demo import rewards
from rl_plugins.lab.demo.environments.calculator import Calculator
from rl_plugins.lab.viewer.comparison import word_differences
from rl_plugins.methods import cleaner, m_grpo
from rl_plugins.methods.echo.answers import boxed_answer, canonical
from rl_plugins.methods.fapo.judge import boxed_index
from rl_plugins.methods.fission_grpo import calls
from rl_plugins.methods.grpo_roc import GrpoRoc
from rl_plugins.methods.m_grpo_rollout.method import delegated
from rl_plugins.methods.m_grpo_rollout.team import result_of
from rl_plugins.methods.ps_grpo import texts as ps_grpo
from rl_plugins.methods.rtv_pdr.tournament import parse_vote
from rl_plugins.methods.scope.steps import split_steps
from rl_plugins.methods.training_free_grpo import library
from rl_plugins.methods.xrpo.similarity import tfidf_cosine, words
from rl_plugins.tools.audit import answers, rows
from rl_plugins.tools.messages import rules
from rl_plugins.tools.messages.contracts import PLAN, Contracts, text_result
from rl_plugins.tools.messages.endpoints import _MARK, _VERDICT
from rl_plugins.tools.messages.guard import LineageGuard
from rl_plugins.tools.messages.lineage import TAG, key
from rl_plugins.tools.messages.metrics import redundancy

LIMIT = 3.0  # seconds; the slowest takes one, a search that begins anew at every mark 4 to 30
LENGTH = 100_000

# Single marks, repeated.
UNITS = [
    *(" ", "\n", "\t", " \n", "a", "a ", "a\n", "a.\n", "ab1 ", "0", "1", "-", ".", ",", "1.", "1,", ". ", "0.", "()"),
    *("(", ")", "[", "]", "{", "}", "{}", "\\", "\\n", '"', "'", '"a', "$", "*", "#", "=", "1=", "= ", "1+1=2 ", "1+"),
    *("<", ">", "</", "<a>", "\u00e9", "\u4e2d", "\u0301\u0323", "\u0130", "\ud800", "\x00", "\u200b", "not ", "n't "),
]
# Openings and closings that some reader looks for: repeated, and once before a run of something else.
MARKS = [
    *("<answer>", "</answer>", "\\boxed{", "####", "answer:", "answer is ", "The answer is: (", "<tool_call>"),
    *("</tool_call>", '<tool_call>{"name": "f"}</tool_call>', "<result>", "</result>", "<thinking>", "</thinking>"),
    *("<thinking></thinking>", "<tool_response>", "</tool_response>", "<Experiences>", "</experiences>", "```json"),
    *("```", '{"a":', '["', "{\\", "Best: ", "best", "<mark>", TAG, "=0", "= -", "- ", "1) ", "x = "),
]
FILL = [" ", "\n", "{"]
TEXTS = [unit * (LENGTH // len(unit)) for unit in UNITS + MARKS]
TEXTS += [mark + fill * (LENGTH // len(fill)) for mark, fill in itertools.product(MARKS, FILL)]
TEXTS += [(mark + "\n") * (LENGTH // (len(mark) + 1)) for mark in MARKS]
TEXTS += [fill * (LENGTH // len(fill)) + "x" for fill in (*FILL, ".", "0", "a.")]

ROC = GrpoRoc()
JUDGE = services.Endpoint("http://localhost", "judge", "{text}")
VERDICT = services.Endpoint("http://localhost", "judge", "{text}", _VERDICT)
PARAMS = cleaner.Cleaner.Params(environment=Calculator)
GOLD = [calls.ToolCall("f", {"a": "1"}), calls.ToolCall("g", {})]


def _guarded(text: str) -> None:
    guard = LineageGuard("strict", given=["1 + 1 = 2"])
    asyncio.run(guard.check("a", "b", text, attempt=1))


def _contracts(text: str) -> None:
    contracts = Contracts({"sub": (text_result(), PLAN)})
    for kind in ("result", "plan"):
        contracts.check("sub", kind, text)


def _format(text: str) -> None:
    roles = ("system", "user", "assistant", "user", "assistant")
    m_grpo.sub_agent_format([{"role": role, "content": text} for role in roles])


def _tool_calls(text: str) -> None:
    found = calls.read_calls(text)
    calls.correctness(found, GOLD)
    calls.leaks(calls.simulate(found, GOLD, [{"name": "f", "parameters": {"properties": {"a": {}}}}]), GOLD, text)


def _merged(text: str) -> None:
    tokens = [ord(c) for c in text]
    cleaner.merge_turns(tokens, [*tokens[1:], 65], lambda some: "".join(map(chr, some)), PARAMS)


def _similar(text: str) -> None:
    vocabulary = ps_grpo.Vocabulary()
    for kind in ("bleu2", "f1", "em", "rougeL"):
        ps_grpo.Texts([vocabulary(text), vocabulary(text + " b")]).similarity(kind)


READERS: dict[str, Callable[[str], Any]] = {
    "audit: answers": answers.extract_answer,
    "audit: words": lambda text: (rows.words_of(rows.normal(text)), rows.oddities(text)),
    "guard": _guarded,
    "guard: claims": rules.split_claims,
    "guard: arithmetic": rules.check_arithmetic,
    "guard: comparison": lambda text: rules.compare_claims(text, [text + " x"]),
    "guard: words": key,
    "contracts": _contracts,
    "redundancy": lambda text: redundancy([text, text + " b"]),
    "list marks of claims": lambda text: [_MARK.sub("", line) for line in text.splitlines()],
    "judge": JUDGE._matched,
    "judge: verdict": VERDICT._matched,
    "judge: marked": lambda text: services._between(text, "mark"),
    "judge: JSON": JUDGE._of_json,
    "template": lambda text: services.fill("{a}" + text, {"a": text}),
    "boxed answer": boxed_answer,
    "mathematical answer": canonical,
    "boxed index": boxed_index,
    "tool calls": _tool_calls,
    "penalties": lambda text: (ROC._error_ratio(text), ROC._format_penalty(text)),
    "tasks of sub-agents": delegated,
    "result of a sub-agent": result_of,
    "format of a sub-agent": _format,
    "vote": lambda text: parse_vote(text, 4),
    "call": cleaner.code_of,
    "merged calls": _merged,
    "error of a tool": cleaner.error_type,
    "steps": lambda text: split_steps(text, "\n", 20),
    "operations": lambda text: library.within(library.parse_operations(text), 10),
    "experiences": library.parse_experiences,
    "words of an experience": lambda text: library.within([{"content": text}], 10),
    "similarities": _similar,
    "TF-IDF": lambda text: tfidf_cosine([words(text)], [words(text), words("a b")], [None]),
    "demo: rewards": lambda text: (rewards.digit_score(text, "12"), rewards.format_score(text, "12")),
    "bench: rewards": lambda text: (chains._grade(text, "1+2"), chains.answer_of(text)),
    "bench: judge": lambda text: chains.first_flaw("1+2", "3", text),
    "viewer: differences": lambda text: list(word_differences(text, text[1:] + "b")),
}


# Those that take a tenth of a second and more per text get some of the texts.
EVERY = {"similarities": 40, "guard": 8, "guard: claims": 3, "guard: comparison": 3, "audit: words": 3, "redundancy": 3}
EVERY |= {"viewer: differences": 10, "merged calls": 3, "words of an experience": 3}


class TooSlow(Exception):
    """Not one that a reader catches by its kind."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise TooSlow


@pytest.mark.parametrize("reader", READERS)
def test_a_long_text_of_one_kind_is_read_in_time(reader: str) -> None:
    before = signal.signal(signal.SIGPROF, _stop)  # its clock is that of this process
    try:
        for text in TEXTS[:: EVERY.get(reader, 1)]:
            signal.setitimer(signal.ITIMER_PROF, LIMIT)
            try:
                READERS[reader](text)
            except ValueError:  # nothing to read, which is what the functions say of such a text
                pass
            except TooSlow:
                pytest.fail(f"{reader} takes more than {LIMIT} s for {len(text)} characters: {text[:30]!r}...")
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
    finally:
        signal.signal(signal.SIGPROF, before)
