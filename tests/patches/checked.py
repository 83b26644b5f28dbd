"""What the own tests of the patches were last run on: `make test-patches` notes it, a test compares it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).parent / "checked.json"
HOSTS = ("trl", "verl")


def now() -> dict[str, str]:
    """Versions of the hosts, and a digest of every patch and of what runs its tests."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for file in sorted(
        [
            *(ROOT / "patches").glob("*/*.patch"),
            *here.glob("mails.py"),
            *here.glob("trl_*.py"),
            *here.glob("verl_*.py"),
            *here.glob("test_*_patches.py"),
        ]
    ):
        digest.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return {**{host: importlib.metadata.version(host) for host in HOSTS}, "digest": digest.hexdigest()}


if __name__ == "__main__":
    FILE.write_text(json.dumps(now(), indent=1) + "\n")
    print(f"noted in {FILE.relative_to(ROOT)}")
