"""The process behind :class:`rl_plugins.lab.demo.environments.sandbox.Sandbox`: forks itself for every piece of code.

Run as `python -I -S sandbox_worker.py PARENT`, it imports the standard library only. It runs no foreign code itself. A
fork that does has lost its rights first: a seccomp filter lets through the system calls of plain computing and refuses
every other, so the code can open no file, start no process or thread, send no signal and reach no network.

Messages on standard input and output are JSON with a length of 4 bytes before it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import platform
import resource
import select
import signal
import struct
import sys
import time
from typing import Any, NoReturn

# Code cannot open files, so it can import what is named here, what is built in and what is frozen into the interpreter.
_PRELOADED = (
    "bisect cmath collections copy dataclasses datetime decimal enum fractions functools heapq itertools json math "
    "numbers operator random re statistics string textwrap typing"
)

# System calls that compute, write to what is open, and end. Numbers of the two platforms' kernels.
_ALLOWED = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "fstat": (5, 80),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "nanosleep": (35, 101),
    "getpid": (39, 172),
    "exit": (60, 93),
    "gettimeofday": (96, 169),
    "getuid": (102, 174),
    "getgid": (104, 176),
    "geteuid": (107, 175),
    "getegid": (108, 177),
    "getppid": (110, 173),
    "sigaltstack": (131, 132),
    "gettid": (186, 178),
    "futex": (202, 98),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "exit_group": (231, 94),
    "getrandom": (318, 278),
}
_PLATFORMS = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of _ALLOWED, AUDIT_ARCH
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF: load a word, jump if equal, return
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | 1, 0x80000000  # refused calls fail with EPERM


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def filter_program() -> bytes | None:
    """The seccomp filter for this platform, None where there is none."""
    if sys.platform != "linux" or platform.machine() not in _PLATFORMS:
        return None
    column, architecture = _PLATFORMS[platform.machine()]
    numbers = [pair[column] for pair in _ALLOWED.values()]
    lines = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    lines += [(_EQUAL, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    lines += [(_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def prctl(option: int, *arguments: int) -> bool:
    """Whether the call succeeded."""
    padded = (*arguments, 0, 0, 0, 0)[:4]
    return bool(ctypes.CDLL(None).prctl(option, *map(ctypes.c_ulong, padded)) == 0)


def install_filter() -> bool:
    """Give up every system call that is not allowed, for good. False where the platform has no such filter."""
    lines = filter_program()
    if lines is None:
        return False
    program = _Program(len(lines) // 8, lines)
    return prctl(_PR_SET_NO_NEW_PRIVS, 1) and prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program))


def confine(timeout: float, memory: int) -> None:
    """Limit this process. `memory` bytes of address space come on top of what it has."""
    if sys.platform == "linux":
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with open("/proc/self/statm") as statm:
            memory += int(statm.read().split()[0]) * resource.getpagesize()
    seconds = math.ceil(timeout) + 1
    limits = {"AS": memory, "CPU": seconds, "FSIZE": 0, "NPROC": 0, "CORE": 0}
    for name, limit in limits.items():
        _, hard = resource.getrlimit(which := getattr(resource, f"RLIMIT_{name}"))
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(which, (limit, limit))


def run_code(code: str) -> NoReturn:
    """Run code as a main program and end this process as Python would, with one line about what was raised."""
    status = 0
    try:
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException as error:  # Python's own answer to whatever ends a script
        status = 1
        print(f"{type(error).__name__}: {error}".rstrip(": "), file=sys.stderr)
    finally:  # also when printing the error failed
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status & 255)


def start(code: str, timeout: float, memory: int, filtered: bool) -> tuple[int, int, int]:
    """Fork for a piece of code; returns the fork's process id and what to read its output and its errors from."""
    out, out_end = os.pipe()
    err, err_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out_end, 1)
            os.dup2(err_end, 2)
            os.closerange(3, 64)  # the worker holds no more
            sys.stdin, sys.stdout, sys.stderr = (
                open(fd, mode, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
                for fd, mode in ((0, "r"), (1, "w"), (2, "w"))
            )
            confine(timeout, memory)
            if filtered and not install_filter():
                raise OSError("the filter of system calls could not be installed")
            run_code(code)
        except Exception as error:
            os.write(2, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(1)
    os.close(out_end)
    os.close(err_end)
    return pid, out, err


def supervise(code: str, timeout: float, memory: int, max_output: int, filtered: bool) -> dict[str, Any]:
    """Run code in a fork and see to its end: "text" and "error" (None if it ended well)."""
    deadline = time.monotonic() + timeout
    pid, out, err = start(code, timeout, memory, filtered)
    read = {out: b"", err: b""}
    ended_by = None
    streams = [out, err]
    while streams and ended_by is None:
        ready, _, _ = select.select(streams, [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            ended_by = f"stopped after {timeout:g} s"
        for stream in ready:
            chunk = os.read(stream, 65536)
            read[stream] += chunk
            if not chunk:
                streams.remove(stream)
            elif len(read[stream]) > max_output:
                ended_by = f"stopped after {max_output} bytes of output"
    status = None
    while status is None and ended_by is None:  # it may have closed its output and go on
        ended, code_of_exit = os.waitpid(pid, os.WNOHANG)
        if ended:
            status = code_of_exit
        elif time.monotonic() > deadline:
            ended_by = f"stopped after {timeout:g} s"
        else:
            time.sleep(0.0002)
    if status is None:
        os.killpg(pid, signal.SIGKILL)  # its session, whose id is not free before the wait
        _, status = os.waitpid(pid, 0)
    os.close(out)
    os.close(err)
    error = ended_by or _error(os.waitstatus_to_exitcode(status), read[err][:max_output])
    return {"text": read[out][:max_output].decode("utf-8", "replace"), "error": error}


def _error(exit_code: int, written: bytes) -> str | None:
    if exit_code == 0:
        return None
    if exit_code < 0:
        return f"ended by {signal.Signals(-exit_code).name}"
    lines = written.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else f"ended with status {exit_code}"


def receive(parent: int) -> Any:
    """The next request, None when there is no one left to send one."""
    while not select.select([0], [], [], 1.0)[0]:
        if os.getppid() != parent:  # another fork of the parent may hold the pipe open
            return None
    head = _read(4)
    return json.loads(_read(*struct.unpack("<I", head))) if len(head) == 4 else None


def send(message: Any) -> None:
    content = json.dumps(message).encode()
    data = struct.pack("<I", len(content)) + content
    while data:
        data = data[os.write(1, data) :]


def _read(count: int) -> bytes:
    data = bytearray()  # grows in place
    while len(data) < count and (chunk := os.read(0, count - len(data))):
        data += chunk
    return bytes(data)


def can_filter() -> bool:
    """Whether the filter works here, tried in a fork."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if install_filter() else 1)
    return os.waitpid(pid, 0)[1] == 0


def main() -> None:
    parent = int(sys.argv[1])
    for name in _PRELOADED.split():
        importlib.import_module(name)
    filtered = can_filter()
    send({"filtered": filtered})
    while (request := receive(parent)) is not None:
        send(supervise(**request, filtered=filtered))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is the parent's to handle
    main()
