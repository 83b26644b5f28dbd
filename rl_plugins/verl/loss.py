"""The loss in the training workers, and what belongs to one optimizer step.

verl's own `ppo_loss` runs with advantages 0 when a method brings the surrogate: KL, entropy bonus and metrics stay as
they are, and the method's term is added on the same live log-probs, aggregated by verl's `agg_loss`. Where `ppo_loss`
hands extra columns to policy losses (patches/verl/V12), the surrogate goes through that instead.

The object travels to every worker by verl's `set_loss_fn`; it carries names and parameters, never state.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.rollouts import Rows, Terms
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.ranks import dumps
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.runtime.update import SKIPPED, before_update, masked_sum, regularizer, surrogate
from rl_plugins.verl.compat import passes_extra_fields
from rl_plugins.verl.config import Settings
from rl_plugins.verl.host import ActorConfig, Columns, TrainingEngine
from rl_plugins.verl.rows import GROUP, REAL, ROW_COLUMN, ROW_VERSIONS, TOKEN_COLUMN, TOKEN_VERSION, Ragged, flat

POLICY_LOSS = "rl_plugins"  # name in verl's registry, used only with patches/verl/V12
PUBLISHED = "rl_plugins_published"  # in a batch of verl: the newest published weights
STEPS = "rl_plugins_steps_max"  # optimizer steps since their publication; verl takes the largest because of the name
METRIC = "rl_plugins:"  # what follows is the name in hex: verl reduces by words like "min" in a name
T = TypeVar("T")

_serving: list[MethodsLoss] = []  # whose surrogate verl asks for right now


class MethodsLoss:
    """verl's loss function with methods.

    Args:
        actor: the ActorConfig of the run.
        settings: the methods.
        config: the whole config, for the completion length.
    """

    def __init__(self, actor: ActorConfig, settings: Settings, config: Any) -> None:
        self.actor = actor
        self.settings = settings
        self.max_length = int(config.data.max_response_length)
        self._prepare()

    def __getstate__(self) -> dict[str, Any]:
        return {"actor": self.actor, "settings": self.settings, "max_length": self.max_length}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    def _prepare(self) -> None:
        self.stack: MethodStack = self.settings.stack()
        self._published = self._steps_since = 0  # newest published weights, and optimizer steps made since
        self._seam = (
            self.stack.claimed("policy_loss")
            and self.stack.aggregation == "host"
            and "current_entropies" not in self.stack.needs  # verl does not hand them to policy losses
            and passes_extra_fields(self.actor.policy_loss)
        )
        if self._seam:
            register_surrogate()
        wrap_train_batch()

    # ---- one micro-batch

    def __call__(
        self, model_output: Mapping[str, Tensor], data: Columns, dp_group: Any = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Loss and metrics of a micro-batch, as verl's engine asks for them."""
        from verl.workers.utils import losses

        stack, ppo_loss = self.stack, losses.ppo_loss
        if not stack.claimed("policy_loss", "regularize"):
            return ppo_loss(self.actor, model_output, data, dp_group)
        own = stack.claimed("policy_loss")
        if own and self._seam:
            with self._in_place_of_policy_loss(data) as actor:
                loss, metrics = ppo_loss(actor, model_output, data, dp_group)
        else:
            host = data
            if own:
                host = data.clone(recurse=False)
                host["advantages"] = torch.zeros_like(data["advantages"])
            loss, metrics = ppo_loss(self.actor, model_output, host, dp_group)
        terms = self._terms(model_output, data)
        if own and not self._seam:
            per_token = surrogate(stack, terms)
            if "rollout_is_weights" in data:
                per_token = per_token * _padded(data["rollout_is_weights"], terms.logprobs)
            value = self._aggregate(per_token, terms)
            _correct_metrics(metrics, value)
            loss = loss + value
        added = regularizer(stack, terms)
        if added is not None:
            loss = loss + self._aggregate(added, terms)
        return loss, metrics

    @contextmanager
    def _in_place_of_policy_loss(self, data: Columns) -> Iterator[ActorConfig]:
        """verl's actor config with our surrogate as policy loss, which verl hands the columns (patches/verl/V12)."""
        columns = [k for k in _names(data) if k.startswith((ROW_COLUMN, TOKEN_COLUMN))]
        signals = {"rollout_logprobs": "rollout_log_probs", "ref_logprobs": "ref_log_prob"}
        columns += [column for name, column in signals.items() if name in self.stack.needs]
        columns += [TOKEN_VERSION] if self.stack.in_loss("token_versions") else []
        loss = dataclasses.replace(self.actor.policy_loss, loss_mode=POLICY_LOSS, extra_fields=columns)
        actor = copy.copy(self.actor)
        object.__setattr__(actor, "policy_loss", loss)  # the config is frozen, and this is a copy
        _serving.append(self)
        try:
            yield actor
        finally:
            _serving.remove(self)

    def _terms(self, model_output: Mapping[str, Tensor], data: Columns) -> Terms:
        """What hooks in the loss see of this micro-batch."""
        from verl.workers.utils.padding import no_padding_2_padding

        logprobs = no_padding_2_padding(model_output["log_probs"], data)
        entropies = None
        if "current_entropies" in self.stack.needs:
            entropies = no_padding_2_padding(model_output["entropy"], data)
        columns = {k.removeprefix(ROW_COLUMN): flat(data[k])[:, None] for k in _names(data) if k.startswith(ROW_COLUMN)}
        columns |= {
            k.removeprefix(TOKEN_COLUMN): _padded(data[k], logprobs) for k in _names(data) if k.startswith(TOKEN_COLUMN)
        }

        def signal(name: str, column: str) -> Tensor | None:
            return _padded(data[column], logprobs) if name in self.stack.needs else None

        return Terms(
            mask=_padded(data["response_mask"], logprobs).long(),
            logprobs=logprobs,
            entropies=entropies,
            advantages=_padded(data["advantages"], logprobs),
            old_logprobs=_padded(data["old_log_probs"], logprobs),
            num_tokens=torch.tensor(float(data["batch_num_tokens"]), device=logprobs.device),
            num_rows=torch.tensor(float(data["global_batch_size"]), device=logprobs.device),
            max_length=self.max_length,
            rollout_logprobs=signal("rollout_logprobs", "rollout_log_probs"),
            ref_logprobs=signal("ref_logprobs", "ref_log_prob"),
            columns=columns,
            versions=_padded(data[TOKEN_VERSION], logprobs) if self.stack.in_loss("token_versions") else None,
            current_version=self._published,
            steps_since_published=self._steps_since,
        )

    def _aggregate(self, per_token: Tensor, terms: Terms) -> Tensor:
        from verl.trainer.ppo.core_algos import agg_loss

        mask = terms.mask.bool()
        info = self.actor.global_batch_info  # filled by `ppo_loss` just before
        if self.stack.aggregation == "sum":
            return masked_sum(per_token, mask) * info["dp_size"]  # gradients are averaged over ranks
        safe = torch.where(mask, per_token, 0.0)  # verl multiplies with the mask, and NaN times 0 is NaN
        return agg_loss(loss_mat=safe, loss_mask=mask, loss_agg_mode=self.actor.loss_agg_mode, **info)

    # ---- one optimizer step

    def train_batch(self, host: Callable[..., dict[str, Any]], engine: TrainingEngine, data: Columns) -> dict[str, Any]:
        """verl's optimizer step on this rank's rows of one mini-batch.

        Only here it is known which rows a step holds, so here `global_batch_size` becomes the number of rows that are
        trained, over all ranks; rows verl added to fill the batch are not among them. A step without a token is left
        out on every rank, because AdamW would move the weights without a gradient.
        """
        from verl.utils import tensordict_utils as tu
        from verl.utils.device import get_device_id

        if REAL not in data:
            raise MethodError(
                f"The batch of an optimizer step lacks the column `{REAL}`, so the decisions of the methods did not "
                f"reach it. Only the trainers of rl-plugins may be used with this loss."
            )
        group = engine.get_data_parallel_group()
        counts = torch.tensor([int(flat(data[REAL]).sum()), int(flat(data["loss_mask"]).sum())]).to(get_device_id())
        torch.distributed.all_reduce(counts, group=group)
        rows, tokens = counts.tolist()
        tu.assign_non_tensor(data, global_batch_size=rows)
        published = int(tu.get(data, PUBLISHED))
        if published != self._published:
            self._published, self._steps_since = published, 0
        if not tokens:
            metrics = {"grad_norm": 0.0, STEPS: [float(self._steps_since)]}
            return {"model_output": {}, "loss": [0.0], "metrics": metrics}
        scale = self._before_update(engine, data, group) if self.stack.claimed("before_update") else 1.0
        rates = [g["lr"] for g in engine.optimizer.param_groups]
        for g in engine.optimizer.param_groups:
            g["lr"] = g["lr"] * scale
        try:
            output = host(engine, data, loss_function=self)
        finally:
            for g, rate in zip(engine.optimizer.param_groups, rates, strict=True):
                g["lr"] = rate
        self._steps_since += 1
        values: dict[str, float] = {}
        if self.stack.claimed("before_update", "policy_loss", "regularize"):
            values = combine(_gather(self.stack.metrics.take(), group))
        if engine.is_mp_src_rank_with_outputs():
            values[SKIPPED] = float(not math.isfinite(output["metrics"]["grad_norm"]))  # verl's engines leave it out
            output["metrics"][STEPS] = [float(self._steps_since)]
            output["metrics"] |= {METRIC + name.encode().hex(): [value] for name, value in values.items()}
        return output

    def _before_update(self, engine: TrainingEngine, data: Columns, group: Any) -> float:
        """Row sums of this optimizer step over all ranks, to every method; its columns into this rank's rows."""
        from verl.utils.device import get_device_id

        of, needs = Ragged.of(data["response_mask"]), self.stack.needs
        live = flat(data["response_mask"]).bool().cpu()

        def sums(values: Tensor) -> Tensor:
            chosen = torch.where(live, values.detach().cpu().double(), 0.0)
            return of.sums(chosen)

        mine = Rows(
            group=flat(data[GROUP]).long().cpu(),
            length=sums(live.double()).long(),
            logprobs=sums(_current_logprobs(engine, data)) if "current_logprobs" in needs else None,
            old_logprobs=sums(flat(data["old_log_probs"])),
            rollout_logprobs=sums(flat(data["rollout_log_probs"])) if "rollout_logprobs" in needs else None,
            columns={
                k.removeprefix(ROW_COLUMN): flat(data[k]).double().cpu()
                for k in _names(data)
                if k.startswith(ROW_COLUMN)
            },
            version=flat(data[ROW_VERSIONS["version"]]).long().cpu(),
            newest_version=flat(data[ROW_VERSIONS["newest_version"]]).long().cpu(),
            current_version=self._published,
            steps_since_published=self._steps_since,
        )
        update = before_update(self.stack, _gather(mine, group), torch.distributed.get_rank(group))
        for name, values in update.columns.items():
            data[ROW_COLUMN + name] = values[:, None].to(get_device_id())
        return update.lr_scale


