"""Models of diffusers in the diffusion trainer: arguments, adapters, noise levels, a VAE, sheets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DiTTransformer2DModel,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    UNet2DModel,
)
from flow_runs import Tiny, make, weights
from messages import raises
from PIL import Image
from torch import nn

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.diffusion.config import DiffusionConfig
from rl_plugins.diffusion.flows import shifted_sigmas
from rl_plugins.diffusion.policy import Policy

pytestmark = pytest.mark.host


def dit(**changes):
    torch.manual_seed(0)
    sizes = dict(num_attention_heads=2, attention_head_dim=8, in_channels=1, num_layers=2, sample_size=8, patch_size=2)
    return DiTTransformer2DModel(**sizes, num_embeds_ada_norm=4, norm_num_groups=1, **changes)


def light(samples, conditions):
    return samples.mean((1, 2, 3))


IMAGES = dict(latent_shape=(1, 8, 8), reward_funcs=light, scheduler=FlowMatchEulerDiscreteScheduler())


def test_a_transformer_learns_with_adapters_alone(tmp_path):
    model = dit()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    options = dict(batches=12, group_size=8, learning_rate=3e-2, beta=0.01, sheet_every=6, sheet_columns=3)
    options |= dict(lora_rank=2, lora_targets=["to_q", "proj_out_2"])
    trainer = make(tmp_path, model=model, **IMAGES, **options)
    assert all("lora_" in name for name in trainer.policy.trained)
    history = trainer.train()
    assert sum(h["reward"] for h in history[-3:]) > sum(h["reward"] for h in history[:3]) + 0.3
    assert history[0]["kl"] < 1e-6 < history[-1]["kl"]  # adapters begin as the reference
    held = trainer.policy.module.get_base_model().state_dict()
    assert all(
        torch.equal(held[name.replace("to_q.", "to_q.base_layer.")], before[name]) for name in before if "to_q" in name
    )
    sheets = sorted((tmp_path / "sheets").iterdir())
    assert [s.name for s in sheets] == ["batch-00000.png", "batch-00006.png", "batch-00012.png"]
    images = [Image.open(s) for s in sheets]
    assert images[0].size == (3 * 68 + 4, 4 * 68 + 4)
    light_of = [np.asarray(image.convert("L")).mean() for image in images]
    assert light_of[0] < light_of[1] < light_of[2]  # the same seeds, brighter
    trainer.save_model(str(tmp_path / "adapters"))
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(dit(), str(tmp_path / "adapters")).eval()
    x, t = torch.randn(2, 1, 8, 8), torch.tensor([900.0, 100.0])
    args = dict(timestep=t, class_labels=torch.tensor([1, 3]), return_dict=False)
    assert torch.allclose(loaded(x, **args)[0], trainer.policy.module(x, **args)[0], atol=1e-6)


def test_a_model_without_adapters_is_saved_as_diffusers_loads_it(tmp_path):
    trainer = make(tmp_path, model=dit(), batches=1, **IMAGES)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    loaded = DiTTransformer2DModel.from_pretrained(str(tmp_path / "model"))
    assert torch.equal(torch.cat([p.flatten() for p in loaded.parameters()]), weights(trainer))
    own = make(tmp_path / "own", batches=1)
    own.save_model(str(tmp_path / "own_model"))
    assert (tmp_path / "own_model" / "model.safetensors").exists()


class Seen(Tiny):
    """Notes what it is called with."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, *args):
        self.calls.append(args)
        return super().forward(*args)


def test_what_a_model_is_called_with(tmp_path):
    """Those of diffusers get timesteps by name, a module of one's own noise levels."""
    unet = UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        num_class_embeds=4,
    )
    make(tmp_path / "unet", model=unet, batches=1, **IMAGES).train()
    model = dit()
    seen, forward = [], model.forward
    model.forward = lambda *args, **named: seen.append((args, named)) or forward(*args, **named)
    make(tmp_path / "dit", model=model, batches=1, **IMAGES).train()
    args, named = seen[1]
    assert set(named) == {"timestep", "class_labels", "return_dict"} and args[0].shape == (8, 1, 8, 8)
    assert named["timestep"].tolist() == pytest.approx([1000 * shifted_sigmas(6)[1]] * 8)
    own = Seen()
    make(tmp_path / "own", model=own, batches=1, timestep_scale=7.0).train()
    x, sigma, classes = own.calls[1]
    assert sigma.tolist() == pytest.approx([shifted_sigmas(6)[1]] * 8) and classes.dtype == torch.int64
    assert not model.training and not own.training


