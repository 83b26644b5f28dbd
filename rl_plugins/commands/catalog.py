"""`rl-plugins list` and `info`, and the page `docs/methods.md`: all three from the classes themselves."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from rl_plugins.errors import ConfigError, RLPluginsError
from rl_plugins.method import HOOKS, NO_PAPER, SIGNALS, Bundle, Method, Paper
from rl_plugins.params import describe_params, params_to_dict
from rl_plugins.runtime import registry


@dataclass(frozen=True)
class ServedByHost:
    """What the adapter of a host serves in a run with fitting settings; what one run lacks, its own check says.

    Attributes:
        hooks: hooks it serves in training.
        eval_hooks: hooks it serves in evaluation.
        missing: kinds of signals that no run of it has.
    """

    hooks: Collection[str]
    eval_hooks: Collection[str] = ()
    missing: Collection[str] = ()


HOSTS = {
    "trl": ServedByHost(hooks=set(HOOKS), eval_hooks={"plan", "rollout"}),
    "verl": ServedByHost(hooks=set(HOOKS), eval_hooks={"plan", "rollout"}),
}

FIDELITY = {
    "code": "equal to the authors' code: its numbers are stored and compared in the tests",
    "paper": "built from what could be read of the paper, and not compared with code of its authors",
    "reconstruction": "something needed was not published and had to be filled in; the description says what",
    "own": "no paper: a method of its author",
}


@dataclass(frozen=True)
class Entry:
    """One name in the list.

    Attributes:
        kind: "method", "bundle" or "broken".
        distribution: the package it comes from; "rl-plugins" for the built-in ones.
        hooks: what it changes, in the order of a step; the parts of a bundle.
        problem: why it cannot be used, empty if it can.
    """

    name: str
    kind: str
    distribution: str
    arxiv: str = ""
    title: str = ""
    hooks: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    fidelity: str = ""
    problem: str = ""


def entries(vetoed: Collection[str] = ()) -> list[Entry]:
    """Every name there is, without those of vetoed packages ("dist:NAME"). What cannot be loaded is listed with the
    reason and disturbs no other."""
    out = []
    for name in registry.all_names():
        origins = [o for o in registry.origins_of(name) if f"dist:{o.distribution}" not in vetoed]
        if not origins:
            continue
        distribution = " and ".join(o.distribution or "rl-plugins" for o in origins)
        try:
            out.append(_entry(name, distribution, vetoed))
        except RLPluginsError as e:
            out.append(Entry(name, "broken", distribution, problem=str(e)))
    return out


def _entry(name: str, distribution: str, vetoed: Collection[str]) -> Entry:
    found = registry.load(name, vetoed)
    parts = _parts(found, vetoed)
    hosts = [h for h in HOSTS if all(h in hosts_of(cls) for cls in parts)]
    hooks = tuple(found.parts) if isinstance(found, Bundle) else found.claims()
    fidelity = ", ".join(dict.fromkeys(cls.fidelity for cls in parts))
    kind = "bundle" if isinstance(found, Bundle) else "method"
    return Entry(name, kind, distribution, found.paper.arxiv, found.paper.title, hooks, tuple(hosts), fidelity)


def hosts_of(cls: type[Method]) -> list[str]:
    """The hosts whose adapter can serve this class."""
    made = registry.build(cls, dict(cls.example_params), cls.name)  # needs may depend on parameters
    signals = {signal.partition(":")[0] for signal in made.needs}
    return [
        name
        for name, host in HOSTS.items()
        if name in cls.hosts
        and set(cls.claims()) <= set(host.hooks)
        and set(cls.in_eval) <= set(host.eval_hooks)
        and not signals & set(host.missing)
    ]


def _parts(found: type[Method] | Bundle, vetoed: Collection[str] = ()) -> list[type[Method]]:
    if not isinstance(found, Bundle):
        return [found]
    return [part for part in (registry.load(name, vetoed) for name in found.parts) if not isinstance(part, Bundle)]


# ---- list


def print_list(as_json: bool = False) -> None:
    """All methods and bundles, as a table or as JSON."""
    found = entries()
    if as_json:
        print(json.dumps([asdict(e) for e in found], indent=2))
        return
    console = Console()
    usable, broken = [e for e in found if not e.problem], [e for e in found if e.problem]
    for kind, title, changes in (("method", "Methods", "changes"), ("bundle", "Bundles", "stands for")):
        chosen = [e for e in usable if e.kind == kind]
        foreign = any(e.distribution != "rl-plugins" for e in chosen)
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        table.add_column("name", no_wrap=True)
        table.add_column("paper", no_wrap=True)
        for column in (changes, "hosts", "fidelity", *(["package"] if foreign else [])):
            table.add_column(column)
        for e in chosen:
            cells = [e.name, e.arxiv, ", ".join(e.hooks), ", ".join(e.hosts) or "none", e.fidelity]
            table.add_row(*cells, *([e.distribution] if foreign else []))
        if chosen:
            console.print(table)
            console.print()
    if broken:
        console.print("Cannot be used")
        for e in broken:
            console.print(f"  {e.name}: {e.problem}", markup=False, highlight=False)
        console.print()
    print("Use: `methods: [name, name]` in the config of a run. `rl-plugins info NAME` explains one.")


# ---- info


def print_info(name: str) -> None:
    """Everything about one method or bundle.

    Raises:
        ConfigError: no such name, or it cannot be used.
    """
    print(info(registry.load(name)))


def info(found: type[Method] | Bundle) -> str:
    """The text of `rl-plugins info`."""
    sections: list[tuple[str, str]] = []
    if isinstance(found, Bundle):
        parts = "".join(f"\n  {part}{_preset(values)}" for part, values in found.parts.items())
        sections.append(("What", f"{found.about}\n\nStands for, with the settings of the paper:{parts}"))
        sections.append(("Parameters", "Of its parts, under their names: see `rl-plugins info` of each."))
        sections.append(("How to use", _usage(found.name, _parts(found))))
    else:
        sections.append(("What", inspect.cleandoc(found.__doc__ or "No description.")))
        sections.append(("Use it when", found.use_when))
        sections.append(("Not when", found.avoid_when))
        sections.append(("What it costs", found.cost))
        sections.append(("Parameters", _parameters(found)))
        sections.append(("Changes", "\n".join(_changes(found))))
        sections.append(("Needs", "\n".join(_needs(found.needs))))
        sections.append(("Host options it sets", "\n".join(_options(found.host_options))))
        sections.append(("Where paper and code differ", "\n".join(f"- {d}" for d in found.disagreements)))
        sections.append(("Fidelity", f"{found.fidelity}: {FIDELITY[found.fidelity]}."))
        sections.append(("How to use", _usage(found.name, [found])))
    if found.paper is not NO_PAPER:
        sections.append(("Source", _source(found.paper)))
        sections.append(("How to cite", found.paper.bibtex(found.name)))
    head = f"{found.name}: {found.paper.title}"
    return "\n\n".join([head, *(f"{title}\n{_indented(text)}" for title, text in sections if text.strip())])


def _indented(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())


def _parameters(cls: type[Method]) -> str:
    rows = describe_params(cls.Params)
    if not rows:
        return "None."
    return "\n".join(
        f"{r['name']} = {r['default']}   ({r['type']}{', ' + r['range'] if r['range'] else ''})\n    {_meaning(r)}"
        for r in rows
    )


def _meaning(row: Mapping[str, str]) -> str:
    return f"{row['help']} [only if {row['only_if']}]" if row["only_if"] else row["help"]


def _changes(cls: type[Method]) -> Iterable[str]:
    yield f"{', '.join(cls.claims()) or 'nothing'} (hosts: {', '.join(hosts_of(cls)) or 'none yet'})"
    if cls.rounds:
        yield "Generates in rounds: later rollouts depend on the rewards of earlier ones."
    if cls.in_eval:
        yield f"Also in evaluation: {', '.join(cls.in_eval)}."
    if not cls.trains:
        yield "Makes no optimizer step at all."


def _needs(needs: Collection[str]) -> list[str]:
    return [f"- {_signal(signal)}" for signal in sorted(needs)]


def _signal(signal: str) -> str:
    kind, _, detail = signal.partition(":")
    if kind == "column":
        return f"a column `{detail}` in the dataset"
    return SIGNALS.get(signal, f"of the engine: {detail}" if kind == "engine" else signal)


def _options(options: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [f"- {host}: {option} = {value!r}" for host, values in options.items() for option, value in values.items()]


def _preset(values: Mapping[str, Any]) -> str:
    return f" ({', '.join(f'{k} = {v}' for k, v in values.items())})" if values else ""


def _usage(name: str, parts: Sequence[type[Method]]) -> str:
    """How to name a method in every place; with the parameters it cannot do without, or one of them at its default."""
    yaml, flags, keywords = [f"methods: [{name}]"], f"--methods {name}", f'methods=["{name}"]'
    overrides = f'trainer.v1.trainer_mode=rl_plugins_sync "+rl_plugins.methods=[{name}]"'
    shown = {part.name: dict(part.example_params) for part in parts if part.example_params}
    if not shown:
        first = [(k, v) for k, v in params_to_dict(parts[0].Params()).items() if v is not None][:1]
        shown = {parts[0].name: dict(first)} if first else {}
    if shown:
        given = json.dumps(shown)
        yaml.append(f"method_params: {given}")
        flags += f" --method_params '{given}'"
        keywords += f", method_params={shown!r}"
        for part, values in shown.items():
            for key, value in values.items():
                overrides += f' "+rl_plugins.method_params.{part}.{key}={_hydra(value)}"'
    return "\n".join(
        [
            "in a YAML config:",
            *(f"    {line}" for line in yaml),
            "on the command line:",
            f"    rl-plugins trl grpo --config run.yaml {flags}",
            "in Python (from rl_plugins.trl import GRPOConfig, GRPOTrainer):",
            f"    GRPOConfig({keywords})",
            "in verl:",
            f"    python -m verl.trainer.main_ppo .. {overrides}",
        ]
    )


def _hydra(value: Any) -> str:
    """A value as hydra reads it back on a command line, between double quotes of the shell."""
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z_][\w.]*", value):
        return "'" + value.replace("'", "\\'") + "'"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{_hydra(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_hydra, value)) + "]"
    return str(value)


def _source(paper: Paper) -> str:
    code = f"\nhttps://github.com/{paper.code}" if paper.code else ""
    return f"{paper.authors}, {paper.year}\n{paper.url}{code}"


# ---- docs/methods.md

_HEAD = """\
# Methods

