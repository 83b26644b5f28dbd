"""The loss on a device that no test machine has: fake tensors know where they are and hold nothing.

Torch's stand-in is "meta", which a build without CUDA can differentiate on. An operation that mixes it with a tensor on
the CPU raises, as it would on a GPU, and so does every read of a value: what the host may read, it reads in one place.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loss_inputs import Loss, gradients, losses, placed
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from rl_plugins.core.losses import TRL_AGGREGATION, aggregate
from rl_plugins.runtime import update, validate

GPU = torch.device("meta")
OF_METHOD = [next(x for x in losses() if (x.name, x.hook) == key) for key in {(x.name, x.hook): 0 for x in losses()}]


class Reads:
    """Counts what the gate reads, and answers that all is finite, and that a term without gradient is 0."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, flags: Any) -> list[bool]:
        assert len({flag.device for flag in flags}) == 1
        self.count += 1
        return [True, False, *[True] * (len(flags) - 2)]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    counted = Reads()
    monkeypatch.setattr(validate, "read", counted)
    return counted


@pytest.fixture
def mode() -> Any:
    made = FakeTensorMode(allow_non_fake_inputs=True)
    made.allow_meta = True
    return made


def faking(mode: FakeTensorMode, device: torch.device = GPU) -> Any:
    return lambda x: FakeTensor(mode, x.to("meta"), device)


def called(stack: Any, terms: Any, hook: str) -> Tensor:
    value = update.surrogate(stack, terms) if hook == "policy_loss" else update.regularizer(stack, terms)
    assert value is not None
    return value


SIZES = "mode=seq"  # of epo: the number of turns is the size of a tensor, so the host must know it


@pytest.mark.parametrize("loss", [x for x in losses() if SIZES not in str(x)], ids=str)
def test_a_loss_and_its_gradient_stay_on_the_device(loss: Loss, mode: Any, reads: Reads) -> None:
    step = loss.step()
    terms = placed(step.terms(list(range(step.size))), faking(mode))
    step.stack.metrics.take()
    with mode:
        value = called(step.stack, terms, loss.hook)
        total = [
            aggregate(value, terms.mask, how, num_tokens=terms.num_tokens, num_rows=terms.num_rows, max_length=9)
            for how in TRL_AGGREGATION.values()
        ]
        grads = gradients(value, terms)
    assert {x.device for x in (value, *total, *grads)} == {GPU} and value.shape == terms.mask.shape
    assert reads.count == 1, "one read per hook and micro-batch: each makes the host wait for the device"
    logged = [x for _, values in step.stack.metrics._values.values() for pair in values for x in pair]
    assert all(x.device in (GPU, torch.device("cpu")) for x in logged if isinstance(x, Tensor))


@pytest.mark.parametrize("elsewhere", ["a column", "a read"])
def test_what_would_fail_or_wait_on_a_gpu_is_found(elsewhere: str, mode: Any, reads: Reads) -> None:
    step = losses()[0].step()
    terms = placed(step.terms(list(range(step.size))), faking(mode))

    def policy_loss(terms: Any) -> Tensor:
        if elsewhere == "a read":
            return terms.logprobs * float(terms.advantages.mean())
        return terms.logprobs * torch.ones(terms.mask.shape)

    step.method.policy_loss = policy_loss
    with mode, pytest.raises(Exception, match=r"found at least two devices|_local_scalar_dense"):
        update.surrogate(step.stack, terms)


# ---- the adapters


def trl_trainer(step: Any, window: list[dict[str, Tensor]]) -> Any:
    rows = len(window[0]["advantages"])
    return SimpleNamespace(
        methods=step.stack,
        accelerator=SimpleNamespace(num_processes=1, process_index=0, gather=lambda x: x),
        args=SimpleNamespace(
            steps_per_generation=1,
            per_device_train_batch_size=rows,
            loss_type="dapo",
            importance_sampling_level="token",
        ),
        host_loss=SimpleNamespace(like="dapo"),
        state=SimpleNamespace(global_step=1),
        current_gradient_accumulation_steps=1,
        max_completion_length=9,
        off_policy_mask_threshold=None,
        use_vllm=False,
        model=None,
        _get_per_token_logps_and_entropies=lambda *args, **more: (window[0]["old_per_token_logps"], None, None),
        _metrics={"train": {}},
        _step=0,
        _buffered_inputs=window,
        rows=rows,
    )


