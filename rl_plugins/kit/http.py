"""`Web`: requests to a server of the user's. No error repeats the key or a password, and no reply is read for ever."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_plugins.core.errors import ConfigError, MethodError, shortened, shown

if TYPE_CHECKING:
    import httpx

MOST = 16 << 20  # bytes of a reply
_USER = re.compile(r"(?<=://)[^/@\s]*@")
_PASSING = (408, 409, 425, 429)  # statuses below 500 after which another try may succeed


@dataclass(frozen=True)
class Reply:
    """What a server answered: the status, and the text of the body."""

    status: int
    text: str


class Web:
    """A client of one server; may be used from several threads.

    Args:
        url: where it is. One with a user name or a password is refused: parameters are printed, logged and saved.
        key_env: environment variable that holds the key, which is sent as bearer; empty: none is sent.
        timeout: seconds of one request.
        connections: at a time; None: as many as are asked for.
        most: bytes of a reply; a longer one is an error.

    Attributes:
        client: that of httpx, for requests of other kinds.

    Raises:
        ConfigError: the URL is none or has a password, or the variable is not set.
    """

    def __init__(
        self, url: str, key_env: str = "", timeout: float = 60.0, connections: int | None = None, most: int = MOST
    ) -> None:
        import httpx

        if not re.match("https?://.", url):
            raise ConfigError(f"The URL is {shown(without_user(url))}; it must be one such as http://localhost:8000.")
        if without_user(url) != url:
            raise ConfigError(
                f"The URL {shown(without_user(url))} is given with a user name or a password. Parameters are printed, "
                f"logged and saved. Take it out, and name the environment variable of a key instead."
            )
        self.url, self.most = url.rstrip("/"), most
        headers = bearer(key_env)
        self._key = headers.get("Authorization", "").removeprefix("Bearer ")
        limits = httpx.Limits(max_connections=connections)
        self.client = httpx.Client(headers=headers, timeout=timeout, limits=limits)

    def post(self, path: str = "", **what: Any) -> Reply:
        """The reply to a POST request; `what` is as of `httpx.Client.request`.

        Raises:
            MethodError: the server refuses the request as such (status 4xx), so that trying again is no use.
            OSError: it cannot be reached, fails (status 5xx) or asks to be tried later. The text is what httpx says.
            ValueError: the reply is longer than `most`.
        """
        reply = self.request("POST", path, **what)
        if 400 <= reply.status < 500 and reply.status not in _PASSING:
            raise MethodError(
                f"{self.url}{path} refuses the request with status {reply.status}: {self.said(reply.text)}."
            )
        if reply.status >= 400:
            raise OSError(f"{self.url}{path} answers with status {reply.status}: {self.said(reply.text)}")
        return reply

    def request(self, method: str, path: str = "", **what: Any) -> Reply:
        """The reply to a request, whatever its status. Raises OSError and ValueError as `post`."""
        import httpx

        try:
            with self.client.stream(method, self.url + path, **what) as answer:
                return Reply(answer.status_code, self._read(answer).decode(answer.encoding or "utf-8", "replace"))
        except (httpx.HTTPError, httpx.InvalidURL) as e:
            raise OSError(f"{type(e).__name__}: {self.said(str(e))}") from None

    def _read(self, answer: httpx.Response) -> bytes:
        data = bytearray()
        for part in answer.iter_bytes():
            data += part
            if len(data) > self.most:
                raise ValueError(f"{self.url} answers with more than {self.most} bytes")
        return bytes(data)

    def said(self, text: str) -> str:
        """A text of the server as a message may repeat it: cut, and without the key, which some servers echo."""
        return shortened(text.replace(self._key, "[key]") if self._key else text)


def without_user(url: str) -> str:
    """A URL without user name and password."""
    return _USER.sub("", url)


def bearer(key_env: str) -> dict[str, str]:
    """Headers of a request with the key of an environment variable; none without a variable.

    Raises:
        ConfigError: the variable is not set, or holds what is no key.
    """
    if not key_env:
        return {}
    key = os.environ.get(key_env, "").strip()  # a file often ends with a line break
    if not key:
        raise ConfigError(f"The environment variable {key_env}, which should hold the key, is not set.")
    if not (key.isascii() and key.isprintable()):  # without the key, which messages must not repeat
        raise ConfigError(
            f"The environment variable {key_env} holds characters that no key has (a line break, or letters beyond "
            f"ASCII). Set it to the key alone."
        )
    return {"Authorization": f"Bearer {key}"}
