"""Old log-probs by the weights that generated each token, in verl's `separate_async`.

verl's training workers keep copies of their weights in CPU memory under any name; `separate_async` uses one for the
weights at the start of a global step. Here every published version has one, until no row can be of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.workers.utils.padding import response_from_nested

from rl_plugins.verl.batch import fetch, put
from rl_plugins.verl.host import Batch
from rl_plugins.verl.rows import Ragged, flat

CURRENT = "rl_plugins_current"  # weights of the trainer while older ones take their place


class Snapshots:
    """Copies of published weights in the training workers, one per version.

    Every worker copies its own shard, so all of them together hold `limit` models and, during a pass, one more. The
    copies are not part of a checkpoint.

    Args:
        workers: verl's group of training workers.
        limit: versions that are kept, the newest included.
        temperature: with which completions are sampled.
    """

    def __init__(self, workers: Any, limit: int, temperature: float) -> None:
        self._workers, self._limit, self._temperature = workers, limit, temperature
        self._versions: list[int] = []  # ascending

    def keep(self, version: int) -> None:
        """Copies the weights as they are now; the oldest version is forgotten where the limit is reached."""
        if version in self._versions:
            return
        self._workers.save_model_to_cpu(_name(version))
        self._versions.append(version)
        for old in self._versions[: -self._limit]:
            self._workers.clear_cpu_model(_name(old))
        self._versions = self._versions[-self._limit :]

    def recompute(self, batch: Batch, versions: Mapping[str, Tensor], newest: int, multiple: int) -> dict[str, float]:
        """Writes `old_log_probs` of tokens that older weights generated again, by these weights.

        Args:
            batch: with old log-probs by the newest published weights.
            versions: key of a row -> (response,) published weights that generated each token.
            newest: the newest published weights.
            multiple: number that the rows of a log-prob pass must divide by.

        Returns:
            "rl_plugins/version_passes", "rl_plugins/version_seconds" and "rl_plugins/version_lost": passes that were
            made, their time, and the share of the trained tokens whose weights are no longer kept. The log-probs of
            those stay as they are.
        """
        began = time.perf_counter()
        rows = fetch(batch, ["old_log_probs", "response_mask"])
        of, live = Ragged.of(rows["response_mask"]), flat(rows["response_mask"]).bool()
        told = [versions.get(key) for key in batch.keys]  # None for rows that verl adds to fill the batch
        version = torch.cat(
            [torch.full((n,), newest) if v is None else v for v, n in zip(told, of.length.tolist(), strict=True)]
        )
        older = live & (version != newest)
        present = sorted(set(version[older].tolist()))
        here = [v for v in present if v in self._versions]
        values = flat(rows["old_log_probs"]).clone()
        with self._older_weights(bool(here)):
            for v in here:
                self._workers.restore_model_from_cpu(_name(v))
                tokens = older & (version == v)
                chosen = filled(sorted(set(of.row[tokens].tolist())), len(batch), multiple)
                found = torch.zeros_like(values)
                found[torch.isin(of.row, torch.tensor(chosen))] = self._pass(batch, chosen).to(values)
                values = torch.where(tokens, found, values)
        if here:
            put(batch, {"old_log_probs": of.nested(values)})
        lost = older & ~torch.isin(version, torch.tensor(here, dtype=version.dtype))
        return {
            "rl_plugins/version_passes": float(len(here)),
            "rl_plugins/version_seconds": time.perf_counter() - began,
            "rl_plugins/version_lost": float(lost.sum()) / max(1, int(live.sum())),
        }

    @contextmanager
    def _older_weights(self, any_: bool) -> Iterator[None]:
        """The trainer's weights are put back at the end, whatever happens."""
        if not any_:
            yield
            return
        self._workers.save_model_to_cpu(CURRENT)
        try:
            yield
        finally:
            self._workers.restore_model_from_cpu(CURRENT)
            self._workers.clear_cpu_model(CURRENT)

    def _pass(self, batch: Batch, chosen: Sequence[int]) -> Tensor:
        """(response tokens of the chosen rows, in their order) log-probs by the weights that are in the trainer."""
        part = KVBatchMeta(
            partition_id=batch.partition_id,
            keys=[batch.keys[i] for i in chosen],
            tags=[batch.tags[i] for i in chosen],
            extra_info={"temperature": self._temperature, "calculate_entropy": False, "compute_loss": False},
        )
        self._workers.compute_log_prob(part)
        rows = fetch(part, ["log_probs", "response_mask"])
        return flat(response_from_nested(rows["log_probs"], rows["response_mask"]))


def filled(rows: Sequence[int], count: int, multiple: int) -> list[int]:
    """The rows in ascending order, with others of the `count` rows until their number is a multiple."""
    others = [i for i in range(count) if i not in set(rows)]
    return sorted([*rows, *others[: -len(rows) % multiple]])


def _name(version: int) -> str:
    return f"rl_plugins_version_{version}"
