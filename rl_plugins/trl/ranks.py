"""One driver, many ranks: what is decided once, and how every rank learns of it or of the error."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rl_plugins.errors import MethodError, RLPluginsError
from rl_plugins.runtime.seconds import SECONDS
from rl_plugins.trl.host import Accelerator

T = TypeVar("T")


def on_driver(accelerator: Accelerator, decide: Callable[[], T]) -> T:
    """Runs `decide` in the main process; every rank gets its result, or raises its error. Nobody waits in vain.

    Raises:
        RLPluginsError: the same class and message on every rank. An error of another class becomes a MethodError with
            its traceback.
    """
    from accelerate.utils import broadcast_object_list

    box: list[Any] = [None]
    if accelerator.is_main_process:
        try:
            box = [("done", decide())]
        except RLPluginsError as e:
            if accelerator.num_processes == 1:
                raise
            box = [("error", (type(e), str(e)))]
        except Exception as e:
            if accelerator.num_processes == 1:
                raise
            box = [("error", (MethodError, f"{type(e).__name__}: {e}\n{traceback.format_exc()}"))]
    if accelerator.num_processes > 1:
        with SECONDS.part("gather"):
            broadcast_object_list(box)
    kind, content = box[0]
    if kind == "error":
        raise content[0](content[1])
    result: T = content
    return result


def gather(accelerator: Accelerator, part: T) -> list[T]:
    """The parts of all ranks, in rank order, on every rank."""
    if accelerator.num_processes == 1:
        return [part]
    from accelerate.utils import gather_object

    with SECONDS.part("gather"):
        parts: list[T] = gather_object([part])
    return parts


def rows_each(count: int, ranks: int, at_least: int) -> int:
    """How many of `count` rows each rank holds, fillers included."""
    return max(-(-count // ranks), at_least)


def deal(items: Sequence[T], ranks: int, at_least: int, filler: T) -> list[list[T]]:
    """Splits `items` into equally long runs, one per rank; fillers at the very end close the gap.

    TRL gathers tensors of fixed shapes, so every rank must hold equally many rows. A group may straddle ranks.
    """
    each = rows_each(len(items), ranks, at_least)
    full = [*items, *[filler] * (each * ranks - len(items))]
    return [full[k * each : (k + 1) * each] for k in range(ranks)]
