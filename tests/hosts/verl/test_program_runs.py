"""Rollout programs, and the methods that are such, in verl's real trainers on the CPU. One run takes another one every
step."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from gradients import reference
from methods.branch_loops import advantages_by_loops, first_copies, node_of, worse_tails
from runs import COSTS, PROMPTS, SAMPLES, STALENESS, Run, check_end, finished, walked

from rl_plugins.core.groups import Groups
from rl_plugins.lab.demo.policy import build_tokenizer, load_policy
from rl_plugins.methods.ui_s1 import UiS1

pytestmark = pytest.mark.host

PLACES = ["idle", "idle", "ladder+gigpo", "turns_apart", "grafting", "sleepy", "gone", "steep", "watch"]
PLACES += ["ladder+mc_grpo", "wasteful", "spared+rollart_redundancy", "ladder"]
ADHINT = "adhint_rollouts+adhint_advantages+adhint_gradients+watch"
BRANCHES = "branch_text_rollout+branch_advantages+branch_pruning+watch"
METHODS = [
    "turn_control+hgpo+epo+watch",
    "cleaner+watch",
    "aepo_rollout+aepo_advantages+watch",
    "echo_labels+echo_tree+echo_shaping+watch",
    "arrol+watch",
    "scope+watch",
    ADHINT,
    "m_grpo_rollout+m_grpo+watch",
    "rtv_pdr+watch",
    "training_free_grpo+watch",
    "recorded+ui_s1_rollout+ui_s1+watch",
    "latr+watch",
    BRANCHES,
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
    "epo.entropy_coeff=0.1",
    "epo.average=host",
    "epo.corridor=turn",
    "epo.rho=2.0",
    "epo.phase=none",
    "epo.include_current=true",
    "epo.kl=0.95",
    "epo.kr=1.05",
    "turn_control.turn_tokens=6",
    "cleaner.environment='verl_programs:Fussy'",
    "cleaner.marker='?'",
    "cleaner.turn_tokens=4",
    "cleaner.max_turns=3",
    f"aepo_rollout.environment={LADDER}",
    "aepo_rollout.turn_tokens=6",
    "aepo_rollout.initial_rollouts=4",
    "aepo_rollout.branch_probability=0.3",
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
    "adhint_rollouts.reference_column=answer",
    "adhint_rollouts.success_threshold=0.45",
    "adhint_advantages.success_threshold=0.45",
    "m_grpo_rollout.parse='verl_programs:asked'",
    "m_grpo_rollout.max_calls=1",
    "m_grpo_rollout.guard=strict",
    "m_grpo_rollout.contract='verl_programs:short_result'",
    "m_grpo_rollout.invalid_penalty=0.5",
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
    "training_free_grpo.llm='rl_plugins.lab.demo.advisor:canned'",
    "branch_text_rollout.places=[0,2,4]",
    "branch_advantages.fusion=paths",
]
REWARD = [
    "reward.custom_reward_function.path=pkg://verl_programs",
    "reward.custom_reward_function.name=reward",
    "data.max_response_length=32",
]


@pytest.fixture(scope="module")
def carousel(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The last batch ends it: a program raises."""
    overrides = [
        *REWARD,
        "+rl_plugins.methods=[watch,ladder]",
        "+carousel_params.mc_grpo.mad_eps=0.1",
        "+carousel_params.steep.first=0",
        *(f"+carousel_params.{p}" for p in PARAMS),
        "actor_rollout_ref.actor.calculate_entropy=True",
        f"trainer.test_freq={len(PLACES)}",
        "data.val_max_samples=4",
        "actor_rollout_ref.rollout.val_kwargs.n=3",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=10",
    ]
    environment = {"RL_PLUGINS_TEST_DUMP": "1", "RL_PLUGINS_TEST_OUTAGE": str(PLACES.index("watch") + 1)}
    folder = tmp_path_factory.mktemp("verl")
    return walked(folder, [*PLACES, *METHODS, "failing"], lambda _: overrides, stand_in="noop", **environment)


def seen(run: Run, file: str) -> tuple[Any, Any]:
    return torch.load(run.folder / file, weights_only=False)


