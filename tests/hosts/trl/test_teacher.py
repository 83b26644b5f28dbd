"""Log-probs of completions under another prompt and by another model, as a plain forward pass in float64 gives them."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import make, policy, score, stub_sampling, weights
from messages import raises
from transformers import AutoModelForCausalLM

from rl_plugins.core.errors import ConfigError
from rl_plugins.lab.demo.policy import build_model

pytestmark = pytest.mark.host
TEMPERATURE = 0.7


def logprobs(model, prompt, completion) -> torch.Tensor:
    """(completion,) of one row, without padding."""
    with torch.no_grad():
        logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / TEMPERATURE, -1).gather(1, completion[:, None])[:, 0]


def in_float64(model):
    made = copy.deepcopy(model).double().eval()
    made.forward = type(made).forward.__get__(made)  # without TRL's fused head
    return made


@pytest.mark.parametrize("micro_batch", [64, 4])
def test_under_the_prompts_of_the_method(tmp_path, micro_batch):
    """Hints of several lengths pad each other on the left; whatever the micro-batch is, a row has its own values."""
    import probes

    steps = 64 // micro_batch
    options = dict(per_device_train_batch_size=micro_batch, gradient_accumulation_steps=steps, learning_rate=0.0)
    t = make(tmp_path, ["hinted"], max_steps=1, temperature=TEMPERATURE, **options)
    with stub_sampling():
        t.train()
    rollouts, tokens = probes.Hinted.seen
    model, ids = in_float64(t.accelerator.unwrap_model(t.model)), rollouts.token_ids
    hinted = torch.full((len(tokens),), torch.nan, dtype=torch.float64)
    for prompt, row in zip(probes.Hinted.prompts, rollouts.kept.nonzero()[:, 0].tolist(), strict=True):
        if prompt is not None:
            other = torch.tensor(t._tokenize_prompts([prompt])[0][0])
            assert len(other) > len(ids.prompt[row])
            hinted[tokens.row == row] = logprobs(model, other, ids.completion[row])
    inside = rollouts.kept[tokens.row]
    taught = tokens.teacher_logprobs.double()
    torch.testing.assert_close(taught[inside], hinted[inside], rtol=0, atol=1e-5, equal_nan=True)
    read = ~torch.isnan(taught)
    assert 0.5 < float(read.double().mean()) < 0.8
    assert float((taught - tokens.old_logprobs)[read].abs().max()) > 1e-3, "another prompt gives other log-probs"


def test_of_another_model(tmp_path):
    """The advantages of `opd` are log-ratios to a model of its own weights, under each row's own prompt."""
    import probes

    teacher = policy(tmp_path / "teacher")
    build_model(7).save_pretrained(teacher)
    options = dict(method_params={"opd": {"teacher": str(teacher)}}, temperature=TEMPERATURE, learning_rate=0.0)
    t = make(tmp_path, ["opd", "signals"], max_steps=1, beta=0.04, **options)
    with stub_sampling():
        t.train()
    rollouts, tokens = probes.Signals.seen[0]
    model, ids = AutoModelForCausalLM.from_pretrained(teacher).double().eval(), rollouts.token_ids
    own = in_float64(t.accelerator.unwrap_model(t.model))
    for row in range(0, 64, 9):
        row_ids = ids.prompt[row], ids.completion[row]
        wanted = logprobs(model, *row_ids) - logprobs(own, *row_ids)
        torch.testing.assert_close(tokens.advantages[tokens.row == row], wanted, rtol=0, atol=2e-5)
    assert not any(p.requires_grad and p.grad is not None for p in t.accelerator.unwrap_model(t.teacher).parameters())
    logged = next(h for h in t.state.log_history if "opd/kl" in h)
    assert logged["opd/kl"] == pytest.approx(-float(tokens.advantages.mean()), abs=1e-5) and logged["opd/taught"] == 1


def test_a_teacher_of_another_tokenizer_is_refused(tmp_path):
    from transformers import AutoTokenizer

    teacher = policy(tmp_path / "teacher")
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    vocabulary = tokenizer.get_vocab()
    swapped = {**vocabulary, "1": vocabulary["2"], "2": vocabulary["1"]}
    text = (teacher / "tokenizer.json").read_text()
    for token in "12":
        text = text.replace(f'"{token}": {vocabulary[token]},', f'"{token}": {swapped[token]},')
    (teacher / "tokenizer.json").write_text(text)
    with raises(ConfigError, "2 tokens of the policy have other ids"):
        make(tmp_path, ["opd"], max_steps=1, method_params={"opd": {"teacher": str(teacher)}})


@pytest.mark.parametrize(("name", "params"), [("opsd", {"template": "={answer}"}), ("sdpo", {"success": 0.8})])
def test_the_policy_teaches_itself(tmp_path, name, params):
    """A step moves the policy; every row has a solution, and not every group a right answer."""
    t = make(tmp_path, [name], max_steps=1, method_params={name: params}, reward=score)
    before = weights(t)
    with stub_sampling():
        t.train()
    (logged,) = (h for h in t.state.log_history if f"{name}/kl" in h)
    assert logged[f"{name}/taught"] == 1 if name == "opsd" else 0 < logged[f"{name}/taught"] < 1
    assert logged[f"{name}/kl"] != 0 and not torch.equal(before, weights(t)) and bool(weights(t).isfinite().all())
