"""Rollout programs of diffusion policies on the fake engine: legal samples, the same again, and decisions on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rl_plugins.core.denoising import Sample
from rl_plugins.core.errors import MethodError
from rl_plugins.core.method import Method
from rl_plugins.core.rollouts import PlanRow
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.samples import RunningSamples, run_samples
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.testing.contract.compare import differences
from rl_plugins.testing.contract.kit import BUDGET, GROUP_SIZE, GROUPS, PROMPTS, Kit, short_error
from rl_plugins.testing.denoiser import FlowEngine, GaussianFlow, make_sample_prompt

Reward = Callable[[torch.Tensor, Any], Any]


def makes_samples(cls: type[Method]) -> bool:
    """Whether its rollout program is one of diffusion policies."""
    return "rollout" in cls.claims() and "diffusion" in cls.hosts


def check_denoising(kit: Kit) -> bool:
    """programs of diffusion policies on the fake engine: legal samples, the same again, and decisions on them"""
    if not makes_samples(kit.cls):
        return False
    with kit.at("a program"):
        made = _made(kit)
        again = _made(kit)
        if made is not None and again is not None:
            if differences(_plain(made.samples), _plain(again.samples)):
                kit.fail("the same prompts give other samples; seeds come from `prompt.seeds` and `prompt.rng`.")
            _check_decisions(kit, made)
    settings: dict[str, tuple[Reward, dict[str, Any]]] = {
        "one sample": (_reward, {"n": 1}),
        "no rewards": (lambda x, columns: None, {}),
        "equal rewards": (lambda x, columns: 1.0, {}),
        "two steps": (_reward, {"steps": 2}),
        "evaluation": (_reward, {"training": False}),
    }
    for name, (reward, prompt) in settings.items():
        with kit.at(name):
            _made(kit, reward, prompt)
    return True


@dataclass(frozen=True)
class _Made:
    stack: MethodStack
    engine: FlowEngine
    plan: Sequence[PlanRow]
    programs: Sequence[RunningSamples]

    @property
    def samples(self) -> list[list[Sample]]:
        return [p.samples for p in self.programs]


def _reward(x: torch.Tensor, columns: Any) -> float:
    return float(x.mean() > 0)


def _made(kit: Kit, reward: Reward = _reward, changes: Mapping[str, Any] = {}) -> _Made | None:
    """The programs of a planned batch, run to their end; None if one failed."""
    stack = kit.stack()
    method = stack.methods[-1]
    engine = FlowEngine(GaussianFlow(0.1, 0.8), reward, cheap=GaussianFlow(0.0, 0.8))
    dataset = kit.dataset
    plan = first_plan(stack, range(GROUPS), GROUP_SIZE, BUDGET, PROMPTS, dataset).rows
    prompts = [
        make_sample_prompt(
            **{
                "n": row.n + row.spare,
                "condition": row.prompt_index,
                "columns": {**dataset[max(row.prompt_index, 0)], **(row.edit or {})},
                "payload": row.payload,
                "batch": stack.batch,
                "reward_names": ("reward",),
                "has_cheap": True,
                "seed": f"0|check|{row.group}",
                **changes,
            }
        )
        for row in plan
    ]
    try:
        programs = [RunningSamples(method, p) for p in prompts]
        run_samples(programs, engine)
    except MethodError as e:
        kit.fail(short_error(e))
        return None
    finally:
        stack.metrics.take()
    return _Made(stack, engine, plan, programs)


def _plain(samples: Sequence[Sequence[Sample]]) -> Any:
    return [[[x.latent, x.seed, dict(x.meta), x.rewards, x.group] for x in of_prompt] for of_prompt in samples]


def _check_decisions(kit: Kit, made: _Made) -> None:
    """The method's other hooks on what its program made."""
    rows = [
        (p, i, x) for p, program in zip(made.plan, made.programs, strict=True) for i, x in enumerate(program.samples)
    ]
    if not rows:
        kit.fail("the program returns no rollout for any prompt.")
        return
    prompts = [program.prompt for program in made.programs for _ in program.samples]
    scored = made.engine.score([(p, x) for p, (_, _, x) in zip(prompts, rows, strict=True)])  # type: ignore[misc]
    noted = {name for _, _, x in rows for name in x.meta}
    rollouts = kit.rollouts(
        [s.reward for s in scored],
        [p.group for p, _, _ in rows],
        lengths=[len(x.trained) for _, _, x in rows],
        prompt_index=[p.prompt_index for p, _, _ in rows],
        rollout=torch.tensor([i for _, i, _ in rows]),
        payload=[p.payload for p, _, _ in rows],
        meta={c: [p.columns.get(c) for p in prompts] for c in kit.columns if c not in noted},
    )
    own = {name: [x.meta.get(name) for _, _, x in rows] for name in noted}
    rollouts = rollouts.replace(meta={**rollouts.meta, **own})
    position = torch.tensor([t.step for _, _, x in rows for t in x.trained], dtype=torch.int64)
    logprobs = torch.tensor([t.logprob for _, _, x in rows for t in x.trained], dtype=torch.float32)
    tokens = kit.tokens(rollouts, position=position, old_logprobs=logprobs)
    kit.decide(made.stack, rollouts, tokens, BUDGET)
