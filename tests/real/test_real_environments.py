"""Environments of Gymnasium, TextWorld, verifiers and TRL on the embedded policy, with gigpo and without: each in a run
of TRL, all of them in one of verl."""

from __future__ import annotations

import functools
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "hosts" / "verl")]

import pyarrow
import pyarrow.parquet
from library_environments import KINDS, Cliff, Guess, House, Numbers
from runs import walked

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.requests import Call
from rl_plugins.environments import TextWorld, Verifiers
from rl_plugins.kit.agents import Observation
from rl_plugins.kit.agents.environment import check_environment
from rl_plugins.kit.threads import run_calls
from rl_plugins.lab.demo.policy import build_model, build_tokenizer

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def games(tmp_path_factory):
    return functools.partial(House.rows, folder=tmp_path_factory.mktemp("games"), nb_rooms=1, quest_length=1)


def counted(kind: type) -> type:
    """The class, with lists of its objects, those that were closed, and their scores."""

    class Counted(kind):
        made, closed, scores = [], set(), []

        def __init__(self):
            super().__init__()
            self.made.append(self)

        def score(self):
            self.scores.append(super().score())
            return self.scores[-1]

        def close(self):
            super().close()
            self.closed.add(id(self))

    Counted.__name__ = Counted.__qualname__ = kind.__name__
    return Counted


def run(folder: Any, kind: type, rows: list[dict[str, Any]], methods: list[str], reward: Any = None) -> Any:
    from rl_plugins.trl import GRPOConfig, GRPOTrainer

    def scored(completions, score, **columns):
        return [None if math.isnan(s) else s for s in score]

    model = build_model(0)
    config = GRPOConfig(
        output_dir=str(folder),
        methods=methods,
        method_params={"turn_control": {"environment": kind, "strategy": "unlimited", "hard_cap": 4, "turn_tokens": 3}},
        per_device_train_batch_size=16,
        num_generations=8,
        max_steps=2,
        max_completion_length=170,
        learning_rate=1e-2,
        use_cpu=True,
        bf16=False,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    )
    torch.manual_seed(0)
    trainer = GRPOTrainer(
        model=model,
        processing_class=build_tokenizer(),
        reward_funcs=[reward or scored],
        args=config,
        train_dataset=Dataset.from_list(rows),
    )
    trainer.train()
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    return trainer.state.log_history[:2], weights


@pytest.mark.parametrize("kind", [Cliff, House, Numbers, Guess], ids=lambda kind: kind.__name__)
def test_gigpo_acts_in_the_environment(kind, tmp_path, games):
    rows = games(2) if kind is House else kind.rows(8)
    with_gigpo, plain = counted(kind), counted(kind)
    logs, weights = run(tmp_path, with_gigpo, rows, ["turn_control", "gigpo"])
    _, without = run(tmp_path, plain, rows, ["turn_control"])
    assert (weights - without).abs().max() > 1e-5
    for step, log in enumerate(logs):
        assert log["turn_control/failed"] == 0
        assert log["turn_control/turns"] > 1
        assert 0 < log["gigpo/compared"] <= 1 and log["gigpo/states"] >= 1
        scores = with_gigpo.scores[16 * step :][:16]
        assert log["reward"] == pytest.approx(sum(scores) / 16, abs=1e-6)
    assert max(log["gigpo/abs_step"] for log in logs) > 0
    assert len(set(with_gigpo.scores)) > 1
    assert with_gigpo.closed == {id(made) for made in with_gigpo.made}
    assert len(with_gigpo.made) == 32 + (kind in (Cliff, Guess))  # `check` makes one of these


@pytest.mark.parametrize("kind", [Cliff, House, Numbers, Guess], ids=lambda kind: kind.__name__)
def test_environments_are_closed_where_the_run_fails(kind, tmp_path, games):
    def broken(completions, **columns):
        raise RuntimeError("the reward function fails")

    counting = counted(kind)
    with pytest.raises(RuntimeError, match="the reward function fails"):
        run(tmp_path, counting, games(2) if kind is House else kind.rows(8), ["turn_control"], broken)
    assert counting.made
    assert counting.closed == {id(made) for made in counting.made}


