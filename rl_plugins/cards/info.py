"""`rl-plugins info`: one screen of a method or another answer, or everything about it; several names together."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rl_plugins.cards import screen, together
from rl_plugins.cards.catalog import (
    FIDELITY,
    Card,
    card_of,
    example_of,
    hosts_of,
    index,
    indexed,
    modes_of,
    needs_of,
    preset_text,
    verl_modes_of,
)
from rl_plugins.cards.claims import claim_lines, claims
from rl_plugins.cards.problems import ANSWERS, HOSTS, PROBLEMS, Answer
from rl_plugins.cards.quality import quality_lines
from rl_plugins.cards.results import Result, measured_of
from rl_plugins.cards.usage import Usage, asynchronous_lines, line_of, needs_of_run, usage_of
from rl_plugins.core.errors import RLPluginsError
from rl_plugins.core.method import Bundle, Method
from rl_plugins.core.params import describe_params
from rl_plugins.runtime import registry
from rl_plugins.runtime.card_file import CardFile, Paper, card_file
from rl_plugins.tools import supervised

Sections = list[tuple[str, str]]
FEW = 6  # lines against a method
ALL = "update rule, all measurements, logs, paper and code, sources, citation"


def print_info(name: str, as_json: bool = False, everything: bool = True) -> None:
    """A method, bundle, supervised loss, or other answer that `suggest` names; as JSON: its name, and each section as a
    text, always all of them.

    Args:
        everything: False: one screen.

    Raises:
        ConfigError: no such name, or it cannot be used.
    """
    other = named(name)
    whole = everything or as_json
    if name in supervised.LOSSES:
        head, sections = _of_loss(supervised.card_of(name))
        sections = sections if whole else screen.of_loss(sections)
    elif other and name not in registry.all_names():
        head, sections = _of_other(other)
        whole = True
    else:
        found = registry.load(name)
        head, sections = _of_method(found) if whole else screen.screen(found, excludes(card_of(found)))
    if as_json:
        print(json.dumps({"name": name, **dict(sections)}, indent=2))
        return
    print(_page(head, sections))
    if not whole:
        print(f"\n`rl-plugins info {name} --all`: {ALL}.")


def print_together(names: Sequence[str], as_json: bool = False) -> None:
    """Whether methods and bundles go together in one run, in which hosts, and what to leave out if not.

    Raises:
        ConfigError: no such method, or one that cannot be used.
    """
    found = together.together(names)
    print(json.dumps(together.plain(found), indent=2) if as_json else together.text(found))


def named(name: str) -> Answer | None:
    """The option, command or page of this name; else the one whose lines alone have it as a word."""
    found = [answer for answer in ANSWERS if answer.name == name]
    word = re.compile(rf"(?<![\w.]){re.escape(name)}(?![\w.])|(?<=\.){re.escape(name)}(?==)")
    found = found or [answer for answer in ANSWERS if any(word.search(line) for line in answer.use.values())]
    return found[0] if len(found) == 1 else None


def _page(head: str, sections: Sections) -> str:
    return "\n\n".join([head, *(f"{title}\n{_indented(text)}" for title, text in sections)])


def _of_other(answer: Answer) -> tuple[str, Sections]:
    lines = {host: answer.use.get(host, "no such option") for host in HOSTS}
    use = [("How to use", lines["trl"])] if len(set(lines.values())) == 1 else list(lines.items())
    problems = _listed(PROBLEMS[p].title for p in answer.problems)
    texts = {"Not when": answer.against, "What it costs": answer.cost, "Watch": answer.watch}
    told = [(title, f"{text}." if text else "") for title, text in texts.items()]
    sections = [*told, *use, ("Problems it answers", problems)]
    return f"{answer.name}: {answer.does}.", [(title, text) for title, text in sections if text]


def info_of_loss(card: supervised.SupervisedLoss) -> str:
    """The text of `rl-plugins info` of a loss for supervised trainers."""
    return _page(*_of_loss(card))


def _of_loss(card: supervised.SupervisedLoss) -> tuple[str, Sections]:
    start = "\n".join(f"{host}: {command}" for host, command in card.start.items())
    file, results = card_file(card.name), measured_of(card.name)
    assert file.paper is not None
    sections = [
        ("What", card.about),
        ("Use it when", file.use_when),
        ("Not when", file.avoid_when),
        ("What it costs", file.cost),
        ("What we measured", _listed(map(measured_text, results)) or "Nobody measured it yet."),
        ("Parameters", "\n".join(_parameter(row, None) for row in describe_params(card.params))),
        ("Where paper and code differ", _listed(file.disagreements)),
        ("What is not known", _listed(o.text for o in file.open)),
        ("Fidelity", f"{card.fidelity}: {FIDELITY[card.fidelity]}."),
        ("How to start", f"It is no method: `methods` does not take it. docs/supervised.md shows both hosts.\n{start}"),
        ("Source", _source(file.paper)),
        ("How to cite", file.paper.bibtex(card.name)),
    ]
    return f"{card.name}: {file.paper.title}\n{card.does}.", sections


def info(found: type[Method] | Bundle) -> str:
    """The text of `rl-plugins info`."""
    return _page(*_of_method(found))


def _of_method(found: type[Method] | Bundle) -> tuple[str, Sections]:
    card = card_of(found)
    sections: Sections = [
        ("Whether to use it", _standing(card)),
        ("Use it when", "" if isinstance(found, Bundle) else card.file.use_when),
        ("Not when", card.avoid_when),
        ("What it costs", card.cost),
        (
            "To copy",
            "\n".join(
                [f"{h}: {line_of(card, h)}" for h in HOSTS if h in card.hosts]
                + [f"{h}, asynchronous: {line}" for h, line in asynchronous_lines(found).items()]
                + [*needs_of_run(card).notes]
            ),
        ),
    ]
    if isinstance(found, Bundle):
        parts = "".join(f"\n  {part}{preset_text(values)}" for part, values in found.parts.items())
        sections.append(("What", f"{card.file.about}\n\nStands for, with the settings of the paper:{parts}"))
    else:
        sections.append(("What", inspect.cleandoc(found.__doc__ or "No description.")))
    sections.append(("Problems it answers", _listed(PROBLEMS[p].title for p in found.problems if p in PROBLEMS)))
    sections.append(("In which worlds", _listed(card.standing.worlds)))
    sections.append(("What the paper claims", _listed(claim_lines(found.name))))
    measured, gradients = _listed(map(measured_text, card.measured)), _listed(quality_lines(found.name))
    sections.append(("What we measured", measured or ("" if gradients else "Nobody measured it yet.")))
    sections.append(("How good its gradient is", gradients))
    sections.append(("Goes with", _listed(f"{name}: {why}" for name, why in card.goes_with.items())))
    sections.append(("Excludes", _listed(f"{', '.join(names)}: {reason}" for reason, names in excludes(card).items())))
    if isinstance(found, Bundle):
        sections.append(("Parameters", "Of its parts, under their names: see `rl-plugins info` of each."))
    else:
        sections.append(("Parameters", _parameters(found)))
        sections.append(("Logs", _listed(f"{name}: {text}" for name, text in card.file.logs.items())))
        sections.append(("Changes", "\n".join(_changes(found))))
        sections.append(("Needs", _listed(needs_of(found))))
        sections.append(("Host options it sets", _listed(options_text(example_of(found).host_options))))
        sections.append(("Where paper and code differ", _listed(card.file.disagreements)))
        sections.append(("What is not known", _listed(o.text for o in card.file.open)))
        sections.append(("Parameters of the paper", _listed(params_of_paper(card.file))))
        sections.append(("Fidelity", f"{found.fidelity}: {FIDELITY[found.fidelity]}."))
    sections.append(("How to use", "\n".join(_usage(usage_of(found), card))))
    paper = card.file.paper
    if paper:
        sections.append(("Source", _source(paper)))
        sections.append(("How to cite", paper.bibtex(found.name)))
    head = f"{found.name}: {paper.title if paper else 'a method of your own'}" + (
        f"\n{found.does}." if found.does else ""
    )
    return head, [(title, text) for title, text in sections if text.strip()]


def _standing(card: Card) -> str:
    """The verdict, and what speaks for and against it."""
    standing = card.standing
    against = list(standing.against[:FEW]) or [card.bad]
    against += [f"{left} more below"] if (left := len(standing.against) - FEW) > 0 else []
    lines = [f"{standing.word}.", f"for: {card.good}", *(f"against: {text}" for text in against if text)]
    return "\n".join([*lines, *_described(lines, bool(standing.worlds) or "A step makes" in standing.good)])


def _described(lines: Iterable[str], worlds: bool) -> Iterator[str]:
    """Where the tasks and worlds that are named are described."""
    known = {f"`{task}`" for claim in claims() for task in (claim.task, claim.control_place[1])}
    named = dict.fromkeys(task for line in lines for task in re.findall("`[^`]+`", line) if task in known)
    places = [f"{', '.join(named)} in docs/bench.md#tasks (`rl-plugins bench` lists them)"] if named else []
    places += ["worlds in docs/quality.md#worlds"] if worlds else []
    if places:
        yield f"described: {'; '.join(places)}"


def params_of_paper(file: CardFile) -> list[str]:
    """Parameters of the paper's experiments, a line each."""
    return [
        f"{setting}: {', '.join(f'`{name}: {json.dumps(value)}`' for name, value in values.items())}"
        for setting, values in file.paper_params.items()
    ]


