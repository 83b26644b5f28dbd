"""Gives README.md links that work on a package index: `python docs/absolute_links.py ADDRESS [FILE]`.

ADDRESS is that of a tag in the repository, such as https://example.org/owner/rl-plugins/blob/v0.1.0. Pictures get
`?raw=true`. RELEASING.md says when.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path


def absolute(text: str, address: str) -> str:
    """The page with the address before every relative link; those to headings of the page stay."""

    def moved(found: re.Match[str]) -> str:
        picture, words, target = found.groups()
        if re.match(r"https?:|#", target):
            return found[0]
        return f"{picture}[{words}]({address.rstrip('/')}/{target}{'?raw=true' if picture else ''})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", moved, text)


if __name__ == "__main__":
    page = Path(sys.argv[2] if len(sys.argv) > 2 else "README.md")
    page.write_text(absolute(page.read_text(encoding="utf-8"), sys.argv[1]), encoding="utf-8")
