"""Value priors: the expected reward of a prompt, predicted before it is sampled.

A prior keeps its memory in a plain dict that the method holds as its state, so that it is saved with the run:

    self.state = prior.start(run)
    values = prior.predict(self.state, prompts)                       # NaN: nothing is known
    self.state = prior.observe(self.state, prompts, values, rng)

`PriorParams` are the parameters that choose one; `make_prior` builds it. The light ones learn from the run itself. A
value model (V_0, a small regressor) is a function `values(prompts, context)`: texts of the prompts, and the recent
(text, value) pairs of the current policy; it returns one number per prompt, NaN where it has no opinion.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.groups import Groups
from rl_plugins.core.params import FUNCTION, MethodParams, param
from rl_plugins.kit.columns import arrow_column, cell
from rl_plugins.kit.prompt_memory import Counts
from rl_plugins.kit.services import Service, number, prompt_text

if TYPE_CHECKING:
    import numpy as np

    from rl_plugins.core.rollouts import Run

FEATURES = 2048  # buckets that n-grams of characters are hashed into
NGRAMS = (1, 2, 3)
MOST_FEATURES = 4096  # prompts whose features are kept, 16 kB each


@dataclass(frozen=True)
class PriorParams(MethodParams):
    """Parameters of methods with a value prior."""

    prior: Literal["running_mean", "beta", "nearest", "constant", "column"] | Callable[..., Any] = param(
        "running_mean", "source of a prompt's predicted value: one of these, or a function values(prompts, context)"
    )
    prior_column: str = param(
        "", "dataset column with the predicted values; required with `prior: column`", only_if={"prior": "column"}
    )
    prior_decay: float = param(
        0.5,
        "share of a prompt's older outcomes that remains after a visit",
        ge=0,
        le=1,
        only_if={"prior": ("running_mean", "beta")},
    )
    prior_neighbors: int = param(8, "number of most similar prompts that count", ge=1, only_if={"prior": "nearest"})
    context_size: int = param(
        256, "number of recent rollouts that the prior sees", ge=1, only_if={"prior": ("nearest", FUNCTION)}
    )
    prior_timeout: float = param(60.0, "time limit of one try, in seconds", gt=0, only_if={"prior": FUNCTION})
    prompt_column: str = param("prompt", "dataset column with the prompt", only_if={"prior": ("nearest", FUNCTION)})

    def check(self) -> None:
        for name, owner in (("prior_value", "constant"), ("prior_column", "column")):
            if self.prior == owner and getattr(self, name) in (None, ""):
                raise ConfigError(f"`prior` is {owner}, which needs `{name}`.")


class Prior:
    """Base: knows nothing. Tensors: prompts (n,) int64 dataset rows, -1 for a foreign prompt; values (n,) float64."""

    needs: frozenset[str] = frozenset({"prompt_index"})

    def start(self, run: Run) -> dict[str, Any]:
        """Empty memory.

        Raises:
            ConfigError: the run lacks what this prior reads.
        """
        return {}

    def predict(self, state: Mapping[str, Any], prompts: Tensor) -> Tensor:
        """The value of each prompt, NaN where nothing is known."""
        return torch.full((len(prompts),), torch.nan, dtype=torch.float64)

    def observe(
        self, state: Mapping[str, Any], prompts: Tensor, values: Tensor, rng: np.random.Generator
    ) -> dict[str, Any]:
        """The memory with these outcomes, one per rollout, none of them NaN."""
        return dict(state)


class Constant(Prior):
    """The same value for every prompt."""

    def __init__(self, value: float) -> None:
        self.value = value

    def predict(self, state: Mapping[str, Any], prompts: Tensor) -> Tensor:
        return torch.full((len(prompts),), self.value, dtype=torch.float64)


class Column(Prior):
    """Values that stand in a column of the dataset; foreign prompts have none."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.needs = Prior.needs | {f"column:{name}"}

    def start(self, run: Run) -> dict[str, Any]:
        self._dataset, self._size = dataset_of(run), run.dataset_size
        return {}

    def predict(self, state: Mapping[str, Any], prompts: Tensor) -> Tensor:
        if len(prompts) == self._size:
            whole = _whole_column(self._dataset, self.name)
            if whole is not None:
                return torch.where(prompts < 0, torch.nan, whole[prompts.clamp(min=0)])
        check = number(allow_nan=True)
        values = [torch.nan if i < 0 else check(cell(self._dataset, i, self.name)) for i in prompts.tolist()]
        return torch.tensor(values, dtype=torch.float64)


