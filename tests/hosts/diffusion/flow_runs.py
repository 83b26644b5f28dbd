"""Runs of the diffusion trainer on tiny policies."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rl_plugins.diffusion import DiffusionConfig, DiffusionTrainer

torch.set_num_threads(1)
SHAPE = (1, 2, 2)


class Tiny(nn.Module):
    """Velocities of four numbers from the latents, the noise level and the class."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.inner = nn.Linear(4 + 1 + 4, 24)
            self.outer = nn.Linear(24, 4)

    def forward(self, x: torch.Tensor, sigma: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        one_hot = nn.functional.one_hot(classes, 4).to(x.dtype)
        hidden = torch.tanh(self.inner(torch.cat([x.flatten(1), sigma[:, None], one_hot], 1)))
        return (x.flatten(1) + self.outer(hidden)).view(x.shape)


def bright(samples: torch.Tensor, conditions: list[Any]) -> torch.Tensor:
    """Higher where the mean is near a number that the class decides."""
    wanted = torch.tensor([c / 2 - 0.5 for c in conditions])
    return -(samples.mean((1, 2, 3)) - wanted).abs()


def flat(samples: torch.Tensor, conditions: list[Any], level: list[int]) -> list[float]:
    assert len(level) == len(samples)
    return [-float(s.std()) for s in samples]


PROMPTS = [{"prompt": c, "level": 10 * c} for c in range(4)]


def make(folder: Path, methods: Any = (), model: Any = None, **changes: Any) -> DiffusionTrainer:
    """A trainer of a tiny policy."""
    names = ("reward_funcs", "train_dataset", "latent_shape", "scheduler", "encode", "decode", "cheap")
    given: dict[str, Any] = {"reward_funcs": bright, "train_dataset": PROMPTS, "latent_shape": SHAPE}
    given |= {k: changes.pop(k) for k in names if k in changes}
    values: dict[str, Any] = dict(
        output_dir=str(folder),
        methods=list(methods),
        batches=3,
        prompts_per_batch=2,
        group_size=4,
        steps=6,
        learning_rate=1e-2,
        clip_range=0.2,
        use_cpu=True,
        progress=False,
    )
    return DiffusionTrainer(Tiny() if model is None else model, args=DiffusionConfig(**{**values, **changes}), **given)


def weights(trainer: DiffusionTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.policy.trained.values()])


def in_a_fork(work: Callable[[], Any], rank: int = 0, ranks: int = 1, port: int = 0) -> int:
    """Starts `work` in a forked process, one of several ranks; its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        from accelerate.state import AcceleratorState, PartialState

        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        if ranks > 1:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ACCELERATE_USE_CPU="1")
        work()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def ended(child: int) -> int:
    """How a process ended: its exit code, or minus the signal."""
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def free_port() -> int:
    with contextlib.closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
