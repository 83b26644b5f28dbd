"""Where nodes exchange files: one small interface for a file system of fsspec, a directory is one, or an HTTP endpoint.

An exchange holds files by plain names. Nobody waits for anybody: a node writes its own files, looks which others there
are, and reads those it does not know yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from collections.abc import Iterator
from typing import Any, Protocol

from rl_plugins import ConfigError
from rl_plugins.core.errors import shown
from rl_plugins.kit.http import Web

MOST_NAMES = 16 << 20  # bytes of a listing that are read
_HTTP = re.compile("https?://.")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


class Exchange(Protocol):
    """Files by name that several nodes write and read. Every function may raise what its transport raises. The method
    takes an exception for an exchange that does not answer, and goes on without it."""

    def put(self, name: str, data: bytes) -> None:
        """Writes a file. Where the transport allows, readers see all of it or nothing."""
        ...

    def names(self) -> list[str]:
        """Names of all files; none if the exchange does not exist yet."""
        ...

    def get(self, name: str, most: int) -> bytes:
        """The first bytes of a file, at most `most`. FileNotFoundError: it is not there any more."""
        ...

    def remove(self, name: str) -> None:
        """Removes a file; a file that is not there is no error."""
        ...


def open_exchange(where: str, key_env: str = "") -> Exchange:
    """The exchange at a directory, a URL of fsspec (s3://bucket/swarm), or an HTTP URL. Nothing is read or written yet.

    Args:
        key_env: environment variable with the key that an HTTP endpoint asks for; empty: none is sent.

    Raises:
        ConfigError: fsspec does not know the protocol, its package is not installed, or the variable is not set.
    """
    if _HTTP.match(where):
        return Http(where, key_env)
    return Files(where)


class Files:
    """A directory of any file system that fsspec knows: a path, s3://, gs:// or sftp://. A file is written under
    another name and then moved (on a disk an atomic rename), so no reader takes a part of it for the whole."""

    def __init__(self, where: str | os.PathLike[str]) -> None:
        import fsspec

        try:
            self._fs, self._path = fsspec.core.url_to_fs(os.fspath(where))
        except (ValueError, ImportError) as e:
            raise ConfigError(f"fsspec cannot open the exchange {shown(os.fspath(where))}: {e}.") from None
        self._path = self._path.rstrip("/")

    def put(self, name: str, data: bytes) -> None:
        part = f"{self._path}/.{name}.{uuid.uuid4().hex[:8]}.part"  # a name that no reader takes for a package
        self._fs.makedirs(self._path, exist_ok=True)
        try:
            self._fs.pipe_file(part, data)
            self._fs.mv(part, f"{self._path}/{name}")
        except Exception:
            with contextlib.suppress(Exception):
                self._fs.rm_file(part)
            raise

    def names(self) -> list[str]:
        self._fs.invalidate_cache()  # other nodes write, too
        with contextlib.suppress(FileNotFoundError):
            return [str(path).rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._path, detail=False)]
        return []

    def get(self, name: str, most: int) -> bytes:
        path = f"{self._path}/{name}"
        if self._fs.info(path)["type"] != "file":  # a pipe or a device would never end
            raise FileNotFoundError(f"{path} is not a file")
        with self._fs.open(path, "rb") as file:
            data: bytes = file.read(most)
            return data

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._path}/{name}")


class Http:
    """An HTTP endpoint. GET of the URL lists the files as JSON: names, or objects with "name". GET, PUT and DELETE of
    URL/NAME read, write and remove a file. nginx does so with `dav_methods PUT DELETE`, `autoindex on` and
    `autoindex_format json`. The HTTP of fsspec reads pages of links in the place of such lists, and deletes nothing.

    Raises:
        ConfigError: the URL has a password, or the variable of the key is not set.
    """

    def __init__(self, url: str, key_env: str = "", timeout: float = 10.0) -> None:
        web = Web(url, key_env, timeout)
        self.url, self._client = web.url, web.client

    def put(self, name: str, data: bytes) -> None:
        self._client.put(f"{self.url}/{name}", content=data).raise_for_status()

    def names(self) -> list[str]:
        try:
            data = b"".join(self._read(f"{self.url}/", MOST_NAMES + 1))
        except FileNotFoundError:
            return []
        if len(data) > MOST_NAMES:
            raise ValueError(f"the list of files at {self.url} is longer than {MOST_NAMES} bytes")
        listed = json.loads(data)
        if not isinstance(listed, list):
            raise ValueError(f"{self.url}/ answers {shown(listed)}; it must be a JSON list of names")
        names = [entry.get("name") if isinstance(entry, dict) else entry for entry in listed]
        return [name for name in names if isinstance(name, str)]

    def get(self, name: str, most: int) -> bytes:
        return b"".join(self._read(f"{self.url}/{name}", most))[:most]

    def remove(self, name: str) -> None:
        answer = self._client.delete(f"{self.url}/{name}")
        if answer.status_code != 404:
            answer.raise_for_status()

    def _read(self, url: str, most: int) -> Iterator[bytes]:
        """What the server sends, until it is `most` bytes or more."""
        with self._client.stream("GET", url) as answer:
            if answer.status_code == 404:
                raise FileNotFoundError(url)
            answer.raise_for_status()
            size = 0
            for part in answer.iter_bytes():
                yield part
                size += len(part)
                if size >= most:
                    return


def is_plain(name: Any) -> bool:
    """Whether a name can be that of a file of an exchange: no path, nothing hidden, at most 200 characters."""
    return isinstance(name, str) and bool(_NAME.fullmatch(name))
