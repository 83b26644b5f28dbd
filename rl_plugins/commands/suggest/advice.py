"""From questions, a sentence, or the logs of a run to the methods for its problem, and how that is shown."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rl_plugins.cards.catalog import Card, answering, cards
from rl_plugins.cards.problems import PROBLEMS
from rl_plugins.cards.usage import line_of
from rl_plugins.commands.suggest.run_logs import RunLogs
from rl_plugins.commands.suggest.symptoms import Sign, not_told, signs_of
from rl_plugins.core.errors import ConfigError

MOST = 5  # methods shown per problem
RESULTS = 3  # of ours, per method
_NO_MEANING = frozenset(
    "a an and are as at be by do for from get has have in is it its my of on or our so that the to was with".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Suggestion:
    """One problem of a run, and what answers it.

    Attributes:
        problem: key of `PROBLEMS`.
        evidence: what points to it.
        methods: cards, the best first.
    """

    problem: str
    evidence: tuple[str, ...]
    methods: tuple[Card, ...]


@dataclass(frozen=True)
class Advice:
    """What `suggest` found.

    Attributes:
        host: whose config lines are shown.
        source: the logs that were read; None without logs.
        read: values of the logs in which no problem shows.
        not_told: problem -> why the logs say nothing of it.
    """

    host: str
    suggestions: tuple[Suggestion, ...]
    source: RunLogs | None = None
    read: tuple[str, ...] = ()
    not_told: Mapping[str, str] = field(default_factory=dict)


def joined(suggestions: Sequence[Suggestion]) -> tuple[Suggestion, ...]:
    """Every problem once, with all that points to it."""
    found: dict[str, Suggestion] = {}
    for s in suggestions:
        before = found.get(s.problem)
        found[s.problem] = replace(s, evidence=before.evidence + s.evidence) if before else s
    return tuple(found.values())


def known() -> str:
    """The problems there are, for messages."""
    return "Known problems: " + "; ".join(f"{p.title.lower()} ({p.words[0]})" for p in PROBLEMS.values()) + "."


# ---- three ways to a problem


def from_text(text: str, host: str) -> Advice:
    """The problems that a sentence speaks of.

    Raises:
        ConfigError: none that is known.
    """
    scores = {key: _score(text, [p.title, *p.words]) for key, p in PROBLEMS.items()}
    best = max(score for score, _ in scores.values())
    if best < 1:
        raise ConfigError(f"{text!r} names no problem that is known. {known()}")
    found = sorted((key for key in scores if scores[key][0] >= max(1, best - 1)), key=lambda key: -scores[key][0])
    evidence = {key: tuple(f"you say: {phrase}" for phrase in scores[key][1]) for key in found}
    return Advice(host, tuple(_suggestion(key, evidence[key], host) for key in found))


def _score(text: str, phrases: Sequence[str]) -> tuple[int, list[str]]:
    """Words of the phrases that stand in the text whole, each word once, and these phrases."""
    words = _stems(text)
    whole = [phrase for phrase in phrases if all(_is_in(stem, words) for stem in _stems(phrase))]
    return len({stem for phrase in whole for stem in _stems(phrase)}), whole


def _stems(text: str) -> list[str]:
    words = re.findall(r"[a-z0-9@]+", text.lower().replace("off-policy", "offpolicy"))
    return [re.sub(r"(?<=\w{3})(ing|ed|es|s|e)$", "", word) for word in words if word not in _NO_MEANING]


def _is_in(stem: str, words: Sequence[str]) -> bool:
    return stem in words or (len(stem) > 4 and bool(difflib.get_close_matches(stem, words, 1, 0.85)))


def from_logs(logs: RunLogs, host: str | None) -> Advice:
    """The problems that show in the logs of a run, the strongest first."""
    signs = signs_of(logs)
    host = host or logs.host
    holding: dict[str, list[Sign]] = {}
    for sign in sorted((s for s in signs if s.holds), key=lambda s: -s.strength):
        holding.setdefault(sign.problem, []).append(sign)
    turns = "agents" in holding
    found = tuple(_suggestion(key, tuple(s.text for s in held), host, turns) for key, held in holding.items())
    return Advice(host, found, logs, tuple(s.text for s in signs if not s.holds), not_told(signs, logs))


def from_questions(host: str | None) -> Advice:
    import typer

    print("What do you see in your run?\n")
    keys = list(PROBLEMS)
    for number, problem in enumerate(PROBLEMS.values(), 1):
        print(f"  {number:2d}  {problem.title}. {problem.seen}")
    while True:
        given = typer.prompt("\nNumbers, or a sentence")
        if not re.fullmatch(r"[\d\s,]+", given):
            try:
                chosen = [s.problem for s in from_text(given, "trl").suggestions]
                break
            except ConfigError as e:
                print(e)
                continue
        chosen = [keys[int(n) - 1] for n in re.findall(r"\d+", given) if 1 <= int(n) <= len(keys)]
        if chosen:
            break
        print(f"Numbers go from 1 to {len(keys)}.")
    while host not in ("trl", "verl"):
        host = typer.prompt("Which trainer do you run: trl or verl", default="trl").strip().lower()
    return Advice(host, tuple(_suggestion(key, (), host) for key in dict.fromkeys(chosen)))


def _suggestion(key: str, evidence: tuple[str, ...], host: str, turns: bool = True) -> Suggestion:
    """
    Args:
        turns: the run may have agents; else methods for them are left out.
    """
    found = [card for card in answering(key, cards()) if host in card.hosts]
    return Suggestion(key, evidence, tuple(c for c in found if turns or "agents" not in c.problems))


# ---- what is shown


def shown(answer: Advice) -> str:
    """The answer as text for a terminal."""
    parts = [_read(answer.source)] if answer.source else []
    parts += [_problem(s, answer.host) for s in answer.suggestions] or [_nothing(answer)]
    if answer.read:
        parts.append("No problem in\n" + "\n".join(f"  - {text}" for text in answer.read))
    if answer.not_told:
        lines = [f"  - {PROBLEMS[key].title}: {why}." for key, why in answer.not_told.items()]
        parts.append("Could not be told from these logs\n" + "\n".join(lines))
    parts.append("`rl-plugins info NAME` explains one and has the paper's setting to copy.")
    return "\n\n".join(parts)


def _read(logs: RunLogs) -> str:
    """What was read, because a folder may hold several logs, and what the thresholds are worth."""
    return f"Read {logs.file}: {logs.steps} logged steps of {logs.host}. The thresholds below are rules of thumb."


def _nothing(answer: Advice) -> str:
    if len(answer.not_told) > len(answer.read):
        return "These logs are too short, or lack too many values: most problems could not be looked for."
    return "These logs show none of the known problems."


def _problem(suggestion: Suggestion, host: str) -> str:
    problem = PROBLEMS[suggestion.problem]
    lines = [problem.title, f"  {problem.seen}", *(f"  - {text}" for text in suggestion.evidence), ""]
    for card in suggestion.methods[:MOST]:
        lines += _method(card, host)
    left = suggestion.methods[MOST:]
    if left:
        lines.append(f"  Further: {', '.join(card.name for card in left)} (docs/choose.md).")
    return "\n".join(lines)


def _method(card: Card, host: str) -> list[str]:
    results = [m.line for m in card.measured[:RESULTS]]
    if len(card.measured) > RESULTS:
        results.append(f"{len(card.measured) - RESULTS} more in `rl-plugins info {card.name}`")
    of_parts = f"see its parts: {', '.join(card.parts)}" if len(card.parts) > 1 else ""
    return [
        f"  {card.name}: {card.does}.",
        f"      {card.standing.word + ':':<9} {card.standing.why or 'nothing was seen'}",
        f"      measured: {'; '.join(results) or 'nobody measured it yet'}",
        f"      not when: {of_parts or card.avoid_when or '-'}",
        f"      cost:     {of_parts or card.cost or '-'}",
        f"      fidelity: {card.fidelity}",
        f"      use:      {line_of(card, host)}",
        "",
    ]


def plain(answer: Advice) -> dict[str, Any]:
    """The answer as plain data."""
    return {
        "host": answer.host,
        "logs": None if answer.source is None else {"file": str(answer.source.file), "steps": answer.source.steps},
        "problems": [
            {
                "problem": s.problem,
                "title": PROBLEMS[s.problem].title,
                "evidence": list(s.evidence),
                "methods": [
                    {
                        "name": card.name,
                        "does": card.does,
                        "not_when": card.avoid_when,
                        "cost": card.cost,
                        "fidelity": card.fidelity,
                        "standing": card.standing.word,
                        "why": card.standing.why,
                        "measured": [
                            {"claim": m.claim, "better": m.better, "numbers": m.numbers, "where": m.where}
                            for m in card.measured
                        ],
                        "use": line_of(card, answer.host),
                    }
                    for card in s.methods
                ],
            }
            for s in answer.suggestions
        ],
        "no_problem_in": list(answer.read),
        "not_told": dict(answer.not_told),
    }
