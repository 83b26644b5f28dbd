from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

# Before any test file imports verl, whose plugins are loaded with it.
os.environ.setdefault("VERL_PLATFORM", "cpu")
if "verl" in sys.modules:
    from rl_plugins.verl.cpu.activate import activate

    activate()


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory):
    """A folder with an untrained demo policy in `policy`."""
    from rl_plugins.lab.demo.policy import build_model, build_tokenizer

    folder = tmp_path_factory.mktemp("verl_engine")
    build_model(0).save_pretrained(folder / "policy")
    build_tokenizer().save_pretrained(folder / "policy")
    return folder


@pytest.fixture(scope="session")
def engine(policy_folder):
    """verl's training worker on one rank."""
    from engine import Engine

    one = Engine(policy_folder)
    yield one
    one.close()
