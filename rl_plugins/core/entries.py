"""`Entries`: a sequence that never changes and shares its storage with those it grew from, so that growing costs what
is new. The columns of a `Trajectory` are such sequences."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")


class Entries(Sequence[T]):
    """Behaves like a tuple: slices and sums are tuples, it equals a tuple of the same values (NaN equals NaN).

    Growing the newest of them appends to the storage they share; growing an older one, where sequences branch, copies
    what it has first. A number takes its bytes instead of an object.

    Args:
        values: of the beginning.
        code: of the numbers as `array` has it ("q" int64, "b" int8, "d" float64); "": any objects.
    """

    __slots__ = ("_end", "_hashed", "_length", "_seen", "_store")

    def __init__(self, values: Iterable[T] = (), code: str = "") -> None:
        self._store: Any = array(code, values) if code else list(values)  # type: ignore[arg-type,type-var]
        self._length = len(self._store)
        self._seen: tuple[int, Any, Any] = (0, None, None)  # of how many the smallest and the largest are known
        self._hashed: tuple[int, bytes, Any] = (0, b"", None)  # how many after what, and their hash
        self._end = bytearray(1)  # whoever pops it may append; popping is atomic, so threads need no lock

    @classmethod
    def of(cls, values: Iterable[T], code: str = "") -> Entries[T]:
        """`values` themselves, if they are entries of this kind."""
        return values if isinstance(values, cls) and values.code == code else cls(values, code)

    @classmethod
    def of_array(cls, values: NDArray[Any], code: str) -> Entries[Any]:
        """Of a numpy array of the type `code` stands for, copied in one piece."""
        return _of_bytes(code, values.tobytes())

    @property
    def code(self) -> str:
        return getattr(self._store, "typecode", "")

    def grown(self, values: Sequence[T], times: int = 1) -> Entries[T]:
        """With further values, `times` times."""
        code = self.code
        new: Any = (array(code, values) if code else list(values)) * times  # type: ignore[arg-type,type-var]
        store = self._store
        try:
            self._end.pop()
        except IndexError:  # another one has grown from here
            store = store[: self._length]
        store.extend(new)
        grown: Entries[T] = object.__new__(Entries)
        grown._store, grown._length, grown._end = store, self._length + len(new), bytearray(1)
        grown._seen, grown._hashed = self._seen, self._hashed
        return grown

    def bounds(self) -> tuple[T, T]:
        """The smallest and the largest of numbers. Those it grew from are not looked at again.

        Raises:
            ValueError: there is none.
        """
        seen, low, high = self._seen
        if seen < self._length:
            new = self._store[seen : self._length]
            low = min(new) if low is None else min(low, min(new))
            high = max(new) if high is None else max(high, max(new))
            self._seen = self._length, low, high
        if low is None:
            raise ValueError("no entries")
        return low, high

    def hashed(self, start: Any, length: int) -> Any:
        """A `hashlib` object of what `start` hashed and of the first `length` numbers. What the sequences it grew from
        have hashed after the same start is not hashed again."""
        known, origin, found = self._hashed
        if known > length or origin != start.digest():
            known, found = 0, start
        found = found.copy()
        found.update(self._store[known:length].tobytes())
        self._hashed = length, start.digest(), found.copy()
        return found

    def tolist(self) -> list[T]:
        """The values as a list."""
        store = self._store if len(self._store) == self._length else self._store[: self._length]
        return list(store.tolist() if self.code else store)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[T, ...]: ...
    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, slice):
            start, stop, step = place.indices(self._length)
            return tuple(self._store[start:stop:step] if step > 0 else self.tolist()[place])
        at = place + self._length if place < 0 else place
        if not 0 <= at < self._length:
            raise IndexError(f"place {place} of {self._length} entries")
        return self._store[at]

    def __iter__(self) -> Iterator[T]:
        return iter(self.tolist())

    def __contains__(self, value: object) -> bool:
        return value in self.tolist()

    def count(self, value: Any) -> int:
        return self.tolist().count(value)

    def index(self, value: Any, *limits: int) -> int:
        return self.tolist().index(value, *limits)

    def __add__(self, other: Iterable[T]) -> tuple[T, ...]:
        return (*self, *other)

    def __radd__(self, other: Iterable[T]) -> tuple[T, ...]:
        return (*other, *self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, tuple | Entries):
            return NotImplemented
        if len(self) != len(other):
            return False
        return all(a == b or (a != a and b != b) for a, b in zip(self, other, strict=True))

    def __lt__(self, other: Iterable[T]) -> bool:
        return tuple(self) < tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> Any:
        code = self.code
        return (_of_bytes, (code, self._store[: self._length].tobytes())) if code else (Entries, (self.tolist(),))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """A copy: an array that shared the storage would keep it from growing."""
        import numpy as np

        made: np.ndarray[Any, Any] = np.array(self._store[: self._length])
        return made if dtype is None else made.astype(dtype, copy=False)


def _of_bytes(code: str, data: bytes) -> Entries[Any]:
    store = array(code)
    store.frombytes(data)
    return Entries(store, code)
