"""TRL's SFTTrainer with the loss of OTR: against float64 autograd, TRL's own DFT, and itself in other layouts."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace

import clean_processes
import pytest
import torch
import trl
from harness import history, weights
from messages import raises
from peft import LoraConfig, get_peft_model
from sft_runs import OTR, dataset, make, policy, trained
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, TrainerCallback

from rl_plugins.core.errors import ConfigError
from rl_plugins.tools.supervised.otr import OtrParams
from rl_plugins.trl.commands import script, sft

pytestmark = pytest.mark.host


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("sft")
    policy(path / "policy")
    return path


@pytest.fixture(scope="module")
def once(folder):
    """Weights that a run ends with; runs of the same options are made once."""
    return functools.cache(lambda **options: trained(folder, **options))


@pytest.fixture(scope="module")
def start(folder):
    return weights(make(folder))


def sequences(batch):
    """Ids and labels of each sequence of a micro-batch; packed ones lie in one row, and their places begin anew."""
    for i, (ids, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
        begins = (batch["position_ids"][i] == 0).nonzero()[:, 0].tolist() if "position_ids" in batch else [0]
        for begin, end in zip(begins, [*begins[1:], len(ids)], strict=True):
            yield ids[begin:end], labels[begin:end]


def reference(folder, batches, reduction="token", vocabulary=None, model=None):
    """The gradient of one optimizer step in float64, by autograd and plain loops over the rows.

    Args:
        batches: micro-batches of the step, as the trainer had them.
        vocabulary: ids behind it are padding of the head.
        model: in float64; None: that of the folder.
    """
    params = OtrParams(expected=True)
    model = model or AutoModelForCausalLM.from_pretrained(folder / "policy").double()
    terms, tokens = [], 0
    for batch in batches:
        for ids, labels in sequences(batch):
            log_p = model(ids[None]).logits[0, :-1].log_softmax(-1)
            of = []
            for t, x in enumerate(labels[1:].tolist()):
                if x == -100:
                    continue
                q = log_p[t].detach() / params.kappa
                q[len(q) if vocabulary is None else vocabulary :] = -torch.inf
                q = q.softmax(-1)
                reward = torch.full_like(q, params.beta)
                reward[x] = 1.0
                of.append(-(q * reward * log_p[t])[:vocabulary].sum())
            tokens += len(of)
            if of:
                terms.append((torch.stack(of).sum(), len(of)))
    loss = sum(s for s, _ in terms) / tokens if reduction == "token" else sum(s / n for s, n in terms) / len(terms)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


class Batches(TrainerCallback):
    """Keeps what `compute_loss` gets, and the gradient of the last optimizer step."""

    def __init__(self):
        self.seen = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()

    def watch(self, trainer):
        own = trainer.compute_loss

        def compute_loss(model, inputs, *args, **kwargs):
            self.seen.append({k: v.clone() if torch.is_tensor(v) else v for k, v in inputs.items()})
            return own(model, inputs, *args, **kwargs)

        trainer.compute_loss = compute_loss
        trainer.add_callback(self)
        return trainer


@pytest.mark.parametrize("reduction", ["token", "sequence"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_one_step_is_the_gradient_of_float64_autograd(folder, start, reduction, accumulation):
    watch = Batches()
    trainer = watch.watch(
        make(folder, max_steps=1, gradient_accumulation_steps=accumulation, otr_reduction=reduction, **OTR)
    )
    trainer.train()
    assert len(watch.seen) == accumulation
    loss, gradient = reference(folder, watch.seen, reduction)
    assert (watch.gradient - gradient).norm() / gradient.norm() < 2e-6
    assert (weights(trainer) - start).norm() > 0.01
    assert history(trainer, "loss")[0] == pytest.approx(loss, rel=1e-4)
    assert loss < 0.6 and gradient.norm() > 0.01


@pytest.mark.parametrize(
    ("reduction", "packed", "adapter"), [("token", True, False), ("sequence", True, True), ("token", False, True)]
)
def test_packing_and_adapters(folder, reduction, packed, adapter):
    """Packed sequences do not see each other and count one by one; with LoRA the adapter alone has a gradient. Against
    the same loop, two micro-batches of unequal content."""
    options = dict(max_steps=1, gradient_accumulation_steps=2, otr_reduction=reduction, **OTR)
    if packed:
        options |= dict(packing=True, max_length=48, per_device_train_batch_size=3)
    lora = dict(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"])
    watch = Batches()
    trainer = watch.watch(make(folder, peft_config=LoraConfig(**lora) if adapter else None, **options))
    model = AutoModelForCausalLM.from_pretrained(folder / "policy")
    if adapter:
        torch.manual_seed(1)
        for name, p in trainer.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.1)  # it begins at 0, where the other half has no gradient
        model = get_peft_model(model, LoraConfig(**lora))
        model.load_state_dict(trainer.model.state_dict())
    begun = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    trainer.train()
    assert len(watch.seen) == 2 and [len(b["input_ids"]) for b in watch.seen] == [1 if packed else 16] * 2
    counts = [len(list(sequences(b))) for b in watch.seen]
    assert sum(counts) > 12 if packed else counts == [16, 16]
    loss, gradient = reference(folder, watch.seen, reduction, model=model.double())
    assert (watch.gradient - gradient).norm() / gradient.norm() < 2e-6
    assert history(trainer, "loss")[0] == pytest.approx(loss, rel=1e-4)
    moved = {k for k, v in trainer.model.state_dict().items() if not torch.equal(v, begun[k])}
    if adapter:
        assert all("lora_" in k for k in moved) and len(moved) == 2 * 2 * 2  # layers, modules, halves
    else:
        assert len(moved) > 10


def test_padding_of_the_head_is_not_drawn(tmp_path):
    policy(tmp_path / "policy", padding=9)
    watch = Batches()
    trainer = watch.watch(make(tmp_path, max_steps=1, **OTR))
    vocabulary = len(trainer.processing_class)
    trainer.train()
    _, gradient = reference(tmp_path, watch.seen, vocabulary=vocabulary)
    assert (watch.gradient - gradient).norm() / gradient.norm() < 2e-6
    assert (gradient - reference(tmp_path, watch.seen)[1]).norm() / gradient.norm() > 0.1


def test_expected_form_without_beta_at_kappa_1_is_trl_s_dft(once):
    """Also under accumulation; both are far from cross-entropy."""
    plain = once(stock=True)
    for accumulation in (1, 4):
        dft = once(stock=True, loss_type="dft", gradient_accumulation_steps=accumulation)
        ours = once(otr_beta=0.0, otr_kappa=1.0, gradient_accumulation_steps=accumulation, **OTR)
        assert (ours - dft).abs().max() < 1.2e-7  # two steps of rounding beside 1
        assert (plain - dft).abs().max() > 1e-3


def test_without_the_loss_it_is_trl_bit_for_bit(once):
    for loss_type in ("nll", "dft"):
        assert torch.equal(
            once(loss_type=loss_type), once(stock=True, **({} if loss_type == "nll" else {"loss_type": loss_type}))
        )


def test_padding_and_micro_batches_change_nothing(once):
    for reduction in ("token", "sequence"):
        one = once(**OTR) if reduction == "token" else once(otr_reduction=reduction, **OTR)
        for changes in (dict(gradient_accumulation_steps=8), dict(pad_to_multiple_of=40)):
            other = once(otr_reduction=reduction, **changes, **OTR)
            assert (one - other).abs().max() < 1e-6, (reduction, changes)
    assert (one - once(**OTR)).abs().max() > 1e-5, "the reductions must differ"


def test_draws_depend_on_their_step_and_are_repeated(folder, once, start):
    sampled = dict(loss_type="otr", otr_samples=8, max_steps=3)
    first = make(folder, save_strategy="steps", save_steps=2, **sampled)
    first.train()
    torch.manual_seed(123)  # nothing of torch's own stream is used
    assert torch.equal(weights(first), trained(folder, **sampled))
    resumed = make(folder, **sampled)
    resumed.train(resume_from_checkpoint=str(Path(resumed.args.output_dir) / "checkpoint-2"))
    assert torch.equal(weights(resumed), weights(first))
    one = dict(sampled, max_steps=1)  # over several steps a draw may lie beside a bound that rounding moves
    few = once(**one)
    assert (few - once(otr_seed=1, **one)).abs().max() > 1e-5
    padded = once(pad_to_multiple_of=40, **one) - few
    assert padded.abs().max() < 1e-6, "places without a target must draw nothing"
    many = once(loss_type="otr", otr_samples=20_000, max_steps=1)
    exact = once(max_steps=1, **OTR)
    assert (many - exact).norm() < 0.1 * (exact - start).norm() < (few - exact).norm()


class Shapes(TorchDispatchMode):
    """The largest tensor that any operation made."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for o in out if isinstance(out, (tuple, list)) else [out]:
            if torch.is_tensor(o):
                self.largest = max(self.largest, o.numel())
        return out


