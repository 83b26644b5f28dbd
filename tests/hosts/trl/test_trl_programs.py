"""Rollout programs in real TRL: what the engine gives is exact, what reaches the update is what the program made."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace

import pytest
import torch
from harness import history, make, policy, score, weights
from messages import raises
from program_probes import SEEN

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.requests import Generate, Prompt
from rl_plugins.testing.engine import make_prompt
from rl_plugins.trl.generation.context_cache import ContextCache


def run(folder, method, **changes):
    SEEN.clear()
    trainer = make(folder, [method], **changes)
    trainer.train()
    return trainer


def test_a_plain_program_trains_like_trl_itself(tmp_path):
    """Same weights, same random numbers: the program asks for what TRL would have generated, in the same order."""
    stock = make(tmp_path, stock=True)
    stock.train()
    ours = run(tmp_path, "plain")
    assert torch.allclose(weights(stock), weights(ours), atol=2e-7)
    assert history(stock, "reward") == pytest.approx(history(ours, "reward"))
    assert len(SEEN["prompts"]) == 16 and all(p.n == 8 for p in SEEN["prompts"])


def _logits(trainer_folder, tokens):
    from rl_plugins.lab.demo.policy import build_model

    policy(trainer_folder / "policy")
    with torch.no_grad():
        return torch.log_softmax(build_model(0)(torch.tensor([tokens])).logits[0].double(), -1)


def test_the_engine_reports_what_the_policy_thinks(tmp_path):
    trainer = make(tmp_path, ["asks"], max_steps=1, per_device_train_batch_size=8, temperature=0.7)
    trainer.train()
    prompt: Prompt = SEEN["prompt"]
    for g in SEEN["top"]:
        truth = _logits(tmp_path, [*prompt.tokens, *g.tokens])[len(prompt.tokens) - 1 :]
        scaled = torch.log_softmax(truth / 0.7, -1)
        for k, token in enumerate(g.tokens):
            assert g.logprobs[k] == pytest.approx(float(scaled[k, token]), abs=1e-5)
            best = truth[k].topk(3)
            assert [t for t, _ in g.top[k]] == best.indices.tolist()
            assert [p for _, p in g.top[k]] == pytest.approx(best.values.tolist(), abs=1e-5)
        assert len(g.tokens) == 5 or g.finish == "eos"
    first, second = SEEN["argmax"]
    assert first.tokens == second.tokens and not first.sampled and len(first.tokens) <= 7
    truth = _logits(tmp_path, [*prompt.tokens, *first.tokens])[len(prompt.tokens) - 1 : -1]
    assert truth.argmax(-1).tolist() == list(first.tokens)
    (stopped,) = SEEN["stop"]
    text = prompt.chat.decode(stopped.tokens)
    assert stopped.finish in ("eos", "stop", "length")
    if stopped.finish == "stop":
        assert text[-1] in "123=" and not set(text[:-1]) & set("123=")
    assert (SEEN["none"][0].tokens, SEEN["none"][0].finish) == ((), "length")
    assert SEEN["scored"].reward == pytest.approx(score([list(SEEN["top"][0].tokens)])[0])


def _largest(probabilities, enough):
    """Places of the largest ones until `enough` of them are taken."""
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    taken = []
    for i in order:
        if enough(taken, probabilities[i]):
            break
        taken.append(i)
    return taken


@pytest.mark.parametrize(
    ("options", "enough"),
    [
        ({"top_p": 0.6, "temperature": 0.7}, lambda taken, p: sum(taken) >= 0.6),
        ({"top_k": 3}, lambda taken, p: len(taken) == 3),
        ({"min_p": 0.5, "temperature": 1.3}, lambda taken, p: bool(taken) and p < 0.5 * taken[0]),
        ({"generation_kwargs": {"epsilon_cutoff": 0.02}}, lambda taken, p: bool(taken) and p < 0.02),
        ({"top_k": 6, "top_p": 0.5}, None),
    ],
    ids=["top_p", "top_k", "min_p", "epsilon_cutoff", "top_k and top_p"],
)
def test_log_probs_are_of_the_distribution_that_was_sampled(tmp_path, options, enough):
    """What top_p and its like cut off has no probability, and the rest has more of it."""
    trainer = make(tmp_path, ["plain"], max_steps=1, **options)
    engine = trainer.program_engine(lambda prompt: {})
    prompt = make_prompt(engine.chat, "a:531", n=1, max_tokens=8)
    with torch.no_grad():
        (made,) = engine.generate([(prompt, Generate(prompt.start(), n=24, max_tokens=8, top=2))])
    temperature, largest = options.get("temperature", 1.0), 0.0
    for g in made:
        truth = _logits(tmp_path, [*prompt.tokens, *g.tokens])[len(prompt.tokens) - 1 :]
        for k, token in enumerate(g.tokens):
            whole = torch.softmax(truth[k] / temperature, -1).tolist()
            if enough is None:  # of the six largest, normalized anew, those up to a half
                six = _largest(whole, lambda taken, p: len(taken) == 6)
                total = sum(whole[i] for i in six)
                cut = [p / total if i in six else 0.0 for i, p in enumerate(whole)]
                left = _largest(cut, lambda taken, p, cut=cut: sum(cut[i] for i in taken) >= 0.5)
            else:
                left = _largest(whole, lambda taken, p, whole=whole: enough([whole[i] for i in taken], p))
            assert token in left
            assert g.logprobs[k] == pytest.approx(math.log(whole[token] / sum(whole[i] for i in left)), abs=1e-4)
            largest = max(largest, g.logprobs[k] - math.log(whole[token]))
            assert [p for _, p in g.top[k]] == pytest.approx(truth[k].topk(2).values.tolist(), abs=1e-5)
    assert largest > 0.1


def test_stop_texts_end_rows_one_by_one(tmp_path):
    trainer = make(tmp_path, ["plain"], max_steps=1)
    engine = trainer.program_engine(lambda prompt: {})
    prompt = make_prompt(engine.chat, "a:531", n=1, max_tokens=40)
    with torch.no_grad():
        (made,) = engine.generate([(prompt, Generate(prompt.start(), n=64, max_tokens=40, stop=("7", "=")))])
    finishes = [g.finish for g in made]
    assert finishes.count("stop") > 16
    for g in made:
        text = engine.chat.decode(g.tokens)
        inside = text[:-1] if g.finish == "stop" else text
        assert "7" not in inside and "=" not in inside and len(g.logprobs) == len(g.tokens)


@pytest.mark.parametrize("scored", [False, True])
def test_books_of_two_turns_are_exact(tmp_path, scored):
    calls = []

    def counted(completion_ids=None, mood=None, **kwargs):
        calls.append((len(completion_ids), mood))
        return score(completion_ids)

    trainer = run(tmp_path, "talk", reward=counted, method_params={"talk": {"score": scored}}, max_steps=1)
    rollouts, tokens = SEEN["rollouts"], SEEN["tokens"]
    assert len(rollouts) == 64 and sum(n for n, _ in calls) == 64, "every row is scored once"
    if not scored:
        assert calls[0][1][:3] == ["m0", "m1", "m2"]
    assert rollouts.meta["mood"] == [f"m{k}" for k in range(8)] * 8
    steps = rollouts.turns
    assert steps.turn.tolist() == [0, 1] * 64 and steps.row.tolist() == [r for r in range(64) for _ in (0, 1)]
    assert steps.anchor[:4] == ["start", "told 0", "start", "told 1"]
    assert steps.valid.tolist()[:4] == [True, True, True, False]
    assert steps.reward[0] == 0.5 and math.isnan(steps.reward[1])
    first = tokens.row == 0
    assert tokens.forced[first].tolist()[:2] == [True, True] and int(tokens.forced.sum()) == 2 * 8
    for row in (0, 9):  # two observed tokens lie between the turns and carry no gradient
        at = tokens.position[tokens.row == row]
        step = tokens.turn[tokens.row == row]
        gap = at.diff()
        assert gap.max() == 3 and int((gap == 3).sum()) == 1
        assert step[: int(gap.argmax()) + 1].unique().tolist() == [2 * row]
        assert step[int(gap.argmax()) + 1 :].unique().tolist() == [2 * row + 1]
    assert history(trainer, "talk/talked") == [64.0]


def test_contexts_are_read_once(tmp_path):
    """Tokens, log-probs and weights are those without the cache, in batches of different weights; a fourth is read."""
    of = {}
    for gb in (0.0, 4.0, 1e-4):
        trainer = run(tmp_path, "walk", rollout_cache_gb=gb, max_completion_length=120, learning_rate=0.5, max_steps=3)
        of[gb] = SEEN["walks"], weights(trainer), history(trainer, "rl_plugins/contexts_read")
    tokens, logprobs = ({gb: [getattr(t, k) for t in v[0]] for gb, v in of.items()} for k in ("tokens", "logprobs"))
    assert tokens[0.0] == tokens[4.0] == tokens[1e-4] and len(tokens[0.0]) == 3 * 64
    for a, b in zip(logprobs[0.0], logprobs[4.0], strict=True):
        assert torch.allclose(torch.tensor(a), torch.tensor(b), atol=2e-5, equal_nan=True)
    assert torch.allclose(of[0.0][1], of[4.0][1], atol=1e-5)
    assert of[0.0][2] == [1.0] * 3 and len(of[4.0][2]) == 3 and max(of[4.0][2]) < 0.3
    assert min(of[1e-4][2]) > 0.3  # 100 kB hold two contexts in a hundred


def test_what_the_engine_keeps(tmp_path):
    """Nothing beyond the round after its last use; and no pass of its own where all ranks must make the same ones."""
    trainer = make(tmp_path, ["walk"], max_steps=1)
    engine = trainer.program_engine(lambda prompt: {})
    assert engine.contexts.more_passes and engine.contexts.limit == 4 * 10**9
    prompt = make_prompt(engine.chat, "a:531", n=1, max_tokens=40)
    with torch.no_grad():
        for text in ("a:1", "b:2", "c:3"):
            request = Generate(make_prompt(engine.chat, text, n=1, max_tokens=40).start(), max_tokens=2)
            engine.generate([(prompt, request), (prompt, replace(request, temperature=0))])
    assert 2 <= len(engine.contexts._kept) <= 4  # the last round's two, and what they began with
    for way in ("is_fsdp_enabled", "is_deepspeed_enabled"):
        setattr(trainer, way, True)
        assert not trainer.program_engine(lambda prompt: {}).contexts.more_passes
        setattr(trainer, way, False)


def test_keys_and_values_are_given_back_before_the_update(tmp_path, monkeypatch):
    alive, during = weakref.WeakSet(), []
    made = ContextCache.__init__
    monkeypatch.setattr(ContextCache, "__init__", lambda self, *a, **k: [alive.add(self), made(self, *a, **k)][1])
    trainer = make(tmp_path, ["walk"], max_completion_length=120, max_steps=2)
    loss = trainer.compute_loss

    def counted_loss(*args, **kwargs):
        during.append(len(alive))
        return loss(*args, **kwargs)

    trainer.compute_loss = counted_loss
    gc.disable()
    try:
        trainer.train()
    finally:
        gc.enable()
    assert during == [0, 0]


def test_several_rows_of_a_rollout(tmp_path):
    trainer = run(tmp_path, "rows")
    assert len(SEEN["batches"]) == 2
    for rollouts in SEEN["batches"]:  # 64 rows hold 4 prompts of 8 rollouts of 2 rows
        assert len(rollouts) == 64 and len(rollouts.groups.ids) == 4
        assert rollouts.index.tolist() == [0, 1] * 32
        assert rollouts.rollout.tolist() == [k for _ in range(4) for k in range(8) for _ in (0, 1)]
        assert rollouts.meta["agent"] == ["main", "sub"] * 32
        assert bool((rollouts.length[1::2] <= 3).all())
    prompts = [p for r in SEEN["batches"] for p in r.prompt_index[::16].tolist()]
    assert len(set(prompts)) == 8
    assert math.isfinite(history(trainer, "grad_norm")[0])


def test_a_batch_too_small_for_the_rows_of_a_group_is_refused(tmp_path):
    with raises(ConfigError, match="8.*16.*8"):
        run(tmp_path, "rows", per_device_train_batch_size=8)


def test_labels_open_groups(tmp_path):
    run(tmp_path, "labels", max_steps=1)
    rollouts = SEEN["rollouts"]
    assert rollouts.group.tolist() == [g for p in range(8) for g in [p, 8 + p] * 4]
    assert rollouts.rollout.tolist() == [k for _ in range(8) for k in (0, 0, 1, 1, 2, 2, 3, 3)]


def test_rows_without_tokens(tmp_path):
    trainer = run(tmp_path, "zero", max_steps=1)
    assert len(SEEN["rollouts"]) == 8 * 7
    assert SEEN["rollouts"].length.view(8, 7)[:, :2].sum() == 0
    mean = float(SEEN["rollouts"].length.double().mean())
    assert history(trainer, "completions/mean_length") == pytest.approx([mean]), (
        "what was read and fillers do not count"
    )
    assert math.isfinite(history(trainer, "loss")[0])
    assert float(weights(trainer).isfinite().all()) == 1


def test_without_an_optimizer_step_nothing_moves(tmp_path):
    trainer = make(tmp_path, ["idle"], optim="adamw_torch", weight_decay=0.1, max_steps=3)
    before = weights(trainer).clone()
    trainer.train()
    assert torch.equal(before, weights(trainer))
    assert not trainer.optimizer.optimizer.state, "the optimizer never saw a gradient"
    assert history(trainer, "idle/seen") == [64.0] * 3 and trainer.state.global_step == 3


def test_an_error_in_a_program_names_the_method(tmp_path):
    with raises(MethodError, match=r"(?s)`raises`.*`rollout`.*ValueError.*`raises`"):
        run(tmp_path, "raises")


def test_evaluation_with_hooks(tmp_path):
    from rl_plugins.lab.demo.tasks import build_dataset

    firsts = []

    def watched(completion_ids=None, prompts=None, **kwargs):
        firsts.extend((p[0]["content"], c[0]) for p, c in zip(prompts, completion_ids, strict=True))
        return score(completion_ids)

    trainer = make(
        tmp_path,
        ["evaluated"],
        reward=watched,
        max_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=6,
        num_generations_eval=2,
        more={"eval_dataset": build_dataset(6, split="held_out")},
    )
    trainer.train()
    evaluated = [x for x in SEEN["training"] if not x[0]]
    assert len(evaluated) == 6 and {(c, n) for _, c, n in evaluated} == {("u:9", 2)}
    assert firsts[-12:] == [("u:9", 7)] * 12
    assert "eval_reward" in trainer.state.log_history[-1] or history(trainer, "eval_reward")


def test_what_cannot_be_served_is_refused(tmp_path):
    def tool(x: int) -> int:
        """A tool.

        Args:
            x: a number.
        """
        return x

    with raises(ConfigError, match="rollout_func"):
        make(tmp_path, ["plain"], more={"rollout_func": lambda prompts, trainer: {}})
    with raises(ConfigError, match="tools"):
        make(tmp_path, ["plain"], more={"tools": [tool]})
    with raises(ConfigError, match="tools.*environment"):
        make(tmp_path, ["gigpo"])
    with raises(ConfigError, match="`probing`.*`plain`"):
        make(tmp_path, ["plain", "probing"])
