"""Learning from a teacher: in float64 token by token, the exact gradient of the divergence, what a teacher reads."""

from __future__ import annotations

import math

import pytest
import torch
from golden_cases import Case, Golden
from messages import raises

from rl_plugins import testing
from rl_plugins.core.errors import ConfigError
from rl_plugins.core.method import Method
from rl_plugins.methods.opd import Opd
from rl_plugins.methods.opsd import Opsd
from rl_plugins.methods.sdpo import Sdpo
from rl_plugins.runtime.decide import decide, select_rows, teacher_prompts
from rl_plugins.runtime.metrics import combine
from rl_plugins.testing.data import take_rows

NAN = math.nan
OPSD = Golden("opsd")
SDPO = Golden("sdpo")


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_advantages_are_log_ratios(weight):
    rollouts = testing.make_rollouts([1.0, 0, 0, 1], lengths=[3, 1, 2, 4])
    teacher = torch.tensor([-1.0, NAN, -0.5, -60.0, -3.0, NAN, -2.0, -0.25, -1.5, -0.125])
    keep = torch.arange(10) != 4
    tokens = testing.make_tokens(
        rollouts, advantages=torch.tensor([1.0, -1.0, -1.0, 1.0]), teacher_logprobs=teacher, keep=keep
    )
    stack = testing.start_stack(Opsd(Opsd.Params(reward_weight=weight)))
    shaped = stack.call("shape", stack.methods[0], rollouts, tokens)
    wanted, gaps = [], []
    for t in range(10):
        gap = float(teacher[t].double() - tokens.old_logprobs[t].double())
        if keep[t] and not math.isnan(gap):
            gaps.append(gap)
        gap = 0.0 if math.isnan(gap) else max(-20.0, min(20.0, gap))
        wanted.append(weight * float(tokens.advantages[t]) + gap)
    assert shaped.advantages.tolist() == pytest.approx(wanted, abs=1e-12) and shaped.advantages.dtype == torch.float64
    logged = combine([stack.metrics.take()])
    assert logged["opsd/kl"] == pytest.approx(-sum(gaps) / 7) and logged["opsd/taught"] == pytest.approx(7 / 9)


def test_the_expected_gradient_is_that_of_the_divergence():
    """Every token of a vocabulary, weighed by its probability: the policy gradient with these advantages is minus the
    gradient of KL(pi || p_T), exactly."""
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    logp, target = logits.log_softmax(-1), teacher.log_softmax(-1)
    (of_divergence,) = torch.autograd.grad((logp.exp() * (logp - target)).sum(), logits, retain_graph=True)
    rollouts = testing.make_rollouts([0.0] * 7, group_size=7, lengths=[1] * 7)
    columns = dict(old_logprobs=logp.detach(), teacher_logprobs=target)
    method = Opd(Opd.Params(teacher="x"))
    advantages = method.shape(rollouts, testing.make_tokens(rollouts, **columns)).advantages
    p = logp.detach().exp()
    (of_policy,) = torch.autograd.grad((p * advantages * logp).sum(), logits)
    torch.testing.assert_close(of_policy, -of_divergence, rtol=0, atol=1e-12)


def advantages_of(method, mask, old, teacher):
    """(rows, time) that a method gives the tokens of a mask, 0 elsewhere."""
    rollouts = testing.make_rollouts([0.0] * len(mask), group_size=len(mask), lengths=mask.sum(1).tolist())
    tokens = testing.make_tokens(rollouts, old_logprobs=old[mask], teacher_logprobs=teacher[mask])
    found = torch.zeros(mask.shape, dtype=torch.float64)
    found[mask] = method.shape(rollouts, tokens).advantages
    return found


def tensors(case: Case, *names: str) -> list[torch.Tensor]:
    return [torch.tensor(list(case.inputs[name]), dtype=torch.float64) for name in names]


@SDPO.kind("self_distillation_mask")
def check_sdpo(case: Case) -> None:
    """Rows without feedback are out of the authors' mean, and have advantage 0 here."""
    old, teacher, mask, told = tensors(case, "old_logprobs", "teacher_logprobs", "mask", "self_distillation_mask")
    read = mask * told[:, None] > 0
    found = advantages_of(Sdpo(), mask > 0, old, torch.where(read, teacher, NAN))
    wanted = torch.tensor(list(case.expected["gradient"]), dtype=torch.float64)
    torch.testing.assert_close(-found / read.sum(), wanted, rtol=0, atol=1e-9)


@OPSD.kind("teacher_logits")
def check_opsd(case: Case) -> None:
    logits, teacher, mask, ids = tensors(case, "logits", "teacher_logits", "mask", "token_ids")

    def of_sampled(x: torch.Tensor) -> torch.Tensor:
        return (x / case.params["temperature"]).log_softmax(-1).gather(-1, ids.long()[..., None])[..., 0]

    logp = of_sampled(logits.requires_grad_())
    found = advantages_of(Opsd(), mask > 0, logp.detach(), of_sampled(teacher))
    (gradient,) = torch.autograd.grad(-(found * logp).sum() / mask.sum(), logits)
    wanted = torch.tensor(list(case.expected["gradient"]), dtype=torch.float64)
    torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", SDPO.cases, ids=str)
