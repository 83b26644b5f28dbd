"""Arithmetic with a calculator: what an agent writes in brackets is computed in a sandbox."""

from __future__ import annotations

import ast
import random
import re
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

from rl_plugins.lab.demo.environments.episode import DemoEnvironment
from rl_plugins.lab.demo.environments.sandbox import Outcome, Sandbox

MAX_EXPRESSION, MAX_RESULT = 40, 12  # characters
_CALL = re.compile(r"\[([^\[\]]*)\]")
_ANSWER = re.compile(r"=(-?[0-9]{1,12})")
_ARITHMETIC = (
    *(ast.Expression, ast.Constant, ast.BinOp, ast.UnaryOp, ast.UAdd, ast.USub),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow),
)


class Runs(Protocol):
    """Runs code as `Sandbox` does."""

    def run(self, code: str) -> Outcome: ...

    def close(self) -> None: ...


class Calculator(DemoEnvironment):
    """A question such as `a=12 b=7 c=3 (a*b)-c?`; level k has k operators, from `+`, `-` and `*`.

    A turn is either a call such as `[12*7]`, which is answered with its value, or the answer, `=81`, which ends the
    episode with reward 1 if it is right. Anything else, and a call that cannot be computed, is answered with `err`.

    Args:
        sandbox: Where expressions are computed; all calculators of this process share one when None.
    """

    LEVELS = (1, 2, 3)
    MAX_TURNS = 6
    MAX_ACTION = 14
    _shared = Sandbox(timeout=0.5, memory_mb=64, max_output=64, require_filter=False)  # only arithmetic comes to it
    _sharing: weakref.WeakSet[Calculator] = weakref.WeakSet()

    def __init__(self, sandbox: Runs | None = None) -> None:
        super().__init__()
        self._sandbox: Runs = self._shared if sandbox is None else sandbox
        self._question: list[tuple[str, int]] = []
        self._results: list[str] = []

    def close(self) -> None:
        """End the process of the shared sandbox if no other calculator uses it; a later call starts it again."""
        super().close()
        if self._sandbox is not self._shared:
            return
        self._sharing.discard(self)
        if not self._sharing:
            self._shared.close()

    @classmethod
    def unwatched(cls) -> Calculator:
        return cls(_InThisProcess())

    @staticmethod
    def describe(columns: Mapping[str, Any]) -> str:
        operators, values = columns["operators"], columns["values"]
        text = "a"
        for operator, name in zip(operators, "bcdefgh", strict=False):
            text = f"{f'({text})' if len(text) > 1 else text}{operator}{name}"
        return f"{' '.join(f'{name}={value}' for name, value in zip('abcdefgh', values, strict=False))} {text}?"

    def advise(self) -> str:
        """The next operation on what was found so far, then the answer."""
        wanted = self._wanted()
        for so_far, (operator, value), result in zip(wanted, self._question[1:], wanted[1:], strict=False):
            if str(result) not in self._results:
                return f"[{so_far}{operator}{value}]"
        return f"={wanted[-1]}"

    def stumble(self, rng: random.Random) -> str:
        """One character of the expert's action is another, or the result so far is taken for the answer."""
        action = self.advise()
        if action[0] == "[" and self._results and rng.random() < 0.2:
            return f"={self._results[-1]}"
        place = rng.randrange(1, len(action))
        return action[:place] + rng.choice("0123456789+-*]") + action[place + 1 :]

    @staticmethod
    def _draw(rng: random.Random, level: int) -> dict[str, Any]:
        values = [rng.randint(10, 99), *(rng.randint(2, 9) for _ in range(level))]
        return {"operators": "".join(rng.choices("+-*", k=level)), "values": values}

    def _begin(self, columns: Mapping[str, Any]) -> None:
        self._question = list(zip("+" + columns["operators"], map(int, columns["values"]), strict=True))
        self._results = []

    def _take(self, action: str) -> tuple[str, float, bool, bool]:
        if answer := _ANSWER.fullmatch(action):
            right = int(answer.group(1)) == self._wanted()[-1]
            return ("right" if right else "wrong"), float(right), True, True
        call = _CALL.fullmatch(action)
        result = self._compute(call.group(1)) if call else None
        if result is None:
            return "err", 0.0, False, False
        self._results.append(result)
        return result, 0.0, False, True

    def _state(self) -> list[str]:
        return list(self._results)

    def _compute(self, expression: str) -> str | None:
        if not is_arithmetic(expression):
            return None
        if self._sandbox is self._shared:
            self._sharing.add(self)
        outcome = self._sandbox.run(f"print({expression})")
        text = outcome.text.strip()
        return text if outcome.error is None and 0 < len(text) <= MAX_RESULT else None

    def _wanted(self) -> list[int]:
        """The first value and the result of each operation, in order."""
        results: list[int] = []
        for operator, value in self._question:
            so_far = results[-1] if results else 0
            results.append({"+": so_far + value, "-": so_far - value, "*": so_far * value}[operator])
        return results


def is_arithmetic(expression: str) -> bool:
    """Whether this is a Python expression of numbers and arithmetic operators and nothing else."""
    if len(expression) > MAX_EXPRESSION:
        return False
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError):
        return False
    return all(
        isinstance(node, _ARITHMETIC) and (not isinstance(node, ast.Constant) or type(node.value) in (int, float))
        for node in ast.walk(tree)
    )


class _InThisProcess:
    """Computes the demonstrations' expressions, which are short, without a sandbox."""

    def run(self, code: str) -> Outcome:
        expression = code.removeprefix("print(").removesuffix(")")
        if "**" in expression:
            return Outcome("", "no powers here")
        try:
            return Outcome(str(eval(expression, {"__builtins__": {}})))
        except (ArithmeticError, SyntaxError, TypeError) as error:
            return Outcome("", str(error))

    def close(self) -> None: ...
