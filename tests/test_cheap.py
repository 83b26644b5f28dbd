"""Cheap copies of a policy: the formats against a plain loop, which layers take them, adapters, and the refresh."""

from __future__ import annotations

import bisect
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl_plugins.core.errors import ConfigError
from rl_plugins.runtime import cheap
from rl_plugins.runtime.cheap import BLOCK, CheapCopy, CheapOptions, Int8Linear, round_e2m1, round_fp4, round_int8

# ---- the formats, number by number

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = sorted({m / 8 * 2.0**-6 for m in range(8)} | {(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)})[:-1]
"""Its numbers from 0 to 448, by the definition: 4 bits of exponent, 3 of fraction; the last code is no number."""


def nearest(values: list[float], x: float) -> float:
    """The nearest of ascending numbers, halfway the one in an even place, beyond the last the last."""
    high = min(bisect.bisect_left(values, x), len(values) - 1)
    low = max(high - 1, 0)
    if values[high] - x == x - values[low]:
        return values[low] if low % 2 == 0 else values[high]
    return values[high] if values[high] - x < x - values[low] else values[low]


def fp4_by_loop(rows: list[list[float]]) -> list[list[float]]:
    largest = max(abs(x) for row in rows for x in row)
    if largest == 0:
        return rows
    whole = torch.tensor(largest / (6 * 448), dtype=torch.float32).item()
    out = []
    for row in rows:
        made: list[float] = []
        for start in range(0, len(row), 16):
            block = row[start : start + 16]
            scale = nearest(E4M3, max(map(abs, block)) / 6 / whole) * whole
            made += [math.copysign(nearest(FP4, abs(x) / scale), x) * scale if scale else 0.0 for x in block]
        out.append(made)
    return out


def test_the_table_of_e4m3_is_that_of_torch() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()
    assert codes == E4M3 and E4M3[-1] == 448


@pytest.mark.parametrize("sign", [1, -1])
def test_four_bits_round_to_the_nearest_and_halfway_to_even(sign: int) -> None:
    x = torch.tensor([0.0, 0.2, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 2.6, 3.5, 5.0, 5.1, 7.0, 100.0]) * sign
    expected = torch.tensor([0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 3.0, 4.0, 4.0, 6.0, 6.0, 6.0]) * sign
    assert torch.equal(round_e2m1(x), expected)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 40), st.integers(0, 10**6), st.sampled_from([1e-6, 1.0, 1e4]))
def test_fp4_equals_a_loop(rows: int, columns: int, seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    w = size * torch.randn(rows, columns, generator=generator) * 10 ** torch.randn(rows, columns, generator=generator)
    w[torch.rand(rows, columns, generator=generator) < 0.2] = 0
    found = round_fp4(w)
    expected = torch.tensor(fp4_by_loop(w.tolist()))
    # a number that float32 puts on the other side of a border is one step away; there are few
    different = ~torch.isclose(found, expected, rtol=1e-5, atol=0)
    assert different.float().mean() <= 0.03 or different.sum() <= 1


def test_numbers_of_the_format_stay() -> None:
    """A block of it, with a scale that E4M3 has, is not changed; rounding twice is rounding once."""
    w = torch.tensor([FP4 + [-x for x in FP4], [x / 4 for x in FP4] * 2])
    assert torch.equal(round_fp4(w), w)
    x = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(round_fp4(round_fp4(x)), round_fp4(x))
    assert not round_fp4(torch.zeros(2, 3)).any()
    assert len(round_fp4(x)[0, :BLOCK].unique()) <= 15


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 20), st.integers(0, 10**6))
def test_int8_equals_a_loop(rows: int, columns: int, seed: int) -> None:
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    w[0] *= seed % 2
    q, scale = round_int8(w)
    for i, row in enumerate(w.double().tolist()):
        step = max(map(abs, row)) / 127 or 1.0
        assert scale[i].item() == pytest.approx(step, rel=1e-6)
        for x, found in zip(row, q[i].tolist(), strict=True):
            assert abs(found - x / step) <= 0.5 + 1e-4 and abs(found) <= 127


