"""The page of a large trace, served on the loopback address: groups are read when somebody looks at them."""

from __future__ import annotations

import re
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from rl_plugins.core.errors import ConfigError
from rl_plugins.lab.viewer.folder import TraceFolder
from rl_plugins.lab.viewer.page import FILES, OTHER, STATIC, group_data, run_data

HOST = "127.0.0.1"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".txt": "text/plain"}
_DATA = re.compile(rf"/data/({OTHER}/)?(?:run|b(\d{{1,9}})/g(\d{{1,18}}))\.js")


class PageServer(ThreadingHTTPServer):
    """Serves the files of the page and the data of one trace, and nothing else.

    Args:
        trace: what is shown.
        port: 0: a free one.
        other: a run that it is compared with.
    """

    daemon_threads = True

    def __init__(self, trace: TraceFolder, port: int = 0, other: TraceFolder | None = None) -> None:
        self.traces = {"": trace} | ({f"{OTHER}/": other} if other else {})
        self.known: dict[str, tuple[Any, str]] = {}  # of each run: what was there, data/run.js
        super().__init__((HOST, port), _Handler)
        for prefix in self.traces:  # the page opens at once
            self.run(prefix)

    def run(self, prefix: str) -> str:
        """`data/run.js` of a run as it is now."""
        now = TraceFolder(self.traces[prefix].path)
        there = (now.numbers, now.recorded)
        if prefix not in self.known or self.known[prefix][0] != there:
            self.traces[prefix] = now
            self.known[prefix] = there, run_data(now, f"{prefix}run", len(self.traces) > 1)
        return self.known[prefix][1]

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        # a page elsewhere that resolves to this address asks under a name of its own
        of_here = self.headers.get("Host", "").rsplit(":", 1)[0] in (HOST, "localhost")
        if not of_here or self.headers.get("Sec-Fetch-Site") == "cross-site":  # a <script src> of any web page
            return self.send_error(HTTPStatus.FORBIDDEN)
        path = urlsplit(self.path).path
        name = "index.html" if path == "/" else path.removeprefix("/")
        if name in FILES:
            return self._send((STATIC / name).read_bytes(), PurePosixPath(name).suffix)
        wanted = _DATA.fullmatch(path)
        prefix = wanted[1] or "" if wanted else ""
        if wanted is None or prefix not in self.server.traces:
            return self.send_error(HTTPStatus.NOT_FOUND)
        try:
            data = self._data(prefix, wanted[2], wanted[3])
        except ConfigError:
            return self.send_error(HTTPStatus.NOT_FOUND)
        return self._send(data.encode(), ".js")

    def _data(self, prefix: str, batch: str | None, group: str | None) -> str:
        traces = self.server.traces
        if batch is None or group is None:
            return self.server.run(prefix)
        return group_data(traces[prefix], int(batch), int(group), prefix)

    def _send(self, content: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{TYPES[kind]}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed for a request."""
