"""Masked diffusion decoding (arXiv 2509.23924): the authors' numbers, exact states, and what must always hold."""

from __future__ import annotations

import math
import re
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_cases import Case, Golden, plain
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_plugins.core.errors import ConfigError
from rl_plugins.kit.masked import (
    Decoding,
    MaskedOptions,
    ascending_blocks,
    ascending_schedule,
    decode,
    decoding,
    end_factor,
    scaled_confidence,
    state_at,
    step_weights,
    trajectory_logprobs,
    uniform_schedule,
)

GOLDEN = Golden("mdlm")
MASK, END, WORDS = 7, 6, 8


class Tiny(torch.nn.Module):
    """A bidirectional model: a token's logits depend on all others."""

    def __init__(self, places: int = 24, width: int = 8, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.place = torch.nn.Embedding(WORDS, width), torch.nn.Embedding(places, width)
        self.mix, self.head = torch.nn.Linear(width, width), torch.nn.Linear(width, WORDS)
        self.passes = 0
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        self.passes += 1
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        return self.head(torch.tanh(x + self.mix(x.mean(1, keepdim=True)))) * 2


@GOLDEN.kind("mask_counts")
def check_uniform_schedules(case: Case) -> None:
    found = uniform_schedule(torch.tensor(case.inputs["mask_counts"]), case.params["steps"])
    assert found.tolist() == case.expected["num_transfer_tokens"]


@GOLDEN.kind(params=("gen_length",))
def check_ascending_schedules(case: Case) -> None:
    length, blocks = case.params["gen_length"], case.params["block_num"]
    assert list(ascending_schedule(length)) == case.expected["tokens_per_step"]
    assert len(ascending_schedule(length)) == case.params["steps"]
    found = ascending_blocks(length, blocks)
    assert [size for size, _ in found] == case.expected["block_sizes"]
    assert [list(steps) for _, steps in found] == case.expected["block_steps"]


@GOLDEN.kind("logits")
def check_confidence_of_end_tokens(case: Case) -> None:
    p = case.params
    kinds = {"linear": "uniform", "exponential": "ascending"}
    factor = end_factor(p["step_idx"], p["total_steps"], p["eos_min_gamma"], p["eos_max_gamma"], kinds[p["kind"]])
    logits, x0 = torch.tensor(plain(case.inputs["logits"]), dtype=torch.float64), torch.tensor(case.inputs["x0"])
    found = scaled_confidence(logits, x0, p["eos_id"], factor)
    torch.testing.assert_close(found, torch.tensor(case.expected["confidence"], dtype=torch.float64), atol=2e-6, rtol=0)


@GOLDEN.kind("new_logps")
def check_loss(case: Case) -> None:
    """The authors' loss is a mean over tokens with advantages times L / (S n_i)."""
    new, old, ref = (floats64(case.inputs[name]) for name in ("new_logps", "old_logps", "ref_logps"))
    unmask, advantages = floats64(case.inputs["unmask"]), floats64(case.inputs["advantages"])
    steps, rows, length = new.shape
    eps, beta = case.params["epsilon"], case.params["beta"]
    new.requires_grad_()
    if case.params["num_iterations"] == 1:
        old = new.detach()
    every = unmask.sum((1, 2), keepdim=True)  # (steps, 1, 1) tokens of all rows that a step unmasks
    weight = unmask.sum() / (steps * every)
    if bool((unmask.sum(-1) == unmask.sum(-1)[:, :1]).all()):  # as in every decoding
        ours = step_weights(unmask.argmax(0), steps)
        torch.testing.assert_close((weight * unmask).sum(0), ours.double(), atol=1e-6, rtol=0)
    ratio, a = torch.exp(new - old), (advantages[None, :, None] * weight)
    loss = -torch.minimum(ratio * a, ratio.clamp(1 - eps, 1 + eps) * a)
    kl = torch.exp(ref - new) - (ref - new) - 1
    total = ((loss + beta * weight * kl) * unmask).sum() / unmask.sum()
    total.backward()
    assert float(total.detach()) == pytest.approx(case.expected["loss"], abs=2e-6)
    torch.testing.assert_close(new.grad, floats64(case.expected["grad_new_logps"]), atol=2e-7, rtol=0)
    mean = [float((x.detach() * unmask).sum() / unmask.sum()) for x in (kl * weight, weight * kept(ratio, a, eps))]
    assert (case.expected["kl"] is None and beta == 0) or mean[0] == pytest.approx(case.expected["kl"], abs=2e-6)
    assert mean[1] == pytest.approx(case.expected["clip_ratio"], abs=1e-6)


def kept(ratio: Tensor, a: Tensor, eps: float) -> Tensor:
    """The authors' clip ratio: tokens outside of the range whose unclipped term is the smaller one."""
    return (ratio * a < ratio.clamp(1 - eps, 1 + eps) * a).double()


def floats64(values: Any) -> Tensor:
    return torch.tensor(plain(values), dtype=torch.float64)


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 600), st.data())
def test_every_token_is_unmasked_once(length: int, data: Any) -> None:
    schedule = ascending_schedule(length)
    assert sum(schedule) == length and min(schedule) >= 1 and len(schedule) == math.floor(math.log2(length))
    blocks = ascending_blocks(length, data.draw(st.integers(1, len(schedule))))
    assert sum(size for size, _ in blocks) == length
    assert [step for _, steps in blocks for step in steps] == list(range(len(schedule)))
    masked, steps = torch.tensor(data.draw(st.lists(st.integers(0, 50), min_size=1))), data.draw(st.integers(1, 20))
    found = uniform_schedule(masked, steps)
    assert torch.equal(found.sum(1), masked) and int((found.max(1).values - found.min(1).values).max()) <= 1