def measured_text(measured: Result) -> str:
    """One result as a line, with its place in the pages."""
    return f"{measured.line} (docs/{measured.page}#{measured.where})"


def excludes(card: Card) -> Mapping[str, Sequence[str]]:
    """Reason -> built-in and installed methods that cannot run beside this one."""
    known = [indexed(name) for name in registry.all_names()]
    if card.name in index() and all(known):  # nothing else is installed
        kept: Mapping[str, Sequence[str]] = index()[card.name]["excludes"]
        return kept
    from rl_plugins.cards.pairs import conflicts, excluded  # builds every pair: loads the runtime

    classes = []
    for name in registry.all_names():
        with suppress(RLPluginsError):  # `list` says what is wrong with it
            classes.append(registry.load(name))
    found = conflicts(tuple(cls for cls in classes if not isinstance(cls, Bundle)))
    return excluded(found, card.parts)


def _listed(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())


def _parameters(cls: type[Method]) -> str:
    rows = describe_params(cls.Params)
    if not rows:
        return "None."
    file = card_file(cls)
    examples = {**file.examples, **file.example_params}
    return "\n".join(_parameter(row, examples.get(row["name"])) for row in rows)


def _parameter(row: Mapping[str, str], example: Any) -> str:
    about = f"{row['type']}{', ' + row['range'] if row['range'] else ''}"
    text = f"{row['name']} = {row['default']}   ({about})\n    {meaning(row)}"
    example = example or row["example"]
    return text + (f"\n    example: {example}" + _source_of(example) if example else "")


