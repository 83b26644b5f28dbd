"""Turns of agents in real TRL: of rollout programs and of TRL's own environments, and what methods per turn make of
them."""

from __future__ import annotations

import asyncio
import functools
import math
import random
import time
import zlib
from typing import Any

import pytest
import torch
import trl
from harness import history, make, score, weights

from rl_plugins.kit.agents import Observation
from rl_plugins.lab.demo.policy import build_model, build_tokenizer
from rl_plugins.lab.demo.tasks import build_dataset
from rl_plugins.methods.epo import NO_BOUND, Epo
from rl_plugins.methods.gigpo import Gigpo
from rl_plugins.tools.messages import Contract, Lineage, LineageGuard, check_arithmetic, read_logs
from rl_plugins.trl.generation import batches as module
from rl_plugins.trl.generation.environments import as_tools

pytestmark = pytest.mark.host


class Walk:
    """A line of five places; the agent starts in the middle and wins at the right end. Both ends end it."""

    def reset(self, columns: Any) -> Observation:
        self.place = 2
        return Observation("2", state="2")

    def act(self, action: str) -> Observation:
        """Take a step.

        Args:
            action: `7`, and every second character, goes right, the others left.
        """
        self.place += 1 if sum(map(ord, action[:1])) % 2 else -1
        done = self.place in (0, 4)
        reward = float(self.place == 4) if done else math.nan
        return Observation(str(self.place), reward, done, action[:1] in "3456789", str(self.place))

    def score(self) -> float:
        return float(self.place == 4)

    def close(self) -> None:
        pass


def won(score: Any = None, **kwargs: Any) -> list[float]:
    return [0.0 if s is None else s for s in score]


def decisions_of(trainer: Any) -> list[Any]:
    """Trains, and returns what was decided."""
    seen: list[Any] = []
    decide = module.decide

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append((decide(*args, **kwargs), args[2]))
        return seen[-1][0]

    module.decide = watched
    try:
        trainer.train()
    finally:
        module.decide = decide
    return seen


@pytest.mark.parametrize("method", ["gigpo", "hgpo"])
def test_a_program_in_an_environment(tmp_path, method):
    trainer = make(
        tmp_path,
        ["turn_control", method],
        reward=won,
        max_steps=2,
        max_completion_length=60,
        learning_rate=0.05,
        method_params={"turn_control": {"environment": Walk, "strategy": "unlimited", "turn_tokens": 3}},
    )
    before = weights(trainer).clone()
    for decision, tokens in decisions_of(trainer):
        rollouts = decision.rollouts
        steps = rollouts.turns
        assert {"0", "4"}.isdisjoint(steps.anchor), "no turn begins where the episode has ended"
        assert set(steps.anchor) == {"1", "2", "3"}
        last = torch.zeros(len(rollouts), dtype=torch.int64).scatter_reduce(0, steps.row, steps.turn, "amax")
        ended = ~torch.isnan(steps.reward)
        assert bool((steps.turn[ended] == last[steps.row[ended]]).all())
        assert torch.equal(rollouts.reward[steps.row[ended]], steps.reward[ended])
        assert set(tokens.turn.tolist()) == set(range(len(steps.row))), "every turn has tokens"
        assert torch.equal(steps.row[tokens.turn], tokens.row)
        of_turn = decision.advantages[torch.arange(len(tokens))]
        for step in range(0, len(steps.row), 7):  # one advantage per turn
            mine = of_turn[tokens.turn == step]
            assert float(mine.max() - mine.min()) == 0
        assert len({round(a, 6) for a in of_turn.tolist()}) > 4, "turns of a rollout differ"
    assert (weights(trainer) - before).abs().max() > 1e-4
    assert math.isfinite(history(trainer, "grad_norm")[-1])


TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<asst>{{ m['content'] }}"
    "{% for c in m.get('tool_calls') or [] %}[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}"
    "<eos>"
    "{% else %}<user>{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<asst>{% endif %}"
)
CALLS = {  # a call is a digit in brackets: [7]
    "type": "object",
    "x-regex": r"^(?P<content>[^\[]*)(?P<tool_calls>\[.+\])?(?:<eos>)?$",
    "properties": {
        "role": {"const": "assistant"},
        "content": {"type": "string"},
        "tool_calls": {
            "type": "array",
            "x-regex-iterator": r"\[(.+?)\]",
            "items": {
                "type": "object",
                "properties": {
                    "type": {"const": "function"},
                    "function": {
                        "type": "object",
                        "properties": {
                            "name": {"const": "act"},
                            "arguments": {
                                "type": "object",
                                "x-regex": r"(?P<action>.+)",
                                "properties": {"action": {"type": "string"}},
                            },
                        },
                    },
                },
            },
        },
    },
}


