"""Advice as text for a terminal, and as plain data."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

from rl_plugins.cards.catalog import Card
from rl_plugins.cards.problems import PROBLEMS, Answer, Problem
from rl_plugins.cards.usage import line_of
from rl_plugins.commands.suggest import search
from rl_plugins.commands.suggest.advice import Advice, Suggestion
from rl_plugins.commands.suggest.run_logs import RunLogs
from rl_plugins.commands.suggest.search import Hit

MOST = 4  # answers shown per problem
WIDEST = 100


def shown(advice: Advice) -> str:
    """The advice as text for a terminal. Lines to copy are not wrapped."""
    parts = [_read(advice.source)] if advice.source else []
    if advice.nearest:
        parts.append(
            "\n".join(["Nearest to your words", *(line for hit in advice.nearest for line in _hit(hit, advice))])
        )
    told: set[str] = set()
    parts += [_problem(s, advice.host, told) for s in advice.suggestions]
    if not advice.suggestions and not advice.nearest:
        parts.append(_nothing(advice))
    if advice.read:
        parts.append("No problem in\n" + "\n".join(f"  - {text}" for text in advice.read))
    if advice.not_told:
        lines = [f"  - {PROBLEMS[key].title}: {why}." for key, why in advice.not_told.items()]
        parts.append("Could not be told from these logs\n" + "\n".join(lines))
    parts.append(
        "`rl-plugins info METHOD` decides on a screen whether to use a method: costs, measurements, lines to copy.\n"
        "Options are the hosts' own; where one was measured, it is named against a method."
    )
    return "\n\n".join(parts)


def everything(host: str | None) -> str:
    """All answers, a line each: kind, name, what it does and when to use it, what to write in a config."""
    return "\n".join(_line(hit, host) for hit in search.everything(host))


def _line(hit: Hit, host: str | None) -> str:
    found = hit.found
    if isinstance(found, Problem):
        told = f"{found.title}. {found.seen}"
    elif isinstance(found, Card):
        told = f"{found.does}. Use: {found.use_when}"
    else:
        told = (
            f"{found.does}: {', or '.join(dict.fromkeys(line for h, line in found.use.items() if host in (None, h)))}"
        )
    return f"{hit.kind} {hit.name}: {' '.join(told.split())}"


def _read(logs: RunLogs) -> str:
    """What was read, because a folder may hold several logs, and what the thresholds are worth."""
    return f"Read {logs.file}: {logs.steps} logged steps of {logs.host}. The thresholds below are rules of thumb."


def _nothing(advice: Advice) -> str:
    if len(advice.not_told) > len(advice.read):
        return "These logs are too short, or lack too many values: most problems could not be looked for."
    return "These logs show none of the known problems."


def _hit(hit: Hit, advice: Advice) -> Iterator[str]:
    if isinstance(hit.found, Card):
        yield from _wrapped("  ", f"{hit.name}, method ({hit.found.standing.word}): {hit.found.does}.")
        if hit.found.standing.against:
            yield from _wrapped("      against:  ", hit.found.standing.against[0])
        return
    if isinstance(hit.found, Answer):
        yield from _answer(hit.found, advice.host)
        return
    yield from _wrapped("  ", f"{hit.found.title}, below: {hit.found.seen}")


def _problem(suggestion: Suggestion, host: str, told: set[str]) -> str:
    """A problem and what answers it.

    Args:
        told: names that stand above with all there is to say; those of this problem are added.
    """
    problem = PROBLEMS[suggestion.problem]
    lines = [problem.title, *_wrapped("  ", problem.seen), *(f"  - {text}" for text in suggestion.evidence), ""]
    skip = [one for one in suggestion.found if isinstance(one, Card) and one.standing.word == "skip"]
    others = [one for one in suggestion.found if one not in skip]
    for one in others[:MOST]:
        if one.name in told:
            lines += [f"  {one.name}: see above.", ""]
        else:
            lines += [*(_method(one, suggestion, host) if isinstance(one, Card) else _answer(one, host)), ""]
    told |= {one.name for one in others[:MOST]}
    for word, left in (("Further", others[MOST:]), ("Skip", skip)):
        if left:
            lines += _wrapped("  ", f"{word}: {', '.join(one.name for one in left)} (docs/choose.md).")
    return "\n".join(lines).rstrip()


def _answer(answer: Answer, host: str) -> Iterator[str]:
    where = host if host in answer.use else next(iter(answer.use))
    of = {"option": f"option of {where}", "elsewhere": "no answer here"}.get(answer.kind, answer.kind)
    yield from _wrapped("  ", f"{answer.name}, {of}: {answer.does}.")
    yield f"      use:      {answer.use[where]}"


def _method(card: Card, suggestion: Suggestion, host: str) -> Iterator[str]:
    of_parts = f"see its parts: {', '.join(card.parts)}" if len(card.parts) > 1 else ""
    lacks = suggestion.lacking.get(card.name)
    yield from _wrapped("  ", f"{card.name}, method ({card.standing.word}): {card.does}.")
    for name, text in (
        ("for", card.good),
        ("against", card.standing.against[0] if card.standing.against else ""),
        ("lacks", lacks.text if lacks else ""),
        ("not when", of_parts or card.avoid_when),
    ):
        if text:
            yield from _wrapped(f"      {name + ':':<10}", text)
    yield f"      use:      {line_of(card, host)}"


def _wrapped(head: str, text: str) -> list[str]:
    width = min(WIDEST, shutil.get_terminal_size().columns)
    indent = " " * max(len(head), 6)
    return textwrap.wrap(head + text, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def plain(advice: Advice) -> dict[str, Any]:
    """The advice as plain data. `answers` has everything in its order: the nearest to the sentence, a problem as its
    answers."""
    of_problem = {s.problem: [_plain(one, s, advice.host) for one in s.found] for s in advice.suggestions}
    first = [
        one
        for hit in advice.nearest
        for one in (of_problem.get(hit.name, []) if hit.kind == "problem" else [_plain(hit.found, None, advice.host)])
    ]
    answers: dict[str, dict[str, Any]] = {}
    for one in [*first, *(one for found in of_problem.values() for one in found)]:
        answers.setdefault(one["name"], one)
    return {
        "host": advice.host,
        "logs": None if advice.source is None else {"file": str(advice.source.file), "steps": advice.source.steps},
        "nearest": [{"kind": hit.kind, "name": hit.name, "score": round(hit.score, 2)} for hit in advice.nearest],
        "answers": list(answers.values()),
        "problems": [
            {
                "problem": s.problem,
                "title": PROBLEMS[s.problem].title,
                "evidence": list(s.evidence),
                "answers": [one["name"] for one in of_problem[s.problem]],
            }
            for s in advice.suggestions
        ],
        "no_problem_in": list(advice.read),
        "not_told": dict(advice.not_told),
    }


def _plain(one: Any, suggestion: Suggestion | None, host: str) -> dict[str, Any]:
    if isinstance(one, Answer):
        return {"kind": one.kind, "name": one.name, "does": one.does, "use": dict(one.use)}
    lacks = suggestion.lacking.get(one.name) if suggestion else None
    return {
        "kind": "method",
        "name": one.name,
        "does": one.does,
        "standing": one.standing.word,
        "for": one.standing.good,
        "against": one.standing.bad,
        "lacks": dict(lacks.values) if lacks else {},
        "not_when": one.avoid_when,
        "cost": one.cost,
        "fidelity": one.fidelity,
        "measured": [
            {"claim": m.claim, "better": m.better, "numbers": m.numbers, "where": m.where} for m in one.measured
        ],
        "use": {h: line_of(one, h) for h in one.hosts if h in ("trl", "verl")},
    }
