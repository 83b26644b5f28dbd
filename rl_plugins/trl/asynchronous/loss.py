"""The loss of one packed micro-batch: TRL's own, with the surrogate of a method in place of TRL's and terms added.

TRL's loss is called as it is, and the log-probs and entropies that its model returns are those of the method, too. A
method's surrogate replaces the value TRL computed; only the auxiliary loss of a mixture of experts is kept of it. The
average is TRL's: the mean over the tokens of each micro-batch of all ranks, and the mean of these over the
micro-batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_plugins.core.errors import MethodError
from rl_plugins.core.rollouts import Rows, Terms
from rl_plugins.runtime import update
from rl_plugins.runtime.ranks import gather
from rl_plugins.trl.asynchronous.packing import LIVE, ROW, STEP, TOKEN
from rl_plugins.trl.asynchronous.samples import GROUP, NEWEST, SAMPLED, VERSION, VERSIONS
from rl_plugins.trl.changes import changed

Batch = dict[str, Tensor]
HostLoss = Callable[[Batch], Tensor]
OF_SAMPLES = (GROUP, VERSION, NEWEST)  # row columns of ours that are no columns of methods
UPDATE = "rlp_update_"  # row columns that `before_update` made


@contextmanager
def outputs_of(model: Any) -> Iterator[list[Any]]:
    """Collects what the model returns in the passes made inside."""
    seen: list[Any] = []
    handle = model.register_forward_hook(lambda module, args, out: seen.append(out))
    try:
        yield seen
    finally:
        handle.remove()


@dataclass(frozen=True)
class Flat:
    """The trained tokens of one rank's packed row: flat as TRL has them, and as rows.

    Args:
        inputs: of this rank.
        live: (tokens that were packed,) bool.
        sample: (rows,) place in the packed row of each sample that has a trained token.
        row, time: (tokens,) where each trained token stands in (rows, time).
        shape: rows, time.
    """

    inputs: Batch
    live: Tensor
    sample: Tensor
    row: Tensor
    time: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, inputs: Batch) -> Flat:
        live = (inputs["token_index"][0] >= 0) & (inputs[LIVE][0] > 0)
        sample, row, count = torch.unique_consecutive(
            inputs["segment_id"][0][live], return_inverse=True, return_counts=True
        )
        first = torch.cumsum(count, 0) - count
        time = torch.arange(len(row), device=row.device) - first[row]
        return cls(inputs, live, sample, row, time, (len(count), int(count.max()) if len(count) else 0))

    def padded(self, values: Tensor) -> Tensor:
        """(tokens,) -> (rows, time), 0 where no token is."""
        full = torch.zeros(self.shape, dtype=values.dtype, device=values.device)
        return full.index_put((self.row, self.time), values)

    def tokens(self, name: str) -> Tensor:
        """(rows, time) a column of TRL's batch, or of ours, that has a value per token."""
        return self.padded(self.inputs[name][0][self.live])

    def rows(self, name: str) -> Tensor:
        """(rows,) a column of ours that has a value per sample."""
        return self.inputs[name][0][self.sample]

    def output(self, values: Tensor) -> Tensor:
        """(rows, time) what the model returned in the places of these tokens."""
        return self.padded(values.flatten()[self.inputs["token_index"][0][self.live]])

    @property
    def mask(self) -> Tensor:
        return self.padded(torch.ones(len(self.row), device=self.row.device))

    def terms(self, trainer: Any, logprobs: Tensor, entropies: Tensor) -> Terms:
        """What hooks in the loss see. Old log-probs are TRL's, those of the policy that sampled; a method that needs
        those of the policy at the start of the step gets the live ones: every batch is trained in one step."""
        needs, inputs = trainer.methods.needs, self.inputs
        columns = {k.removeprefix(TOKEN): self.tokens(k) for k in inputs if k.startswith(TOKEN)}
        sampled = columns.pop(SAMPLED)
        for kind in (ROW, UPDATE):
            names = [k for k in inputs if k.startswith(kind) and k.removeprefix(ROW) not in OF_SAMPLES]
            columns |= {k.removeprefix(kind): self.rows(k).to(logprobs)[:, None] for k in names}
        step = {k: inputs[STEP + k][0] for k in ("num_tokens", "num_rows", "current_version", "steps_since_published")}
        version, since = torch.stack([step["current_version"], step["steps_since_published"]]).tolist()  # read at once
        proximal = any(m.old_policy != "host" for m in trainer.methods.methods)
        of_tokens = columns.pop(VERSIONS, None)
        versions = self.rows(ROW + VERSION)[:, None].expand(self.shape) if of_tokens is None else of_tokens
        return Terms(
            mask=self.mask,
            logprobs=logprobs,
            entropies=entropies if "current_entropies" in needs else None,
            advantages=self.tokens("advantages"),
            old_logprobs=logprobs.detach() if proximal else self.tokens("old_log_probs"),
            num_tokens=step["num_tokens"],
            num_rows=step["num_rows"],
            max_length=trainer.args.max_completion_length,
            rollout_logprobs=sampled if "rollout_logprobs" in needs else None,
            columns=columns,
            versions=versions.long() if "token_versions" in needs else None,
            current_version=int(version),
            steps_since_published=int(since),
        )


