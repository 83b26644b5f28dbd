"""A headless Chromium that is driven over a pipe by the DevTools protocol, for tests and pictures of pages."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)


class Browser:
    """One tab. Use it in a `with` statement.

    Args:
        width, height: of the window in pixels.
        dark: the system prefers dark colors.
        scale: device pixels per pixel.

    Attributes:
        requests: addresses that the page asked for.
        errors: messages of the console that are errors, exceptions, and violations of the content security policy.

    Raises:
        FileNotFoundError: no Chromium is installed.
    """

    def __init__(self, width: int = 1200, height: int = 900, dark: bool = False, scale: float = 1.0) -> None:
        name = next((n for n in NAMES if shutil.which(n)), None)
        if name is None:
            raise FileNotFoundError(f"none of {', '.join(NAMES)} is installed (Debian: apt-get install chromium)")
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        read, child_write = os.pipe()
        child_read, write = os.pipe()
        command = f'exec "$0" "$@" 3<&{child_read} 4>&{child_write}'  # the browser reads on 3 and writes on 4
        self._process = subprocess.Popen(
            ["bash", "-c", command, name, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"],
            pass_fds=(child_read, child_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(child_read)
        os.close(child_write)
        self._read, self._write, self._left, self._number = read, write, b"", 0
        target = self._call("Target.createTarget", {"url": "about:blank"}, session=False)["targetId"]
        attached = self._call("Target.attachToTarget", {"targetId": target, "flatten": True}, session=False)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")
        self.resize(width, height, scale)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", {"features": [scheme]})

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._profile.cleanup()

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        """Sets the size of the window."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", size)

    def open(self, url: str, until: str = "document.querySelector('main h1')") -> float:
        """Opens an address, and waits until an expression is true.

        Returns:
            Seconds that this took.
        """
        start = time.perf_counter()
        self._call("Page.navigate", {"url": "about:blank"})  # an address that differs after # alone loads nothing
        self._call("Page.navigate", {"url": url})
        self.wait(until)
        return time.perf_counter() - start

    def move(self, place: str, until: str = "document.querySelector('main h1')") -> float:
        """Goes to a place in the page that is open (`#batch=3`). Returns the seconds until `until` is true."""
        start = time.perf_counter()
        self.run(f"location.hash = {json.dumps(place)}")
        self.wait(until)
        return time.perf_counter() - start

    def wait(self, expression: str, seconds: float = 15.0) -> None:
        """Waits until an expression is true.

        Raises:
            TimeoutError: it did not become true; with what the page shows.
        """
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({expression})"):
            if time.monotonic() > end:
                raise TimeoutError(f"{expression} is not true in: {self.text()[:2000]} {self.errors}")
            time.sleep(0.02)

    def run(self, script: str) -> Any:
        """The value of a script in the page.

        Raises:
            RuntimeError: it throws.
        """
        params = {"expression": script, "returnByValue": True, "awaitPromise": True}
        answer = self._call("Runtime.evaluate", params)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", str(answer)))
        return answer["result"].get("value")

    def text(self) -> str:
        """What a reader sees, with single spaces."""
        return " ".join(self.run("document.body ? document.body.innerText : ''").split())

    def click(self, selector: str, text: str = "") -> None:
        """Clicks the first element that a CSS selector names and that has a text, with the mouse.

        Raises:
            RuntimeError: there is none.
        """
        script = """((selector, text) => {
            const found = [...document.querySelectorAll(selector)].find(e => e.textContent.includes(text));
            found.scrollIntoView({block: 'center'});
            const box = found.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2]; })"""
        script += f"({json.dumps(selector)}, {json.dumps(text)})"
        x, y = self.run(script)
        for kind in ("mousePressed", "mouseReleased"):
            event = {"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1}
            self._call("Input.dispatchMouseEvent", event)

    def press(self, *keys: str) -> None:
        """Presses keys, one after another."""
        for key in keys:
            text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
            code = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39}.get(key, 0)
            event = {"key": key, "windowsVirtualKeyCode": code}
            self._call("Input.dispatchKeyEvent", {"type": "keyDown", **event, **text})
            self._call("Input.dispatchKeyEvent", {"type": "keyUp", **event})

    def picture(self, file: Path, clip: Sequence[float] | None = None) -> None:
        """Writes what the window shows, or the box (x, y, width, height) of the whole page, as PNG."""
        params: dict[str, Any] = {"format": "png"}
        if clip is not None:
            params |= {
                "clip": dict(zip(("x", "y", "width", "height"), clip, strict=True)) | {"scale": 1},
                "captureBeyondViewport": True,
            }
        file.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", params)["data"]))

    def _call(self, method: str, params: Any = None, session: bool = True) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params or {}}
        if session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._note(answer)

    def _message(self, seconds: float = 120.0) -> Any:
        while b"\0" not in self._left:
            if not select.select([self._read], [], [], seconds)[0]:
                raise TimeoutError(f"the browser said nothing for {seconds:g} seconds")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise RuntimeError("the browser has ended")
            self._left += part
        message, self._left = self._left.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event: Any) -> None:
        method, params = event.get("method", ""), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(str([a.get("value", a.get("description")) for a in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
