"""Every advantage method takes two real steps in TRL's trainer, and what it changes is seen in the batch it trained."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch
from harness import make, score, stub_sampling

from rl_plugins.core.groups import Groups
from rl_plugins.lab.demo.tasks import build_dataset
from rl_plugins.methods.fapo import rewards
from rl_plugins.trl.generation import batches as module

pytestmark = pytest.mark.host


def right(completion_ids: Any = None, **kwargs: Any) -> list[float]:
    """Right or wrong, from the token ids alone."""
    return [float(sum(c) % 3 == 0) for c in completion_ids]


def stepwise(completions: Any = None, **kwargs: Any) -> list[Any]:
    """A reward per step, steps being parted by a 1; of some steps, and of every fourth completion, there is none."""
    pieces = [c[0]["content"].split("1") for c in completions]
    lists = [[None if len(piece) % 4 == 3 else len(piece) % 3 / 2 for piece in p] for p in pieces]
    return [None if i % 4 == 3 else own for i, own in enumerate(lists)]


async def outcome(completions: Any = None, **kwargs: Any) -> list[float]:
    return [float(len(c[0]["content"]) % 2) for c in completions]


def judge(prompt: Any, a: str, b: str) -> tuple[float, float]:
    """The longer answer has the higher score."""
    return float(len(a)), float(len(b))


CASES: dict[str, dict[str, Any]] = {
    "drpo": {"reward": right},
    "d3s": {},
    "mssr": {"reward": right, "num_generations": 2, "beta": 0.04},
    "v0_5": {"reward": right},
    "v0": {"reward": right},
    "brpo": {"method_params": {"brpo": {"judge": judge}}},
    "rubric+overlong+gfpo+variance_filter+pkpo": {
        "method_params": {
            "rubric": {"judge": lambda prompt, criterion, text: len(text) % 3 / 2, "criteria": ["2: short", "1: odd"]},
            "overlong": {"buffer": 6, "penalty": 0.5},
            "variance_filter": {"share": 0.7},
        }
    },
    "process_supervision": {
        "reward": [stepwise, outcome],
        "reward_weights": [1.0, 0.5],
        "method_params": {"process_supervision": {"separator": "1"}},
    },
    "dynamic_sampling+process_supervision": {
        "reward": [stepwise, outcome],
        "method_params": {"process_supervision": {"separator": "1"}},
    },
    "max_rl+clip_cov": {"reward": right, "method_params": {"clip_cov": {"ratio": 0.1, "low": 0.1}}},
}


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Method -> the decisions of two generation batches."""
    found: dict[str, list[Any]] = {}
    decide = module.decide
    for name, options in CASES.items():
        seen = found.setdefault(name, [])

        def watched(*args: Any, seen: list[Any] = seen, **kwargs: Any) -> Any:
            seen.append(decide(*args, **kwargs))
            return seen[-1]

        module.decide = watched
        try:
            options = {"reward": score, **options}
            trainer = make(tmp_path_factory.mktemp("run"), name.split("+"), learning_rate=0.05, **options)
            before = torch.cat([p.detach().flatten().clone() for p in trainer.model.parameters()])
            with stub_sampling():
                trainer.train()
            after = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
            seen.append((before, after, trainer))
        finally:
            module.decide = decide
    return found


@pytest.mark.parametrize("name", CASES)
def test_two_real_steps(steps: dict[str, list[Any]], name: str) -> None:
    *decisions, (before, after, trainer) = steps[name]
    assert len(decisions) == 2 and not torch.equal(before, after)
    for each in name.split("+"):
        logged = {k for h in trainer.state.log_history for k in h if k.split("/")[0].startswith(each[:4])}
        assert logged, f"{each} logs what it does"
    for d in decisions:
        assert 0 < int(d.trained.sum()) <= 64 and bool(torch.isfinite(d.row_advantages).all())