def test_without_optimizer_steps_nothing_moves(carousel: Run) -> None:
    """Two steps of a method that trains nothing, then one that trains: bit-identical weights, a fresh optimizer, the
    learning rate's warm-up not begun, while steps are counted and logged."""
    from transformers import AutoModelForCausalLM

    first = carousel.updates()[0]
    assert first["methods"] == ["ladder", "gigpo"] and first["optimizer_steps"] == 0 and first["lr"] == 0.0
    before = AutoModelForCausalLM.from_pretrained(load_policy(), dtype=torch.float32).state_dict()
    assert all(torch.equal(before[name], value) for name, value in first["weights"].items())
    for number in (1, 2):
        logged = carousel.metrics(number)
        assert logged["rl_plugins/rows_generated"] == 64 and "actor/grad_norm" not in logged
    assert [u["lr"] for u in carousel.updates()[:7]] == pytest.approx([6e-5 * k for k in range(7)])


def spent(run: Run, number: int) -> dict[str, float]:
    """What a step cost."""
    before = run.costs(number - 1) if number > 1 else dict.fromkeys(COSTS, 0.0)
    return {name: value - before[name] for name, value in run.costs(number).items()}


def of_step(run: Run, kind: str, number: int) -> float:
    return next(e["t"] for e in run.of(kind) if e["step"] == number)


SCORING = {"grafting", "scope+watch", ADHINT}  # programs that ask for rewards, which costs tokens that no server reads


@pytest.mark.parametrize("names", PLACES + METHODS)
def test_costs_are_what_the_servers_did(carousel: Run, names: str) -> None:
    """Decoded and read tokens and requests of every program, against the servers' own counts. Validation, which comes
    after two of the steps, is not among them."""
    number = (PLACES + METHODS).index(names) + 1
    cost, until = spent(carousel, number), of_step(carousel, "stepped", number)
    calls, decoded, read = carousel.served(of_step(carousel, "step", number), until)
    assert cost["tokens_decoded"] == decoded > 0 and cost["engine_calls"] == calls > 0
    assert cost["tokens_read"] >= read and (cost["tokens_read"] == read or names in SCORING)
    assert 0 < cost["engine_seconds"] < until - of_step(carousel, "step", number)
    assert cost["rows_trained_total"] == int(carousel.steps()[number - 1]["decision"].trained.sum())
    assert cost["rows_made"] <= calls


def test_a_program_that_throws_away_half_shows_it(carousel: Run) -> None:
    """The case of issue 16: 2n samples, n kept, and verl logs half of what was made."""
    number = PLACES.index("wasteful") + 1
    wasteful, logged = spent(carousel, number), carousel.metrics(number)
    assert logged["rl_plugins/rows_generated"] == 64 and wasteful["rows_made"] == 128 == wasteful["engine_calls"]
    kept = int(carousel.step("wasteful")["decision"].rollouts.length.sum())
    assert wasteful["tokens_decoded"] > 1.5 * kept, "as many tokens are in rows that nobody sees"
    rows = {names: spent(carousel, PLACES.index(names) + 1)["rows_made"] for names in ("ladder", "turns_apart", "idle")}
    assert rows == {"ladder": 64, "turns_apart": 64, "idle": 64}, "a turn continues its row"
    assert spent(carousel, PLACES.index("ladder") + 1)["engine_calls"] == 3 * 64


def test_validation_costs_apart(carousel: Run) -> None:
    first = of_step(carousel, "validation", len(PLACES))
    assert carousel.served(first, of_step(carousel, "step", len(PLACES) + 1))[0] > 0, "it asked the same servers"


def test_a_batch_of_which_no_row_stays_makes_no_step(carousel: Run) -> None:
    s, logged = carousel.step("gone"), carousel.metrics(PLACES.index("gone") + 1)
    assert not bool(s["decision"].trained.any()) and s["batch_rows"] == 1
    assert logged["gone/seen"] == 64 and logged["rl_plugins/rows_trained"] == 0 and "actor/grad_norm" not in logged


