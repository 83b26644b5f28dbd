"""Pictures of docs/inspect.md: pages of the runs of `runs.py`, as Chromium shows them.

    python docs/figures/inspect/runs.py /tmp/inspect && python docs/figures/inspect/make.py /tmp/inspect

A picture is a part of a page: from the top of one element to the bottom of another one. It is a PNG with
a palette.
"""

from __future__ import annotations

import io
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from rl_plugins.testing.browser import Browser
from rl_plugins.viewer.folder import TraceFolder
from rl_plugins.viewer.page import write_page

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
    return f"document.querySelector('.chart[aria-label={title!r}]')"


TABLE = "document.querySelector('main .scroll')"
PICTURES: tuple[Picture, ...] = ()


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
