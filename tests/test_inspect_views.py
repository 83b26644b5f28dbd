"""What the page makes of known batches: numbers of a summary, comparisons, and every view in a real browser."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from test_inspect import invoke
from test_inspect import run as hostile_run  # noqa: F401
from traces import a_row, named, write_batch, write_updates

from rl_plugins.lab.viewer.comparison import pairs, word_differences
from rl_plugins.lab.viewer.folder import TraceFolder
from rl_plugins.lab.viewer.page import write_page
from rl_plugins.lab.viewer.serve import PageServer
from rl_plugins.lab.viewer.summary import batch_summary

if TYPE_CHECKING:
    from browser import Browser

HUGE = 10_000_000


def known_rows(version: int = 0) -> list[dict[str, Any]]:
    """Five groups of four: one that says nothing, one that a method changes, a tree, turns, and a stale, cut one."""
    flat = [a_row(i, 0, [1, 2, 3 + i], raw_reward=1.0, rewards=named(right=1.0, form=1.0)) for i in range(4)]
    moved = [
        a_row(
            4 + i,
            1,
            [7 + i, 8],
            raw_reward=float(i % 2),
            rewards=named(right=float(i % 2), form=1.0 - i % 2),
            grpo=2.0 * (i % 2) - 1,
            advantage=[-0.5, 0.25, 1.5, 1.0][i],
            notes=[{"method": "two", "hook": "shape", "text": "turned around"}] if i == 2 else [],
        )
        for i in range(4)
    ]
    moved[3] |= {"trained": False, "left": [{"method": "one", "hook": "select", "tokens": 2}], "advantages": []}
    tree = [
        a_row(8 + i, 2, tokens, raw_reward=float(i)) for i, tokens in enumerate([[1, 2, 3], [1, 2, 4, 5], [1, 6], [9]])
    ]
    states = ["left", "right", "left"]
    turns = [
        a_row(
            12 + i,
            3,
            [10, 11, 12, 13, 14, 15],
            kinds=[0, 1, 0, 1, 2, 1],
            entropies=[float("nan"), 0.5, float("nan"), 2.0, float("nan"), 1.0],
            advantages=[{"stage": "one.shape", "advantage": 0.0, "tokens": [0.0, 1.0, 0.0, -2.0, 0.0, 0.5]}],
            turns=[
                {"turn": k, "start": 2 * k, "stop": 2 * k + 2, "anchor": s, "reward": 0.0, "valid": True}
                for k, s in enumerate(states)
            ],
        )
        for i in range(4)
    ]
    stale = [a_row(16 + i, 4, [20] * 5, truncated=i == 0, raw_reward=float(i), version=-2) for i in range(4)]
    for row in [*flat, *moved, *tree, *turns, *stale]:
        row["rewards"] = [*row["rewards"], *named(form=0.0)][:2]
        row["current_version"] = version
        row["newest_version"] = version
        row["version"] += version
    return [*flat, *moved, *tree, *turns, *stale]


def write_known(folder: Path, more: str = "") -> Path:
    """A run of four batches; `more` is added to the completions of the last one."""
    for number in range(4):
        rows = known_rows(number)
        if number == 3:
            for row in rows:
                row["completion"] += more
                row["raw_reward"] += 0.5
        write_batch(folder / "trace", number, rows)
    return folder


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_known(tmp_path_factory.mktemp("known"), " later")


def test_a_summary_has_what_the_filters_need(known: Path) -> None:
    trace = TraceFolder(known)
    found = batch_summary(trace, trace.batches[1])
    groups = found["groups"]
    assert groups["spread"] == [0, 1, 3, 0, 3] and groups["age"] == [0, 0, 0, 0, 2]
    assert groups["change"] == [0, 2.5, 0, 0, 0] and groups["trained"] == [4, 3, 4, 4, 4]
    assert groups["truncated"] == [0, 0, 0, 0, 1]
    assert found["left"] == {"one.select": [1, 2]} and found["seconds"] == 7


def test_two_rewards_that_disagree(tmp_path: Path) -> None:
    """The lowest correlation of two functions that vary inside the group, as torch computes it."""
    rewards = torch.tensor([[0.0, 1.0, 0.2], [1.0, 0.5, 0.1], [2.0, 0.25, 0.9], [3.0, 0.1, 0.3]], dtype=torch.float64)
    rows = [a_row(i, 0, [1], rewards=named(**dict(zip("abc", r.tolist(), strict=True)))) for i, r in enumerate(rewards)]
    same = [a_row(4 + i, 1, [1], rewards=named(a=1.0, b=float(i), c=0.5)) for i in range(4)]
    write_batch(tmp_path / "trace", 0, [*rows, *same])
    trace = TraceFolder(tmp_path)
    found = batch_summary(trace, trace.batches[0])
    assert found["groups"]["disagree"] == [pytest.approx(float(torch.corrcoef(rewards.T).min())), None]
    assert found["rewards"] == pytest.approx({"a": 1.25, "b": (1.85 + 6) / 8, "c": (1.5 + 2) / 8})


def test_differences_keep_both_texts() -> None:
    a, b = "one two, three\nfour", "one 2, three  four five"
    found = list(word_differences(a, b))
    assert "".join(t for k, t in found if k != "+") == a and "".join(t for k, t in found if k != "-") == b
    assert ("-", "two") in found and ("+", "2") in found and ("=", ", three") in found


def test_a_run_is_compared_with_its_beginning_or_with_another_one(known: Path, tmp_path: Path) -> None:
    own = pairs(TraceFolder(known), TraceFolder(known))
    assert [(p.prompt, p.a[0], p.b[0], p.difference) for p in own] == [(100 + g, 0, 3, 0.5) for g in range(5)]
    other = write_known(tmp_path / "other")
    found = pairs(TraceFolder(known), TraceFolder(other), batch=1)
    assert {(p.a[0], p.b[0], p.difference) for p in found} == {(1, 3, 0.5)}
    said = invoke(str(known), "--compare", str(known), "--prompt", "102").output
    assert "abcd"[1:] in said and "{+ later+}" in said and "reward 0.5" in said
    listed = invoke(str(known), "--compare", str(other)).output
    assert "5 prompts have rollouts in both" in listed and "101" in listed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prompt", "3"], "Give --compare RUN"),
        (["--compare", "{run}", "--prompt", "3"], "Rows in both are, for example, 100, 101"),
        (["--compare", "{run}", "--batch", "9"], "Batch 9 is not in the trace"),
        (["--compare", "{run}", "--batch", "1", "--group", "1"], "give --prompt N"),
    ],
)
def test_a_comparison_that_cannot_be_is_named(known: Path, words: list[str], said: str) -> None:
    done = invoke(str(known), *(w.format(run=known) for w in words))
    assert done.exit_code == 2 and said in " ".join(done.output.split())


# ---- in a browser


@pytest.fixture(scope="module")
def page(known: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("page")
    other = write_known(tmp_path_factory.mktemp("second"))
    assert list(write_page(TraceFolder(known), out, TraceFolder(other))) == [0, 1, 2, 3] * 2
    return f"file://{out}/index.html"


@pytest.fixture
def browser() -> Iterator[Browser]:
    from browser import Browser

    with Browser() as made:
        yield made
        assert made.errors == [], made.errors
        assert all(r.startswith(("file://", "about:blank", "http://127.0.0.1:")) for r in made.requests), made.requests


def titled(start: str) -> str:
    return f"document.querySelector('main h1')?.innerText.startsWith('{start}')"


def count(rows: int) -> str:
    return f"document.querySelector('main .scroll tbody')?.rows.length === {rows}"


def rows_of(browser: Browser, table: str = "main .scroll table") -> list[list[str]]:
    return browser.run(
        f"[...document.querySelector('{table}').tBodies[0].rows].map(r => [...r.cells].map(c => c.innerText.trim()))"
    )


@pytest.mark.browser
def test_filters_by_clicking(page: str, browser: Browser) -> None:
    browser.open(f"{page}#batch=1")
    assert len(rows_of(browser)) == 5 and "one.select took 2 tokens out of 1 row " in browser.text()
    left = {"zero variance": ["0", "3"], "dropped": ["1"], "truncated": ["4"], "stale": ["4"], "changed": ["1"]}
    for name, groups in {**left, "rewards disagree": ["1"]}.items():
        browser.click("fieldset label", name)
        browser.wait(f"location.hash.includes('show=') && {count(len(groups))}")
        assert [r[0] for r in rows_of(browser)] == groups, name
        browser.click("fieldset label", name)
        browser.wait(count(5))
    browser.click("th button", "change")
    browser.wait("document.querySelector('main .scroll tbody tr td').innerText === '1'")
    assert [r[0] for r in rows_of(browser)][0] == "1"


@pytest.mark.browser
def test_no_chart_is_drawn_twice(page: str, browser: Browser) -> None:
    browser.open(page)
    titles = browser.run("[...document.querySelectorAll('.chart')].map(c => c.getAttribute('aria-label'))")
    assert "one/value" in titles and len(set(titles)) == len(titles)


@pytest.mark.browser
def test_filters_of_the_whole_run(page: str, browser: Browser) -> None:
    browser.open(f"{page}#show=changed")
    found = browser.run("[...document.querySelectorAll('h2')].find(h => h.innerText.startsWith('Groups of')).innerText")
    assert found == "Groups of all batches" and "4 of 20 groups" in browser.text()
    browser.click("main .scroll tbody tr", "2.5")
    browser.wait(titled("Group 1"))


@pytest.mark.browser
def test_a_group_says_what_the_methods_changed(page: str, browser: Browser) -> None:
    browser.open(f"{page}#batch=1&group=1")
    text = browser.text()
    assert "The advantage of 3 of 3 trained rollouts differs from plain GRPO, 1 with the other sign" in text
    assert "most in rollout 2 (-1 → +1.5)" in text and "one.select took tokens out of rollout 3." in text
    assert "Rollout 2, two: turned around" in text
    assert "rollout 3 reward 1, one.select took 2 tokens out; not trained" in text
    assert [r[1] for r in rows_of(browser)] == ["-1 → -0.5", "+1 → +0.25", "-1 → +1.5", "+1 → left"]
    assert [r[2:4] for r in rows_of(browser)] == [["0", "1"], ["1", "0"], ["0", "1"], ["1", "0"]]
    # places on the common scale: the ring of rollout 2 is left of 0, its diamond right of it
    ring, diamond = browser.run(
        "(r => [r.querySelector('circle').getAttribute('cx'), r.querySelector('path').getAttribute('transform')])"
        "(document.querySelectorAll('main .scroll tbody tr')[2])"
    )
    assert float(ring) == pytest.approx(-64) and diamond == "translate(96 8)"
    browser.move("#batch=1&group=0", titled("Group 0"))
    assert "All rewards are equal: plain GRPO learns nothing from this group." in browser.text()


@pytest.mark.browser
def test_keys(page: str, browser: Browser) -> None:
    browser.open(page)
    browser.press("j")
    browser.wait(titled("Batch 0"))
    browser.press("ArrowRight")
    browser.wait(titled("Batch 1"))
    browser.move("#batch=1&group=1", titled("Group 1"))
    browser.press("j")
    browser.wait(titled("Group 2"))
    browser.press("k", "u", "u")
    browser.wait(titled("one + two"))
    browser.press("?")
    browser.wait("document.querySelector('.help')")
    browser.press("Escape")
    browser.wait("!document.querySelector('.help')")
    browser.click(".strip g:nth-child(3) .cell")
    browser.wait(titled("Batch 2"))


@pytest.mark.browser
def test_a_rollout_shows_a_number_for_each_token(page: str, browser: Browser) -> None:
    browser.open(f"{page}#batch=1&group=3&rollout=13")
    kinds = browser.run("[...document.querySelectorAll('.tokens [data-i]')].map(t => t.className)")
    assert [k.split() for k in kinds] == [
        ["token", "read", "plus0"],
        ["token", "plus3"],
        ["token", "read", "plus0"],
        ["token", "minus5"],
        ["token", "forced", "plus0"],
        ["token", "plus2"],
    ]
    assert "right 0, form 0; sum 0" in browser.text()
    browser.click("[data-i='3']")
    browser.wait("document.querySelector('.looked-at').innerText.includes('token 3')")
    assert "id 13" in browser.text() and "sampled, advantage -2, entropy 2" in browser.text()
    assert browser.run("document.querySelectorAll('.tokens .turn').length") == 3
    browser.press("c")
    browser.wait("document.getElementById('color').value === 'entropy'")
    browser.press("/", "n", "o", "Enter")
    browser.wait("document.querySelectorAll('.found').length === 2")
    assert "1 of 1" in browser.text()
    browser.press("Escape", "i")
    browser.wait("document.querySelector('.tokens').innerText.includes('13')")


@pytest.mark.browser
def test_trees_turns_ages_and_prompts(page: str, browser: Browser) -> None:
    browser.open(f"{page}#batch=1&group=2")
    leaves = browser.run("[...document.querySelectorAll('svg.tree .leaf')].map(t => t.textContent)")
    assert [leaf.split(":")[0] for leaf in leaves] == [f"● rollout {i}" for i in range(4)]
    values = browser.run("[...document.querySelectorAll('svg.tree .value')].map(t => t.textContent)")
    assert values == ["1.5", "1", "0.5"], "mean reward of all, of those that begin with b, of those with bc"
    browser.move("#batch=1&group=3", "document.querySelector('.turns')")
    cells = browser.run("[...document.querySelector('.turns').tBodies[0].rows[0].cells].map(c => c.innerText)")
    assert cells[2] == "1" and "A" in cells[3] and "B" in cells[4] and "A" in cells[5], "it came back to a state"
    assert "+0.5" in cells[3] and "-1" in cells[4] and "+0.25" in cells[5], "mean advantage of a turn's tokens"
    browser.move("#", "document.querySelector('.gantt')")
    bars = browser.run("[...document.querySelectorAll('.gantt g title')].map(t => t.textContent)")
    assert len(bars) == 20 and "batch 2, group 4, dataset row 104: age 2" in bars
    wide = browser.run("[...document.querySelectorAll('.gantt .age2')].map(r => Number(r.getAttribute('width')))")
    assert max(wide) == pytest.approx(3 * 720 / 4 - 3), "of batch 2, from batch 0 on"
    assert "5 different dataset rows in 20 groups" in browser.text() and "came 4 times" in browser.text()


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A batch with ratios, pruned pieces, compared turns, and notes of prompts."""
    folder = tmp_path_factory.mktemp("special")
    pruned = [{"start": 1, "ids": [5, 6], "text": "fg", "score": 0.25, "why": "too alike"}]
    branch = {"parent": 0, "start": 2, "score": 1.5, "why": "high entropy"}
    rows = [a_row(0, 0, [1, 2, 3, 4], pruned=pruned), a_row(1, 0, [1, 2, 7, 8], branch=branch), a_row(2, 1, [1])]
    compared = [{"method": "one", "name": "state", "set": 3, "size": 2, "advantage": 0.75}]
    turn = {"turn": 0, "start": 0, "stop": 2, "anchor": "here", "reward": 0.0, "valid": True, "compared": compared}
    rows += [a_row(3 + k, 2, [1 + k, 2], turns=[turn]) for k in range(2)]
    note = {"method": "one", "hook": "select_prompts", "text": "", "group": None}
    noted = [{**note, "prompt_index": k, "values": named(mean=m)} for k, m in enumerate((0.25, 0.5, 1.5))]
    write_batch(folder / "trace", 0, rows, selected_by="one", prompts=noted)
    first = [{"row": 0, "ratio": [1.0, 1.5, float("nan"), 0.5], "clipped": [0, 0, None, 0]}]
    second = [{"row": 0, "ratio": [1.0, 2.0, float("nan"), 0.5], "clipped": [1, 1, None, 0]}]
    write_updates(folder / "trace", 0, [first, second])
    return folder