def test_an_outage_of_the_rewards_is_skipped_and_counted(carousel: Run) -> None:
    """verl itself would train on rewards that are NaN. No hook after `rewards` sees the batch."""
    number = PLACES.index("watch")
    s, logged = carousel.step("watch"), carousel.metrics(number + 1)
    assert bool(s["decision"].rollouts.reward.isnan().all()) and not bool(s["decision"].trained.any())
    assert logged["rl_plugins/unrewarded_batches"] == 1 and logged["rl_plugins/rows_trained"] == 0
    assert "actor/grad_norm" not in logged and not (carousel.folder / f"watch{number}.pt").exists()
    assert "Not one of the 64 completions has a reward" in carousel.log


def test_a_gradient_that_is_not_finite_moves_nothing_and_is_counted(carousel: Run) -> None:
    logged = carousel.metrics(PLACES.index("steep") + 1)
    assert not math.isfinite(logged["actor/grad_norm"]) and logged["actor/rl_plugins/steps_skipped"] == 1.0
    update, after = (
        next(u for u in carousel.updates() if u["methods"] == m) for m in (["steep"], ["ladder", "mc_grpo"])
    )
    assert not math.isfinite(update["grad_norm"]) and update["optimizer_steps"] == after["optimizer_steps"]
    assert all(torch.equal(update["weights"][name], value) for name, value in after["weights"].items())
    assert "the host skips the step" in carousel.log and "In the loss: `steep` (regularize)" in carousel.log


# ---- an agent whose turns are compared


def replayed(raw: str) -> list[tuple[int, float, bool]]:
    """(height before, reward, valid) of every turn of a row, from its text alone."""
    height, out = 0, []
    for part in raw.split("<asst>"):
        action = part.split("<user>")[0].replace("<eos>", "")
        climbed = action[-1:] in tuple("13579")
        out.append((height, float(climbed), any(c.isdigit() for c in action)))
        height += climbed
    return out


def test_turns_of_an_agent_in_time_order(carousel: Run) -> None:
    rollouts, tokens = seen(carousel, "ladder2.pt")
    steps = rollouts.turns
    assert len(rollouts) == 64 and steps.row.tolist() == [r for r in range(64) for _ in range(3)]
    assert steps.turn.tolist() == [0, 1, 2] * 64
    told = [t for raw in rollouts.raw_text for t in replayed(raw)]
    assert list(zip(steps.anchor, steps.reward.tolist(), steps.valid.tolist(), strict=True)) == told
    assert len({h for h, _, _ in told}) > 1 and {r for _, r, _ in told} == {0.0, 1.0}
    order = (tokens.row * 100 + tokens.position).argsort()
    assert bool((tokens.turn[order].diff() >= 0).all()), "a later token belongs to a later turn"
    assert bool((rollouts.turns.row[tokens.turn] == tokens.row).all())


def test_gigpo_on_the_agent(carousel: Run) -> None:
    """Advantages per turn as plain loops make them, on the tokens of each turn."""
    rollouts, tokens = seen(carousel, "ladder2.pt")
    group, reward = rollouts.group.tolist(), rollouts.reward.tolist()
    turns, of_group, of_state = [], defaultdict(list), defaultdict(list)
    for row, raw in enumerate(rollouts.raw_text):
        told = replayed(raw)
        for k, (height, _, valid) in enumerate(told):
            later = sum(0.95**i * r for i, (_, r, _) in enumerate(told[k:])) - 0.1 * (not valid)
            whole = reward[row] - 0.1 * (not valid)
            turns.append((row, height, later, whole))
            of_group[group[row]].append(whole)
            of_state[(group[row], height)].append(later)
    expected = []
    for row, height, later, whole in turns:
        a, s = of_group[group[row]], of_state[(group[row], height)]
        expected.append(whole - sum(a) / len(a) + later - sum(s) / len(s))
    got = tokens.advantages
    assert torch.allclose(got, torch.tensor(expected, dtype=torch.float64)[tokens.turn], atol=1e-6)
    d = carousel.step("ladder+gigpo")["decision"]
    assert d.estimator == "gigpo" and not d.uniform and carousel.updates()[0]["grad_norm"] > 0


