"""The rollout methods in verl's real trainer on the CPU: one run, another method every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import PROMPTS, SAMPLES, STALENESS, Run, finished
from test_program_runs import REWARD
from test_runs import reference

from rl_plugins.groups import Groups
from rl_plugins.methods.ui_s1 import UiS1

pytestmark = pytest.mark.host

PLACES = [
    "latr+watch",
    "turn_control+hgpo+watch",
    "cleaner+watch",
    "aepo_rollout+aepo_advantages+watch",
    "echo_labels+echo_tree+echo_shaping+watch",
    "arrol+watch",
    "scope+watch",
    "m_grpo_rollout+m_grpo+watch",
    "rtv_pdr+watch",
    "training_free_grpo+watch",
    "recorded+ui_s1_rollout+ui_s1+watch",
]
LADDER = "'verl_programs:Ladder'"
PARAMS = [
    "latr.eta=[1.0]",
    "latr.eta_steps=[0]",
    "latr.lookahead=[2,3]",
    "latr.tau_abs=0.1",
    "latr.tau_rel=0.6",
    f"turn_control.environment={LADDER}",
    "turn_control.strategy=unlimited",
    "turn_control.turn_tokens=6",
    "cleaner.environment='verl_programs:Fussy'",
    "cleaner.marker='?'",
    "cleaner.turn_tokens=4",
    "cleaner.max_turns=3",
    f"aepo_rollout.environment={LADDER}",
    "aepo_rollout.turn_tokens=6",
    "aepo_rollout.initial_rollouts=4",
    "aepo_rollout.branch_probability=0.3",
    "aepo_rollout.vocabulary=64",
    "echo_labels.n_votes=10",
    "echo_labels.extract='verl_programs:first_digits'",
    "echo_tree.min_depth=1",
    "echo_tree.entropy_high=0.7",
    "arrol.detect_tokens=3",
    "arrol.cold_start=0",
    "scope.prm='verl_programs:step_scores'",
    "scope.corrector='verl_programs:completed'",
    "scope.min_prefix=0.0",
    "scope.min_step=0",
    "scope.success_threshold=0.45",
    "scope.min_correct=8",
    "m_grpo_rollout.parse='verl_programs:asked'",
    "m_grpo_rollout.max_calls=1",
    "m_grpo.sub_per_rollout=1",
    "ui_s1_rollout.column=level",
    "ui_s1_rollout.match='verl_programs:digit_first'",
    "ui_s1_rollout.max_steps=2",
    "ui_s1_rollout.step_tokens=3",
    "ui_s1.rows_per_rollout=2",
    "ui_s1.filter_by=none",
    "rtv_pdr.training=refined",
    "rtv_pdr.attempts=4",
    "rtv_pdr.keep=2",
    "rtv_pdr.votes=2",
    "rtv_pdr.summary_tokens=4",
    "rtv_pdr.judge_tokens=2",
    "training_free_grpo.llm='rl_plugins.demo.advisor:canned'",
]


@pytest.fixture(scope="module")
def carousel(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finished(
        tmp_path_factory.mktemp("verl") / "methods",
        [
            *REWARD,
            f"+carousel=[{','.join(PLACES)}]",
            "+rl_plugins.methods=[watch,turn_control]",
            *(f"+carousel_params.{p}" for p in PARAMS),
            f"+rl_plugins.method_params.turn_control.environment={LADDER}",
            "actor_rollout_ref.actor.calculate_entropy=True",
            f"trainer.total_training_steps={len(PLACES)}",
        ],
        trainer="carousel",
        RL_PLUGINS_TEST_DUMP="1",
    )


def of(run: Run, name: str) -> tuple[Any, Any, dict[str, float], dict[str, Any]]:
    """Rollouts, tokens, what was logged and what was decided in the step of a method."""
    k = next(i for i, place in enumerate(PLACES) if name in place.split("+"))
    rollouts, tokens = torch.load(run.folder / f"watch{k}.pt", weights_only=False)
    return rollouts, tokens, run.metrics(k + 1), run.steps()[k]


def test_latr(carousel: Run) -> None:
    rollouts, tokens, logged, _ = of(carousel, "latr")
    assert rollouts.groups.size.tolist() == [SAMPLES] * PROMPTS and logged["latr/eta"] == 1.0
    forced = torch.zeros(64, dtype=torch.int64).index_add(0, tokens.row, tokens.forced.long())
    assert bool((forced > 0).all()), "every row begins with tokens of the tree"
    assert logged["latr/branches"] >= 1 and 0 < logged["latr/copies"] < 1


def test_turn_control_and_hgpo(carousel: Run) -> None:
    rollouts, tokens, logged, s = of(carousel, "turn_control")
    assert rollouts.turns.turn.tolist() == [0, 1, 2] * 64 and logged["turn_control/turns"] == 3
    assert s["decision"].estimator == "hgpo"
    spread = [float(tokens.advantages[tokens.turn == k].std(unbiased=False)) for k in range(0, 192, 5)]
    assert max(spread) < 1e-9 and len(tokens.advantages.unique()) > 8, "one advantage per turn"


def test_cleaner(carousel: Run) -> None:
    rollouts, tokens, logged, _ = of(carousel, "cleaner")
    assert len(rollouts) == 64 and bool(tokens.forced.any()), "turns that were repaired are forced"
    assert logged["cleaner/retries"] > 0 and logged["cleaner/grafted"] > 0


def test_aepo(carousel: Run) -> None:
    rollouts, tokens, logged, _ = of(carousel, "aepo_rollout")
    assert rollouts.groups.size.tolist() == [SAMPLES] * PROMPTS and not bool(tokens.forced.any())
    assert logged["aepo_rollout/initial"] == 4
    assert logged["aepo_rollout/branches"] + logged["aepo_rollout/restarts"] == 4


def test_echo(carousel: Run) -> None:
    rollouts, _, logged, s = of(carousel, "echo_tree")
    assert rollouts.groups.size.tolist() == [10] * PROMPTS, "votes"
    assert int(s["decision"].trained.sum()) == 64 and set(rollouts.reward.unique().tolist()) <= {0.0, 1.0}
    assert 0 < logged["echo_labels/majority_ratio"] <= 1


def test_arrol(carousel: Run) -> None:
    """In its first batch nothing is stopped: there is no head yet. What it learns from reaches the driver."""
    rollouts, _, logged, s = of(carousel, "arrol")
    assert int(s["decision"].trained.sum()) == len(rollouts) == 64
    assert logged["arrol/right"] == pytest.approx(float((rollouts.reward >= 0.5).double().mean()))


def test_scope(carousel: Run) -> None:
    rollouts, tokens, logged, _ = of(carousel, "scope")
    assert len(rollouts) == 64 and logged["scope/corrected"] > 0
    assert bool(tokens.forced.any()), "what the corrector wrote was not sampled"


def test_m_grpo(carousel: Run) -> None:
    rollouts, _, _, s = of(carousel, "m_grpo")
    agents = rollouts.meta["agent"]
    assert set(agents) == {"main", "sub"} and rollouts.groups.size.numel() == PROMPTS // 2
    last = torch.zeros(1000).scatter_reduce(0, rollouts.group * 100 + rollouts.rollout, rollouts.index.float(), "amax")
    is_last = rollouts.index == last[rollouts.group * 100 + rollouts.rollout]
    assert [a == "main" for a in agents] == is_last.tolist(), "the main agent's row is the last of its rollout"
    assert int(s["decision"].stays.sum()) <= 64


def test_ui_s1_on_recorded_steps(carousel: Run) -> None:
    """A row per step; the advantages are those of the method on the steps that were played."""
    rollouts, tokens, logged, s = of(carousel, "ui_s1")
    steps = rollouts.turns
    assert s["decision"].estimator == "ui_s1" and set(rollouts.index.tolist()) == {0, 1}
    assert torch.equal(steps.turn, rollouts.index[steps.row]) and len(rollouts.groups.ids) == PROMPTS // 2
    assert 0 < logged["ui_s1/matched"] < 1 and set(steps.reward.tolist()) == {0.0, 1.0}
    method = UiS1(UiS1.Params(filter_by="none", rows_per_rollout=2))
    assert torch.allclose(method.advantages(rollouts)[tokens.turn], tokens.advantages, atol=1e-6)


def test_april_where_verl_carries_groups_over(tmp_path: Path) -> None:
    """Half as many groups again are begun; verl's own buffer keeps what is not trained."""
    run = finished(
        tmp_path / "run",
        [
            "+rl_plugins.methods=[april,watch]",
            "+rl_plugins.method_params.april.over_sampling=1.5",
            "+rl_plugins.method_params.april.correction=token_tis",
            "trainer.total_training_steps=3",
        ],
        trainer="watched_colocate_async",
        RL_PLUGINS_TEST_TOKEN_SECONDS="0.3",
        RL_PLUGINS_TEST_VERSIONS="1",
    )
    assert "trainer.v1.colocate_async.num_warmup_batches=0.5" in run.log, "what the method sets is printed"
    mixed = 0
    for k in range(3):
        rollouts, tokens = torch.load(run.folder / f"watch{k}.pt", weights_only=False)
        assert rollouts.groups.size.tolist() == [SAMPLES] * PROMPTS and rollouts.current_version == k
        of = Groups(tokens.row, count=len(rollouts))
        assert of.min(tokens.version.double()).tolist() == rollouts.version.tolist()
        assert of.max(tokens.version.double()).tolist() == rollouts.newest_version.tolist()
        assert bool((tokens.version.diff() >= 0)[tokens.row.diff() == 0].all()), "what resumes is newer"
        now, apart = tokens.version == k, (tokens.rollout_logprobs - tokens.old_logprobs).abs()
        assert float(apart[now].max()) < 1e-3, "log-probs are those of the attempt that made the token"
        assert not bool((~now).any()) or float(apart[~now].max()) > 1e-3
        logged, measured = run.metrics(k + 1), run.measured(k + 1)
        several = (rollouts.version < rollouts.newest_version).double()
        assert logged["rl_plugins/mixed_version_rows"] == float(several.mean())
        assert logged["april/staleness"] == int(rollouts.staleness.max())
        for ours, theirs in STALENESS.items():
            assert logged[f"rl_plugins/{ours}"] == pytest.approx(measured[f"training/off_policy/{theirs}"])
        mixed += int(several.sum())
    assert mixed > 0, "rollouts were interrupted, and went on with newer weights"


