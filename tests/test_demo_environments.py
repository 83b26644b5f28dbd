"""The demo's environments: the sandbox, the three tasks, and the policies warm-started for them."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from waiting import NEVER, until

from rl_plugins.kit.agents import Environment
from rl_plugins.lab.demo import policy as demo_policy
from rl_plugins.lab.demo.environments import Calculator, Grid, Outcome, Sandbox, Shop, policy, sandbox
from rl_plugins.lab.demo.environments.calculator import is_arithmetic
from rl_plugins.lab.demo.environments.grid import MAZES
from rl_plugins.lab.demo.environments.shop import catalog

ENVIRONMENTS = [Calculator, Grid, Shop]
linux = pytest.mark.skipif(sys.platform != "linux", reason="processes and files are looked up in /proc")


# --- sandbox


def workers(parent: int | None = None) -> list[int]:
    """Process ids of a process's sandbox workers and of anything they forked, which has the same command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:  # it has ended meanwhile
                continue
            if line[-3:-1] == [str(sandbox.WORKER).encode(), str(parent or os.getpid()).encode()]:
                found.append(int(entry.name))
    return found


def resources() -> tuple[list[int], int, int]:
    return workers(), len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.fixture(scope="module")
def box():
    box = Sandbox(timeout=NEVER, memory_mb=128, max_output=1000)
    yield box
    box.close()


