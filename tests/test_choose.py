"""Cards, exclusions, configs to copy, and the pages made from them."""

from __future__ import annotations

import itertools
import re
import textwrap
from pathlib import Path

import pytest

from rl_plugins.cards import catalog
from rl_plugins.cards.info import info
from rl_plugins.cards.pairs import conflicts, excluded
from rl_plugins.cards.problems import PROBLEMS
from rl_plugins.cards.standing import WORDS, worlds_of
from rl_plugins.cards.usage import usage_of
from rl_plugins.core.errors import ConfigError
from rl_plugins.core.method import Bundle
from rl_plugins.lab.bench.tasks import TASKS
from rl_plugins.lab.pages import FILLED, choose, on_site
from rl_plugins.lab.pages.methods import slug
from rl_plugins.runtime.card_file import card_file
from rl_plugins.runtime.stack import build_stack

TEXTS = ("use_when", "avoid_when", "cost", "about")
ROOT = Path(__file__).parents[1]
CARDS = {card.name: card for card in catalog.cards(catalog.plugins())}


def test_every_built_in_method_has_what_the_chooser_shows():
    pages = {page: FILLED.get(page, str)((ROOT / page).read_text()) for page in ("docs/evidence.md", "docs/bench.md")}
    anchors = {
        (page.removeprefix("docs/"), slug(line.lstrip("# ")))
        for page, text in {**pages, **{page: make() for page, make in on_site().items()}}.items()
        for line in text.splitlines()
        if line[:1] == "#"
    }
    for name, card in CARDS.items():
        assert card.does and len(card.does) <= 100 and card.does[0].isupper() and card.does[-1] != ".", name
        assert card.found.problems and set(card.found.problems) <= set(PROBLEMS), name
        assert card.cost and card.avoid_when and card.hosts, name
        assert {(m.page, m.where) for m in card.measured} <= anchors, name
        assert set(card.file.goes_with) <= set(CARDS) - {name}, name


def test_the_short_page_shows_every_method_under_its_problems():
    sections = dict(zip(*[iter(re.split(r"^## (.*)$", choose.index(), flags=re.M)[1:])] * 2, strict=True))
    for name, card in CARDS.items():
        for key in card.found.problems:
            assert f"[`{name}`](methods.md#{name})" in sections[PROBLEMS[key].title], name


def test_tasks_and_worlds_that_are_named_are_described_where_the_reader_is_sent():
    tasks, worlds = ((ROOT / "docs" / f"{page}.md").read_text() for page in ("bench", "quality"))
    assert all(f"| `{name}` | {task.about} |" in tasks.partition("## Tasks")[2] for name, task in TASKS.items())
    named = {world for card in CARDS.values() for world, *_ in worlds_of(card.parts)}
    assert named and all(f"| {world} |" in worlds.partition("## Worlds")[2] for world in named)
    for text in (choose.index(), choose.page()):
        body = text[text.index("\n## ") :]
        assert not [t for t in TASKS if f" in `{t}`" in body]
    for name, card in CARDS.items():
        screen = info(card.found).partition("\n\nUse it when")[0]
        of = [t for t in TASKS if f"in `{t}`" in screen.partition("\n  described: ")[0]]
        assert [t for t in of if f"`{t}`" not in screen.partition("\n  described: ")[2]] == [], name


def test_a_problem_fits_a_screen():
    """250 words, and 40 lines of 120 characters, as they are shown: without the addresses of links, and folded."""
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"</summary>.*?</details>", "", choose.index(), flags=re.S))
    for section in re.split(r"^## ", shown, flags=re.M)[1:]:
        lines = [part for line in section.splitlines() for part in textwrap.wrap(line, 120) or [""]]
        assert len(lines) <= 40 and len(section.split()) <= 250, (lines[0], len(lines), len(section.split()))


def test_the_page_of_the_site_shows_every_method_under_its_problems():
    text, words = choose.page(), {card.standing.word for card in CARDS.values()}
    assert {"use if", "skip", "unknown"} <= words <= set(WORDS)
    sections = dict(zip(*[iter(re.split(r"^## (.*)$", text, flags=re.M)[1:])] * 2, strict=True))
    for name, card in CARDS.items():
        for key in card.found.problems:
            part = sections[PROBLEMS[key].title]
            assert f"- [`{name}`](methods.md#{name}) {card.does}." in part, name
    assert "nobody measured it yet" in text and all(f"  - {word.capitalize()}." in text for word in words)
    links = re.findall(r"\]\(#([^)]+)\)", text)
    assert set(links) <= {slug(title) for title in sections} and len(links) >= len(PROBLEMS)


