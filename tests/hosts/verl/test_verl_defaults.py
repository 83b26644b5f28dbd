"""Options of verl that methods set: they exist, with the defaults that methods compare a user's values with."""

from __future__ import annotations

from pathlib import Path

import verl
from omegaconf import OmegaConf

from rl_plugins.methods import april
from rl_plugins.methods.areal_admission import STRATEGY, THRESHOLD, WARMUP

CONFIGS = Path(verl.__file__).parent / "trainer" / "config"


def test_of_groups_that_are_begun_ahead() -> None:
    config = OmegaConf.load(CONFIGS / "ppo_trainer.yaml")
    assert [OmegaConf.select(config, name) for name in (*WARMUP, THRESHOLD, STRATEGY)] == [1, 1, 8, "drop"]
    assert {april.WARMUP, april.SEPARATE_WARMUP} == set(WARMUP)
    assert (april.THRESHOLD, april.STRATEGY) == (THRESHOLD, STRATEGY)


def test_of_the_correction_for_stale_tokens() -> None:
    correction = OmegaConf.load(CONFIGS / "algorithm" / "rollout_correction.yaml")
    assert correction.rollout_is is None and april.CORRECTION == "algorithm.rollout_correction.rollout_is"