def test_the_reward_function_sees_what_the_program_noted(carousel: Run) -> None:
    rollouts, _ = seen(carousel, "ladder2.pt")
    heights = [sum(r for _, r, _ in replayed(raw)) for raw in rollouts.raw_text]
    expected = [h / 3 + 0.01 * level for h, level in zip(heights, rollouts.meta["level"], strict=True)]
    assert rollouts.meta["score"] == pytest.approx(expected) and rollouts.reward.tolist() == pytest.approx(expected)
    assert rollouts.meta["turns"] == [3] * 64
    assert carousel.metrics(3)["ladder/asked"] == 64, "what programs log is summed over the prompts"


def test_a_plan_asks_programs_for_spare_rollouts(carousel: Run) -> None:
    d = carousel.step("ladder+mc_grpo")["decision"]
    assert d.rollouts.groups.size.tolist() == [SAMPLES + 1] * PROMPTS and int(d.trained.sum()) == 64
    assert carousel.metrics(PLACES.index("ladder+mc_grpo") + 1)["ladder/asked"] == 72


def test_nobody_waits_for_an_environment_that_never_returns(carousel: Run) -> None:
    """Of nine rollouts of each prompt one hangs for an hour. The first eight to end are the other ones."""
    rollouts, _ = seen(carousel, "spared.pt")
    number = PLACES.index("spared+rollart_redundancy") + 1
    logged, d = carousel.metrics(number), carousel.step("spared+rollart_redundancy")["decision"]
    assert rollouts.groups.size.tolist() == [SAMPLES] * PROMPTS and int(d.trained.sum()) == 64
    assert set(rollouts.meta["error"]) == {""} and all(score == score for score in rollouts.meta["score"])
    assert logged["rollart_redundancy/closed"] == 1.0 and logged["rollart_redundancy/failed"] == 0.0
    assert logged["rollart_redundancy/kept_turns"] == 3.0 and logged["rollart_redundancy/closed_turns"] == 1.0
    events = carousel.of("environment")
    for what in ("open", "close"):
        numbers = [e["number"] for e in events if e["what"] == what]
        assert sorted(numbers) == sorted([*range(SAMPLES + 1)] * PROMPTS), "hung ones are closed too"
    assert of_step(carousel, "stepped", number) - of_step(carousel, "step", number) < 300
    assert spent(carousel, number)["rows_made"] == (SAMPLES + 1) * PROMPTS and logged["rl_plugins/rows_generated"] == 64


def test_validation_plays_too(carousel: Run) -> None:
    files = list(carousel.folder.glob("rl-plugins/**/*.jsonl"))
    logged = [json.loads(line)["data"] for f in files for line in f.read_text().splitlines()]
    last = next(x for x in logged if "val-aux/num_turns/mean" in x)
    assert last["val-aux/num_turns/min"] == last["val-aux/num_turns/max"] == 6, "three turns of two messages"
    assert last["val-aux/digit_lists/had_score/mean@3"] == 1.0
    assert last["val-aux/digit_lists/edited/mean@3"] == 1.0, "the plan's edits and payloads"


# ---- rows


