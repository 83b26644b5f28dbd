"""The same optimizer steps in plain transformers and torch: float64, one row at a time, Python loops, no verl."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from engine import Case, Result, Row, padding
from torch import Tensor
from transformers import AutoModelForCausalLM

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum")
FACTOR = 9  # of seq-mean-token-sum-norm
EXTRAS: dict[str, Any] = dict(use_kl_loss=True, kl_loss_coef=0.2, entropy_coeff=0.05)
EXACT = 1e-6  # relative distance of two float32 gradients of one objective at the same weights
LATER = 3e-6  # the same after steps that rounding has sent to other weights


def mode(how: str, **more: Any) -> dict[str, Any]:
    """Options of the actor for this aggregation."""
    factor = {"loss_scale_factor": FACTOR} if how == "seq-mean-token-sum-norm" else {}
    return {"loss_agg_mode": how, **factor, **more}


def with_gaps(rows: list[Row]) -> list[Row]:
    """Every third token left; the sixth row was masked by verl, so it has no token but counts as a row."""
    out = [r.but(mask=(torch.arange(len(r.mask)) % 3 != 1).long()) for r in rows]
    return [r.but(mask=torch.zeros_like(r.mask)) if i == 5 else r for i, r in enumerate(out)]


def filled(kept: list[Row], size: int) -> list[Row]:
    """Kept rows between the rows verl adds."""
    pads = [padding(kept[0], prompt=3 + 5 * i) for i in range(size - len(kept))]
    return [*pads[:1], *kept[: len(kept) // 2], *pads[1:], *kept[len(kept) // 2 :]]


def same_gradients(a: Result, b: Result, first: float = EXACT) -> None:
    """Step by step; `first` bounds the relative difference of the first."""
    assert len(a.gradients) == len(b.gradients)
    for i, (x, y) in enumerate(zip(a.gradients, b.gradients, strict=True)):
        assert relative(x, y) < (LATER if i else first), (i, relative(x, y))


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / "policy", attn_implementation="eager", dtype=torch.float64)


def at(folder: Path, weights: Tensor) -> Any:
    """The policy with these flat weights."""
    model = load(folder)
    parameters = list(model.parameters())
    with torch.no_grad():
        for p, values in zip(parameters, weights.split([p.numel() for p in parameters]), strict=True):
            p.copy_(values.view_as(p))
    return model


def live(model: Any, row: Row, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of a row's response."""
    logits = model(torch.cat([row.prompt, row.response])[None]).logits[0, len(row.prompt) - 1 : -1] / temperature
    p = logits.log_softmax(-1)
    return p.gather(1, row.response[:, None])[:, 0], -(p.exp() * p).sum(-1)


def make_rows(model: Any, n: int, seed: int = 0, temperature: float = 1.0) -> list[Row]:
    """Rows of uneven length, far enough from the policy that every clip and bound is met."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(n):
        size = int(torch.randint(1, 12, (1,), generator=g))

        def noise(scale: float, size: int = size) -> Tensor:
            return scale * torch.randn(size, generator=g)

        prompt = torch.randint(6, 60, (int(torch.randint(2, 7, (1,), generator=g)),), generator=g)
        response = torch.randint(6, 60, (size,), generator=g)
        nothing = torch.zeros(size)
        row = Row(prompt, response, torch.ones(size, dtype=torch.int64), *[nothing] * 5)
        with torch.no_grad():
            lp = live(model, row, temperature)[0].float()
        far = 1.6 * (torch.rand(size, generator=g) < 0.2)
        rows.append(
            row.but(
                advantages=noise(1.0),
                old=lp + noise(0.25) - far,
                rollout=lp + noise(0.3),
                ref=lp + noise(0.4),
                weight=noise(1.0).exp(),
                group=i // 4,
                row_columns={"number": float(i), "positive": float(i % 4 in (0, i // 4 % 4))},
                token_columns={"scale": noise(1.0)},
            )
        )
    return rows


def vanilla(lp: Tensor, entropy: Tensor, row: Row) -> Tensor:
    """PPO's clip at 0.2 with dual clip at 3, token by token."""
    out = []
    for t, a in enumerate(row.advantages.tolist()):
        ratio = torch.exp(lp[t] - row.old[t].double())
        value = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
        out.append(torch.minimum(value, torch.tensor(-3.0 * a).double()) if a < 0 else value)
    return torch.stack(out)


def kl(lp: Tensor, row: Row) -> Tensor:
    """verl's "low_var_kl" for small differences."""
    d = row.ref.double() - lp
    return d.exp() - d - 1


Term = Callable[[Tensor, Tensor, Row], Tensor]


def objective(model: Any, case: Case, surrogate: Term | None = vanilla, added: Sequence[Term] = ()) -> Tensor:
    """The loss of one optimizer step; rows that are not real count nowhere."""
    rows = [r for r in case.rows if r.real]
    how = case.actor.get("loss_agg_mode", "token-mean")
    tokens = sum(int(r.mask.sum()) for r in rows)
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        lp, entropy = live(model, row, case.temperature)
        value = torch.zeros(len(lp), dtype=torch.float64)
        if surrogate is not None:
            value = surrogate(lp, entropy, row) * (row.weight.double() if case.weighted else 1.0)
        for term in added:
            value = value + term(lp, entropy, row)
        value = value - case.actor.get("entropy_coeff", 0.0) * entropy
        if case.actor.get("use_kl_loss"):
            value = value + case.actor["kl_loss_coef"] * kl(lp, row)
        chosen = value[row.mask > 0]
        if not len(chosen):
            continue
        if how == "token-mean":
            total = total + chosen.sum() / tokens
        elif how == "token-sum":
            total = total + chosen.sum()
        elif how == "seq-mean-token-mean":
            total = total + chosen.mean() / len(rows)
        elif how == "seq-mean-token-sum":
            total = total + chosen.sum() / len(rows)
        else:
            total = total + chosen.sum() / FACTOR / len(rows)
    return total


def gradient(model: Any, loss: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def relative(a: Tensor, b: Tensor) -> float:
    """Distance of `a` from `b`, relative to the norm of `b`, which must say something."""
    assert b.norm() > 1e-4
    return float((a.double() - b.double()).norm() / b.double().norm())
