"""OTR, One-Token Rollout (arXiv:2509.26313): its parameters, its loss from logits and from hidden states, its card.

At every target position the model draws single tokens from the logits it has computed anyway, and REINFORCE on these
draws takes the place of cross-entropy:

    q = softmax(l / kappa), detached          a_1 .. a_K drawn from q         R_j = 1 if a_j = x else beta
    loss = -(1/K) sum_j R_j log pi(a_j)       pi = softmax(l)                 gradient through log pi only

Symbols: l (tokens, V) logits, x (tokens,) target ids, K `samples`. With `expected` the mean over j is taken exactly:
loss = -[q(x) log pi(x) + beta * sum over a != x of q(a) log pi(a)]. Losses are in nats per token.

Both forms work through blocks of tokens of at most `BLOCK` logits in float32 (float64 stays float64). No tensor of
(tokens, V) is made in addition to the logits a host has; `head_loss` needs not even those.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_plugins.core.params import MethodParams, param
from rl_plugins.tools.supervised import START, SupervisedLoss

BLOCK = 1 << 25  # logits of a block of tokens: 128 MiB in float32
_WIDE = tuple(int(x) for x in torch.__version__.split(".")[:2]) >= (2, 8)  # torch.addmm knows `out_dtype`


@dataclass(frozen=True)
class OtrParams(MethodParams):
    """Parameters of OTR."""

    samples: int = param(256, "tokens drawn at each position (K)", ge=1, only_if={"expected": False})
    kappa: float = param(1.3, "temperature of the draws; above 1 they are flatter than the model", gt=0)
    beta: float = param(-0.1, "reward of a draw that is not the target (the target has 1)", ge=-1, lt=1)
    expected: bool = param(False, "take the mean over all possible draws exactly, instead of drawing")
    reduction: Literal["token", "sequence"] = param(
        "token", "mean over all target tokens of the optimizer step, or over each sequence first"
    )
    seed: int = param(0, "of the draws; every optimizer step, rank and micro-batch has its own stream", ge=0)


@dataclass(frozen=True)
class Drawing:
    """How tokens are drawn in one micro-batch.

    Args:
        params: of the loss.
        generator: on the device of the logits; None with `expected`.
        vocabulary: ids from here on are padding of the model's head and are never drawn; None: there are none.
    """

    params: OtrParams
    generator: torch.Generator | None = None
    vocabulary: int | None = None


@dataclass(frozen=True)
class TokenLoss:
    """What comes out, all (tokens,) and in float32 (or float64); only `loss` has a gradient.

    Attributes:
        loss: OTR's, in nats.
        nll: -log pi(x), which cross-entropy would be.
        share: of the draws that are the target; with `expected` its probability q(x).
        entropy: of pi, in nats.
        top1: whether the target is the most probable token.
    """

    loss: Tensor
    nll: Tensor
    share: Tensor
    entropy: Tensor
    top1: Tensor


@dataclass(frozen=True)
class Head:
    """What a model makes of the product of hidden states and head: cap * tanh(scale * product / cap) * inverse.

    Args:
        scale: factor on the product.
        cap: soft cap of the logits; None: without.
        inverse: 1 / temperature.
        whole: (weight, bias) -> context in which they are whole; a host that shards parameters gives it.
    """

    scale: float = 1.0
    cap: float | None = None
    inverse: float = 1.0
    whole: Callable[[Tensor, Tensor | None], contextlib.AbstractContextManager[Any]] | None = None

    def gathered(self, weight: Tensor, bias: Tensor | None) -> contextlib.AbstractContextManager[Any]:
        return self.whole(weight, bias) if self.whole else contextlib.nullcontext()

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(tokens, V) in float32 at least."""
        product = hidden @ weight.t()
        if bias is not None:
            product = product + bias
        z = _wide(product) * self.scale
        return (z if self.cap is None else self.cap * torch.tanh(z / self.cap)) * self.inverse

    def slope(self, z: Tensor, gradient: Tensor) -> Tensor:
        """The gradient by the product, from that by the logits `z`; overwrites `gradient`."""
        gradient.mul_(self.inverse * self.scale)
        if self.cap is not None:
            gradient.mul_(1 - (z / (self.inverse * self.cap)).square())
        return gradient


def generator(params: OtrParams, seed: int, step: int, rank: int, micro: int, device: Any) -> torch.Generator | None:
    """The stream of draws of one micro-batch; None with `expected`, which draws nothing.

    Args:
        seed: of the run, in addition to that of the loss.
        step: optimizer step of the run, so that a resumed run goes on with other draws than it began with.
        rank: data-parallel rank.
        micro: micro-batch of the step on this rank.
    """
    if params.expected:
        return None
    mixed = np.random.SeedSequence((params.seed, seed, step, rank, micro)).generate_state(1, np.uint64)[0]
    return torch.Generator(device=device).manual_seed(int(mixed >> np.uint64(1)))