def test_two_rows_per_rollout(carousel: Run) -> None:
    rollouts, _ = seen(carousel, "apart.pt")
    assert rollouts.groups.size.tolist() == [2 * SAMPLES] * (PROMPTS // 2), "the batch has rows for half of the prompts"
    assert rollouts.index.tolist() == [0, 1] * 32 == rollouts.meta["place"]
    assert rollouts.rollout.tolist() == [k for _ in range(4) for k in range(8) for _ in range(2)]
    steps = rollouts.turns
    assert steps.row.tolist() == list(range(64)) and steps.turn.tolist() == [0, 1] * 32
    assert list(steps.anchor) == ["start", "again"] * 32
    d, groups, r = carousel.step("turns_apart")["decision"], rollouts.groups, rollouts.reward
    expected = (r - groups.rows(groups.mean(r))) / (groups.rows(groups.std(r)) + 1e-6)
    assert torch.allclose(d.row_advantages, expected, atol=1e-6) and int(d.trained.sum()) == 64
    rows = carousel.updates()[1]["rows"]
    bridge = build_tokenizer()("<user>go<asst>", add_special_tokens=False)["input_ids"]
    wholes = {(*p.tolist(), *x.tolist(), *bridge) for p, x in zip(rows["prompts"], rows["responses"], strict=True)}
    assert sum(tuple(p.tolist()) in wholes for p in rows["prompts"]) == 32, "rows with a prompt of their own"


def test_everything_a_row_can_be_made_of(carousel: Run) -> None:
    rollouts, tokens = seen(carousel, "grafting.pt")
    assert rollouts.groups.size.tolist() == [7] * 8 + [1] * 8, "a group apart for every prompt, after those of the plan"
    prompts = rollouts.prompt_index.reshape(8, 8)
    assert bool((prompts == prompts[:, :1]).all()), "rows of a prompt stay together"
    assert rollouts.length.reshape(8, 8)[:, -2:].tolist() == [[0, 0]] * 8, "no token, and none that is trained"
    assert bool((rollouts.length.reshape(8, 8)[:, :-2] > 0).all())
    forced = torch.zeros(64, dtype=torch.int64).index_add(0, tokens.row, tokens.forced.long()).reshape(8, 8)
    assert bool((forced[0, :6] >= 2).all()) and int(rollouts.length[:8].max()) <= 12, "the prefix, and a shorter limit"
    assert forced[1].tolist()[0] == 4 == int(rollouts.length[8]), "the given completion comes first"
    for row in (16, 24, 56):  # the argmax is forced, two tokens were read, the tail was sampled
        of = tokens.row == row
        kinds = tokens.forced[of].tolist()
        first = sum(kinds)
        assert 1 <= first <= 3 and kinds == [True] * first + [False] * (len(kinds) - first)
        assert tokens.position[of].tolist() == [*range(first), *range(first + 2, first + 2 + len(kinds) - first)]
    events = carousel.events
    begun = next(i for i, e in enumerate(events) if e["kind"] == "plan" and e["step"] == 5)
    ended = next(i for i, e in enumerate(events) if e["kind"] == "decided" and e["step"] == 5)
    scored = sum(e["kind"] == "scored" for e in events[begun:ended])
    assert scored == 64, "a row with rewards of `Score` is not scored again"
    logged = carousel.metrics(5)
    assert logged["training/rollout_probs_diff_max"] < 1e-4, "verl's metric sees no place holders"
    assert logged["grafting/number"] == 7 and logged["rl_plugins/rows_trained"] == int((rollouts.length > 0).sum())


def test_calls_that_hang_and_raise(carousel: Run) -> None:
    rollouts, _ = seen(carousel, "sleepy.pt")
    assert len(rollouts) == 64
    for errors in rollouts.meta["errors"][:8]:
        assert errors[0] == "TimeoutError: a sleep took longer than 0.5 s" and errors[1].startswith("ValueError")
    assert not any(rollouts.meta["errors"][8:])


TRAINED = [p for p in PLACES if p not in ("idle", "gone", "watch")]


@pytest.mark.parametrize("names", TRAINED)
def test_gradients_are_those_of_plain_torch(carousel: Run, names: str) -> None:
    carousel.check(PLACES.index(names))
    update = carousel.updates()[TRAINED.index(names)]
    assert update["methods"] == names.split("+")
    if names != "steep":
        norm, rows = reference([update])
        assert update["global_batch_size"] == rows == 64
        assert update["grad_norm"] == pytest.approx(norm, rel=1e-4)


# ---- methods that are programs


def of(run: Run, name: str) -> tuple[Any, Any, dict[str, float], dict[str, Any]]:
    """Rollouts, tokens, what was logged and what was decided in the step of a method."""
    k = len(PLACES) + next(i for i, place in enumerate(METHODS) if name in place.split("+"))
    run.check(k)
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


def test_epo_has_a_corridor_per_turn(carousel: Run) -> None:
    """Around the mean entropy of the turn; the gradient is that of plain torch."""
    rollouts, tokens, logged, s = of(carousel, "epo")
    turn = rollouts.turns.turn[tokens.turn]
    for number in range(3):
        mean = tokens.entropies[turn == number].double().mean()
        low, high = (s["decision"].token_columns[f"epo_{name}"][turn == number] for name in ("low", "high"))
        assert low.tolist() == pytest.approx([0.95 * float(mean)] * len(low), rel=1e-6)
        assert high.tolist() == pytest.approx([1.05 * float(mean)] * len(high), rel=1e-6)
    assert logged["epo/covered"] == 1 and 0 < logged["actor/epo/within"] < 1
    (update,) = [u for u in carousel.updates() if "epo" in u["methods"]]
    norm, rows = reference([update])
    assert update["global_batch_size"] == rows == 64 and update["grad_norm"] == pytest.approx(norm, rel=1e-4)


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


def test_adhint(carousel: Run) -> None:
    """Hints are the beginning of the answer in the dataset; those of failing rollouts are not trained."""
    rollouts, tokens, logged, s = of(carousel, "adhint_rollouts")
    d, encode = s["decision"], build_tokenizer().encode
    answers = [row["answer"] for row in carousel.rows_of(rollouts.prompt_index.tolist())]
    hinted = 0
    for i, (start, stop) in enumerate(rollouts.meta["adhint"]):
        mine = tokens.row == i
        assert tokens.forced[mine].tolist() == [k < stop for k in range(int(mine.sum()))] and start == 0
        assert stop <= 0.7 * len(encode(answers[i], add_special_tokens=False))
        hinted += stop > 0
        if stop and float(d.row_advantages[i]) < 0:
            assert not d.keep_tokens[mine][:stop].any() and d.keep_tokens[mine][stop:].all()
    assert 0 < hinted <= 32 and logged["adhint_rollouts/hinted"] == hinted / 64
    assert 0 < logged["adhint_gradients/weight"] < 1 and logged["adhint_advantages/factor"] > 0


def test_branches(carousel: Run) -> None:
    """Trees of 8 completions; advantages, the copies that leave and the pruned tails are those of a loop."""
    rollouts, tokens, logged, s = of(carousel, "branch_text_rollout")
    ways, d = rollouts.meta["branches"], s["decision"]
    for group in rollouts.group.unique().tolist():
        nodes = [ways[i]["nodes"] for i in (rollouts.group == group).nonzero()[:, 0].tolist()]
        assert len(nodes) == 8 and len({way[1] for way in nodes}) == 2, "split in two before the first token"
    assert logged["branch_text_rollout/saved"] > 0.1 and logged["branch_advantages/shared"] > 0.1
    wanted = advantages_by_loops(rollouts, tokens, "paths")
    left, first = worse_tails(rollouts, tokens, wanted), first_copies(rollouts, tokens.replace(keep=tokens.row >= 0))
    assert left and d.keep_tokens is not None
    for i, (row, position) in enumerate(zip(tokens.row.tolist(), tokens.position.tolist(), strict=True)):
        node = node_of(rollouts, row, position)
        assert node is not None and bool(d.keep_tokens[i]) == (first[i] and node not in left)
        assert float(d.advantages[i]) == pytest.approx(wanted[node] if d.keep_tokens[i] else 0.0, abs=1e-5)


def test_m_grpo(carousel: Run) -> None:
    rollouts, _, logged, s = of(carousel, "m_grpo")
    assert logged["m_grpo_rollout/guard_failed"] == 0 and logged["m_grpo_rollout/unverified"] > 0
    assert logged["m_grpo_rollout/agent_turns"] > 1 and logged["m_grpo_rollout/calls_failed"] == 0
    assert 0 < logged["m_grpo_rollout/message_density"] < 2 and logged["m_grpo_rollout/agent_tokens"] > 0
    assert {float(v) for v in rollouts.meta["invalid"]} <= {0.0, 1.0}  # the column came with the rows
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


def test_rtv_pdr_trains_the_second_wave(carousel: Run) -> None:
    rollouts, _, logged, _ = of(carousel, "rtv_pdr")
    assert logged["rtv_pdr/votes"] > 0 and len(rollouts) > 0


def test_training_free_grpo_moves_nothing(carousel: Run) -> None:
    rollouts, _, logged, _ = of(carousel, "training_free_grpo")
    assert len(rollouts) == 64 and "actor/grad_norm" not in logged


HOST_SURROGATE = ["latr", "turn_control", "cleaner", "aepo_rollout", "echo_labels"]
HOST_SURROGATE += ["arrol", "m_grpo_rollout", "adhint_rollouts", "branch_text_rollout"]


@pytest.mark.parametrize("name", HOST_SURROGATE)
def test_gradients_of_methods_are_those_of_plain_torch(carousel: Run, name: str) -> None:
    """Of the methods that train with the host's surrogate."""
    of(carousel, name)
    (update,) = [u for u in carousel.updates() if u["methods"][0] == name]
    norm, rows = reference([update])
    assert update["global_batch_size"] == rows
    assert update["grad_norm"] == pytest.approx(norm, rel=1e-4)


# ---- other runs


def test_a_program_that_raises_ends_the_run(carousel: Run) -> None:
    """verl itself would wait for its rollouts for ever."""
    check_end(carousel, "failing", "`rollout`: ValueError: the program gave up")
    assert 'raise ValueError("the program gave up")' in carousel.log, "the traceback"


@pytest.mark.long
def test_an_asynchronous_mode_where_groups_go_on_in_a_later_batch(tmp_path: Path) -> None:
    """`april` begins half as many groups again; verl's own buffer keeps what is not trained, agents in the middle of a
    turn included. Groups are complete when their program is."""
    run = finished(
        tmp_path / "run",
        [
            *REWARD,
            "+rl_plugins.methods=[april,linear_ts,ladder,gigpo,dart_length,dart_tis,watch]",
            "+rl_plugins.method_params.linear_ts.column=level",
            "+rl_plugins.method_params.april.over_sampling=1.5",
            "+rl_plugins.method_params.dart_length.success_threshold=0.0",  # every rollout: three turns
            "actor_rollout_ref.rollout.max_num_seqs=40",  # of 96, so that groups are not all at the same turn
            "trainer.total_training_steps=3",
        ],
        trainer="watched_colocate_async",
        RL_PLUGINS_TEST_TOKEN_SECONDS="0.2",
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
        weight = (tokens.old_logprobs - tokens.rollout_logprobs).double().exp().clamp(max=1)
        assert logged["dart_tis/weight_mean"] == pytest.approx(float(weight.mean()), rel=1e-4)
        assert logged.get("dart_length/limit", 3.0) == 3.0 and 0 <= logged["dart_length/limited"] <= 1
        mixed += int(several.sum())
        d = run.steps()[k]["decision"]
        assert d.estimator == "gigpo" and len(d.rollouts.turns.row) == 3 * 64
        assert logged["ladder/asked"] == 64 and logged["actor/grad_norm"] > 0
    assert mixed > 0, "rollouts were interrupted, and went on with newer weights"
    first, last = run.costs(1), run.costs(3)
    calls, decoded, read = run.served(end=of_step(run, "stepped", 3))
    assert 64 <= first["rows_made"] <= 1.5 * 64, "rows of a program count when it ends, trained or not"
    assert last["rows_trained_total"] == 3 * 64 <= last["rows_made"] and 3 * last["rows_trained_total"] < calls
    known = [torch.load(run.folder / f"watch{k}.pt", weights_only=False)[1] for k in range(3)]
    assert sum(map(len, known)) < last["tokens_decoded"] <= decoded, "and of what waits, what was made until now"
    assert last["tokens_read"] <= read and last["engine_calls"] <= calls
    # `linear_ts` chooses ahead of the feedback: a plan is of one domain, and is trained up to a batch later
    plans = [run.rows_of(event["prompts"]) for event in run.of("plan")]
    assert len(plans) >= 3 and all(len({row["level"] for row in rows}) == 1 for rows in plans)
    lags = [run.metrics(k + 1).get("rl_plugins/plan_lag", 0.0) for k in range(3)]
    assert lags[0] == 0 and 0 < max(lags) <= 1, lags
    shares = [{k: v for k, v in run.metrics(n).items() if "linear_ts/share" in k} for n in (1, 2, 3)]
    assert all(sum(x.values()) == pytest.approx(1) for x in shares)
