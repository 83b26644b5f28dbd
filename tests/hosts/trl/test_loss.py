"""The loss path and the normalizers: equal to TRL's own wherever TRL has an answer."""

from __future__ import annotations

import pytest
import torch
from harness import history, length, make, score, stub_sampling, weights
from messages import raises
from safetensors.torch import load_file
from transformers import TrainerCallback

from rl_plugins.core.errors import MethodError
from rl_plugins.runtime import update

pytestmark = pytest.mark.host


def run(tmp_path, methods=(), **kwargs):
    with stub_sampling():
        t = make(tmp_path, methods, **kwargs)
        t.train()
    return t


def difference(a, b):
    return (weights(a) - weights(b)).abs().max().item()


def moved(t, tmp_path):
    return (weights(t) - weights(make(tmp_path))).abs().max().item()


OFF_POLICY = dict(num_iterations=2, max_steps=4, learning_rate=0.3, epsilon=0.05, epsilon_high=0.1)


@pytest.mark.parametrize(
    ("loss_type", "level", "form"),
    [
        ("dapo", "token", "ppo"),
        ("grpo", "token", "ppo"),
        ("dr_grpo", "token", "ppo"),
        ("luspo", "sequence", "ppo"),
        ("grpo", "sequence", "ppo"),
        ("cispo", "token", "cispo"),
        ("dapo", "sequence", "ppo"),
    ],
)
@pytest.mark.parametrize("extras", [{}, dict(beta=0.04, entropy_coef=0.01, gradient_accumulation_steps=2)])
def test_own_surrogate_equals_native(tmp_path, loss_type, level, form, extras):
    """PPO-clip or CISPO as a method's `policy_loss` trains like TRL's own, KL and entropy bonus included."""
    options = {**OFF_POLICY, "loss_type": loss_type, "importance_sampling_level": level, **extras}
    options["epsilon_high"] = 1.02 if form == "cispo" else 0.1
    native = run(tmp_path, stock=True, **options)
    params = {"ppo": {"low": 0.05, "high": options["epsilon_high"], "level": level, "form": form}}
    own = run(tmp_path, ["ppo"], method_params=params, **options)
    assert difference(native, own) < 2e-6
    assert moved(native, tmp_path) > 1e-3
    assert history(own, "loss") == pytest.approx(history(native, "loss"), abs=2e-6)
    assert not any(k.startswith("clip_ratio") for h in own.state.log_history for k in h)
    if "entropy_coef" in extras:
        assert history(own, "policy_loss") == pytest.approx(history(native, "policy_loss"), abs=2e-6)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_rows_that_trl_masks_are_trls(tmp_path, loss_type):
    """Truncated completions that TRL masks did not leave: TRL counts them in its mean over rows, and so do we."""
    options = {**OFF_POLICY, "loss_type": loss_type, "mask_truncated_completions": True, "beta": 0.04}
    native = run(tmp_path, stock=True, **options)
    looked = run(tmp_path, ["noop"], **options)
    own = run(tmp_path, ["ppo"], method_params={"ppo": {"low": 0.05, "high": 0.1}}, **options)
    assert torch.equal(weights(native), weights(looked))
    assert list(native._logs["advantages"]) == list(looked._logs["advantages"])
    assert difference(native, own) < 2e-6
    unmasked = run(tmp_path, stock=True, **{**options, "mask_truncated_completions": False})
    assert difference(native, unmasked) > 1e-4


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_an_optimizer_step_is_a_part_of_a_batch(tmp_path, loss_type):
    """4 micro-batches of 16 rows, 2 of them in an optimizer step: the first step against autograd of -A lp, a mean over
    the step's tokens (the batch's, by its share) or over its 32 rows of means over tokens."""
    options = dict(steps_per_generation=4, gradient_accumulation_steps=2, loss_type=loss_type, max_grad_norm=0.0)
    t = run(tmp_path, ["ppo"], max_steps=1, learning_rate=10.0, **options)
    start = make(tmp_path)
    batches = t._buffered_inputs
    tokens = sum(int(b["completion_mask"].sum()) for b in batches)
    assert len(batches) == 4 and [len(b["advantages"]) for b in batches] == [16] * 4
    total = 0.0
    for b in batches[:2]:
        ids = torch.cat([b["prompt_ids"], b["completion_ids"]], 1)
        attention = torch.cat([b["prompt_mask"], b["completion_mask"]], 1)
        lp = start._get_per_token_logps_and_entropies(start.model, ids, attention, b["completion_ids"].size(1))[0]
        for i in range(len(lp)):
            n = int(b["completion_mask"][i].sum())
            row = -(b["advantages"][i] * lp[i, :n]).sum()
            total = total + (row / (tokens / 2) if loss_type == "dapo" else row / n / 32)
    total.backward()
    grad = torch.cat([p.grad.flatten() for p in start.model.parameters()])
    moved_by = (weights(t) - weights(start)) / -10.0
    assert grad.norm() > 1e-3 and (moved_by - grad).norm() / grad.norm() < 1e-4


