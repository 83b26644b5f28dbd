"""The page docs/choose.md, which begins with the problem of a run, and the generated parts of the README."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

from rl_plugins.cards.catalog import FIDELITY, Card, answering, cards, in_order, plugins
from rl_plugins.cards.pairs import Conflict, conflicts
from rl_plugins.cards.problems import ANSWERS, PROBLEMS, Answer, Problem
from rl_plugins.cards.screen import for_and_against
from rl_plugins.cards.standing import WORDS
from rl_plugins.core.method import Bundle
from rl_plugins.lab.bench import page as bench
from rl_plugins.lab.pages.methods import bullets, measured, slug, table, with_links
from rl_plugins.lab.pages.parts import renewed

_ORDER = """\
What to use was measured: by the claims of papers on [the bench](bench.md), against GRPO, at equal tokens and against
the host's own way; and by [the quality of gradients](quality.md) in exact worlds. **Use**: it helped, and nothing
speaks against it; no method has that yet. **Use if**: it did in some places and not in others, which are named.
**Skip**: it did harm, or no more than the host's own way. **Unknown**: these runs cannot see it, or nothing was run.
Policies are small and tasks generated: look at the condition, not at the size.

Names like `difficulty=tail` are [tasks of the bench](bench.md#tasks); [**worlds**](quality.md#worlds) have an exact
gradient, with which a step is compared. The host's own way is a setting: `grpo, 4 rollouts` is `num_generations: 4`
(verl: `rollout.n=4`) at as many rollouts, so of more prompts; `reinforce, 1 rollout` has one rollout per prompt, and no
group.
"""
_SHORT = """\
# Which method is for me

<!-- Written by `make docs`; do not edit. -->

Take the problem of your run, and try its answers in their order. `rl-plugins suggest` finds the problem from a sentence
or from the logs of a run. `rl-plugins info NAME` says when not to use a method, what it costs and what to copy;
`rl-plugins info A B` whether two go together.

Verdicts come from [small runs](bench.md) beside GRPO and the host's own options, and from
[simulations](quality.md) whose exact gradient is known. **Use**: it helped, and nothing speaks against it; no method
has that yet. **Use if**: it did in places. **Skip**: it did harm, or no more than the host's own way. **Unknown**: our
runs cannot tell. `rl-plugins suggest --answers` prints all answers, a line each, for a language model to choose from.

"""
_HEAD = f"""\
# Which method is for me

Begin with the problem of your run. `rl-plugins suggest` does the same from questions, from a sentence, or from the logs
of a run; `rl-plugins info NAME` has a config to copy for each method.

{_ORDER}
Figures behind "Measured" are those of [the evidence](evidence.md), small policies and simulations.
"""


def index() -> str:
    """The short page docs/choose.md: a screen for each problem. Installed plugins are not part of it."""
    found = cards(plugins())
    text = [_SHORT + _contents()]
    for key, problem in PROBLEMS.items():
        by_word = {word: [c for c in answering(key, found) if c.standing.word == word] for word in WORDS}
        text += [f"## {problem.title}", f"{problem.seen} Watch: {problem.watch}."]
        used = [
            (word, [c for c in by_word[word] if bool(c.promise) == later]) for later in (0, 1) for word in WORDS[:2]
        ]
        blocks = [_block(word, of) if of else "" for word, of in used]
        others = [_without(of) for of in [_others(key)] if of]
        text += [*filter(None, blocks[:2]), *others, *filter(None, blocks[2:])]
        text += [_folded(word.capitalize(), [*map(_link, by_word[word])]) for word in WORDS[2:] if by_word[word]]
    return "\n\n".join(text) + "\n"


def _block(word: str, found: Sequence[Card]) -> str:
    """Methods of one verdict and one promise."""
    why = "" if found[0].standing.helped else f": {found[0].standing.meaning}"
    return f"**{word.capitalize()}**{why}\n\n{bullets(map(_short, found))}"


def _without(answers: Sequence[Answer]) -> str:
    """Options, commands and pages; of many, the first with what they do."""
    more = ", ".join(f"`{answer.name}`" for answer in answers[FEW:])
    shown = [*map(_other, answers[:FEW]), *([f"{more} (`rl-plugins info NAME`)"] if more else [])]
    return f"**Without a method**\n\n{bullets(shown)}"


def _folded(word: str, methods: Sequence[str]) -> str:
    """Methods of one verdict in the order of `suggest`; many are folded."""
    if len(methods) <= FEW:
        return f"**{word}**: {', '.join(methods)}."
    return f"<details><summary><b>{word}</b>: {len(methods)} methods</summary>\n\n{', '.join(methods)}.\n\n</details>"


def _short(card: Card) -> str:
    """What it does, what speaks for and against it, and when to use it: a few words each; `info` has the rest."""
    told = [f"{_link(card)} {card.does}."]
    if not card.standing.helped:
        return told[0]
    good, against = for_and_against(card)
    told += [f"{good[0].upper()}{good[1:]}.", *(f"Against: {text}." for text in against[:1])]
    return " ".join([*told, *[f"If: {_first(card.use_when)}"] * (card.entry.kind == "method")])


def _first(text: str) -> str:
    """The first sentence."""
    return text.partition(". ")[0].rstrip(".") + "."


def _others(problem: str) -> list[Answer]:
    return [answer for answer in ANSWERS if problem in answer.problems]


def _other(answer: Answer) -> str:
    long = any(len(line) > LONGEST for line in answer.use.values())
    uses = [f"rl-plugins info {answer.name}"] if long else answer.use.values()
    lines = dict.fromkeys(" and ".join(f"`{key}`" for key in line.splitlines()) for line in uses)
    only = f" ({next(iter(answer.use))} only)" if len(answer.use) == 1 else ""
    return f"{answer.does}{only}: {' or '.join(lines)}"


def _link(card: Card) -> str:
    return f"[`{card.name}`](methods.md#{card.name})"


def page() -> str:
    """The page of the site, with the card of each method and the combinations. Installed plugins are not part of it."""
    found = cards(plugins())
    text = [_HEAD + "\n" + _contents()]
    for key, problem in PROBLEMS.items():
        text.append(_section(problem, answering(key, found)))
    text.append(_fidelity())
    text.append("## Combinations that make sense\n\n" + _together(found))
    classes = [card.found for card in sorted(found, key=lambda card: card.name)]
    excluding = conflicts(tuple(cls for cls in classes if not isinstance(cls, Bundle)))
    text.append("## Combinations that exclude each other\n\n" + _apart(excluding))
    return "\n\n".join(text) + "\n"


def _contents() -> str:
    return bullets(f"[{p.title}](#{slug(p.title)})" for p in PROBLEMS.values())


def _section(problem: Problem, found: list[Card]) -> str:
    return "\n\n".join([f"## {problem.title}", problem.seen, *map(_card, found)])


def _card(card: Card) -> str:
    lines = [f"[`{card.name}`](methods.md#{card.name}) {card.does}."]
    if card.avoid_when:
        lines.append(f"Not when: {card.avoid_when}")
    if card.cost:
        lines.append(f"Cost: {card.cost}")
    lines.append(with_links(f"{card.standing.word.capitalize()}. {card.standing.why}".rstrip()))
    lines.append(f"Measured: {measured(card.measured)}")
    lines.append(f"Fidelity: {card.fidelity}. Hosts: {', '.join(card.hosts)}.")
    return f"- {lines[0]}\n" + "\n".join(f"  - {line}" for line in lines[1:])


def _fidelity() -> str:
    return "## Fidelity\n\n" + bullets(f"**{name}**: {text}." for name, text in FIDELITY.items() if name != "own")


def _together(found: list[Card]) -> str:
    pairs: dict[frozenset[str], str] = {}
    skip = {card.name for card in found if card.standing.word == "skip"}
    for card in sorted(found, key=lambda card: card.name):
        for other, why in card.file.goes_with.items():
            named = " and ".join(f"`{name}`{' (skip)' * (name in skip)}" for name in (card.name, other))
            pairs.setdefault(frozenset((card.name, other)), f"{named}: {why}")
    return bullets(pairs.values()) if pairs else "None is known."


def _apart(found: Sequence[Conflict]) -> str:
    intro = (
        "Computed: every pair of methods was built and checked as a run checks it, with the parameters that must be "
        "given and defaults for the others. Every other pair can run together in a run that has what both need. A "
        "bundle excludes what its parts exclude.\n\n"
    )
    return intro + "\n\n".join(_conflicts(found))


def _conflicts(found: Sequence[Conflict]) -> Iterator[str]:
    for reason in dict.fromkeys(c.reason for c in found):
        groups = [c for c in found if c.reason == reason]
        if not groups[0].second:
            yield f"**{reason}**\n\n" + bullets(f"one of {_names(c.first)}" for c in groups)
        else:
            yield f"**{reason}**\n\n" + "\n".join(
                f"- The first: {_names(c.first)}\n  - The second: {_names(c.second)}" for c in groups
            )


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _filled(text: str) -> str:
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


_HOST = {"trl": "TRL", "verl": "verl"}
FEW = 6  # names that are not folded
LONGEST = 80  # characters of an option; of a longer one `info` has the lines


def readme(text: str) -> str:
    """`README.md` with its number of papers, its table of problems and its sentence on the bench renewed.

    Raises:
        ConfigError: the marks around a part are missing.
    """
    found = cards(plugins())
    papers = {card.file.paper.arxiv for card in found if card.file.paper and not card.file.asked_for}
    text = re.sub(r"Methods of \d+ papers", f"Methods of {len(papers)} papers", text)
    rows = [[f"[{p.title}](docs/choose.md#{slug(p.title)})", _tried_first(key, found)] for key, p in PROBLEMS.items()]
    words = "\n".join(map(_filled, bench.headline().splitlines()))
    return renewed(renewed(text, "problems", table(["problem", "first"], rows)), "bench", words)


def _tried_first(key: str, found: Sequence[Card]) -> str:
    """What is first in the order of `suggest`: two methods that helped, an option of a host, a command, or two methods
    for which their gradients speak."""
    used = [card for card in answering(key, found) if card.standing.word in WORDS[:2]]
    others = [answer for answer in _others(key) if answer.kind in ("option", "tool")]
    ordered = in_order(used, others)
    if not ordered:
        return "nothing was seen to help in our runs"
    first = ordered[0]
    if isinstance(first, Card):
        word = "helped" if first.standing.helped else first.standing.meaning
        links = (
            _link(card).replace("methods.md", "docs/methods.md") for card in used[:2] if card.promise == first.promise
        )
        return f"{', '.join(links)}: {word}"
    if first.kind == "tool":
        return f"`{next(iter(first.use.values()))}`"
    *some, last = (_HOST[host] for host in first.use)
    return f"option: `{_option(first)}` ({''.join(f'{host}; also ' for host in some)}{last})"


def _option(answer: Answer) -> str:
    """The name of the option in the first host that has it, without the section of the config it is in."""
    line = next(iter(answer.use.values()))
    return re.split(r"[:=\n]", line)[0].rpartition(".")[2].rpartition(" ")[2]
