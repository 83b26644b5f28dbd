"""The dry run of `rl-plugins trl grpo` tells what TRL would refuse while it builds a run, and flags without effect."""

import os

import pytest
import yaml

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

from rl_plugins.lab.demo.trl_data import write
from rl_plugins.trl.commands import host_config
from rl_plugins.trl.commands.doctor import print_run

DIGITS, FORMAT = "rl_plugins.lab.demo.rewards.digits", "rl_plugins.lab.demo.rewards.format"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dry")
    write(folder / "laptop")
    return folder


@pytest.fixture
def problems(folder, monkeypatch):
    """Problems of a run, options of the command line as well as of the config."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", str(folder / "none.yaml"))

    def told(*words, world_size=None, **options):
        config = {
            "model_name_or_path": str(folder / "laptop/policy"), "dataset_name": str(folder / "laptop/data"),
            "output_dir": str(folder / "out"), "reward_funcs": [DIGITS, FORMAT], "use_cpu": True, "bf16": False,
            "max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 14,
            "save_strategy": "no", "report_to": "none", "gradient_checkpointing": False, "methods": ["vade"],
        }  # fmt: skip
        (folder / "run.yaml").write_text(yaml.safe_dump({**config, **options}))
        return print_run(["--config", str(folder / "run.yaml"), *words], world_size)

    return told


# What is here in no test environment: packages that nothing of ours uses.
BAD = {
    "no such split": ("validation", {"eval_strategy": "steps", "eval_steps": 1, "dataset_test_split": "validation"}),
    "no such training split": ("has no split train2", {"dataset_train_split": "train2"}),
    "too few weights": ("reward_weights", {"reward_weights": [1.0]}),
    "too many weights": ("reward_weights", {"reward_weights": [1.0, 1.0, 1.0]}),
    "no reward": ("no reward", {"reward_funcs": []}),
    "a reward of TRL that it has not": ("`digits`", {"reward_funcs": ["digits"]}),
    "a reward that cannot be imported": ("nowhere.reward", {"reward_funcs": ["nowhere.reward"]}),
    "flash attention": ("flash", {"attn_implementation": "flash_attention_2"}),
    "flash attention in other options": ("flash", {"model_init_kwargs": {"attn_implementation": "flash_attention_3"}}),
    "a kernel of the Hub": ("kernels", {"attn_implementation": "kernels-community/flash-attn"}),
    "attention misspelled": ("`sdpa`", {"attn_implementation": "spda"}),
    "8-bit optimizer": ("bitsandbytes", {"optim": "paged_adamw_8bit"}),
    "another package's optimizer": ("apex", {"optim": "adamw_apex_fused"}),
    "a schedule-free optimizer": ("schedulefree", {"optim": "schedule_free_adamw"}),
    "4-bit model": ("bitsandbytes", {"load_in_4bit": True}),
    "a tracker that is not here": ("comet_ml", {"report_to": "comet_ml"}),
    "a tracker misspelled": ("wandbb", {"report_to": ["wandbb"]}),
    "a model that is not there": ("/no/such/model", {"model_name_or_path": "/no/such/model"}),
    "a checkpoint that is not there": ("checkpoint-7", {"resume_from_checkpoint": "out/checkpoint-7"}),
    "a loss that TRL has not": ("loss_type", {"loss_type": "grppo", "methods": []}),
    "a scale that TRL has not": ("scale_rewards", {"scale_rewards": "rows"}),
    "evaluation at the start, without data": ("eval_on_start", {"eval_on_start": True}),
    "the best checkpoint by nothing": ("metric_for_best_model", {
        "save_strategy": "best", "eval_strategy": "steps", "eval_steps": 1, "dataset_test_split": "train"}),
    "a reference that does not exist": ("sync_ref_model", {"sync_ref_model": True}),
    "a stream without an end": ("max_steps", {"dataset_streaming": True, "max_steps": -1, "methods": []}),
    "shards of one process": ("fsdp", {"fsdp": "full_shard"}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_would_end_the_run_is_told(problems, name):
    word, options = BAD[name]
    assert any(word in text for text in problems(**options)), problems(**options)


GOOD = {
    "nothing special": {},
    "a split that is there": {"eval_strategy": "steps", "eval_steps": 1, "dataset_test_split": "train"},
    "a weight for each reward": {"reward_weights": [1.0, 0.5]},
    "attention of torch": {"attn_implementation": "eager"},
    "an optimizer of torch": {"optim": "adamw_torch"},
    "a tracker that is here": {"report_to": "tensorboard"},
    "a reference": {"sync_ref_model": True, "beta": 0.1},
    "a stream with an end": {"dataset_streaming": True, "methods": []},
}


@pytest.mark.parametrize("name", GOOD)
def test_nothing_is_told_of_a_run_that_begins(problems, name):
    assert problems(**GOOD[name]) == []


def test_each_rule_is_in_the_table():
    rules = {f for name, f in vars(host_config).items() if name.startswith("_") and callable(f)}
    assert rules == {*host_config.MISSING, *host_config.REFUSED}


def test_all_problems_come_at_once(problems):
    """Unknown keys and options, names of methods, parameters, packages and values: in one report."""
    told = "\n".join(
        problems(
            "--num_generatoins", "4", "--num_processes", "4", methods=["vadee", "gdpoo"], max_prompt_length=64,
            vllm_device="auto", reward_weights=[1.0], optim="adamw_8bit", dataset_train_split="tests", use_cpu=False,
        )
    )  # fmt: skip
    for word in ("num_generatoins", "num_processes=4", "vadee", "gdpoo", "max_prompt_length", "vllm_device"):
        assert word in told
    for word in ("reward_weights", "bitsandbytes", "split tests"):
        assert word in told
    params = {"vade": {"scoer": 1}, "mc_grpo": {"mad_eps": -1}}
    told = "\n".join(problems(methods=["vade", "mc_grpo"], method_params=params))
    assert "scoer" in told and "mad_eps" in told


def test_what_another_machine_may_have_is_a_note(problems, capsys):
    options = {"attn_implementation": "flash_attention_2", "optim": "adamw_8bit", "report_to": "comet_ml"}
    assert problems("--num_processes", "4", world_size=4, **options, use_cpu=False, per_device_train_batch_size=4) == []
    text = capsys.readouterr().out
    assert all(word in text for word in ("flash-attn", "bitsandbytes", "comet_ml"))


@pytest.mark.parametrize(
    ("options", "idle"),
    [
        ({"methods": ["minpro"], "use_vllm": True}, "(minpro turns"),
        ({"methods": [], "use_vllm": True, "vllm_importance_sampling_correction": False}, "(the config turns"),
        ({}, "(use_vllm is off)"),
        ({"methods": ["vade"], "use_vllm": True}, ""),
    ],
)
def test_options_of_vllm_without_effect(problems, capsys, options, idle):
    """They are named where vLLM is not installed, too."""
    problems(**options, vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=2.0)
    text = next((line for line in capsys.readouterr().out.splitlines() if "without effect" in line), "")
    for option in ("vllm_importance_sampling_mode=token_truncate", "vllm_importance_sampling_clip_max=2.0"):
        assert (f"{option} {idle}" in text) == bool(idle)
