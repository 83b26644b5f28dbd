"""Overlong filtering and soft overlong punishment of DAPO (arXiv 2503.14476)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rl_plugins import ConfigError, Method, MethodParams, Rollouts, Run, Shape, Tokens, param
from rl_plugins.core.params import above


class Overlong(Method):
    """Takes cut-off completions out of the update, and lowers the reward of completions near the length limit.

    With L the tokens of a completion, M the longest completion of the run and B = `buffer`:

        filtering    a completion that was cut off by the limit has no loss; it stays in the statistics of its group
        punishment   r <- r - penalty min(max(L - (M - B), 0) / B, 1)            (`buffer: 0`: none)

    So the reward begins to fall B tokens before the limit, and a cut-off completion loses `penalty`.

    Symbols: r (rows,) float64; L, M, B in tokens; of a rollout of several rows (turns) each row has its own L.

    Special cases: NaN rewards stay NaN. A batch in which every completion was cut off trains nothing.

    Raises:
        ConfigError: neither of the two is on, or the buffer is longer than a completion.

    Source: arXiv 2503.14476, section 3.4 and equation 13.
    """

    name = "overlong"
    fidelity = "paper"
    does = "Takes cut-off completions out of the loss, or punishes completions near the length limit"
    problems = ("length",)

    @dataclass(frozen=True)
    class Params(MethodParams):
        filter: bool = param(True, "removal of cut-off completions from the loss")
        buffer: int = param(0, "B, tokens before the limit in which the reward falls; 0: no punishment", ge=0)
        penalty: float = param(1.0, "reward that a completion at the limit loses", gt=0, only_if={"buffer": above(0)})

        def check(self) -> None:
            if not self.filter and not self.buffer:
                raise ConfigError("`filter` is false and `buffer` is 0, so nothing would change. Set one of them.")

    def check(self, run: Run) -> None:
        if self.params.buffer > run.max_completion_length:
            raise ConfigError(
                f"`buffer` is {self.params.buffer}, and completions have at most {run.max_completion_length} tokens. "
                f"Set it to a part of that length."
            )

    def start(self, run: Run) -> None:
        self._longest = run.max_completion_length

    def rewards(self, rollouts: Rollouts) -> Tensor | None:
        p = self.params
        if not p.buffer:
            return None
        share = ((rollouts.length - (self._longest - p.buffer)).double() / p.buffer).clamp(0, 1)
        self.log("punished", (share > 0).double().mean())
        return rollouts.reward - p.penalty * share

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape | None:
        self.log("truncated", rollouts.truncated.double().mean())
        return Shape(keep_rows=~rollouts.truncated) if self.params.filter else None