def test_rtv_pdr_trains_the_second_wave(carousel: Run) -> None:
    rollouts, _, logged, _ = of(carousel, "rtv_pdr")
    assert logged["rtv_pdr/votes"] > 0 and len(rollouts) > 0


def test_training_free_grpo_moves_nothing(carousel: Run) -> None:
    rollouts, _, logged, _ = of(carousel, "training_free_grpo")
    assert len(rollouts) == 64 and "actor/grad_norm" not in logged


def test_gradients_are_those_of_plain_torch(carousel: Run) -> None:
    """Of the methods that train with the host's surrogate."""
    updates = {u["methods"][0]: u for u in carousel.updates()}
    for name in ("latr", "turn_control", "cleaner", "aepo_rollout", "echo_labels", "arrol", "m_grpo_rollout"):
        norm, rows = reference([updates[name]])
        assert updates[name]["global_batch_size"] == rows, name
        assert updates[name]["grad_norm"] == pytest.approx(norm, rel=1e-4), name


TWO_STEPS = ["fission_grpo+echo_clip+watch", "aepo_clip+aepo_advantages+watch"]


@pytest.fixture(scope="module")
def off_policy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two optimizer steps per batch; each place comes twice, with its state."""
    return finished(
        tmp_path_factory.mktemp("verl") / "clips",
        [
            *REWARD,
            f"+carousel=[{','.join(TWO_STEPS)}]",
            "+rl_plugins.methods=[watch]",
            "+carousel_params.fission_grpo.role=user",
            "+carousel_params.fission_grpo.message='verl_programs:complaint'",
            "+carousel_params.fission_grpo.error_threshold=0.5",
            "actor_rollout_ref.actor.calculate_entropy=True",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}",
            "data.max_prompt_length=64",
            "trainer.total_training_steps=4",
        ],
        trainer="carousel",
        RL_PLUGINS_TEST_DUMP="1",
    )


def test_fission_turns_errors_into_prompts(off_policy: Run) -> None:
    first, _ = torch.load(off_policy.folder / "watch0.pt", weights_only=False)
    assert off_policy.metrics(1)["fission_grpo/pool"] > 0 and bool((first.prompt_index >= 0).all())
    rollouts, _ = torch.load(off_policy.folder / "watch2.pt", weights_only=False)
    foreign = rollouts.prompt_index == -1
    assert off_policy.metrics(3)["fission_grpo/served"] > 0 and 0 < int(foreign.sum()) < 64
    assert not set(rollouts.group[foreign].tolist()) & set(rollouts.group[~foreign].tolist()), "groups of their own"


def test_clips_act_in_the_second_update(off_policy: Run) -> None:
    updates = off_policy.updates()
    assert len(updates) == 8 and all(u["grad_norm"] > 0 for u in updates)
    for number, name in ((1, "echo_clip"), (2, "aepo_clip")):
        logged = off_policy.metrics(number)
        assert any(f"{name}/" in key for key in logged), sorted(logged)