class RunningMean(Prior):
    """Mean of a prompt's own outcomes, older visits decayed.

    Args:
        decay: what a visit leaves of the older outcomes.
        guess_unseen: a prompt without outcomes gets the mean over those that have some; else it is not known.

    State: `total` and `weight`, (dataset size,) float64, and `mean_sum`, `mean_count`: of the means of those that have
    some.
    """

    counts = Counts(("total", "weight"))

    def __init__(self, decay: float, guess_unseen: bool = True) -> None:
        self.decay, self.guess_unseen = decay, guess_unseen

    def start(self, run: Run) -> dict[str, Any]:
        assert run.dataset_size is not None  # `needs` has the prompt_index, which a stream lacks
        return {**self.counts.start(run.dataset_size), "mean_sum": 0.0, "mean_count": 0}

    def predict(self, state: Mapping[str, Any], prompts: Tensor) -> Tensor:
        total, weight = self.counts.of(state, prompts.clamp(min=0))
        known = (prompts >= 0) & (weight > 0)
        some = self.guess_unseen and state["mean_count"] > 0
        return torch.where(
            known, self.mean(total, weight), state["mean_sum"] / state["mean_count"] if some else torch.nan
        )

    def mean(self, total: Tensor, weight: Tensor) -> Tensor:
        """The value of prompts that have outcomes."""
        return total / weight

    def observe(
        self, state: Mapping[str, Any], prompts: Tensor, values: Tensor, rng: np.random.Generator
    ) -> dict[str, Any]:
        own = prompts >= 0
        visited, state = Groups(prompts[own]), dict(state)
        total, weight = self.counts.of(state, visited.ids)
        before = weight > 0
        gained = visited.sum(values[own]), visited.n(values[own])
        self.counts.visit(state, visited.ids, self.decay, gained)
        then = (total[before] / weight[before]).sum()
        total, weight = self.counts.of(state, visited.ids)
        state["mean_sum"] += float((total / weight).sum() - then)
        state["mean_count"] += len(before) - int(before.sum())
        return state


class BetaPosterior(RunningMean):
    """Mean of the Beta posterior of a success rate under a uniform prior, (successes + 1) / (rollouts + 2).

    For outcomes in [0, 1]; few of them are pulled towards 1/2.
    """

    def mean(self, total: Tensor, weight: Tensor) -> Tensor:
        return (total + 1) / (weight + 2)


class ContextPrior(Prior):
    """Base of priors that read the latest outcomes of the current policy.

    A batch with more than `size` outcomes leaves a random `size` of them, in their order; a smaller one leaves what
    fits of the older ones. State: `prompt` (n,) int64, `value` (n,) float64, oldest first; `batches`, how many came.
    """

    def __init__(self, size: int, prompt_column: str) -> None:
        self.size, self.prompt_column = size, prompt_column
        self.needs = Prior.needs | {f"column:{prompt_column}"}

    def start(self, run: Run) -> dict[str, Any]:
        self._dataset = dataset_of(run)
        return {"prompt": torch.zeros(0, dtype=torch.int64), "value": torch.zeros(0, dtype=torch.float64), "batches": 0}

    def observe(
        self, state: Mapping[str, Any], prompts: Tensor, values: Tensor, rng: np.random.Generator
    ) -> dict[str, Any]:
        own = (prompts >= 0).nonzero()[:, 0]
        if len(own) > self.size:
            own = own[torch.from_numpy(rng.permutation(len(own))[: self.size]).sort().values]
        return {
            "prompt": torch.cat([state["prompt"], prompts[own]])[-self.size :],
            "value": torch.cat([state["value"], values[own].double()])[-self.size :],
            "batches": state["batches"] + 1,
        }

    def text(self, prompt: int) -> str:
        return prompt_text(cell(self._dataset, prompt, self.prompt_column))


