"""What a run costs, as TRL's logs say it, against counts made inside the engine's own sampling loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import EngineTruth, history, make
from transformers.generation.utils import GenerationMixin

from rl_plugins.lab.demo.tasks import build_dataset
from rl_plugins.runtime.state import load_state, save_state
from rl_plugins.trl.generation.engine import TrlEngine

pytestmark = pytest.mark.host

NAMES = ("tokens_decoded", "tokens_read", "engine_calls", "engine_seconds", "rows_made", "rows_trained_total")


def last(trainer: Any) -> dict[str, float]:
    return {name: history(trainer, f"rl_plugins/{name}")[-1] for name in NAMES}


def train(folder: Any, methods: Any, of_programs: bool = False, **options: Any) -> tuple[dict[str, float], EngineTruth]:
    trainer = make(folder, methods, **options)
    with EngineTruth().watching(of_programs) as truth:
        trainer.train()
    return last(trainer), truth


def test_a_program_that_throws_away_half_shows_it(tmp_path):
    """The case of issue 16: 2n samples, n kept. What TRL logs is equal; the costs are not."""
    options: dict[str, Any] = dict(
        per_device_train_batch_size=16, max_completion_length=16, generation_kwargs={"suppress_tokens": [1]}
    )
    plain = make(tmp_path, ["plain"], **options)
    plain.train()
    wasteful = make(tmp_path, ["wasteful"], **options)
    with EngineTruth().watching() as truth:
        wasteful.train()
    assert history(plain, "num_tokens") == history(wasteful, "num_tokens")
    assert history(plain, "rl_plugins/tokens_decoded") == [256, 512], "16 rows of 16 tokens in each of two steps"
    assert history(wasteful, "rl_plugins/tokens_decoded") == [512, 1024] and truth.decoded == 1024
    assert last(wasteful)["rows_made"] == 64 and last(plain)["rows_made"] == 32
    assert last(wasteful)["tokens_read"] == truth.read == 2 * last(plain)["tokens_read"]
    assert last(wasteful)["rows_trained_total"] == last(plain)["rows_trained_total"] == 32
    assert last(wasteful)["engine_calls"] == truth.calls == 2


@pytest.mark.parametrize("methods", [["noop"], ["given"], ["probing"], ["over"], []], ids=str)
def test_what_trl_generates_itself_is_counted(tmp_path, methods):
    """Planned rows, given ones that nobody generates, rounds, spare rows, and a run without methods that asks."""
    costs, truth = train(tmp_path, methods, count_costs=not methods)
    made = {"given": 124, "over": 192}.get("+".join(methods), 128)
    assert costs["tokens_decoded"] == truth.decoded and costs["tokens_read"] == truth.read
    assert costs["engine_calls"] == truth.calls > 1 and 0 < costs["engine_seconds"] < 60
    assert costs["rows_made"] == made
    assert costs["rows_trained_total"] == 128


def test_without_methods_nothing_is_logged_unless_asked(tmp_path):
    trainer = make(tmp_path, max_steps=1)
    trainer.train()
    assert not [name for entry in trainer.state.log_history for name in entry if name.startswith("rl_plugins")]


def test_what_a_queue_gives_up_is_counted(tmp_path, monkeypatch):
    """Groups wait, so more is decoded than trained, and what waits is read again by the next batch."""
    begun, race = [], TrlEngine.race

    def watched(self: Any, requests: Any, *groups: Any) -> Any:
        begun.append((sum(not len(r.trajectory) for r in requests), sum(len(r.trajectory) > 0 for r in requests)))
        return race(self, requests, *groups)

    monkeypatch.setattr(TrlEngine, "race", watched)
    options: dict[str, Any] = dict(num_generations=2, max_completion_length=120, learning_rate=0.05)
    costs, truth = train(tmp_path, ["over_begin"], of_programs=True, max_steps=3, **options)
    assert costs["tokens_decoded"] == truth.decoded and costs["tokens_read"] == truth.read
    (first, resumed), *later = begun
    assert truth.cache_calls, "a pass of the context cache is no call"
    assert (first, resumed) == (128, 0) and any(again for _, again in later), "some of what waited went on"
    assert costs["rows_made"] == sum(fresh for fresh, _ in begun[: truth.calls])
    assert costs["rows_trained_total"] == 192 and costs["engine_calls"] == truth.calls


def test_scores_turns_and_stops_of_programs(tmp_path):
    options: dict[str, Any] = dict(max_steps=1, per_device_train_batch_size=16, rollout_cache_gb=0.0)
    costs, truth = train(tmp_path, ["talk"], method_params={"talk": {"score": True}}, **options)
    assert costs["tokens_decoded"] == truth.decoded and costs["engine_calls"] == truth.calls
    assert costs["rows_made"] == 16, "a second turn continues its row"
    scored = costs["tokens_read"] - truth.read
    assert scored > 16 * 4, "a score reads prompt and completion"


def test_evaluation_is_not_counted(tmp_path):
    """Neither TRL's own nor that of a program; and the totals go on from a checkpoint, from 0 if it has none."""
    more = {"eval_dataset": build_dataset(8, seed=2)}
    options: dict[str, Any] = dict(
        per_device_train_batch_size=16, per_device_eval_batch_size=8, save_strategy="steps", save_steps=1, more=more
    )
    trainer = make(tmp_path, ["wasteful"], **options)
    trainer.evaluate()
    assert trainer.costs.tokens_decoded == 0 and trainer.meter.costs.tokens_decoded == 0
    trainer.train()
    before = {name: history(trainer, f"rl_plugins/{name}") for name in NAMES}
    saved = load_state(tmp_path / "out" / "checkpoint-1")
    assert saved is not None and saved["costs"] == {name: before[name][0] for name in NAMES}
    again = make(tmp_path, ["wasteful"], **options)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    for name in NAMES:
        values = history(again, f"rl_plugins/{name}")
        assert values[-1] == before[name][-1] or name == "engine_seconds", name
    del saved["costs"]  # of an earlier version
    save_state(tmp_path / "out" / "checkpoint-1", saved)
    old = make(tmp_path, ["wasteful"], **options)
    old.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert last(old)["rows_made"] == 32 == last(again)["rows_made"] - 32