def test_what_they_change(steps: dict[str, list[Any]]) -> None:
    drpo = steps["drpo"][0]
    assert drpo.estimator == "drpo"
    d3s = steps["d3s"][0]
    assert int(d3s.trained.sum()) < 64, "at the start a part of the rows and tokens is trained"
    assert 0 < float(d3s.keep_tokens.float().mean()) < 0.5
    mssr = steps["mssr"][0]
    assert mssr.rollouts.groups.size.tolist() == [1] * 64, "one rollout per prompt, the batch is full"
    assert len(set(mssr.rollouts.prompt_index.tolist())) == 64
    v05 = steps["v0_5"][0]
    sizes = v05.rollouts.groups.size
    assert int(sizes.min()) >= 1 and v05.estimator == "v0_5"
    v0 = steps["v0"][1]
    assert int(v0.rollouts.groups.size.sum()) == 64
    brpo = steps["brpo"][0]
    assert brpo.estimator == "brpo" and set(brpo.rewarded_by) == {"brpo"}
    groups = Groups(brpo.rollouts.group)
    assert int(groups.count) == 8
    filtered = steps["rubric+overlong+gfpo+variance_filter+pkpo"][0]
    r, kept = filtered.rollouts, filtered.rollouts.kept
    assert r.groups.size.tolist() == [16] * 8 and filtered.estimator == "pkpo"
    judged = torch.tensor([len(text) % 3 / 2 for text in r.text]).double()
    assert torch.allclose(r.reward, judged - 0.5 * ((r.length - 8).double() / 6).clamp(0, 1))
    of_kept = r.groups.sum(kept.double())
    assert set(of_kept.tolist()) == {0.0, 8.0}, "half of each group, and not every group"
    shortest = r.groups.top_k(r.reward / r.length, 8)
    assert bool((shortest | ~kept).all()) and not bool((filtered.trained & r.truncated).any())
    assert bool((filtered.row_advantages >= 0).all()) and float(filtered.row_advantages.max()) > 0
    cov = steps["max_rl+clip_cov"][0]
    r, mean = cov.rollouts, cov.rollouts.groups.rows(cov.rollouts.groups.mean(cov.rollouts.reward))
    expected = torch.where(mean > 0, (r.reward - mean) / (mean + 1e-6), 0.0).repeat_interleave(r.length)
    zeroed = cov.advantages != expected
    assert cov.estimator == "max_rl" and int(zeroed.sum()) == int(0.1 * len(expected))
    assert not bool(cov.advantages[zeroed].any())


@pytest.mark.parametrize(
    ("name", "weight"), [("process_supervision", 0.5), ("dynamic_sampling+process_supervision", 1.0)]
)
def test_rewards_per_step(steps: dict[str, list[Any]], name: str, weight: float) -> None:
    """A plain loop over the texts; the second function gives a number, which counts for the last step."""
    d, _, (*_, trainer) = steps[name]
    r, tokenizer = d.rollouts, trainer.processing_class
    lists = []
    for ids, (own, last) in zip(r.token_ids.completion, r.rewards.tolist(), strict=True):
        pieces = tokenizer.decode(ids, skip_special_tokens=True).split("1")
        found = [math.nan if len(p) % 4 == 3 else len(p) % 3 / 2 for p in pieces]
        assert math.isnan(own) or own == pytest.approx(math.fsum(x for x in found if x == x))
        if math.isnan(own) and any(x == x for x in found):
            found = [math.nan]
        found[-1] = (0.0 if math.isnan(found[-1]) else found[-1]) + weight * last
        lists.append(found)
    assert [x.tolist() for x in r.step_rewards] == [pytest.approx(x, nan_ok=True) for x in lists]
    advantages = iter(torch.split(d.advantages, r.length.tolist()))
    kept, several = [i for i in range(len(r)) if bool(r.kept[i])], 0
    for i, ids in enumerate(r.token_ids.completion):
        inside = [x for j in kept if r.group[j] == r.group[i] for x in lists[j] if x == x]
        mean = sum(inside) / max(1, len(inside))
        std = math.sqrt(sum((x - mean) ** 2 for x in inside) / (len(inside) - 1)) if len(inside) > 1 else 0.0
        z = [(x - mean) / (std + 1e-4) if x == x else 0.0 for x in lists[i]]
        ones = [t == "1" for t in tokenizer.convert_ids_to_tokens(ids.tolist())]
        expected = [sum(z[min(sum(ones[:t]), len(z) - 1) :]) for t in range(len(ids))]
        if i in kept:
            assert next(advantages).tolist() == pytest.approx(expected, abs=1e-5)
            several += len(set(expected)) > 1
        else:
            next(advantages)
    assert several > 8, "tokens of a rollout have different advantages"
    assert d.estimator == "process_supervision"
    table = trainer._logs["extra"]["step_rewards/stepwise"]
    assert any(isinstance(own, list) and len(own) > 1 for own in table), "the lists are in the table of completions"


