"""What the diffusion trainer refuses before it trains, with the reason and the change that fixes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from flow_probes import Prefixes
from flow_runs import bright, flat, make
from messages import raises

from rl_plugins.cards.catalog import HOSTS
from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.method import HOOKS, SIGNALS, Method
from rl_plugins.core.rollouts import Completion
from rl_plugins.diffusion.config import DiffusionConfig
from rl_plugins.diffusion.served import NO_HOOKS, NO_SIGNALS
from rl_plugins.lab.pages.diffusion import accepted, with_parts
from rl_plugins.runtime.preflight import HostCapabilities, preflight
from rl_plugins.runtime.stack import MethodStack

pytestmark = pytest.mark.host


@pytest.mark.parametrize(
    ("methods", "why"),
    [
        (["waits"], "`waits`.*`admit`"),
        (["reads"], "`reads`"),
        (["of_text"], "`of_text`"),
        (["gives"], "`gives`"),
        (["splits"], "`splits`"),
        (["whole"], "`whole` needs whole groups in every optimizer step.*rows are shuffled"),
        (["looks"], "`level`"),
        (["forks", "explores"], "both decide `rollout`"),
        (["gigpo"], "a sample is made in one go, without turns of an agent"),
        (["epo"], "The method `epo`|entropy"),
        (["april"], "every sample takes the same number of steps"),
        (["latr"], "is for text"),
        (["eoser"], "needs|changes|only sets options of trl"),
        (["no_such"], "`no_such`"),
    ],
    ids=lambda x: x if isinstance(x, str) else ",".join(x),
)
def test_methods_that_cannot_act(tmp_path, methods, why):
    data = [{"prompt": c} for c in range(4)]
    with raises(ConfigError, match=why):
        make(tmp_path, methods, updates_per_batch=2, train_dataset=data)


@pytest.mark.parametrize(
    ("asks", "said"),
    [
        ({"prefix": (1, 2)}, r"prefix=\(1, 2\)"),
        ({"given": (Completion((1,)),)}, "given="),
        ({"max_tokens": 3}, "max_tokens=3"),
        ({"max_turns": 2}, "max_turns"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_plan_about_tokens_is_refused_when_it_is_made(tmp_path, monkeypatch, asks, said):
    monkeypatch.setattr(Prefixes, "asks", asks)
    with raises((ConfigError, MethodError), match=rf"{said}"):
        make(tmp_path, ["prefixes"]).train()


def test_every_signal_and_hook_is_served_or_has_a_reason():
    assert set(NO_HOOKS) <= set(HOOKS) and set(NO_SIGNALS) <= {*SIGNALS, "engine"}
    for why in [*NO_HOOKS.values(), *NO_SIGNALS.values()]:
        assert why.endswith("Remove the method.")


@pytest.mark.parametrize("host", ["trl", "verl"])
def test_hosts_of_text_refuse_programs_of_samples(host):
    class Flows(Method):
        name = "flows"
        hosts = ("diffusion",)

        def rollout(self, prompt):
            yield

    given = HostCapabilities(host, "", HOSTS[host].hooks, {}, (), {}, None, {})
    with raises(ConfigError, match="`flows`"):
        preflight(MethodStack([Flows()]), given)


def test_the_page_lists_the_methods_that_are_accepted():
    names = accepted()
    assert {"mc_grpo", "gdpo", "branch_rollout", "branch_advantages"} <= set(names)
    assert not {"epo", "gigpo", "april", "latr", "branch_text_rollout", "eoser", "turn_control"} & set(names)
    page = (Path(__file__).parents[3] / "docs" / "diffusion.md").read_text(encoding="utf-8")
    assert all(f"[`{name}`](methods.md#{name})" in with_parts(page) for name in names)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"steps": 0}, "steps=0 is given; it must be a whole number at least 1."),
        ({"steps": 2.5}, "steps=2.5 is given; it must be a whole number"),
        ({"learning_rate": float("nan")}, "learning_rate=nan is given; it must be a finite number at least 0."),
        ({"eta": 0}, "eta=0 is given; it must be a finite number above 0."),
        ({"shift": -1.0}, "shift=-1.0 is given"),
        ({"scale_rewards": "std"}, "scale_rewards='std' is given; allowed: group, batch, none."),
        ({"mixed_precision": "fp8"}, "mixed_precision='fp8' is given; allowed: no, bf16."),
        ({"loss_aggregation": "mean"}, "loss_aggregation='mean' is given; allowed: seq-mean"),
        ({"report_to": "wandb"}, "report_to='wandb' is given; allowed: none, tensorboard."),
        ({"updates_per_batch": 99}, "updates_per_batch=99 is given, and a batch has 32 rows. Make it smaller."),
        ({"max_unrewarded_batches": -1}, "max_unrewarded_batches=-1 is given"),
    ],
    ids=str,
)
def test_options_that_are_not_allowed(options, why):
    with raises(ConfigError) as e:
        DiffusionConfig(**options)
    assert why in str(e.value)


def test_every_option_has_a_help():
    assert all(f.metadata["help"] for f in DiffusionConfig.__dataclass_fields__.values())


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"reward_funcs": []}, "It must be a function"),
        ({"reward_funcs": [bright, bright]}, "must have different names"),
        ({"reward_funcs": [bright, flat], "reward_weights": [1.0]}, "reward_weights.*1.*2"),
        ({"objective": "dpo"}, "objective='dpo'"),
        ({"objective_params": {"beta": 1}}, "and the objective ppo has none"),
    ],
    ids=["none", "same name", "weights", "objective", "its parameters"],
)
def test_trainers_that_cannot_be_made(tmp_path, given, why):
    with raises(ConfigError, match=why):
        make(tmp_path, **given)
