"""Losses, statistics and the watch over hook inputs on a device, against float64 on the CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from loss_inputs import Loss, gradients, losses, placed
from torch import Tensor

from rl_plugins.core.errors import MethodError
from rl_plugins.core.estimators import gdpo_advantages, grpo_advantages
from rl_plugins.core.groups import Groups
from rl_plugins.runtime import update
from rl_plugins.runtime.immutability import checking
from rl_plugins.testing import make_rollouts

pytestmark = pytest.mark.gpu
# Relative to the largest number: arithmetic is in float32, and a gradient has the type of the log-probs.
NEAR = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-5, 2**-7)}
FEW = [next(x for x in losses() if (x.name, x.hook) == key) for key in {(x.name, x.hook): 0 for x in losses()}]


def inputs_of(step: Any, dtype: torch.dtype, device: str, exact: bool = False) -> Any:
    """Terms of a whole step. What the model gives is rounded to `dtype`; `exact`: and then computed in float64. Counts
    are on the CPU and all columns on the device, as hosts have them."""

    def place(x: Tensor) -> Tensor:
        rounded = x.clone() if not x.is_floating_point() or not x.ndim else x.to(dtype)
        rounded = rounded.double() if exact and x.is_floating_point() else rounded
        return rounded.to(device) if x.ndim else rounded

    terms = step.terms(list(range(step.size)))
    made = placed(terms, place)
    columns = {k: v.double() if exact else v.to(device) for k, v in terms.columns.items()}
    advantages = terms.advantages.double() if exact else terms.advantages.to(device)
    return made.replace(columns=columns, advantages=advantages)


def values_of(loss: Loss, step: Any, terms: Any) -> tuple[Tensor, list[Tensor], dict[str, Any]]:
    step.stack.metrics.take()
    value = update.surrogate(step.stack, terms) if loss.hook == "policy_loss" else update.regularizer(step.stack, terms)
    assert value is not None
    return torch.where(terms.mask > 0, value, 0.0), gradients(value, terms), step.stack.metrics.take()


def distance(one: Tensor, exact: Tensor) -> float:
    return float((one.detach().cpu().double() - exact.detach()).abs().max() / exact.abs().max().clamp(min=1e-12))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("loss", losses(), ids=str)
def test_a_loss_is_that_in_float64(loss: Loss, dtype: torch.dtype, device: str, note: Any) -> None:
    step = loss.step()
    exact, exact_grads, exact_logged = values_of(loss, step, inputs_of(step, dtype, "cpu", exact=True))
    value, grads, logged = values_of(loss, step, inputs_of(step, dtype, device))
    errors = distance(value, exact), max((distance(g, e) for g, e in zip(grads, exact_grads, strict=True)), default=0.0)
    name = f"{loss.name} {loss.hook}, {str(dtype).removeprefix('torch.')} on {device}"
    note("distance from float64", name, value=errors[0], gradient=errors[1])
    assert all(error <= near for error, near in zip(errors, NEAR[dtype], strict=True)), errors
    assert {g.dtype for g in grads} <= {dtype} and {g.device.type for g in grads} <= {device}
    assert {k: v[1] for k, v in logged.items()} == pytest.approx(
        {k: v[1] for k, v in exact_logged.items()}, rel=1e-3, abs=1e-6
    )


@pytest.mark.parametrize("loss", FEW, ids=str)
def test_a_loss_compiles_without_a_break(loss: Loss, device: str, monkeypatch: Any, note: Any) -> None:
    """What a method logs is taken out: a host that compiles its loss logs outside of it."""
    step = loss.step()
    terms = inputs_of(step, torch.float32, device)
    monkeypatch.setattr(step.method, "log", lambda *args, **more: None)
    names = [f.name for f in dataclasses.fields(terms) if isinstance(getattr(terms, f.name), Tensor)]

    def surrogate(tensors: list[Tensor], columns: dict[str, Tensor]) -> Tensor:
        given = terms.replace(**dict(zip(names, tensors, strict=True)), columns=columns)
        return getattr(type(step.method), loss.hook)(step.method, given)

    tensors, columns = [getattr(terms, name) for name in names], dict(terms.columns)
    eager = surrogate(tensors, columns)
    torch._dynamo.reset()
    found = torch._dynamo.explain(surrogate)(tensors, columns)
    note("torch.compile", loss.name, breaks=found.graph_break_count, graphs=found.graph_count)
    assert found.graph_break_count == 0, found.break_reasons
    compiled = torch.compile(surrogate, backend="inductor" if device == "cuda" else "eager", fullgraph=True)
    torch.testing.assert_close(compiled(tensors, columns), eager, rtol=1e-5, atol=1e-6)


def test_statistics_of_groups(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    reward = torch.randint(0, 4, (40,), generator=generator).double() / 3
    reward[::7] = torch.nan
    group = torch.randint(0, 9, (40,), generator=generator)
    here, there = Groups(group, count=9), Groups(group.to(device), count=9)
    for name in ("mean", "std", "min", "max", "n", "sum", "median", "rank", "top_k"):
        more = (2,) if name == "top_k" else ()
        expected = getattr(here, name)(reward, *more)
        found = getattr(there, name)(reward.to(device), *more)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-12, atol=1e-12, equal_nan=True)
        assert found.device.type == device


def test_estimators(device: str) -> None:
    rewards = torch.tensor([[1.0, 0.5], [0.0, 0.5], [torch.nan, 1.0], [1.0, 0.0]] * 4, dtype=torch.float64)
    rollouts = make_rollouts(rewards, weights=[1.0, 0.5])
    moved = {f.name: getattr(rollouts, f.name) for f in dataclasses.fields(rollouts)}
    there = rollouts.replace(**{k: v.to(device) for k, v in moved.items() if isinstance(v, Tensor)})
    for scale in ("group", "batch", "none"):
        torch.testing.assert_close(grpo_advantages(there, scale).cpu(), grpo_advantages(rollouts, scale))
    torch.testing.assert_close(
        gdpo_advantages(there.rewards, there.reward_weights, there.groups).cpu(),
        gdpo_advantages(rollouts.rewards, rollouts.reward_weights, rollouts.groups),
    )


def test_a_hook_that_writes_into_its_input_is_found(device: str) -> None:
    """Past torch's count of writes, too: the bytes are compared."""
    step = losses()[0].step()
    terms = inputs_of(step, torch.float32, device)

    def policy_loss(terms: Any) -> Tensor:
        terms.old_logprobs.data.add_(1.0)
        return terms.logprobs * terms.advantages

    step.method.policy_loss = policy_loss
    with checking(), pytest.raises(MethodError, match="old_logprobs"):
        update.surrogate(step.stack, terms)