@pytest.mark.parametrize("kind", ["uniform", "ascending"])
def test_the_factor_of_end_tokens_grows_to_its_end(kind: str) -> None:
    factors = [end_factor(i, 7, 0.01, 1.0, kind) for i in range(7)]
    assert factors == sorted(factors) and factors[0] >= 0.01 and factors[-1] <= 1.0
    assert factors[-1] == pytest.approx(1.0 if kind == "uniform" else 0.01 + 0.99 * 127 / 128)
    assert end_factor(0, 1, 0.4, 0.9) == 0.9  # one step: its end
    assert {end_factor(i, 7, 1.0, 1.0, kind) for i in range(7)} == {1.0}  # off


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 40), st.floats(0, 1), st.floats(0, 1), st.sampled_from(["uniform", "ascending"]), st.integers(0, 99)
)
def test_only_end_tokens_are_held_back(steps: int, one: float, other: float, kind: str, seed: int) -> None:
    """The factor never falls and stays between its ends; the confidence of other tokens is untouched."""
    start, stop = sorted((one, other))
    factors = [end_factor(i, steps, start, stop, kind) for i in range(steps)]
    assert all(a <= b + 1e-12 for a, b in pairwise(factors))
    assert start - 1e-12 <= factors[0] and factors[-1] <= stop + 1e-12
    noise = torch.Generator().manual_seed(seed)
    logits, chosen = torch.randn(2, 5, WORDS, generator=noise), torch.randint(0, WORDS, (2, 5), generator=noise)
    plain, held = scaled_confidence(logits, chosen, None), scaled_confidence(logits, chosen, END, factors[0])
    assert torch.equal(held[chosen != END], plain[chosen != END])
    assert torch.equal(held[chosen == END], plain[chosen == END] * factors[0])
    both = scaled_confidence(logits, chosen, [END, 2], factors[0])  # a model with several end tokens
    ends = (chosen == END) | (chosen == 2)
    assert torch.equal(both, torch.where(ends, plain * factors[0], plain))


@st.composite
def decodings(draw: Any) -> Decoding:
    blocks, places, each = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    more = dict(
        temperature=draw(st.sampled_from([0.0, 0.7, 1.0])),
        guidance=draw(st.sampled_from([0.0, 0.5])),
        remasking=draw(st.sampled_from(["confidence", "random"])),
    )
    if draw(st.booleans()):
        length = draw(st.integers(2, 18))
        blocks = draw(st.integers(1, len(ascending_schedule(length))))
        return Decoding(length, schedule="ascending", blocks=blocks, **more)
    return Decoding(blocks * places, steps=blocks * min(each, places), blocks=blocks, **more)