def _source_of(example: Any) -> str:
    """The code of an example function, two lines of it or all."""
    if not isinstance(example, str) or not example.startswith("rl_plugins.lab.demo.functions:"):
        return ""
    from rl_plugins.core.params import resolve_callable

    code = inspect.getsource(resolve_callable(example, "example"))
    return "".join(f"\n        {line}" for line in code.rstrip().splitlines())


def meaning(row: Mapping[str, str]) -> str:
    """Help of a parameter, and when it has an effect."""
    return f"{row['help']} [only if {row['only_if']}]" if row["only_if"] else row["help"]


def _changes(cls: type[Method]) -> Iterable[str]:
    yield f"{', '.join(cls.claims()) or 'nothing'} (hosts: {', '.join(hosts_of(cls)) or 'none yet'})"
    made = example_of(cls)
    if "trl" in hosts_of(cls):
        served = "TRL's asynchronous trainer" in modes_of(cls)
        yield f"TRL's asynchronous trainer: {'served' if served else 'not served'}."
    if "verl" in hosts_of(cls):
        yield f"trainer.v1.trainer_mode of verl: {', '.join(verl_modes_of(cls))}."
    if made.rounds:
        yield "Generates in rounds: later rollouts depend on the rewards of earlier ones."
    if cls.in_eval:
        yield f"Also in evaluation: {', '.join(cls.in_eval)}."
    if made.aggregation == "none":
        yield "Makes no optimizer step at all."


def options_text(options: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Host options that a method sets, a line each."""
    return [f"{host}: {option} = {value!r}" for host, values in options.items() for option, value in values.items()]


def _usage(usage: Usage, card: Card) -> Sequence[str]:
    """A config to copy for every host and every place."""
    settings = card.file.paper_settings
    lines = [f"With host options of the paper: {', '.join(settings)}."] if settings else []
    lines += usage.notes
    if "trl" in usage.hosts:
        lines += ["TRL, in the YAML config of a run:", *(f"    {line}" for line in usage.yaml().splitlines())]
        lines += ["TRL, on the command line:", f"    {usage.command_of_trl} --config run.yaml {usage.flags()}"]
        module, kind = ("rl_plugins.trl.masked", "Masked") if usage.masked else ("rl_plugins.trl", "")
        names = f"from {module} import {kind}GRPOConfig, {kind}GRPOTrainer"
        lines += [f"TRL, in Python ({names}):", f"    {usage.python()}"]
    if "verl" in usage.hosts:
        lines += ["verl:", *(f"    {line}" for line in usage.command().splitlines())]
        if usage.options["verl"].get("actor_rollout_ref.rollout.name") == "hf_cpu":
            lines.append(
                "hf_cpu is an engine for machines without a GPU. docs/verl_cpu.md has the settings of such a run."
            )
    if "diffusion" in usage.hosts:
        lines += ["Diffusion (from rl_plugins.diffusion import DiffusionConfig):", f"    {usage.python_of_diffusion()}"]
    return lines


def _source(paper: Paper) -> str:
    code = f"\nhttps://github.com/{paper.code}" if paper.code else ""
    return f"{paper.authors}, {paper.year}\n{paper.url}{code}"