def register_surrogate() -> None:
    """Registers our policy loss with verl, once per process.

    Raises:
        ConfigError: somebody else has the name.
    """
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, register_policy_loss

    known = POLICY_LOSS_REGISTRY.get(POLICY_LOSS)
    if known is None:
        register_policy_loss(POLICY_LOSS)(_surrogate_of_verl)
    elif known is not _surrogate_of_verl:
        raise ConfigError(f"The policy loss `{POLICY_LOSS}` is registered in verl by {known.__module__}; remove that.")


def _surrogate_of_verl(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Any,
    rollout_is_weights: Tensor | None = None,
    **columns: Tensor,
) -> tuple[Tensor, dict[str, Any]]:
    """verl's signature of a policy loss, with the columns of `policy_loss.extra_fields`."""
    owner, info = _serving[-1], config.global_batch_info
    own = {k.removeprefix(TOKEN_COLUMN).removeprefix(ROW_COLUMN): v for k, v in columns.items()}
    terms = Terms(
        mask=response_mask.long(),
        logprobs=log_prob,
        advantages=advantages,
        old_logprobs=old_log_prob,
        num_tokens=torch.tensor(float(info["batch_num_tokens"]), device=log_prob.device),
        num_rows=torch.tensor(float(info["global_batch_size"]), device=log_prob.device),
        max_length=owner.max_length,
        rollout_logprobs=own.pop("rollout_log_probs", None),
        ref_logprobs=own.pop("ref_log_prob", None),
        versions=own.pop(TOKEN_VERSION, None),
        columns=own,
        current_version=owner._published,
        steps_since_published=owner._steps_since,
    )
    per_token = surrogate(owner.stack, terms)
    if rollout_is_weights is not None:
        per_token = per_token * rollout_is_weights
    return owner._aggregate(per_token, terms), {}