@settings(max_examples=40, deadline=None)
@given(decodings(), st.integers(0, 99))
def test_whatever_is_decoded_its_states_are_exact(how: Decoding, seed: int) -> None:
    """n_i tokens of their block leave the mask in step i and never change; every step weighs the same."""
    prompt = torch.randint(0, 6, (3, 4), generator=torch.Generator().manual_seed(seed))
    answer, at = decode(Tiny(), prompt, how, MASK, END, torch.Generator().manual_seed(seed))
    before, steps = torch.full_like(answer, MASK), how.number_of_steps
    for step, _, end, count in how.plan():
        assert torch.equal(state_at(answer, at, step, MASK), before)
        after = state_at(answer, at, step + 1, MASK)
        changed = after != before
        assert (changed.sum(1) == count).all() and (before[changed] == MASK).all() and not changed[:, end:].any()
        before = after
    assert torch.equal(before, answer) and not (answer == MASK).any()
    weights = step_weights(at, steps)
    for step in range(steps):
        total = (weights * (at == step)).sum(1)
        torch.testing.assert_close(total, torch.full((3,), how.length / steps), atol=1e-4, rtol=0)
    off = replace(how, end_start=1.0, end_stop=1.0)  # to the bit what a model without an end token gives
    other = decode(Tiny(), prompt, off, MASK, None, torch.Generator().manual_seed(seed))
    assert torch.equal(other.answer, answer) and torch.equal(other.unmasked_at, at)


DECODINGS = {
    "uniform": Decoding(12, steps=5),
    "one step": Decoding(12, steps=1),
    "blocks": Decoding(12, steps=6, blocks=3),
    "ascending": Decoding(13, schedule="ascending"),
    "ascending blocks": Decoding(13, schedule="ascending", blocks=2),
    "random": Decoding(12, steps=4, remasking="random"),
    "greedy": Decoding(12, steps=4, temperature=0.0),
    "guided": Decoding(12, steps=4, guidance=0.5),
    "end tokens held back": Decoding(12, steps=4, end_start=0.01),
    "held back by 1, 2, 4": Decoding(13, schedule="ascending", blocks=2, end_start=0.01),
    "held back in blocks": Decoding(12, steps=6, blocks=3, end_start=0.01, end_index="block"),
}


@pytest.mark.parametrize("how", DECODINGS.values(), ids=DECODINGS)
def test_decoding_follows_its_plan(how: Decoding) -> None:
    """A plain loop over rows and places makes the same choice from the model's logits in every state."""
    model, prompt = Tiny(), torch.randint(0, 6, (3, 4), generator=torch.Generator().manual_seed(1))
    found = decode(model, prompt, how, MASK, END, torch.Generator().manual_seed(2))
    assert model.passes == how.number_of_steps * (2 if how.guidance else 1)
    assert not (found.answer == MASK).any() and found.answer.shape == (3, how.length)
    noise = torch.Generator().manual_seed(2)
    for step, in_block, end, count in how.plan():
        assert ((found.unmasked_at == step).sum(1) == count).all()
        state = state_at(found.answer, found.unmasked_at, step, MASK)
        assert (state == MASK).sum(1).tolist() == [int((u >= step).sum()) for u in found.unmasked_at]
        logits = model(torch.cat([prompt, state], 1))[:, 4:]
        if how.guidance:
            plain = model(torch.cat([torch.full_like(prompt, MASK), state], 1))[:, 4:]
            logits = plain + (how.guidance + 1) * (logits - plain)
        logits[..., MASK] = -math.inf
        u = torch.rand(logits.shape, generator=noise, dtype=torch.float64) if how.temperature else None
        shuffled = torch.rand(state.shape, generator=noise, dtype=torch.float64) if how.remasking == "random" else None
        for row in range(3):
            scores = {}
            for t in range(end):
                if state[row, t] != MASK:
                    continue
                z = logits[row, t]
                noisy = z if u is None else z - how.temperature * torch.log(-torch.log(u[row, t]))
                word = int(noisy.argmax())
                c = float(torch.softmax(z, -1)[word]) * (how.end_factor(step, in_block) if word == END else 1)
                scores[t] = (c if shuffled is None else float(shuffled[row, t]), word)
            best = sorted(scores, key=lambda t: -scores[t][0])[:count]
            assert {t: int(found.answer[row, t]) for t in best} == {t: scores[t][1] for t in best}
            assert set(best) == set((found.unmasked_at[row] == step).nonzero()[:, 0].tolist())


@pytest.mark.parametrize(("index", "factors"), [("decoding", [0.4, 0.6, 0.8, 1.0]), ("block", [0.4, 0.6, 0.4, 0.6])])
def test_the_step_that_the_factor_follows(index: Any, factors: list[float]) -> None:
    """In two blocks of two steps the authors' index never gets to the end."""
    how = Decoding(8, steps=4, blocks=2, end_start=0.4, end_index=index)
    assert [how.end_factor(step, i) for step, i, _, _ in how.plan()] == pytest.approx(factors)


