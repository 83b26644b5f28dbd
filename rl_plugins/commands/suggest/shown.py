"""Advice as text for a terminal, and as plain data."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from rl_plugins.cards.catalog import Card
from rl_plugins.cards.problems import PROBLEMS, Answer, Problem
from rl_plugins.cards.screen import for_and_against
from rl_plugins.cards.standing import WORDS
from rl_plugins.cards.usage import line_of
from rl_plugins.commands.suggest import search
from rl_plugins.commands.suggest.advice import SAID, Advice, Suggestion
from rl_plugins.commands.suggest.run_logs import RunLogs
from rl_plugins.commands.suggest.search import Hit

MOST = 3  # answers shown per problem
WIDEST = 100


def shown(advice: Advice) -> str:
    """The advice as text for a terminal. Lines to copy are not wrapped."""
    parts = [_read(advice.source)] if advice.source else []
    apart = _apart(advice)
    if apart:
        parts.append("Nearest to your words\n" + "\n\n".join(_found(hit.found, None, advice.host) for hit in apart))
    told = {hit.name for hit in apart}
    parts += [_problem(s, advice, told) for s in advice.suggestions]
    if not advice.suggestions and not advice.nearest:
        parts.append(_nothing(advice))
    if advice.read:
        parts.append("No problem in\n" + "\n".join(f"  - {text}" for text in advice.read))
    if advice.not_told:
        parts.append("Could not be told from these logs\n" + "\n".join(_not_told(advice.not_told)))
    more = "`rl-plugins info NAME`: when not, costs, lines to copy."
    last = [more] * any(s.found for s in advice.suggestions) + ["For verl: `suggest --host verl`."] * advice.guessed
    parts += [" ".join(last)] if last else []
    return "\n\n".join(parts)


def _apart(advice: Advice) -> list[Hit]:
    """Hits that stand in front of the problems: what is nearer to the sentence than any problem that is shown, and what
    answers none of these. The others stand below their problem."""
    keys = [s.problem for s in advice.suggestions]
    first = next((i for i, hit in enumerate(advice.nearest) if hit.name in keys), len(advice.nearest))
    return [
        hit
        for i, hit in enumerate(advice.nearest)
        if hit.kind != "problem" and (i < first or not set(hit.problems) & set(keys))
    ]


def _not_told(why: Mapping[str, str]) -> Iterator[str]:
    """A line for each reason."""
    for reason in dict.fromkeys(why.values()):
        titles = [PROBLEMS[key].title for key, text in why.items() if text == reason]
        yield f"  - {', '.join(titles)}: {reason}."


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
        told = f"{found.does}: {', or '.join(dict.fromkeys(found.in_line(h) for h in found.use if host in (None, h)))}"
    return f"{hit.kind} {hit.name}: {' '.join(told.split())}"


def _read(logs: RunLogs) -> str:
    """What was read, because a folder may hold several logs, and what the thresholds are worth."""
    return f"Read {logs.file}: {logs.steps} logged steps of {logs.host}. The thresholds below are rules of thumb."


def _nothing(advice: Advice) -> str:
    if len(advice.not_told) > len(advice.read):
        return "These logs are too short, or lack too many values: most problems could not be looked for."
    return "These logs show none of the known problems."


def _problem(suggestion: Suggestion, advice: Advice, told: set[str]) -> str:
    """A problem, the first of its answers, and those that are near to the sentence.

    Args:
        told: names that stand above with all there is to say; those of this problem are added.
    """
    problem = PROBLEMS[suggestion.problem]
    evidence = [text for text in suggestion.evidence if not text.startswith(SAID)]
    lines = [problem.title, *_wrapped("  ", problem.seen), *(f"  - {text}" for text in evidence), ""]
    skip = [one for one in suggestion.found if isinstance(one, Card) and one.standing.word == "skip"]
    others = [one for one in suggestion.found if one not in skip]
    near = [h.found for h in advice.nearest if suggestion.problem in h.problems and not isinstance(h.found, Problem)]
    chosen = {one.name: one for one in (*others[:MOST], *near)}
    lines += [f"{_found(one, suggestion, advice.host)}\n" for name, one in chosen.items() if name not in told]
    told |= set(chosen)
    if left := [one.name for one in others if one.name not in told]:
        lines.append(f"  {len(left)} more: docs/choose.md#{problem.anchor}")
    if skip := [one for one in skip if one.name not in told]:
        lines += _wrapped("  ", f"Skip: {', '.join(one.name for one in skip)}")
    return "\n".join(lines).rstrip()


def _found(one: Problem | Card | Answer, suggestion: Suggestion | None, host: str) -> str:
    """An answer: what it does, what speaks for and against it, what to write."""
    assert not isinstance(one, Problem)
    if isinstance(one, Answer):
        where = host if host in one.use else next(iter(one.use))
        of = {"option": f"option of {where}", "elsewhere": "no answer here"}.get(one.kind, one.kind)
        bad = _wrapped("      against: ", one.against) if one.against else []
        use = one.use[where].replace("\n", "\n" + " " * 15)
        return "\n".join([*_wrapped("  ", f"{one.name}, {of}: {one.does}."), *bad, f"      use:     {use}"])
    lacks = suggestion.lacking.get(one.name) if suggestion else None
    good, against = for_and_against(one)
    meaning = f": {one.standing.meaning}" if one.standing.word in WORDS[:2] else ""
    lines = _wrapped("  ", f"{one.name}, method ({one.standing.word}{meaning}): {one.does}.")
    for name, text in (("for", good), ("against", "".join(against[:1])), ("lacks", lacks.text if lacks else "")):
        if text:
            lines += _wrapped(f"      {name + ':':<9}", text)
    return "\n".join([*lines, f"      use:     {line_of(one, host if host in one.hosts else one.hosts[0])}"])


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
