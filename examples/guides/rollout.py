"""A rollout program: wrong rollouts continue after a hint. The guide docs/guides/rollout.md shows this file."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from rl_plugins import Generate, Method, MethodParams, Program, Prompt, Score, Trajectory, param
from rl_plugins.core.requests import together


class SecondThought(Method):
    """Rollouts without reward continue after a hint, once.

    The hint is trained like the tokens of the policy, but the policy did not sample it.
    """

    name = "second_thought"
    brings = {"forced_tokens"}

    @dataclass(frozen=True)
    class Params(MethodParams):
        hint: str = param("wait. ", "text after which a wrong rollout continues")

    def rollout(self, prompt: Prompt) -> Program:
        return (yield from together([self._one(prompt) for _ in range(prompt.n)]))

    def _one(self, prompt: Prompt) -> Generator[Any, Any, Trajectory]:
        (generated,) = yield Generate(prompt.start())
        row = prompt.start().add(generated)
        scored = yield Score(row)
        self.log("wrong", float(scored.reward <= 0))
        if not scored.reward <= 0 or generated.finish != "eos":
            return row.scored(scored)
        hint = prompt.chat.encode(self.params.hint)
        hinted = row.cut(len(row) - 1).force(hint)  # without the end of sequence
        if prompt.room(hinted) < 1:
            return row.scored(scored)
        (more,) = yield Generate(hinted)
        return hinted.add(more)


def main() -> None:
    """Two rollouts on the fake engine, where every probability is known."""
    from rl_plugins.testing.engine import TableEngine, make_prompt, run_program

    engine = TableEngine(
        {">": {"n": 1.0}, "n": {"<eos>": 1.0}, " ": {"y": 1.0}},  # "n" at first, and "y" after the hint
        reward=lambda text, columns: float(text.endswith("y")),
    )
    rollouts = run_program(SecondThought(), make_prompt(engine.chat, "is it so?", n=2), engine)
    for (row,) in rollouts:
        print(engine.chat.decode(row.tokens, special=True), list(row.kinds))


if __name__ == "__main__":
    main()