def test_fapo_takes_a_part_of_the_reward_of_flawed_right_rollouts(tmp_path: Any, monkeypatch: Any) -> None:
    """Four steps, with evaluation before each second one."""
    asked: list[tuple[str, str, str]] = []

    def judge(prompt: str, answer: str, completion: str) -> int:
        asked.append((prompt, answer, completion))
        return 2 if len(completion) % 2 else -1

    decisions: list[Any] = []
    decide = module.decide
    monkeypatch.setattr(module, "decide", lambda *a, **k: decisions.append(decide(*a, **k)) or decisions[-1])
    trainer = make(
        tmp_path,
        ["fapo"],
        reward=right,
        method_params={"fapo": {"judge": judge, "penalty": 0.5}},
        more={"eval_dataset": build_dataset(8, seed=3)},
        max_steps=4,
        learning_rate=0.05,
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=8,
        num_generations_eval=1,
    )
    before = torch.cat([p.detach().flatten().clone() for p in trainer.model.parameters()])
    with stub_sampling():
        trainer.train()
    assert not torch.equal(before, torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert len(decisions) == 4 and any("eval_reward" in h for h in trainer.state.log_history)
    logged = [h for h in trainer.state.log_history if "fapo/right" in h]
    wanted = set()
    for d, metrics in zip(decisions, logged, strict=True):
        rule, text = d.rollouts.rewards[:, 0], d.rollouts.text
        odd = torch.tensor([len(t) % 2 == 1 for t in text])
        assert 0 < int((odd & (rule == 1)).sum()) < int((rule == 1).sum()) < 64
        assert torch.equal(rule - d.rollouts.reward, torch.where(odd & (rule == 1), 0.25, 0.0).double())
        prompts = [p[0]["content"] for p in d.rollouts.meta["prompt"]]
        rows = zip(prompts, d.rollouts.meta["answer"], text, rule.tolist(), strict=True)
        wanted |= {(p, a, t) for p, a, t, r in rows if r == 1}
        assert metrics["fapo/right"] == pytest.approx(float(rule.mean()))
        assert metrics["rewards/right/mean"] == pytest.approx(float(rule.mean())), "the metric is the rule's"
        groups = Groups(d.rollouts.group)
        centred = d.rollouts.reward - groups.rows(groups.mean(d.rollouts.reward))
        assert torch.equal(d.row_advantages > 1e-6, centred > 1e-6)
    assert len(asked) == len(set(asked)) and set(asked) == wanted, "each right row of training once, and no other"


def test_the_reward_function_of_fapo_in_trl(tmp_path: Any) -> None:
    """TRL awaits it; no method is named."""
    seen: list[tuple[list[float], list[bool], list[str]]] = []

    async def judge(question: str, answer: str, solution: str) -> str:
        await asyncio.sleep(0)
        return f"\\boxed{{{3 if len(solution) % 2 else -1}}}"

    async def fapo(prompts: Any, completions: Any, completion_ids: Any, answer: Any, **columns: Any) -> list[float]:
        good = [flag == 1 for flag in right(completion_ids)]
        texts = [
            f"{c[-1]['content']} \\boxed{{{a if g else 'x'}}}"
            for c, a, g in zip(completions, answer, good, strict=True)
        ]
        found = await rewards.fapo(prompts, texts, answer, params={"judge": judge}, **columns)
        seen.append((found, good, texts))
        return found

    trainer = make(tmp_path, [], reward=fapo)
    with stub_sampling():
        trainer.train()
    logged = [h for h in trainer.state.log_history if "rewards/fapo/mean" in h]
    assert len(seen) == len(logged) == 2
    for (found, good, texts), metrics in zip(seen, logged, strict=True):
        wanted = [-1.0 if not g else 0.0 if len(t) % 2 else 1.0 for g, t in zip(good, texts, strict=True)]
        assert found == wanted and set(found) == {-1.0, 0.0, 1.0}
        assert metrics["rewards/fapo/mean"] == pytest.approx(sum(wanted) / len(wanted))
        assert metrics["fapo/acc"] == pytest.approx(sum(good) / len(good))
        assert metrics["fapo/flawed"] == pytest.approx(wanted.count(0.0) / len(wanted))
