"""The embedded demo: tasks, rewards, the policy and its cache."""

from __future__ import annotations

import dataclasses
import io
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_plugins.lab.demo import demos, policy, rewards, tasks

digit_lists = st.text("0123456789", min_size=1, max_size=10)
completions = st.text("=?0123456789a", max_size=14)


@pytest.fixture(scope="module")
def tokenizer():
    return policy.build_tokenizer()


@pytest.fixture
def quick(monkeypatch):
    """A warm start of three small steps."""
    monkeypatch.setattr(policy, "WARM_START", dataclasses.replace(policy.WARM_START, steps=3, batch_size=4))


# --- tasks


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [("a:5391", "1359"), ("d:5391", "9531"), ("u:5351", "135"), ("a:3003", "0033"), ("u:77", "7")],
)
def test_answers(prompt, answer):
    assert tasks.solve(prompt) == answer


@given(digit_lists)
def test_answers_are_the_sorted_digits(digits):
    assert list(tasks.solve(f"a:{digits}")) == sorted(digits)
    assert tasks.solve(f"d:{digits}") == tasks.solve(f"a:{digits}")[::-1]
    assert list(tasks.solve(f"u:{digits}")) == sorted(set(digits))


@pytest.mark.parametrize("prompt", ["x:12", "a12", "a:", "a:1b", "a:²", ""])
def test_what_is_no_prompt_is_refused(prompt):
    with pytest.raises(ValueError, match="is not a prompt of the demo tasks"):
        tasks.solve(prompt)


def test_rows_are_the_promised_columns():
    dataset = tasks.build_dataset(50, seed=3)
    assert dataset.column_names == ["prompt", "answer", "level", "task"]
    for row in dataset:
        (message,) = row["prompt"]
        assert message["role"] == "user"
        operation, _, digits = message["content"].partition(":")
        assert (row["answer"], row["level"], row["task"]) == (
            tasks.solve(message["content"]),
            len(digits) / 2,
            {"a": "ascending", "d": "descending", "u": "unique"}[operation],
        )
    assert sorted(dataset["level"]) == sorted(list(tasks.LEVELS) * 10)
    assert set(dataset["task"]) == set(tasks.TASKS.values())


def test_rows_depend_on_the_arguments_only():
    assert tasks.build_rows(40, seed=1) == tasks.build_rows(40, seed=1)
    assert tasks.build_rows(40, seed=1) != tasks.build_rows(40, seed=2)
    alone = tasks.build_rows(10, seed=1, levels=[3])
    among_others = [row for row in tasks.build_rows(50, seed=1) if row["level"] == 3]
    assert sorted(map(str, alone)) == sorted(map(str, among_others))


def prompts_of(rows):
    return [row["prompt"][0]["content"] for row in rows]


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_splits_share_no_prompt(seed, other_seed):
    train = prompts_of(tasks.build_rows(300, seed, levels=[1, 3]))
    held_out = prompts_of(tasks.build_rows(100, other_seed, levels=[1, 3], split="held_out"))
    assert not set(train) & set(held_out)


def test_every_prompt_of_a_level_comes_once_before_any_comes_again():
    everything = {f"{task}:{number:02d}" for task in "adu" for number in range(100)}
    train = prompts_of(tasks.build_rows(2 * 233, seed=0, levels=[1]))
    held_out = prompts_of(tasks.build_rows(67, seed=0, levels=[1], split="held_out"))
    assert len(set(held_out)) == 67
    assert set(train) | set(held_out) == everything
    assert all(train.count(prompt) == 2 for prompt in set(train))
    assert len(set(prompts_of(tasks.build_rows(20_000, levels=[3, 5])))) == 20_000  # drawing anew would repeat some 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "n is 0"),
        ({"n": 100_001}, "n is 100001"),
        ({"n": 5, "levels": [0]}, r"levels is \(0,\)"),
        ({"n": 5, "levels": []}, r"levels is \(\)"),
        ({"n": 5, "levels": [1, 1]}, r"levels is \(1, 1\)"),
        ({"n": 5, "split": "test"}, "no split 'test'.*train, held_out"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        tasks.build_rows(**arguments)


# --- rewards

#  completion, exact, digits, format; the answer is 1359
SCORES = [
    ("=1359", 1, 1, 1),
    ("?1359", 1, 1, 0.75),
    ("=1350", 0, 0.75, 1),
    ("?135", 0, 0.75, 0.5),
    ("=13591", 0, 0.8, 0.75),
    ("=", 0, 0, 0.5),
    ("==1359", 0, 0, 0.5),
    ("?=1359", 0, 0, 0.25),
    ("=13a9", 0, 0, 0.5),
    ("1359", 0, 0, 0.5),
    ("=1359\n", 0, 0, 0.5),
    ("=١٣٥٩", 0, 0, 0.5),
    ("abc", 0, 0, 0),
    ("", 0, 0, 0),
]
TEXTS = [row[0] for row in SCORES]
ANSWERS = ["1359"] * len(SCORES)


@pytest.mark.parametrize(("column", "reward"), [(1, rewards.exact), (2, rewards.digits), (3, rewards.format)])
def test_rewards(column, reward):
    expected = [row[column] for row in SCORES]
    assert reward(None, TEXTS, answer=ANSWERS) == expected
    chat = [[{"role": "assistant", "content": text}] for text in TEXTS]
    ended = [[7] * len(text) + [rewards.EOS_ID] for text in TEXTS]
    scores = reward(prompts=None, completions=chat, completion_ids=ended, answer=ANSWERS, level=[2] * len(TEXTS))
    assert scores == expected
    assert all(isinstance(score, float) for score in scores)


def test_format_sees_truncation_in_the_ids():
    ids = [[16, 7, 9, 11, 15, rewards.EOS_ID], [16, 7, 9, 11, 15], []]
    assert rewards.format(None, ["=1359", "=1359", ""], ids, answer=["1359"] * 3) == [1, 0.75, 0]


@given(completions, digit_lists)
def test_digits_is_one_exactly_where_exact_is(text, answer):
    (exact,), (digits,) = (reward(None, [text], answer=[answer]) for reward in (rewards.exact, rewards.digits))
    assert 0 <= digits <= 1
    assert (digits == 1) == (exact == 1)


@given(digit_lists, st.sampled_from("=?"))
def test_the_right_digits_are_exact_with_either_mark(answer, mark):
    assert rewards.exact(None, [mark + answer], answer=[answer]) == [1]


def test_quality_penalty_of_grpo_roc():
    penalty = rewards.format_and_digit_errors(SimpleNamespace(text=TEXTS, meta={"answer": ANSWERS}))
    assert penalty.dtype == torch.float64
    assert penalty.tolist() == pytest.approx([2 - row[2] - row[3] for row in SCORES])
    assert penalty[:2].tolist() == [0, 0.25]  # both exact, and still ranked
    assert penalty.max() == 2


def test_rows_must_match():
    with pytest.raises(ValueError, match="zip"):
        rewards.exact(None, ["=1", "=2"], answer=["1"])


# --- tokenizer and model


def test_tokenizer_round_trip(tokenizer):
    text = policy.CHARACTERS
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("A?")["input_ids"]) == ["<unk>", "?"]
    assert len(tokenizer) <= 64
    assert tokenizer.eos_token_id == rewards.EOS_ID


