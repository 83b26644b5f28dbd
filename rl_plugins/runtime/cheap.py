"""Cheap copies of a policy, for samples that are only looked at: bfloat16, int8, or weights rounded to blocks of FP4.

    int8   q = round(127 w / max |w| of the output row),  w' = q max |w| / 127
    fp4    w' = s_t s_b q: q one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign (E2M1); s_b of each block of 16 inputs
           max |w| / 6 / s_t, rounded to E4M3; s_t of the matrix max |w| / (6 * 448)                       (NVFP4)

What is faster, and where: bfloat16 and int8 on devices with units for them. Layers of int8 multiply in int8: what they
read is rounded like the rows of a weight, at each call. fp4 is faster nowhere: it is the arithmetic of the format for
weights, in the type of the policy. Hardware with FP4 units needs kernels of its own, which also round what a layer
reads.

Source: `replace_linear_with_te`, `sync_lora_to_inference` of NVlabs/Sana for the choice of layers and the refresh.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from rl_plugins.core.errors import ConfigError

Precision = Literal["bf16", "int8", "fp4"]
PRECISIONS = get_args(Precision)
BLOCK = 16
_LARGEST = 6.0  # of E2M1
_LARGEST_SCALE = 448.0  # of E4M3
_LEAST_ROWS = 32  # of a product in int8
SKIPPED = ("embed", "^t_block", "final_layer", "^proj_out", "norm_out", "logvar_linear", r"attn\.qkv", "lm_head")
"""Layers of diffusion and language models that keep their precision: what reads the input, and what writes the output.
The authors' list for SANA, and the names of the same layers in diffusers and transformers."""


