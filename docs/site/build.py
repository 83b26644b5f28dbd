"""`make site`: writes the pages and builds the site from them; every warning of Sphinx is an error."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pages

from rl_plugins.core.files import claim


def build(out: Path, source: Path) -> int:
    """Builds the site into `out` by way of `source`, which is emptied first. Returns the exit status of Sphinx."""
    claim(out, "site")
    pages.write(source)
    options = ["-n", "-W", "--keep-going", "-q", "-E", "-j", "2", "-b", "html", "-c", str(Path(__file__).parent)]
    doctrees = ["-d", str(source.with_name(source.name + "-doctrees"))]
    return subprocess.run([sys.executable, "-m", "sphinx", *options, *doctrees, str(source), str(out)]).returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/site/html"))
    args = parser.parse_args()
    status = build(args.out, args.out.with_name(f"{args.out.name}-source"))
    if status == 0:
        print(f"Site: {args.out / 'index.html'}")
    sys.exit(status)
