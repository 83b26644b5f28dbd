"""Shapes of 8 x 8 pixels, and a flow-matching policy of 200,132 parameters that draws them: the demo for diffusion.

The policy is a DiT of diffusers, warm-started here on shapes at random places, with random ink and some noise. It draws
the shapes anywhere. The reward wants them in the middle, so something is left to learn within a minute. Built once on
this machine and cached like the policy of the text demo.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
from diffusers import DiTTransformer2DModel, FlowMatchEulerDiscreteScheduler
from torch import Tensor

from rl_plugins.lab.demo import policy
from rl_plugins.lab.demo.policy import Fit, Progress

SIZE = 8
DRAWN = {
    "square": ("#####", "#####", "#####", "#####", "#####"),
    "frame": ("#####", "#...#", "#...#", "#...#", "#####"),
    "plus": ("..#..", "..#..", "#####", "..#..", "..#.."),
    "cross": ("#...#", ".#.#.", "..#..", ".#.#.", "#...#"),
}
CLASSES = tuple(DRAWN)
PLACES = SIZE - 5 + 1  # of a shape, along each side
SHAPE_WARM_START = Fit(steps=1200, batch_size=64, learning_rate=3e-3, warmup_steps=50)


def shape(number: int, row: int, column: int) -> Tensor:
    """(1, 8, 8) a shape at a place: 1 where there is ink, -1 elsewhere."""
    drawn = torch.tensor([[1.0 if c == "#" else -1.0 for c in line] for line in DRAWN[CLASSES[number]]])
    image = torch.full((1, SIZE, SIZE), -1.0)
    image[0, row : row + 5, column : column + 5] = drawn
    return image


@functools.cache
def wanted() -> Tensor:
    """(classes, 1, 8, 8) every shape in the middle."""
    middle = PLACES // 2
    return torch.stack([shape(i, middle, middle) for i in range(len(CLASSES))])


def centred(samples: Tensor, conditions: list[int]) -> Tensor:
    """Reward: 1 minus the mean squared distance of a sample's pixels from its shape in the middle; 1 at most."""
    found: Tensor = 1 - (samples - wanted()[conditions]).square().flatten(1).mean(1)
    return found


def build_model(seed: int = 0) -> DiTTransformer2DModel:
    """The untrained policy, float32 on the CPU: two layers, four heads of 16, patches of 2 x 2."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return DiTTransformer2DModel(
            num_attention_heads=4,
            attention_head_dim=16,
            in_channels=1,
            num_layers=2,
            sample_size=SIZE,
            patch_size=2,
            num_embeds_ada_norm=len(CLASSES),
            norm_num_groups=1,
        )


def scheduler() -> FlowMatchEulerDiscreteScheduler:
    """The one that belongs to the policy."""
    return FlowMatchEulerDiscreteScheduler(shift=3.0)


def warm_start(model: Any, settings: Fit | None = None, progress: Progress | None = None) -> None:
    """Trains `model` in place: velocities of shapes at random places."""
    settings = SHAPE_WARM_START if settings is None else settings
    generator = torch.Generator().manual_seed(settings.seed)
    with torch.random.fork_rng(devices=[]):  # labels are dropped by chance
        torch.default_generator.manual_seed(settings.seed)
        policy.fit(model, lambda: _batch(generator, settings.batch_size), settings, progress, flow_loss)


def _batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images, noise, noise levels and classes."""
    number, row, column = (torch.randint(n, (size,), generator=generator) for n in (len(CLASSES), PLACES, PLACES))
    places = zip(number.tolist(), row.tolist(), column.tolist(), strict=True)
    images = torch.stack([_all_shapes()[i, r, c] for i, r, c in places])
    ink = 0.4 + 0.6 * torch.rand(size, 1, 1, 1, generator=generator)
    images = images * ink + 0.1 * torch.randn(images.shape, generator=generator)
    level = torch.rand(size, generator=generator)
    level = 3 * level / (1 + 2 * level)  # as the noise levels of sampling are
    return images, torch.randn(images.shape, generator=generator), level, number


@functools.cache
def _all_shapes() -> Tensor:
    """(classes, places, places, 1, 8, 8)"""
    return torch.stack(
        [
            torch.stack([torch.stack([shape(i, r, c) for c in range(PLACES)]) for r in range(PLACES)])
            for i in range(len(CLASSES))
        ]
    )


def flow_loss(model: Any, batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Mean squared error of the velocity, noise minus data."""
    images, noise, level, number = batch
    s = level[:, None, None, None]
    found = model((1 - s) * images + s * noise, timestep=1000 * level, class_labels=number, return_dict=False)[0]
    return (found - (noise - images)).square().mean()


def shape_policy_path(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where :func:`load_shape_policy` keeps the policy, whether it was built already or not."""
    key = policy.cache_key(SHAPE_WARM_START, __file__, str(policy.__file__))
    return policy.cache_folder(cache_dir) / f"demo-shape-policy-{key}"


def load_shape_policy(cache_dir: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> Path:
    """Directory of the warm-started policy, for `DiTTransformer2DModel.from_pretrained`; built when the cache lacks it.

    Args:
        cache_dir, progress: as of :func:`rl_plugins.lab.demo.policy.load_policy`.

    Raises:
        OSError: the cache cannot be written.
    """
    return policy.cached(shape_policy_path(cache_dir), functools.partial(_build, progress=progress))


def _build(directory: Path, progress: Progress | None) -> None:
    model = build_model(SHAPE_WARM_START.seed)
    warm_start(model, progress=progress)
    model.save_pretrained(directory)
    policy.sign(directory)