Generated from the classes by `rl-plugins docs docs/methods.md`; do not edit. `rl-plugins info NAME` shows the same with
the formulas.

Fidelity says what a method was checked against:

"""


def methods_page() -> str:
    """The page `docs/methods.md`: the built-in methods and bundles. Installed plugins are not part of it."""
    origins = [o for name in registry.all_names() for o in registry.origins_of(name)]
    plugins = {f"dist:{o.distribution}" for o in origins if o.distribution}
    found = entries(plugins)
    text = [_HEAD + "\n".join(f"- **{k}**: {v}." for k, v in FIDELITY.items())]
    rows = ["| name | paper | changes | hosts | fidelity |", "|---|---|---|---|---|"]
    for e in found:
        changes = ", ".join(f"`{h}`" for h in e.hooks)
        paper = f"[{e.arxiv}](https://arxiv.org/abs/{e.arxiv})"
        cells = [f"[{e.name}](#{e.name})", paper, changes, ", ".join(e.hosts) or "none yet", e.fidelity]
        rows.append(f"| {' | '.join(cells)} |")
    text.append("\n".join(rows))
    text += [_section(registry.load(e.name, plugins)) for e in found]
    return "\n\n".join(text) + "\n"


README_START, README_END = "<!-- methods: generated by `make docs` -->", "<!-- end of methods -->"


def readme(text: str) -> str:
    """`README.md` with its table of methods renewed.

    Raises:
        ConfigError: the marks between which the table stands are missing.
    """
    if README_START not in text or README_END not in text:
        raise ConfigError(f"README.md needs the lines {README_START!r} and {README_END!r} around the table of methods.")
    origins = [o for name in registry.all_names() for o in registry.origins_of(name)]
    plugins = {f"dist:{o.distribution}" for o in origins if o.distribution}
    rows = ["| method | paper | use it when | fidelity |", "|---|---|---|---|"]
    for e in entries(plugins):
        found = registry.load(e.name, plugins)
        when = found.about if isinstance(found, Bundle) else found.use_when
        paper = f"[{found.paper.title.split(':')[0].split(',')[0]}]({found.paper.url})"
        rows.append(f"| [`{e.name}`](docs/methods.md#{e.name}) | {paper} | {when} | {e.fidelity} |")
    before, after = text.split(README_START)[0], text.split(README_END)[1]
    return before + "\n".join([README_START, "", *rows, "", README_END]) + after


def _section(found: type[Method] | Bundle) -> str:
    p = found.paper
    code = f" Code: [{p.code}](https://github.com/{p.code})." if p.code else ""
    parts = [f"## {found.name}", f"[{p.title}]({p.url}), {p.authors}, {p.year}.{code}"]
    if isinstance(found, Bundle):
        names = ", ".join(f"[{part}](#{part}){_preset(values)}" for part, values in found.parts.items())
        return "\n\n".join([*parts, f"{found.about} Stands for: {names}."])
    parts.append(inspect.cleandoc(found.__doc__ or "").split("\n\n")[0].replace("\n", " "))
    if found.use_when or found.avoid_when:
        parts.append(f"**Use it when:** {found.use_when}\n\n**Not when:** {found.avoid_when}")
    if found.cost:
        parts.append(f"**What it costs:** {found.cost}")
    if found.needs:
        parts.append("**Needs:** " + "; ".join(_signal(s) for s in sorted(found.needs)) + ".")
    options = _options(found.host_options)
    if options:
        parts.append("**Host options it sets:**\n\n" + "\n".join(options))
    rows = describe_params(found.Params)
    if rows:
        lines = ["| parameter | default | type | range | meaning |", "|---|---|---|---|---|"]
        for r in rows:
            cells = [f"`{r['name']}`", f"`{r['default']}`", r["type"], r["range"], _meaning(r)]
            lines.append("| " + " | ".join(c.replace("|", "\\|").replace("\n", "\\n") for c in cells) + " |")
        parts.append("\n".join(lines))
    if found.disagreements:
        parts.append("**Where paper and code differ:**\n\n" + "\n".join(f"- {d}" for d in found.disagreements))
    return "\n\n".join(parts)