def wrap_train_batch() -> None:
    """Puts our step around the engine's, for our loss only. Installed when a loss with methods arrives."""
    from verl.workers.engine.base import BaseEngine

    host = BaseEngine.train_batch
    if getattr(host, "rl_plugins", False):
        return

    def train_batch(self: TrainingEngine, data: Columns, loss_function: Callable[..., Any]) -> Any:
        if isinstance(loss_function, MethodsLoss):
            return loss_function.train_batch(host, self, data)
        return host(self, data, loss_function)

    train_batch.rl_plugins = True  # type: ignore[attr-defined]
    BaseEngine.train_batch = train_batch


def take_steps(metrics: dict[str, Any]) -> int:
    """Takes out of verl's metrics how many optimizer steps there were since the newest publication."""
    return int(metrics.pop(f"actor/{STEPS}"))


def take_metrics(metrics: dict[str, Any]) -> dict[str, float]:
    """Takes what methods logged in the workers out of verl's metrics."""
    prefix = f"actor/{METRIC}"
    found = [key for key in metrics if key.startswith(prefix)]
    values = {bytes.fromhex(key.removeprefix(prefix)).decode(): float(metrics.pop(key)) for key in sorted(found)}
    if values.get(SKIPPED) == 0:
        del values[SKIPPED]
    return values


