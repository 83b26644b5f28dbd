"""Texts and tokens on the real tokenizer: its pieces are bytes, so completions are cut inside a character, and prompts,
hints, replies and packages hold characters of several tokens. Completions are drawn from such pieces; the rest is TRL's
real trainer up to the batch that it would train. What methods, environments and rewards see is exact to the character
or token."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "hosts" / "trl"))

import reasoning_helpers as helpers
import transformers
import trl
from datasets import Dataset
from harness import stub_sampling
from shallow_policy import TOOL
from trl_arms import arm_of, make

from rl_plugins.cards.catalog import example_of
from rl_plugins.core.method import Method
from rl_plugins.core.requests import Kind
from rl_plugins.environments import reasoning_gym
from rl_plugins.kit.agents import Observation
from rl_plugins.runtime import registry
from rl_plugins.trl.generation import programs
from rl_plugins.trl.generation.engine import TrlEngine

pytestmark = [pytest.mark.real, pytest.mark.host]

SIGNS = "é 日本 🙂"
CUT = "\ufffd"
PROGRAMS = [
    *("adhint_rollouts", "aepo_rollout", "arrol", "branch_text_rollout", "cleaner", "echo_tree", "latr"),
    *("m_grpo_rollout", "rtv_pdr", "scope", "turn_control", "ui_s1_rollout"),
]
READERS = [
    *("brorl", "brpo", "dart_pool", "dora_data", "dora_reuse", "echo_labels", "fapo", "fission_grpo", "grpo_roc"),
    *("process_supervision", "ps_grpo", "reward_audit", "rollout_replay", "rubric", "sdpo", "swarm_sapo"),
    *("training_free_grpo", "xrpo_seeds"),
]
WRITES_PROMPTS = ("fission_grpo", "swarm_sapo", "training_free_grpo", "xrpo_seeds")
TEXTS = {"text", "raw_text", "messages", "token_ids"}


class Sees(Method):
    """Keeps what methods see."""

    name = "sees"
    needs = frozenset({"tokens", "token_ids", "text", "raw_text"})
    batches: list[tuple[Any, Any]] = []

    def observe(self, rollouts: Any, tokens: Any, stats: Any) -> None:
        Sees.batches.append((rollouts, tokens))


class Signs(helpers.Tool):
    """Answers in characters of several tokens, and keeps what it was told."""

    heard: list[str] = []

    def act(self, action: str) -> Observation:
        Signs.heard.append(action)
        said = super().act(action)
        return replace(said, text=f"{SIGNS} {said.text}", done=False)


def test_lists_have_every_method_that_reads_text_or_makes_it() -> None:
    found: dict[str, set[str]] = {"programs": set(), "readers": set()}
    for name in registry.all_names():
        arm = arm_of(name)
        parts = registry.select([name]).classes
        if arm.refused or list(parts) != [name]:  # bundles have the same parts
            continue
        made = example_of(parts[name])
        if "rollout" in made.claims():
            found["programs"].add(name)
        elif TEXTS & set(made.needs):
            found["readers"].add(name)
    assert found == {"programs": set(PROGRAMS), "readers": set(READERS)}


def dataset(tool: bool) -> Dataset:
    """Every third prompt begins the answer, every third has no system prompt."""
    made = []
    for i, row in enumerate(helpers.with_columns(24, f"{TOOL if tool else reasoning_gym.SYSTEM} {SIGNS}")):
        prompt = row["prompt"]
        if i % 3 == 1:
            prompt = prompt[1:]
        if i % 3 == 2:
            prompt = [*prompt, {"role": "assistant", "content": f"{SIGNS}:"}]
        answer = row["answer"]
        changes = {
            "reference": f"{SIGNS} {answer} = {SIGNS}",
            "solution": f"{SIGNS} {answer}",
            "hints": [f"{SIGNS} one", f"two {SIGNS}"],
            "expert": [[row["prompt"][-1]["content"], f"{SIGNS} = 1"], [SIGNS, f"{answer} {SIGNS}"]],
        }
        made.append({**row, **changes, "prompt": prompt})
    return Dataset.from_list(made)


class Batches:
    """A run of a method up to the batches that would be trained."""

    def __init__(self, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        Sees.batches, Signs.heard = [], []
        sees = EntryPoint("sees", f"{__name__}:Sees", registry.ENTRY_POINT_GROUP)
        installed = registry._entry_points
        monkeypatch.setattr(registry, "_entry_points", lambda: [*installed(), sees])
        arm = arm_of(name)
        params = {part: dict(values) for part, values in arm.params.items()}
        for values in params.values():
            if values.get("environment") is helpers.Tool:
                values |= {"environment": Signs, "role": "tool"}
        arm = replace(arm, params=params)
        self.trainer = make(folder, [*arm.beside, name, *arm.after, "sees"], arm, dataset=dataset(arm.tool))
        self.tokenizer = self.trainer._tokenizer
        self.made: list[Any] = []
        self.emitted: list[tuple[int, ...]] = []
        self.prompts: list[list[int]] = []
        self.data: list[dict[str, Any]] = []
        self.rewarded: list[tuple[str, list[int]]] = []

        def reward(completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
            self.rewarded += [(c[-1]["content"], ids) for c, ids in zip(completions, completion_ids, strict=True)]
            return [float(sum(ids) % 3 == 0) for ids in completion_ids]

        self.trainer.reward_funcs[0] = reward
        pool = self.tokenizer.encode(f"{SIGNS}{SIGNS}{SIGNS} 7 = \n\n ```python\ngcd(4, 6)\n``` The answer is 1.")
        run_programs = programs.run_programs

        def watched(*args: Any) -> Any:
            rows = run_programs(*args)
            self.made += rows
            return rows

        def prepared(trainer: Any, model: Any, inputs: Any, *args: Any) -> Any:
            model.train()
            self.data.append(trainer._prepare_inputs(inputs))
            return torch.zeros(())

        monkeypatch.setattr(programs, "run_programs", watched)
        monkeypatch.setattr(transformers.Trainer, "training_step", prepared)
        with stub_sampling(8, pool), monkeypatch.context() as patch:
            single, call = trl.GRPOTrainer._generate_single_turn, TrlEngine._call

            def of_host(trainer: Any, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
                out = single(trainer, prompt_ids, *args, **kwargs)
                self.emitted += [tuple(ids) for ids in out[0]]
                self.prompts += [list(ids) for ids in prompt_ids]
                return out

            def of_engine(engine: Any, options: Any, *args: Any) -> Any:
                out = call(engine, options, *args)
                self.emitted += [g.tokens for g in out]
                other = ((pool[0], -1.2),) * (options.top > 0)
                return [replace(g, top=tuple(((token, -1.0), *other) for token in g.tokens)) for g in out]

            patch.setattr(trl.GRPOTrainer, "_generate_single_turn", of_host)
            patch.setattr(TrlEngine, "_call", of_engine)
            self.trainer.train()

    def decode(self, ids: Any, special: bool = False) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=not special))

    def check(self) -> None:
        """What every method and reward function sees is what was made."""
        assert Sees.batches and self.rewarded
        cut = 0
        for rollouts, tokens in Sees.batches:
            for i in range(len(rollouts)):
                ids = rollouts.token_ids.completion[i].tolist()
                assert rollouts.text[i] == self.decode(ids)
                assert rollouts.raw_text[i] == self.decode(ids, special=True)
                cut += CUT in rollouts.text[i]
                read = rollouts.token_ids.observed[i]
                places = tokens.position[tokens.row == i].tolist()  # none of a row that is masked
                assert places in ([], (~read).nonzero()[:, 0].tolist())
        assert cut >= 3, "completions are cut inside a character"
        for text, ids in self.rewarded:
            assert text == self.decode(ids)
        seen = Counter(
            tuple(rollouts.token_ids.completion[i].tolist())
            for rollouts, _ in Sees.batches
            for i in range(len(rollouts))
        )
        for batch in self.data:
            for ids, mask in zip(batch["completion_ids"], batch["completion_mask"], strict=True):
                row = tuple(ids[mask.bool()].tolist())
                assert not row or seen[row] or row == (self.tokenizer.eos_token_id,)

    def rendered(self, messages: Any) -> list[int]:
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return list(ids)


@pytest.mark.parametrize("name", READERS)
def test_readers_see_the_text_that_was_made(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Batches(name, tmp_path, monkeypatch)
    run.check()
    made = Counter(run.emitted)
    foreign = 0
    for rollouts, _ in Sees.batches:
        for i in range(len(rollouts)):
            ids = tuple(rollouts.token_ids.completion[i].tolist())
            foreign += ids not in made
    if name != "swarm_sapo":
        assert not foreign, "each completion as the engine made it"
    texts = [run.decode(ids, special=True) for ids in run.prompts]
    if name not in WRITES_PROMPTS:
        rows = [run.rendered(row["prompt"]) for row in run.trainer.train_dataset]
        assert all(list(ids) in rows for ids in run.prompts), "as the template writes them"
    if name == "training_free_grpo":
        assert any("numbers: Say only the final answer." in text for text in texts)
    if name == "swarm_sapo":
        assert foreign and {f"{row['answer']} é 日本 🙂" for row in helpers.with_columns(8)} & {
            text for rollouts, _ in Sees.batches for text in rollouts.text
        }
    if name == "fission_grpo":
        known = {text for rollouts, _ in Sees.batches for text in rollouts.text}
        told = [
            text for text in texts if text.count("<|im_start|>assistant") > 1 and text.count("<|im_start|>user") > 1
        ]
        assert told and all(any(f"<|im_start|>assistant\n{k}<|im_end|>" in text for k in known) for text in told)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_keep_tokens_and_characters(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Batches(name, tmp_path, monkeypatch)
    run.check()
    assert run.made
    emitted = {ids for ids in run.emitted if ids}
    forced = 0
    for row in run.made:
        t = row.trajectory
        prompt = run.trainer.train_dataset[row.plan.prompt_index]["prompt"]
        for kind, start, stop in spans(t.kinds):
            ids = t.tokens[start:stop]
            if kind == Kind.SAMPLED:
                assert joined(ids, emitted), "as the engine made it"
            elif kind == Kind.OBSERVED:  # a main agent reads what its sub-agent was cut off at
                assert CUT not in run.decode(ids) or name == "m_grpo_rollout", "what is read is whole"
            else:
                forced += 1
        if name in ("adhint_rollouts", "arrol", "branch_text_rollout", "echo_tree", "latr", "scope"):
            assert list(t.prompt) == run.rendered(prompt)
        if name == "adhint_rollouts" and t.kinds[:1] == (Kind.FORCED,):
            hint = run.decode(t.tokens[: t.kinds.count(Kind.FORCED)])
            assert run.trainer.train_dataset[row.plan.prompt_index]["reference"].startswith(hint) and CUT not in hint
        if name in ("turn_control", "aepo_rollout"):
            assert {run.decode(t.tokens[turn.start : turn.stop]) for turn in t.turns} <= set(Signs.heard)
            read = [run.decode(t.tokens[a:b], special=True) for kind, a, b in spans(t.kinds) if kind == Kind.OBSERVED]
            assert all(f"<|im_start|>tool\n{SIGNS} " in text for text in read)
    assert forced or name != "adhint_rollouts"


def joined(ids: tuple[int, ...], emitted: set[tuple[int, ...]]) -> bool:
    """Whether tokens are beginnings of what the engine made, one behind the other."""
    reached = {0}
    for start in range(len(ids)):
        if start in reached:
            for made in emitted:
                same = [a == b for a, b in zip(ids[start:], made, strict=False)]
                reached |= set(range(start + 1, start + 1 + (same.index(False) if False in same else len(same))))
    return len(ids) in reached


def spans(kinds: Any) -> list[tuple[Any, int, int]]:
    """Runs of equal kinds."""
    found, start = [], 0
    for i in range(1, len(kinds) + 1):
        if i == len(kinds) or kinds[i] != kinds[start]:
            found.append((kinds[start], start, i))
            start = i
    return found
