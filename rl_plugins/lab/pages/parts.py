"""Parts of written pages that only the site has: between two marks stands where else to find them."""

from __future__ import annotations

from rl_plugins.core.errors import ConfigError


def filled(text: str, part: str, made: str) -> str:
    """The page with `made` between the marks of `part`.

    Raises:
        ConfigError: the page lacks the marks.
    """
    start, end = f"<!-- {part}: made by `make site` -->", f"<!-- end of the {part} -->"
    if start not in text or end not in text:
        raise ConfigError(f"The page needs the lines {start!r} and {end!r} around the part {part!r}. Add them.")
    before, rest = text.split(start)
    return f"{before}{start}\n{made}\n{end}{rest.split(end)[1]}"