def test_gigpo_acts_in_all_of_them_in_verl(tmp_path, games):
    """Two prompts of each, eight episodes of each prompt. Both steps begin with the same weights, prompts and noise."""
    rows = []
    for name, kind in KINDS.items():
        for row in games(2) if kind is House else kind.rows(2):
            columns = {key: value for key, value in row.items() if key != "prompt"}
            made = {
                "data_source": name,
                "prompt": row["prompt"],
                "ability": name,
                "extra_info": {"kind": name, **columns},
            }
            rows.append({**made, "extra_info": {"kind": name, **columns}, "reward_model": {"ground_truth": ""}})
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    for part in (build_model(0), build_tokenizer()):  # not trained: it answers one question in many ways
        part.save_pretrained(tmp_path / "policy")
    options = [
        f"actor_rollout_ref.model.path={tmp_path / 'policy'}",
        *(f"data.{name}_files={file}" for name in ("train", "val")),
        "data.shuffle=False",
        "data.max_prompt_length=30",
        "data.max_response_length=170",
        "reward.custom_reward_function.path=pkg://verl_programs",
        "reward.custom_reward_function.name=reward",
        "+rl_plugins.methods=[idle]",
        "+carousel_params.turn_control.environment='library_environments:OneOfThem'",
        "+carousel_params.turn_control.strategy=unlimited",
        "+carousel_params.turn_control.hard_cap=4",
        "+carousel_params.turn_control.turn_tokens=3",
    ]
    stacks = ["turn_control+watch", "turn_control+gigpo+watch"]
    run = walked(tmp_path, stacks, lambda folder: options, "noop", paths=[HERE], RL_PLUGINS_TEST_SAME="1")
    scores = [json.loads(line) for line in (run.folder / "scores.jsonl").read_text().splitlines()]
    for step in (1, 2):
        logged = run.metrics(step)
        assert logged["turn_control/failed"] == 0 and logged["turn_control/turns"] > 1
        rollouts, _ = torch.load(run.folder / f"watch{step - 1}.pt", weights_only=False)
        mine = scores[64 * (step - 1) :][:64]
        assert {name: sum(kind == name for kind, _ in mine) for name in KINDS} == dict.fromkeys(KINDS, 16)
        assert sorted(rollouts.reward.tolist()) == pytest.approx(sorted(score for _, score in mine), abs=1e-6)
    assert 0 < run.metrics(2)["gigpo/compared"] <= 1 and run.metrics(2)["gigpo/abs_step"] > 0
    plain, with_gigpo = (torch.load(run.folder / f"moved{step}.pt") for step in (1, 2))
    assert (with_gigpo - plain).norm() > 1e-3 * plain.norm() > 0


# ---- TextWorld


def test_a_game_of_textworld_is_solved_with_its_own_commands(games):
    row = games(1)[0]

    class Words(TextWorld):
        rewards = "intermediate"

    check_environment(Words)
    played = []
    for _ in range(2):
        environment, texts = Words(), []
        first = environment.reset(row)
        assert environment._state.objective in first.text and "Commands: " in first.text
        facts = first.anchor
        assert isinstance(facts, list) and any(fact.startswith("at(P") for fact in facts)
        nonsense = environment.act("fly to the moon")
        assert not nonsense.valid and nonsense.anchor == facts and nonsense.reward == 0
        seen = environment.act("  look ")
        assert seen.valid and seen.anchor == facts
        assert "0/" not in seen.text.splitlines()[-2]  # the status line is cut
        walkthrough = environment._state["extra.walkthrough"]
        for command in walkthrough:
            observation = environment.act(command)
            texts.append((observation.text, observation.reward, observation.done, observation.anchor))
        assert observation.done and observation.reward == 1 and environment.score() == 1
        assert observation.anchor != facts
        environment.close()
        environment.close()
        played.append(texts)
    assert played[0] == played[1]


