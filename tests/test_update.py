"""`runtime/update.py`: before_update over all rows of an optimizer step, and the checks of what hooks return."""

from __future__ import annotations

import math
import re

import pytest
import torch
from one_method import UNREADABLE, Exits

from rl_plugins.core.errors import MethodError
from rl_plugins.core.method import Method
from rl_plugins.core.rollouts import Rows, Update
from rl_plugins.runtime import validate
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.runtime.update import (
    MAX_SKIPPED,
    SkippedSteps,
    before_update,
    check_gradient,
    masked_sum,
    regularizer,
    row_sums,
    surrogate,
)
from rl_plugins.testing import make_terms


def part(*lengths, start=0):
    n = len(lengths)
    return Rows(
        group=torch.arange(start, start + n),
        length=torch.tensor(lengths),
        old_logprobs=-torch.arange(start, start + n).double(),
        columns={"mine": 10.0 * torch.arange(start, start + n).double()},
    )


PARTS = [part(3, 0, 2), part(0, start=3), part(4, 1, start=4)]  # rows 1 and 3 are not trained


class Asks(Method):
    name = "asks"

    def __init__(self, answer, name="asks"):
        super().__init__()
        self.answer, self.name, self.seen = answer, name, []

    def before_update(self, rows):
        self.seen.append(rows)
        self.log("rows", len(rows.length))
        return self.answer(rows) if callable(self.answer) else self.answer


class Loses(Method):
    name = "loses"

    def __init__(self, value):
        super().__init__()
        self.value = value

    def policy_loss(self, terms):
        return self.value(terms)

    def regularize(self, terms):
        return self.value(terms)


def test_every_rank_sees_the_trained_rows_of_all_and_gets_columns_for_its_own():
    found = []
    for rank in range(3):
        m = Asks(lambda rows: Update(0.5, {"twice": 2 * rows.columns["mine"]}))
        found.append(before_update(MethodStack([m]), PARTS, rank))
        (rows,) = m.seen
        assert rows.group.tolist() == [0, 2, 4, 5] and rows.length.tolist() == [3, 2, 4, 1]
        assert rows.old_logprobs.tolist() == [0, -2, -4, -5] and rows.logprobs is None
        assert rows.columns["mine"].tolist() == [0, 20, 40, 50]
    assert [u.lr_scale for u in found] == [0.5] * 3
    assert [u.columns["twice"].tolist() for u in found] == [[0, 0, 40], [0], [80, 100]]
    assert all(u.columns["twice"].dtype == torch.float32 for u in found)


def test_factors_multiply_a_later_column_wins_and_none_changes_nothing():
    def column(value):
        return lambda rows: Update(0.5, {"x": torch.full((len(rows.length),), value)})

    stack = MethodStack([Asks(column(1.0), "a"), Asks(None, "b"), Asks(column(2.0), "c")])
    update = before_update(stack, PARTS, 0)
    assert update.lr_scale == 0.25 and update.columns["x"].tolist() == [2, 0, 2]
    assert stack.lr_scales == {"a": 0.5, "c": 0.5}


def test_only_the_first_rank_keeps_what_was_logged():
    for rank, kept in ((0, {"asks/rows": ("mean", 4.0, 1.0)}), (2, {})):
        stack = MethodStack([Asks(None)])
        before_update(stack, PARTS, rank)
        assert stack.metrics.take() == kept


def test_a_step_without_a_trained_row_is_asked_with_none():
    m = Asks(lambda rows: Update(columns={"x": rows.length.float()}))
    update = before_update(MethodStack([m]), [part(0, 0)], 0)
    assert len(m.seen[0].length) == 0 and update.columns["x"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ([1, 2], "list instead of an Update"),
        ("fast", "str instead of an Update"),
        (Update(math.nan), "`lr_scale` is nan; it must be a finite number of at least 0"),
        (Update(-0.5), "`lr_scale` is -0.5"),
        (Update(math.inf), "`lr_scale` is inf"),
        (Update(torch.ones(2)), "`lr_scale` is tensor"),
        (Update("1"), "`lr_scale` is '1'"),
        (
            Update(columns={"x": torch.ones(3)}),
            r"the column `x` needs one entry per row \(4\), it has \(3,\)",
        ),
        (Update(columns={"x": "abc"}), "the column `x` must be a tensor .*, it gave str"),
        (Update(columns=[1]), "`columns` is list"),
        (Update(columns={"x": Exits()}), re.escape(UNREADABLE)),
    ],
)
def test_what_is_illegal_is_refused_by_name(answer, why):
    with pytest.raises(MethodError, match=f"Method `asks` returned something illegal from `before_update`: {why}"):
        before_update(MethodStack([Asks(answer)]), PARTS, 0)