def test_exclusions_are_those_of_the_stack():
    """Computed ones are refused when a run names both; a pair of which nothing is said is built."""
    classes = [card.found for card in CARDS.values() if not isinstance(card.found, Bundle)]
    found = conflicts(tuple(classes))
    params = {cls.name: dict(card_file(cls).example_params) for cls in classes}
    for a, b in itertools.combinations(sorted(params), 2):
        reasons = [r for r, names in excluded(found, [a]).items() if b in names]
        try:
            build_stack([a, b], {a: params[a], b: params[b]})
            refused = False
        except ConfigError:
            refused = True
        assert not refused or reasons, (a, b)
        if any(r.startswith("Both decide") for r in reasons):
            assert refused, (a, b)
    reasons = excluded(found, ["gdpo"])
    assert "mc_grpo" in reasons["Both decide `advantages`, and only one can."]
    text = info(CARDS["gdpo"].found)
    assert re.search(r"Excludes\n  - .*\bmc_grpo\b.*: Both decide `advantages`", text)


def test_what_goes_together_is_not_excluded():
    classes = [card.found for card in CARDS.values() if not isinstance(card.found, Bundle)]
    found = conflicts(tuple(classes))
    for name, card in CARDS.items():
        against = {n for names in excluded(found, list(card.parts)).values() for n in names}
        for other, why in card.file.goes_with.items():
            if re.search(r"`\w+: \w+`", why):
                continue  # with parameters that are named there
            assert not against & set(CARDS[other].parts), (name, other)


@pytest.mark.host
@pytest.mark.parametrize("name", sorted(name for name, card in CARDS.items() if "trl" in card.hosts))
def test_the_config_that_info_shows_takes_effect_in_trl(name):
    """Whole: nothing that the method needs is missing in it, but for rewards, columns and a model of the user's."""
    import trl

    from rl_plugins.trl import GRPOConfig, capabilities
    from rl_plugins.trl.compat import Seams
    from rl_plugins.trl.masked import MaskedGRPOConfig
    from rl_plugins.trl.masked.capabilities import masked_capabilities

    usage = usage_of(CARDS[name].found)

    class Rows(list):
        column_names: tuple[str, ...] = ()

    stack = build_stack(list(usage.methods), usage.params)
    data = Rows([{"prompt": "1 + 1 ="}] * 4096)
    data.column_names = ("prompt", *(n.partition(":")[2] for n in stack.needs if n.startswith("column:")))
    options = {k: v for k, v in usage.options["trl"].items() if k not in ("use_vllm", "deepspeed", "bf16")}
    size = int(options.get("num_generations", 8)) * 64
    if "generation_batch_size" in options:  # a batch is two optimizer steps on one device, or one of whole groups
        steps = 1 if "whole_groups" in stack.needs else 2
        size = int(options["generation_batch_size"]) // (steps * int(options.get("gradient_accumulation_steps", 1)))
    args = (MaskedGRPOConfig if usage.masked else GRPOConfig)(
        use_cpu=True,
        bf16=False,
        methods=list(usage.methods),
        method_params={k: dict(v) for k, v in usage.params.items()},
        **{"per_device_train_batch_size": size, "max_completion_length": 1024, **options},
    )
    known = capabilities.KnownRun(args, data, len(data), ("correctness", "format", "length"))
    offered = masked_capabilities(capabilities.trl_capabilities(stack, known), stack, args) if usage.masked else None
    capabilities.check(stack, known, Seams.of(trl.GRPOTrainer), offered)


def test_no_text_of_a_card_sends_to_a_method_that_is_to_be_skipped():
    """A text in which a name is marked as code speaks of that method. What goes with it says "(skip)" by itself."""
    skip = {name for name, card in CARDS.items() if card.standing.word == "skip"}
    for name, card in CARDS.items():
        named = set(re.findall(r"`(\w+)`", " ".join([card.does, *(getattr(card.file, text) for text in TEXTS)])))
        assert not named & skip - {name, *card.parts}, name
    assert len(skip) > 10


def test_what_another_method_brings_in_is_a_plain_loop():
    """A method that reads turns gets a loop that plays them, and no limit of turns that nobody asked for."""
    assert "methods: [turn_control, gigpo]" in info(CARDS["gigpo"].found)
    for name, card in CARDS.items():
        usage = usage_of(card.found, paper=False)
        stack = build_stack(list(usage.methods), usage.params)
        loops = [m for m in stack.methods if m.name == "turn_control"]
        assert name == "turn_control" or all(m.params.strategy == "unlimited" for m in loops), name
    assert "a column `turns`" not in info(CARDS["turn_control"].found)


def test_tables_of_the_pages_are_whole():
    """Every row of a table has as many cells as its head, also where a default has a line break."""
    for page in (ROOT / "docs").glob("*.md"):
        head, inside = 0, False
        for number, line in enumerate(page.read_text().splitlines(), 1):
            if line.startswith("```"):
                inside = not inside
            if inside or not line.startswith("|"):
                head = 0
                continue
            assert line.rstrip().endswith("|"), (page.name, number)
            cells = len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", lambda m: m[0].replace("|", ""), line)))
            head = head or cells
            assert cells == head, (page.name, number)