def test_texts_as_several_arguments(tmp_path):
    torch.manual_seed(0)
    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=1,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=6,
        caption_projection_dim=16,
        pooled_projection_dim=5,
        out_channels=1,
    )

    def encode(texts):
        lengths = torch.tensor([float(len(t)) for t in texts])
        states = lengths[:, None, None] * torch.ones(len(texts), 3, 6)
        return {"encoder_hidden_states": states, "pooled_projections": lengths[:, None] * torch.ones(len(texts), 5)}

    trainer = make(tmp_path, model=model, train_dataset=["a cat", "two"], encode=encode, batches=1, **IMAGES)
    (logged,) = trainer.train()
    assert logged["grad_norm"] > 0 and logged["ratio"] == pytest.approx(1, abs=1e-3)


def test_latents_of_a_vae(tmp_path):
    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(8, 8),
        norm_num_groups=4,
        latent_channels=1,
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    shapes = []

    def seen(images, conditions):
        shapes.append(tuple(images.shape))
        return images.mean((1, 2, 3))

    given = {**IMAGES, "reward_funcs": seen}
    trainer = make(
        tmp_path, model=dit(), decode=lambda z: vae.decode(z).sample, batches=1, sheet_every=1, sheet_columns=4, **given
    )
    trainer.train()
    assert shapes == [(16, 3, 16, 16), (8, 3, 16, 16), (16, 3, 16, 16)]  # a sheet, the batch, a sheet
    assert (tmp_path / "sheets" / "batch-00001.png").exists()


def test_bfloat16(tmp_path):
    (logged,) = make(tmp_path, model=dit(), batches=1, mixed_precision="bf16", **IMAGES).train()
    assert logged["ratio"] == pytest.approx(1, abs=0.02) and logged["grad_norm"] > 0


def test_noise_levels_of_the_scheduler(tmp_path):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=2.0)
    policy = make(tmp_path, model=dit(), shift=None, **{**IMAGES, "scheduler": scheduler}).policy
    scheduler.set_timesteps(6)
    assert policy.grid(6) == pytest.approx(tuple(float(s) for s in scheduler.sigmas))
    assert len(policy.grid(3)) == 4 and policy.grid(3)[-1] == 0


class NoLevels:
    """As a scheduler of other models."""


@pytest.mark.parametrize(
    ("scheduler", "options", "why"),
    [
        (None, {}, "needs a scheduler, and none is given"),
        (NoLevels(), {}, "The scheduler NoLevels has no `sigmas`, so it is none of flow matching"),
        (DDIMScheduler(), {}, "The scheduler DDIMScheduler has no `sigmas`"),
        (EulerDiscreteScheduler(), {}, "The noise levels of the scheduler EulerDiscreteScheduler are 157"),
        (
            FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
            {"shift": None},
            "cannot make noise levels by itself",
        ),
        (
            FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
            {"shift": None},
            "Those of flow matching fall from 1 to 0",
        ),
    ],
    ids=lambda x: type(x).__name__,
)
def test_schedulers_without_noise_levels_of_flow_matching(scheduler, options, why):
    with raises(ConfigError) as e:
        Policy(dit(), DiffusionConfig(**options), scheduler)
    assert why in str(e.value) and ("Set `shift`" in str(e.value) or "FlowMatchEulerDiscrete" in str(e.value))


def test_models_that_cannot_be_trained(tmp_path):
    with raises(ConfigError, match="weights"):
        make(tmp_path, model=lambda x, sigma, classes: x)
    with raises(ConfigError, match="requires_grad"):
        make(tmp_path, model=Tiny().requires_grad_(False))
    with pytest.raises(ConfigError, match="LoRA"):  # the rest is a text of PEFT, another in every run
        make(tmp_path, lora_rank=2)
    with raises(MethodError, match="8.*2.*8.*8.*8.*1.*8.*8"):
        make(tmp_path, model=dit(out_channels=2), batches=1, **IMAGES).train()
    with raises(ConfigError, match="1.*3.*`decode`"):
        make(tmp_path, decode=lambda z: z.flatten(1), reward_funcs=lambda s, c: s.mean(1), sheet_every=1).train()
    assert isinstance(Tiny(), nn.Module)