def test_a_factor_may_be_a_tensor_of_one_number():
    assert before_update(MethodStack([Asks(Update(torch.tensor(0.25)))]), PARTS, 0).lr_scale == 0.25


def test_hooks_in_the_loss_give_one_number_per_token():
    terms = make_terms()
    twice = MethodStack([Loses(lambda t: 2 * t.logprobs)])
    assert torch.equal(surrogate(twice, terms), 2 * terms.logprobs)
    assert torch.equal(regularizer(twice, terms), 2 * terms.logprobs)
    assert regularizer(MethodStack([]), terms) is None
    rows, time = terms.logprobs.shape
    for value, given in (
        (torch.ones(rows + 1, time), rf"\({rows + 1}, {time}\)"),
        (torch.ones(rows, 1), rf"\({rows}, 1\)"),
        (torch.tensor(1.0), r"\(\)"),
        ([1.0], "list"),
        (None, "NoneType"),
    ):
        with pytest.raises(MethodError, match=rf"`policy_loss`: a tensor of shape .* is needed; it gave {given}"):
            surrogate(MethodStack([Loses(lambda t, value=value: value)]), terms)


def test_a_surrogate_must_have_a_gradient_and_be_finite_where_tokens_are_trained():
    terms = make_terms()
    logprobs = terms.logprobs.detach().requires_grad_()
    terms = terms.replace(logprobs=logprobs)
    with pytest.raises(MethodError, match="`policy_loss`: it has no gradient; it must depend on `terms.logprobs`"):
        surrogate(MethodStack([Loses(lambda t: t.advantages)]), terms)
    with pytest.raises(MethodError, match="`regularize`: it has no gradient"):
        regularizer(MethodStack([Loses(lambda t: t.advantages)]), terms)
    regularizer(MethodStack([Loses(lambda t: 0 * t.advantages)]), terms)  # a method that has nothing to add
    with pytest.raises(MethodError, match="`policy_loss`: it has no gradient"):
        surrogate(MethodStack([Loses(lambda t: 0 * t.advantages)]), terms)

    def broken_backward(t):
        value = t.logprobs * 1
        value.register_hook(lambda gradient: 1 / 0)
        return value

    for ask, hook in ((surrogate, "policy_loss"), (regularizer, "regularize")):
        with pytest.raises(MethodError, match=f"`loses`.*from `{hook}`: it cannot be read .ZeroDivisionError"):
            ask(MethodStack([Loses(broken_backward)]), terms)
    regularizer(MethodStack([Loses(lambda t: t.advantages)]), terms.replace(logprobs=logprobs.detach(), entropies=None))
    hole = (terms.mask > 0).nonzero()[0]
    for bad in (math.nan, math.inf):

        def broken(t, bad=bad):
            value = t.logprobs.clone()
            value[tuple(hole)] = bad
            return value

        for ask, hook in ((surrogate, "policy_loss"), (regularizer, "regularize")):
            with pytest.raises(MethodError, match=f"`{hook}`: the value of a trained token is NaN or infinite"):
                ask(MethodStack([Loses(broken)]), terms)
    masked = terms.replace(mask=torch.zeros_like(terms.mask))
    surrogate(MethodStack([Loses(broken)]), masked)  # what is not trained does not count


def test_regularizers_add_up():
    class Second(Loses):
        name = "second"
        policy_loss = Method.policy_loss

    class First(Second):
        name = "first"

    stack = MethodStack([First(lambda t: t.logprobs), Second(lambda t: 2 * t.logprobs)])
    terms = make_terms()
    assert torch.allclose(regularizer(stack, terms), 3 * terms.logprobs)


def test_a_plain_sum_leaves_out_what_is_masked():
    x = torch.tensor([[1.0, math.nan], [2.0, 3.0]])
    assert masked_sum(x, torch.tensor([[1, 0], [1, 1]])) == 6
    sums = row_sums(x.half(), torch.tensor([[1, 0], [1, 1]]))
    assert sums.tolist() == [1, 5] and sums.dtype == torch.float64
    assert row_sums(torch.full((1, 4), 60_000.0).half(), torch.ones(1, 4)).tolist() == [4 * 60_000]  # beyond float16


