"""The dry run of `rl-plugins trl grpo` tells what TRL would refuse while it builds a run, and flags without effect."""

import importlib.util
import os
from types import SimpleNamespace as NS

import pytest
import yaml

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

from transformers.training_args import OptimizerNames

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
    "a reward of TRL that it has not": ("`digits`", {"reward_funcs": ["digits"]}),
    "a reward that cannot be imported": ("nowhere.reward", {"reward_funcs": ["nowhere.reward"]}),
    "flash attention": ("flash", {"attn_implementation": "flash_attention_2"}),
    "flash attention in other options": ("flash", {"model_init_kwargs": {"attn_implementation": "flash_attention_3"}}),
    "attention misspelled": ("`sdpa`", {"attn_implementation": "spda"}),
    "8-bit optimizer": ("bitsandbytes", {"optim": "paged_adamw_8bit"}),
    "another package's optimizer": ("apex", {"optim": "adamw_apex_fused"}),
    "a schedule-free optimizer": ("schedulefree", {"optim": "schedule_free_adamw"}),
    "4-bit model": ("bitsandbytes", {"load_in_4bit": True}),
    "a tracker that is not here": ("comet_ml", {"report_to": "comet_ml"}),
    "a tracker misspelled": ("wandbb", {"report_to": ["wandbb"]}),
    "a model that is not there": ("/no/such/model", {"model_name_or_path": "/no/such/model"}),
    "a loss that TRL has not": ("loss_type", {"loss_type": "grppo", "methods": []}),
    "a stream without an end": ("max_steps", {"dataset_streaming": True, "max_steps": -1, "methods": []}),
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
    "a stream with an end": {"dataset_streaming": True, "methods": []},
}


@pytest.mark.parametrize("name", GOOD)
def test_nothing_is_told_of_a_run_that_begins(problems, name):
    assert problems(**GOOD[name]) == []


def config(args=None, script=None, model=None, **more):
    """What the rules look at, without a run."""
    own = {"use_cpu": True, "bf16": False, "report_to": "none", "gradient_checkpointing": False}
    script = {"reward_funcs": [DIGITS], "reward_model_name_or_path": None, "dataset_streaming": False, **(script or {})}
    kind = {"use_peft": False, "load_in_4bit": False, "load_in_8bit": False}
    of_model = {"model_name_or_path": "someone/model", "attn_implementation": None, **kind, **(model or {})}
    made = host_config.GRPOConfig(output_dir="out", **own)
    for name, value in (args or {}).items():
        setattr(made, name, value)
    data = NS(streaming=False, datasets=None)
    return host_config.HostConfig(made, NS(**script), NS(**of_model), data, **more)


