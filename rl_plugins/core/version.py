"""The version of this package, with the commit that was installed where that is known."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import math
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

PACKAGE = "rl-plugins"


@functools.cache
def full_version() -> str:
    """ "0.1.0", or "0.1.0 (git 5d64a5b6)". Changes of files since that commit are not told."""
    version, commit = importlib.metadata.version(PACKAGE), ""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):  # pip, or git, wrote none
        commit = _commit(importlib.metadata.distribution(PACKAGE))
    return f"{version} (git {commit[:8]})" if commit else version


def _commit(installed: importlib.metadata.Distribution) -> str:
    """As pip noted it; of a folder, where git's log of HEAD was when it was installed, or is if it is editable."""
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    if "dir_info" not in origin:
        return str(origin["vcs_info"]["commit_id"])
    git = Path(url2pathname(urlsplit(origin["url"]).path)) / ".git"
    if git.is_file():  # a work tree
        git = git.parent / git.read_text().partition("gitdir: ")[2].strip()
    note = next(f for f in installed.files or () if f.name == "direct_url.json").locate()
    until = math.inf if origin["dir_info"].get("editable") else Path(note).stat().st_mtime
    moves = [line.partition("\t")[0].split() for line in (git / "logs" / "HEAD").read_text().splitlines()]
    return next((move[1] for move in reversed(moves) if int(move[-2]) <= until), "")
