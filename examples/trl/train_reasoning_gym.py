"""GRPO with methods on tasks of reasoning-gym: LoRA, two rewards, a trace, and the held-out accuracy before and after.

    python train_reasoning_gym.py                                      sized for a GPU with 16 GB; needs the hub
    python train_reasoning_gym.py --methods vade gdpo                  other methods; --methods '': plain GRPO
    python train_reasoning_gym.py --model_name_or_path my-folder --max_steps 50 --learning_rate 5e-5
    rl-plugins inspect reasoning-gym-run                               what happened to each rollout, and why

Every option of TRL's GRPOConfig and ModelConfig can be given, in a file, too (`--config`). `reasoning_gym.yaml` is the
same run without a script. Methods and their options: `rl-plugins list`, `rl-plugins info gdpo`.

Needs: pip install ".[trl]" reasoning-gym drawsvg
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from datasets import Dataset
from reasoning_gym_data import TASKS
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from rl_plugins.environments.reasoning_gym import brief, solved, split
from rl_plugins.trl import GRPOConfig, GRPOTrainer  # instead of `from trl import ...`

DEFAULTS = {
    "methods": ["gdpo"],  # the one line
    "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
    "use_peft": True,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_target_modules": ["all-linear"],
    "output_dir": "reasoning-gym-run",
    "reward_weights": [1.0, 0.5],  # solved, brief
    "num_generations": 8,
    "per_device_train_batch_size": 16,  # x 4: a step has 64 rollouts, 8 prompts x 8
    "gradient_accumulation_steps": 4,
    "per_device_eval_batch_size": 32,
    "num_generations_eval": 1,
    "max_completion_length": 64,
    "max_steps": 100,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 5,
    "loss_type": "dapo",
    "beta": 0.0,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "trace": "true",
}


@dataclass
class DataArguments:
    """How many questions.

    Args:
        train_rows: to train on.
        held_out_rows: for the accuracy before and after.
    """

    train_rows: int = field(default=2000, metadata={"help": "Questions to train on."})
    held_out_rows: int = field(default=200, metadata={"help": "Questions for the accuracy before and after."})


def main(data: DataArguments, args: GRPOConfig, model: ModelConfig) -> None:
    train, test = split(TASKS, data.train_rows, data.held_out_rows)
    args.model_init_kwargs = {
        "dtype": model.dtype or ("bfloat16" if args.bf16 else "float32"),
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "quantization_config": get_quantization_config(model),
        **(args.model_init_kwargs or {}),
    }
    trainer = GRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=[solved, brief],
        args=args,
        train_dataset=Dataset.from_list(train),
        eval_dataset=Dataset.from_list(test),
        peft_config=get_peft_config(model),
    )
    before = trainer.evaluate()
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    after = trainer.evaluate()
    trainer.save_model()
    for when, values in (("before", before), ("after", after)):
        print(f"held-out accuracy {when}: {values['eval_rewards/solved/mean']:.3f} of {len(test)} questions")


if __name__ == "__main__":
    parser = TrlParser((DataArguments, GRPOConfig, ModelConfig), description=__doc__)
    gpu = torch.cuda.is_available()
    fast = gpu and torch.cuda.is_bf16_supported(including_emulation=False)  # a T4 has fp16 only
    parser.set_defaults_with_config(**DEFAULTS, bf16=fast, fp16=gpu and not fast, use_cpu=not gpu)
    main(*parser.parse_args_and_config())