def test_golden_sdpo(case: Case) -> None:
    SDPO.check(case)


@pytest.mark.parametrize("case", OPSD.cases, ids=str)
def test_golden_opsd(case: Case) -> None:
    OPSD.check(case)


def test_further_golden_cases() -> None:
    SDPO.check_further_cases()
    OPSD.check_further_cases()


def test_opsd_reads_the_solution():
    said = [{"role": "system", "content": "Sort."}, {"role": "user", "content": "a:21"}]
    meta = {"prompt": ["2+2?", said, "1+1?", "0?"], "s": ["4", "12", None, ""]}
    method = Opsd(Opsd.Params(answer_column="s", template="It is {answer}. Not {x}."))
    assert method.needs >= {"column:prompt", "column:s", "teacher_logprobs"}
    rows = testing.make_rollouts([1.0, 0, 0, 1], meta=meta)
    behind = {"role": "user", "content": "a:21\nIt is 12. Not {x}."}
    assert method.teacher_prompts(rows) == ["2+2?\nIt is 4. Not {x}.", [said[0], behind], None, None]
    assert said[1]["content"] == "a:21"


def sdpo_rollouts(**changes):
    """Groups with two, one, and no right answer; the last has feedback."""
    rewards = [1.0, 0.0, 1.0, NAN, 0.0, 1.0, 0.0, 0.0]
    group = [0, 0, 0, 0, 1, 1, 2, 2]
    meta = {"prompt": [f"q{g}" for g in group], "said": [None] * 6 + ["error 7", ""]}
    text = [f"answer {i}" for i in range(8)]
    return testing.make_rollouts(rewards, group, meta=meta, text=text, **changes)


def told(i: int, *parts: str) -> str:
    return "\n".join([f"q{i}", *parts, "\nCorrectly solve the original question."])


def test_sdpo_reads_another_right_answer_or_feedback():
    method = Sdpo(Sdpo.Params(feedback_column="said"))
    right = "Correct solution:\n\nanswer {}\n"
    wanted = [
        *(told(0, right.format(j)) for j in (2, 0, 0, 0)),
        told(1, right.format(5)),
        None,  # the only right one of its group
        told(2, "The following is feedback from your unsuccessful earlier attempt:\n\nerror 7\n"),
        None,
    ]
    rollouts = sdpo_rollouts()
    assert method.teacher_prompts(rollouts) == wanted
    order = torch.tensor([7, 2, 5, 0, 6, 1, 4, 3])
    assert method.teacher_prompts(take_rows(rollouts, order)) == [wanted[i] for i in order]
    assert Sdpo(Sdpo.Params(success=0.0)).teacher_prompts(rollouts)[6:] == [
        told(2, right.format(7)),
        told(2, right.format(6)),
    ]


def test_sdpo_shows_all_rows_of_a_rollout():
    """Two rollouts of two rows each: the right one is shown whole, to both rows of the other."""
    rollouts = testing.make_rollouts(
        [1.0, 1.0, 0.0, 0.0],
        [0] * 4,
        rollout=torch.tensor([0, 0, 1, 1]),
        index=torch.tensor([1, 0, 0, 1]),
        meta={"prompt": ["q0"] * 4},
        text=["second", "first", "wrong", "again"],
    )
    prompts = Sdpo().teacher_prompts(rollouts)
    assert prompts == [None, None, *[told(0, "Correct solution:\n\nfirst\n\nsecond\n")] * 2]


def test_rows_that_left_are_not_read_and_selected_once():
    class Leaves(Method):
        name = "leaves"
        calls = 0

        def select(self, rollouts):
            Leaves.calls += 1
            return torch.arange(len(rollouts)) != 5

    stack = testing.start_stack(Leaves(), Sdpo())
    rollouts = sdpo_rollouts()
    selection = select_rows(stack, rollouts)
    prompts = teacher_prompts(stack, selection)
    assert [p is not None for p in prompts] == [True] * 4 + [False] * 4
    tokens = testing.make_tokens(rollouts)
    decide(stack, rollouts, tokens, None, lambda r: torch.zeros(len(r)), 8, selection)
    assert Leaves.calls == 1
    assert teacher_prompts(testing.start_stack(Opd(Opd.Params(teacher="x"))), selection) is None


def test_what_is_refused():
    with raises(ConfigError, "`teacher` is empty"):
        Opd.Params()
    with raises(ConfigError, "it must have a place for {answer}"):
        Opsd.Params(template="the answer")
    with raises(ConfigError, "The methods `opd` and `sdpo` both decide what the teacher is"):
        testing.start_stack(Opd(Opd.Params(teacher="x")), Sdpo())

    class Gives(Method):
        """Gives prompts that nobody asked for."""

        name = "gives"

        def teacher_prompts(self, rollouts):
            return [None] * len(rollouts)

    with pytest.raises(AssertionError, match="Add it to `needs`"):
        testing.check_method(Gives)