def test_what_textworld_refuses(tmp_path, games):
    environment = TextWorld()
    with pytest.raises(ConfigError, match="`game`"):
        environment.reset({"question": "x"})
    with pytest.raises(ConfigError, match="tw-make"):
        environment.reset({"game": str(tmp_path / "zork.z5")})
    with pytest.raises(ConfigError, match="nb_rooms"):
        games(1, nb_room=1)
    numbered = House()
    numbered.reset(games(1)[0])
    assert not numbered.act("no number").valid and not numbered.act("99").valid and numbered.act("0").valid
    numbered.close()


# ---- verifiers


def test_an_episode_of_verifiers_is_that_of_its_own_rollout():
    """What the library's `rollout` makes of the same answers."""
    import asyncio

    import verifiers as vf
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage

    check_environment(Numbers)
    row, answers = Numbers.rows(8)[6], ["2", "x", "7", "6"]
    environment = Numbers()
    assert environment.reset(row) == Observation("guess")
    seen = [environment.act(answer) for answer in answers]
    assert [o.text for o in seen] == ["higher", "a digit", "lower", ""]  # max_turns ends it, as in the library
    assert [o.done for o in seen] == [False, False, False, True]
    mine, cleaned = environment.score(), type(environment._environment).cleaned

    said = iter(answers)

    async def speak(self, *args, **kwargs):
        message = ResponseMessage(content=next(said), finish_reason="stop", is_truncated=False)
        return Response(id="", created=0, model="m", usage=None, message=message)

    body = dict.fromkeys(Client.__abstractmethods__, lambda *a, **k: None)
    client = type("Scripted", (Client,), {**body, "__init__": lambda self: None, "get_response": speak})()
    theirs = Numbers._loaded()

    async def rollout():
        import json

        state = await theirs.rollout(json.loads(row["verifiers_row"]), client, "m", {})
        await theirs.rubric.score_rollout(state)
        return state

    state = asyncio.run(rollout())
    assert mine == state["reward"] == pytest.approx(0.2)
    assert [m.content for m in state["completion"]] == [m.content for m in environment._state["completion"]]
    assert cleaned + 1 == type(theirs).cleaned
    environment.close()
    assert type(theirs).cleaned == cleaned + 1  # a scored episode is not cleaned again
    environment.reset(row)
    assert environment.act("6") == Observation("right", done=True)
    assert environment.score() == pytest.approx(1.1)
    environment.reset(row)
    environment.close()
    assert type(theirs).cleaned == cleaned + 3
    assert isinstance(theirs, vf.MultiTurnEnv)


def test_a_single_turn_environment_of_verifiers():
    import verifiers as vf

    def exact(completion, answer):
        return float(completion[-1]["content"] == answer)

    class Sums(Verifiers):
        @classmethod
        def make(cls):
            rows = Dataset.from_list([{"question": "1+1", "answer": "2"}])
            return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[exact]))

    check_environment(Sums)
    environment = Sums()
    for answer, reward in (("2", 1.0), ("3", 0.0)):
        environment.reset(Sums.rows(1)[0])
        assert environment.act(answer).done and environment.score() == reward


def test_what_verifiers_refuses():
    import signal

    import verifiers as vf

    rows = Dataset.from_list([{"question": "q", "answer": "a"}])

    def tool(x: int) -> int:
        """Doubles."""
        return 2 * x

    def best(completions):
        return [0.0] * len(completions)

    for make, named in (
        (lambda: vf.ToolEnv(tools=[tool], dataset=rows), "tools"),
        (lambda: vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[best])), "group"),
        (lambda: vf.load_environment("no-such-environment"), "no-such-environment"),
    ):
        before = signal.getsignal(signal.SIGTERM)
        kind = type("Refused", (Verifiers,), {"make": staticmethod(make)})
        with pytest.raises(ConfigError, match=named):
            check_environment(kind)
        assert signal.getsignal(signal.SIGTERM) is before
    threaded = type("Threaded", (Numbers,), {})
    (called,) = run_calls([Call(threaded._loaded, (), name="an environment made outside the main thread")])
    assert not called.error
    with pytest.raises(ConfigError, match="Numbers.rows"):
        Numbers().reset({"prompt": "x"})
