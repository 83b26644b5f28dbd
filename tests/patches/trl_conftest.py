"""Stands in for `tests/conftest.py` and the hub where the patches' own tests run on a copy of TRL.

TRL's tests load a tiny model from the hub. Here a model of that name is written to the cache of huggingface_hub
(`HF_HOME`, set by `test_trl_patches.py`) before the first test, so the tests run as they are, without a network.
"""

import os
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

MODEL_ID = "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5"
CHARS = "0123456789+-*%=,.:;<>()[]# abcdefghijklmnopqrstuvwxyzTABCDEF?"


@pytest.fixture(scope="session", autouse=True)
def tiny_model() -> Path:
    """Write the model and a tokenizer of one token per character to the cache, and return the folder."""
    root = Path(os.environ["HF_HOME"], "hub", f"models--{MODEL_ID.replace('/', '--')}")
    folder = root / "snapshots" / ("0" * 40)
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(folder.name)
    special = ["<pad>", "<eos>", "<bos>"]
    vocabulary = {token: i for i, token in enumerate([*special, *CHARS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokens = dict(zip(("pad_token", "eos_token", "bos_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **tokens).save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder
