"""Heads in TRL: LoRA, prompt and prefix tuning trained on slices of difficulty through `rl-plugins trl grpo`, positions
in padded rows, a resumed head, and samples over the heads."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import load_dataset
from harness import history, make, policy, weights
from messages import raises
from methods.slices_loops import slice_of_each
from peft import PromptTuningConfig
from safetensors.torch import load_file
from test_generation import Spy
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from rl_plugins.commands.cli import app
from rl_plugins.core.errors import ConfigError
from rl_plugins.lab.demo.tasks import build_dataset
from rl_plugins.tools.heads import prefix_diversity, shares
from rl_plugins.trl.commands import script

pytestmark = pytest.mark.host

RUN = """\
# a run of mine
model_name_or_path: {folder}/policy
dataset_name: {folder}/data
reward_funcs: [rl_plugins.lab.demo.rewards.exact, harness.text_score]
reward_weights: [0.0, 1.0]
output_dir: {folder}/out
methods:
  - mc_grpo   # the median
per_device_train_batch_size: 20
num_generations: 4
max_completion_length: 8
max_steps: 2
learning_rate: 0.01
optim: sgd
logging_steps: 1
lora_r: 2
lora_target_modules: [q_proj, v_proj]
use_cpu: true
bf16: false
gradient_checkpointing: false
dataloader_pin_memory: false
disable_tqdm: true
report_to: none
save_strategy: "no"
"""
KINDS = {
    "lora": [],
    "prompt_tuning": ["--virtual-tokens", 3, "--text", "sort"],
    "prefix_tuning": ["--virtual-tokens", 3],
}


def call(*words: Any, status: int = 0) -> str:
    result = CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "200"})
    assert result.exit_code == status, (result.output, result.exception)
    return " ".join(result.stderr.split()) if status == 2 else result.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    policy(folder / "policy")
    (folder / "data").mkdir()
    for split, seed in (("train", 1), ("test", 2)):
        build_dataset(40, seed=seed, split="held_out" if split == "test" else "train").to_parquet(
            folder / "data" / f"{split}.parquet"
        )
    (folder / "run.yaml").write_text(RUN.format(folder=folder))
    return folder


def of_base(folder: Path) -> str:
    return hashlib.sha256((folder / "policy" / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, list[Any]]:
    """Two heads of each kind, two steps each: kind -> trainers, as TRL's own script left them."""
    import trl.scripts.grpo

    found: dict[str, list[Any]] = {}
    patch = pytest.MonkeyPatch()
    before = of_base(folder)
    for kind, options in KINDS.items():
        if kind == "prefix_tuning":
            options = [*options, "--text", "sort the digits"]
        call("heads", "write", folder / "run.yaml", "--heads", 2, "--column", "level", "--adapter", kind, *options,
             "--out", folder / kind)  # fmt: skip
        for head in (1, 0):
            made: list[Any] = []
            own = trl.scripts.grpo.main

            def main(*parsed: Any) -> None:
                trainer = trl.GRPOTrainer

                class Kept(trainer):
                    def __init__(self, *args: Any, **kwargs: Any) -> None:
                        super().__init__(*args, **kwargs)
                        self.first = weights(self)
                        self.spy = Spy(self)
                        made.append(self)  # noqa: B023

                with pytest.MonkeyPatch.context() as inner:
                    inner.setattr(trl, "GRPOTrainer", Kept)
                    own(*parsed)  # noqa: B023

            patch.setattr(trl.scripts.grpo, "main", main)
            text = yaml.safe_load((folder / kind / f"head_{head}.yaml").read_text())
            text["output_dir"] = str(folder / kind / f"trained_{head}")
            (folder / kind / f"head_{head}.yaml").write_text(yaml.safe_dump(text))
            script.run(["--config", str(folder / kind / f"head_{head}.yaml")])
            patch.undo()
            made[0].spy.undo()
            found.setdefault(kind, []).append(made[0])
    assert of_base(folder) == before
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_trains_on_its_slice_and_nothing_else_moves(folder: Path, trained: Any, kind: str) -> None:
    base = load_file(folder / "policy" / "model.safetensors")
    level = build_dataset(40, seed=1)["level"]
    slice_ = slice_of_each(level, 2)
    for head, t in zip((1, 0), trained[kind], strict=True):
        assert type(t.model.active_peft_config).__name__.lower().startswith(kind.split("_")[0])
        assert [m.name for m in t.methods.methods] == ["difficulty_slices", "mc_grpo"]
        for number, batch in enumerate(t.spy.batches_of_driver):
            chosen = batch.driver.decision.rollouts.prompt_index.unique().tolist()
            assert sum(slice_[i] == head for i in chosen) == (3, 2)[number] and len(chosen) == 5
        assert history(t, "difficulty_slices/own") == [0.6, 0.4]
        assert not torch.equal(weights(t), t.first), "the head moved"
        held = {
            n.replace(".base_layer", ""): p for n, p in t.model.get_base_model().named_parameters() if "lora" not in n
        }
        assert held and all(torch.equal(p, base[n]) for n, p in held.items() if n in base), "the base did not"
        assert len([n for n in held if n in base]) == len(base)


@pytest.mark.parametrize("kind", ["prompt_tuning", "prefix_tuning"])
def test_virtual_tokens_begin_as_a_text(folder: Path, trained: Any, kind: str) -> None:
    """So a head begins as the model with that text in front."""
    t = trained[kind][0]
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    base = AutoModelForCausalLM.from_pretrained(folder / "policy")
    own = {"prompt_tuning": "sort", "prefix_tuning": "sort the digits"}[kind]
    ids = tokenizer(own, add_special_tokens=False)["input_ids"][:3]
    begun = t.first[-t.model.prompt_encoder["default"].embedding.weight.numel() :]
    model = t.model
    with torch.no_grad():
        now = model.prompt_encoder["default"].embedding.weight.clone()
        model.prompt_encoder["default"].embedding.weight.copy_(begun.view_as(now))
        asked = tokenizer("<user>a:5391<asst>", add_special_tokens=False, return_tensors="pt")["input_ids"]
        with_head = model.eval()(input_ids=asked, attention_mask=torch.ones_like(asked)).logits[0, -asked.size(1) :]
        in_front = base(input_ids=torch.cat([torch.tensor([ids]), asked], 1)).logits[0, len(ids) :]
        model.prompt_encoder["default"].embedding.weight.copy_(now)
    torch.testing.assert_close(with_head, in_front, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_of_a_row_do_not_depend_on_the_rows_beside_it(trained: Any, kind: str) -> None:
    """Nor do those that are sampled from, in a batch with padding."""
    t = trained[kind][0]
    model, tokenizer = t.model.eval(), t.processing_class
    asked = tokenizer(["<user>a:12<asst>", "<user>a:123456<asst>"], return_tensors="pt", padding=True,
                      add_special_tokens=False)  # fmt: skip
    ids, mask = asked["input_ids"], asked["attention_mask"]
    assert not bool(mask.all())
    options = dict(do_sample=True, top_k=0, return_dict_in_generate=True, output_logits=True)
    made = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5, eos_token_id=63, **options)
    completion = made.sequences[:, ids.size(1) :]
    sampled_from = torch.stack(made.logits, 1).log_softmax(-1).gather(-1, completion[..., None])[..., 0]
    full, mask = torch.cat([ids, completion], 1), torch.cat([mask, torch.ones_like(completion)], 1)
    with torch.no_grad():
        trained_on = t._get_per_token_logps_and_entropies(model, full, mask, completion.size(1))[0]
        alone = [
            t._get_per_token_logps_and_entropies(model, full[i : i + 1, m], mask[i : i + 1, m], completion.size(1))[0][
                0
            ]
            for i, m in enumerate(mask.bool())
        ]
    torch.testing.assert_close(trained_on, torch.stack(alone), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(sampled_from, torch.stack(alone), atol=1e-4, rtol=1e-4)
    if kind != "lora":  # and without the hook they do
        hooks = model.get_base_model()._forward_pre_hooks
        kept = dict(hooks)
        hooks.clear()
        with torch.no_grad():
            stock = t._get_per_token_logps_and_entropies(model, full, mask, completion.size(1))[0]
        hooks.update(kept)
        assert (stock - torch.stack(alone)).abs().max() > 1e-3


def test_a_head_goes_on_from_its_checkpoint(folder: Path, tmp_path: Path) -> None:
    adapter = {"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)}
    options = dict(
        method_params={"difficulty_slices": {"heads": 3, "head": 1, "column": "level"}}, max_steps=2, more=adapter,
        save_strategy="steps", save_steps=1, dataset=build_dataset(40, seed=1), per_device_train_batch_size=24,
        num_generations=4, max_completion_length=4,
    )  # fmt: skip
    whole = make(tmp_path, ["difficulty_slices"], **options, output_dir=str(tmp_path / "whole"))
    spy = Spy(whole)
    whole.train()
    spy.undo()
    again = make(tmp_path, ["difficulty_slices"], **options, output_dir=str(tmp_path / "again"))
    spy_again = Spy(again)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    spy_again.undo()
    one, other = (s.batches_of_driver[-1].driver.decision.rollouts for s in (spy, spy_again))
    assert torch.equal(one.prompt_index, other.prompt_index) and len(spy_again.batches_of_driver) == 1
    assert torch.equal(weights(whole), weights(again))


# ---- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adapter": "prompt_tuning"}, "adapter='prompt_tuning'.*use_peft"),
        (
            {"use_peft": True, "adapter_text": "x"},
            "adapter_text='x'.*use_peft",
        ),
        (
            {"use_peft": True, "adapter": "prompt_tuning", "num_virtual_tokens": 0},
            "num_virtual_tokens.*0",
        ),
        ({"use_peft": True, "adapter": "prefix_tuning", "gradient_checkpointing": True}, "drops the keys and values"),
        ({"use_peft": True, "adapter": "prompt_tuning", "use_vllm": True}, "virtual tokens cannot be merged"),
        ({"use_peft": True, "adapter": "ia3"}, "'ia3'.*prompt_tuning"),
    ],
)
def test_options_that_cannot_train(folder: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    given = yaml.safe_load((folder / "run.yaml").read_text())
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**given, **options}))
    with raises(ConfigError, match=message):
        script.run(["--config", str(tmp_path / "run.yaml")])
    result = CliRunner().invoke(app, ["trl", "grpo", "--config", str(tmp_path / "run.yaml"), "--dry-run"])
    assert result.exit_code == 1 and re.search(message, " ".join(result.output.split()))


# ---- samples


@pytest.mark.parametrize("kind", KINDS)
def test_samples_over_heads(folder: Path, trained: Any, tmp_path: Path, kind: str) -> None:
    """k samples per problem, one head at a time; numbers from the file against a loop; base and heads stay."""
    heads = [folder / kind / f"trained_{head}" for head in (0, 1)]
    files = [folder / "policy" / "model.safetensors", *(h / "adapter_model.safetensors" for h in heads)]
    before = [f.read_bytes() for f in files]
    command = ["heads", "sample", folder / "run.yaml", *heads, "--k", 3, "--limit", 7, "--batch", 4]
    command += ["--reward", "text_score", "--threshold", 0.4]
    text = call(*command, "--out", tmp_path / "a")
    assert [f.read_bytes() for f in files] == before
    lines = [json.loads(line) for line in (tmp_path / "a" / "samples.jsonl").read_text().splitlines()]
    made: dict[tuple[str, int], int] = {}
    tokens: dict[int, list[list[int]]] = {}
    solved: dict[int, list[bool]] = {}
    for line in lines:
        assert len(line["problems"]) <= 4
        for problem, ids, reward in zip(line["problems"], line["tokens"], line["rewards"], strict=True):
            made[line["head"], problem] = made.get((line["head"], problem), 0) + 1
            tokens.setdefault(problem, []).append(ids)
            solved.setdefault(problem, []).append(reward >= 0.4)
    for problem in range(7):
        assert [made.get((f"trained_{h}", problem), 0) for h in (0, 1)] == shares(3, 2, problem)
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["pass"] == pytest.approx(sum(map(any, solved.values())) / 7)
    assert summary["tokens"] == sum(len(s) for many in tokens.values() for s in many)
    assert summary["pdc"] == pytest.approx(sum(prefix_diversity(tokens[p]) for p in range(7)) / 7)
    rows = load_dataset(str(tmp_path / "a" / "dataset"), split="test", cache_dir=str(tmp_path / "cache"))
    assert rows["solved"] == [sum(solved[p]) for p in range(7)] and len(set(rows["solved"])) > 1
    assert rows.remove_columns("solved").to_list() == build_dataset(40, seed=2, split="held_out").to_list()[:7]
    assert f"{summary['pass']:.3f}" in text and f"{summary['pdc']:.3f}" in text
    # a run that was cut off in the middle of a line goes on as if it had not been
    whole = (tmp_path / "a" / "samples.jsonl").read_bytes()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / ".rl-plugins-heads").touch()
    (tmp_path / "b" / "samples.jsonl").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "b" / "settings.json").write_text((tmp_path / "a" / "settings.json").read_text())
    call(*command, "--out", tmp_path / "b")
    assert (tmp_path / "b" / "samples.jsonl").read_bytes() == whole
    message = call(*command, "--out", tmp_path / "b", "--seed", 1, status=2)
    assert "holds samples with another seed (0, now 1)" in message


def test_the_model_alone_is_sampled_as_it_would_be(folder: Path, tmp_path: Path) -> None:
    """Token for token those of the sampler with the same seed."""
    from rl_plugins.commands.heads.sampling import ALONE, _seed
    from rl_plugins.trl.commands.head_samples import Sampler, SamplingRun

    call("heads", "sample", folder / "run.yaml", "--k", 2, "--limit", 2, "--out", tmp_path, "--reward", "exact")
    (line,) = [json.loads(x) for x in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert line["problems"] == [0, 0, 1, 1] and line["head"] == ALONE
    sampler = Sampler(SamplingRun.of(folder / "run.yaml", "test"), {})
    prompts = [build_dataset(40, seed=2, split="held_out")[i]["prompt"] for i in (0, 0, 1, 1)]
    assert sampler.sample(ALONE, prompts, _seed(0, ALONE, 0)) == line["tokens"]


def test_weights_stay_while_heads_take_turns(folder: Path, trained: Any) -> None:
    from rl_plugins.trl.commands.head_samples import Sampler, SamplingRun

    names = {f"head_{h}": folder / "lora" / f"trained_{h}" for h in (0, 1)}
    sampler = Sampler(SamplingRun.of(folder / "run.yaml", "test"), names)
    before = {n: p.detach().clone() for n, p in sampler.model.named_parameters()}
    prompt = [build_dataset(1, seed=2)[0]["prompt"]]
    for name in ("head_0", "head_1", "head_0"):
        sampler.sample(name, prompt, 0)
        assert sampler.model.active_adapters == [name]
    assert all(torch.equal(p, before[n]) for n, p in sampler.model.named_parameters())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere is no folder of an adapter"),
        (["lora/trained_0", "prompt_tuning/trained_1"], "are adapters of different kinds \\(LORA and PROMPT_TUNING\\)"),
        (["lora/trained_0", "prefix_tuning/../lora/trained_0"], "two heads have the name trained_0"),
        (["other"], "was trained on elsewhere, and the config names the model"),
        (["--reward", "nothing"], "--reward nothing is none of exact, text_score"),
        (["--split", "other"], "other"),
    ],
)
def test_what_is_not_sampled(folder: Path, trained: Any, tmp_path: Path, words: list[str], message: str) -> None:
    if words == ["other"]:
        (folder / "other").mkdir()
        config = json.loads((folder / "lora" / "trained_0" / "adapter_config.json").read_text())
        (folder / "other" / "adapter_config.json").write_text(
            json.dumps({**config, "base_model_name_or_path": "elsewhere"})
        )
    heads = [str(folder / w) if not w.startswith("-") and "--" not in "".join(words) else w for w in words]
    assert re.search(message, call("heads", "sample", folder / "run.yaml", *heads, "--out", tmp_path / "x", status=2))
