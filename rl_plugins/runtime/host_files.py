"""The host's files in a checkpoint: their names, sizes and checksums, so that a resume knows what was lost or changed.

Every rank reads a share of the files it sees, so a checkpoint on the disks of several nodes is read, too, and one on a
shared disk is read once.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import xxhash

from rl_plugins.core.errors import StateError
from rl_plugins.runtime.ranks import Ranks, everywhere
from rl_plugins.runtime.state import BEFORE, FOLDER, WRITING

Files = Mapping[str, Sequence[int | str]]
"""Path in the checkpoint -> bytes, checksum."""
_OURS = (FOLDER, WRITING, BEFORE)
_UNREAD = re.compile(r"(.*/)?(\.(?!metadata$).*|[^/]*\.md)")  # no host reads them; `.metadata` is torch's


def sizes(folder: str | Path, left_out: Sequence[str] = ()) -> dict[str, int]:
    """Files of the host in a checkpoint, as this process sees them.

    Args:
        left_out: names in the folder that are not the host's, or that it writes later.
    """
    root, skipped = Path(folder), {*_OURS, *left_out}
    found = {}
    for file in sorted(root.rglob("*")):
        name = file.relative_to(root)
        if name.parts[0] not in skipped and not _UNREAD.fullmatch(name.as_posix()) and file.is_file():
            found[name.as_posix()] = file.stat().st_size
    return found


def checksums(folder: str | Path, names: Sequence[str]) -> dict[str, list[int | str]]:
    """Size and XXH3 (128 bits) of files.

    Raises:
        StateError: one cannot be read.
    """
    found: dict[str, list[int | str]] = {}
    for name in names:
        try:
            with (Path(folder) / name).open("rb") as file:
                digest = hashlib.file_digest(file, xxhash.xxh3_128)  # type: ignore[arg-type]  # it only calls `update`
                found[name] = [file.tell(), digest.hexdigest()]
        except OSError as e:
            raise StateError(
                f"The file {name} of the checkpoint {folder} cannot be read: {e.strerror or e}. Nothing was trained."
            ) from None
    return found


def shares(seen: Sequence[Mapping[str, int]]) -> list[list[str]]:
    """Which rank reads which files: each file one of those that see it, the one with the fewest bytes so far.

    Args:
        seen: of every rank, the files it sees.
    """
    load, out = [0] * len(seen), [[] for _ in seen]  # type: tuple[list[int], list[list[str]]]
    every = {name: size for rank in seen for name, size in rank.items()}
    for name in sorted(every, key=lambda n: (-every[n], n)):
        rank = min((r for r in range(len(seen)) if name in seen[r]), key=load.__getitem__)
        load[rank] += every[name]
        out[rank].append(name)
    return out


def of_ranks(ranks: Ranks, folder: str | Path, left_out: Sequence[str] = ()) -> dict[str, list[int | str]]:
    """The host's files with their checksums, read by all ranks together; the same on every rank.

    Raises:
        StateError: one cannot be read.
    """
    mine = shares(everywhere(ranks, lambda: sizes(folder, left_out)))[ranks.process_index]
    parts = everywhere(ranks, lambda: checksums(folder, mine))
    return {name: found for part in parts for name, found in part.items()}


def differences(saved: Files, found: Files, read: str) -> list[str]:
    """What was lost, changed or added since the files were saved, a phrase each.

    Args:
        read: pattern of the paths that the host would read; other files may be added.
    """
    out = []
    for name, (size, checksum) in sorted(saved.items()):
        if name not in found:
            out.append(f"{name} is missing")
        elif found[name][0] != size:
            out.append(f"{name} has {found[name][0]} bytes in place of {size}")
        elif found[name][1] != checksum:
            out.append(f"{name} has another content")
    return out + [f"{name} was added" for name in sorted(set(found) - set(saved)) if re.fullmatch(read, name)]