@pytest.mark.parametrize("rows", [1, 40])
def test_the_int8_layer_multiplies_what_was_rounded(rows: int) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(24, 7), torch.randn(2, rows, 24)
    made = Int8Linear(layer)
    made.take(layer.weight.detach())
    q, scale = round_int8(x.view(-1, 24))
    expected = (q.double() * scale.double()) @ made.weight.double().t() + layer.bias.double()
    with torch.no_grad():
        found = made(x)
        assert found.shape == (2, rows, 7) and found.dtype == torch.float32
        torch.testing.assert_close(found.double().view(-1, 7), expected, rtol=1e-5, atol=1e-5)
        assert 0 < (found - layer(x)).abs().max() < 0.05
        assert made(x.bfloat16()).dtype == torch.bfloat16


def test_a_cpu_whose_int8_products_saturate_gets_the_same_numbers(monkeypatch: Any) -> None:
    """oneDNN adds pairs of products in int16 without VNNI; ONEDNN_MAX_CPU_ISA=AVX2 shows it on other machines."""
    torch.manual_seed(0)
    a, b = torch.randint(-127, 128, (2, 40, 64), dtype=torch.int8)
    right = a.int() @ b.t().int()

    def saturating(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        pairs = a.int()[:, 0::2, None] * b.int()[None, 0::2] + a.int()[:, 1::2, None] * b.int()[None, 1::2]
        return pairs.clamp(-(2**14), 2**14).sum(1)

    monkeypatch.setattr(torch, "_int_mm", saturating)
    cheap._multiplies_int8.cache_clear()
    assert not torch.equal(saturating(a, b.t()), right) and torch.equal(cheap.int8_product(a, b.t()).int(), right)
    monkeypatch.undo()
    cheap._multiplies_int8.cache_clear()
    assert torch.equal(cheap.int8_product(a, b.t()).int(), right)


# ---- copies


class Net(nn.Module):
    """Layers of several sizes and names, a buffer, and a matrix shared with an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.x_embedder = nn.Linear(4, 32)
        self.block = nn.ModuleDict({"small": nn.Linear(8, 8), "large": nn.Linear(32, 8), "attn": nn.Linear(8, 32)})
        self.tokens = nn.Embedding(5, 8)
        self.head = nn.Linear(8, 5, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: Tensor, keep: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        h = self.block["large"](self.x_embedder(x)).tanh() + self.shift
        h = self.block["small"](h)
        return {"logits": self.head(h), "wide": self.block["attn"](h)}


def changed_weights(copied: CheapCopy, model: nn.Module) -> set[str]:
    """Modules whose weight is not that of the model."""
    theirs = dict(model.named_modules())
    return {
        n
        for n, m in copied.module.named_modules()
        if hasattr(m, "weight") and not torch.equal(m.weight, theirs[n].weight)
    }


@pytest.mark.parametrize("precision", ["int8", "fp4"])
def test_size_and_name_decide_which_layers_are_rounded(precision: Any) -> None:
    torch.manual_seed(0)
    model = Net()
    copied = CheapCopy(model, CheapOptions(precision))
    assert changed_weights(copied, model) == {"block.small", "block.large", "block.attn"}
    assert (copied.layers, copied.linear) == (3, 5)
    assert changed_weights(CheapCopy(model, CheapOptions(precision, min_size=8)), model) == {
        "block.large",
        "block.attn",
    }
    options = CheapOptions(precision, min_size=8, skip=("attn$",))
    assert changed_weights(CheapCopy(model, options), model) == {"x_embedder", "block.large"}


@pytest.mark.parametrize("precision", ["bf16", "int8", "fp4"])
def test_a_copy_follows_the_policy_when_it_is_told(precision: Any) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(6, 4)
    before = {n: p.clone() for n, p in model.state_dict().items()}
    copied = CheapCopy(model, CheapOptions(precision))
    first = copied.module(x)["logits"]
    assert first.dtype == torch.float32 and not first.requires_grad
    gap = (first - model(x)["logits"]).abs().max().item()
    assert 0 < gap < 0.3
    assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())
    assert not copied.module.training and model.training
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(-0.5)
        model.shift.add_(1)
    seconds = copied.seconds
    copied.refresh(0)
    assert torch.equal(copied.module(x)["logits"], first) and copied.seconds == seconds
    copied.refresh(1)
    assert copied.seconds > seconds and copied.version == 1
    fresh = CheapCopy(model, CheapOptions(precision))
    assert torch.equal(copied.module(x)["logits"], fresh.module(x)["logits"])
    assert not torch.allclose(copied.module(x)["logits"], first)


def test_a_forward_that_was_put_on_the_policy_does_not_reach_back_to_it() -> None:
    """As TRL's fused head: the new `forward` calls the one of the policy."""
    model = Net()
    own = model.forward
    model.forward = lambda *args, **kwargs: own(*args, **kwargs)
    copied, x = CheapCopy(model, CheapOptions("fp4")), torch.randn(3, 4)
    assert not torch.equal(copied.module(x)["wide"], model(x)["wide"])


def test_bfloat16_is_the_whole_model_and_changes_no_argument() -> None:
    torch.manual_seed(0)
    model, given_ = Net(), {"mask": torch.randn(2, 3)}
    copied = CheapCopy(model, CheapOptions("bf16", min_size=10**6))
    assert {p.dtype for p in copied.module.parameters()} == {torch.bfloat16}
    assert (copied.layers, copied.linear) == (5, 5)
    out = copied.module(torch.randn(2, 4), keep=given_)
    assert out["wide"].dtype == torch.float32 and given_["mask"].dtype == torch.float32
    assert model.block["large"].weight.dtype == torch.float32


def wrapped(model: nn.Module, **changes: Any) -> Any:
    config = LoraConfig(r=2, lora_alpha=6, target_modules=["large", "attn"], init_lora_weights=False, **changes)
    return get_peft_model(model, config)


def test_adapters_are_merged_into_the_copy_alone() -> None:
    torch.manual_seed(0)
    model, x = wrapped(Net()), torch.randn(6, 4)
    model.add_adapter("old", LoraConfig(r=2, target_modules=["large"], init_lora_weights=False))
    outputs = {}
    for name in ("default", "old"):
        model.set_adapter(name)
        outputs[name] = model(x)["wide"].detach()
    with model.disable_adapter():
        outputs["none"] = model(x)["wide"].detach()
    model.set_adapter("default")
    weights = {n: p.clone() for n, p in model.state_dict().items()}
    exact = {
        name: CheapCopy(model, CheapOptions("fp4", skip=("large", "attn", "embedder")), adapters)
        for name, adapters in {"default": None, "old": ["old"], "none": []}.items()
    }
    for name, copied in exact.items():
        for layer in ("small",):  # the only one that is rounded
            copied.module.block[layer].weight.copy_(model.get_base_model().block[layer].weight)
        torch.testing.assert_close(copied.module(x)["wide"], outputs[name], rtol=1e-4, atol=1e-5)
        assert not any("lora" in n for n, _ in copied.module.named_modules())
    assert all(torch.equal(weights[n], p) for n, p in model.state_dict().items())
    rounded = CheapCopy(model, CheapOptions("fp4"))
    base = model.get_base_model().block["large"]
    expected = round_fp4((base.base_layer.weight + base.get_delta_weight("default")).detach())
    assert torch.equal(rounded.module.block["large"].weight, expected)
    with torch.no_grad():
        base.lora_B["default"].weight.mul_(2)
    rounded.refresh(1)
    expected = round_fp4((base.base_layer.weight + base.get_delta_weight("default")).detach())
    assert torch.equal(rounded.module.block["large"].weight, expected)


@pytest.mark.parametrize("precision", ["bf16", "int8", "fp4"])
def test_a_language_model_generates_with_a_copy(precision: Any) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    copied = CheapCopy(model, CheapOptions(precision))
    assert copied.layers == (15 if precision == "bf16" else 14)
    ids = torch.randint(1, 32, (3, 5))
    out = copied.module.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert out.shape == (3, 9)
    gap = (copied.module(ids).logits - model(ids).logits).abs().max().item()
    assert 0 < gap < 0.5


# ---- refused


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"precision": "fp8"}, "The precision is 'fp8'. It must be one of bf16, int8, fp4."),
        ({"min_size": -1}, "`min_size` is -1. It must be 0 or more"),
        ({"skip": ("(",)}, r"`skip` holds '\(', which is no regular expression"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        CheapOptions(**change)


def test_a_model_without_such_a_layer_is_refused_with_its_largest() -> None:
    with pytest.raises(ConfigError, match=r"No linear layer takes the precision fp4: of 5, the largest has 32 inputs"):
        CheapCopy(Net(), CheapOptions("fp4", min_size=2240))


def test_an_adapter_that_is_no_plain_difference_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"The adapter of block\.\w+ is a Linear that cannot be merged"):
        CheapCopy(wrapped(Net(), use_dora=True), CheapOptions("fp4"))