def test_one_forward_pass_and_no_tensor_of_tokens_and_vocabulary(folder, monkeypatch):
    from rl_plugins.tools.supervised import otr

    trainer = make(folder, max_steps=1, **OTR)
    hidden, vocabulary = trainer.model.config.hidden_size, trainer.model.config.vocab_size
    monkeypatch.setattr(otr, "BLOCK", 4 * vocabulary)
    calls, heads = [], []
    trainer.model.model.register_forward_hook(lambda *a: calls.append(1))
    own = sft.head_loss

    def head_loss(hidden, *args):
        heads.append(len(hidden))
        with Shapes() as shapes:
            out = own(hidden, *args)
        heads.append(shapes.largest)
        return out

    monkeypatch.setattr(sft, "head_loss", head_loss)
    trainer.train()
    (tokens, largest) = heads
    assert calls == [1]
    assert tokens == sum(len(r["completion"]) + 1 for r in _first_rows(trainer)), "targets alone reach the head"
    assert largest <= max(8 * vocabulary, tokens * 4, vocabulary * hidden) < tokens * vocabulary


def _first_rows(trainer):
    rows = dataset()
    order = list(iter(trainer.get_train_dataloader().batch_sampler))[0]
    return [rows[i] for i in order]


def test_what_is_logged(folder):
    trainer = make(folder, **OTR)
    trainer.train()
    stock = make(folder, stock=True)
    stock.train()
    assert history(trainer, "otr/nll")[0] == pytest.approx(history(stock, "loss")[0], rel=1e-4)
    assert 0 < history(trainer, "otr/share")[0] < 0.3
    for name in ("entropy", "mean_token_accuracy", "num_tokens"):
        assert history(trainer, name)[0] == pytest.approx(history(stock, name)[0], rel=1e-5), name