def test_own_surrogate_under_entropy_quantile_and_off_policy_mask(tmp_path):
    options = {**OFF_POLICY, "top_entropy_quantile": 0.5, "off_policy_mask_threshold": 1e-4}
    native = run(tmp_path, stock=True, **options)
    own = run(tmp_path, ["ppo"], method_params={"ppo": {"low": 0.05, "high": 0.1}}, **options)
    plain = run(tmp_path, stock=True, **OFF_POLICY)
    assert difference(native, own) < 2e-6
    assert difference(native, plain) > 1e-4, "the masks must have changed something"


def test_update_metrics_do_not_depend_on_micro_batches(tmp_path):
    a = run(tmp_path, ["ppo"], **OFF_POLICY)
    b = run(tmp_path, ["ppo"], gradient_accumulation_steps=4, **OFF_POLICY)
    assert history(a, "ppo/ratio") == pytest.approx(history(b, "ppo/ratio"), rel=1e-5)
    assert history(a, "ppo/rows") == history(b, "ppo/rows") == [64.0] * 4


def test_entropy_term_has_a_gradient(tmp_path):
    """`regularize` on the entropies against plain autograd through the model."""
    with stub_sampling():
        t = make(
            tmp_path,
            ["corridor"],
            max_steps=1,
            max_grad_norm=0.0,
            learning_rate=10.0,
            reward=lambda completion_ids, **k: [0.5] * len(completion_ids),
        )  # equal rewards: TRL's own loss has no gradient
        t.train()
    start = make(tmp_path)
    (batch,) = t._buffered_inputs
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    entropies = start._get_per_token_logps_and_entropies(
        start.model, ids, attention, batch["completion_ids"].size(1), compute_entropy=True
    )[1]
    mask = batch["completion_mask"]
    term = 0.1 * (torch.relu(2.0 - entropies) + torch.relu(entropies - 2.5))
    ((term * mask).sum() / mask.sum()).backward()
    before = weights(start)
    grad = torch.cat([p.grad.flatten() for p in start.model.parameters()])
    assert grad.norm() > 1e-3
    torch.testing.assert_close(weights(t) - before, -10.0 * grad, rtol=1e-4, atol=2e-6)
    assert (10.0 * grad).abs().max() > 1e-2


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "vespo", "grpo", "sapo", "dr_grpo", "luspo"])
def test_rows_that_left_count_nowhere(tmp_path, loss_type):
    """`select` keeps the first 4 of 8 groups: the update is TRL's own on a batch of those 4 groups."""
    options = dict(loss_type=loss_type, beta=0.04, max_steps=1, shuffle_dataset=False)
    kept = run(tmp_path, ["half"], gradient_accumulation_steps=2, **options)
    alone = run(tmp_path, stock=True, per_device_train_batch_size=32, **options)
    assert difference(kept, alone) < 1e-7
    assert moved(alone, tmp_path) > 1e-6
    assert history(kept, "rl_plugins/rows_trained") == [32.0]


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize(
    "methods", [["filter"], ["uneven"], ["odd"], ["small"], ["over"], ["filter", "ppo"], ["per_token"]]
)
def test_split_into_micro_batches_changes_nothing(tmp_path, loss_type, methods):
    options = dict(loss_type=loss_type, beta=0.04, num_iterations=2, max_steps=4, learning_rate=0.05)
    runs = [run(tmp_path, methods, gradient_accumulation_steps=k, **options) for k in (1, 4)]
    assert difference(*runs) < 2e-7
    assert history(runs[0], "grad_norm") == pytest.approx(history(runs[1], "grad_norm"), rel=1e-4)


