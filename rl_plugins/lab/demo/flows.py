"""The runs of `rl-plugins demo` for diffusion policies: :mod:`rl_plugins.lab.demo.shapes`, a process per variant.

python -m rl_plugins.lab.demo.flows --config config.yaml --seed 0 --output_dir out --methods branch_grpo
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rl_plugins.core.files import whole
from rl_plugins.core.method import Bundle
from rl_plugins.lab.compare.plan import CONFIG, LOG_VARIABLE, Comparison, Variant
from rl_plugins.runtime import registry
from rl_plugins.runtime.processes import end_with_command

SHORT_BATCHES, LONG_BATCHES = 40, 120
LABELS = {
    "eval_reward": "reward from fixed seeds, without noise (1 at most)",
    "reward": "reward, in training (1 at most)",
}
METRICS = ["eval_reward", "reward"]
NOTES = (
    "The diffusion trainer of this package, a DiT of diffusers with 200,132 parameters that draws shapes of 8 x 8 "
    "pixels at random places. Reward: 1 minus the mean squared distance from the shape in the middle.",
    "Nothing is held out but the noise: the first value is the mean reward of 32 samples from fixed seeds, made "
    "without noise on the way.",
)


def needed(names: Iterable[str]) -> bool:
    """Whether any of the methods is for diffusion policies only."""
    for name in names:
        found = registry.load(name)
        if (
            needed(found.parts)
            if isinstance(found, Bundle)
            else "trl" not in found.hosts and "diffusion" in found.hosts
        ):
            return True
    return False


def config(policy: Path, long: bool) -> dict[str, Any]:
    """The config of every run: the options of the trainer, and the folder of the policy."""
    batches = LONG_BATCHES if long else SHORT_BATCHES
    return {
        "policy": str(policy),
        "batches": batches,
        "prompts_per_batch": 2,
        "group_size": 16,
        "steps": 20,
        "learning_rate": 5e-4,
        "sheet_every": batches // 4,
        "use_cpu": True,
        "progress": False,
    }


@dataclass(frozen=True)
class Flows:
    """Runs of the diffusion trainer on the shapes.

    Args:
        config: text of the YAML config of all runs.
    """

    config: str
    worker = "rl_plugins.lab.demo.flows"
    sets = "its seed, folder, methods and their parameters"

    def arguments(
        self, variant: Variant, seed: int, folder: Path, params: Mapping[str, Mapping[str, Any]]
    ) -> list[str]:
        """Of a run."""
        words = ["--config", str(folder.absolute() / CONFIG), "--seed", str(seed)]
        words += ["--output_dir", str(folder / "trainer"), "--method_params", json.dumps(params)]
        return [*words, "--methods", *variant.methods]


def draw_samples(comparison: Comparison, path: Path) -> None:
    """A figure of samples from the same seeds: before training, and after it in every variant."""
    import matplotlib.image
    from matplotlib.figure import Figure

    seed = comparison.seeds[0]
    sheets = {
        r.variant.label: sorted((r.folder / "trainer" / "sheets").iterdir()) for r in comparison.runs if r.seed == seed
    }
    shown = [("before", next(iter(sheets.values()))[0]), *((label, found[-1]) for label, found in sheets.items())]
    figure = Figure(figsize=(7, 2.9 * len(shown)), layout="constrained")
    for axes, (title, file) in zip(figure.subplots(len(shown), 1, squeeze=False)[:, 0], shown, strict=True):
        axes.imshow(matplotlib.image.imread(file), interpolation="nearest")
        axes.set_title(title, loc="left")
        axes.axis("off")
    with whole(path) as part:
        figure.savefig(part, dpi=100)


def main(words: Sequence[str] | None = None) -> None:
    """Trains one run; logs go to the file named by RL_PLUGINS_LOG_FILE."""
    parser = argparse.ArgumentParser(description="Train the demo's diffusion policy once.")
    parser.add_argument("--config", required=True, help="YAML file: options of the trainer, and `policy`, its folder")
    parser.add_argument("--seed", type=int, default=0, help="seed of the run")
    parser.add_argument("--output_dir", required=True, help="folder of metrics, sheets and checkpoints")
    parser.add_argument("--method_params", default="{}", help="parameters of the methods, as JSON")
    parser.add_argument("--methods", nargs="*", default=[], help="methods in order; none: GRPO")
    given = parser.parse_args(words)
    end_with_command()

    from diffusers import DiTTransformer2DModel

    from rl_plugins.diffusion import DiffusionConfig, DiffusionTrainer
    from rl_plugins.lab.demo import shapes

    values = yaml.safe_load(Path(given.config).read_text(encoding="utf-8"))
    model = DiTTransformer2DModel.from_pretrained(values.pop("policy"))
    args = DiffusionConfig(
        **values,
        seed=given.seed,
        output_dir=given.output_dir,
        methods=given.methods,
        method_params=json.loads(given.method_params),
    )
    classes = list(range(len(shapes.CLASSES)))
    shape = (1, shapes.SIZE, shapes.SIZE)
    trainer = DiffusionTrainer(model, shapes.centred, classes, args, shape, scheduler=shapes.scheduler())
    file, start = os.environ.get(LOG_VARIABLE), time.monotonic()

    def log(line: Mapping[str, Any]) -> None:
        if file:
            named = {("eval_reward" if k == "sheet/reward" else k): v for k, v in line.items() if v is not None}
            told = {"step": line["step"], "max_steps": args.total_steps, "seconds": time.monotonic() - start}
            with open(file, "a", encoding="utf-8") as f:
                f.write(json.dumps({**named, **told}) + "\n")

    trainer.train(on_log=log)


if __name__ == "__main__":
    main()