def test_a_counted_run_without_methods_goes_on_from_its_checkpoint(tmp_path, caplog):
    """As itself, and with methods. A checkpoint of a run that did not count has no totals, not even older ones."""
    options: dict[str, Any] = dict(per_device_train_batch_size=16, save_strategy="steps", save_steps=1)
    trainer = make(tmp_path, [], count_costs=True, **options)
    trainer.train()
    before = last(trainer)
    assert before["rows_made"] == 32
    first, second = (str(tmp_path / "out" / f"checkpoint-{n}") for n in (1, 2))
    again = make(tmp_path, [], count_costs=True, **options)
    again.train(resume_from_checkpoint=first)
    assert all(last(again)[name] == before[name] for name in NAMES if name != "engine_seconds")
    methods = make(tmp_path, ["mc_grpo"], **options)
    methods.train(resume_from_checkpoint=first)
    assert last(methods)["rows_made"] == 16 + 18 and last(methods)["rows_trained_total"] == 32  # 2 leave as pivots
    make(tmp_path, [], **options).train(resume_from_checkpoint=first)  # writes checkpoint-2, and counts nothing
    later = make(tmp_path, [], count_costs=True, max_steps=3, **options)
    later.train(resume_from_checkpoint=second)
    assert last(later)["rows_made"] == 16
    assert caplog.messages.count("The checkpoint of step 2 has no costs, so they count from 0.") == 1


@pytest.mark.parametrize("methods", [["noop"], []], ids=["noop", "trl"])
def test_a_rollout_func_is_counted_by_what_it_calls_or_answers(tmp_path, methods):
    def own(prompts: Any, trainer: Any) -> Any:
        n = len(prompts)
        masks = [[1, 0, 1]] * n
        return {"prompt_ids": [[3, 4]] * n, "completion_ids": [[5, 6, 1]] * n, "logprobs": None, "env_mask": masks}

    def of_trl(prompts: Any, trainer: Any) -> Any:
        ids = trainer._tokenize_prompts(prompts)[0]
        made = trainer._generate_single_turn(ids, None, {}, 1)[0]
        return {"prompt_ids": ids, "completion_ids": made, "logprobs": None}

    options: dict[str, Any] = dict(max_steps=1, count_costs=True)
    costs, truth = train(tmp_path, methods, more={"rollout_func": own}, **options)
    assert (costs["tokens_decoded"], costs["tokens_read"], costs["rows_made"]) == (128, 128, 64) and not truth.calls
    costs, truth = train(tmp_path, methods, more={"rollout_func": of_trl}, **options)
    assert costs["tokens_decoded"] == truth.decoded > 64 and costs["tokens_read"] == truth.read
    assert costs["engine_calls"] == truth.calls == 1


def test_every_turn_of_trls_tools_is_counted(tmp_path, monkeypatch):
    """The engine reads the whole context for every turn; the rows stay the same."""
    from test_trl_turns import CALLS, TEMPLATE

    from rl_plugins.lab.demo.policy import build_model, build_tokenizer

    build_model(0).save_pretrained(tmp_path / "policy")
    tokenizer = build_tokenizer()
    tokenizer.chat_template, tokenizer.response_schema = TEMPLATE, CALLS
    tokenizer.save_pretrained(tmp_path / "policy")
    read, decoded = [], []

    def generate(self: Any, input_ids: Any, attention_mask: Any, **kwargs: Any) -> Any:
        first = not read
        texts = ["[7]" if first and k % 2 == 0 else "1" for k in range(len(input_ids))]
        ids = [[*tokenizer.encode(t, add_special_tokens=False), 1] for t in texts]
        read.append(int(attention_mask.sum()))
        decoded.append(sum(map(len, ids)))
        new = torch.tensor([i + [tokenizer.pad_token_id] * (8 - len(i)) for i in ids])
        return torch.cat([input_ids, new], 1)

    monkeypatch.setattr(GenerationMixin, "generate", generate)

    def act(action: str) -> str:
        """Acts.

        Args:
            action: a digit.
        """
        return f"saw {action}"

    trainer = make(tmp_path, ["noop"], max_steps=1, max_completion_length=60, more={"tools": [act]})
    trainer.train()
    costs = last(trainer)
    assert costs["engine_calls"] == len(read) == 2 and costs["rows_made"] == 64
    assert costs["tokens_read"] == sum(read) and costs["tokens_decoded"] == sum(decoded)