@pytest.fixture
def with_tools(tmp_path):
    """The demo policy with a tokenizer that knows tool calls, and a sampler that makes some."""
    folder = tmp_path / "policy"
    build_model(0).save_pretrained(folder)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_schema = CALLS
    tokenizer.save_pretrained(folder)
    original = trl.GRPOTrainer._generate_single_turn

    @functools.wraps(original)
    def fake(self: Any, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        out = []
        for k, ids in enumerate(prompt_ids):
            rng = random.Random(zlib.crc32(repr((k, ids)).encode()))
            text = "1" if rng.random() < 0.15 else f"[{rng.choice('78')}]"
            out.append([*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id])
        return out, None

    trl.GRPOTrainer._generate_single_turn = fake
    yield tmp_path
    trl.GRPOTrainer._generate_single_turn = original


def test_trls_own_environments_fill_the_turns(with_tools):
    trainer = make(
        with_tools,
        ["gigpo"],
        reward=[],
        max_steps=1,
        max_completion_length=80,
        more={"environment_factory": as_tools(Walk)},
    )
    ((decision, tokens),) = decisions_of(trainer)
    rollouts, steps = decision.rollouts, decision.rollouts.turns
    assert set(steps.anchor) <= {"0", "1", "2", "3", "4", None}
    first = steps.turn == 0
    assert {a for a, f in zip(steps.anchor, first.tolist(), strict=True) if f} <= {"2", None}
    won_rows = rollouts.reward == 1
    assert 0 < int(won_rows.sum()) < 64
    rewarded = steps.reward == 1
    assert set(steps.row[rewarded].tolist()) == set(won_rows.nonzero()[:, 0].tolist())
    again = Gigpo().advantages(rollouts)
    assert torch.allclose(again[tokens.turn], decision.advantages)
    assert again.unique().numel() > 3


def test_tools_without_records_give_what_was_read(with_tools):
    def act(action: str) -> str:
        """Acts.

        Args:
            action: a digit.
        """
        return f"saw {action}"

    trainer = make(with_tools, ["gigpo"], reward=score, max_steps=1, max_completion_length=60, more={"tools": [act]})
    ((decision, _),) = decisions_of(trainer)
    steps = decision.rollouts.turns
    later = {a for a, t in zip(steps.anchor, steps.turn.tolist(), strict=True) if t}
    assert later and all("saw" in a for a in later)
    assert {a for a, t in zip(steps.anchor, steps.turn.tolist(), strict=True) if not t} == {""}


def test_recorded_trajectories_and_teams_take_real_steps(tmp_path, monkeypatch):
    """UI-S1 and M-GRPO with their own rollouts: rows of a rollout, advantages per step and per role. The guard of
    M-GRPO's messages has a verifier that raises, hangs and answers nonsense, and twice it fails as a whole."""
    rows = [{"prompt": r["prompt"], "expert": [["7", "7"], ["8", "8"]]} for r in build_dataset(40)]
    from datasets import Dataset

    trainer = make(
        tmp_path,
        ["ui_s1_rollout", "ui_s1"],
        dataset=Dataset.from_list(rows),
        max_steps=1,
        learning_rate=0.05,
        method_params={
            "ui_s1_rollout": {"match": first_digit, "step_tokens": 2, "max_steps": 2},
            "ui_s1": {"filter_by": "none", "rows_per_rollout": 2},
        },
    )
    before = weights(trainer).clone()
    ((decision, _),) = decisions_of(trainer)
    rollouts = decision.rollouts
    assert len(rollouts.groups.ids) == 4 and set(rollouts.index.tolist()) == {0, 1}
    assert torch.equal(rollouts.turns.turn, rollouts.index[rollouts.turns.row])
    assert (weights(trainer) - before).abs().max() > 1e-4

    bad = iter([lambda: 1 / 0, lambda: time.sleep(2), lambda: "perhaps"])
    broken = iter([lambda: 1 / 0, lambda: asyncio.sleep(60)])
    check = LineageGuard.check

    async def sometimes(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.log == [] and (fault := next(broken, None)):
            await fault()
        return await check(self, *args, **kwargs)

    monkeypatch.setattr(LineageGuard, "check", sometimes)

    def verifier(fields: Any) -> Any:
        return next(bad, lambda: check_arithmetic(fields["claim"]))()

    trainer = make(
        tmp_path,
        ["m_grpo_rollout", "m_grpo"],
        max_completion_length=120,
        max_steps=1,
        learning_rate=0.05,
        method_params={
            "m_grpo_rollout": {
                "parse": often,
                "max_calls": 2,
                "guard": "strict",
                "guard_verifier": verifier,
                "guard_log": str(tmp_path / "guard"),
                "timeout": 3,
                "sub_tokens": 14,
                "contract": short_result,
                "invalid_penalty": 0.5,
            },
            "m_grpo": {"sub_per_rollout": 2, "sub_reward": "own"},
        },
    )
    before = weights(trainer).clone()
    ((decision, _),) = decisions_of(trainer)
    rollouts = decision.rollouts
    assert set(rollouts.meta["agent"]) == {"main", "sub"}
    invalid = torch.tensor([float(v) for v in rollouts.meta["invalid"]], dtype=rollouts.reward.dtype)
    assert 0 < invalid.mean() < 1
    assert invalid[[agent == "sub" for agent in rollouts.meta["agent"]]].unique().tolist() == [0.0, 1.0]
    names = ("unverified", "guard_failed", "verified", "calls_failed", "invalid", "log_failed")
    names = (*names, "message_density", "agent_turns", "agent_tokens")
    logged = {name: history(trainer, f"m_grpo_rollout/{name}")[0] for name in names}
    assert logged["unverified"] > 0 and 0 < logged["invalid"] < 1 and logged["log_failed"] == 0
    assert 0 < logged["message_density"] <= 2 and logged["agent_turns"] > 1
    entries = list(read_logs(tmp_path / "guard"))
    n = len(entries)
    assert 0 < n * logged["agent_tokens"] <= float(rollouts.length.sum())
    assert n * logged["guard_failed"] == pytest.approx(2) and n * logged["calls_failed"] == pytest.approx(3)
    assert n * logged["verified"] >= 4, "a verifier that failed three times is asked in the other rollouts"
    claims = [c for e in entries for c in Lineage.from_log(e["records"]).claims]
    assert {c.author for c in claims} == {"sub 1", "sub 2"} and {c.status for c in claims} == {"unverified"}
    assert int(decision.stays.sum()) <= 64
    assert (weights(trainer) - before).abs().max() > 1e-5


def first_digit(response: str, expert: str, columns: Any) -> tuple[bool, float]:
    right = bool(response) and response[0] in "0123456789"
    return right, float(right)


def short_result() -> Contract:
    return Contract("result", {"type": "string"}, size=12)


def often(text: str) -> list[str]:
    return [text[:3], text[:2]] if text else []


def test_epo_keeps_the_entropy_of_each_turn_in_its_corridor(tmp_path, monkeypatch):
    """Two batches: the first is the history of the second. The gradient goes through TRL's own entropies."""
    found: list[Any] = []
    regularize = Epo.regularize

    def watched(self: Any, terms: Any) -> Any:
        gradients: list[Any] = []
        terms.entropies.register_hook(gradients.append)
        found.append((terms, gradients))
        return regularize(self, terms)

    monkeypatch.setattr(Epo, "regularize", watched)
    trainer = make(
        tmp_path,
        ["turn_control", "epo"],
        reward=won,
        max_completion_length=60,
        method_params={
            "turn_control": {"environment": Walk, "strategy": "unlimited", "turn_tokens": 3},
            "epo": {
                "entropy_coeff": 0.2,
                "corridor": "turn",
                "kl": 0.999,
                "kr": 1.001,
                "rho": 2.0,
                "phase": "none",
            },
        },
    )
    (first, tokens), (second, later) = decisions_of(trainer)
    number = first.rollouts.turns.turn[tokens.turn]
    mean = {s: tokens.entropies[number == s].double().mean() for s in set(number.tolist())}
    assert len(mean) > 3
    of_later = second.rollouts.turns.turn[later.turn].tolist()
    wanted = torch.tensor([0.999 * mean[s] if s in mean else -NO_BOUND for s in of_later])
    torch.testing.assert_close(second.token_columns["epo_low"].double(), wanted.double(), rtol=1e-6, atol=0)
    again = torch.tensor(of_later)
    total = [float(m) + float(later.entropies[again == s].double().mean()) for s, m in mean.items() if s in of_later]
    state = trainer.methods.methods[1].state
    assert state["sum"][[s for s in mean if s in of_later]].tolist() == pytest.approx(total, rel=1e-6)
    assert state["count"].tolist() == [(s in mean) + (s in of_later) for s in range(len(state["count"]))]

    assert len(found) == 2 and history(trainer, "epo/covered")[0] == 0
    for terms, gradients in found:  # the last is that of the loss
        live, h = terms.mask > 0, terms.entropies.detach()
        slope = (h > terms.columns["epo_high"]).double() - (h < terms.columns["epo_low"]).double()
        share = terms.columns["epo_weight"] / terms.num_rows
        assert float(share[live].sum()) == pytest.approx(1, rel=1e-5), "the mean over turns and rollouts"
        assert len(share[live].unique()) > 2, "tokens of long turns count less"
        wanted_gradient = torch.where(live, 0.2 * (2 * slope - 1) * share, 0.0)
        torch.testing.assert_close(gradients[-1].double(), wanted_gradient, rtol=1e-5, atol=1e-9)
    assert bool(slope[live].any()) and 0 < history(trainer, "epo/within")[1] < 1
