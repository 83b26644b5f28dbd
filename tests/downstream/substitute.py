"""A plugin of pytest for TRL's own tests: models and data by name without network, our trainer where DOWNSTREAM=ours,
and a digest of what every `train` left behind. Loaded before the tests import TRL's trainer."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
import trl
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from trl import import_utils

from rl_plugins.lab.demo.policy import build_tokenizer

MODELS = Path(os.environ["DOWNSTREAM_MODELS"])
SIZES = {
    "vocab_size": 128,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 4096,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "moe_shared_expert_intermediate_size": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 1,
    "chunk_size": 16,
}
STEPS = int(os.environ.get("DOWNSTREAM_STEPS", "4"))  # of a training that names no `max_steps`: 51 take 20 s
LOGGED = ("loss", "reward", "grad_norm", "kl", "entropy", "learning_rate")

outcomes: dict[str, dict[str, Any]] = {}
running = ""


def local(name: Any) -> Any:
    """The folder of a small random model for a name of the Hub; the name, if its kind cannot be made here."""
    found = re.fullmatch(r"trl-internal-testing/tiny-(\w+?)For(CausalLM|SequenceClassification)\S*", str(name))
    if found is None:
        return name
    folder = MODELS / str(name).replace("/", "--")
    if not (folder / "config.json").exists():
        kind = re.sub(r"(?<!^)(?=[A-Z])", "_", found[1]).lower()
        known = next((k for k in (kind, kind.replace("_", "")) if k in transformers.CONFIG_MAPPING), None)
        if known is None:
            return name
        tokenizer = build_tokenizer()
        ends = {n: getattr(tokenizer, n) for n in ("pad_token_id", "eos_token_id", "bos_token_id")}
        config = AutoConfig.for_model(known, **SIZES, **ends)
        torch.manual_seed(0)
        if found[2] == "CausalLM":
            model = AutoModelForCausalLM.from_config(config)
        else:
            config.num_labels = 1
            model = AutoModelForSequenceClassification.from_config(config)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return str(folder)


def by_name(cls: type) -> None:
    """`from_pretrained` of a class finds the small models."""
    host = cls.from_pretrained.__func__  # type: ignore[attr-defined]

    def from_pretrained(this: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        return host(this, local(name), *args, **kwargs)

    cls.from_pretrained = classmethod(from_pretrained)  # type: ignore[attr-defined]


def load_dataset(
    name: str, config: str | None = None, split: str | None = None, streaming: bool = False, **_: Any
) -> Any:
    if name != "trl-internal-testing/zen" or config not in ("standard_prompt_only", "conversational_prompt_only"):
        raise ConnectionError(f"no data is made for {name} {config}")
    texts = [
        f"{a} is better than {b}, " for a in ("beautiful", "simple", "flat") for b in ("ugly", "complex", "nested")
    ]
    prompts: list[Any] = [*texts, *(t.upper().lower() + "and" for t in texts[:8])]
    if config == "conversational_prompt_only":
        prompts = [[{"role": "user", "content": p}] for p in prompts]
    parts = {"train": prompts, "test": prompts[:2]}
    made: Any = datasets.DatasetDict({k: datasets.Dataset.from_dict({"prompt": v}) for k, v in parts.items()})
    if streaming:
        made = datasets.IterableDatasetDict({k: v.to_iterable_dataset() for k, v in made.items()})
    return made if split is None else made[split]


def watched(host: Any) -> Any:
    """`train` that notes a digest of the weights and of what was logged."""

    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(0)
        if self.args.max_steps < 0:
            self.args.max_steps = STEPS
        out = host(self, *args, **kwargs)
        digest = hashlib.sha256()
        for name, value in sorted(self.model.state_dict().items()):
            digest.update(name.encode() + value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        for line in self.state.log_history:
            digest.update(json.dumps({k: repr(v) for k, v in line.items() if k in LOGGED}, sort_keys=True).encode())
        outcomes.setdefault(running, {"outcome": "", "trained": []})["trained"].append(digest.hexdigest())
        return out

    return train


def _not_available(name: str) -> Any:
    if not name.startswith("is_"):
        raise AttributeError(name)
    return lambda: False


def pytest_configure(config: pytest.Config) -> None:
    for cls in (transformers.AutoTokenizer, transformers.AutoConfig, transformers.AutoProcessor, PreTrainedModel):
        by_name(cls)
    for cls in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        by_name(cls)
    datasets.load_dataset = load_dataset
    # tests of another release ask for packages that the installed one no longer knows
    import_utils.__getattr__ = _not_available  # type: ignore[attr-defined]
    transformers.Trainer.train = watched(transformers.Trainer.train)
    if os.environ["DOWNSTREAM"] == "ours":
        from rl_plugins.trl import GRPOConfig, GRPOTrainer

        trl.GRPOConfig, trl.GRPOTrainer = GRPOConfig, GRPOTrainer


def pytest_runtest_setup(item: pytest.Item) -> None:
    global running
    running = item.nodeid
    torch.manual_seed(0)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        outcomes.setdefault(report.nodeid, {"outcome": "", "trained": []})["outcome"] = report.outcome
        Path(os.environ["DOWNSTREAM_OUT"]).write_text(json.dumps(outcomes))  # a run that is stopped counts, too