def round_int8(w: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix as int8, and the (rows, 1) factor of each row, float32."""
    scale = w.float().abs().amax(1, keepdim=True) / 127
    scale = torch.where(scale > 0, scale, 1.0)
    return (w.float() / scale).round().to(torch.int8), scale


def round_fp4(w: Tensor) -> Tensor:
    """A matrix (outputs, inputs) in NVFP4; the last block of a row may be shorter."""
    x = w.float()
    whole = x.abs().max() / (_LARGEST * _LARGEST_SCALE)
    if whole == 0:
        return w.clone()
    columns = x.size(1)
    x = nn.functional.pad(x, (0, -columns % BLOCK)).view(len(x), -1, BLOCK)
    scale = x.abs().amax(2, keepdim=True) / _LARGEST / whole
    scale = scale.to(torch.float8_e4m3fn).float() * whole
    rounded = torch.where(scale > 0, round_e2m1(x / scale) * scale, 0.0)
    return rounded.flatten(1)[:, :columns].to(w.dtype)


def round_e2m1(x: Tensor) -> Tensor:
    """The nearest number of four bits; halfway the one whose last bit is 0, and 6 above 6."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))  # between neighbours
    return ((size / step).round() * step).clamp(max=_LARGEST).copysign(x)


@dataclass(frozen=True)
class CheapOptions:
    """How a cheap copy is made.

    Args:
        precision: of its linear layers; "bf16" is the whole model.
        min_size: the larger of a layer's inputs and outputs must be above it, or the layer keeps its precision; not for
            bf16. The authors use 2240, for models with 2240 and more channels.
        skip: regular expressions; a layer with one of them in its name keeps its precision.

    Raises:
        ConfigError: a precision that is not known, a negative size, an expression that cannot be read.
    """

    precision: Precision = "int8"
    min_size: int = 0
    skip: Sequence[str] = SKIPPED

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ConfigError(f"The precision is {self.precision!r}. It must be one of {', '.join(PRECISIONS)}.")
        if self.min_size < 0:
            raise ConfigError(f"`min_size` is {self.min_size}. It must be 0 or more: inputs or outputs of a layer.")
        for pattern in self.skip:
            try:
                re.compile(pattern)
            except re.error as e:
                raise ConfigError(f"`skip` holds {pattern!r}, which is no regular expression: {e}.") from e

    def takes(self, name: str, layer: nn.Linear) -> bool:
        """Whether a linear layer of this name gets the precision."""
        large = max(layer.in_features, layer.out_features) > self.min_size
        return large and not any(re.search(pattern, name) for pattern in self.skip)


def int8_product(a: Tensor, b: Tensor) -> Tensor:
    """(n, k) times (k, m), both int8. In float32 where the device's product of int8 is wrong."""
    return torch._int_mm(a, b) if _multiplies_int8(a.device.type) else a.float() @ b.float()


@cache
def _multiplies_int8(device: str) -> bool:
    """oneDNN adds pairs of products in int16 on CPUs without VNNI, and large ones saturate without a word."""
    largest = torch.full((_LEAST_ROWS, 64), 127, dtype=torch.int8, device=device)
    return bool((torch._int_mm(largest, largest.t()) == 64 * 127**2).all())


class Int8Linear(nn.Module):
    """A linear layer that multiplies in int8.

    Args:
        layer: whose place it takes. Its bias stays the same parameter.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        self.rounded: Tensor
        self.scale: Tensor
        self.register_buffer("rounded", torch.zeros_like(layer.weight, dtype=torch.int8), persistent=False)
        self.register_buffer("scale", torch.ones_like(layer.weight[:, :1], dtype=torch.float32), persistent=False)

    @property
    def weight(self) -> Tensor:
        """As it counts."""
        return self.rounded * self.scale

    def take(self, weight: Tensor) -> None:
        """Takes over a weight."""
        rounded, scale = round_int8(weight)
        self.rounded.copy_(rounded)
        self.scale.copy_(scale)

    def forward(self, x: Tensor) -> Tensor:
        """`x` times the weight, and the bias."""
        rows, scale = round_int8(x.reshape(-1, self.in_features))
        few = _LEAST_ROWS - len(rows)
        if few > 0:  # what the kernels of GPUs take
            rows = nn.functional.pad(rows, (0, 0, 0, few))
        product = int8_product(rows, self.rounded.t())[: len(scale)]
        y = product.float() * scale * self.scale.t()
        y = y if self.bias is None else y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)


class CheapCopy:
    """A copy of a model in cheaper arithmetic. LoRA adapters are merged into it; the model itself never changes.

    Args:
        model: the policy, whole on this device; a PeftModel, a model with LoRA layers, or any other.
        adapters: names of those that are merged; None: the active ones.

    Attributes:
        module: the copy, for inference. What it reads and writes has the type of the policy.
        layers, linear: linear layers with the precision, and all of them.
        version: of the weights it has, as `refresh` was told.
        seconds: that refreshes took so far.

    Raises:
        ConfigError: no layer takes the precision, or an adapter that cannot be merged.
    """

    def __init__(self, model: nn.Module, options: CheapOptions, adapters: Sequence[str] | None = None) -> None:
        self.options, self.version, self.seconds = options, -1, 0.0
        unwrap = getattr(model, "get_base_model", None)  # of PEFT
        source: nn.Module = model if unwrap is None else unwrap()
        self.module = _plain(copy.deepcopy(source)).eval().requires_grad_(False)
        linear = {n: m for n, m in self.module.named_modules() if isinstance(m, nn.Linear)}
        tied = {id(m.weight) for m in self.module.modules() if isinstance(m, nn.Embedding)}
        taken = {n: m for n, m in linear.items() if id(m.weight) not in tied and options.takes(n, m)}
        self._setters: dict[str, Callable[[Tensor], Any]] = {}
        if options.precision == "bf16":
            taken = linear
            self._compute_in_bf16()
        elif not taken:
            largest = max((max(m.in_features, m.out_features) for m in linear.values()), default=0)
            raise ConfigError(
                f"No linear layer takes the precision {options.precision}: of {len(linear)}, the largest has {largest} "
                f"inputs or outputs, min_size is {options.min_size}, and skip is {', '.join(options.skip)}. Lower "
                f"min_size, or take names out of skip."
            )
        self.layers, self.linear = len(taken), len(linear)
        self._pairs = list(_pairs(source, self.module, adapters))
        for name, layer in taken.items() if options.precision != "bf16" else ():
            self._setters[f"{name}.weight"] = self._set_up(name, layer)
        self.refresh(0)

    def refresh(self, version: int) -> None:
        """Takes over the weights of the policy, if `version` is not the one it has."""
        if version == self.version:
            return
        start = time.perf_counter()
        with torch.no_grad():
            for name, weight, target in self._pairs:
                self._setters.get(name, target.copy_)(weight())
        self.version = version
        self.seconds += time.perf_counter() - start

    def _set_up(self, name: str, layer: nn.Linear) -> Callable[[Tensor], Any]:
        """Prepares a layer; returns what takes a new weight of it."""
        if self.options.precision == "fp4":
            weight = layer.weight
            return lambda w: weight.copy_(round_fp4(w))
        made = Int8Linear(layer)
        parent, _, child = name.rpartition(".")
        setattr(self.module.get_submodule(parent), child, made)
        return made.take

    def _compute_in_bf16(self) -> None:
        own = next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.bfloat16)
        self.module.to(torch.bfloat16)
        if own != torch.bfloat16:
            self.module.register_forward_pre_hook(
                lambda module, args, kwargs: (_cast(args, torch.bfloat16), _cast(kwargs, torch.bfloat16)),
                with_kwargs=True,
            )
            self.module.register_forward_hook(lambda module, args, out: _cast(out, own))


def cheap_copies(options: CheapOptions) -> Callable[[nn.Module, nn.Module | None], nn.Module]:
    """What makes a copy of a policy, and refreshes the earlier one: `make(policy, earlier or None)`."""
    made: list[CheapCopy] = []

    def make(policy: nn.Module, earlier: nn.Module | None) -> nn.Module:
        if earlier is None:
            made[:] = [CheapCopy(policy, options)]
        else:
            made[0].refresh(made[0].version + 1)
        return made[0].module

    return make


def _is_adapter(layer: nn.Module) -> bool:
    """Whether PEFT put it around another layer."""
    return hasattr(layer, "base_layer") and hasattr(layer, "active_adapters")


def _plain(model: nn.Module) -> nn.Module:
    """A copied model, with every layer that PEFT wrapped in the place of the wrapper, and with the `forward` of its
    classes: one that was put on the model itself (TRL's fused head, accelerate's precision) calls the model it was put
    on."""
    for name, layer in list(model.named_modules()):
        vars(layer).pop("forward", None)
        if _is_adapter(layer):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer.base_layer)
    return model


def _pairs(
    source: nn.Module, made: nn.Module, adapters: Sequence[str] | None
) -> Iterator[tuple[str, Callable[[], Tensor], Tensor]]:
    """Of every tensor of the copy: its name, what gives its value now, and itself."""
    targets = dict(made.named_parameters()) | dict(made.named_buffers())
    wrapped = {n: m for n, m in source.named_modules() if _is_adapter(m)}
    for name, tensor in [*source.named_parameters(), *source.named_buffers()]:
        owner = next((n for n in wrapped if name.startswith(f"{n}.")), None)
        if owner is None:
            yield name, partial(_itself, tensor), targets[name]
        elif name.startswith(f"{owner}.base_layer."):
            rest = name.removeprefix(f"{owner}.base_layer.")
            merged = rest == "weight"
            value = _merged(owner, wrapped[owner], tensor, adapters) if merged else partial(_itself, tensor)
            yield f"{owner}.{rest}", value, targets[f"{owner}.{rest}"]


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _merged(name: str, layer: Any, weight: Tensor, adapters: Sequence[str] | None) -> Callable[[], Tensor]:
    """What gives a weight with its LoRA adapters.

    Raises:
        ConfigError: they are more than a difference of the weight.
    """
    if not hasattr(layer, "get_delta_weight") or any(
        value for kind in ("use_dora", "lora_bias") for value in dict(getattr(layer, kind, {})).values()
    ):
        raise ConfigError(
            f"The adapter of {name} is a {type(layer).__name__} that cannot be merged into a cheap copy. Use plain "
            f"LoRA on linear layers, without DoRA and biases."
        )

    def value() -> Tensor:
        active = [] if layer.disable_adapters else layer.active_adapters
        names = active if adapters is None else adapters
        return sum((layer.get_delta_weight(a) for a in names if a in layer.lora_A), weight)  # type: ignore[no-any-return]

    return value


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in another type: also those in tuples and lists, in dictionaries, and in outputs of models,
    which are changed in place."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(_cast(v, dtype) for v in value)
    if isinstance(value, dict):
        value = dict(value) if type(value) is dict else value
        for key, item in list(value.items()):
            value[key] = _cast(item, dtype)
    return value