HOSTILE = {
    "loop": ("while True: pass", "stopped after 0.4 s"),
    "sleeps": ("import time; time.sleep(3600)", "stopped after 0.4 s"),
    "power": ("10**10**10", "stopped after 0.4 s"),
    "fork": ("import os; os.fork()", "PermissionError: [Errno 1] Operation not permitted"),
    "forks": (
        "import os, time\nfor i in range(20):\n  try:\n    if os.fork() == 0: os.setsid(); time.sleep(3600)\n"
        "  except OSError as e: print(e.errno)\nraise SystemExit('none')",
        "none",
    ),
    "starts a program": ("import posix; posix.execv('/bin/sh', ['sh', '-c', 'sleep 60'])", "PermissionError"),
    "thread": ("import _thread; _thread.start_new_thread(print, ())", "RuntimeError: can't start new thread"),
    "prints forever": ("while True: print('x' * 100)", "stopped after 1000 bytes of output"),
    "complains forever": ("import sys\nwhile True: print('x', file=sys.stderr)", "stopped after 1000 bytes of output"),
    "memory": ("x = bytearray(4 << 30)", "MemoryError"),
    "much memory": ("x = []\nwhile True: x.append(bytearray(16 << 20))", "MemoryError"),
    "raises": ("raise ValueError('no')", "ValueError: no"),
    "no syntax": ("1 +", "SyntaxError: invalid syntax (<code>, line 1)"),
    "surrogate": ("print('\ud800')", "UnicodeEncodeError"),
    "raises what cannot be shown": (
        "class E(Exception):\n  def __str__(self): raise E\nraise E",
        "ended with status 1",
    ),
    "_exit": ("import os; os._exit(3)", "ended with status 3"),
    "_exit is gone": ("import os; os._exit = lambda status: None", "Error"),
    "exit": ("import sys; sys.exit('bye')", "bye"),
    "aborts": ("import os; os.abort()", "ended by SIGSEGV"),
    "recursion": ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded"),
    "nesting": ("(" * 5000, "SyntaxError: too many nested parentheses"),
    "closes output, goes on": ("import os, time; os.close(1); os.close(2); time.sleep(3600)", "stopped after 0.4 s"),
    "writes a file": ("open('file', 'w')", "PermissionError"),
    "reads a file": ("open('/etc/passwd')", "PermissionError"),
    "deletes": ("import os; os.rmdir(os.getcwd())", "PermissionError"),
    "imports": ("import socket", "ModuleNotFoundError: No module named 'socket'"),
    "kills the worker": ("import os; os.kill(os.getppid(), 9)", "PermissionError: [Errno 1] Operation not permitted"),
    "signals all": ("import os; os.kill(-1, 0)", "PermissionError: [Errno 1] Operation not permitted"),
    "raises its limits": ("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "Error"),
    "ignores signals": (
        "import signal\nfor s in range(1, 32):\n  try: signal.signal(s, signal.SIG_IGN)\n  except OSError: pass\n"
        "while True: pass",
        "stopped after 0.4 s",
    ),
}


@linux
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_code_costs_only_its_own_call(box, name, monkeypatch):
    """What does not end is stopped at its time-out, whatever it sleeps or loops for. Only such code gets a short one:
    filling the memory takes a tenth of a second, and several on a busy machine."""
    code, error = HOSTILE[name]
    assert box.run("print(1)") == Outcome("1\n")
    before = resources()
    with monkeypatch.context() as patch:
        if error == "stopped after 0.4 s":
            patch.setattr(box, "timeout", 0.4)
        outcome = box.run(code)
    assert outcome.error is not None and error in outcome.error and len(outcome.text.encode()) <= 1000
    assert resources() == before  # the same worker, and nothing beside it
    assert box.run("print(2)") == Outcome("2\n")
    assert not list(Path(os.readlink(f"/proc/{workers()[0]}/cwd")).iterdir())


@linux
@pytest.mark.parametrize(
    "call",
    ["fork()", "vfork()", "socket(2, 1, 0)", "ptrace(16, os.getppid(), 0, 0)", "kill(os.getppid(), 9)", "setsid()",
     "open(b'/proc/self/mem', 2)", "mkdir(b'x', 511)", "setuid(1)", "prctl(22, 0, 0, 0, 0)", "pipe(0)", "dup(1)"],
)  # fmt: skip
def test_the_filter_holds_below_python(box, call):
    code = f"import ctypes, os; c = ctypes.CDLL(None, use_errno=True); print(c.{call}, ctypes.get_errno())"
    assert box.run(code) == Outcome("-1 1\n")


def test_what_code_may_do(box):
    assert box.run("") == Outcome("")
    assert box.run("import sys; sys.exit(0)") == Outcome("")
    assert (
        box.run("import math, random, json; print(math.sqrt(4), json.dumps([1]), 0 <= random.random() < 1)").error
        is None
    )
    assert box.run("import sys; sys.stdout.buffer.write(b'a\\xff')") == Outcome("a\ufffd")
    assert box.run("import os; print(7, flush=True); os.close(1)") == Outcome("7\n")
    assert box.run("print(1); 1 / 0") == Outcome("1\n", "ZeroDivisionError: division by zero")
    assert box.run("import time; time.sleep(0.05); print('é')") == Outcome("é\n")
    assert box.run("input()") == Outcome("", "EOFError: EOF when reading a line")
    assert box.run("import os; print(dict(os.environ))").text in ("{}\n", "{'LC_CTYPE': 'C.UTF-8'}\n")
    assert box.run("print(__name__)") == Outcome("__main__\n")
    assert box.run("print('x' * 1000, end='')") == Outcome("x" * 1000)
    assert box.run("print('x' * 1001, end='')") == Outcome("x" * 1000, "stopped after 1000 bytes of output")


def test_calls_share_nothing(box):
    assert box.run("import math; math.pi = 3; x = 1").error is None
    assert box.run("import math; print(math.pi > 3.1)") == Outcome("True\n")
    assert box.run("x").error == "NameError: name 'x' is not defined"
    assert box.run("import random; print(random.random())") != box.run("import random; print(random.random())")


@linux
def test_close_leaves_nothing():
    before = resources()
    box = Sandbox(timeout=NEVER)
    assert resources() == before  # nothing is started before it is needed
    box.run("")
    folder = os.readlink(f"/proc/{workers()[-1]}/cwd")
    assert len(workers()) == len(before[0]) + 1
    box.close()
    box.close()
    assert resources() == before and not os.path.exists(folder)
    assert box.run("print(3)") == Outcome("3\n")
    del box  # like close
    assert resources() == before


@linux
def test_a_killed_worker_is_replaced():
    box = Sandbox(timeout=NEVER)
    others = set(workers())
    box.run("")
    (worker,) = set(workers()) - others
    os.kill(worker, signal.SIGKILL)
    os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
    assert box.run("print(3)") == Outcome("3\n")
    box.close()
    assert set(workers()) == others


@linux
def test_nothing_outlives_a_killed_process():
    """Nor does it if a fork of that process lives on, with the pipe to the worker open."""
    code = (
        "import os, time\nfrom rl_plugins.lab.demo.environments import Sandbox\nbox = Sandbox()\nbox.run('')\n"
        "pid = os.fork()\npid or time.sleep(3600)\nprint(pid, flush=True)\nwhile True: box.run('while True: pass')"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        fork = int(process.stdout.readline())
        try:
            until(lambda: len(workers(process.pid)) == 2, "the start of the code")
            process.kill()
            process.wait()
            until(lambda: not workers(process.pid), "the end of the worker and its fork")
        finally:
            os.kill(fork, signal.SIGKILL)


def test_threads_get_their_own_answers(box):
    answers: dict[int, list[Outcome]] = {}

    def ask(i: int) -> None:
        answers[i] = [box.run(f"print({i})") for _ in range(10)]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {i: [Outcome(f"{i}\n")] * 10 for i in range(6)}


def test_an_interrupted_call_does_not_answer_the_next(box, monkeypatch):
    receive = sandbox._Worker._receive

    def interrupted(self, seconds):
        monkeypatch.setattr(sandbox._Worker, "_receive", receive)
        raise KeyboardInterrupt

    box.run("")
    monkeypatch.setattr(sandbox._Worker, "_receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        box.run("print('old')")
    assert box.run("print('new')") == Outcome("new\n")


@linux
def test_a_fork_of_the_process_gets_a_worker_of_its_own(box):
    box.run("")
    mine = workers()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            fine = box.run("print(4)") == Outcome("4\n") and len(workers()) == 1
            box.close()
            status = 0 if fine and not workers() else 2
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert workers() == mine and box.run("print(5)") == Outcome("5\n")


def test_where_code_cannot_be_confined_it_is_refused(tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    worker.write_text(sandbox.WORKER.read_text().replace("filtered = can_filter()", "filtered = False"))
    monkeypatch.setattr(sandbox, "WORKER", worker)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(RuntimeError, match="no filter of system calls .* require_filter=False"):
        Sandbox().run("print(1)")
    allowed = Sandbox(timeout=NEVER, require_filter=False)
    assert allowed.run("print(1)") == Outcome("1\n")
    allowed.close()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    user = Sandbox(timeout=NEVER)
    assert user.run("print(1)") == Outcome("1\n")
    user.close()


def test_a_worker_that_does_not_start_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "WORKER", tmp_path / "none.py")
    with pytest.raises(RuntimeError, match=r"does not start: it has ended. Check that this interpreter"):
        Sandbox().run("print(1)")


@pytest.mark.parametrize("limit", ["timeout", "memory_mb", "max_output"])
def test_limits_must_be_positive(limit):
    with pytest.raises(ValueError, match=f"{limit}.* 0"):
        Sandbox(**{limit: 0})


# --- all environments


def play(environment, row, actions):
    """Observations of an episode, the first one included."""
    return [environment.reset(row), *(environment.act(action) for action in actions)]


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_the_expert_solves_every_task(kind):
    environment = kind.unwatched()
    assert isinstance(environment, Environment)
    for row in kind.rows(60, seed=1) + kind.rows(30, split="held_out"):
        actions = kind.expert(row)
        seen = play(environment, row, actions)
        assert seen[0].text == row["prompt"][0]["content"] and len(row["prompt"]) == 1
        assert environment.score() == 1 == sum(o.reward for o in seen[1:])
        assert [o.done for o in seen] == [False] * len(actions) + [True]
        assert all(o.valid for o in seen)
        assert set("".join(actions) + "".join(o.text for o in seen)) <= set(demo_policy.CHARACTERS)
        assert max(map(len, actions)) < kind.MAX_ACTION
        assert play(kind.unwatched(), row, actions)[1:] == seen[1:]  # a function of the columns


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_rows(kind):
    from datasets import Dataset

    rows = kind.rows(90, seed=3)
    assert rows == kind.rows(90, seed=3) != kind.rows(90, seed=4)
    assert [row["level"] for row in rows].count(1) == 90 // len(kind.LEVELS)
    assert {row["level"] for row in kind.rows(7, levels=[2])} == {2}
    prompts = {
        split: {r["prompt"][0]["content"] for r in kind.rows(600, split=split)} for split in ("train", "held_out")
    }
    assert prompts["train"] and prompts["held_out"] and not prompts["train"] & prompts["held_out"]
    for row, stored in zip(rows, Dataset.from_list(rows), strict=True):  # as a host hands it over
        assert kind.unwatched().reset(stored).text == row["prompt"][0]["content"]
    with pytest.raises(ValueError, match="n is 0"):
        kind.rows(0)
    with pytest.raises(ValueError, match=f"no split 'test' of {kind.__name__}"):
        kind.rows(1, split="test")
    with pytest.raises(ValueError, match=f"levels is .9,., but {kind.__name__}"):
        kind.rows(1, levels=[9])


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_nonsense_is_an_action_that_is_not_valid(kind):
    environment = kind.unwatched()
    (row,) = kind.rows(1)
    first, *seen = play(environment, row, ["what?"] * kind.MAX_TURNS)
    assert not any(o.valid for o in seen) and {o.reward for o in seen} == {0.0}
    assert all(o.anchor == first.anchor for o in seen)  # nothing has changed
    assert [o.done for o in seen] == [False] * (kind.MAX_TURNS - 1) + [True]
    with pytest.raises(RuntimeError, match=f"No episode of {kind.__name__} is under way. Call reset"):
        environment.act("u")
    environment.reset(row)
    environment.close()
    environment.close()
    with pytest.raises(RuntimeError, match="Call reset"):
        environment.act("u")


@pytest.mark.parametrize(
    ("kind", "actions"),
    [
        (Calculator, ["[99999999999]"] * 6),  # as many characters as fit, and a result as long
        (Grid, ["xxx"] * 12),
        (Shop, ["s red mug xxx", "s red mug xxx", "o1", "o2", "o3", "o1", "x" * 13]),
    ],
)
def test_no_episode_is_longer_than_256_tokens(kind, actions):
    for row in kind.rows(300, seed=5):
        seen = play(
            kind.unwatched(), row, [a.replace("red mug", f"{row.get('color')} {row.get('kind')}") for a in actions]
        )
        assert seen[-1].done and max(map(len, actions)) == kind.MAX_ACTION - 1
        texts = sum(2 + len(observation.text) for observation in seen[:-1])  # the last one is not read
        assert texts + sum(len(action) + 1 for action in actions) <= 256


# --- calculator


@pytest.fixture
def calculator():
    calculator = Calculator()
    yield calculator
    calculator.close()


SUM = {"operators": "*-", "values": [12, 7, 3], "level": 2}


def test_calculator(calculator):
    seen = play(calculator, SUM, ["[12*7]", " [84-3] ", "[1/0]", "[2**-1]", "=81"])
    assert [o.text for o in seen] == ["a=12 b=7 c=3 (a*b)-c?", "84", "81", "err", "0.5", "right"]
    assert [o.valid for o in seen] == [True, True, True, False, True, True]
    assert [o.reward for o in seen[1:]] == [0, 0, 0, 0, 1]
    assert [o.anchor for o in seen[:3]] == [[], ["84"], ["84", "81"]]
    assert play(calculator, SUM, ["=80"])[-1].text == "wrong" and calculator.score() == 0
    assert calculator.describe({"operators": "+", "values": [1, 2]}) == "a=1 b=2 a+b?"
    assert Calculator.expert(SUM) == ["[12*7]", "[84-3]", "=81"]


@pytest.mark.parametrize(
    "action",
    ["[__import__('os')]", "[(1).real]", "[[1]]", "[print]", "['a'*9]", "[1,2]", "[1if 1else 2]", "[]", "[1", "1+1",
     "=", "=8 1", "=²", "[9**9**9]", "[9**99]", "[9**9**9**9]", "[lambda:1]", "[1;2]", "[1)+(1]", "[1)]", "[x:=1]",
     "[1==1]", "[True]", "[1j]", "[\0]", "[" + "1+" * 30 + "1]"],
)  # fmt: skip
def test_what_the_calculator_does_not_compute(calculator, action):
    observation = play(calculator, SUM, [action])[-1]
    assert (observation.text, observation.valid, observation.done) == ("err", False, False)
    assert calculator.act("[1+1]").text == "2"


def test_only_arithmetic_reaches_the_sandbox():
    assert is_arithmetic("-(1.5+2)*3//4%5/6**7")
    assert not is_arithmetic("a") and not is_arithmetic("1 if 1 else 1")


@linux
def test_calculators_share_a_process():
    before = resources()
    first, second = Calculator(), Calculator()
    for calculator in (first, second):
        assert play(calculator, SUM, ["[1+1]"])[-1].text == "2"
    assert len(workers()) == len(before[0]) + 1
    first.close()
    assert len(workers()) == len(before[0]) + 1
    second.close()
    assert resources() == before


# --- grid

WAY = {"maze": "a", "start": "00", "goal": "22", "key": "", "level": 1}  # .... / .##. / ..#. / #...


def test_grid():
    assert MAZES["a"] == ("....", ".##.", "..#.", "#...")
    environment = Grid()
    with pytest.raises(ValueError, match="no way to the goal 22 in maze 'a'"):
        Grid.optimal_steps(WAY)  # a wall
    way = WAY | {"goal": "21"}
    seen = play(environment, way, ["u", "d", "d", "x", "r"])
    assert [o.text for o in seen] == ["a g21 p00", "00", "10", "20", "20", "21"]
    assert [o.anchor for o in seen] == ["00", "00", "10", "20", "20", "21"]
    assert [o.valid for o in seen] == [True, True, True, True, False, True]
    assert [o.reward for o in seen[1:]] == [0, 0, 0, 0, 1] and seen[-1].done
    assert Grid.optimal_steps(way) == 3 and Grid.expert(way) == ["d", "d", "r"]
    rewards = [o.reward for o in play(Grid(step_reward=-0.1), way, ["d", "d", "r"])[1:]]
    assert rewards == [-0.1, -0.1, 1]


def test_the_key_comes_first():
    row = {"maze": "a", "start": "10", "goal": "21", "key": "00", "level": 2}
    seen = play(Grid(), row, ["d", "r", "l", "u", "u", "d", "d", "r"])
    assert [o.text for o in seen] == ["a k00 g21 p10", "20", "21", "20", "10", "00k", "10k", "20k", "21k"]
    assert [o.reward for o in seen[1:]] == [0] * 7 + [1]
    assert Grid.optimal_steps(row) == 4


def test_the_tables_are_what_happens():
    rng = random.Random(0)
    environment = Grid(step_reward=-0.1)
    for row in Grid.rows(20):
        table = environment.transition(row)
        assert table.states[0] == row["start"] and len(set(table.states)) == len(table.states)
        observation, state = environment.reset(row), 0
        while not observation.done:
            a = rng.randrange(4)
            observation = environment.act(table.actions[a])
            assert observation.reward == table.reward[state][a]
            state = table.next[state][a]
            assert observation.anchor == table.states[state]
            assert table.final[state] == (observation.reward == 1)


def test_values_from_the_tables():
    """Exact values: the optimal ones give the shortest way; those of a random walk are what its episodes average."""
    rng = random.Random(1)
    for row in Grid.rows(3, seed=2):
        table = Grid().transition(row)
        following, reward = torch.tensor(table.next), torch.tensor(table.reward, dtype=torch.float64)
        best, walk = torch.zeros(2, len(table.states), dtype=torch.float64)
        for _ in range(40):
            best = (reward + 0.9 * best[following]).max(1).values
        assert best[0].item() == pytest.approx(0.9 ** (Grid.optimal_steps(row) - 1))
        for _ in range(Grid.MAX_TURNS):
            walk = (reward + walk[following]).mean(1)
        environment, wins = Grid(), []
        for _ in range(1500):
            observation = environment.reset(row)
            while not observation.done:
                observation = environment.act(environment.stumble(rng))
            wins.append(environment.score())
        error = statistics.pstdev(wins) / 1500**0.5
        assert statistics.mean(wins) == pytest.approx(walk[0].item(), abs=4 * error + 1e-3)
        assert 0 < walk[0] < 1


def test_rollouts_meet_the_same_states_again():
    row = Grid.rows(1, levels=[2])[0]
    rng = random.Random(0)
    environment = Grid()
    anchors = []
    for _ in range(8):
        observation = environment.reset(row)
        while not observation.done:
            anchors.append(observation.anchor)
            observation = environment.act(environment.stumble(rng))
    assert len(set(anchors)) < len(anchors) / 3


# --- shop

WISH = {"seed": 7, "color": "red", "kind": "mug", "limit": 5, "size": "l", "level": 3}


def test_shop():
    items = catalog(WISH)
    red_mugs = [item for item in items if (item.color, item.kind) == ("red", "mug")]
    (wanted,) = [item for item in red_mugs if item.price < 5]
    assert len(items) == 6 and len(red_mugs) == 3 and "l" in wanted.sizes
    place = red_mugs.index(wanted) + 1
    environment = Shop()
    seen = play(environment, WISH, ["s red mug", f"o{place}", "l", "b"])
    listing = ",".join(f"{i} {item}" for i, item in enumerate(red_mugs, 1))
    sizes = " ".join(wanted.sizes)
    assert [o.text for o in seen] == ["7 red mug <5 l", listing, f"{wanted} {sizes}", "size l", "sold"]
    assert [o.reward for o in seen[1:]] == [0, 0, 0, 1]
    assert len({str(o.anchor) for o in seen}) == 4  # buying changes nothing that is shown
    dear = place % 3 + 1
    assert play(environment, WISH, ["s red mug", f"o{place}", "b"])[-1].reward == 0.75  # no size
    assert play(environment, WISH, ["s red mug", f"o{dear}", "b"])[-1].reward == 0.5
    assert play(environment, WISH, ["s red mug", f"o{place}", "l", f"o{dear}", f"o{place}", "b"])[-1].reward == 0.75
    other = play(environment, WISH, ["s mug pink blue gold"])[-1].text.split(",")
    assert len(other) == 3 and all("mug" in item or "red" not in item for item in other)


def test_what_the_shop_refuses():
    environment = Shop()
    for actions in (["b"], ["l"], ["o1"], ["s red mug", "b"], ["s red mug", "o4"], ["s red mug", "o0"], ["s"], ["s 1"]):
        last = play(environment, WISH, actions)[-1]
        assert (last.text, last.valid, last.reward) == ("no", False, 0)
    assert play(environment, WISH, ["s xyz"])[-1].text == "none"
    twice = play(environment, WISH, ["s hat", "s red mug", "s red mug", "o1"])
    assert [o.valid for o in twice] == [True, True, True, False, True]


@pytest.mark.parametrize("row", Shop.rows(30, seed=9), ids=str)
def test_every_shop_has_what_is_wanted_and_what_is_not(row):
    items = catalog(row)
    assert len({str(item) for item in items}) == 6
    fitting = [i for i in items if (i.color, i.kind) == (row["color"], row["kind"])]
    if row["limit"]:
        assert 0 < sum(item.price < row["limit"] for item in fitting) < 3 == len(fitting)
    if row["level"] == 2:
        for place, item in enumerate(fitting, 1):
            bought = play(Shop(), row, [f"s {row['color']} {row['kind']}", f"o{place}", "b"])[-1]
            assert bought.reward == (1 if item.price < row["limit"] else 2 / 3)


# --- policies


@pytest.fixture(scope="module")
def tokenizer():
    return demo_policy.build_tokenizer()


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_a_demonstration_is_what_the_chat_template_makes_of_the_turns(kind, tokenizer):
    environment = kind.unwatched()
    (row,) = kind.rows(1, seed=2, levels=[2])
    seen = play(environment, row, actions := kind.expert(row))
    messages = []
    for observation, action in zip(seen, actions, strict=False):
        messages += [{"role": "user", "content": observation.text}, {"role": "assistant", "content": action}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert policy.demonstration(random.Random(0), environment, row, careless=0) == rendered
    begun = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
    assert rendered.startswith(begun)
    batch = demo_policy.labeled(tokenizer, [rendered, "<user>a<asst>b<eos>"])
    labels = batch["labels"][0]
    assert tokenizer.decode(labels[labels != -100]) == "".join(f"{action}<eos>" for action in actions)
    assert torch.equal(labels[labels != -100], batch["input_ids"][0][labels != -100])
    assert tokenizer.decode(batch["labels"][1][batch["labels"][1] != -100]) == "b<eos>"


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_demonstrations_are_careless_at_times(kind, tokenizer):
    rng = random.Random(0)
    careless = policy.WARM_STARTS[kind].careless
    environment, scores, texts = kind.unwatched(), [], []
    for row in kind.rows(200, seed=4):
        texts.append(policy.demonstration(rng, environment, row, careless))
        scores.append(environment.score() == 1)
    assert 0.3 < sum(scores) / 200 < 0.9
    assert max(len(ids) for ids in tokenizer(texts)["input_ids"]) <= 256
    assert not any(tokenizer.unk_token_id in ids for ids in tokenizer(texts)["input_ids"])


def test_batches_hold_texts_of_about_the_same_length():
    texts = [str(i) * i for i in range(1, 65)]
    batches = policy._batches(random.Random(0), texts, 16)
    drawn = [next(batches) for _ in range(4)]
    assert sorted(text for batch in drawn for text in batch) == sorted(texts)
    assert max(max(map(len, batch)) - min(map(len, batch)) for batch in drawn) < 64


QUICK = {
    kind: dataclasses.replace(policy.WARM_STARTS[kind], steps=4, demonstrations=64, batch_size=8)
    for kind in ENVIRONMENTS
}


def test_the_warm_start_is_deterministic_and_learns(tokenizer):
    def run(global_seed):
        torch.manual_seed(global_seed)
        random.seed(global_seed)
        losses = []
        model = demo_policy.build_model(0)
        settings = dataclasses.replace(QUICK[Grid], steps=15)
        policy.warm_start(model, tokenizer, Grid, settings, lambda step, total, loss: losses.append(loss))
        return losses, model.state_dict()

    (losses, weights), (again, same) = run(1), run(2)
    assert losses == again and losses[-1] < losses[0] - 1
    assert all(torch.equal(weight, same[name]) for name, weight in weights.items())


def test_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(policy, "WARM_STARTS", QUICK)
    steps = []
    directory = policy.load_agent_policy("Grid", tmp_path, lambda *step: steps.append(step[:2]))
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)] and directory.parent == tmp_path
    again = policy.load_agent_policy(
        "rl_plugins.lab.demo.environments:Grid", tmp_path, lambda *step: pytest.fail("built again")
    )
    assert again == directory == policy.agent_policy_path("Grid", tmp_path)
    assert policy.load_agent_policy("Shop", tmp_path) != directory and len(list(tmp_path.iterdir())) == 2
    assert AutoModelForCausalLM.from_pretrained(directory).dtype == torch.float32
    (directory / "model.safetensors").unlink()
    with pytest.warns(UserWarning, match=r"demo policy in .* is damaged"):
        policy.load_agent_policy("Grid", tmp_path)
    with pytest.raises(ValueError, match="no demo policy for 'grid'. Choose one of: Calculator, Grid, Shop"):
        policy.load_agent_policy("grid", tmp_path)


def test_play_counts_scores_per_level(tokenizer):
    """A model that writes what the expert would, but at level 1 only."""
    rows = Grid.rows(4, seed=6)
    plans = {row["prompt"][0]["content"]: Grid.expert(row) if row["level"] == 1 else ["?"] for row in rows}

    class Scripted:
        def generate(self, input_ids, max_new_tokens, **options):
            assert max_new_tokens == Grid.MAX_ACTION and not options["do_sample"]
            texts = []
            for text in tokenizer.batch_decode(input_ids):
                first, turn = text.split("<user>")[1].split("<asst>")[0], text.count("<user>") - 1
                texts.append(f"{plans[first][min(turn, len(plans[first]) - 1)]}<eos>")
            return torch.cat([input_ids, tokenizer(texts, return_tensors="pt")["input_ids"]], dim=1)

    assert policy.play(Scripted(), tokenizer, Grid, rows, temperature=0) == {1: [1.0, 1.0], 2: [0.0, 0.0]}


@pytest.mark.long
@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_the_policies_solve_part_of_the_episodes(kind):
    directory = policy.load_agent_policy(kind.__name__)  # in the user's cache: the first run builds it, in some 30 s
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    rows = kind.rows(120, seed=7, split="held_out")
    state = torch.get_rng_state()
    sampled, greedy = (policy.play(model, tokenizer, kind, rows, temperature=t) for t in (1, 0))
    assert torch.equal(torch.get_rng_state(), state)
    share = {
        name: sum(s == 1 for v in scores.values() for s in v) / 120 for name, scores in (("1", sampled), ("0", greedy))
    }
    # Wide: the policy is trained on this machine, and 120 episodes have a standard error of 0.05.
    assert 0.1 < share["1"] < 0.8 and 0.1 < share["0"] < 0.95
    assert statistics.mean(sampled[1]) > statistics.mean(sampled[kind.LEVELS[-1]])


# --- sandbox: code that is too long, and a worker that takes none


def test_code_of_a_reasonable_length_runs_and_more_is_not_sent(box, monkeypatch):
    long = "x = 1  # " + "y" * (2**20 - 20) + "\nprint(x)"
    assert Sandbox(max_code=2**20).max_code == box.max_code == 2**20
    slow = Sandbox(timeout=20)
    assert len(long) < 2**20 and slow.run(long) == Outcome("1\n")
    slow.close()
    monkeypatch.setattr(sandbox._Worker, "ask", None)  # nothing is sent
    for code in ("#" * (2**20 + 1), "é" * 2**19 + "x", "#" * 50_000_000):
        outcome = box.run(code)
        assert outcome.text == "" and outcome.error is not None
        assert outcome.error.startswith("not run: the code has ") and "1048576 are allowed" in outcome.error
    small = Sandbox(max_code=3)
    assert small.run("12345").error == "not run: the code has 5 bytes or more, 3 are allowed"


def test_the_limit_of_code_must_be_positive():
    with pytest.raises(ValueError, match="max_code 0; each must be above 0"):
        Sandbox(max_code=0)
    with pytest.raises(ValueError, match="timeout is nan"):
        Sandbox(timeout=float("nan"))


@linux
def test_a_worker_that_takes_no_code_is_given_up(monkeypatch):
    """It is stopped, so a request that is larger than the pipe stays in the hand of its owner."""
    monkeypatch.setattr(sandbox, "GRACE_SECONDS", 0.2)
    others = set(workers())
    slow = Sandbox(timeout=0.2)
    assert slow.run("print(1)") == Outcome("1\n")
    (worker,) = set(workers()) - others
    os.kill(worker, signal.SIGSTOP)
    outcome: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcome.append(slow.run("#" * 900_000)), daemon=True)
    thread.start()
    thread.join(60)
    try:
        assert outcome == [Outcome("", "the sandbox's process failed: the code was not taken in time")]
    finally:
        if thread.is_alive():
            os.kill(worker, signal.SIGKILL)
    assert worker not in workers()
    monkeypatch.undo()
    assert slow.run("print(2)") == Outcome("2\n")
    slow.close()
