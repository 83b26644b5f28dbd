"""Optimizer steps on a batch: the loss of its transitions, in passes of bounded size, and gradients of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rl_plugins.core.losses import aggregate
from rl_plugins.core.rollouts import Rows, Terms
from rl_plugins.diffusion.batch import Made
from rl_plugins.diffusion.config import DiffusionConfig
from rl_plugins.diffusion.objective import Objective, TransitionBatch, transition_batch
from rl_plugins.diffusion.policy import Policy
from rl_plugins.runtime import update
from rl_plugins.runtime.metrics import Metrics
from rl_plugins.runtime.ranks import gather
from rl_plugins.runtime.stack import MethodStack


class Updater:
    """Makes the optimizer steps of batches.

    Args:
        accelerator: of accelerate; gradients are summed over its ranks.
        metrics: what is logged of the updates.
    """

    def __init__(
        self,
        stack: MethodStack,
        config: DiffusionConfig,
        accelerator: Any,
        policy: Policy,
        objective: Objective,
        metrics: Metrics,
    ) -> None:
        self.stack, self.config, self.accelerator, self.policy = stack, config, accelerator, policy
        self.objective, self.metrics = objective, metrics
        self.optimizer = torch.optim.AdamW(
            policy.trained.values(), lr=config.learning_rate, weight_decay=config.weight_decay
        )
        self.step = 0  # optimizer steps made

    def on_batch(self, made: Made, published: int) -> None:
        """All optimizer steps on a batch.

        Args:
            published: version of the weights that made it.
        """
        for number in range(self.config.updates_per_batch):
            if self.stack.trains and made.part.num_tokens[number]:
                self._update(made, number, published)
                self.objective.after_update(self.step + 1)
                with self.objective.sampling():
                    self.policy.refresh_cheap()
            self.step += 1

    def _update(self, made: Made, number: int, published: int) -> None:
        rows = [i for i in range(len(made.rows)) if made.part.trained[i] and made.part.update[i] == number]
        padded = Padded(made, self.config)
        scale, columns = self._before_update(padded, rows, published)
        padded.row_columns |= columns
        self.optimizer.zero_grad(set_to_none=True)
        size = self.config.rows_per_pass
        loss = torch.zeros((), device=self.accelerator.device)
        for start in range(0, len(rows), size):
            loss += self._backward(padded, rows[start : start + size], number, published)
        self.metrics.add("loss", loss, "sum")
        norm = self._gradients()
        update.check_gradient(self.stack, norm)
        if self.accelerator.is_main_process:
            self.metrics.add("grad_norm", norm, "mean")
        warm = min(1.0, (self.step + 1) / self.config.warmup_steps) if self.config.warmup_steps else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * warm * scale
        self.optimizer.step()

    def _gradients(self) -> float:
        """Sums the gradients of all ranks, clips them, and returns their norm."""
        parameters = list(self.policy.trained.values())
        if self.accelerator.num_processes > 1:
            for p in parameters:
                gradient = torch.zeros_like(p) if p.grad is None else p.grad
                p.grad = self.accelerator.reduce(gradient, "sum")
        return float(torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm))

    def _before_update(self, padded: Padded, rows: Sequence[int], published: int) -> tuple[float, dict[str, Tensor]]:
        """Asks the methods: a factor on the learning rate, and columns of the rank's rows."""
        if not self.stack.claims["before_update"]:
            return 1.0, {}
        index = torch.tensor(rows, dtype=torch.int64)
        mask = padded.mask[index] > 0

        def summed(values: Tensor) -> Tensor:
            return torch.where(mask, values[index], 0.0).double().sum(1)

        current = None
        if "current_logprobs" in self.stack.needs:
            values = torch.zeros_like(padded.old_logprobs)
            size = self.config.rows_per_pass
            for start in range(0, len(rows), size):
                take = rows[start : start + size]
                batch, inside = padded.transitions(self.policy, take, str(self.step))
                with torch.no_grad():
                    values[take] = _spread(self.objective.outputs(batch)["logprobs"].cpu(), inside)
            current = summed(values)
        mine = Rows(
            group=padded.part.group[index],
            length=mask.sum(1),
            logprobs=current,
            old_logprobs=summed(padded.old_logprobs),
            rollout_logprobs=summed(padded.rollout_logprobs),
            columns={k: v[index].double() for k, v in padded.row_columns.items()},
            version=torch.full((len(rows),), published),
            newest_version=torch.full((len(rows),), published),
            current_version=published,
            steps_since_published=self.step - published,
        )
        parts = gather(self.accelerator, mine)
        asked = update.before_update(self.stack, parts, self.accelerator.process_index)
        columns = {}
        for name, values in asked.columns.items():
            columns[name] = torch.zeros(len(padded.mask))
            columns[name][index] = values
        return asked.lr_scale, columns

    def _backward(self, padded: Padded, rows: Sequence[int], number: int, published: int) -> Tensor:
        """Adds the gradient of some whole rows; returns their share of the loss."""
        batch, inside = padded.transitions(self.policy, rows, str(self.step))
        count, most = len(batch.keys), self.config.transitions_per_pass
        parts = [slice(0, count)] if most is None else [slice(i, i + most) for i in range(0, count, most)]
        if len(parts) == 1:
            outputs = self.objective.outputs(batch)
        else:  # values first; then each part again, with the gradient that the loss has for its values
            with torch.no_grad():
                found = [self.objective.outputs(batch.part(p)) for p in parts]
            outputs = {k: torch.cat([f[k] for f in found]).requires_grad_() for k in found[0]}
        loss = self._loss(padded, rows, number, published, {k: _spread(v, inside) for k, v in outputs.items()})
        torch.autograd.backward(loss)
        for p in parts if len(parts) > 1 else ():
            again = self.objective.outputs(batch.part(p))
            used = {k: v.grad[p] for k, v in outputs.items() if v.grad is not None}
            torch.autograd.backward([again[k] for k in used], list(used.values()))
        return loss.detach()

    def _loss(
        self, padded: Padded, rows: Sequence[int], number: int, published: int, outputs: dict[str, Tensor]
    ) -> Tensor:
        device, part, stack = self.accelerator.device, padded.part, self.stack
        index = torch.tensor(rows, dtype=torch.int64)

        def here(values: Tensor) -> Tensor:
            return values[index].to(device)

        advantages = here(padded.advantages)
        logprobs = outputs.get("logprobs", torch.zeros_like(advantages))
        columns = {k: here(v)[:, None] for k, v in padded.row_columns.items()}
        columns |= {k: here(v) for k, v in padded.token_columns.items()}
        terms = Terms(
            mask=here(padded.mask),
            logprobs=logprobs,
            advantages=advantages,
            old_logprobs=here(padded.old_logprobs),
            num_tokens=torch.tensor(float(part.num_tokens[number]), device=device),
            num_rows=torch.tensor(float(part.num_rows[number]), device=device),
            max_length=self.config.steps,
            rollout_logprobs=here(padded.rollout_logprobs) if "rollout_logprobs" in stack.needs else None,
            ref_logprobs=here(padded.ref_logprobs) if padded.ref_logprobs is not None else None,
            columns=columns,
            versions=torch.full(advantages.shape, published) if stack.in_loss("token_versions") else None,
            current_version=published,
            steps_since_published=self.step - published,
        )
        host, own = self.objective.loss(terms, outputs, stack, self.metrics)

        def averaged(per_token: Tensor) -> Tensor:
            return aggregate(
                per_token,
                terms.mask,
                self.config.loss_aggregation,  # type: ignore[arg-type]
                num_tokens=terms.num_tokens,
                num_rows=terms.num_rows,
                max_length=terms.max_length,
            )

        if own is None:
            return averaged(host)
        return averaged(host) + (update.masked_sum(own, terms.mask) if stack.aggregation == "sum" else averaged(own))