@pytest.mark.parametrize("loss", OF_METHOD, ids=str)
def test_the_loss_of_trl_stays_on_the_device(loss: Loss, mode: Any, reads: Reads, monkeypatch: Any) -> None:
    """Row sums go to the CPU, columns of the coming step come from there, and the version is read without waiting."""
    pytest.importorskip("trl", reason="TRL is not installed")
    from rl_plugins.trl import host
    from rl_plugins.trl.generation import batches
    from rl_plugins.trl.loss import micro_batch

    step, fake, cpu = loss.step(), faking(mode), faking(mode, torch.device("cpu"))
    terms = placed(step.terms(list(range(step.size))), fake)
    rows = step.size
    inputs: dict[str, Any] = {
        "rlp_group": fake(torch.zeros(rows, dtype=torch.int64)),
        "prompt_ids": fake(torch.zeros(rows, 2, dtype=torch.int64)),
        "prompt_mask": fake(torch.ones(rows, 2, dtype=torch.int64)),
        "completion_ids": fake(torch.zeros(terms.mask.shape, dtype=torch.int64)),
        "completion_mask": terms.mask,
        "advantages": terms.advantages,
        "old_per_token_logps": terms.old_logprobs,
        "num_items_in_batch": terms.num_tokens,
        "rlp_num_rows": terms.num_rows,
        **{host.ROW_COLUMN + k: v[:, 0] for k, v in terms.columns.items() if v.shape[1] == 1},
        **{host.TOKEN_COLUMN + k: v for k, v in terms.columns.items() if v.shape[1] > 1},
    }
    signals = {"rlp_rollout_logprobs": terms.rollout_logprobs, "ref_per_token_logps": terms.ref_logprobs}
    inputs |= {k: v for k, v in signals.items() if v is not None}
    trainer, zero = trl_trainer(step, [inputs]), torch.zeros(rows, dtype=torch.int64)
    decided: Any = SimpleNamespace(version=zero, newest_version=zero, token_versions=None)
    made = {host.VERSION: zero.to(GPU), host.NEWEST_VERSION: zero.to(GPU)}
    inputs |= made | batches._with_versions(trainer, decided, inputs)
    published = inputs.pop(host.PUBLISHED)
    assert published.device == torch.device("cpu"), "every micro-batch reads it"
    inputs[host.PUBLISHED] = int(published)
    seen: list[Any] = []

    def asked(stack: Any, parts: Any, rank: int) -> Any:
        seen.extend(parts)
        return update.Update(1.0, {name: cpu(torch.zeros(rows)) for name in step.update.columns})

    monkeypatch.setattr(update, "before_update", asked)
    monkeypatch.setattr(micro_batch, "gather", lambda accelerator, value: [value])
    with mode:
        micro_batch.before_update(trainer)
        found = micro_batch.LossPass(inputs, through_seam=False)
        found.saw(terms.logprobs, terms.entropies)
        total = micro_batch.compute_loss(trainer, lambda model, batch: terms.logprobs.sum() * 0.0, None, found)
        (grad,) = torch.autograd.grad(total, [terms.logprobs])
    told = [x for x in (*vars(seen[0]).values(), *seen[0].columns.values()) if isinstance(x, Tensor)]
    assert len(told) > 3 and {x.device for x in told} == {torch.device("cpu")}
    assert total.device == grad.device == GPU and reads.count == 1


class Data(dict):
    """As much of a TensorDict as the loss asks for."""

    def clone(self, recurse: bool = True) -> Data:
        return Data(self)


@pytest.mark.parametrize("loss", OF_METHOD, ids=str)
def test_the_loss_of_verl_stays_on_the_device(loss: Loss, mode: Any, reads: Reads, monkeypatch: Any) -> None:
    pytest.importorskip("verl", reason="verl is not installed")
    from verl.workers.utils import losses as host
    from verl.workers.utils import padding

    from rl_plugins.verl import loss as adapter

    step = loss.step()
    terms = placed(step.terms(list(range(step.size))), faking(mode))
    actor = SimpleNamespace(loss_agg_mode="token-mean", global_batch_info={"dp_size": 1, "batch_num_tokens": 9})
    made: Any = object.__new__(adapter.MethodsLoss)
    made.actor, made.stack, made.max_length, made._seam = actor, step.stack, 9, False
    made._published = made._steps_since = 0
    data: dict[str, Any] = {
        "response_mask": terms.mask,
        "advantages": terms.advantages,
        "old_log_probs": terms.old_logprobs,
        "rollout_log_probs": terms.rollout_logprobs,
        "ref_log_prob": terms.ref_logprobs,
        adapter.TOKEN_VERSION: terms.versions,
        "batch_num_tokens": 9,
        "global_batch_size": 4,
        **{adapter.ROW_COLUMN + k: v for k, v in terms.columns.items() if v.shape[1] == 1},
        **{adapter.TOKEN_COLUMN + k: v for k, v in terms.columns.items() if v.shape[1] > 1},
    }
    output = {"log_probs": terms.logprobs, "entropy": terms.entropies}
    monkeypatch.setattr(padding, "no_padding_2_padding", lambda values, data: values)
    monkeypatch.setattr(host, "ppo_loss", lambda actor, output, data, group: (output["log_probs"].sum() * 0.0, {}))
    monkeypatch.setattr(adapter, "flat", lambda column: column.flatten())
    monkeypatch.setattr(adapter, "_correct_metrics", lambda *args: None)  # verl reads each of its metrics, ours too
    with mode:
        total, _ = made(output, Data(data))
        (grad,) = torch.autograd.grad(total, [terms.logprobs])
    assert total.device == grad.device == GPU and reads.count == 1


def test_sampling_reads_nothing_before_the_end(mode: Any) -> None:
    """Log-probs, limits and a race of groups, token after token."""
    pytest.importorskip("trl", reason="TRL is not installed")
    from rl_plugins.trl.generation.sampling import SamplingOptions, SamplingRace, SamplingStop, SamplingWatch

    fake = faking(mode)
    ids, scores = fake(torch.zeros(4, 3, dtype=torch.int64)), fake(torch.zeros(4, 10))
    with mode:
        watch = SamplingWatch(SamplingOptions(1.0, (), top=2), torch.tensor([3, 9, 9, 9]), None)
        race = SamplingRace(torch.tensor([0, 0, 1, 1]), torch.tensor([2, 2]), enough=1)
        stop = SamplingStop(watch, race, [1], GPU)
        for _ in range(3):
            watch(ids, scores)
            ids = torch.cat([ids, ids[:, :1]], 1)
            assert stop(ids, scores).device == GPU
    kept = [*watch._logprobs, *(x for pair in watch._top for x in pair), watch.length]
    assert len(kept) == 2 + 3 * 2 + 1 and {x.device for x in kept} == {GPU}


def test_every_method_with_a_hook_in_the_loss_is_here() -> None:
    assert {"minpro", "scope", "epo", "vcpo", "ppo_million", "decoupled_ppo"} <= {x.name for x in losses()}