def _names(data: Columns) -> list[str]:
    return [str(k) for k in data.keys()]  # noqa: SIM118  a TensorDict iterates over its rows


def _padded(column: Tensor, like: Tensor) -> Tensor:
    """A ragged column of responses as (rows, time)."""
    dense = column.to_padded_tensor(0) if column.is_nested else column
    missing = like.shape[1] - dense.shape[1]
    return torch.nn.functional.pad(dense, (0, missing)) if missing else dense


def _current_logprobs(engine: TrainingEngine, data: Columns) -> Tensor:
    """Log-probs of the response tokens at the weights of this step, flat: one pass without gradient."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import response_from_nested

    batch = data.clone(recurse=False)
    tu.assign_non_tensor(batch, compute_loss=False, calculate_entropy=False)
    output = engine.infer_batch(batch)
    return flat(response_from_nested(output["model_output"]["log_probs"], data["response_mask"]))


def _gather(value: T, group: Any) -> list[T]:
    """What every rank gives, in rank order."""
    parts: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(parts, dumps(value), group=group)
    return [pickle.loads(p) for p in parts]


def _correct_metrics(metrics: dict[str, Any], value: Tensor) -> None:
    """With advantages 0 verl's loss and clip metrics say nothing about the surrogate that is trained."""
    from verl.utils.metric import AggregationType, Metric

    for name in [n for n in metrics if "pg_clipfrac" in n]:
        del metrics[name]
    metrics["actor/pg_loss"] = Metric(value=value.detach(), aggregation=AggregationType.SUM)
