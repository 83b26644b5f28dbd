"""One driver, many ranks: what is decided once, and how every rank learns of it or of the error."""

from __future__ import annotations

import copyreg
import io
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from rl_plugins.core.errors import MethodError, RLPluginsError

T = TypeVar("T")


class Ranks(Protocol):
    """What is used of accelerate's `Accelerator`."""

    num_processes: int
    process_index: int
    is_main_process: bool
    device: torch.device


def dumps(value: Any) -> bytes:
    """A value as it travels between processes; `pickle.loads` opens it. A tensor on the CPU is the bytes of its own
    entries: torch would write an archive for each, which costs 50 us, with all of the storage that it is a view of."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: _reduced}
    pickler.dump(value)
    return buffer.getvalue()


def _reduced(x: Tensor) -> Any:
    try:
        entries = (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()
    except (TypeError, RuntimeError):  # on a GPU, sparse, nested, with a graph
        return x.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
    return _tensor, (bytearray(entries.data), x.dtype, entries.shape)


def _tensor(entries: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(entries, dtype=dtype).view(shape) if entries else torch.empty(shape, dtype=dtype)


def on_driver(accelerator: Ranks, decide: Callable[[], T]) -> T:
    """Runs `decide` in the main process; every rank gets its result, or raises its error. No rank
    waits for a result that never comes.

    Raises:
        RLPluginsError: the same class and message on every rank. An error of another class becomes a MethodError with
            its traceback.
    """
    from accelerate.utils import broadcast_object_list

    if accelerator.num_processes == 1:
        return decide()
    box: list[Any] = _told(lambda: [decide()], 1) if accelerator.is_main_process else [None]
    broadcast_object_list(box)
    return _opened(box[0])


def on_driver_for_each(accelerator: Ranks, decide: Callable[[], Sequence[T]]) -> T:
    """As `on_driver`, for a `decide` that returns a result for each rank; every rank gets its own and no other.

    Raises:
        RLPluginsError: as `on_driver`.
    """
    if accelerator.num_processes == 1:
        return decide()[0]
    boxes = _told(decide, accelerator.num_processes) if accelerator.is_main_process else None
    mine: list[Any] = [None]
    torch.distributed.scatter_object_list(mine, boxes, src=0)
    return _opened(mine[0])


def _told(decide: Callable[[], Sequence[Any]], count: int) -> list[bytes]:
    """What each of so many is told: its result, or the class and text of the error."""
    error: tuple[type[RLPluginsError], str]
    try:
        return [dumps(("done", part)) for part in decide()]
    except RLPluginsError as e:
        error = type(e), str(e)
    except Exception as e:
        error = MethodError, f"{type(e).__name__}: {e}\n{traceback.format_exc()}"
    return [dumps(("error", error))] * count


def _opened(told: bytes) -> Any:
    kind, content = pickle.loads(told)
    if kind == "error":
        raise content[0](content[1])
    return content


def gather(accelerator: Ranks, part: T) -> list[T]:
    """The parts of all ranks, in rank order, on every rank."""
    if accelerator.num_processes == 1:
        return [part]
    from accelerate.utils import gather_object

    return [pickle.loads(p) for p in gather_object([dumps(part)])]


def to_driver(accelerator: Ranks, part: T) -> list[T]:
    """The parts of all ranks, in rank order, in the main process; nothing elsewhere."""
    if accelerator.num_processes == 1:
        return [part]
    parts: list[Any] | None = [None] * accelerator.num_processes if accelerator.is_main_process else None
    torch.distributed.gather_object(dumps(part), parts, dst=0)
    return [pickle.loads(p) for p in parts or ()]


def to_owners(accelerator: Ranks, items: Mapping[int, T], owner: Callable[[int], int]) -> dict[int, T]:
    """Items of all ranks, by their places, each where it belongs: an item goes to its owner and to nobody else.

    Args:
        items: of this rank; no place is with two ranks.
        owner: place -> the rank that needs it.

    Returns:
        Those this rank owns.
    """
    rank, ranks = accelerator.process_index, accelerator.num_processes
    if ranks == 1:
        return dict(items)
    leaving: list[dict[int, T]] = [{} for _ in range(ranks)]
    for place, item in items.items():
        leaving[owner(place)][place] = item
    mine, leaving[rank] = leaving[rank], {}
    packed = [dumps(part) if part else b"" for part in leaving]
    device = accelerator.device
    sizes = torch.tensor([len(p) for p in packed], device=device)
    coming = torch.empty_like(sizes)
    torch.distributed.all_to_all_single(coming, sizes)
    sent = torch.frombuffer(bytearray(b"".join(packed)) or bytearray(1), dtype=torch.uint8).to(device)
    got = torch.empty(int(coming.sum()), dtype=torch.uint8, device=device)
    torch.distributed.all_to_all_single(got, sent[: int(sizes.sum())], coming.tolist(), sizes.tolist())
    for part in torch.split(got.cpu(), coming.tolist()):
        mine |= pickle.loads(part.numpy().tobytes()) if len(part) else {}
    return mine


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


def everywhere(accelerator: Ranks, work: Callable[[], T]) -> list[T]:
    """Runs `work` on every rank; every rank gets the results of all, in rank order, or raises the first error.

    Raises:
        RLPluginsError: as `on_driver`.
    """
    if accelerator.num_processes == 1:
        return [work()]
    return [_opened(told) for told in gather(accelerator, *_told(lambda: [work()], 1))]