def test_chat_template_marks_what_the_policy_writes(tokenizer):
    messages = [{"role": "user", "content": "a:53"}, {"role": "assistant", "content": "=35"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<user>a:53<asst>=35<eos>"
    generation_prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert generation_prompt == "<user>a:53<asst>"
    rendered = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    written = [i for i, m in zip(rendered["input_ids"], rendered["assistant_masks"], strict=True) if m]
    assert tokenizer.decode(written) == "=35<eos>"


def test_a_full_answer_fits_the_completion_length(tokenizer):
    longest = max((row["answer"] for row in tasks.build_rows(500, levels=[5])), key=len)
    assert len(tokenizer(f"={longest}<eos>")["input_ids"]) == 12 <= policy.MAX_COMPLETION_LENGTH


def test_model_is_small_and_a_function_of_its_seed():
    model = policy.build_model(0)
    assert sum(parameter.numel() for parameter in model.parameters()) == 78_272
    same, other = policy.build_model(0), policy.build_model(1)
    assert torch.equal(model.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)


def test_demonstrators():
    careful = dataclasses.replace(policy.WARM_START, sloppy=0.0)
    sloppy = dataclasses.replace(policy.WARM_START, sloppy=1.0, digit_noise=0.2)
    rng = random.Random(0)
    assert policy.demonstration(rng, "1359", careful) == "=1359"
    written = [policy.demonstration(rng, "1359", sloppy) for _ in range(4000)]
    assert {text[0] for text in written} == {"?"} and {len(text) for text in written} == {5}
    wrong = sum(a != b for text in written for a, b in zip(text[1:], "1359", strict=True)) / 16_000
    assert wrong == pytest.approx(0.18, abs=0.01)  # one replacement in ten hits the right digit


def test_loss_is_on_completion_tokens_only(tokenizer):
    batch = policy._demonstrations(random.Random(0), tokenizer, policy.WARM_START)
    assert batch["input_ids"].shape[0] == policy.WARM_START.batch_size
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        text = tokenizer.decode(ids[ids != tokenizer.pad_token_id])
        prompt, completion = text.removeprefix("<user>").split("<asst>")
        assert tokenizer.decode(labels[labels != -100]) == completion
        assert torch.equal(ids[labels != -100], labels[labels != -100])  # and where they stand
        assert tasks.split_of(prompt) == "train"


# --- warm start


def test_warm_start_is_deterministic_learns_and_leaves_the_global_state_alone(tokenizer):
    settings = dataclasses.replace(policy.WARM_START, steps=12, batch_size=16)

    def run(global_seed):
        torch.manual_seed(global_seed)
        random.seed(global_seed)
        before = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
        steps = []
        model = policy.build_model(0)
        policy.warm_start(model, tokenizer, settings, lambda *step: steps.append(step))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (random.getstate(), torch.get_num_threads()) == before[1:]
        return steps, model.state_dict()

    steps, weights = run(global_seed=1)
    assert [step[:2] for step in steps] == [(i, 12) for i in range(1, 13)]
    assert steps[-1][2] < steps[0][2] - 0.5
    steps_again, weights_again = run(global_seed=2)
    assert steps == steps_again
    for name, weight in weights.items():
        assert torch.equal(weight, weights_again[name]), name


def test_warm_start_leaves_much_to_learn_and_knows_how():
    directory = policy.load_policy()  # in the user's cache: the first run on a machine builds it, in some 12 s
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    rows = tasks.build_rows(320, seed=7, split="held_out")
    sampled = policy.evaluate(model, tokenizer, rows, samples=4)
    greedy = policy.evaluate(model, tokenizer, rows, temperature=0)
    assert list(sampled) == list(tasks.LEVELS)
    assert sampled[1] > sampled[3] > sampled[5]
    # Wide: the policy is trained on this machine.
    assert 0.15 < sum(sampled.values()) / 5 < 0.6
    assert 0.65 < sum(greedy.values()) / 5 < 0.99


def test_evaluate_counts_right_answers_per_level(tokenizer):
    rows = tasks.build_rows(10, levels=[1, 2], split="held_out")

    class Scripted:
        """Right at level 1, one digit short at level 2, as generate() would return it."""

        device = torch.device("cpu")
        training = True

        def train(self, mode=True):
            self.training = mode

        def eval(self):
            self.train(False)

        def generate(self, input_ids, max_new_tokens, **options):
            assert not self.training and options["do_sample"] and options["top_k"] == 0
            prompts = [text.split("<user>")[1].removesuffix("<asst>") for text in tokenizer.batch_decode(input_ids)]
            texts = ["=" + tasks.solve(p)[: None if len(p) == 4 else -1] + "<eos>" for p in prompts]
            written = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
            return torch.cat([input_ids, written], dim=1)

    model = Scripted()
    assert policy.evaluate(model, tokenizer, rows, samples=2) == {1: 1.0, 2: 0.0}
    assert model.training


def test_evaluate_leaves_the_generators_and_the_mode_alone(tokenizer):
    model = policy.build_model(0).train()
    rows = tasks.build_rows(5)
    state = torch.get_rng_state()
    first = policy.evaluate(model, tokenizer, rows, samples=2, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    torch.rand(3)
    assert policy.evaluate(model, tokenizer, rows, samples=2, seed=3) == first
    assert set(policy.evaluate(model, tokenizer, rows, temperature=0)) == set(tasks.LEVELS)


# --- cache


def test_load_policy_builds_once(tmp_path, quick):
    steps = []
    directory = policy.load_policy(tmp_path / "cache", progress=lambda *step: steps.append(step))
    assert [step[:2] for step in steps] == [(1, 3), (2, 3), (3, 3)]
    weights = directory / "model.safetensors"
    written = weights.stat().st_mtime_ns
    assert policy.load_policy(tmp_path / "cache", progress=lambda *step: pytest.fail("built again")) == directory
    assert weights.stat().st_mtime_ns == written
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [directory.name]  # no scratch is left


def test_cached_policy_loads_as_any_other(tmp_path, quick, tokenizer):
    directory = policy.load_policy(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(directory)
    loaded = AutoTokenizer.from_pretrained(directory)
    assert model.dtype == torch.float32
    assert loaded.chat_template == policy.CHAT_TEMPLATE
    assert loaded.padding_side == "left"
    text = "<user>a:53<asst>=35<eos>"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    trained = policy.build_model(policy.WARM_START.seed)
    policy.warm_start(trained, tokenizer)
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in trained.state_dict().items())


def test_where_the_cache_is(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(policy.platformdirs, "user_cache_dir", lambda name: str(tmp_path / "user" / name))
    monkeypatch.delenv("RL_PLUGINS_CACHE", raising=False)
    assert policy.load_policy().parent == tmp_path / "user" / "rl-plugins"
    monkeypatch.setenv("RL_PLUGINS_CACHE", str(tmp_path / "env"))
    assert policy.load_policy().parent == tmp_path / "env"
    assert policy.load_policy(tmp_path / "argument").parent == tmp_path / "argument"


def test_other_settings_are_another_policy(tmp_path, quick, monkeypatch):
    first = policy.load_policy(tmp_path)
    monkeypatch.setattr(policy, "WARM_START", dataclasses.replace(policy.WARM_START, seed=1))
    assert policy.load_policy(tmp_path) != first
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("damage", ["cut", "gone", "no manifest", "manifest cut"])
def test_a_damaged_cache_is_built_again(tmp_path, quick, damage):
    directory = policy.load_policy(tmp_path)
    weights, manifest = directory / "model.safetensors", directory / policy.MANIFEST
    good = weights.read_bytes()
    if damage == "cut":
        weights.write_bytes(good[:1000])
    elif damage == "gone":
        weights.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text(manifest.read_text()[:40])
    with pytest.warns(UserWarning, match=r"demo policy in .* is damaged \(.*\); it is built again"):
        assert policy.load_policy(tmp_path) == directory
    assert weights.read_bytes() == good
    assert [path.name for path in tmp_path.iterdir()] == [directory.name]


def test_a_failed_build_leaves_nothing(tmp_path, quick):
    def fail(step, total, loss):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        policy.load_policy(tmp_path, progress=fail)
    assert list(tmp_path.iterdir()) == []


def test_the_first_of_two_builders_wins(tmp_path, quick):
    def meanwhile(step, total, loss):
        if step == total:  # another process finishes while this one is still building
            policy.load_policy(tmp_path)
            others.append((next(tmp_path.glob("demo-policy-*/model.safetensors"))).stat().st_ino)

    others: list[int] = []
    directory = policy.load_policy(tmp_path, progress=meanwhile)
    assert (directory / "model.safetensors").stat().st_ino in others
    assert [path.name for path in tmp_path.iterdir()] == [directory.name]


def test_a_cache_that_cannot_be_written_is_explained(tmp_path, quick):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot be cached in .*RL_PLUGINS_CACHE"):
        policy.load_policy(tmp_path / "file" / "cache")


def test_importing_tasks_and_rewards_loads_no_torch():
    code = (
        "import sys, rl_plugins.lab.demo, rl_plugins.lab.demo.tasks, rl_plugins.lab.demo.rewards;"
        "print(sorted({'torch', 'transformers', 'datasets', 'trl', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_a_warm_start_is_told_only_where_there_is_one(quick, tmp_path, monkeypatch):
    monkeypatch.setenv("RL_PLUGINS_CACHE", str(tmp_path))
    told = []
    for _ in range(2):
        console = Console(file=io.StringIO())
        demos._warm_start(console)
        told.append(console.file.getvalue())
    assert "warm start" in told[0] and told[1] == ""