def test_bf16_checkpointing_and_a_compiled_model(tmp_path):
    """Layers computed again and a compiled model change nothing; bf16 changes what its eight bits of precision do."""
    methods, options = ["mc_grpo", "minpro"], {**OFF_POLICY, "loss_type": "grpo"}
    whole = run(tmp_path, methods, **options)
    half = run(tmp_path, methods, **options, bf16=True)
    same = dict(gradient_checkpointing=True, torch_compile=True, torch_compile_backend="eager")
    compiled = run(tmp_path, methods, **options, bf16=True, **same)
    far = moved(whole, tmp_path)
    assert difference(half, compiled) < 1e-6 < 1e-3 < far
    assert 1e-6 < difference(whole, half) < 0.5 * far
    assert history(compiled, "loss") == pytest.approx(history(half, "loss"), abs=1e-6)


def test_group_objective_in_before_update(tmp_path):
    """Coefficients from the row sums at the current weights give the gradient of the undivided objective."""
    options = dict(num_iterations=2, max_steps=2, max_grad_norm=0.0, learning_rate=0.05)
    for accumulation in (1, 4):
        t = run(tmp_path, ["softmax"], gradient_accumulation_steps=accumulation, **options)
        first = run(tmp_path, ["softmax"], gradient_accumulation_steps=accumulation, **{**options, "max_steps": 1})
        objective(first, t._buffered_inputs).backward()
        grad = torch.cat([p.grad.flatten() for p in first.model.parameters()])
        step = (weights(t) - weights(first)) / -0.05
        assert (step - grad).norm() / grad.norm() < 1e-5
        assert history(t, "softmax/groups") == [8.0, 8.0]


def objective(t, batches):
    """The same objective with Python loops over the groups, in one graph."""
    score, group, positive = [], [], []
    for b in batches:
        ids = torch.cat([b["prompt_ids"], b["completion_ids"]], 1)
        attention = torch.cat([b["prompt_mask"], b["completion_mask"]], 1)
        lp = t._get_per_token_logps_and_entropies(t.model, ids, attention, b["completion_ids"].size(1))[0]
        score.append((lp * b["completion_mask"]).sum(1) / b["completion_mask"].sum(1))
        group.append(b["rlp_group"])
        positive.append(b["rlp_row_column:positive"] > 0)
    score, group, positive = torch.cat(score), torch.cat(group), torch.cat(positive)
    total = 0.0
    for g in group.unique():
        p, n = score[(group == g) & positive], score[(group == g) & ~positive]
        if len(p) and len(n):
            total = total - p.mean() + torch.logsumexp(n, 0)
    return total / len(group.unique())


def test_learning_rate_of_one_step(tmp_path):
    full = run(tmp_path, ["softmax"], max_steps=1)
    tenth = run(tmp_path, ["softmax"], max_steps=1, method_params={"softmax": {"lr_scale": 0.1}})
    start = weights(make(tmp_path))
    torch.testing.assert_close(weights(tenth) - start, 0.1 * (weights(full) - start), rtol=1e-3, atol=2e-7)
    assert history(tenth, "learning_rate") == history(full, "learning_rate")


def test_nothing_kept_moves_nothing(tmp_path, monkeypatch):
    """A batch without a single row to learn from leaves the weights alone, AdamW's decay included."""
    import probes

    monkeypatch.setattr(probes.Half, "select", lambda self, rollouts: rollouts.group < 0)
    t = run(tmp_path, ["half"], optim="adamw_torch", weight_decay=0.1)
    assert torch.equal(weights(t), weights(make(tmp_path)))
    assert history(t, "grad_norm") == [0.0, 0.0]


class Steps(TrainerCallback):
    """Weights before each optimizer step, and how many the optimizer has made of each parameter."""

    def __init__(self):
        self.weights, self.made = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.weights.append(torch.cat([p.detach().float().flatten() for p in model.parameters()]))

    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        states = optimizer.optimizer.state.values()
        self.made.append(max((int(s["step"]) for s in states), default=0))


ADAM = dict(optim="adamw_torch", weight_decay=0.1, learning_rate=0.01)


