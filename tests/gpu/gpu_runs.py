"""Short runs of TRL on a device: what the tests of this folder share."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from harness import length, make, score
from test_trl_turns import Walk, won
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainerCallback

from rl_plugins.lab.demo.policy import build_tokenizer
from rl_plugins.trl.generation import batches as module

TREE = {"tau_abs": 0.1, "tau_rel": 0.6, "lookahead": [3], "max_tree_tokens": 5, "decode_ahead": 2}
AGENTS = {
    "reward": won,
    "max_completion_length": 60,
    "method_params": {"turn_control": {"environment": Walk, "strategy": "unlimited", "turn_tokens": 3}},
}
# One method of each kind: its options, and a metric that shows it acted.
KINDS: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "rows": (["gdpo"], {"reward": [score, length]}, ""),
    "tokens": (["echo_shaping"], {}, "echo_shaping/"),
    "turns": (
        ["turn_control", "gigpo"],
        AGENTS,
        "gigpo/compared",
    ),
    "program": (["latr"], {"method_params": {"latr": TREE}}, "latr/"),
    "rounds": (["dars"], {"method_params": {"dars": {"n_first": 4, "n_max": 12}}}, "dars/"),
    "queue": (["over_begin"], {"num_generations": 2, "max_completion_length": 60}, ""),
    "loss": (["aepo_clip"], {"num_iterations": 2}, "aepo_clip/clipfrac"),
    "regularizer": (["turn_control", "epo"], AGENTS, "epo/"),
}


def trainer_on(device: str, folder: Path, methods: Any = (), **options: Any) -> Any:
    """As `harness.make`, on this device whatever ran before in this process."""
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    return make(folder, methods, use_cpu=device == "cpu", **options)


@contextmanager
def decisions() -> Iterator[list[Any]]:
    """What was decided in the batches of a run."""
    seen: list[Any] = []
    decide = module.decide
    module.decide = lambda *args, **more: (seen.append(decide(*args, **more)), seen[-1])[1]
    try:
        yield seen
    finally:
        module.decide = decide


def large_policy(folder: Path) -> None:
    """A policy of 170 million random weights, where `harness.make` looks for one."""
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=1024,
        num_hidden_layers=14,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=3072,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder / "policy")
    build_tokenizer().save_pretrained(folder / "policy")


class Clock(TrainerCallback):  # type: ignore[misc]
    """Seconds of each batch, generation and its optimizer steps, when the device has done it."""

    def __init__(self, steps: int = 1) -> None:
        self.steps = steps  # optimizer steps of a batch
        self.times: list[float] = []

    def _look(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._look()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._look()

    @property
    def seconds(self) -> list[float]:
        """Without the first batch, in which much is done once."""
        ends = self.times[:: self.steps]
        return [b - a for a, b in itertools.pairwise(ends[1:])]