def test_evaluation_stays_trl_s_cross_entropy(folder):
    found = make(folder, **OTR).evaluate(dataset(16))
    wanted = make(folder, stock=True).evaluate(dataset(16))
    assert found["eval_loss"] == wanted["eval_loss"]


def test_rows_without_a_target(folder):
    """All of a micro-batch: nothing moves for it, and nothing is NaN."""
    data = dataset(32)
    blank = [{"input_ids": [5, 6, 7], "labels": [-100] * 3}] * 32
    full = make(folder).train_dataset.to_list()[:32]
    rows = type(data).from_list([{k: r[k] for k in ("input_ids", "labels")} for r in full])
    nothing = type(data).from_list(blank)
    for reduction in ("token", "sequence"):
        options = dict(otr_reduction=reduction, max_steps=1, dataset_kwargs={"skip_prepare_dataset": True}, **OTR)
        trainer = make(folder, data=nothing, **options)
        before = weights(trainer)
        trainer.train()
        assert torch.equal(weights(trainer), before) and history(trainer, "loss") == [0.0]
        mixed = type(data).from_list([*rows.to_list(), *blank])
        half = trained(folder, data=mixed, per_device_train_batch_size=16, gradient_accumulation_steps=4, **options)
        assert (half - trained(folder, data=rows, **options)).abs().max() < 1e-7


def test_two_ranks_make_the_steps_of_one(folder, once, tmp_path):
    cases = [
        OTR,
        {**OTR, "otr_reduction": "sequence", "gradient_accumulation_steps": 2},
        {"loss_type": "otr", "otr_samples": 64},
    ]
    out = tmp_path / "weights.pt"
    clean_processes.ranks(2, "sft_runs", "main", folder, cases, out)
    two = torch.load(out)
    one = [once(**case) for case in cases]
    start = weights(make(folder))
    for mine, other in zip(one[:2], two[:2], strict=True):
        assert (mine - other).abs().max() < 1.2e-7
    drawn = [(w - start) for w in (one[2], two[2])]  # other draws, of the same distribution
    assert 0 < (drawn[0] - drawn[1]).norm() < drawn[0].norm()


# ---- packed rows


def test_sequences_of_a_packed_row():
    inputs = {
        "labels": torch.tensor([[-100, 1, 2, -100, -100, 3, -100, 4, 5]]),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 0, 1, 2]]),
    }
    valid, sequence = sft._targets(inputs)
    assert sequence[valid].tolist() == [1, 1, 2, 3, 3]
    assert sft._sequences(inputs) == 3
    padded = {"labels": torch.tensor([[-100, 1, 2], [-100, -100, -100], [9, 9, -100]]), "attention_mask": None}
    valid, sequence = sft._targets(padded)
    assert sequence[valid].tolist() == [0, 0, 2]
    assert sft._sequences(padded) == 2


