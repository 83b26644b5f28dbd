"""The rollouts of a run with their rewards and sketched score functions, drawn once and kept as Parquet."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.files import claim_for, parquet_of, whole
from rl_plugins.core.rollouts import RewardFunction
from rl_plugins.lab.probe.runs import POLICY, ProbedRun, vllm_of
from rl_plugins.tools.gradient_quality.pools import RolloutPool
from rl_plugins.trl.commands.head_samples import Sampler

VERSION = 2  # of the files


@dataclass(frozen=True)
class PoolPlan:
    """What is drawn.

    Args:
        rollouts: of each prompt. accuracy: standard deviation of cosines between sketches.
        solved_by: reward function that says what is solved; empty: the weighted sum. threshold: from which it does.
        batch: rows of a backward pass.
    """

    prompts: int = 128
    rollouts: int = 32
    accuracy: float = 0.03
    seed: int = 0
    solved_by: str = ""
    threshold: float = 0.5
    batch: int = 16

    @property
    def dims(self) -> int:
        return math.ceil(2 / self.accuracy**2)


class RunPool:
    """The pool of a run in a folder.

    Raises:
        ConfigError: a reward function cannot be called here, or there is no data.
    """

    def __init__(self, run: ProbedRun, plan: PoolPlan, out: Path) -> None:
        self.run, self.plan, self.out = run, plan, out
        for name, why in run.rows.unreachable_rewards:
            raise ConfigError(f"The reward function `{name}` cannot be called here: {why}. Remove it from the config.")
        if not (size := run.rows.dataset_size):
            raise ConfigError("The dataset has no rows.")
        self.functions: Sequence[RewardFunction] = run.rows.reward_functions
        chosen = np.random.default_rng(plan.seed).choice(size, min(plan.prompts, size), replace=False)
        self.prompts: list[int] = np.sort(chosen).tolist()

    @property
    def missing(self) -> list[int]:
        """Prompts, by their place in the pool, that are not drawn yet."""
        return [i for i in range(len(self.prompts)) if not self._file(i).exists()]

    def draw(self, track: Any = iter) -> None:
        """Makes what the folder lacks, prompt by prompt.

        Raises:
            ConfigError: the folder holds the pool of another run.
        """
        claim_for(self.out, "probe", self._facts(), "a pool")
        if not (missing := self.missing):
            return
        sampler = self.run.sampler()
        engine = None if self.run.vllm is None else vllm_of(self.run, sampler)
        for i in track(missing):
            with whole(self._file(i)) as part:
                pq.write_table(self._prompt(sampler, engine, i), part, compression="zstd")

    def read(self) -> RolloutPool:
        """The whole pool."""
        names = [f.name for f in self.functions]
        tables = []
        for i in range(len(self.prompts)):
            with parquet_of(self._file(i)):
                tables.append(pq.read_table(self._file(i)))
        together, shape = pa.concat_tables(tables), (len(self.prompts), self.plan.rollouts)
        weights = np.array([f.weight for f in self.functions])
        rewards = np.stack([together[f"reward:{n}"].to_numpy() for n in names], axis=-1).reshape(*shape, -1)
        solved = np.nan_to_num(rewards) @ np.where([n == self.plan.solved_by for n in names], 1.0, 0.0)
        if not self.plan.solved_by:
            solved = np.nan_to_num(rewards) @ weights
        sketches = np.concatenate([c.values.to_numpy() for c in together["sketch"].chunks])
        rows = [self.run.rows.dataset[i] for i in self.prompts]
        return RolloutPool(
            name="The pool",
            prob=np.full(shape, 1 / shape[1]),
            rewards=rewards,
            right=solved >= self.plan.threshold,
            score=sketches.reshape(*shape, -1).astype(np.float64),
            length=together["tokens"].to_numpy().astype(np.int64).reshape(shape),
            reward_names=tuple(names),
            reward_weights=tuple(weights),
            columns={name: [row[name] for row in rows] for name in rows[0]},
            said=np.array(together["text"].to_pylist(), dtype=object).reshape(shape),
        )

    def _file(self, i: int) -> Path:
        return self.out / "pool" / f"prompt-{i:06d}.parquet"

    def _facts(self) -> Mapping[str, Any]:
        """What makes a pool another one."""
        run, adapter = self.run, self.run.adapter
        kept = ("prompts", "rollouts", "accuracy", "seed")
        return {
            "version": VERSION,
            **{name: value for name, value in asdict(self.plan).items() if name in kept},
            "model": run.sampling.model,
            "weights": [_digest(folder) for folder in (Path(run.sampling.model), run.trained) if folder is not None],
            "adapter": None if adapter is None else hashlib.sha256(repr(adapter.to_dict()).encode()).hexdigest()[:16],
            "generation": {k: str(v) for k, v in run.sampling.generation.items()},
            "dataset": run.rows.fingerprint,
            "rewards": {f.name: _source(f.source) for f in self.functions},
        }

    def _prompt(self, sampler: Sampler, engine: Any, i: int) -> pa.Table:
        """The rollouts of one prompt."""
        from rl_plugins.tools.gradient_quality.sketch import score_sketches

        n, row = self.plan.rollouts, self.run.rows.dataset[self.prompts[i]]
        seed = int.from_bytes(hashlib.sha256(f"{self.plan.seed}/{i}".encode()).digest()[:7], "big")
        read = sampler.encode([row["prompt"]])["input_ids"][0].tolist()
        if engine is None:
            made = sampler.sample(POLICY, [row["prompt"]] * n, seed)
        else:
            made = engine.generate([read] * n, images=None, num_generations=n)[1]
        texts = sampler.texts(made)
        temperature = float(self.run.sampling.generation["temperature"])
        sketches = score_sketches(
            sampler.model, [read] * n, made, self.plan.dims, temperature=temperature, batch=self.plan.batch
        )
        rewards = {f"reward:{f.name}": _numbers(f.call([row] * n, texts)) for f in self.functions}
        columns = {
            "prompt": pa.array([self.prompts[i]] * n, pa.int64()),
            "completion_ids": pa.array(made, pa.list_(pa.int32())),
            "tokens": pa.array([len(m) for m in made], pa.int32()),
            "text": pa.array(texts),
            "sketch": pa.FixedSizeListArray.from_arrays(sketches.flatten().numpy(), self.plan.dims),
        }
        return pa.table({**columns, **{name: pa.array(v, pa.float64()) for name, v in rewards.items()}})


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [math.nan if v is None else float(v) for v in values]


def _digest(folder: Path) -> str:
    """Of the weights in a folder; empty for a name of the Hub."""
    found = hashlib.sha256()
    files = sorted(p for p in folder.glob("*") if p.suffix in (".safetensors", ".bin")) if folder.is_dir() else []
    for path in files:
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()[:16] if files else ""


def _source(function: Any) -> str:
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    except (OSError, TypeError):
        return ""
