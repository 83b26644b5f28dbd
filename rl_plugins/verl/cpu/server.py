"""The generator as verl's control plane sees it: concurrent requests, weights that change, abort and resume."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from verl.utils import normalize_token_ids
from verl.workers.rollout.replica import TokenOutput

from rl_plugins.verl.cpu.decoder import Decoder, Request
from rl_plugins.verl.cpu.sampling import Sampling

GATHER_SECONDS = 0.01
"""How long an idle server waits for the rest of a batch; a prompt's samples arrive one by one."""


@dataclass(frozen=True)
class Limits:
    """Lengths in tokens, requests at a time, and whether the end of sequence ends a completion."""

    prompt_length: int
    response_length: int
    context: int
    requests: int = 1024
    ignore_eos: bool = False


class Server:
    """Runs requests in one decoder. All methods belong to one event loop; the model computes in a thread.

    A request's noise depends on the seed, the version of the weights, the prompt, and how often this version was asked
    it. So two runs of one command sample the same completions, in whatever order the requests come in.
    """

    def __init__(self, decoder: Decoder, limits: Limits, seed: int = 0) -> None:
        self.decoder, self.limits, self.seed = decoder, limits, seed
        self.global_steps: int | None = None
        self._waiting: list[Request] = []
        self._results: dict[Request, asyncio.Future[TokenOutput]] = {}
        self._asked: Counter[tuple[int, ...]] = Counter()
        self._between_tokens = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
        self._rejecting = False
        self._worker: asyncio.Task[None] | None = None

    async def generate(
        self, request_id: str, *, prompt_ids: Any, sampling_params: Mapping[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """Continues a prompt.

        While generation is paused, requests wait for the resume or, if the pause says so, come back empty as aborted.

        Raises:
            ValueError: a prompt without room for a token, images or the like, or unknown sampling parameters.
        """
        given = sorted(name for name, value in kwargs.items() if name.endswith("_data") and value is not None)
        if given:
            raise ValueError(f"The rollout backend hf_cpu generates from text, but was given {', '.join(given)}.")
        prompt = list(normalize_token_ids(prompt_ids))
        limits = self.limits
        room = limits.context - len(prompt)
        if not prompt or room < 1:
            raise ValueError(
                f"A prompt of {len(prompt)} tokens cannot be continued in a context of {limits.context}. Make prompts "
                "shorter (data.max_prompt_length) or set actor_rollout_ref.rollout.max_model_len."
            )
        usual = min(limits.response_length, limits.prompt_length + limits.response_length - len(prompt))
        sampling = Sampling.read(sampling_params, usual, room, limits.ignore_eos)
        while not self._open.is_set():
            if self._rejecting:
                return self._output(Request(prompt, sampling), "aborted")
            await self._open.wait()
        request = Request(prompt, sampling, seed=self._seed(prompt) if sampling.temperature > 0 else 0)
        result: asyncio.Future[TokenOutput] = asyncio.get_running_loop().create_future()
        self._results[request] = result
        self._waiting.append(request)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._run())
        return await result

    async def abort_all_requests(self, reject_request: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Stops what runs after its current token and pauses. Each request returns what it has, reason "aborted".

        Args:
            reject_request: Whether later requests come back at once instead of waiting for `resume_generation`.
            **kwargs: Of other backends, without a meaning here.
        """
        self._open.clear()
        self._rejecting = reject_request
        async with self._between_tokens:
            stopped = self.decoder.stop() + self._waiting
            self._waiting = []
            self._finish(stopped, "aborted")
        return {"aborted_count": len(stopped)}

    async def resume_generation(self) -> None:
        """Ends a pause."""
        self._rejecting = False
        self._open.set()

    async def load_weights(self, named: Mapping[str, torch.Tensor], global_steps: int | None = None) -> None:
        """Replaces all weights, between two tokens if something runs.

        Raises:
            ValueError: the names are not those of the model.
        """
        async with self._between_tokens:
            load_weights(self.decoder.weights, named)
            self.decoder.refresh()
            self._asked.clear()
            if global_steps is not None:
                self.global_steps = global_steps

    async def set_global_steps(self, global_steps: int) -> None:
        self.global_steps = global_steps

    async def wait_for_requests_to_drain(self) -> None:
        while self._worker is not None and not self._worker.done():
            await asyncio.sleep(GATHER_SECONDS)

    async def sleep(self, **kwargs: Any) -> None:
        """Waits until nothing runs. Freeing weights or cache is not worth it here: the methods below do nothing."""
        await self.wait_for_requests_to_drain()

    async def wake_up(self, **kwargs: Any) -> None: ...

    async def clear_kv_cache(self) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...

    async def start_profile(self, **kwargs: Any) -> None: ...

    async def stop_profile(self) -> None: ...

    async def _run(self) -> None:
        """Generates until nothing is left to do."""
        await asyncio.sleep(GATHER_SECONDS)
        while self._waiting or self.decoder.requests:
            async with self._between_tokens:
                free = max(0, self.limits.requests - len(self.decoder.requests))
                arriving, self._waiting = self._waiting[:free], self._waiting[free:]
                try:
                    finished = await asyncio.to_thread(self.decoder.step, arriving)
                except Exception as error:
                    self._finish({*self.decoder.stop(), *arriving}, error)
                else:
                    self._finish(finished, "completed")

    def _finish(self, requests: Iterable[Request], outcome: str | Exception) -> None:
        for request in requests:
            result = self._results.pop(request)
            if result.done():  # the caller has given up
                continue
            if isinstance(outcome, Exception):
                result.set_exception(outcome)
            else:
                result.set_result(self._output(request, outcome))

    def _seed(self, prompt: list[int]) -> int:
        key = tuple(prompt)
        self._asked[key] += 1
        text = repr((self.seed, self.global_steps, self._asked[key], prompt)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")

    def _output(self, request: Request, stop_reason: str) -> TokenOutput:
        return TokenOutput(
            token_ids=request.tokens,
            log_probs=request.log_probs if request.sampling.logprobs else None,
            stop_reason=stop_reason,
            extra_fields={"global_steps": self.global_steps}
            | ({"top_logprobs": request.top} if request.sampling.top_logprobs else {}),
        )


@torch.no_grad()
def load_weights(model: torch.nn.Module, named: Mapping[str, torch.Tensor]) -> None:
    """Copies `named` into the model; a tied weight may come under any of its names.

    Raises:
        ValueError: a name the model does not have, or one it has is missing.
    """
    own = model.state_dict()
    loaded = {own[name].data_ptr() for name in named if name in own}
    missing = sorted(name for name, tensor in own.items() if name not in named and tensor.data_ptr() not in loaded)
    unexpected = sorted(set(named) - set(own))
    if missing or unexpected:
        raise ValueError(
            f"The trainer's weights are not those of the rollout model: {len(missing)} are missing "
            f"({', '.join(missing[:3])}), {len(unexpected)} are unexpected ({', '.join(unexpected[:3])}). With LoRA "
            "set actor_rollout_ref.model.lora.merge=True, which sends merged weights."
        )
    for name, tensor in named.items():
        if own[name].shape != tensor.shape:
            raise ValueError(
                f"The trainer's weight {name} has shape {tuple(tensor.shape)}, that of the rollout model "
                f"{tuple(own[name].shape)}. Both must be built from the same config."
            )
        own[name].copy_(tensor)
