"""What travels between ranks: tensors as their own bytes."""

from __future__ import annotations

import copy
import pickle
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_plugins.runtime.ranks import dumps

INTEGERS = (torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Part:
    values: dict[str, Tensor]
    text: list[Any]


def views(x: Tensor) -> dict[str, Tensor]:
    """Of a (6, 4) tensor."""
    return {
        "whole": x,
        "rows": x[2:4],
        "transposed": x.T,
        "every second": x[::2, ::3],
        "expanded": x[0].expand(3, 4),
        "number": x[1, 2],
        "empty": x[:0],
    }


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS, ids=str)
def test_a_tensor_arrives_as_it_was(dtype: torch.dtype) -> None:
    x = (torch.arange(24).reshape(6, 4) * 3 % 17 - 5).to(dtype)
    if dtype.is_floating_point:
        x[0, 0], x[1, 1], x[2, 2] = torch.nan, torch.inf, -0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        part = pickle.loads(dumps(Part(views(x), ["a", None, 1.5])))
        for values in part.values.values():
            values.zero_()  # it may be written to
    part = pickle.loads(dumps(Part(views(x), ["a", None, 1.5])))
    assert part.text == ["a", None, 1.5]
    for name, value in views(x).items():
        got = part.values[name]
        assert got.dtype == value.dtype and got.shape == value.shape, name
        assert got.contiguous().view(-1).view(torch.uint8).equal(value.contiguous().view(-1).view(torch.uint8)), name


def test_a_view_travels_without_what_it_is_a_view_of() -> None:
    x = torch.zeros(100_000)
    assert len(dumps(x[7:11])) < 300
    assert len(dumps([torch.zeros(2) for _ in range(100)])) < 100 * 100, "no archive for each"


def test_what_numpy_does_not_hold_travels_as_torch_sends_it() -> None:
    graph = torch.ones(2, requires_grad=True)
    sparse = torch.eye(3).to_sparse()
    got = pickle.loads(dumps({"graph": graph, "sparse": sparse, "parameter": torch.nn.Parameter(torch.ones(1))}))
    assert got["graph"].requires_grad and got["sparse"].to_dense().equal(torch.eye(3))
    assert isinstance(got["parameter"], torch.nn.Parameter)
    assert copy.deepcopy(graph).requires_grad, "nothing is changed for others"