def compute_loss(trainer: Any, host_loss: HostLoss, inputs: Batch) -> Tensor:
    """The loss of a training micro-batch."""
    stack = trainer.methods
    if not stack.claimed("policy_loss", "regularize"):
        return host_loss(inputs)
    own_surrogate = stack.claimed("policy_loss")
    given = inputs
    if own_surrogate and trainer.aux_loss_enabled:
        given = {**inputs, "advantages": torch.zeros_like(inputs["advantages"])}
    metrics = trainer._metrics["train"]
    with outputs_of(trainer.accelerator.unwrap_model(trainer.model)) as seen:
        loss = host_loss(given)
    if len(seen) != 1:
        raise MethodError(
            f"TRL's loss made {len(seen)} passes where rl-plugins expects one; see rl_plugins.trl.compat."
        )
    if own_surrogate:
        for name in [n for n in metrics if n.startswith("clip_ratio/")]:
            del metrics[name]  # they say nothing about the surrogate that is trained
    flat = Flat.of(inputs)
    logprobs = seen[0].log_probs
    if not len(flat.row):  # every sample of this rank left
        return loss * 0.0 if not own_surrogate or trainer.aux_loss_enabled else logprobs.sum() * 0.0
    terms = flat.terms(trainer, flat.output(logprobs), flat.output(seen[0].entropy))
    added = update.surrogate(stack, terms) if own_surrogate else torch.zeros_like(terms.logprobs)
    regularizer = update.regularizer(stack, terms)
    own = _aggregated(trainer, added if regularizer is None else added + regularizer, terms.mask, inputs)
    return own if own_surrogate and not trainer.aux_loss_enabled else loss + own


def _aggregated(trainer: Any, per_token: Tensor, mask: Tensor, inputs: Batch) -> Tensor:
    """As TRL does, in the order of its operations, so that equal terms give equal bits; or a plain sum."""
    ranks = trainer.accelerator.num_processes  # gradients are averaged over them
    if trainer.methods.aggregation == "sum":
        return update.masked_sum(per_token, mask) * ranks
    loss = per_token[mask > 0].sum() / (inputs["global_n_tokens"][0] / ranks).clamp(min=1.0).to(torch.float32)
    return loss / trainer.current_gradient_accumulation_steps


# ---- before an optimizer step


def step_begins(trainer: Any, host_loss: HostLoss, window: Sequence[Batch]) -> tuple[float, bool]:
    """Row sums of the coming optimizer step over all ranks, to every method; columns into its micro-batches.

    Args:
        window: its micro-batches.

    Returns:
        A factor on the learning rate, and whether nothing is trained.
    """
    stack = trainer.methods
    nothing = not stack.trains or int(window[0][STEP + "num_tokens"][0]) == 0
    if nothing or not stack.claims["before_update"]:
        return 1.0, nothing
    flats = [Flat.of(batch) for batch in window]
    parts = gather(trainer.accelerator, _rows_of(trainer, host_loss, flats))
    asked = update.before_update(stack, parts, trainer.accelerator.process_index)
    for name, values in asked.columns.items():
        first = 0
        for flat in flats:
            column = torch.zeros_like(flat.inputs[ROW + GROUP][0], dtype=torch.float32)
            count = len(flat.sample)
            column[flat.sample] = values[first : first + count].to(column)
            flat.inputs[UPDATE + name], first = column[None], first + count
    return asked.lr_scale, False


def _rows_of(trainer: Any, host_loss: HostLoss, flats: Sequence[Flat]) -> Rows:
    """This rank's rows of an optimizer step."""

    def summed(of: Callable[[Flat], Tensor]) -> Tensor:
        return torch.cat([update.row_sums(of(f), f.mask) for f in flats])

    def rows(name: str) -> Tensor:
        return torch.cat([f.rows(ROW + name).cpu() for f in flats])

    live = None
    if "current_logprobs" in trainer.methods.needs:
        live = torch.cat([_live(trainer, host_loss, f, len(flats)) for f in flats])
    names = [k.removeprefix(ROW) for k in flats[0].inputs if k.startswith(ROW)]
    first = flats[0].inputs
    return Rows(
        group=rows(GROUP).long(),
        length=torch.cat([f.mask.sum(1).cpu() for f in flats]),
        logprobs=live,
        old_logprobs=summed(lambda f: f.tokens("old_log_probs")),
        rollout_logprobs=summed(lambda f: f.tokens(TOKEN + SAMPLED)),
        columns={name: rows(name) for name in names if name not in OF_SAMPLES},
        version=rows(VERSION).long(),
        newest_version=rows(NEWEST).long(),
        current_version=int(first[STEP + "current_version"][0]),
        steps_since_published=int(first[STEP + "steps_since_published"][0]),
    )


def _live(trainer: Any, host_loss: HostLoss, flat: Flat, micro_batches: int) -> Tensor:
    """(rows,) sums of log-probs at the present weights, by a pass of TRL's loss of which nothing is logged."""
    counters = {k: v for k, v in vars(trainer).items() if k.startswith("_step_")}
    quiet: dict[str, Any] = {"_metrics": {"train": defaultdict(list), "eval": defaultdict(list)}}
    quiet["current_gradient_accumulation_steps"] = micro_batches
    with (
        torch.no_grad(),
        changed(trainer, **counters, **quiet),
        outputs_of(trainer.accelerator.unwrap_model(trainer.model)) as seen,
    ):
        host_loss(flat.inputs)
    return update.row_sums(flat.output(seen[0].log_probs), flat.mask)
