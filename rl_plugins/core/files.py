"""Files that are whole or not there, folders that are ours, and logs whose last line was cut off."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_plugins.core.errors import ConfigError, shortened, shown


@contextlib.contextmanager
def whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to. It gets the name `path` when the block has ended well; folders are made.

    A process that is killed in the block leaves what was there before, and a hidden file that the next write replaces.
    """
    target = Path(os.path.realpath(path))  # a link stays a link
    if target.exists() and not target.is_file():  # /dev/stdout; a folder makes the write fail
        yield target
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.stem}.part{target.suffix}")
    try:
        yield part
        os.replace(part, target)
    except BaseException:  # Ctrl-C, too
        part.unlink(missing_ok=True)
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """A text file in UTF-8, whole or not at all."""
    with whole(path) as part:
        part.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A hidden folder to write to. It gets the name `path`, which must not exist or be an empty folder, when the block
    has ended well. What a killed process left of one is removed first.

    Raises:
        ConfigError: another process is writing it.
    """
    from filelock import FileLock, Timeout

    hidden = path.absolute().with_name(f".{path.absolute().name}.part")
    hidden.mkdir(parents=True, exist_ok=True)
    lock = FileLock(hidden / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(f"Another process is writing {path}. Wait for its end, or give another folder.") from None
    try:
        for left in hidden.iterdir():
            if left.name != ".lock":
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield hidden
        (hidden / ".lock").unlink()
        os.replace(hidden, path)
    except BaseException:  # Ctrl-C, too
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    finally:
        lock.release()


def claim(folder: Path, kind: str) -> None:
    """Makes a folder that a command may fill and empty: a new one, an empty one, or one that it made before.

    Args:
        kind: word in the name of the file that marks it.

    Raises:
        ConfigError: the folder has other files, or cannot be made. Nothing in it is changed.
    """
    mark = folder / f".rl-plugins-{kind}"
    try:
        if folder.exists() and not mark.is_file() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(
                f"{folder} is not empty, and no earlier command made it for this (it has no {mark.name}). Nothing in "
                f"it was changed. Give a new or empty folder."
            )
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as e:
        raise ConfigError(f"The folder {folder} cannot be written: {e.strerror or e}. Give another one.") from None


def claim_for(folder: Path, kind: str, facts: Mapping[str, Any], what: str) -> None:
    """`claim` of a folder for what these facts describe, so that a command which was cut off goes on with the same.

    Args:
        facts: name -> plain value; kept in settings.json.
        what: is in the folder.

    Raises:
        ConfigError: it holds something else, or cannot be claimed.
    """
    claim(folder, kind)
    settings, now = folder / "settings.json", json.loads(json.dumps(facts))
    if not settings.exists():
        write_text(settings, json.dumps(now, indent=1))
        return
    before = json.loads(settings.read_text(encoding="utf-8"))
    other = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if other:
        raise ConfigError(
            f"--out {folder} holds {what} with another {other[0]} ({shown(before.get(other[0]))}, now "
            f"{shown(now.get(other[0]))}). Give another folder, or the same settings to go on."
        )


def read_json(text: str | bytes) -> Any:
    """The content of a text as JSON.

    Raises:
        ValueError: it is no JSON, or nested deeper than Python reads.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


@contextlib.contextmanager
def parquet_of(path: str | os.PathLike[str]) -> Iterator[None]:
    """Around what reads a parquet file.

    Raises:
        ConfigError: the file is damaged. One that is not there raises FileNotFoundError, as ever.
    """
    try:
        yield
    except (OSError, ValueError) as e:  # pyarrow's errors are either
        if isinstance(e, FileNotFoundError) or getattr(e, "filename", None) is not None:
            raise
        raise ConfigError(
            f"{os.fspath(path)} is no whole parquet file: {shortened(e)}. Write or copy it again."
        ) from None


def json_lines(file: str | os.PathLike[str]) -> list[Any]:
    """The lines of a file of JSON that grows; a last one that is not whole is left out: a process was killed in it, or
    is writing it. Empty if there is no file.

    Raises:
        ValueError: another line is no JSON.
    """
    try:
        lines = Path(file).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    last = lines.pop()
    found = [read_json(line) for line in lines if line.strip()]
    with contextlib.suppress(ValueError):  # UnicodeDecodeError is one
        found.append(read_json(last))
    return found