# ---- what mutants showed was not asked


def test_a_step_may_be_taken_with_a_learning_rate_of_0():
    assert before_update(MethodStack([Asks(Update(0))]), PARTS, 0).lr_scale == 0


def test_columns_are_float32_whatever_the_default_is():
    torch.set_default_dtype(torch.float64)  # as hosts do while they load a model
    try:
        update = before_update(MethodStack([Asks(lambda rows: Update(columns={"x": rows.length}))]), PARTS, 0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert update.columns["x"].dtype == torch.float32 and update.columns["x"].tolist() == [3, 0, 2]


def test_a_column_is_read_on_the_cpu_whatever_the_default_device_is():
    m = Asks(None)
    with torch.device("meta"):  # as on a machine whose default device is a GPU
        checked = validate.update(m, Update(columns={"x": [1, 2]}), 2)
    assert checked.columns["x"].tolist() == [1, 2]


def test_an_illegal_regularizer_is_refused_by_name():
    class Second(Loses):
        name = "second"
        policy_loss = Method.policy_loss

    stack = MethodStack([Loses(lambda t: t.logprobs), Second(lambda t: torch.ones(5, 3))])
    why = r"`second` returned something illegal from `regularize`: a tensor of shape \(4, 6\), one value per token"
    with pytest.raises(MethodError, match=why):
        regularizer(stack, make_terms())


# ---- gradients that are not finite


@pytest.mark.parametrize("where", ["trained", "masked"])
@pytest.mark.parametrize(("ask", "hook"), [(surrogate, "policy_loss"), (regularizer, "regularize")])
def test_a_gradient_that_is_not_finite_is_refused_with_the_hook(ask, hook, where):
    """d sqrt(x) is infinite at 0, and infinity times the 0 of torch.where is NaN. The values are all finite."""
    terms = make_terms()

    def rooted(t):
        chosen = t.mask > 0 if where == "masked" else t.mask == 0
        return t.logprobs + torch.where(chosen, 0.0, (0 * t.logprobs).abs().sqrt())

    terms = terms.replace(logprobs=terms.logprobs.detach().requires_grad_())
    assert bool(rooted(terms).isfinite().all())
    with pytest.raises(MethodError, match=f"`loses`.*`{hook}`: its gradient is NaN or infinite.*masked tokens too"):
        ask(MethodStack([Loses(rooted)]), terms)


def test_a_surrogate_of_another_graph_has_no_gradient():
    terms, other = make_terms(), torch.ones(4, 6, requires_grad=True)
    with pytest.raises(MethodError, match="`policy_loss`: it has no gradient"):
        surrogate(MethodStack([Loses(lambda t: 2 * other)]), terms)


@pytest.mark.parametrize("norm", [math.nan, math.inf, -math.inf])
def test_a_norm_that_is_not_finite_is_an_error_that_names_who_is_in_the_loss(norm):
    loses = Loses(lambda terms: terms.logprobs)
    check_gradient(MethodStack([loses]), 1e30)
    with pytest.raises(MethodError, match=f"gradient is {norm}.*`loses` \\(policy_loss\\), `loses` \\(regularize\\)"):
        check_gradient(MethodStack([loses]), norm)
    with pytest.raises(MethodError, match="In the loss: `asks` \\(before_update\\)"):
        check_gradient(MethodStack([Asks(None)]), norm)
    with pytest.raises(MethodError, match="No method is in the loss; nor makes one the advantages"):
        check_gradient(MethodStack([]), norm)
    made = type("Made", (Method,), {"name": "made", "advantages": lambda self, rollouts: rollouts.reward})
    with pytest.raises(
        MethodError, match="No method is in the loss; the advantages are made by `made` \\(advantages\\)"
    ):
        check_gradient(MethodStack([made()]), norm)


def test_a_host_that_skips_steps_goes_on_until_it_does_nothing_else(caplog):
    stack, skipped = MethodStack([Loses(None)]), SkippedSteps()
    for share in [*[1.0] * (MAX_SKIPPED - 1), 0.5, *[1.0] * (MAX_SKIPPED - 1)]:
        skipped.count(stack, share)
    assert caplog.text.count("the host skips the step") == 1 and "`loses` (policy_loss)" in caplog.text
    with pytest.raises(MethodError, match=f"NaN or infinite {MAX_SKIPPED} times in a row"):
        skipped.count(stack, 1.0)
