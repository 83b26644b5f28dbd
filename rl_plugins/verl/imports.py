"""Actions that run right after a module of verl was imported.

verl imports its plugins at the end of `import verl`, in every process, long before most of its own modules exist. An
action placed here costs nothing until the module it waits for is imported, runs once, and does not depend on the order
in which plugins are loaded.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Action = Callable[[ModuleType], None]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it asks the other finders and adds the actions to the loader they gave."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Action]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.waiting:
            return None
        actions = self.waiting.pop(name)  # out of the way, so that the search below does not come back here
        try:
            spec = importlib.util.find_spec(name)
        except Exception:
            self.waiting[name] = actions
            raise
        if spec is None or spec.loader is None:
            self.waiting[name] = actions
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            try:
                execute(module)
            except Exception:
                self.waiting.setdefault(name, []).extend(actions)  # the import may be tried again
                raise
            for action in actions:
                action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = _Finder()
_placed: set[tuple[str, Action]] = set()


def after_import(module: str, action: Action) -> None:
    """Runs `action(module)` once, however often it is placed, after `module` was imported; at once if it is there
    already.

    An exception of the action ends the import it belongs to.
    """
    if (module, action) in _placed:
        return
    _placed.add((module, action))
    loaded = sys.modules.get(module)
    spec = getattr(loaded, "__spec__", None)
    if loaded is not None and not getattr(spec, "_initializing", False):
        action(loaded)
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.waiting.setdefault(module, []).append(action)