def test_a_step_without_a_row_is_none_for_the_optimizer(tmp_path, caplog):
    """After two steps AdamW has momentum. Of the next batch, in two steps, one row stays; of the last none: the weights
    rest in the steps without a token, and the optimizer does not count them."""
    steps = Steps()
    options = dict(steps_per_generation=2, gradient_accumulation_steps=1, max_steps=6, **ADAM)
    t = run(tmp_path, ["nearly"], callbacks=[steps], **options)
    after = [*steps.weights[1:], weights(t)]
    rests = [torch.equal(a, b) for a, b in zip(steps.weights, after, strict=True)]
    assert rests[:2] == [False, False] and sorted(rests[2:4]) == [False, True] and rests[4:] == [True, True]
    assert steps.made[1] == 2 and steps.made[-1] == 3
    assert history(t, "rl_plugins/rows_trained")[-2:] == [1.0, 0.0]
    assert history(t, "grad_norm")[4:] == [0.0, 0.0] and history(t, "loss")[4:] == [0.0, 0.0]
    assert caplog.text.count("Every row of a batch left (`nearly`)") == 1


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_a_gradient_that_is_not_finite_ends_the_run_before_the_weights_move(tmp_path, max_grad_norm):
    """A method's term and its gradient are finite, that of the model is not. The last checkpoint is good."""
    options = dict(max_grad_norm=max_grad_norm, save_strategy="steps", save_steps=1, max_steps=3, **ADAM)
    made = []

    def build(**params):
        made.append(make(tmp_path, ["steep"], method_params={"steep": params}, **options))
        return made[-1]

    with stub_sampling():
        with raises(MethodError, match=r"gradient is (nan|inf).*In the loss: `steep` \(regularize\)") as error:
            build().train()
        assert "Remove the method from `methods`" in str(error.value)
        saved = load_file(tmp_path / "out" / "checkpoint-1" / "model.safetensors")
        assert not (tmp_path / "out" / "checkpoint-2").exists()
        for name, value in made[0].model.state_dict().items():
            assert name not in saved or torch.equal(value, saved[name]), name
        resumed = build(first=9)
        resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert resumed.state.global_step == 3 and bool(weights(resumed).isfinite().all())
    assert difference(resumed, made[0]) > 1e-4


class LossScale(TrainerCallback):
    """A loss scale as fp16 has it, on a CPU."""

    def __init__(self, accelerator, scale):
        self.accelerator, self.scaler = accelerator, torch.amp.GradScaler("cpu", init_scale=scale)
        accelerator.scaler, accelerator.native_amp = self.scaler, True

    def on_train_begin(self, args, state, control, **kwargs):
        self.accelerator.state._mixed_precision = "fp16"

    def on_train_end(self, args, state, control, **kwargs):
        self.accelerator.state._mixed_precision = "no"


def scaled(tmp_path, methods, scale, **options):
    t = make(tmp_path, methods, **{**ADAM, **options})
    t.add_callback(LossScale(t.accelerator, scale))
    try:
        with stub_sampling():
            t.train()
    finally:
        t.accelerator.state._mixed_precision = "no"
    return t


def test_an_overflow_of_a_loss_scale_ends_no_run(tmp_path, caplog):
    """It is ordinary, and the scaler skips the step: that is counted. A step without a row is none there either."""
    params = {"nearly": {"empty": 2}, "steep": {"first": 0, "last": 0}}
    steps = Steps()
    t = scaled(tmp_path, ["nearly", "steep"], 2.0**16, max_steps=4, method_params=params, callbacks=[steps])
    assert history(t, "rl_plugins/steps_skipped") == [1.0, 0.0, 0.0, 0.0]
    assert torch.equal(steps.weights[1], steps.weights[0]) and torch.equal(steps.weights[3], weights(t))
    assert bool(weights(t).isfinite().all()) and moved(t, tmp_path) > 1e-4
    assert caplog.text.count("the host skips the step") == 1


def test_a_loss_scale_that_only_overflows_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(update, "MAX_SKIPPED", 3)
    message = r"NaN or infinite 3 times in a row.*the weights are good.*`steep` \(regularize\)"
    with raises(MethodError, match=message):
        scaled(tmp_path, ["steep"], 2.0**16, max_steps=5, method_params={"steep": {"first": 0}})


def test_several_rewards_and_none(tmp_path):
    """Weights, None rewards and NaN rows: an estimator of ours equals TRL's on equal groups."""

    def sometimes(completion_ids, **kwargs):
        return [None if len(c) % 3 == 0 else len(c) / 5 for c in completion_ids]

    for options in (
        {},
        dict(scale_rewards="batch"),
        dict(scale_rewards="none"),
        dict(multi_objective_aggregation="normalize_then_sum"),
    ):
        shared = dict(reward=[score, length, sometimes], reward_weights=[1.0, 0.5, 2.0], **options)
        native = run(tmp_path, stock=True, **shared)
        ours = run(tmp_path, ["zero_spare"], **shared)
        assert ours.batch_phase is None and difference(native, ours) < 1e-7, options
