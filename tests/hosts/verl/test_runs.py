"""verl's real V1 trainer on the CPU: Ray, TransferQueue, FSDP2, agent loops, our rollout replica.

One run takes another stack of methods every step, a setting; each test looks at one of them. A setting that ends the
run fails its own tests only: see `walked`. What the methods decide is recomputed here, and the gradient norm of every
optimizer step is compared with plain transformers and torch on the rows that were trained.
"""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
from runs import COMMON, PROBES, PROMPTS, SAMPLES, Run, check_end, check_gradient, check_setting, seen, walked

sys.path.insert(0, str(PROBES))

from sampler_checks import check_dynamic_sampling

from rl_plugins.core.groups import Groups
from rl_plugins.lab.demo.judges import meets
from rl_plugins.lab.demo.policy import build_tokenizer

pytestmark = pytest.mark.host

MAX_LENGTH = 14  # of a completion, in the demo's config

PLACES = [
    "mc_grpo",
    "vade+mc_grpo",
    "probing",
    "minpro",
    "gdpo",
    "grpo_roc",
    "half+per_token",
    "filter+corridor",
    "softmax",
    "verl_given",
    "odd+judge",
    "one",
    "decoupled_ppo",
    "vcpo",
    "helpings+watch",
    "twice",
]
# What users of the hosts ask for most.
FILLED = "dynamic_sampling+max_rl+clip_cov+dppo+watch"
FILTERED = "rubric+overlong+gfpo+variance_filter+pkpo+watch"
PARAMS = [
    "dynamic_sampling.success_threshold=1.0",
    "clip_cov.ratio=0.1",
    "clip_cov.low=0.1",
    "rubric.judge='rl_plugins.lab.demo.judges:meets'",
    "rubric.criteria=['2: right','1: careful']",
    "overlong.buffer=6",
    "overlong.penalty=0.5",
]
ALL = [*PLACES, FILLED, FILTERED]


