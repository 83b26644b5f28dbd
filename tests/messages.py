"""Errors that tests expect. A test asserts the type and what the text names: an option, a method, a hook, a number. The
whole texts are kept in messages.txt. It is compared once, when all tests have run, and a difference is shown: a message
may be written better without a failing test. With CHECK_MESSAGES=1 a difference fails the run.

`UPDATE_MESSAGES=1 make test` writes the file; any other run of pytest with it writes the part of its tests.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

FILE = Path(__file__).parent / "messages.txt"
ROOT = str(Path(__file__).parents[1])
seen: dict[str, list[str]] = {}  # test -> its texts
# What differs between two runs or machines.
PLACES = [
    (r"[\w./-]*/pytest-of-[^/]+/pytest-\d+/(popen-gw\d+/)?[^/\s'\"`,;:)]+", "TMP"),
    (re.escape(ROOT), "ROOT"),
    (r"0x[0-9a-f]{6,}", "0x0"),
    (r" \(git [0-9a-f]{8}\)", ""),
    (r'(^ +File ".*", line \d+.*\n(^    .*\n)*)+', "  File ..\n"),
    (r"(127\.0\.0\.1|localhost):\d+", r"\1:PORT"),
]


@contextlib.contextmanager
def raises(
    kind: type[BaseException] | tuple[type[BaseException], ...], match: str | re.Pattern[str] | None = None
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """`pytest.raises` for an error of this package: its text is compared with messages.txt, too."""
    with pytest.raises(kind, match=match) as error:
        yield error
    note(str(error.value))


def note(text: str) -> None:
    """Keeps a text of the test that runs now."""
    for pattern, place in [*PLACES, (r"[ \t]+$", "")]:
        text = re.sub(pattern, place, text, flags=re.M)
    texts = seen.setdefault(os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0], [])
    if text not in texts:
        texts.append(text)


def changes() -> str:
    """Where the texts of this run differ from those that are kept, as a diff."""
    kept = read()
    of_run = {test: kept[test] for test in seen if test in kept}
    lines = difflib.unified_diff(shown(of_run), shown(seen), "messages.txt", "this run", n=1, lineterm="")
    return "\n".join(lines)


def update(whole: bool) -> None:
    """Writes the texts of this run into the file. If it ran whole files, their tests that have no text lose theirs."""
    files = {test.partition("::")[0] for test in seen} if whole else set()
    others = {test: texts for test, texts in read().items() if test.partition("::")[0] not in files}
    FILE.write_text("\n".join(shown(others | seen)) + "\n", encoding="utf-8")


def shown(texts: Mapping[str, list[str]]) -> list[str]:
    lines = []
    for test in sorted(texts):
        lines.append(test)
        for text in texts[test]:
            first, *more = text.split("\n")
            lines += [f"  > {first}", *(f"    {line}".rstrip() for line in more)]
    return lines


def read() -> dict[str, list[str]]:
    texts: dict[str, list[str]] = {}
    test = ""
    text = FILE.read_text(encoding="utf-8").strip("\n") if FILE.exists() else ""
    for line in text.split("\n") if text else []:
        if line.startswith("  > "):
            texts[test].append(line[4:])
        elif not line or line.startswith("    "):
            texts[test][-1] += "\n" + line[4:]
        else:
            test = line
            texts[test] = []
    return texts
