"""`late_torch`: classes of methods without the two seconds that loading torch takes."""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def late_torch() -> None:
    """From now on `import torch` gives a stand-in. What modules take from it at their top (`from torch import Tensor`)
    is a stand-in, too; the first one that is called or asked for anything loads torch and hands it through. A function
    that asks for a part of torch gets the part itself. For commands that print what a class says and end."""
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torch" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        later = _Later(self.__name__, name)
        return later if sys._getframe(1).f_code.co_name in _AT_IMPORT else later._real()


_AT_IMPORT = ("<module>", "_handle_fromlist")  # who looks when `from torch import` is at the top of a module


class _Later:
    def __init__(self, module: str, name: str) -> None:
        self._place = module, name

    def _real(self) -> Any:
        for finder in [f for f in sys.meta_path if isinstance(f, _Finder)]:
            sys.meta_path.remove(finder)
            for name in [n for n, m in sys.modules.items() if isinstance(m, _Module)]:
                del sys.modules[name]
        module, name = self._place
        return getattr(importlib.import_module(module), name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._real()(*args, **options)

    def __mro_entries__(self, bases: Any) -> tuple[Any, ...]:
        return (self._real(),)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, self._real())
