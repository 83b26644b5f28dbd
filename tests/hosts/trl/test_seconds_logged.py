"""`rl_plugins/seconds` in the logs of a run: what a batch costs in the package, without TRL's own time."""

from __future__ import annotations

import time

import probes
import pytest
from harness import make
from trl import GRPOTrainer

from rl_plugins.runtime.seconds import Seconds

pytestmark = pytest.mark.host
PARTS = {f"rl_plugins/{clock}{part}" for clock in ("seconds", "cpu_seconds") for part in ("", "/driver", "/split")}


def logged(trainer):
    found = [{k: v for k, v in entry.items() if Seconds.has(k)} for entry in trainer.state.log_history]
    return [entry for entry in found if entry]


def test_a_run_says_what_a_batch_costs_in_the_package(tmp_path, monkeypatch):
    monkeypatch.setenv("RL_PLUGINS_SECONDS", "1")

    def slow(prompts, completions, **columns):
        time.sleep(0.5)  # of the host
        return [float(len(c[0]["content"])) for c in completions]

    observe = probes.Counter.observe

    def watched(self, rollouts, tokens, stats):
        time.sleep(0.2)  # of a hook
        observe(self, rollouts, tokens, stats)

    monkeypatch.setattr(probes.Counter, "observe", watched)
    trainer = make(tmp_path, ["counter"], reward=slow, max_steps=2, logging_steps=1)
    trainer.train()
    steps = [entry for entry in logged(trainer) if "rl_plugins/seconds" in entry]
    assert len(steps) == 2
    for entry in steps:
        assert set(entry) >= PARTS
        assert 0.2 <= entry["rl_plugins/seconds/driver"] <= entry["rl_plugins/seconds"] < 0.5, "the reward is TRL's"
        assert entry["rl_plugins/cpu_seconds"] < entry["rl_plugins/seconds"], "sleeping costs no CPU"


def test_the_update_place_is_a_part_of_every_step(tmp_path, monkeypatch):
    """Two optimizer steps for a batch: what a surrogate costs is in both, what the driver costs in the first."""
    monkeypatch.setenv("RL_PLUGINS_SECONDS", "1")
    hook, host = probes.Corridor.regularize, GRPOTrainer._get_per_token_logps_and_entropies

    def slow_hook(self, terms):
        time.sleep(0.1)
        return hook(self, terms)

    def slow_host(self, *args, **kwargs):
        time.sleep(0.3)
        return host(self, *args, **kwargs)

    monkeypatch.setattr(probes.Corridor, "regularize", slow_hook)
    trainer = make(tmp_path, ["corridor"], max_steps=2, num_iterations=2, logging_steps=1)
    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", slow_host)  # not before it is checked
    trainer.train()
    first, second = (entry for entry in logged(trainer) if "rl_plugins/seconds" in entry)
    for entry in (first, second):
        assert 0.1 <= entry["rl_plugins/seconds/update"] < 0.3, "the forward pass is TRL's"
    assert first["rl_plugins/seconds/driver"] > 0 == second["rl_plugins/seconds/driver"]
    assert not any("seconds" in name for name in trainer.methods.stats)


def test_programs_are_a_part_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("RL_PLUGINS_SECONDS", "1")
    trainer = make(tmp_path, ["talk"], max_steps=1, logging_steps=1)
    trainer.train()
    (entry,) = [entry for entry in logged(trainer) if "rl_plugins/seconds" in entry]
    assert entry["rl_plugins/seconds/programs"] > 0


def test_nothing_is_logged_unless_asked_for(tmp_path):
    trainer = make(tmp_path, ["counter"], max_steps=1, logging_steps=1)
    trainer.train()
    assert not logged(trainer)
