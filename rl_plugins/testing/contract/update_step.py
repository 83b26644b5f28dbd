"""One optimizer step on what the method decided, which can be cut into micro-batches in any way."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rl_plugins.core.losses import Aggregation, aggregate
from rl_plugins.core.rollouts import Terms, Update
from rl_plugins.testing.contract.kit import Kit
from rl_plugins.testing.data import make_rows, make_tokens

How = Aggregation | Literal["sum"]  # tokens are aggregated into a loss


class UpdateStep:
    """One optimizer step on what the method decided, padded as hosts do, with two rows that have no token."""

    def __init__(self, kit: Kit) -> None:
        self.stack = kit.stack()
        self.method = self.stack.methods[-1]
        group = [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2]
        rollouts = kit.rollouts(np.random.default_rng(3).random(len(group)).round(2), group)
        tokens = kit.tokens(rollouts)
        decision = kit.decide(self.stack, rollouts, tokens)
        assert decision.keep_tokens is not None and decision.advantages is not None  # there are tokens
        everything = make_tokens(rollouts)  # the update has log-probs whether the driver asked for them or not
        live = decision.keep_tokens
        trained = rollouts.subset(decision.trained)
        place = torch.cumsum(decision.trained, 0) - 1  # row -> row among those trained
        self.rows = make_rows(
            trained.replace(length=torch.bincount(tokens.row[live], minlength=len(rollouts))[decision.trained]),
            everything.subset(live, place),
            columns={k: v[decision.trained] for k, v in decision.row_columns.items()},
        )
        wanted = {
            "logprobs": "current_logprobs",
            "old_logprobs": "old_logprobs",
            "rollout_logprobs": "rollout_logprobs",
        }
        self.rows = self.rows.replace(**{name: None for name, signal in wanted.items() if signal not in kit.needs})
        self.update = Update()
        if self.stack.claims["before_update"]:
            self.update = self.stack.call("before_update", self.method, self.rows) or Update()

        n, self.size, time = len(trained), len(trained) + 2, int(tokens.position.max()) + 1
        self.empty = [n, n + 1]
        at = place[tokens.row[live]], tokens.position[live]

        def dense(x: Tensor) -> Tensor:
            out = torch.zeros(self.size, time)
            out[at] = x[live].float()
            return out

        def column(x: Tensor) -> Tensor:
            return torch.cat([x.float(), torch.zeros(2)])[:, None]

        noise = torch.from_numpy(np.random.default_rng(4).normal(size=len(tokens)) * 0.2)
        assert everything.old_logprobs is not None and everything.entropies is not None
        old = everything.old_logprobs if decision.old_logprobs is None else decision.old_logprobs
        self.wants_entropies = "current_entropies" in kit.needs
        self.mask = dense(torch.ones(len(tokens))).long()
        self.dense = {
            "logprobs": dense(everything.old_logprobs + noise),
            "entropies": dense(everything.entropies),
            "advantages": dense(decision.advantages),
            "old_logprobs": dense(old),
        }
        for name in ("rollout_logprobs", "ref_logprobs"):
            if name in kit.needs:
                self.dense[name] = dense(getattr(everything, name))
        if "token_versions" in kit.needs:
            self.dense["versions"] = torch.zeros(self.size, time, dtype=torch.int64)
        self.token_columns = {k: dense(v) for k, v in decision.token_columns.items()}
        row_columns = {k: v[decision.trained] for k, v in decision.row_columns.items()} | dict(self.update.columns)
        self.row_columns = {k: column(v) for k, v in row_columns.items()}

    def loss(
        self, hook: str, how: How, micro_batches: list[list[int]], padding: int = 0, noise: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss and gradients of the whole step, for log-probs and entropies (rows, time).

        Args:
            micro_batches: the rows of each.
            padding: masked columns added at the end.
            noise: other values at masked tokens.
        """
        dense, columns = self._noisy(self.dense, self.token_columns) if noise else (self.dense, self.token_columns)
        leaves = [dense[name].clone().requires_grad_() for name in ("logprobs", "entropies")]
        dense = {**dense, "logprobs": leaves[0], "entropies": leaves[1]}
        shares = []
        for rows in micro_batches:
            terms = self.terms(rows, dense, columns, padding)
            shares.append(_share(self.stack.call(hook, self.method, terms), terms, how))
        total = torch.stack(shares).sum()
        if not total.requires_grad:
            return total, torch.zeros_like(leaves[0]), torch.zeros_like(leaves[1])
        gradients = torch.autograd.grad(total, leaves, materialize_grads=True, allow_unused=True)
        return total.detach(), gradients[0], gradients[1]

    def terms(
        self,
        rows: list[int],
        dense: dict[str, Tensor] | None = None,
        token_columns: dict[str, Tensor] | None = None,
        padding: int = 0,
    ) -> Terms:
        """A micro-batch of some rows. `dense`, `token_columns`: others than those of the step."""
        dense = self.dense if dense is None else dense
        token_columns = self.token_columns if token_columns is None else token_columns

        def cut(x: Tensor) -> Tensor:
            return torch.nn.functional.pad(x[rows], (0, padding))

        given: dict[str, Any] = {k: cut(v) for k, v in dense.items() if k != "entropies" or self.wants_entropies}
        return Terms(
            mask=cut(self.mask),
            num_tokens=self.mask.sum().float(),
            num_rows=(self.mask.sum(1) > 0).sum().float(),
            max_length=self.mask.shape[1],
            columns={k: cut(v) for k, v in token_columns.items()} | {k: v[rows] for k, v in self.row_columns.items()},
            **given,
        )

    def _noisy(self, *tables: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """The same with other values at masked tokens; log-probs stay negative and entropies positive."""
        rng = np.random.default_rng(5)

        def noisy(name: str, value: Tensor) -> Tensor:
            if not value.is_floating_point():
                return torch.where(self.mask > 0, value, value + 7)
            other = torch.from_numpy(rng.normal(size=value.shape)).float() * 5
            other = -other.abs() if name.endswith("logprobs") else other.abs() if name == "entropies" else other
            return torch.where(self.mask > 0, value, other)

        return [{name: noisy(name, value) for name, value in table.items()} for table in tables]


def _share(per_token: Tensor, terms: Terms, how: How) -> Tensor:
    """A micro-batch's share of the loss of the step."""
    if how == "sum":
        return torch.where(terms.mask > 0, per_token, 0.0).sum()
    return aggregate(
        per_token,
        terms.mask,
        how,
        num_tokens=terms.num_tokens,
        num_rows=terms.num_rows,
        max_length=terms.max_length,
    )