class Nearest(ContextPrior):
    """Mean outcome of the most similar prompts of the context.

    Similarity s is the cosine of the counts of character 1-, 2- and 3-grams, times (shorter / longer text)^2. With the
    context's mean m as one observation, and n_j outcomes of mean v_j at its prompt j, the value is
    (m + sum s_j n_j v_j) / (1 + sum s_j n_j) over the `neighbors` most similar ones. A foreign prompt gets m.
    """

    def __init__(self, size: int, prompt_column: str, neighbors: int) -> None:
        super().__init__(size, prompt_column)
        self.neighbors = neighbors
        self._features: dict[int, Tensor] = {}

    def predict(self, state: Mapping[str, Any], prompts: Tensor) -> Tensor:
        if not len(state["prompt"]):
            return super().predict(state, prompts)
        seen, mean, own = Groups(state["prompt"]), state["value"].mean(), prompts >= 0
        found = self.similarity(prompts[own], seen.ids).topk(min(self.neighbors, seen.count), dim=1)
        weight = found.values * seen.n(state["value"])[found.indices]
        near = seen.mean(state["value"])[found.indices]
        values = mean.expand(len(prompts)).clone()
        values[own] = (mean + (weight * near).sum(1)) / (1 + weight.sum(1))
        return values

    def similarity(self, ours: Tensor, theirs: Tensor) -> Tensor:
        """(ours, theirs) in [0, 1] of prompts by number."""
        if len(self._features) > MOST_FEATURES:
            self._features.clear()
        a, b = (
            torch.stack([torch.zeros(FEATURES + 1, dtype=torch.float64), *(self._of(i) for i in prompts.tolist())])[1:]
            for prompts in (ours, theirs)
        )
        log_ratio = (a[:, -1:] - b[:, -1:].T).abs()
        return (a[:, :-1] @ b[:, :-1].T) * torch.exp(-2 * log_ratio)

    def _of(self, prompt: int) -> Tensor:
        """(FEATURES + 1,): counts as a vector of length 1, and the log of the text's length."""
        if prompt not in self._features:
            text = self.text(prompt).encode() or b" "
            grams = [text[i : i + n] for n in NGRAMS for i in range(len(text) - n + 1)]
            buckets = torch.tensor([zlib.crc32(gram) % FEATURES for gram in grams])
            counts = torch.bincount(buckets, minlength=FEATURES).double()
            self._features[prompt] = torch.cat(
                [counts / counts.norm(), torch.tensor([math.log(len(text))], dtype=torch.float64)]
            )
        return self._features[prompt]


class FunctionPrior(ContextPrior):
    """A user's function `values(prompts, context)`: texts, and (text, value) pairs, oldest first. It may be async."""

    def __init__(
        self, function: Callable[..., Any], size: int, prompt_column: str, low: float, high: float, timeout: float
    ) -> None:
        super().__init__(size, prompt_column)
        self.function = function
        self._context: list[tuple[str, float]] = []
        self._service = Service(
            lambda items: function([text for text, _ in items], list(self._context)),
            "the value prior",
            answer=number(low, high, allow_nan=True),
            batch_size=10**9,  # everything in one call
            timeout=timeout,
        )

    def predict(self, state: Mapping[str, Any], prompts: Tensor) -> Tensor:
        texts = {i: self.text(i) for i in set(prompts.tolist() + state["prompt"].tolist()) if i >= 0}
        pairs = zip(state["prompt"].tolist(), state["value"].tolist(), strict=True)
        self._context = [(texts[i], value) for i, value in pairs]
        # until the next batch is observed the context is the same, and so are the answers
        found = self._service.ask([(texts[i], state["batches"]) for i in prompts.tolist() if i >= 0])
        values = torch.full((len(prompts),), torch.nan, dtype=torch.float64)
        values[prompts >= 0] = torch.tensor(found, dtype=torch.float64)
        return values


def make_prior(params: PriorParams, low: float, high: float, guess_unseen: bool = True) -> Prior:
    """The prior that these parameters choose.

    Args:
        low, high: what a function may answer.
        guess_unseen: of `running_mean` and `beta`.
    """
    if callable(params.prior):
        return FunctionPrior(params.prior, params.context_size, params.prompt_column, low, high, params.prior_timeout)
    if params.prior == "constant":
        return Constant(getattr(params, "prior_value"))  # noqa: B009  those that offer `constant` have it
    if params.prior == "column":
        return Column(params.prior_column)
    if params.prior == "nearest":
        return Nearest(params.context_size, params.prompt_column, params.prior_neighbors)
    return (BetaPosterior if params.prior == "beta" else RunningMean)(params.prior_decay, guess_unseen)


def dataset_of(run: Run) -> Any:
    """The dataset, for those that read its rows in `start`.

    Raises:
        ConfigError: it is not on this machine, as in a dry run.
    """
    if run.dataset is None:
        raise ConfigError("its rows are read before the run begins, and they are not on this machine.")
    return run.dataset


def _whole_column(dataset: Any, name: str) -> Tensor | None:
    """A column of numbers of a `datasets.Dataset`, (rows,) float64, read as it lies in Arrow; None of anything else."""
    column = arrow_column(dataset, name, ("int", "uint", "float"))
    return None if column is None or column.null_count else torch.from_numpy(column.to_numpy().astype("float64"))
