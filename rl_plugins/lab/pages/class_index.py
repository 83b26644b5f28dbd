"""`cards/index.json`: what the classes of this package say to somebody who chooses."""

from __future__ import annotations

import json
from dataclasses import asdict

from rl_plugins.cards.catalog import OURS, card_of, entry_of, plugins
from rl_plugins.cards.pairs import conflicts, excluded
from rl_plugins.cards.usage import needs_of_async, usage_of
from rl_plugins.core.method import Bundle
from rl_plugins.runtime import registry


def text() -> str:
    """The file, a line for each name. It is made from the classes alone."""
    vetoed = plugins()
    names = [n for n in registry.all_names() if any(not o.distribution for o in registry.origins_of(n))]
    found = {name: registry.load(name, vetoed) for name in names}
    apart = conflicts(tuple(cls for cls in found.values() if not isinstance(cls, Bundle)))
    lines = []
    for name, of in found.items():
        entry = asdict(entry_of(of, OURS, vetoed))
        del entry["name"], entry["problem"]
        usage = usage_of(of, paper=False)
        use = {"trl": usage.flags(), "verl": " ".join(usage.overrides(base=False))}
        said = {
            "entry": entry,
            "use": use,
            "needs": usage.needs,
            "asynchronous": needs_of_async(of),
            "notes": usage.notes,
            "excludes": excluded(apart, card_of(of, vetoed).parts),
        }
        lines.append(f"{json.dumps(name)}: {json.dumps(said)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
