"""The rollout backend "hf_cpu": a transformers model in a Ray actor, and verl's two handles on it."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from typing import Any

import ray
import torch
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica
from verl.workers.rollout.utils import ensure_async_iterator

from rl_plugins.core.errors import ConfigError
from rl_plugins.runtime.cheap import PRECISIONS, CheapOptions
from rl_plugins.verl.config import end_tokens
from rl_plugins.verl.cpu import ROLLOUT
from rl_plugins.verl.cpu.decoder import Decoder
from rl_plugins.verl.cpu.server import Limits, Server


def check_config(config: Any) -> None:
    """Refuses what this backend cannot do.

    Raises:
        ConfigError: names the option.
    """
    for option, allowed in (
        ("tensor_model_parallel_size", 1),
        ("data_parallel_size", 1),
        ("pipeline_model_parallel_size", 1),
        ("full_determinism", False),
    ):
        if getattr(config, option) != allowed:
            raise ConfigError(
                f"actor_rollout_ref.rollout.{option} is {getattr(config, option)}, but with rollout.name={ROLLOUT} a "
                f"replica is one process with seeds of its own. Set actor_rollout_ref.rollout.{option}={allowed}."
            )

    if config.quantization not in (None, *PRECISIONS):
        raise ConfigError(
            f"actor_rollout_ref.rollout.quantization is {config.quantization}. With rollout.name={ROLLOUT} it must be "
            f"null or one of {', '.join(PRECISIONS)}: a copy of the model in this precision then decodes."
        )


def _actor_name(config: Any, replica_rank: int, suffix: str = "") -> str:
    return f"{config.name}_server_{replica_rank}_0{suffix}"


class ServerActor(Server):
    """A server that builds its model from verl's config, as a Ray actor does."""

    def __init__(self, config: Any, model_config: Any, replica_rank: int) -> None:
        """`engine_kwargs.hf_cpu.threads` is the number of threads the model computes with, 1 by default."""
        torch.set_num_threads(int((config.engine_kwargs.get(ROLLOUT) or {}).get("threads", 1)))
        model: HFModelConfig = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        limits = Limits(
            prompt_length=config.prompt_length,
            response_length=config.response_length,
            context=config.max_model_len or config.prompt_length + config.response_length,
            requests=config.max_num_seqs,
            ignore_eos=config.ignore_eos,
        )
        super().__init__(_build_decoder(config, model), limits, seed=config.seed + replica_rank)

    async def ready(self) -> bool:
        return True


def _build_decoder(config: Any, model: HFModelConfig) -> Decoder:
    from transformers import AutoModelForCausalLM

    options = {
        "dtype": getattr(torch, config.dtype),
        "attn_implementation": "sdpa",
        "trust_remote_code": model.trust_remote_code,
    }
    hf_config = copy.deepcopy(model.hf_config)
    if config.load_format == "dummy":  # the trainer sends the weights before the first request
        network = AutoModelForCausalLM.from_config(hf_config, **options)
    else:
        network = AutoModelForCausalLM.from_pretrained(model.local_path, config=hf_config, **options)
    cheap = None if config.quantization is None else CheapOptions(config.quantization)
    return Decoder(network.eval(), end_tokens(model), model.tokenizer, cheap)


class Replica(RolloutReplica):
    """verl's handle on one server: launches it and passes the control plane's calls on."""

    async def launch_servers(self) -> None:
        check_config(self.config)
        if self.is_reward_model or self.is_teacher_model:
            raise ConfigError(
                f"rollout.name={ROLLOUT} serves the policy only, but was named for a reward or teacher model. Use a "
                "reward function (reward.custom_reward_function) on a CPU."
            )
        actor: Any = ray.remote(ServerActor).options(
            name=_actor_name(self.config, self.replica_rank, self.name_suffix),
            num_cpus=0,
            max_concurrency=self.max_concurrency,
        )
        self.servers = [actor.remote(self.config, self.model_config, self.replica_rank)]
        await self.servers[0].ready.remote()
        self._server_handle, self._server_address = self.servers[0], f"{ROLLOUT}:{self.replica_rank}"


class ServerAdapter(BaseRollout):
    """The trainer's handle on the server of its replica, in every training worker: passes new weights on."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        check_config(self.config)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True
        self._server: Any = None

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """The server and the trainer share no device whose memory would run short."""

    @torch.no_grad()
    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None, **kwargs: Any
    ) -> None:
        """Sends all weights to the server. Every rank reads them to the end, because gathering them takes all ranks.

        Raises:
            ConfigError: weights come in another form than whole tensors.
        """
        if kwargs.get("wire_format", "named_tensors") != "named_tensors":
            raise ConfigError(
                f"rollout.name={ROLLOUT} takes whole tensors, not {kwargs['wire_format']}. Set "
                "actor_rollout_ref.rollout.checkpoint_engine.backend to naive or cpu_file."
            )
        # verl offers wire_format and peft_config besides; LoRA weights that are not merged fail by their names.
        named = {name: tensor.detach().to("cpu", copy=True) async for name, tensor in ensure_async_iterator(weights)}
        if self._server is None:
            self._server = ray.get_actor(_actor_name(self.config, self.replica_rank))
        await self._server.load_weights.remote(named, global_steps)