def logits_loss(logits: Tensor, target: Tensor, rows: Tensor, drawing: Drawing, in_place: bool = False) -> TokenLoss:
    """OTR's loss of some rows of logits.

    Args:
        logits: (N, V), any floating dtype.
        target: (N,) ids; those outside of `rows` are not looked at.
        rows: (tokens,) rows of `logits` that are trained.
        in_place: the gradient is written over the logits, so that no second (N, V) tensor exists. For a caller that
            has no further use for them after the backward pass.
    """
    found: Any = _FromLogits.apply(logits, target, rows, drawing, in_place)  # type: ignore[no-untyped-call]
    return TokenLoss(*found)


def head_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, drawing: Drawing, head: Head | None = None
) -> TokenLoss:
    """OTR's loss of hidden states and a linear head; the logits of one block of tokens exist at a time.

    Args:
        hidden: (tokens, H).
        weight: (V, H); bias: (V,) or None.
        target: (tokens,) ids.
    """
    found: Any = _FromHidden.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, target, drawing, head or Head()
    )
    return TokenLoss(*found)


def sequence_weights(sequence: Tensor) -> tuple[Tensor, Tensor]:
    """For `reduction: sequence`: one over the number of tokens of each token's sequence, and how many sequences there
    are.

    Args:
        sequence: (tokens,) of which sequence each target token is, any whole numbers.
    """
    _, inverse, counts = torch.unique(sequence, return_inverse=True, return_counts=True)
    return 1.0 / counts[inverse], torch.tensor(len(counts), device=sequence.device)


