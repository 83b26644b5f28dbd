"""One run of a comparison: `python -m verl.trainer.main_ppo`, its log as the report reads it, and no process left.

Ray's daemons outlive a driver that was killed. So this process, which starts verl and waits for it, ends whatever still
belongs to the run (`processes.end_all`): after the run, when it is told to stop (SIGTERM, Ctrl-C), and when the command
that started it is gone.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rl_plugins.lab.compare.plan import LOG_VARIABLE
from rl_plugins.lab.compare.verl import METRICS
from rl_plugins.runtime.processes import command, end_all

STEPS = re.compile(r"\+{0,2}trainer\.total_training_steps=(\d+)")
VALIDATION = re.compile(r"val-(?:core|aux)/.+/([^/]+)/mean@\d+")


def main() -> int:
    """Trains with the overrides of the command line; the log goes to the file named by RL_PLUGINS_LOG_FILE.

    Returns:
        0 if verl ended well and has logged something, else 1.
    """
    overrides = sys.argv[1:]
    log = Path(os.environ[LOG_VARIABLE])
    stopped, command_runs = False, command()

    def stop(*_: Any) -> None:
        nonlocal stopped
        stopped = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    environment = {**os.environ, "HYDRA_FULL_ERROR": "1", "RAY_COLOR_PREFIX": "0"}
    process = subprocess.Popen(
        [sys.executable, "-m", "verl.trainer.main_ppo", *overrides], env=environment, start_new_session=True
    )

    def running() -> bool:
        return process.poll() is None and not stopped and command_runs()

    steps = next((int(m[1]) for m in map(STEPS.fullmatch, reversed(overrides)) if m), None)
    logged = False
    try:
        with log.open("a", buffering=1) as file:
            for line in translate(follow(log.with_name(METRICS), running), steps):
                file.write(json.dumps(line, default=float) + "\n")
                logged = True
        if process.poll() == 0 and not logged:
            print(f"verl ended and has logged nothing to {log.with_name(METRICS)}.", file=sys.stderr)
        return 0 if process.poll() == 0 and logged else 1
    finally:
        end_all(log.parent)
        process.wait()


def follow(file: Path, running: Callable[[], bool], pause: float = 0.3) -> Iterator[dict[str, Any]]:
    """The lines of a file of JSON as they are written, until nothing runs any more; an incomplete one is left out."""
    at = 0
    while True:
        last = not running()
        if file.exists():
            with file.open("rb") as f:
                f.seek(at)
                for line in f:
                    if not line.endswith(b"\n"):
                        break
                    at += len(line)
                    yield json.loads(line)
        if last:
            return
        time.sleep(pause)


def translate(records: Iterable[dict[str, Any]], max_steps: int | None) -> Iterator[dict[str, Any]]:
    """What verl's file logger writes, as lines of the report.

    Every value keeps verl's name. Beside it stand those that a report of TRL has:

    - seconds: of training steps, without start-up and evaluation
    - eval_rewards/<part>/mean: a part of the reward on held-out prompts, mean over the data sources
    - eval_reward: the same of the reward
    - reward, rewards/<part>/mean: of everything that was generated; the reward is the one that is trained, before hooks
    - frac_reward_zero_std: of what methods kept of it
    """
    seconds = 0.0
    for record in records:
        data = record["data"]
        seconds += data.get("timing_s/step", 0.0)
        line = {name.removeprefix("generated/"): value for name, value in data.items()}
        if "rl_plugins/frac_reward_zero_std" in data:
            line["frac_reward_zero_std"] = data["rl_plugins/frac_reward_zero_std"]
        told = ("rl_plugins/reward_generated", "generated/reward", "critic/score/mean")  # the first has its weights
        if rewards := [data[name] for name in told if name in data]:
            line["reward"] = rewards[0]
        parts: dict[str, list[float]] = defaultdict(list)
        for name, value in data.items():
            if value is not None and (match := VALIDATION.fullmatch(name)):
                parts[match[1]].append(value)
        means = {part: sum(values) / len(values) for part, values in parts.items()}
        line |= {f"eval_rewards/{part}/mean": mean for part, mean in means.items()}
        if "reward" in means:
            line["eval_reward"] = means["reward"]
        line |= {"step": record["step"], "max_steps": max_steps, "seconds": seconds}
        yield line


if __name__ == "__main__":
    sys.exit(main())