class Padded:
    """This rank's rows as tables (rows, steps) on the CPU; masked places are 0."""

    def __init__(self, made: Made, config: DiffusionConfig) -> None:
        part, steps, bound = made.part, config.steps, config.advantage_clip
        self.rows, self.part, self.steps = made.rows, part, steps
        length = torch.tensor([len(r.tokens) for r in made.rows], dtype=torch.int64)
        row = torch.repeat_interleave(torch.arange(len(length)), length)
        place = torch.tensor([t.step for r in made.rows for t in r.tokens], dtype=torch.int64)

        def table(values: Tensor) -> Tensor:
            full = torch.zeros(len(length), steps)
            full[row, place] = values.float()
            return full

        rolled = torch.tensor([t.logprob for r in made.rows for t in r.tokens])
        self.mask = table(part.keep)
        self.advantages = table(part.advantages).clamp(-bound, bound)
        self.rollout_logprobs = table(rolled)
        self.old_logprobs = self.rollout_logprobs if part.old_logprobs is None else table(part.old_logprobs)
        self.ref_logprobs = table(torch.cat(list(made.ref_logprobs))) if made.ref_logprobs else None
        self.row_columns = dict(part.row_columns)
        self.token_columns = {k: table(v) for k, v in part.token_columns.items()}

    def transitions(self, policy: Policy, rows: Sequence[int], purpose: str) -> tuple[TransitionBatch, Tensor]:
        """The trained transitions of some rows; and (rows, steps) bool, where they stand.

        Args:
            purpose: makes their keys those of one optimizer step.
        """
        inside = self.mask[torch.tensor(rows, dtype=torch.int64)] > 0
        own = zip(rows, inside.tolist(), strict=True)
        chosen = [(i, t) for i, keep in own for t in self.rows[i].tokens if keep[t.step]]
        advantages = self.advantages[[i for i, _ in chosen], [t.step for _, t in chosen]]
        batch = transition_batch(policy, [(self.rows[i], t) for i, t in chosen], advantages, purpose)
        return batch, inside


def _spread(values: Tensor, inside: Tensor) -> Tensor:
    """(tokens,) -> (rows, steps), 0 elsewhere."""
    full = torch.zeros(inside.shape, dtype=values.dtype, device=values.device)
    full[inside.to(values.device)] = values
    return full