# ---- one block of tokens


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _blocks(tokens: int, vocabulary: int) -> Iterator[slice]:
    size = max(1, BLOCK // vocabulary)
    return (slice(i, i + size) for i in range(0, tokens, size))


def _exploration(z: Tensor, drawing: Drawing) -> Tensor:
    """q: what is drawn from."""
    scaled = z / drawing.params.kappa
    if drawing.vocabulary is not None and drawing.vocabulary < z.shape[-1]:
        scaled[:, drawing.vocabulary :] = -torch.inf
    return scaled.softmax(-1)


def _times_log(q: Tensor, log_p: Tensor) -> Tensor:
    """q log p, and 0 where q is 0."""
    return torch.where(q > 0, q * log_p, 0.0)


def _value(z: Tensor, x: Tensor, ids: Tensor | None, drawing: Drawing) -> tuple[Tensor, ...]:
    """The fields of `TokenLoss` of logits `z` (n, V), targets `x` (n,) and draws `ids` (n, K)."""
    beta = drawing.params.beta
    log_p = z.log_softmax(-1)
    of_x = log_p.gather(-1, x[:, None]).squeeze(-1)
    if ids is None:
        q = _exploration(z, drawing)
        share = q.gather(-1, x[:, None]).squeeze(-1)
        loss = -(beta * _times_log(q, log_p).sum(-1) + (1 - beta) * _times_log(share, of_x))
        del q
    else:
        hit = ids == x[:, None]
        share = hit.to(z.dtype).mean(-1)
        drawn = log_p.gather(-1, ids)
        loss = -torch.where(hit, drawn, beta * drawn).mean(-1)
    entropy = -_times_log(log_p.exp(), log_p).sum(-1)
    return loss, -of_x, share, entropy, z.argmax(-1) == x


def _gradient(z: Tensor, x: Tensor, ids: Tensor | None, drawing: Drawing) -> Tensor:
    """Of the loss by the logits: S pi - w, with w(a) the mean reward of draws of a, and S its sum."""
    beta = drawing.params.beta
    if ids is None:
        q = _exploration(z, drawing)
        share = q.gather(-1, x[:, None])
        out = z.softmax(-1).mul_(beta + (1 - beta) * share).sub_(q, alpha=beta)
        return out.scatter_add_(-1, x[:, None], -(1 - beta) * share)
    reward = (beta + (1 - beta) * (ids == x[:, None]).to(z.dtype)) / ids.shape[-1]
    return z.softmax(-1).mul_(reward.sum(-1, keepdim=True)).scatter_add_(-1, ids, -reward)


def _draw(z: Tensor, drawing: Drawing) -> Tensor | None:
    if drawing.params.expected:
        return None
    q = _exploration(z, drawing)
    return torch.multinomial(q, drawing.params.samples, replacement=True, generator=drawing.generator)


def _joined(parts: list[tuple[Tensor, ...]], like: Tensor) -> tuple[Tensor, ...]:
    if not parts:
        empty = torch.zeros(0, dtype=_wide(like).dtype, device=like.device)
        return empty, empty.clone(), empty.clone(), empty.clone(), empty.bool()
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _kept(ids: list[Tensor | None]) -> Tensor | None:
    """Draws for the backward pass: K whole numbers of 4 bytes per token."""
    found = [i.to(torch.int32) for i in ids if i is not None]
    return torch.cat(found) if found else None


def _of_block(ids: Tensor | None, block: slice) -> Tensor | None:
    return None if ids is None else ids[block].long()


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, rows: Tensor, drawing: Drawing, in_place: bool) -> Any:
        parts, draws = [], []
        for block in _blocks(len(rows), logits.shape[-1]):
            z = _wide(logits[rows[block]])
            draws.append(_draw(z, drawing))
            parts.append(_value(z, target[rows[block]], draws[-1], drawing))
        ctx.save_for_backward(logits, target, rows, _kept(draws))
        ctx.drawing, ctx.in_place = drawing, in_place
        ctx.set_materialize_grads(False)
        out = _joined(parts, logits)
        ctx.mark_non_differentiable(*out[1:])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
        logits, target, rows, ids = ctx.saved_tensors
        if grad is None:
            return (None,) * 5
        out = logits.detach() if ctx.in_place else torch.zeros_like(logits)
        if ctx.in_place:
            idle = torch.ones(len(out), dtype=torch.bool, device=out.device)
            idle[rows] = False
            out[idle] = 0.0
        for block in _blocks(len(rows), logits.shape[-1]):
            at = rows[block]
            slope = _gradient(_wide(logits[at]), target[at], _of_block(ids, block), ctx.drawing)
            out[at] = slope.mul_(grad[block, None]).to(out.dtype)
        return out, None, None, None, None


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, drawing: Drawing, head: Head
    ) -> Any:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
        parts, draws = [], []
        for block in _blocks(len(hidden), weight.shape[0]):
            z = head.logits(hidden[block].to(dtype), w, b)
            draws.append(_draw(z, drawing))
            parts.append(_value(z, target[block], draws[-1], drawing))
        ctx.save_for_backward(hidden, weight, bias, target, _kept(draws))
        ctx.drawing, ctx.head, ctx.dtype = drawing, head, dtype
        ctx.set_materialize_grads(False)
        out = _joined(parts, hidden)
        ctx.mark_non_differentiable(*out[1:])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
        hidden, weight, bias, target, ids = ctx.saved_tensors
        if grad is None:
            return (None,) * 6
        with ctx.head.gathered(weight, bias):
            sums = [
                torch.zeros(t.shape, dtype=_wide(t).dtype, device=t.device) if needed and t is not None else None
                for t, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
            ]
            w, b = weight.to(ctx.dtype), None if bias is None else bias.to(ctx.dtype)
            for block in _blocks(len(hidden), weight.shape[0]):
                h = hidden[block].to(ctx.dtype)
                z = ctx.head.logits(h, w, b)
                slope = _gradient(z, target[block], _of_block(ids, block), ctx.drawing).mul_(grad[block, None])
                slope = ctx.head.slope(z, slope).to(ctx.dtype)
                if sums[0] is not None:
                    _add_product(sums[0][block], slope, w)
                if sums[1] is not None:
                    _add_product(sums[1], slope.t(), h)
                if sums[2] is not None:
                    sums[2] += slope.sum(0, dtype=sums[2].dtype)
        return (
            *(s if s is None else s.to(t.dtype) for s, t in zip(sums, (hidden, weight, bias), strict=True)),
            *(None,) * 3,
        )


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, without rounding the product to bfloat16 first where a and b are of that type."""
    if total.is_cuda and _WIDE and a.dtype in (torch.float16, torch.bfloat16):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


CARD = SupervisedLoss(
    name="otr",
    does="Draws single tokens from the logits at hand and rewards those that are the target, in place of cross-entropy",
    fidelity="reconstruction",
    params=OtrParams,
    about="""\
    loss of a token = -(1/K) sum_j R_j log pi(a_j)
    a_j drawn from q = softmax(l / kappa)            R_j = 1 if a_j = x else beta

l are the logits at a target position, x the target, pi = softmax(l). No gradient flows through q. A target that the
model would hardly ever produce gives little gradient, and wrong tokens that it does produce are pushed down. With
`expected` the sum over draws is exact: -[q(x) log pi(x) + beta * sum over a != x of q(a) log pi(a)].

Reconstruction: no code was published. The value of beta is not known, -0.1 is an assumption; the mean over all tokens
of an optimizer step is the hosts', the paper's is `reduction: sequence`. The paper was read through summaries and
public reviews only (it was withdrawn from ICLR 2026).

At kappa 1 OTR is a noisy DFT (arXiv:2508.05629): a constant shift of all rewards has no expected gradient there, so
beta only multiplies the gradient of `loss_type: dft` by 1 - beta, and the draws add noise. A reviewer proved this; a
test here checks it. The negative reward has a direction of its own only through kappa other than 1. Another reviewer
asked why the closed form is not used: it is `expected`, which needs no draws.""",
    start=START["otr"],
)