# ---- refusals


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(otr_beta=-0.2), "`otr_beta` has no effect: `loss_type` is 'nll'. Set `loss_type: otr`"),
        (dict(loss_type="dft", otr_expected=True), "`otr_expected` has no effect: `loss_type` is 'dft'"),
        (dict(loss_type="otr", otr_kappa=-1.0), "`kappa` is -1.0; it must be > 0"),
        (dict(loss_type="otr", otr_expected=True, otr_samples=2), "`samples` has no effect"),
        (dict(loss_type="otr", label_smoothing_factor=0.1), "`label_smoothing_factor` is 0.1, and OTR has no target"),
        (
            dict(loss_type="otr", otr_reduction="sequence", packing=True, packing_strategy="wrapped"),
            "`packing_strategy: wrapped` cuts them",
        ),
    ],
)
def test_refused_by_the_config(tmp_path, options, text):
    with raises(ConfigError) as e:
        sft.SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", **options)
    assert text in str(e.value)


def test_refused_by_the_trainer(folder, monkeypatch):
    with raises(ConfigError, match="`compute_loss_func`.*`loss_type: otr`"):
        sft.SFTTrainer(
            str(folder / "policy"), make(folder, **OTR).args, train_dataset=dataset(), compute_loss_func=print
        )
    with pytest.raises(ValueError, match="Invalid `loss_type` otr"):  # TRL's own trainer
        trl.SFTTrainer(str(folder / "policy"), make(folder, **OTR).args, train_dataset=dataset())
    other = trl.SFTConfig(output_dir=str(folder), use_cpu=True, bf16=False, report_to="none")
    other.loss_type = "otr"
    with raises(ConfigError, match=r"SFTConfig.*rl_plugins\.trl\.commands\.sft"):
        sft.SFTTrainer(str(folder / "policy"), other, train_dataset=dataset())

    from accelerate import Accelerator

    class Parallel(SimpleNamespace):
        cp_enabled, sp_enabled, sp_backend, tp_enabled, tp_size = False, False, None, True, 2

        def __getattr__(self, name):
            return lambda *args, **kwargs: None

    parallel = Parallel()
    monkeypatch.setattr(Accelerator, "parallelism_config", property(lambda self: parallel))
    with raises(ConfigError, match="`tp_size`.*1"):
        make(folder, **OTR)


# ---- the command


def arguments(folder, *more):
    rows = folder / "data" / "train.jsonl"
    rows.parent.mkdir(exist_ok=True)
    dataset(32).to_json(rows)
    return [
        "--model_name_or_path", str(folder / "policy"), "--dataset_name", str(rows.parent), "--output_dir",
        str(folder / "cli"), "--use_cpu", "True", "--bf16", "False", "--report_to", "none", "--max_steps", "1",
        "--per_device_train_batch_size", "32", "--loss_type", "otr", *more,
    ]  # fmt: skip


def test_the_command_trains(folder, monkeypatch):
    seen = []
    own = sft.SFTTrainer.train
    monkeypatch.setattr(sft.SFTTrainer, "train", lambda self, **k: (seen.append(self), own(self, **k))[1])
    sft.run(arguments(folder, "--otr_beta", "-0.3", "--otr_samples", "16"))
    (trainer,) = seen
    assert trainer.otr == OtrParams(beta=-0.3, samples=16) and trainer.state.global_step == 1
    assert history(trainer, "otr/share")[0] > 0 and trl.SFTTrainer is not sft.SFTTrainer
    assert (folder / "cli" / "model.safetensors").exists()


def test_what_the_command_refuses(folder, monkeypatch):
    with raises(ConfigError, match=r"`--otr_bets`.*`trl sft`.*`otr_beta`"):
        script.sort_arguments(arguments(folder, "--otr_bets", "1"), script.SFT)
    with raises(ConfigError, match=r"`rl-plugins trl grpo`"):
        script.sort_arguments(arguments(folder, "--methods", "vade"), script.SFT)
    with raises(ConfigError, match=r"rl_plugins\.trl\.commands\.sft"):
        sft.run(arguments(folder, "--num_processes", "2"))
    started = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", started.append)
    assert script.launch(arguments(folder), script.SFT) == 0
    assert (
        started[0].training_script == "rl_plugins.trl.commands.sft" and "--loss_type" in started[0].training_script_args
    )
