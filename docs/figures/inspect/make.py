"""Pictures of docs/inspect.md: pages of the runs of `runs.py`, as Chromium shows them.

    python docs/figures/inspect/runs.py inspect-runs && python docs/figures/inspect/make.py inspect-runs

A picture is a part of a page: from the top of one element to the bottom of another one. It is a PNG with
a palette.
"""

from __future__ import annotations

import io
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "tests"))
from browser import Browser
from PIL import Image

from rl_plugins.lab.viewer.folder import TraceFolder
from rl_plugins.lab.viewer.page import write_page

HERE = Path(__file__).parent
LARGEST = 60_000  # bytes


@dataclass(frozen=True)
class Picture:
    """A picture.

    Args:
        name: of the file.
        run: of `runs.py`.
        place: in its page.
        first, last: expressions for the elements that it begins and ends with.
        width: of the window.
        prepare: script that runs before.
    """

    name: str
    run: str
    place: str
    first: str
    last: str
    width: int = 1000
    prepare: str = ""


def heading(text: str) -> str:
    return f"[...document.querySelectorAll('h1, h2, h3, .u-title')].find(e => e.innerText.startsWith({text!r}))"


def chart(title: str) -> str:
    return f"[...document.querySelectorAll('.chart')].find(e => e.ariaLabel === {title!r})"


CHANGED, TABLE = heading("What the methods changed"), "document.querySelector('main .scroll')"
SHORT = "document.querySelectorAll('main tbody tr').forEach((row, i) => i > 6 && row.remove())"
PICTURES = (
    Picture("hack", "hack", "", chart("Mean reward of a group"), chart("Rewards by function")),
    Picture("zero_variance", "latr", "#batch=60&show=zero+variance", heading("Batch"), TABLE, prepare=SHORT),
    Picture("tree", "pruned", "#batch=40&group=3", heading("Tree"), "document.querySelector('svg.tree')"),
    Picture("queue", "april", "", heading("Groups over"), "document.querySelector('svg.gantt')"),
    Picture("sampler", "vade", "", heading("Prompts"), "document.querySelector('figure')"),
    Picture("agent", "gigpo", "#batch=20&group=3", heading("Turns"), "document.querySelector('.turns')", 1240),
    Picture("disagree", "format", "#batch=54&group=20", CHANGED, TABLE),
    Picture("truncated", "truncated", "#batch=40&show=truncated", heading("Batch"), TABLE, prepare=SHORT),
    Picture("scale", "scale", "#batch=63&group=0", CHANGED, TABLE),
    Picture("dropped", "zero", "#batch=0&group=4", CHANGED, TABLE),
)


def make(picture: Picture, pages: Path) -> None:
    """Writes a picture.

    Raises:
        ValueError: it is too large.
    """
    with Browser(picture.width, 900) as browser:
        browser.open(f"file://{pages / picture.run}/index.html{picture.place}")
        if picture.prepare:
            browser.run(picture.prepare)
        time.sleep(0.5)
        script = f"""(() => {{ window.scrollTo(0, 0);
            const [a, b] = [({picture.first}).getBoundingClientRect(), ({picture.last}).getBoundingClientRect()];
            return [a.top, Math.min(b.bottom, a.top + 900)]; }})()"""
        top, bottom = browser.run(script)
        file = HERE / f"{picture.name}.png"
        browser.picture(file, (0, top - 8, picture.width, bottom - top + 16))
        assert not browser.errors, browser.errors
    small = io.BytesIO()
    Image.open(file).convert("RGB").quantize(48, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    if small.tell() > LARGEST:
        raise ValueError(f"{picture.name} has {small.tell()} bytes; at most {LARGEST} are allowed")
    file.write_bytes(small.getvalue())
    print(f"{picture.name}: {small.tell() / 1000:.0f} kB")


def main(runs: Path, names: list[str]) -> None:
    """Writes all pictures, or those that are named."""
    chosen = [p for p in PICTURES if p.name in names or not names]
    for run in {p.run for p in chosen}:
        list(write_page(TraceFolder(runs / run), runs / "pages" / run))
    for picture in chosen:
        make(picture, runs / "pages")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
