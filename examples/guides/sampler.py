"""A sampler with state: prompts near a success rate of one half. The guide docs/guides/sampler.md shows this file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rl_plugins import Method, MethodParams, PromptPool, Rollouts, Run, Tokens, param


class Halfway(Method):
    """Takes the prompts whose success rate is nearest to one half; prompts that nobody has tried count as one half.

    State: `tries` and `successes`, (dataset size,) each.
    """

    name = "halfway"
    needs = frozenset({"prompt_index"})

    @dataclass(frozen=True)
    class Params(MethodParams):
        success: float = param(1.0, "lowest reward that counts as a success")
        memory: float = param(0.9, "factor on older counts, per visit", ge=0, le=1)

    def start(self, run: Run) -> None:
        size = run.dataset_size or 0
        self.state = {name: torch.zeros(size, dtype=torch.float64) for name in ("tries", "successes")}

    def select_prompts(self, pool: PromptPool, n: int) -> list[int]:
        rate = (self.state["successes"] + 0.5) / (self.state["tries"] + 1)
        distance = (rate - 0.5).abs() + 0.01 * torch.from_numpy(self.rng("ties").random(pool.size))
        distance[list(pool.taken)] = torch.inf
        return torch.argsort(distance)[:n].tolist()

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        known = (rollouts.prompt_index >= 0) & ~torch.isnan(rollouts.reward)
        prompts, reward = rollouts.prompt_index[known], rollouts.reward[known]
        counts = {"tries": torch.ones_like(reward), "successes": (reward >= self.params.success).double()}
        visited = prompts.unique()
        for name, values in counts.items():
            count = self.state[name].clone()
            count[visited] *= self.params.memory
            self.state[name] = count.index_add(0, prompts, values)
        self.log("tried", (self.state["tries"] > 0).double().mean())


def main() -> None:
    """Two batches without a model: the second avoids the prompt that was always right."""
    from rl_plugins import testing

    stack = testing.start_stack(Halfway(), run=testing.make_run(dataset_size=4))
    rollouts = testing.make_rollouts([1.0, 1, 1, 1, 0, 1, 0, 1])  # two groups of four: prompts 0 and 1
    stack.methods[0].observe(rollouts, testing.make_tokens(rollouts), {})
    print(sorted(stack.one("select_prompts", PromptPool(4, (), (), None, 1), 3)))


if __name__ == "__main__":
    main()