def test_the_end_token_waits() -> None:
    """A model that prefers the end token everywhere: without the factor it comes first, with it last."""
    logits = torch.zeros(WORDS).double()
    logits[END] = 1.5

    def model(ids: Tensor) -> Tensor:
        z = logits.expand(*ids.shape, WORDS).clone()
        z[:, 2:6, :] = 0
        z[:, 2:6, 3] = 1.4  # places that hold a word, a little less sure
        return z

    def first(start: float) -> list[int]:
        how = Decoding(8, steps=8, temperature=0.0, end_start=start)
        found = decode(model, torch.zeros(1, 2, dtype=torch.int64), how, MASK, END)
        return found.unmasked_at[0].argsort().tolist()

    assert sorted(first(1.0)[:4]) == [4, 5, 6, 7] and sorted(first(0.1)[:4]) == [0, 1, 2, 3]


@pytest.mark.parametrize("recompute", [False, True])
def test_log_probs_are_those_of_the_states(recompute: bool) -> None:
    """Value and gradient against a loop over single tokens, each in a batch of its own."""
    model, how = Tiny(), Decoding(9, schedule="ascending")
    prompt = torch.randint(0, 6, (4, 5), generator=torch.Generator().manual_seed(1))
    answer, at = decode(model, prompt, how, MASK, END, torch.Generator().manual_seed(3))
    weight = torch.randn(4, 9, generator=torch.Generator().manual_seed(4)).double()
    found, entropies = trajectory_logprobs(
        model, prompt, answer, at, how.number_of_steps, MASK, entropies=True, recompute=recompute
    )
    assert entropies is not None
    ((found.double() + 0.1 * entropies.double()) * weight).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for row in range(4):
        for t in range(9):
            x = torch.tensor([[int(a) if u < at[row, t] else MASK for a, u in zip(answer[row], at[row], strict=True)]])
            lp = torch.log_softmax(model(torch.cat([prompt[row : row + 1], x], 1))[0, 5 + t], -1)
            assert float(lp[answer[row, t]]) == pytest.approx(float(found[row, t].detach()), abs=1e-6)
            spread = -(lp.exp() * lp).sum()
            assert float(spread) == pytest.approx(float(entropies[row, t].detach()), abs=1e-6)
            total = total + weight[row, t] * (lp[answer[row, t]] + 0.1 * spread)
    total.backward()
    for mine, looped in zip(gradients, (p.grad for p in model.parameters() if p.grad is not None), strict=True):
        torch.testing.assert_close(mine, looped, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: Decoding(16, schedule="ascending", steps=5), "has 4"),
        (lambda: Decoding(16, schedule="ascending", blocks=5), "from 1 to 4"),
        (lambda: Decoding(1, schedule="ascending"), "at least 2"),
        (lambda: Decoding(12, steps=6, blocks=5), "must divide the length"),
        (lambda: Decoding(12, steps=0), "at least 1"),
        (lambda: Decoding(12, end_start=-0.1), "`end_start` of the decoding is -0.1"),
        (lambda: Decoding(12, temperature=math.nan), "`temperature` of the decoding is nan"),
        (lambda: Decoding(12, end_index="both"), "allowed: decoding, block"),
        (lambda: uniform_schedule(torch.tensor([3]), 0), "at least one step"),
    ],
)
def test_what_does_not_fit_is_refused(made: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made()


def test_the_page_lists_every_option_with_its_default() -> None:
    page = (Path(__file__).parents[1] / "docs" / "masked_diffusion.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", page, re.MULTILINE)
    assert listed == [(f.name, repr(f.default)) for f in fields(MaskedOptions)]


@pytest.mark.parametrize("remasking", ["confidence", "random"])
def test_what_is_computed_in_parts_is_what_is_computed_at_once(remasking: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are drawn one after another from the same stream; a large batch in float64 would take gigabytes."""
    how, model = Decoding(8, steps=4, remasking=remasking, end_start=0.2), Tiny()
    prompt = torch.randint(0, 6, (5, 3), generator=torch.Generator().manual_seed(1))

    def decoded() -> Any:
        return decode(model, prompt, how, MASK, END, torch.Generator().manual_seed(2))

    whole, sizes = decoded(), []
    choose = decoding._choose
    monkeypatch.setattr(decoding, "AT_ONCE", 2 * 8 * WORDS + 1)
    monkeypatch.setattr(
        decoding, "_choose", lambda logits, *more: (sizes.append(len(logits)), choose(logits, *more))[1]
    )
    assert all(torch.equal(a, b) for a, b in zip(whole, decoded(), strict=True)) and sizes == [2, 2, 1] * 4
