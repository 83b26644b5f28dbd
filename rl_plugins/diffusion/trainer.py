"""`DiffusionTrainer`: RL on flow-matching models of diffusers, with methods."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_plugins.core.denoising import Denoise, Sample, SamplePrompt
from rl_plugins.core.errors import ConfigError, StateError
from rl_plugins.core.rollouts import PlanRow
from rl_plugins.diffusion import capabilities, checkpoint
from rl_plugins.diffusion.batch import BatchMaker
from rl_plugins.diffusion.config import DiffusionConfig
from rl_plugins.diffusion.logs import Logger, write_sheet
from rl_plugins.diffusion.objective import ClippedPPO, transition_batch
from rl_plugins.diffusion.objectives import objective_of
from rl_plugins.diffusion.policy import Encode, MakeCheap, Policy
from rl_plugins.diffusion.rewards import Decode, PolicyEngine, Rewards
from rl_plugins.diffusion.rows import LocalRow
from rl_plugins.diffusion.update import Updater
from rl_plugins.runtime.cheap import CheapOptions, cheap_copies
from rl_plugins.runtime.fingerprint import fingerprint
from rl_plugins.runtime.host_files import checksums, sizes
from rl_plugins.runtime.metrics import Metrics, combine
from rl_plugins.runtime.preflight import render_table
from rl_plugins.runtime.ranks import everywhere, on_driver
from rl_plugins.runtime.resume import check_files, resume, save_run
from rl_plugins.runtime.stack import build_stack
from rl_plugins.runtime.state import load_state

# total since the start of the run, logged as rl_plugins/NAME -> what is counted of each batch
TOTALS = {
    "rows_made": "rl_plugins/rows_generated",
    "rows_trained_total": "rl_plugins/rows_trained",
    "model_passes_total": "rl_plugins/model_passes",
    "transitions_trained_total": "rl_plugins/transitions_trained",
}


class DiffusionTrainer:
    """Trains a flow-matching policy on rewards of its samples.

    Rows are samples, tokens are stochastic denoising transitions, a prompt's samples are a group. Without methods it is
    GRPO on flows: advantages in groups, PPO's clip range on the densities of transitions.

    Args:
        model: see `Policy`.
        reward_funcs: see `Rewards`.
        train_dataset: prompts: rows with a column "prompt" that holds the condition, or conditions alone.
        args: options.
        latent_shape: of a sample: (channels, height, width).
        scheduler, encode: see `Policy`.
        decode: latents -> what reward functions and sheets see, a VAE for example; None: the latents.
        cheap: how the cheap copy of methods that explore with one is made (`rl_plugins.runtime.cheap.CheapOptions`), or
            a callable that makes it, see `Policy`.

    Raises:
        ConfigError: on construction, for everything that could not take effect or not be exact.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        train_dataset: Any,
        args: DiffusionConfig,
        latent_shape: Sequence[int],
        scheduler: Any = None,
        encode: Encode | None = None,
        decode: Decode | None = None,
        cheap: MakeCheap | CheapOptions | None = None,
    ) -> None:
        from accelerate import Accelerator

        self.args = args
        self.accelerator = Accelerator(cpu=args.use_cpu)
        self.methods = build_stack(
            args.methods, args.method_params, args.seed, args.max_unrewarded_batches, refuse=False
        )
        self.dataset = _rows(train_dataset)
        rewards = Rewards(reward_funcs, args.reward_weights, decode)
        self.run = capabilities.run_of(args, self.dataset, capabilities.columns_of(self.dataset), rewards.names)
        objective = objective_of(args)
        self.options = capabilities.check(self.methods, args, self.run, objective.missing, cheap is not None)
        for name, value in self.options.items():
            setattr(args, name, value)
        make_cheap = cheap_copies(cheap) if isinstance(cheap, CheapOptions) else cheap
        self.policy = Policy(model, args, scheduler, encode, make_cheap, self.accelerator.device)
        self.objective = objective(self.policy, args)
        if args.beta or "ref_logprobs" in self.methods.needs:
            self.policy.keep_reference()
        self.engine = PolicyEngine(self.policy, rewards, args.rows_per_call)
        reference = self._reference if "ref_logprobs" in self.methods.needs else None
        self.batches = BatchMaker(
            self.methods,
            args,
            self.accelerator,
            self.dataset,
            self.engine,
            self.objective,
            tuple(latent_shape),
            reference,
        )
        self.metrics = Metrics()
        self.totals: dict[str, float] = {}
        self.updater = Updater(self.methods, args, self.accelerator, self.policy, self.objective, self.metrics)
        self.fingerprint = fingerprint(self.dataset)
        if self.accelerator.is_main_process:
            print(self.describe_methods(), flush=True)

    @property
    def state_batch(self) -> int:
        """Generation batches that are done."""
        return self.methods.batch

    def describe_methods(self) -> str:
        """The table of methods in effect, and what a batch comes to."""
        a = self.args
        size = sum(p.numel() for p in self.policy.trained.values())
        return (
            f"{render_table(self.methods, self.options)}\n"
            f"  each batch: {a.prompts_per_batch} prompts, {a.group_size} samples of {a.steps} steps per prompt, "
            f"{a.updates_per_batch} optimizer step{'s' if a.updates_per_batch > 1 else ''} of {a.objective} on "
            f"{size:,} parameters"
        )

    # ---- the loop

    def train(
        self, resume_from: str | bool | None = None, on_log: Callable[[Mapping[str, Any]], None] | None = None
    ) -> list[dict[str, float]]:
        """Trains to the end.

        Args:
            resume_from: a checkpoint folder; True: the last one in `output_dir`, if there is one.
            on_log: called with every line of metrics, in the main process.

        Returns:
            The metrics of every batch that was made here; empty on other ranks than the first.

        Raises:
            StateError: the checkpoint is missing, damaged, or of another run; or `output_dir` has checkpoints of an
                earlier run, and `resume_from` does not name one.
            MethodError: of a method; whatever model and reward functions raise.
        """
        self._start()
        folder = self._checkpoint_to_resume(resume_from)
        if folder is not None:
            self._load(folder)
        with self.objective.sampling():
            self.policy.refresh_cheap()
        log = Logger(self.args, self.accelerator.is_main_process, self.state_batch, on_log)
        history: list[dict[str, float]] = []
        try:
            if self.args.sheet_every and not self.state_batch:
                log.add(0, 0, self.write_sheet(), {})
            while self.state_batch < self.args.batches:
                history += self._batch(log)
                self._save_if_due()
        finally:
            log.close()
        return history

    def _batch(self, log: Logger) -> list[dict[str, float]]:
        """One generation batch and its optimizer steps; its metrics, in the main process."""
        policy, published, start = self.policy, self.updater.step, time.perf_counter()
        policy.conditions.forget()
        policy.calls = policy.rows = policy.cheap_rows = 0
        policy.cheap_seconds = 0.0
        made = self.batches.make(published)
        sampled = time.perf_counter()
        self.metrics.add("rl_plugins/model_passes", float(policy.rows), "sum")
        self.updater.on_batch(made, published)
        if policy.make_cheap is not None:
            self.metrics.add("rl_plugins/cheap_passes", float(policy.cheap_rows), "sum")
            self.metrics.add("time/cheap_refresh", policy.cheap_seconds, "max")
        self.metrics.add("time/batch", sampled - start, "max")
        self.metrics.add("time/update", time.perf_counter() - sampled, "max")
        of_updates = combine(everywhere(self.accelerator, self.methods.metrics.take))
        self.methods.stats = of_updates
        values = {**made.metrics, **combine(everywhere(self.accelerator, self.metrics.take)), **of_updates}
        if self.args.sheet_every and self.state_batch % self.args.sheet_every == 0:
            values |= self.write_sheet()
        log.add(self.state_batch, self.updater.step, values, self._count(values))
        return [values] if self.accelerator.is_main_process else []

    def _count(self, values: Mapping[str, float]) -> dict[str, float]:
        """Totals since the start of the run."""
        for name, of_batch in TOTALS.items():
            self.totals[name] = self.totals.get(name, 0.0) + values.get(of_batch, 0.0)
        return {f"rl_plugins/{name}": value for name, value in self.totals.items()}

    def _start(self) -> None:
        """`start` of the methods, on the driver."""
        rewards = self.engine.rewards
        unreachable = tuple((name, "it scores samples, not texts") for name in rewards.names)
        run = replace(self.run, fingerprint=self.fingerprint, unreachable_rewards=unreachable)
        on_driver(self.accelerator, lambda: self.methods.start(run))

    def _reference(self, rows: Sequence[LocalRow]) -> list[Tensor]:
        """Log-densities of the reference for the tokens of each row."""
        assert isinstance(self.objective, ClippedPPO)  # others lack the signal
        chosen = [(row, t) for row in rows for t in row.tokens]
        size, found = self.args.rows_per_call, [torch.zeros(0)]
        for start in range(0, len(chosen), size):
            batch = transition_batch(self.policy, chosen[start : start + size])
            found.append(self.objective.reference_logprobs(batch).cpu())
        return list(torch.split(torch.cat(found), [len(row.tokens) for row in rows]))

    # ---- checkpoints

    def _checkpoint_to_resume(self, resume_from: str | bool | None) -> Path | None:
        found = checkpoint.checkpoints(self.args.output_dir)
        if resume_from is True:
            return found[-1] if found else None
        if isinstance(resume_from, str):
            if not Path(resume_from).is_dir():
                raise StateError(
                    f"There is no checkpoint {resume_from}. {self.args.output_dir} has: "
                    f"{', '.join(p.name for p in found) or 'none'}."
                )
            return Path(resume_from)
        if found:
            raise StateError(
                f"{self.args.output_dir} has checkpoints of an earlier run ({found[-1].name}). Give resume_from=True "
                f"to go on with it, or another output_dir."
            )
        return None

    def _save_if_due(self) -> None:
        """Writes a checkpoint, where one is due; ends the run, if a method wants it."""
        batch, every = self.state_batch, self.args.save_every
        stack = self.methods
        if stack:
            stack.stop_reason = on_driver(self.accelerator, lambda: stack.stop_reason)
        if batch == self.args.batches or (every and batch % every == 0) or stack.stop_reason:
            folder = on_driver(self.accelerator, lambda: str(self.save()))
            if stack.stop_reason:
                raise stack.stopped(folder)

    def save(self) -> Path:
        """Writes a checkpoint of now, in the main process."""
        folder = checkpoint.begin(self.args.output_dir, self.state_batch)
        checkpoint.write_weights(folder, self.policy.state_dict())
        content = {
            **self.methods.state_dict(self.fingerprint),
            "optimizer": checkpoint.optimizer_to_plain(self.updater.optimizer.state_dict()),
            "objective": {"name": self.objective.name, "state": self.objective.state_dict()},
            "totals": self.totals,
        }
        save_run(folder, content, self.updater.step, checksums(folder, list(sizes(folder))))
        return checkpoint.finish(folder, self.args.keep_checkpoints)

    def _load(self, folder: Path) -> None:
        """Takes over a checkpoint, on every rank."""
        number = checkpoint.number_of(folder)
        if number is None:
            raise StateError(f"{folder} is no checkpoint of this trainer; those are called checkpoint-N.")
        steps, stack = number * self.args.updates_per_batch, self.methods

        def read() -> tuple[int, int]:
            if (saved := load_state(folder)) is not None:
                found = checksums(folder, list(sizes(folder)))
                accept = self.args.accept_changed_checkpoint
                check_files(folder, saved, found, "", stack.seed, "accept_changed_checkpoint=True", accept)
            resume(stack, folder, fingerprint=self.fingerprint, step=steps, batch=0, with_methods=True)
            return stack.batch, stack.extra_prompts

        stack.batch, stack.extra_prompts = on_driver(self.accelerator, read)
        saved = load_state(folder)
        assert saved is not None  # it was read just now
        if saved["objective"]["name"] != self.objective.name:
            raise StateError(
                f"The checkpoint {folder} is of the objective {saved['objective']['name']}, and this run has "
                f"{self.objective.name}. Set objective, or start a new run from the checkpoint's weights."
            )
        self.policy.load_state_dict(checkpoint.read_weights(folder))
        self.updater.optimizer.load_state_dict(checkpoint.optimizer_of_plain(saved["optimizer"]))
        self.objective.load_state_dict(saved["objective"]["state"])
        self.totals = dict(saved["totals"])
        self.updater.step = steps

    def save_model(self, folder: str) -> None:
        """The model as diffusers, or its adapters as PEFT, load it."""
        if self.accelerator.is_main_process:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.policy.save(folder)

    # ---- samples to look at

    def samples(self, rows: Sequence[int], seeds: Sequence[int]) -> list[tuple[SamplePrompt, Sample]]:
        """Samples of the policy as it is now, of every dataset row from each of the seeds, without noise on the way."""
        prompts = [self.batches.prompt(PlanRow(row, 0, len(seeds))) for row in rows]
        asked = [(p, Denoise(p.start(seed), stochastic=False)) for p in prompts for seed in seeds]
        return [(p, made[0]) for (p, _), made in zip(asked, self.engine.denoise(asked), strict=True)]

    def write_sheet(self, path: str | None = None) -> dict[str, float]:
        """An image of samples from fixed seeds, a row for each of the first prompts. Returns their mean reward, in the
        main process.

        Args:
            path: None: one in `output_dir` that bears the number of the batch.
        """
        if not self.accelerator.is_main_process:
            return {}
        width = self.args.sheet_columns
        made = self.samples(range(min(self.args.sheet_prompts, len(self.dataset))), range(width))
        decoded = self.engine.decoded([sample for _, sample in made])
        write_sheet(
            Path(path or f"{self.args.output_dir}/sheets/batch-{self.state_batch:05d}.png"),
            [decoded[i : i + width] for i in range(0, len(decoded), width)],
        )
        rewards = torch.tensor([scored.reward for scored in self.engine.score(made)])
        return {"sheet/reward": float(rewards.nanmean())}


def _rows(dataset: Any) -> Any:
    """Rows by number with a column "prompt".

    Raises:
        ConfigError: a stream, no row, or rows without a condition.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        kind = type(dataset).__name__
        raise ConfigError(f"The dataset is {kind}, whose rows cannot be taken by number. Give a list.")
    if not len(dataset):
        raise ConfigError("The dataset has no prompts. Give at least one.")
    if not isinstance(dataset[0], Mapping):
        return [{"prompt": condition} for condition in dataset]
    if "prompt" not in dataset[0]:
        raise ConfigError(
            f"The dataset has the columns {', '.join(map(str, dataset[0]))}, and none of them is `prompt`. "
            f"Rename the one that holds the condition."
        )
    return dataset
