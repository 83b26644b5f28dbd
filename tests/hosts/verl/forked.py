"""Processes that are forks of one that has imported the libraries.

Each of a run's dozen processes imports torch, transformers and others, which takes eight seconds of CPU. verl and what
is ours, which each of them still imports by itself, take half a second.

    python forked.py -m MODULE ARGUMENT...      as `python -m`, and forks itself before, so that there is one to fork
    python forked.py SCRIPT ARGUMENT...         as `python SCRIPT`, in a fork of that: as Ray starts workers
    python forked.py                            only the one to fork, until the standard input ends

Linux only. The environment variable `MARK` tells runs apart.
"""

import json
import os
import signal
import socket
import sys

MARK = "RL_PLUGINS_TEST_RUN"
LIBRARIES = (  # not Ray: it keeps the environment it is imported in
    *("tensordict", "transformers.models.auto.modeling_auto", "transformers.modeling_utils", "datasets", "peft"),
    *(
        "torch.distributed.checkpoint",
        "hydra",
        "fastapi",
        "uvicorn",
        "aiohttp",
        "scipy.stats",
        "zmq",
        "grpc",
        "msgspec",
    ),
)


def name() -> str:
    return f"\0rl-plugins-{os.environ[MARK]}"


def served(listener: socket.socket) -> list[str]:
    """Forks a process for each worker that is asked for; returns in these processes only, with the command line."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        connection, _ = listener.accept()
        message, files, _, _ = socket.recv_fds(connection, 2**20, 3)
        if os.fork() == 0:
            break
        connection.close()
        for file in files:
            os.close(file)
    listener.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    asked = json.loads(message)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    globals()["open_until_the_end"] = connection
    return asked["command"]


def ask() -> None:
    """Has this command line run in a fork, and waits for its end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(name())
        asked = {"command": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}
        socket.send_fds(connection, [json.dumps(asked).encode()], [0, 1, 2])
        connection.recv(1)


def main() -> None:
    if sys.argv[1:] and sys.argv[1] != "-m":
        return ask()
    import ctypes
    import importlib
    import runpy

    sys.path[0] = os.getcwd()
    for library in LIBRARIES:
        importlib.import_module(library)
    import numpy as np

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(name())
    listener.listen(64)
    driver = os.getpid()
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the driver
        if os.getppid() != driver:
            return None
        sys.argv[:] = served(listener)
        np.random.seed()  # as in a new process; Python's own generator does so by itself
        runpy.run_path(sys.argv[0], run_name="__main__")
        return None
    listener.close()
    if not sys.argv[1:]:
        print("ready", flush=True)
        sys.stdin.read()
        return None
    del sys.argv[0:2]
    runpy._run_module_as_main(sys.argv[0])
    return None


if __name__ == "__main__":
    main()