def test_clips_learning_rates_and_notes_of_prompts_are_in_the_summary(special: Path) -> None:
    trace = TraceFolder(special)
    found = batch_summary(trace, trace.batches[0])
    assert found["groups"]["clipped"] == [pytest.approx(1 / 3), None, None], "2 of 6 ratios"
    assert found["lr_scale"] == [1, 0.5] and found["prompt_values"] == {"one: mean": [0.25, 0.75, 1.5]}


@pytest.mark.browser
def test_ratios_pruned_pieces_and_compared_turns(special: Path, tmp_path: Path, browser: Browser) -> None:
    list(write_page(TraceFolder(special), tmp_path / "page"))
    browser.open(f"file://{tmp_path}/page/index.html#batch=0&show=clipped")
    assert [r[0] for r in rows_of(browser)] == ["0"]
    browser.move("#batch=0&group=0", "document.querySelector('svg.tree')")
    drawn = browser.run("[...document.querySelectorAll('svg.tree .gone-branch')].map(g => g.textContent)")
    assert len(drawn) == 1 and "pruned, score 0.25, too alike" in drawn[0] and "fg" in drawn[0]
    assert ["1", "0", "2", "1.5", "high entropy"] in rows_of(browser, "main details table")
    browser.move("#batch=0&group=0&rollout=0&color=ratio,+update+1", titled("Rollout 0"))
    assert browser.run("document.getElementById('color').value") == "ratio, update 1"
    shades = browser.run("[...document.querySelectorAll('.tokens [data-i]')].map(t => t.classList[1])")
    assert shades == ["plus0", "plus5", "plus0", "minus3"], "ratios 1, 2, none and 0.5: their distance to 1"
    browser.click("[data-i='1']")
    browser.wait("document.querySelector('.looked-at').innerText.includes('ratio, update 1 2')")
    assert "clipped, update 1 1" in browser.text()
    browser.move("#batch=0&group=2", "document.querySelector('.turns')")
    cell = browser.run("document.querySelector('.turns').tBodies[0].rows[0].cells[3].innerText")
    assert "state: +0.75 of 2" in cell
    browser.move("#", titled("one + two"))
    for title in ("Factor of the methods on the learning rate", "one: mean"):
        browser.wait(f"[...document.querySelectorAll('.u-title')].some(t => t.innerText === '{title}')")


