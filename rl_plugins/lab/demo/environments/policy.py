"""Policies for the three environments: warm-started on this machine and kept in the cache, one for each.

The warm start is supervised fine-tuning on demonstrations of an expert who is careless: in each turn with a fixed
probability, and what follows from the slip is part of the demonstration. The policy that results knows what actions
look like and often what to do, but samples badly, which leaves reinforcement learning something to do.

A trajectory is one sequence of tokens, each message as the chat template renders it:
`<user>OBSERVATION<asst>ACTION<eos><user>OBSERVATION<asst>ACTION<eos>...`. The loss is on what the agent writes.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rl_plugins.lab.demo import environments, policy, tasks
from rl_plugins.lab.demo.environments import Calculator, Grid, Shop
from rl_plugins.lab.demo.environments.episode import DemoEnvironment


@dataclass(frozen=True)
class AgentWarmStart(policy.Fit):
    """Settings of a warm start.

    Attributes:
        careless: chance that a turn of a demonstration is a slip.
        demonstrations: made before the first step; batches are drawn from them.
    """

    batch_size: int = 32
    careless: float = 0.3
    demonstrations: int = 4096


# One policy for all three takes twice as long as any of these and is worse at each.
WARM_STARTS: dict[type[DemoEnvironment], AgentWarmStart] = {
    Calculator: AgentWarmStart(steps=400, careless=0.2),
    Grid: AgentWarmStart(steps=450, careless=0.4),
    Shop: AgentWarmStart(steps=250, careless=0.32),
}


def demonstration(rng: random.Random, environment: DemoEnvironment, row: Mapping[str, Any], careless: float) -> str:
    """The rendered trajectory of a careless expert in the episode of a row."""
    observation = environment.reset(row)
    text = ""
    while not observation.done:
        action = environment.stumble(rng) if rng.random() < careless else environment.advise()
        # What the chat template makes of the messages; rendering it for every row would take most of the time.
        text += f"<user>{observation.text}<asst>{action}<eos>"
        observation = environment.act(action)
    return text


def warm_start(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    environment: type[DemoEnvironment],
    settings: AgentWarmStart | None = None,
    progress: policy.Progress | None = None,
) -> None:
    """Train `model` in place on demonstrations of rows of the train split.

    Args:
        model: A model of `build_model`.
        tokenizer: The tokenizer of `build_tokenizer`.
        environment: Whose episodes are demonstrated.
        settings: Those of `WARM_STARTS` when None.
        progress: Called after every step.
    """
    settings = WARM_STARTS[environment] if settings is None else settings
    rng = random.Random(settings.seed)
    instance = environment.unwatched()
    rows = (environment.draw(rng, rng.choice(environment.LEVELS), "train") for _ in range(settings.demonstrations))
    texts = [demonstration(rng, instance, row, settings.careless) for row in rows]
    batches = _batches(rng, texts, settings.batch_size)
    policy.fit(model, lambda: policy.labeled(tokenizer, next(batches)), settings, progress)


def agent_policy_path(environment: str, cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where :func:`load_agent_policy` keeps a policy, whether it was built already or not."""
    kind = _kind(environment)
    folder = Path(environments.__file__).parent
    sources = (policy.__file__, str(tasks.__file__), *map(str, sorted(folder.glob("*.py"))))
    key = policy.cache_key(WARM_STARTS[kind], *sources)
    return policy.cache_folder(cache_dir) / f"demo-policy-{kind.__name__.lower()}-{key}"


def load_agent_policy(
    environment: str, cache_dir: str | os.PathLike[str] | None = None, progress: policy.Progress | None = None
) -> Path:
    """Directory of the policy warm-started for an environment; built when the cache lacks it, like the demo's policy.

    Args:
        environment: "Calculator", "Grid" or "Shop", with or without "rl_plugins.lab.demo.environments:" before it.
        cache_dir: Where to keep policies; else the environment variable `RL_PLUGINS_CACHE`, else the user's cache.
        progress: Called after every step of the warm start, never when the policy was in the cache.

    Raises:
        ValueError: there is no such environment.
        OSError: the cache cannot be written.
    """
    build = functools.partial(_build, _kind(environment), progress=progress)
    return policy.cached(agent_policy_path(environment, cache_dir), build)


def play(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    environment: type[DemoEnvironment],
    rows: Iterable[Mapping[str, Any]],
    samples: int = 1,
    temperature: float = 1.0,
    seed: int = 0,
) -> dict[int, list[float]]:
    """Scores of episodes per level, `samples` for each row in a batch of all of them.

    Args:
        model: The policy, in evaluation mode.
        tokenizer: Its tokenizer, with left padding.
        environment: Where it acts.
        rows: Rows of `environment.rows`.
        samples: Episodes per row.
        temperature: Of the sampling, over the whole vocabulary; 0 is greedy decoding.
        seed: Of the sampling. The global generators are left as they were.
    """
    rows = [row for row in rows for _ in range(samples)]
    agents = [environment.unwatched() for _ in rows]
    texts = [f"<user>{agent.reset(row).text}<asst>" for agent, row in zip(agents, rows, strict=True)]
    going = list(range(len(rows)))
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        while going:
            inputs = tokenizer([texts[i] for i in going], return_tensors="pt", padding=True, add_special_tokens=False)
            output = model.generate(
                **inputs,
                max_new_tokens=environment.MAX_ACTION,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                **sampling,
            )
            actions = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            observations = [agents[i].act(action) for i, action in zip(going, actions, strict=True)]
            for i, action, observation in zip(going, actions, observations, strict=True):
                texts[i] += f"{action}<eos><user>{observation.text}<asst>"
            going = [i for i, observation in zip(going, observations, strict=True) if not observation.done]
    scores: dict[int, list[float]] = {}
    for row, agent in zip(rows, agents, strict=True):
        scores.setdefault(row["level"], []).append(agent.score())
    return dict(sorted(scores.items()))


def _batches(rng: random.Random, texts: list[str], size: int) -> Iterator[list[str]]:
    """Batches without end, of texts of about the same length, so that little of a batch is padding."""
    while True:
        drawn = sorted(rng.sample(texts, 4 * size), key=len)
        batches = [drawn[i : i + size] for i in range(0, len(drawn), size)]
        rng.shuffle(batches)
        yield from batches


def _kind(environment: str) -> type[DemoEnvironment]:
    kinds = {kind.__name__: kind for kind in WARM_STARTS}
    name = environment.removeprefix("rl_plugins.lab.demo.environments:")
    if name not in kinds:
        raise ValueError(f"There is no demo policy for {environment!r}. Choose one of: {', '.join(kinds)}.")
    return kinds[name]


def _build(environment: type[DemoEnvironment], directory: Path, progress: policy.Progress | None) -> None:
    tokenizer = policy.build_tokenizer()
    model = policy.build_model(WARM_STARTS[environment].seed)
    warm_start(model, tokenizer, environment, progress=progress)
    policy.save(model, tokenizer, directory)
