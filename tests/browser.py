"""One tab of an installed Chromium, for tests and pictures of pages, on playwright. Nothing is downloaded."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from playwright.sync_api import ConsoleMessage, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")


class Browser:
    """Use it in a `with` statement.

    Args:
        width, height: of the window in pixels.
        dark: the system prefers dark colors.

    Attributes:
        requests: addresses that the page asked for.
        errors: messages of the console that are errors or warnings, exceptions, and violations of the content security
            policy.

    Raises:
        FileNotFoundError: no Chromium is installed.
    """

    def __init__(self, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        program = next(filter(None, map(shutil.which, NAMES)), None)
        if program is None:
            raise FileNotFoundError(f"none of {', '.join(NAMES)} is installed (Debian: apt-get install chromium)")
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._playwright = sync_playwright().start()
        self._browser = self._playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        self._page = self._browser.new_page(
            viewport={"width": width, "height": height},
            is_mobile=width < 600,
            color_scheme="dark" if dark else "light",
        )
        self._page.on("request", lambda request: self.requests.append(request.url))
        self._page.on("pageerror", lambda error: self.errors.append(str(error)))
        self._page.on("console", self._said)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._browser.close()
        self._playwright.stop()

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(f"{message.text} {message.location.get('url', '')}")

    def open(self, url: str, until: str = "document.querySelector('main h1')") -> float:
        """Opens an address, and waits until an expression is true.

        Returns:
            Seconds that this took.
        """
        start = time.perf_counter()
        self._page.goto("about:blank")  # an address that differs after # alone loads nothing
        self._page.goto(url, wait_until="commit")
        self.wait(until)
        return time.perf_counter() - start

    def move(self, place: str, until: str = "document.querySelector('main h1')") -> float:
        """Goes to a place in the page that is open (`#batch=3`). Returns the seconds until `until` is true."""
        start = time.perf_counter()
        self.run(f"location.hash = {json.dumps(place)}")
        self.wait(until)
        return time.perf_counter() - start

    def wait(self, expression: str, seconds: float = 15.0) -> None:
        """Waits until an expression is true. (`wait_for_function` needs `eval`, which the pages forbid.)

        Raises:
            TimeoutError: it did not become true; with what the page shows.
        """
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({expression})"):
            if time.monotonic() > end:
                raise TimeoutError(f"{expression} is not true in: {self.text()[:2000]} {self.errors}")
            self._page.wait_for_timeout(20)

    def run(self, script: str) -> Any:
        """The value of a script in the page."""
        return self._page.evaluate(script)

    def text(self) -> str:
        """What a reader sees, with single spaces."""
        return " ".join(self.run("document.body ? document.body.innerText : ''").split())

    def click(self, selector: str, text: str = "") -> None:
        """Clicks the first element that a CSS selector names and that has a text, with the mouse."""
        found = self._page.locator(selector, has_text=re.compile(re.escape(text))).first
        found.click(force=True)  # what lies over it may get the click

    def press(self, *keys: str) -> None:
        """Presses keys, one after another."""
        for key in keys:
            self._page.keyboard.press(key)

    def picture(self, file: Path, clip: Sequence[float]) -> None:
        """Writes a box (x, y, width, height) of the whole page as PNG."""
        box = dict(zip(("x", "y", "width", "height"), clip, strict=True))
        self._page.screenshot(path=file, clip=box, full_page=True)  # type: ignore[arg-type]