MASK = {"vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_correction": True}
VESPO = {"loss_type": "vespo", "use_vllm": True, **MASK}
DISPATCH = {"accelerator_config": NS(dispatch_batches=True), "max_steps": 2}
ZERO = {"deepspeed": "zero.json"}
# What is refused on every machine, with what is taken beside it.
RULES = {
    "no model": ("model_name_or_path", {"model": {"model_name_or_path": None}}, {}),
    "no reward": ("no reward", {"script": {"reward_funcs": None}},
                  {"script": {"reward_funcs": None, "reward_model_name_or_path": "someone/judge"}}),
    "weights": ("reward_weights", {"args": {"reward_weights": [1.0, 2.0]}}, {"args": {"reward_weights": [1.0]}}),
    "scale": ("scale_rewards", {"args": {"scale_rewards": "rows"}}, {"args": {"scale_rewards": "none"}}),
    "sum": ("multi_objective_aggregation", {"args": {"multi_objective_aggregation": "max"}}, {}),
    "level": ("importance_sampling_level", {"args": {"importance_sampling_level": "turn"}}, {}),
    "mode": ("vllm_importance_sampling_mode", {"args": {"vllm_importance_sampling_mode": "clip"}}, {"args": MASK}),
    "loss": ("loss_type", {"args": {"loss_type": "grppo"}}, {"args": {"loss_type": "sapo"}}),
    "early evaluation": ("eval_on_start", {"args": {"eval_on_start": True}},
                         {"args": {"eval_on_start": True, "eval_strategy": "steps"}}),
    "best of nothing": ("metric_for_best_model", {"args": {"save_strategy": "best"}},
                        {"args": {"save_strategy": "best", "metric_for_best_model": "reward"}}),
    "no reference": ("beta", {"args": {"sync_ref_model": True, "beta": 0.0}},
                     {"args": {"sync_ref_model": True, "beta": 0.1}}),
    "reference of adapters": ("use_peft", {"args": {"sync_ref_model": True, "beta": 0.1}, "model": {"use_peft": True}},
                              {"model": {"use_peft": True}}),
    "vespo": ("vespo", {"args": VESPO}, {"args": {**VESPO, "vllm_importance_sampling_mode": "token_mask"}}),
    "vespo without vLLM": ("vespo", {"args": VESPO}, {"args": {**VESPO, "use_vllm": False}}),
    "vespo alone": ("vespo", {"args": VESPO}, {"args": {**VESPO, "vllm_importance_sampling_correction": False}}),
    "another loss": ("vespo", {"args": VESPO}, {"args": {**VESPO, "loss_type": "grpo"}}),
    "endless": ("max_steps", {"script": {"dataset_streaming": True}}, {"args": {"max_steps": -1}}),
    "no steps": ("max_steps", {"args": {"max_steps": 0}, "script": {"dataset_streaming": True}},
                 {"args": {"max_steps": 1}, "script": {"dataset_streaming": True}}),
    "dispatched": ("dispatch_batches", {"args": DISPATCH, "script": {"dataset_streaming": True}}, {"args": DISPATCH}),
    "liger": ("fused_linear_cross_entropy", {
        "args": {"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": True}}},
        {"args": {"use_liger_kernel": True, "liger_kernel_config": {"rope": True}}}),
    "liger is off": ("fused_linear_cross_entropy", {
        "args": {"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": True}}},
        {"args": {"liger_kernel_config": {"fused_linear_cross_entropy": True}}}),
    "4 bits twice": ("quantization_config", {
        "args": {"model_init_kwargs": {"quantization_config": {}}}, "model": {"load_in_4bit": True}},
        {"model": {"load_in_4bit": True}}),
    "8 bits twice": ("quantization_config", {
        "args": {"model_init_kwargs": {"quantization_config": {}}}, "model": {"load_in_8bit": True}},
        {"args": {"model_init_kwargs": {"quantization_config": {}}}}),
    "two kinds of shards": ("deepspeed", {"args": {"fsdp": ["full_shard"]}, "deepspeed": True, "processes": 2},
                            {"args": {"fsdp": ["full_shard"]}, "processes": 2}),
    "two kinds of shards in the config": ("deepspeed", {"args": {"fsdp": ["full_shard"], **ZERO}, "processes": 2},
                                          {"args": ZERO, "processes": 2}),
    "one shard": ("fsdp", {"args": {"fsdp": ["full_shard"]}}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_what_no_machine_would_run_is_told_once(name):
    word, bad, good = RULES[name]
    (told,) = host_config.problems(config(**bad))
    assert word in told and list(host_config.problems(config(**good))) == []


PATH = "/no/such/folder"
ATTENTION = {"attn_implementation": "eager", "model_name_or_path": "/"}
OF_8_BITS = {"optim": OptimizerNames("adamw_8bit")}
MISSING = {
    "vLLM": ("vllm", {"args": {"use_vllm": True}}),
    "DeepSpeed of accelerate": ("deepspeed", {"args": OF_8_BITS, "deepspeed": True}),  # it may have its own optimizer
    "DeepSpeed": ("deepspeed", {"args": {**OF_8_BITS, **ZERO}}),
    "liger": ("liger_kernel", {"args": {"use_liger_kernel": True}}),
    "adapters": ("peft", {"model": {"use_peft": True}}),
    "8 bits": ("bitsandbytes", {"model": {"load_in_8bit": True}}),
    "a kernel": ("kernels", {"model": {"attn_implementation": "someone/attention"}}),
    "a right answer": ("math_verify", {"script": {"reward_funcs": ["accuracy_reward"]}}),
    "a reward model": ("reward_model_name_or_path", {"script": {"reward_model_name_or_path": PATH}}),
    "a folder beside": ("model_name_or_path", {"model": {"model_name_or_path": "./nowhere"}}),
    "a checkpoint": ("resume_from_checkpoint", {"args": {"resume_from_checkpoint": PATH}}),
    "an optimizer": ("adamw_8bit", {"args": OF_8_BITS}),
}


@pytest.mark.parametrize("name", MISSING)
def test_what_this_machine_has_not_is_told_once(name, monkeypatch):
    """As if it had no package that is asked for, and then as if it had all of them."""
    found = importlib.util.find_spec
    absent = {module for _, _, module, _ in host_config.PACKAGES}
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name in absent else found(name, *rest))
    word, bad = MISSING[name]
    (told,) = host_config.missing(config(**bad))
    assert word in told
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: name in absent or found(name, *rest))
    for checkpoint in ("true", "/"):
        there = bad if word in absent else {"args": {"resume_from_checkpoint": checkpoint}, "model": ATTENTION}
        assert list(host_config.missing(config(**there))) == []


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
    methods, more = ["vade", "linear_ts", "minpro", "vadee"], ("`minpro` needs", "reward_weights")
    for others, words in [({"reward_weights": [1.0]}, more), ({"num_generations": 3}, ("num_generations",))]:
        told = "\n".join(problems(methods=methods, **others))
        for word in ("vadee", "`column`", "`vade` and `linear_ts`", *words):
            assert word in told


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
