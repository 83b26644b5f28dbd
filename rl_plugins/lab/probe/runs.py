"""A run of TRL or of verl as far as a probe needs it: no trainer, no Ray."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.losses import TRL_AGGREGATION
from rl_plugins.core.rollouts import Run
from rl_plugins.lab.probe.candidates import HostBatch
from rl_plugins.runtime import registry
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.trl.commands.head_samples import Sampler, SamplingRun

VERL_SCALES = {"grpo": "group", "grpo_vectorized": "group", "rloo": "none", "rloo_vectorized": "none"}
POLICY = "policy"  # name of the adapter of a checkpoint


@dataclass(frozen=True)
class ProbedRun:
    """
    Args:
        sampling: dataset, rewards, model, and how it samples.
        host: what the run does without methods. methods, params: those of its config. seed: of the run.
        check: raises ConfigError where the run cannot use these methods.
        adapter: PEFT's config of what is trained; None: all parameters.
        trained: folder of an adapter of that kind, which is the policy; None: a new one.
        vllm: TRL's options of vLLM, if the run samples with it.
    """

    sampling: SamplingRun
    host: HostBatch
    methods: Sequence[str]
    params: Mapping[str, Mapping[str, Any]]
    seed: int
    check: Callable[[MethodStack], object]
    adapter: Any = None
    trained: Path | None = None
    vllm: Any = None

    @property
    def rows(self) -> Run:
        return self.sampling.run

    @classmethod
    def of(cls, words: Sequence[str]) -> ProbedRun:
        """
        Args:
            words: a YAML config of TRL and options behind it, or a command line of verl.

        Raises:
            ConfigError: what the run names cannot be had.
        """
        of_trl = bool(words) and Path(words[0]).is_file()
        if not of_trl and not any("=" in word for word in words):
            raise ConfigError(
                "Give the YAML config of a run of TRL, or the command line of a run of verl: rl-plugins probe run.yaml"
            )
        return cls._of_trl(["--config", *words]) if of_trl else cls._of_verl(words)

    @classmethod
    def _of_trl(cls, argv: Sequence[str]) -> ProbedRun:
        import trl

        from rl_plugins.trl import capabilities
        from rl_plugins.trl.commands.heads import peft_config_of
        from rl_plugins.trl.commands.offline import OfflineRun
        from rl_plugins.trl.compat import Seams

        offline = OfflineRun.of(argv)
        known, adapter = offline.known, peft_config_of(offline.model)
        if adapter is not None and offline.model.adapter != "lora":
            raise ConfigError("The run trains virtual tokens, which are no layer of the model. Take adapter: lora.")
        args, seams = known.args, Seams.of(trl.GRPOTrainer)
        scale: Any = str(args.scale_rewards)
        return cls(
            SamplingRun.of_offline(offline),
            HostBatch(args.num_generations, args.generation_batch_size, scale, args.loss_type),
            registry.parse_methods(args.methods),
            registry.parse_method_params(args.method_params),
            args.seed,
            lambda stack: capabilities.check(stack, known, seams),
            adapter,
            vllm=args if args.use_vllm else None,
        )

    @classmethod
    def _of_verl(cls, words: Sequence[str]) -> ProbedRun:
        from rl_plugins.verl import capabilities
        from rl_plugins.verl.config import Settings, compose, read_settings
        from rl_plugins.verl.doctor import read_command
        from rl_plugins.verl.offline import run_of

        config = compose(read_command(words))
        read, settings = capabilities.Reader(config), read_settings(config) or Settings(())
        estimator, model = str(read("algorithm.adv_estimator")), "actor_rollout_ref.model"
        if estimator not in VERL_SCALES:
            raise ConfigError(
                f"algorithm.adv_estimator={estimator} is given. A probe compares with {', '.join(VERL_SCALES)}: write "
                f"algorithm.adv_estimator=grpo."
            )
        scale: Any = VERL_SCALES[estimator] if read("algorithm.norm_adv_by_std_in_grpo", True) else "none"
        aggregation = read("actor_rollout_ref.actor.loss_agg_mode", "token-mean")
        loss = next((of_trl for of_trl, how in TRL_AGGREGATION.items() if how == aggregation), "dapo")
        names = ("temperature", "top_p", "top_k")
        generation = {name: read(f"actor_rollout_ref.rollout.{name}") for name in names}
        generation |= {"max_new_tokens": read("data.max_response_length"), "top_k": max(0, generation["top_k"])}
        trust = bool(read(f"{model}.trust_remote_code", False))
        options = {"revision": None, "dtype": "float32", "trust_remote_code": trust}
        trained = read(f"{model}.lora_adapter_path")
        return cls(
            SamplingRun(run_of(config), str(Path(str(read(f"{model}.path"))).expanduser()), options, generation),
            HostBatch(read.group_size, read.batch_rows, scale, loss),
            settings.methods,
            settings.method_params,
            settings.seed,
            lambda stack: capabilities.check(stack, settings, config),
            _lora_of_verl(read, model),
            None if trained is None else Path(str(trained)),
        )

    def at(self, checkpoint: Path) -> ProbedRun:
        """The run with the policy of a checkpoint: the folder of a model, or of an adapter that it trains.

        Raises:
            ConfigError: it is neither.
        """
        if (checkpoint / "adapter_config.json").is_file():
            return replace(self, trained=checkpoint)
        if not (checkpoint / "config.json").is_file():
            raise ConfigError(
                f"{checkpoint} has neither a model nor an adapter. Give a checkpoint that transformers saved."
            )
        return replace(self, sampling=replace(self.sampling, model=str(checkpoint)))

    def sampler(self) -> Sampler:
        """The policy, with gradients in what the run trains."""
        import torch

        sampler = Sampler(self.sampling, {} if self.trained is None else {POLICY: self.trained})
        if self.trained is not None:
            sampler.model.set_adapter(POLICY)  # it requires gradients from now on
        elif self.adapter is not None:
            from peft import get_peft_model

            with torch.random.fork_rng():
                torch.manual_seed(self.seed)
                sampler.model = get_peft_model(sampler.model, self.adapter)
        sampler.model.eval()
        return sampler


def _lora_of_verl(read: Callable[..., Any], model: str) -> Any:
    if not (rank := read(f"{model}.lora_rank", 0)):
        return None
    from peft import LoraConfig

    from rl_plugins.verl.config import plain_values

    names = ("lora_alpha", "target_modules", "exclude_modules")
    return LoraConfig(task_type="CAUSAL_LM", r=rank, **{n: plain_values(read(f"{model}.{n}")) for n in names})


def vllm_of(run: ProbedRun, sampler: Sampler) -> Any:
    """TRL's own way to vLLM with the options of the run, server or colocated, and the weights of the policy."""
    from accelerate import Accelerator
    from trl.generation.vllm_generation import VLLMGeneration

    _, *names = list(inspect.signature(VLLMGeneration).parameters)[2:]
    given = {n: getattr(run.vllm, option) for n in names for option in (n, f"vllm_{n}") if hasattr(run.vllm, option)}
    engine = VLLMGeneration(sampler.model, Accelerator(), sampler.tokenizer, **given)
    engine.sync_weights()
    return engine