@pytest.fixture(scope="module")
def carousel(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The last batch ends it: a hook raises on the driver."""
    overrides = [
        *COMMON,
        "+rl_plugins.methods=[mc_grpo]",
        "actor_rollout_ref.actor.use_kl_loss=True",  # a reference policy, with no weight in the loss
        "actor_rollout_ref.actor.kl_loss_coef=0.0",
        *(f"+carousel_params.{p}" for p in PARAMS),
        "data.max_prompt_length=96",
    ]
    folder = tmp_path_factory.mktemp("verl")
    return walked(folder, [*ALL, "boom"], lambda _: overrides, stand_in="noop", RL_PLUGINS_TEST_DUMP="1")


# ---- every setting


@pytest.mark.parametrize("number", range(len(ALL)), ids=[f"{i + 1}-{names}" for i, names in enumerate(ALL)])
def test_a_setting_trains_what_it_planned(carousel: Run, number: int) -> None:
    check_setting(carousel, number, later_rounds=ALL[number] == FILLED)


@pytest.mark.parametrize("number", range(len(ALL)), ids=[f"{i + 1}-{names}" for i, names in enumerate(ALL)])
def test_its_gradient_is_that_of_plain_torch(carousel: Run, number: int) -> None:
    assert check_gradient(carousel, number) or ALL[number] not in PLACES


# ---- decisions


def test_mc_grpo_leaves_the_pivot_out(carousel: Run) -> None:
    step = carousel.step("mc_grpo")
    d, groups = step["decision"], step["decision"].rollouts.groups
    assert groups.size.tolist() == [SAMPLES + 1] * PROMPTS and int(d.trained.sum()) == step["batch_rows"] == 64
    r = d.rollouts.reward
    center = groups.rows(groups.median(r))
    spread = groups.rows(groups.median((r - center).abs()))
    expected = (r - center) / (spread + 0.1)
    assert torch.allclose(d.row_advantages[d.trained], expected[d.trained], atol=1e-9)
    assert groups.sum((~d.trained).double()).tolist() == [1.0] * PROMPTS
    assert float((r - center)[~d.trained].abs().max()) == 0.0


def test_vade_chooses_other_prompts_than_the_loader(carousel: Run) -> None:
    plans = carousel.of("plan")
    loader = plans[0]["prompts"]
    assert len(set(loader)) == PROMPTS and plans[1]["prompts"] != loader
    assert carousel.metrics(2)["vade/seen"] > 0


def test_rounds_add_to_the_groups(carousel: Run) -> None:
    """Four rollouts each, then eight more for the four groups of lowest mean reward."""
    d = carousel.step("probing")["decision"]
    groups, r = d.rollouts.groups, d.rollouts.reward
    assert sorted(groups.size.tolist()) == [4] * 4 + [12] * 4 and d.estimator == "rl_plugins"
    first = d.rollouts.rollout < 4
    means = Groups(d.rollouts.group).mean(torch.where(first, r, torch.nan))
    low = torch.argsort(means, stable=True)[:4].sort().values
    assert low.tolist() == (groups.size == 12).nonzero()[:, 0].tolist()
    expected = (r - groups.rows(groups.mean(r))) / (groups.rows(groups.std(r)) + 1e-6)
    assert torch.allclose(d.row_advantages, expected, atol=1e-9)


def test_later_rounds_edit_prompts_and_have_the_room_of_groups_that_leave(carousel: Run) -> None:
    """A first round that is all spare (n = 0): 4 rollouts each; the four groups of lowest mean reward get 12 more under
    other words, which join the group they name, with the row as planned."""
    step = carousel.step("helpings+watch")
    d, number = step["decision"], PLACES.index("helpings+watch")
    rollouts, groups, r = d.rollouts, d.rollouts.groups, d.rollouts.reward
    assert sorted(groups.size.tolist()) == [4] * 4 + [16] * 4 and step["batch_rows"] == 64 and step["padding"] == 0
    means = Groups(rollouts.group).mean(torch.where(rollouts.rollout < 4, r, torch.nan))
    low = groups.size == 16
    assert means[low].max() <= means[~low].min() and torch.equal(d.trained, groups.rows(low))
    inside = rollouts.subset(d.trained)
    mean, std = (inside.groups.rows(f(inside.reward)) for f in (inside.groups.mean, inside.groups.std))
    assert torch.allclose(d.row_advantages[d.trained], (inside.reward - mean) / (std + 1e-6), atol=1e-6)
    assert [p["planned"] for p in rollouts.payload] == rollouts.prompt_index.tolist()
    words = build_tokenizer().batch_decode([list(p) for p in rollouts.token_ids.prompt])
    hinted = [f"d:{i:04d}" in text for i, text in zip(rollouts.prompt_index.tolist(), words, strict=True)]
    assert hinted == [p.get("helping", 0) == 1 for p in rollouts.payload] == (rollouts.rollout >= 4).tolist()
    update = next(u for u in carousel.updates() if u["methods"] == ["helpings", "watch"])
    trained = build_tokenizer().batch_decode([list(p) for p in update["rows"]["prompts"]])
    wanted = [text for text, kept in zip(words, d.trained.tolist(), strict=True) if kept]
    assert sorted(trained) == sorted(wanted) and carousel.metrics(number + 1)["rl_plugins/rows_generated"] == 80


def test_a_prompt_in_two_groups_of_its_own(carousel: Run) -> None:
    d = carousel.step("twice")["decision"]
    rollouts, groups, r = d.rollouts, d.rollouts.groups, d.rollouts.reward
    assert groups.size.tolist() == [SAMPLES] * PROMPTS and d.estimator == "host", "each has a mean of its own"
    assert torch.equal(rollouts.prompt_index[:32], rollouts.prompt_index[32:])
    assert len(rollouts.prompt_index.unique()) == PROMPTS // 2
    expected = (r - groups.rows(groups.mean(r))) / (groups.rows(groups.std(r)) + 1e-6)
    assert torch.allclose(d.row_advantages, expected, atol=1e-5)


def test_gdpo_normalizes_each_reward(carousel: Run) -> None:
    d = carousel.step("gdpo")["decision"]
    rollouts, groups = d.rollouts, d.rollouts.groups
    assert rollouts.reward_names == ("exact", "digits") and rollouts.reward_weights.tolist() == [1.0, 0.5]
    assert torch.allclose(rollouts.reward, rollouts.rewards @ rollouts.reward_weights)
    total = torch.zeros(len(rollouts), dtype=torch.float64)
    for x, w in zip(rollouts.rewards.unbind(1), rollouts.reward_weights, strict=True):
        total += w * (x - groups.rows(groups.mean(x))) / (groups.rows(groups.std(x)) + 1e-4)
    expected = (total - total.mean()) / (total.std() + 1e-4)
    assert d.estimator == "gdpo" and torch.allclose(d.row_advantages, expected, atol=2e-3)


def test_grpo_roc_generates_twice_and_trains_half(carousel: Run) -> None:
    step = carousel.step("grpo_roc")
    d = step["decision"]
    assert d.rollouts.groups.size.tolist() == [2 * SAMPLES] * PROMPTS
    assert d.rollouts.subset(d.rollouts.kept).groups.size.tolist() == [SAMPLES] * PROMPTS
    assert step["batch_rows"] == 64 and step["padding"] == 0


def test_rows_and_tokens_that_leave(carousel: Run) -> None:
    step = carousel.step("half+per_token")
    d = step["decision"]
    assert (d.rollouts.kept == (d.rollouts.group < 4)).all() and int(d.trained.sum()) == 32
    assert step["padding"] == 32, "verl fills the batch to its mini-batch"
    update = carousel.updates()[PLACES.index("half+per_token")]
    real = [i for i, x in enumerate(update["rows"]["rl_plugins_real"]) if float(x.sum()) > 0]
    assert len(real) == 32 == update["global_batch_size"]
    for i in real:
        mask, loss_mask = update["rows"]["response_mask"][i], update["rows"]["loss_mask"][i]
        assert mask.tolist() == loss_mask.tolist() == [int(k % 3 != 2) for k in range(len(mask))]
        a = update["rows"]["advantages"][i]
        assert torch.allclose(a[1::3], torch.where(torch.arange(1, len(a), 3) % 2 > 0, 2.0, 1.0) * a[0], atol=1e-5)


def test_what_a_plan_can_ask_for(carousel: Run) -> None:
    rollouts, tokens, _ = torch.load(carousel.folder / "given.pt", weights_only=False)
    of = Groups(tokens.row, count=len(rollouts))
    forced = of.sum(tokens.forced.double())
    assert rollouts.length[:2].tolist() == [4, 3] and forced[:2].tolist() == [0, 3], "with log-probs it is a sample"
    assert tokens.rollout_logprobs[:4].tolist() == [-1.0, -2.0, -3.0, -4.0]
    assert torch.equal(tokens.rollout_logprobs[4:7], tokens.old_logprobs[4:7]), "unknown: that of the policy"
    assert forced[8:16].tolist() == [2.0] * 8 and rollouts.payload[8] == {"hint": 2}
    assert rollouts.text[8].startswith(carousel_text((10, 11)))
    assert int(rollouts.length[16:24].max()) == 3
    assert rollouts.meta["level"][24:32] == [77] * 8 and rollouts.meta["level"][32:40] == [99] * 8
    assert rollouts.prompt_index[32:40].tolist() == [-1] * 8
    given = (rollouts.group == rollouts.group[0]) & (rollouts.rollout == 0)
    given |= (rollouts.group == rollouts.group[40]) & (rollouts.rollout == 0)
    sampled = ~tokens.forced & ~given[tokens.row]
    assert torch.allclose(tokens.rollout_logprobs[sampled], tokens.old_logprobs[sampled], atol=1e-4)
    host = carousel.metrics(PLACES.index("verl_given") + 1)["training/rollout_probs_diff_mean"]
    assert host < 0.05, "verl's metric does not see place holders"


def test_a_stored_rollout_comes_back_as_it_was(carousel: Run) -> None:
    """With its log-probs, versions, observed token and rewards, which are not computed again."""
    rollouts, tokens, _ = torch.load(carousel.folder / "given.pt", weights_only=False)
    own, now = tokens.row == 40, PLACES.index("verl_given")
    assert tokens.position[own].tolist() == [0, 1, 3, 4] and not bool(tokens.forced[own].any())
    assert tokens.rollout_logprobs[own].tolist() == [-1.0, -2.0, -4.0, -5.0]
    assert (tokens.old_logprobs[own] - tokens.rollout_logprobs[own]).abs().max() > 0.1, "its weight exists"
    assert tokens.version[own].tolist() == [2, 2, 3, 5]
    assert (int(rollouts.version[40]), int(rollouts.newest_version[40]), rollouts.current_version) == (2, 5, now)
    assert rollouts.rewards[40].tolist() == [1.0, 0.25] and float(rollouts.reward[40]) == 1.125
    assert rollouts.token_ids.prompt[40].tolist() == [12, 11, 10, 9], "its own, and no other row's"
    assert all(p.tolist() != [12, 11, 10, 9] for i, p in enumerate(rollouts.token_ids.prompt) if i != 40)
    assert rollouts.token_ids.completion[40].tolist() == [7, 8, 9, 6, 1]
    assert rollouts.token_ids.observed[40].tolist() == [False, False, True, False, False]
    others = torch.arange(len(rollouts)) != 40
    assert (rollouts.version[others] == now).all() and (rollouts.newest_version[others] == now).all(), "made now"
    assert (tokens.version[~own] == now).all(), "also those that were given without versions, or put in"
    logged = carousel.metrics(now + 1)
    assert (logged["rl_plugins/staleness_max"], logged["rl_plugins/mixed_version_rows"]) == (now - 5, 1 / 64)
    assert logged["rl_plugins/staleness_oldest_max"] == now - 2 and logged["rl_plugins/staleness_share/4_7"] == 1 / 64


def test_squared_probabilities_are_those_of_the_policy_that_gave_the_old_log_probs(carousel: Run) -> None:
    from rl_plugins.lab.demo.policy import build_model

    rollouts, tokens, _ = torch.load(carousel.folder / "given.pt", weights_only=False)
    update = next(u for u in carousel.updates() if u["methods"] == ["verl_given"])
    model = build_model(0).float()
    model.load_state_dict(update["weights"])
    for row in (0, 8, 40, 63):
        prompt, made = rollouts.token_ids.prompt[row], rollouts.token_ids.completion[row]
        with torch.no_grad():
            p = model(torch.cat([prompt, made])[None]).logits[0, len(prompt) - 1 : -1].softmax(-1)
        own = tokens.row == row
        place = tokens.position[own]
        assert torch.allclose(tokens.sum_squared_probs[own], (p**2).sum(-1)[place], atol=1e-5)
        logprobs = p.gather(1, made[:, None])[place, 0].log()
        assert torch.allclose(tokens.old_logprobs[own], logprobs, atol=1e-4)


def test_log_probs_under_the_prompts_of_a_teacher(carousel: Run) -> None:
    """Of every completion, behind hints of several lengths, as the policy that gave the old log-probs has them."""
    from rl_plugins.lab.demo.policy import build_model

    rollouts, tokens, prompts = torch.load(carousel.folder / "given.pt", weights_only=False)
    update = next(u for u in carousel.updates() if u["methods"] == ["verl_given"])
    model, render = build_model(0), build_tokenizer().apply_chat_template
    model.load_state_dict(update["weights"])
    unread = torch.tensor([p is None for p in prompts])
    assert torch.equal(torch.isnan(tokens.teacher_logprobs), unread[tokens.row]) and int(unread.sum()) == 21
    for row in (0, 1, 9, 40, 63):
        prompt = torch.tensor(render(prompts[row], add_generation_prompt=True, return_dict=True)["input_ids"])
        made, own = rollouts.token_ids.completion[row], tokens.row == row
        with torch.no_grad():
            logits = model.double()(torch.cat([prompt, made])[None]).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(1, made[:, None])[:, 0][tokens.position[own]]
        assert torch.allclose(tokens.teacher_logprobs[own].double(), wanted, atol=1e-5)
        assert float((tokens.old_logprobs[own] - wanted).abs().max()) > 1e-3


def carousel_text(ids: tuple[int, ...]) -> str:
    return build_tokenizer().decode(ids)


def test_rewards_that_are_withdrawn(carousel: Run) -> None:
    d = carousel.step("odd+judge")["decision"]
    r = d.rollouts.reward
    short = d.rollouts.length < 4
    base = d.rollouts.rewards @ d.rollouts.reward_weights
    assert torch.equal(torch.isnan(r), short) and torch.allclose(r[~short], 2 * base[~short])
    assert (d.row_advantages[short] == 0).all()
    assert carousel.metrics(PLACES.index("odd+judge") + 1)["rewards/judge/mean"] == pytest.approx(float(r.nanmean()))


def test_a_plan_of_one_fills_the_batch_with_prompts(carousel: Run) -> None:
    step = carousel.step("one")
    d = step["decision"]
    assert d.rollouts.groups.size.tolist() == [1] * 64 and step["batch_rows"] == 64
    assert len(set(d.rollouts.prompt_index.tolist())) == 64
    assert torch.allclose(d.row_advantages, d.rollouts.reward - 0.5)


def test_dynamic_sampling_fills_a_batch_with_groups_that_have_signal(carousel: Run) -> None:
    """Beside an estimator, tokens without advantage and a loss of other methods."""
    d, tokens, logged = seen(carousel, "dynamic_sampling")
    assert logged["dynamic_sampling/rollouts_per_row"] == pytest.approx(check_dynamic_sampling(d, 1.0))
    assert logged["dynamic_sampling/filled"] == 1.0
    r, left = d.rollouts, d.trained[tokens.row]
    mean = r.groups.rows(r.groups.mean(r.reward))
    given, expected = d.advantages[left], ((r.reward - mean) / (mean + 1e-6))[tokens.row][left]
    zeroed = (given - expected).abs() > 1e-6
    assert logged["clip_cov/chosen"] == int(zeroed.sum()) == int(0.1 * int(left.sum())) and not given[zeroed].any()
    assert logged["actor/dppo/left_out"] == 0 and 0 <= logged["actor/dppo/divergence"] < 1e-4, "on-policy"


def test_filters_keep_short_rollouts_of_groups_with_spread_and_judge_by_criteria(carousel: Run) -> None:
    d, _, logged = seen(carousel, "rubric")
    r, prompts = d.rollouts, [prompt[0]["content"] for prompt in d.rollouts.meta["prompt"]]
    assert r.groups.size.tolist() == [2 * SAMPLES] * PROMPTS and logged["rubric/questions"] == 2 * len(r)
    for text, task, reward, length in zip(r.text, prompts, r.reward.tolist(), r.length.tolist(), strict=True):
        judged = (2 * meets(task, "right", text) + meets(task, "careful", text)) / 3
        assert reward == pytest.approx(judged - 0.5 * min(max(length - (MAX_LENGTH - 6), 0) / 6, 1))
    assert logged["overlong/punished"] > 0 and not bool((d.trained & r.truncated).any())
    efficiency = (r.reward / r.length).tolist()
    for group in range(PROMPTS):
        rows = (r.group == group).nonzero()[:, 0].tolist()
        short = sorted(rows, key=lambda i: -efficiency[i])[:SAMPLES]
        kept = [i for i in rows if r.kept[i]]
        assert set(kept) in ({*short}, set())
        for i in (i for i in kept if d.trained[i]):
            best = [
                max(r.reward[list(s)]) - max(r.reward[[j for j in s if j != i]])
                for s in itertools.combinations(kept, 4)
                if i in s
            ]
            assert float(d.row_advantages[i]) == pytest.approx(SAMPLES * float(sum(best)) / 70, abs=1e-5)
    assert 0 < logged["variance_filter/kept"] < 1


def test_metrics_of_hooks(carousel: Run) -> None:
    minpro = carousel.metrics(PLACES.index("minpro") + 1)
    assert any(k.startswith("actor/minpro/") for k in minpro)
    assert carousel.metrics(PLACES.index("softmax") + 1)["actor/softmax/groups"] == PROMPTS


def test_every_process_loaded_the_plugin_and_workers_confirmed(carousel: Run) -> None:
    assert "methods confirmed by 3 workers (training" in carousel.log
    assert len({e["pid"] for e in carousel.of("loaded")}) >= 6
    assert "rl-plugins: methods in effect, in this order" in carousel.log


# ---- numbers of the update


def test_a_batch_is_one_optimizer_step(carousel: Run) -> None:
    """Also where more rows were generated. Nearly all settings train."""
    updates, trained = carousel.updates(), [s for s in carousel.steps() if bool(s["decision"].trained.any())]
    assert len(carousel.steps()) == len(ALL) and len(updates) == len(trained)
    assert len(updates) >= len(PLACES)


def test_the_learning_rate_is_the_schedules(carousel: Run) -> None:
    """`vcpo` multiplies it by the effective sample size, which is 1 on-policy."""
    logged = carousel.metrics(PLACES.index("vcpo") + 1)
    assert logged["actor/vcpo/ess_ratio"] == pytest.approx(1, abs=1e-3)
    assert logged["actor/lr"] == pytest.approx(6e-4), "the schedule does not see it"


def test_a_hook_that_raises_ends_the_run(carousel: Run) -> None:
    check_end(carousel, "boom", "`observe`: ValueError: the driver hook went wrong")