@pytest.mark.browser
def test_two_runs_side_by_side(page: str, browser: Browser) -> None:
    browser.open(f"{page}#view=compare", count(5))
    browser.click("main .scroll tbody tr", "102")
    browser.wait("document.querySelector('.difference')")
    assert browser.run("[...document.querySelectorAll('.difference del')].map(d => d.innerText)") == [" later"]
    assert browser.run("document.querySelectorAll('.difference ins').length") == 0
    browser.click(".pair > div:nth-child(2) article", "rollout 1")
    browser.wait("document.querySelector('.difference ins')")


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_wider_than_a_phone(page: str, dark: bool) -> None:
    from browser import Browser

    with Browser(390, 800, dark) as browser:
        for place in ("", "#batch=1", "#batch=1&group=3", "#batch=1&group=3&rollout=13", "#view=compare&prompt=102"):
            browser.open(page + place)
            assert browser.run("document.documentElement.scrollWidth") <= 390, place
        light, back = browser.run("(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))")
        assert (sum(map(int, light[4:-1].split(","))) > sum(map(int, back[4:-1].split(",")))) == dark
        assert browser.errors == []


@pytest.mark.browser
def test_a_line_of_10_mb(tmp_path: Path, browser: Browser) -> None:
    row = a_row(0, 0, [1, 2], completion="<img src=x onerror=alert(1)>" + "a" * HUGE, prompt="p" * HUGE)
    write_batch(tmp_path / "trace", 0, [row])
    list(write_page(TraceFolder(tmp_path), tmp_path / "page"))
    seconds = browser.open(f"file://{tmp_path}/page/index.html#batch=0&group=0")
    assert seconds < 20 and f"[{HUGE - 20000} further characters]" in browser.text()
    assert browser.run("document.images.length") == 0
    browser.move("#batch=0&group=0&rollout=0", titled("Rollout"))


