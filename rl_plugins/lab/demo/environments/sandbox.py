"""Runs Python code that nobody has read, such as a model's, and lets nothing of it live on."""

from __future__ import annotations

import json
import os
import selectors
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("sandbox_worker.py")
START_SECONDS = 30.0  # a busy machine takes a second or two
GRACE_SECONDS = 10.0  # beyond the time of a call, until a worker that takes nothing or gives nothing is given up


@dataclass(frozen=True)
class Outcome:
    """What became of a piece of code.

    Attributes:
        text: what it printed, cut to the limit; bytes that are not UTF-8 are shown as U+FFFD.
        error: None if it ended well, else one line: what it raised, or what stopped it.
    """

    text: str
    error: str | None = None


class Sandbox:
    """Runs each piece of code in a process of its own, forked from a worker that stays.

    On Linux (x86-64 and 64-bit ARM) the code cannot open files, start processes or threads, send signals or use a
    network: of the system calls it has only those of plain computing, whoever runs it. It can import `math`, `random`,
    `re`, `json`, `itertools` and the like (see `sandbox_worker`), and reads an empty standard input. Elsewhere only the
    limits on time, memory, size of files and number of processes hold, and the last does not bind root.

    The worker starts with the first call and ends with `close`, with the object, or with this process, however that
    ends. Calls from several threads run one after another.

    Args:
        timeout: seconds a piece of code may take.
        memory_mb: megabytes of address space it may take, beyond the interpreter.
        max_output: bytes it may print.
        max_code: bytes of code. More is not run, and the outcome says so.
        require_filter: refuse to run where the code could leave processes behind: as root on a system without a filter
            of system calls. False for code that is checked beforehand.

    Raises:
        ValueError: a limit is not positive.
    """

    def __init__(
        self,
        timeout: float = 1.0,
        memory_mb: int = 256,
        max_output: int = 4096,
        require_filter: bool = True,
        max_code: int = 2**20,
    ) -> None:
        if not min(timeout, memory_mb, max_output, max_code) > 0:
            raise ValueError(
                f"timeout is {timeout}, memory_mb {memory_mb}, max_output {max_output} and max_code {max_code}; each "
                "must be above 0. Give seconds, megabytes, bytes and bytes."
            )
        self.timeout = timeout
        self.memory_mb = memory_mb
        self.max_output = max_output
        self.max_code = max_code
        self.require_filter = require_filter
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Sandbox:
        """Itself: nothing is kept between calls, so copies of an environment share it."""
        return self

    def run(self, code: str) -> Outcome:
        """Run code as a main program.

        Raises:
            RuntimeError: the worker does not start, or must not (see `require_filter`).
        """
        size = len(code) if len(code) > self.max_code else len(code.encode("utf-8", "surrogatepass"))
        if size > self.max_code:
            return Outcome("", f"not run: the code has {size} bytes or more, {self.max_code} are allowed")
        with self._lock:
            if self._worker is not None and not self._worker.usable():
                self._give_up()
            if self._worker is None:
                self._worker = _Worker(self.require_filter)
            request = {
                "code": code,
                "timeout": self.timeout,
                "memory": self.memory_mb * 2**20,
                "max_output": self.max_output,
            }
            try:
                # The worker keeps the time; one that does not answer long after is given up.
                return Outcome(**self._worker.ask(request, self.timeout + GRACE_SECONDS))
            except OSError as error:
                self._give_up()
                return Outcome("", f"the sandbox's process failed: {error}")
            except BaseException:  # Ctrl-C, say: its answer would be taken for that of the next call
                self._give_up()
                raise

    def close(self) -> None:
        """End the worker; the next call of `run` starts another."""
        with self._lock:
            self._give_up()

    def _give_up(self) -> None:
        if self._worker is not None:
            self._worker.stop()
            self._worker = None


class _Worker:
    """The worker process and the two pipes to it."""

    def __init__(self, require_filter: bool) -> None:
        self.owner = os.getpid()
        self._folder = tempfile.TemporaryDirectory(prefix="rl-plugins-sandbox-")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(WORKER), str(self.owner)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd=self._folder.name,
            env={},
            start_new_session=True,
        )
        self.stop = weakref.finalize(self, _stop, self._process, self._folder, self.owner)
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)  # a worker that reads nothing must not hold up its owner
        try:
            filtered = self._receive(START_SECONDS)["filtered"]
        except OSError as error:
            self.stop()
            raise RuntimeError(
                f"The sandbox's process ({sys.executable} -I -S {WORKER.name}) does not start: {error}. Check that "
                "this interpreter can start as a process of its own, with an empty environment."
            ) from error
        if require_filter and not filtered and os.geteuid() == 0:
            self.stop()
            raise RuntimeError(
                "This system has no filter of system calls (seccomp) and the user is root, whom no limit keeps from "
                "starting processes, so code that nobody has read cannot be confined. Run as another user, or on "
                "Linux on x86-64 or 64-bit ARM; pass require_filter=False for code that is checked beforehand."
            )

    def usable(self) -> bool:
        """False if it has ended, or is the worker of the process this one was forked from."""
        return self.owner == os.getpid() and self._process.poll() is None

    def ask(self, request: dict[str, Any], seconds: float) -> Any:
        """The worker's answer. Raises OSError: it ended, or did not read the request or answer in time."""
        deadline = time.monotonic() + seconds
        content = json.dumps(request).encode()
        self._write(struct.pack("<I", len(content)) + content, deadline)
        return self._receive(max(0.0, deadline - time.monotonic()))

    def _write(self, content: bytes, deadline: float) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        data = memoryview(content)
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_WRITE)
            while data:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError("the code was not taken in time")
                data = data[os.write(pipe.fileno(), data) :]

    def _receive(self, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        (size,) = struct.unpack("<I", self._read(4, deadline))
        return json.loads(self._read(size, deadline))

    def _read(self, count: int, deadline: float) -> bytes:
        pipe = self._process.stdout
        assert pipe is not None
        data = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while len(data) < count:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError("no answer in time")
                chunk = os.read(pipe.fileno(), count - len(data))
                if not chunk:
                    raise ConnectionError("it has ended")
                data += chunk
        return bytes(data)


def _stop(process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str], owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of the owner has a copy of the object
    with suppress(OSError):
        process.kill()  # what it runs dies with it (Linux) or at its limit of CPU time
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    folder.cleanup()
