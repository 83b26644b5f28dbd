"""Samples of a policy and of adapters on it, as a run of `trl grpo` would make them: without a trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.rollouts import RewardFunction, Run
from rl_plugins.tools.heads import positions_by_mask
from rl_plugins.trl.commands.offline import OfflineRun


@dataclass(frozen=True)
class SamplingRun:
    """What a config of `trl grpo` says of sampling.

    Args:
        run: dataset and reward functions.
        model: name or folder of the model.
        options: of TRL's script for the model.
        generation: options of `generate`.
    """

    run: Run
    model: str
    options: Mapping[str, Any]
    generation: Mapping[str, Any]

    @classmethod
    def of(cls, config: Path, split: str) -> SamplingRun:
        """
        Raises:
            ConfigError: the config, the dataset or a reward function cannot be had.
        """
        return cls.of_offline(OfflineRun.of(["--config", str(config), "--dataset_train_split", split]))

    @classmethod
    def of_offline(cls, offline: OfflineRun) -> SamplingRun:
        """As `of`, from the whole config."""
        args, model_args = offline.known.args, offline.model
        if not model_args.model_name_or_path:
            raise ConfigError("The config names no model. Set model_name_or_path.")
        generation = {
            "max_new_tokens": args.max_completion_length,
            "temperature": args.temperature,
            "top_p": args.top_p,
            "top_k": args.top_k,
            "min_p": args.min_p,
            "repetition_penalty": args.repetition_penalty,
            **(args.generation_kwargs or {}),
        }
        options = {
            "revision": model_args.model_revision,
            "dtype": model_args.dtype,
            "attn_implementation": model_args.attn_implementation,
            "trust_remote_code": args.trust_remote_code,
            **(args.model_init_kwargs or {}),
        }
        return cls(offline.run, model_args.model_name_or_path, options, generation)

    def scored_by(self, name: str) -> list[RewardFunction]:
        """The reward functions that say what is solved: one by name, or all of them with their weights.

        Raises:
            ConfigError: there is no such function, or one cannot be called here.
        """
        known = [f.name for f in self.run.reward_functions]
        if name:
            found = [f for f in self.run.reward_functions if f.name == name]
            if not found:
                unreachable = dict(self.run.unreachable_rewards).get(name)
                why = f"cannot be called here: {unreachable}" if unreachable else f"is none of {', '.join(known)}"
                raise ConfigError(f"--reward {name} {why}. Name another reward function of the config.")
            return [RewardFunction(name, 1.0, found[0].call, found[0].source)]
        for other, why in self.run.unreachable_rewards:
            raise ConfigError(
                f"the reward function `{other}` cannot be called here: {why}. Name the one that says what is solved: "
                f"--reward {known[0] if known else 'NAME'}"
            )
        return list(self.run.reward_functions)


class Sampler:
    """A model with adapters, one of which is on at a time.

    Args:
        adapters: name -> folder, all of one kind and of this model; empty: the model alone.

    Raises:
        ConfigError: an adapter that cannot be read, or is of another model or kind than the others.
    """

    def __init__(self, sampling: SamplingRun, adapters: Mapping[str, Path]) -> None:
        _check_adapters(sampling.model, adapters)
        options = dict(sampling.options)
        revision = {name: options[name] for name in ("revision", "trust_remote_code")}
        self.tokenizer = AutoTokenizer.from_pretrained(sampling.model, padding_side="left", **revision)
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        model = AutoModelForCausalLM.from_pretrained(sampling.model, **options)
        for name, folder in adapters.items():
            from peft import PeftModel

            if isinstance(model, PeftModel):
                model.load_adapter(str(folder), adapter_name=name)
            else:
                model = PeftModel.from_pretrained(model, str(folder), adapter_name=name)
        positions_by_mask(model)
        self.model: Any = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        self.adapters = list(adapters)
        self.config = GenerationConfig(
            do_sample=True,
            pad_token_id=self.tokenizer.pad_token_id,
            bos_token_id=self.tokenizer.bos_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
            **sampling.generation,
        )

    def encode(self, prompts: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Prompts as the model reads them: token ids and mask, padded on the left."""
        texts = [
            prompt
            if isinstance(prompt, str)
            else self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
            for prompt in prompts
        ]
        inputs = self.tokenizer(
            texts, return_tensors="pt", padding=True, add_special_tokens=isinstance(prompts[0], str)
        )
        return {k: v.to(self.model.device) for k, v in inputs.items() if k in ("input_ids", "attention_mask")}

    def sample(self, adapter: str, prompts: Sequence[Any], seed: int) -> list[list[int]]:
        """One sample for each of these prompts: its token ids, the end token included. Global generators stay as they
        were."""
        inputs = self.encode(prompts)
        if adapter in self.adapters:
            self.model.set_adapter(adapter)
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            made = self.model.generate(**inputs, generation_config=self.config)[:, inputs["input_ids"].shape[1] :]
        end = self.tokenizer.eos_token_id
        found = []
        for row in made.tolist():
            found.append(row[: row.index(end) + 1] if end in row else row)
        return found

    def texts(self, samples: Sequence[Sequence[int]]) -> list[str]:
        """Samples as the reward functions get them."""
        return list(self.tokenizer.batch_decode([list(s) for s in samples], skip_special_tokens=True))


def _check_adapters(model: str, adapters: Mapping[str, Path]) -> None:
    if not adapters:
        return
    from peft import PeftConfig

    kinds: dict[str, str] = {}
    for name, folder in adapters.items():
        try:
            config = PeftConfig.from_pretrained(str(folder))
        except Exception as e:  # of PEFT or the hub
            raise ConfigError(
                f"{folder} is no folder of an adapter ({type(e).__name__}). Give the output_dir of a run with use_peft."
            ) from None
        base = str(config.base_model_name_or_path)
        if base != model and Path(base).resolve() != Path(model).resolve():
            raise ConfigError(
                f"the adapter {folder} was trained on {base}, and the config names the model {model}. Heads share one "
                f"model. Give heads of that model, or a config with model_name_or_path: {base}."
            )
        kinds.setdefault(str(config.peft_type.value), name)
    if len(kinds) > 1:
        (a, first), (b, second) = list(kinds.items())[:2]
        raise ConfigError(
            f"the heads `{first}` and `{second}` are adapters of different kinds ({a} and {b}), and PEFT puts only one "
            f"kind on a model. Sample over heads of one kind."
        )
