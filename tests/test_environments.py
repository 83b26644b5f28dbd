"""The environment protocol, and environments as tools of TRL."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from rl_plugins.kit.agents import ENDED, Environment, Observation, TurnRecord
from rl_plugins.trl.generation.environments import as_tools


class Counter:
    """Count to the target."""

    closed = 0

    def reset(self, columns: Mapping[str, Any]) -> Observation:
        self.target, self.count = columns["target"], 0
        return Observation(f"to {self.target}", state=0)

    def act(self, action: str) -> Observation:
        if action == "crash":
            raise OSError("the engine is on fire")
        if action != "up":
            return Observation("what?", valid=False, state=self.count)
        self.count += 1
        return Observation(f"at {self.count}", 0.5, done=self.count == self.target, state=self.count)

    def close(self) -> None:
        type(self).closed += 1


class Scored(Counter):
    def act(self, action: str) -> Observation:
        """Count.

        Args:
            action: "up", nothing else.
        """
        return super().act(action)

    def score(self) -> float:
        return self.count / self.target


def records(tools) -> list[tuple]:
    return [
        (turn.anchor, None if math.isnan(turn.reward) else turn.reward, turn.valid) for turn in tools.rl_plugins_turns
    ]


def test_the_anchor_is_the_state_else_the_text():
    assert Observation("you are at 3").anchor == "you are at 3"
    assert Observation("you are at 3", state=[3]).anchor == [3]
    assert Observation("you are at 0", state=0).anchor == 0
    assert math.isnan(Observation("").reward) and Observation("").valid and not Observation("").done


def test_what_an_environment_is():
    assert isinstance(Counter(), Environment)
    assert not isinstance(object(), Environment)
    with pytest.raises(
        TypeError, match="dict is no environment: it has no method reset and no method act and no method close"
    ):
        as_tools(dict)
    with pytest.raises(TypeError, match="list is no environment"):
        as_tools(list)


def test_turns_are_recorded_with_the_state_before_them():
    tools = as_tools(Counter)()
    assert tools.reset(target=2, prompt=[{"role": "user", "content": "count: "}]) == "to 2"
    assert records(tools) == []
    assert [tools.act("up"), tools.act("down"), tools.act("up"), tools.act("up")] == ["at 1", "what?", "at 2", ENDED]
    assert records(tools) == [(0, 0.5, True), (1, None, False), (1, 0.5, True), (2, None, False)]
    assert isinstance(tools.rl_plugins_turns[0], TurnRecord)
    tools.reset(target=1)
    assert records(tools) == []


@pytest.mark.parametrize("running", [False, True], ids=["a script", "a notebook"])
def test_methods_may_be_coroutines(running):
    class Slow(Scored):
        async def act(self, action):  # type: ignore[override]
            return super().act(action)

        async def score(self):  # type: ignore[override]
            return super().score()

        async def close(self):  # type: ignore[override]
            super().close()

    def play():
        tools = as_tools(Slow)()
        tools.reset(target=2)
        return tools.act("up"), tools.get_reward()

    async def notebook():
        return play()

    assert (asyncio.run(notebook()) if running else play()) == ("at 1", 0.5)
    gc.collect()
    assert Slow.closed == Counter.closed + 1


def test_an_action_before_reset_reaches_no_environment():
    assert as_tools(Counter)().act("up") == ENDED


def test_a_failing_environment_is_a_turn_that_was_not_valid():
    tools = as_tools(Counter)()
    tools.reset(target=2)
    with pytest.raises(OSError, match="on fire"):
        tools.act("crash")
    assert tools.act("up") == "at 1"
    assert records(tools) == [(0, None, False), (0, 0.5, True)]


@pytest.mark.parametrize(
    ("prompt", "appended"),
    [
        ([{"role": "user", "content": "to 2"}], ""),
        ([{"role": "system", "content": "to 2"}, {"role": "user", "content": "count"}], "to 2"),
        ([{"role": "user", "content": [{"type": "text", "text": "please: to 2"}]}], ""),
        ([{"role": "user", "content": ""}], "to 2"),
        ("to 2", ""),
        (None, "to 2"),
        ([], "to 2"),
    ],
)
def test_the_first_observation_is_not_said_twice(prompt, appended):
    assert as_tools(Counter)().reset(target=2, prompt=prompt) == appended


def test_get_reward_only_where_there_is_a_score():
    assert not hasattr(as_tools(Counter), "get_reward")
    tools = as_tools(Scored)()
    tools.reset(target=2)
    tools.act("up")
    assert tools.get_reward() == 0.5
    assert as_tools(Scored).__name__ == "Scored"


def test_a_function_makes_environments_too():
    made = []

    def factory() -> Scored:
        made.append(Scored())
        return made[-1]

    kind = as_tools(factory)
    first, second = kind(), kind()
    first.reset(target=3)
    second.reset(target=5)
    assert (first.act("up"), second.act("up"), second.act("up")) == ("at 1", "at 1", "at 2")
    assert kind.__name__ == "Scored" and len(made) == 3  # one to look at


def test_an_environment_is_closed_with_its_tools():
    tools = as_tools(Counter)()
    before = Counter.closed
    del tools
    gc.collect()
    assert Counter.closed == before + 1


def test_the_tool_schema():
    transformers = pytest.importorskip("transformers")
    schema = transformers.utils.get_json_schema(as_tools(Counter)().act)["function"]
    assert schema["name"] == "act" and "in the environment" in schema["description"]
    assert schema["parameters"]["required"] == ["action"]
    assert schema["parameters"]["properties"]["action"]["type"] == "string"
    schema = transformers.utils.get_json_schema(as_tools(Scored)().act)["function"]
    assert (schema["description"], schema["parameters"]["properties"]["action"]["description"]) == (
        "Count.",
        '"up", nothing else.',
    )


def test_importing_loads_no_torch():
    code = (
        "import sys, rl_plugins.kit.agents.environment, rl_plugins.lab.demo.environments;"
        "print(sorted({'torch', 'transformers', 'trl', 'verl', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.host
def test_in_trls_trainer(tmp_path, monkeypatch):
    """TRL resets the environment, calls the tool and takes the reward; what the agent writes is scripted."""
    import torch
    from datasets import Dataset
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_chat_template
    from trl.trainer import grpo_trainer

    def parsed(tokenizer, ids, **kwargs):  # TRL's own needs jmespath, which is no dependency of ours
        message = {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
        if call := re.search("<tool_call>(.*)</tool_call>", message["content"], re.DOTALL):
            message |= {"content": "", "tool_calls": [{"type": "function", "function": json.loads(call.group(1))}]}
        return message

    monkeypatch.setattr(grpo_trainer, "is_jmespath_available", lambda: True)
    monkeypatch.setattr(grpo_trainer, "parse_response", parsed)

    special = ["<pad>", "<|im_end|>", "<unk>", "<|im_start|>"]
    vocabulary = {token: i for i, token in enumerate([*special, *map(chr, [10, *range(32, 127)])])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = qwen3_chat_template
    config = Qwen3Config(
        vocab_size=128, hidden_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=16,
        intermediate_size=16, max_position_embeddings=4096, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    seen: list[list[str]] = []

    class Scripted(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            seen.append([tokenizer.decode(ids) for ids in prompt_ids])
            words = [
                "up" if "at 1" in text or "count: " in text.split("<|im_start|>")[-2] else "down" for text in seen[-1]
            ]
            calls = [json.dumps({"name": "act", "arguments": {"action": word}}) for word in words]
            texts = [
                "done" if "at 2" in s else f"<tool_call>\n{c}\n</tool_call>"
                for s, c in zip(seen[-1], calls, strict=True)
            ]
            return [tokenizer(f"{text}<|im_end|>")["input_ids"] for text in texts], None

    arguments = GRPOConfig(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=2, num_generations=2, report_to="none",
        max_completion_length=400, use_cpu=True, bf16=False, save_strategy="no", logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    trainer = Scripted(
        model=Qwen3ForCausalLM(config).to(torch.float32),
        args=arguments,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "count: "}], "target": 2}] * 2),
        environment_factory=as_tools(Scored),
    )
    trainer.train()
    assert seen[0][0].count("count: to 2<|im_end|>") == 1
    assert [records(e) for e in trainer.environments] == [[(0, 0.5, True), (1, 0.5, True)]] * 2
    (logged,) = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert logged["rewards/Scored/mean"] == 1.0
    assert logged["tools/call_frequency"] == 2.0 and logged["tools/failure_frequency"] == 0.0


# ---- what is no environment


class Talks(Counter):
    """Answers with text, as many do that were written for other libraries."""

    def reset(self, columns):  # type: ignore[override, no-untyped-def]
        return "welcome " * 200


class Annotated(Counter):
    def act(self, action: str) -> str:  # type: ignore[override]
        return "moved"


class Silent(Counter):
    def act(self, action):  # type: ignore[override, no-untyped-def]
        return Observation(None)  # type: ignore[arg-type]


class Unpaid(Counter):
    def act(self, action):  # type: ignore[override, no-untyped-def]
        return Observation("moved", reward="much")  # type: ignore[arg-type]


class Late(Counter):
    def act(self, action):  # type: ignore[override, no-untyped-def]
        return ("moved", 1.0, False)


TOLD_BEFORE = {
    Annotated: "`act` of the environment Annotated says that it returns str. It must return an Observation(text",
    dict: "the environment dict has no method reset and no method act and no method close",
}


@pytest.mark.parametrize("kind", TOLD_BEFORE)
@pytest.mark.parametrize("name", ["turn_control", "cleaner", "aepo_rollout", "rtv_pdr"])
def test_an_environment_that_says_it_is_none_is_refused_with_the_parameters(kind, name):
    from rl_plugins.core.errors import ConfigError
    from rl_plugins.runtime.registry import build, load

    with pytest.raises(ConfigError, match=re.escape(TOLD_BEFORE[kind])):
        build(load(name), {"environment": kind}, name)
    build(load(name), {"environment": Counter}, name)
    build(load(name), {"environment": Talks}, name)  # says nothing of what it returns
    if kind is Annotated:
        with pytest.raises(ConfigError, match="says that it returns str"):
            as_tools(kind)


WRONG_ANSWERS = {
    Talks: "`reset` of the environment Talks returned 'welcome welcome",
    Late: "`act` of the environment Late returned ('moved', 1.0, False) (tuple). It must return an Observation(",
    Silent: "`act` of the environment Silent returned an Observation whose `text` is None; it must be a text.",
    Unpaid: "`act` of the environment Unpaid returned an Observation whose `reward` is 'much'; it must be a number",
}


@pytest.mark.parametrize("kind", WRONG_ANSWERS)
@pytest.mark.parametrize("name", ["turn_control", "cleaner", "aepo_rollout", "rtv_pdr"])
def test_an_environment_that_answers_with_something_else_is_broken_and_named(kind, name, caplog):
    """Without this: AttributeError: 'str' object has no attribute 'text', inside of a long trace."""
    from rl_plugins.runtime.registry import build, load
    from rl_plugins.testing.engine import EOS, TableEngine, make_prompt, run_program

    engine = TableEngine(lambda text: {EOS: 1.0} if text[-1] == "a" else {"a": 1.0})
    method = build(load(name), {"environment": kind}, name)
    for (row,) in run_program(
        method, make_prompt(engine.chat, "go", columns={"target": 3}, n=2, max_tokens=60), engine
    ):
        assert WRONG_ANSWERS[kind] in row.meta["error"] and math.isnan(row.meta["score"])
        assert row.meta["error"].count("welcome") < 40
    assert WRONG_ANSWERS[kind] in caplog.text


def test_tools_of_such_an_environment_end_the_run_too():
    """TRL shows the agent what a tool raises and goes on, so the error comes again where TRL does not catch it."""
    from rl_plugins.core.errors import ConfigError

    with pytest.raises(ConfigError, match="`reset` of the environment Talks returned"):
        as_tools(Talks)().reset(target=1)
    tools = as_tools(Late)()
    tools.reset(target=1)
    with pytest.raises(ConfigError, match="`act` of the environment Late returned"):
        tools.act("up")
    with pytest.raises(ConfigError, match="`act` of the environment Late returned"):
        tools.reset(target=1)
