"""From questions, a sentence, or the logs of a run to its problems, and what answers them in which order."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rl_plugins.cards.catalog import Card, answering, cards, in_order
from rl_plugins.cards.problems import ANSWERS, PROBLEMS, Answer
from rl_plugins.cards.usage import Needs, is_asynchronous, needs_of_run
from rl_plugins.commands.suggest.run_logs import RunLogs
from rl_plugins.commands.suggest.search import Hit, search
from rl_plugins.commands.suggest.symptoms import Sign, not_told, signs_of
from rl_plugins.core.errors import ConfigError

SAID = "you say: "  # begins the evidence that is a sentence of the user
NEAREST = 3  # hits of a sentence that are shown
CLOSE = 0.5  # score of a hit, as a share of the best one's, from which on it counts beside that


@dataclass(frozen=True)
class Suggestion:
    """One problem of a run, and what answers it.

    Attributes:
        problem: key of `PROBLEMS`.
        evidence: what points to it.
        found: methods that helped, then options of the host and commands, then other methods.
        lacking: method -> what it needs and the config of the run does not have.
    """

    problem: str
    evidence: tuple[str, ...]
    found: tuple[Card | Answer, ...]
    lacking: Mapping[str, Needs] = field(default_factory=dict)


@dataclass(frozen=True)
class Advice:
    """What `suggest` found.

    Attributes:
        host: whose config lines are shown.
        guessed: nobody said which.
        nearest: to the sentence, the nearest first.
        source: the logs that were read; None without logs.
        read: values of the logs in which no problem shows.
        not_told: problem -> why the logs say nothing of it.
    """

    host: str
    suggestions: tuple[Suggestion, ...]
    nearest: tuple[Hit, ...] = ()
    source: RunLogs | None = None
    read: tuple[str, ...] = ()
    not_told: Mapping[str, str] = field(default_factory=dict)
    guessed: bool = False


@dataclass(frozen=True)
class Asked:
    """Whose advice is wanted.

    Attributes:
        host: the trainer; None if nobody said so.
        run: values of the config; None without a config.
    """

    host: str | None
    run: Mapping[str, object] | None = None


def joined(suggestions: Sequence[Suggestion]) -> tuple[Suggestion, ...]:
    """Every problem once, with all that points to it."""
    found: dict[str, Suggestion] = {}
    for s in suggestions:
        before = found.get(s.problem)
        found[s.problem] = replace(s, evidence=before.evidence + s.evidence) if before else s
    return tuple(found.values())


def known() -> str:
    """The problems there are, for messages."""
    named = (f"{p.title.lower()} ({p.words.partition(';')[0]})" for p in PROBLEMS.values())
    return f"Known problems: {'; '.join(named)}."


# ---- three ways to a problem


def from_text(text: str, asked: Asked) -> Advice:
    """What a sentence speaks of. Without a host, answers of both are looked for.

    Raises:
        ConfigError: nothing that is known.
    """
    hits = search(text, asked.host)
    if not hits:
        raise ConfigError(f"{text!r} names no problem that is known. {known()}")
    told = asked.host or ("verl" if re.search(r"\bverl\b|main_ppo", text) else None)
    asked = replace(asked, host=told or "trl")
    keys = [h.name for h in hits[:NEAREST] if h.kind == "problem" and h.score >= CLOSE * hits[0].score]
    near = {h.name: h.score for h in hits if h.score >= CLOSE * hits[0].score}
    said = (f"{SAID}{text}",) if keys else ()  # else the problem is that of the nearest answer, not of the words
    found = tuple(suggestion(key, said, asked, near=near) for key in keys or hits[0].problems[:1])
    return Advice(asked.host or "trl", found, tuple(hits[:NEAREST]), guessed=told is None)


def from_logs(logs: RunLogs, asked: Asked) -> Advice:
    """The problems that show in the logs of a run, the strongest first."""
    signs = signs_of(logs)
    asked = replace(asked, host=asked.host or logs.host)
    holding: dict[str, list[Sign]] = {}
    for sign in sorted((s for s in signs if s.holds), key=lambda s: -s.strength):
        holding.setdefault(sign.problem, []).append(sign)
    turns = "agents" in holding
    found = tuple(suggestion(key, tuple(s.text for s in held), asked, turns) for key, held in holding.items())
    read = tuple(s.text for s in signs if not s.holds)
    return Advice(asked.host or logs.host, found, source=logs, read=read, not_told=not_told(signs, logs))


def from_questions(asked: Asked) -> Advice:
    import typer

    print("What do you see in your run?\n")
    keys, host = list(PROBLEMS), asked.host
    for number, problem in enumerate(PROBLEMS.values(), 1):
        print(f"  {number:2d}  {problem.title}. {problem.seen}")
    while True:
        given = typer.prompt("\nNumbers, or a sentence")
        if not re.fullmatch(r"[\d\s,]+", given):
            try:
                chosen = [s.problem for s in from_text(given, asked).suggestions]
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
    asked = replace(asked, host=host)
    return Advice(host, tuple(suggestion(key, (), asked) for key in dict.fromkeys(chosen)))


def suggestion(
    key: str, evidence: tuple[str, ...], asked: Asked, turns: bool = True, near: Mapping[str, float] | None = None
) -> Suggestion:
    """What answers a problem.

    Args:
        turns: the run may have agents; else methods for them are left out.
        near: name -> score of what is close to the sentence. Of equal promise, the nearer method comes first.
    """
    near = near or {}
    found = [c for c in answering(key, cards()) if asked.host in c.hosts and (turns or "agents" not in c.problems)]
    run = asked.run
    lacking = {c.name: needs_of_run(c, is_asynchronous(run)).beyond(run) for c in found} if run is not None else {}
    found.sort(key=lambda c: (c.promise, c.name in lacking and bool(lacking[c.name].values), -near.get(c.name, 0)))
    of_host = [answer for answer in ANSWERS if key in answer.problems and asked.host in answer.use]
    return Suggestion(key, evidence, in_order(found, of_host), lacking)
