"""What the trainer of masked diffusion models refuses, each with its reason and what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from async_runs import make_async
from harness import make, policy
from masked_runs import make_masked, masked_policy
from messages import raises
from transformers import ProcessorMixin

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.lab.demo.masked_policy import build_model, build_tokenizer
from rl_plugins.trl import GRPOConfig
from rl_plugins.trl.masked import MaskedGRPOTrainer

pytestmark = pytest.mark.host

CALCULATOR = {"aepo_rollout": {"environment": "rl_plugins.lab.demo.environments:Calculator"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("masked")


def test_a_causal_model_is_refused(folder: Path) -> None:
    causal = str(policy(folder / "policy"))
    with raises(ConfigError, match="causal"):
        make_masked(folder, ["mdlm"], mask_token_id=6, more={"model": causal})


def test_a_tokenizer_without_a_mask_is_refused(folder: Path) -> None:
    from rl_plugins.lab.demo.policy import build_tokenizer as without_mask

    with raises(ConfigError, match="mask_token_id"):
        make_masked(folder, more={"processing_class": without_mask()})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(use_vllm=True), "vLLM decodes from left to right"),
        (dict(top_k=5), "whole distribution"),
        (dict(generation_kwargs={"top_p": 0.5}), "`generate`"),
        (dict(mask_truncated_completions=True), "same length"),
        (dict(step_weight="equal"), "logprobs_from='trajectory'"),
        (dict(recompute_states=True), "logprobs_from='trajectory'"),
        (dict(logprobs_from="both"), "one_step.*trajectory"),
        (dict(unmasking="random"), "allowed: uniform, ascending"),
        (dict(diffusion_steps=15), "14 or fewer"),
        (dict(methods=["ass"], diffusion_steps=5), "has 3"),
        (dict(methods=["ass"], method_params={"ass": {"blocks": 4}}), "1.*3"),
        (dict(methods=["mdlm", "april"]), "continues no text"),
        (
            dict(
                methods=["mdlm", "turn_control"],
                method_params={"turn_control": {"environment": "rl_plugins.lab.demo.environments:Grid"}},
            ),
            "continues no",
        ),
        (dict(methods=["mdlm", "rollout_replay"]), "without the order in which"),
        (dict(methods=["mdlm", "forcing"]), "without the order in which"),
        (dict(methods=["mdlm", "probing"]), "generates in rounds"),
        (dict(methods=["mdlm", "ppo"]), "step_weight='tokens'"),
        (dict(methods=["cj_grpo", "minpro"], temperature=0.7, num_iterations=2), "temperature=0.7"),
        (dict(methods=["ass", "minpro"], num_iterations=2), "no log-probs of what was sampled"),
        (dict(methods=["cj_grpo", "minpro"], guidance=0.5, num_iterations=2), "guidance=0.5"),
        (dict(methods=["cj_grpo", "minpro"], remasking="random", num_iterations=2), "remasking=random"),
        (
            dict(methods=["mdlm", "aepo_rollout"], method_params=CALCULATOR),
            "keeps no top log-probs",
        ),
        (dict(methods=["mdlm", "squares"]), "this sum is not"),
        (dict(methods=["mdlm", "corridor"]), "`corridor`.*`regularize`.*step_weight='tokens'"),
        (dict(methods=["mdlm", "softmax"]), "`softmax`.*`before_update`.*step_weight='tokens'"),
        (dict(methods=["mdlm"], top_entropy_quantile=0.5), "top_entropy_quantile=0.5.*step_weight='tokens'"),
        (dict(methods=["mdlm"], loss_type="vespo"), "loss_type='vespo' .*Set step_weight='tokens'"),
        (dict(methods=["mdlm"], diffusion_steps=4), "`steps` is 4"),
        (dict(prompt_masking=1.0), "0.*1"),
        (dict(step_weight="alike"), "allowed are tokens and equal"),
        (dict(remasking="never"), "allowed: confidence, random"),
        (dict(end_confidence_index="both"), "allowed: decoding, block"),
        (dict(guidance=-1.0), "`guidance`.*-1.0"),
        (dict(use_transformers_continuous_batching=True), "decodes from left to right"),
        (dict(cache_implementation="static"), "no keys and values"),
        (dict(top_p=0.9), "whole distribution"),
        (dict(min_p=0.1), "whole distribution"),
        (dict(repetition_penalty=1.1), "whole distribution"),
        (dict(cast_lm_head_to_fp32=True), "in float32 from the logits"),
        (dict(use_liger_kernel=True), "replaces the forward pass"),
    ],
    ids=lambda x: ",".join(f"{k}={v}" for k, v in x.items()) if isinstance(x, dict) else None,
)
def test_options_and_methods_that_do_not_fit(options: dict[str, Any], text: str, folder: Path) -> None:
    with raises(ConfigError, match=text):
        make_masked(folder, **options)


@pytest.mark.parametrize(
    "more",
    [dict(tools=[print]), dict(rollout_func=lambda prompts, trainer: {}), dict(environment_factory=object)],
    ids=["tools", "rollout_func", "environment_factory"],
)
def test_what_continues_an_answer_is_refused(more: dict[str, Any], folder: Path) -> None:
    with raises(ConfigError, match="whole"):
        make_masked(folder, more=more)


def test_completions_without_their_steps_are_refused(folder: Path) -> None:
    trainer = make_masked(folder, ["mdlm", "prefixed"])
    with raises(MethodError, match="unmasked"):
        trainer.train()


def test_tokens_that_leave_an_answer_are_refused_where_steps_are_weighed(folder: Path) -> None:
    trainer = make_masked(folder, ["mdlm", "thinned"])
    with raises(MethodError, match="step_weight='tokens'"):
        trainer.train()
    params = {"cj_grpo": {"step_weight": "tokens"}}
    make_masked(folder, ["mdlm", "thinned"], method_params=params, max_steps=1).train()


def test_images_and_experts_are_refused(folder: Path) -> None:
    """A mixture of experts with its auxiliary loss, and a processor that holds more than a tokenizer."""
    model = build_model(0)
    model.config.image_token_id = 3
    model.config.output_router_logits, model.config.router_aux_loss_coef = False, 0.1
    with raises(ConfigError, match="experts"):
        make_masked(folder, more={"model": model, "processing_class": build_tokenizer()})

    class Images(ProcessorMixin):
        tokenizer = build_tokenizer()

        def __init__(self) -> None:
            self.chat_template = self.tokenizer.chat_template

    with raises(ConfigError, match="images"):
        make_masked(folder, more={"model": model, "processing_class": Images()})


def test_the_config_of_the_trainer_is_its_own(folder: Path) -> None:
    args = GRPOConfig(str(folder / "x"), use_cpu=True, bf16=False)
    with raises(ConfigError, match="MaskedGRPOConfig"):
        MaskedGRPOTrainer(model=str(masked_policy(folder / "masked-policy")), args=args)


def test_other_trainers_name_this_one(folder: Path) -> None:
    for name in ("mdlm", "ass", "eoser", "cj_grpo"):
        with raises(ConfigError, match=r"MaskedGRPOTrainer.*rl_plugins\.trl\.masked"):
            make(folder, [name])
    with raises(ConfigError, match=r"MaskedGRPOTrainer.*rl_plugins\.trl\.masked"):
        make_async(folder, ["mdlm"])