@pytest.mark.browser
def test_hostile_texts_stay_texts(hostile_run: Path, tmp_path: Path, browser: Browser) -> None:  # noqa: F811
    list(write_page(TraceFolder(hostile_run), tmp_path / "page"))
    scripts = None
    for place in ("#batch=0&group=0", "#batch=0&group=1&rollout=4", "#batch=2&group=1"):
        browser.open(f"file://{tmp_path}/page/index.html{place}")
        text = browser.run("document.body.innerText")
        assert "<script>alert(1)</script>" in text and "\\u001b[2J" in text
        assert not {"\u202e", "\x1b", "\x00"} & set(text)
        count = browser.run("document.querySelectorAll('script:not([src])').length")
        assert (
            count == 0
            and browser.run("document.querySelectorAll('main [onerror], main a[href^=javascript]').length") == 0
        )
        scripts = count
    assert scripts == 0


@pytest.mark.browser
def test_the_server_in_a_browser(known: Path, browser: Browser) -> None:
    server = PageServer(TraceFolder(known), other=TraceFolder(known))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        browser.open(f"{server.url}#batch=1&group=1")
        browser.move("#view=compare", count(5))
        asked = {r.removeprefix(server.url) for r in browser.requests if r.startswith("http")}
        assert {"data/run.js", "data/b1/g1.js", "data/other/run.js"} <= asked and "data/b1/g0.js" not in asked
    finally:
        server.shutdown()
        server.server_close()
