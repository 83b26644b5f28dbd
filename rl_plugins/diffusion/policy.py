"""The policy of a run: a flow-matching model, its LoRA adapters, the reference, a cheap copy, and its noise levels."""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import torch
from diffusers import ModelMixin
from torch import Tensor, nn

from rl_plugins.core.denoising import Model
from rl_plugins.core.errors import ConfigError, MethodError, shown
from rl_plugins.diffusion.config import DiffusionConfig
from rl_plugins.diffusion.flows import shifted_sigmas

Encoded: TypeAlias = "Tensor | Mapping[str, Tensor] | None"
Encode: TypeAlias = Callable[[list[Any]], Encoded]
MakeCheap: TypeAlias = Callable[[nn.Module, nn.Module | None], nn.Module]
"""(policy, earlier copy or None) -> a cheap copy with the weights the policy has now."""

Weights = Literal["policy", "cheap", "reference"]


class Policy:
    """Velocities of a model, and the weights that are trained.

    Args:
        model: a transformer or UNet of diffusers, called as `model(latents, timestep=.., **conditions)`; or any module
            with the forward (latents, noise levels, conditions) -> velocities.
        config: of the run.
        scheduler: of diffusers, with the noise levels of flow matching; a model of diffusers needs one.
        encode: list of conditions -> what the model is given: a tensor, or tensors by the name of the argument, with a
            row for each condition and the same shape in every call. None: classes, or rows of embeddings, as they are.
        make_cheap: makes the cheap copy of `Denoise(model="cheap")`.

    Raises:
        ConfigError: a model that is no module, a scheduler without noise levels of flow matching, or LoRA targets that
            the model lacks.
    """

    def __init__(
        self,
        model: Any,
        config: DiffusionConfig,
        scheduler: Any = None,
        encode: Encode | None = None,
        make_cheap: MakeCheap | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"The model is {shown(model)}, which has no weights to train. Give a model of diffusers, or a "
                f"torch.nn.Module with the forward (latents, noise levels, conditions)."
            )
        self.config, self.scheduler, self.device = config, scheduler, torch.device(device)
        self.of_diffusers = isinstance(model, ModelMixin)
        if scheduler is not None or self.of_diffusers or config.shift is None:
            _check_scheduler(scheduler, config)
        self.scale = config.timestep_scale or float(
            getattr(getattr(scheduler, "config", None), "num_train_timesteps", 1)
        )
        self.conditions = Conditions(encode, "class_labels" if self.of_diffusers else "", self.device)
        # Dropout would make the ratio of new and old densities differ from 1 at the same weights.
        self.module: Any = self._with_adapters(model).to(self.device).eval()
        self.trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        if not self.trained:
            raise ConfigError("The model has no parameter with requires_grad, so nothing can be trained.")
        self._frozen: Any = None
        self.make_cheap = make_cheap
        self.cheap: nn.Module | None = None
        self.calls = self.rows = 0  # of the policy and of the copy, while samples are made
        self.cheap_rows, self.cheap_seconds = 0, 0.0  # of the copy alone, and what its refreshes took
        self.grid = lru_cache(maxsize=16)(self._grid)

    def _with_adapters(self, model: nn.Module) -> Any:
        if self.config.lora_rank is None:
            return model
        from peft import LoraConfig, get_peft_model

        rank, targets = self.config.lora_rank, list(self.config.lora_targets)
        torch.manual_seed(self.config.seed)
        try:
            made = get_peft_model(
                model,
                LoraConfig(r=rank, lora_alpha=self.config.lora_alpha or 2 * rank, target_modules=targets),
            )
        except ValueError as e:
            raise ConfigError(
                f"LoRA cannot be put into the model: {e}. Set lora_targets to names of its modules."
            ) from e
        return made

    def _grid(self, total: int) -> tuple[float, ...]:
        if self.config.shift is not None:
            return shifted_sigmas(total, self.config.shift)
        return _levels(self.scheduler, total)

    # ---- velocities

    def velocity(self, weights: Weights, x: Tensor, sigma: Tensor, conditions: Sequence[Any]) -> Tensor:
        """(rows, ..) float32 velocities."""
        encoded = self.conditions.rows(conditions)
        with self._weights(weights) as model, self._autocast():
            if self.of_diffusers:
                timestep = sigma * self.scale
                named = {"encoder_hidden_states": encoded} if isinstance(encoded, Tensor) else encoded or {}
                found = model(x, timestep=timestep, **named, return_dict=False)[0]
            else:
                found = model(x, sigma, encoded)
        if found.shape != x.shape:
            raise MethodError(
                f"The model gives velocities of shape {tuple(found.shape)} for latents of shape {tuple(x.shape)}. They "
                f"must be the same; a model that also predicts a variance is none of flow matching."
            )
        return found.float()

    @torch.no_grad()
    def sampled(self, model: Model, x: Tensor, sigma: Tensor, conditions: Sequence[Any]) -> Tensor:
        """The same without gradient, in calls of at most `rows_per_call` rows, and counted."""
        size, parts = self.config.rows_per_call, []
        for start in range(0, len(x), size):
            rows = slice(start, start + size)
            parts.append(self.velocity(model, x[rows], sigma[rows], conditions[rows]))
            self.calls += 1
        self.rows += len(x)
        self.cheap_rows += len(x) if model == "cheap" else 0
        return torch.cat(parts)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        half = self.config.mixed_precision == "bf16"
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if half else contextlib.nullcontext()

    @contextlib.contextmanager
    def _weights(self, weights: Weights) -> Iterator[Any]:
        if weights == "cheap":
            yield self.cheap
        elif weights == "policy":
            yield self.module
        elif self.config.lora_rank is None:
            yield self._frozen
        else:
            with self.module.disable_adapter():
                yield self.module

    def keep_reference(self) -> None:
        """A frozen copy of the weights of now, where there are no adapters to turn off."""
        if self.config.lora_rank is None:
            self._frozen = copy.deepcopy(self.module).requires_grad_(False)

    def refresh_cheap(self) -> None:
        """The cheap copy gets the weights of now."""
        if self.make_cheap is not None:
            start = time.perf_counter()
            with torch.no_grad():
                self.cheap = self.make_cheap(self.module, self.cheap)
            self.cheap_seconds += time.perf_counter() - start

    @contextlib.contextmanager
    def holding(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """As long as this lasts, the trained parameters have other values. Nothing is copied."""
        own = {name: p.data for name, p in self.trained.items()}
        try:
            for name, p in self.trained.items():
                p.data = weights[name]
            yield
        finally:
            for name, p in self.trained.items():
                p.data = own[name]

    # ---- weights on disk

    def state_dict(self) -> dict[str, Tensor]:
        """What is trained."""
        return {name: p.detach() for name, p in self.trained.items()}

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        for name, p in self.trained.items():
            p.copy_(saved[name])

    def save(self, folder: str) -> None:
        """The model as diffusers, or its adapters as PEFT, load it."""
        if hasattr(self.module, "save_pretrained"):
            self.module.save_pretrained(folder)
        else:
            from safetensors.torch import save_model

            save_model(self.module, f"{folder}/model.safetensors")


class Conditions:
    """Conditions as the model is given them: each is encoded once per batch.

    Args:
        encode: of the user; None: classes and embeddings stand for themselves.
        name: of classes as an argument of the model; empty: conditions are one argument.
    """

    def __init__(self, encode: Encode | None, name: str, device: torch.device) -> None:
        self.encode, self.name, self.device = encode, name, device
        self._known: dict[Any, Any] = {}

    def forget(self) -> None:
        """Before another batch."""
        self._known.clear()

    def rows(self, conditions: Sequence[Any]) -> Encoded:
        """One row for each condition."""
        keys = [_key(c) for c in conditions]
        missing = {k: c for k, c in zip(keys, conditions, strict=True) if k not in self._known}
        if missing:
            with torch.no_grad():
                encoded = (self.encode or self._plain)(list(missing.values()))
            for i, key in enumerate(missing):
                self._known[key] = _row(encoded, i, len(missing))
        found = [self._known[k] for k in keys]
        if found[0] is None:
            return None
        if isinstance(found[0], Mapping):
            return {name: torch.stack([f[name] for f in found]).to(self.device) for name in found[0]}
        return torch.stack(found).to(self.device)

    def _plain(self, conditions: list[Any]) -> Encoded:
        if all(c is None for c in conditions):
            return None
        if all(isinstance(c, int) for c in conditions):
            classes = torch.tensor(conditions)
            return {self.name: classes} if self.name else classes
        if all(isinstance(c, Tensor) for c in conditions):
            return torch.stack(conditions)
        try:
            return torch.tensor(conditions, dtype=torch.float32)
        except (TypeError, ValueError):
            raise ConfigError(
                f"The condition of a prompt is {shown(conditions[0])}. Classes (whole numbers) and embeddings (rows of "
                f"numbers) are given to the model as they are; for anything else give the trainer `encode`."
            ) from None


def _key(condition: Any) -> Any:
    try:
        hash(condition)
    except TypeError:
        return repr(condition)
    return id(condition) if isinstance(condition, Tensor) else condition


def _row(encoded: Encoded, i: int, rows: int) -> Any:
    if encoded is None:
        return None
    if isinstance(encoded, Mapping):
        return {name: _row(value, i, rows) for name, value in encoded.items()}
    if not isinstance(encoded, Tensor) or len(encoded) != rows:
        raise ConfigError(
            f"`encode` returned {shown(encoded) if not isinstance(encoded, Tensor) else tuple(encoded.shape)} for "
            f"{rows} conditions. It must return a tensor with a row for each of them, or such tensors by name."
        )
    return encoded[i]


def _check_scheduler(scheduler: Any, config: DiffusionConfig) -> None:
    """Refuses a scheduler that has no noise levels of flow matching.

    Raises:
        ConfigError: there is none, it has no `sigmas`, they do not fall from 1 to 0, or it cannot make them.
    """
    name = type(scheduler).__name__
    advice = "Give a flow-matching one, such as FlowMatchEulerDiscreteScheduler, that belongs to the model."
    if scheduler is None:
        raise ConfigError(f"A model of diffusers, or shift=None, needs a scheduler, and none is given. {advice}")
    sigmas = getattr(scheduler, "sigmas", None)
    if sigmas is None:
        raise ConfigError(f"The scheduler {name} has no `sigmas`, so it is none of flow matching. {advice}")
    levels = [float(s) for s in sigmas]
    if config.shift is None:
        try:
            levels = list(_levels(scheduler, config.steps))
        except ValueError as e:
            raise ConfigError(f"The scheduler {name} cannot make noise levels by itself: {e}. Set `shift`.") from e
        if len(levels) != config.steps + 1 or levels[-1] != 0:
            levels = [*levels, float("nan")]
    if not all(b < a for a, b in itertools.pairwise(levels)) or not 0.9 <= levels[0] <= 1:
        raise ConfigError(
            f"The noise levels of the scheduler {name} are {levels[0]:g} to {levels[-1]:g}. Those of flow matching "
            f"fall from 1 to 0. {advice}"
        )


def _levels(scheduler: Any, total: int) -> tuple[float, ...]:
    own = copy.deepcopy(scheduler)
    own.set_timesteps(total)
    return tuple(float(s) for s in own.sigmas)
