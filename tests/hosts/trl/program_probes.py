"""Rollout programs that stress the adapter; what they saw is in `SEEN`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from probes import Probe

from rl_plugins.core.params import MethodParams, param
from rl_plugins.core.requests import Call, Generate, Score, Trajectory, together
from rl_plugins.core.rollouts import Admission

SEEN: dict[str, Any] = {}


class Plain(Probe):
    """One sample per rollout: what TRL does itself."""

    name = "plain"

    def rollout(self, prompt):
        SEEN.setdefault("prompts", []).append(prompt)
        made = yield Generate(prompt.start(), n=prompt.n)
        return [prompt.start().add(g) for g in made]


class Engine(Probe):
    """Asks for everything an engine can be asked for."""

    name = "asks"
    needs = {"engine:logprobs=3"}

    def rollout(self, prompt):
        start = prompt.start()
        SEEN["prompt"] = prompt
        SEEN["top"], SEEN["argmax"], SEEN["stop"], SEEN["none"] = yield [
            Generate(start, n=2, max_tokens=5, top=3),
            Generate(start, n=2, max_tokens=7, temperature=0),
            Generate(start, stop=("1", "2", "3", "=")),
            Generate(start.observe((9,) * prompt.max_tokens)),
        ]
        SEEN["scored"] = yield Score(start.add(SEEN["top"][0]))
        return [start.add(SEEN["stop"][0])] * prompt.n


class Talk(Probe):
    """Two turns: what it says, a tool's answer of two tokens, what it says then. The first rollout has a hint."""

    name = "talk"
    needs = {"tokens", "turns", "column:mood"}

    @dataclass(frozen=True)
    class Params(MethodParams):
        score: bool = param(False, "score in the program")

    def rollout(self, prompt):
        def one(k):
            t = prompt.start()
            if k == 0:
                t = t.force(prompt.chat.encode("=1"))
            (a,) = yield Generate(t, max_tokens=3)
            t = t.add(a).turn(0, anchor="start", reward=0.5)
            read = yield Call(lambda x: x + 1, (k,))
            t = t.observe(prompt.chat.encode(f"<{read.value}"))
            start = len(t)
            (b,) = yield Generate(t, max_tokens=4)
            t = t.add(b).turn(start, anchor=f"told {k}", valid=k % 2 == 0).noted(mood=f"m{k}")
            self.log("talked", 1.0, "sum")
            return t.scored((yield Score(t))) if self.params.score else t

        return (yield from together([one(k) for k in range(prompt.n)]))

    def shape(self, rollouts, tokens):
        SEEN["rollouts"], SEEN["tokens"] = rollouts, tokens


class Walk(Probe):
    """Six short turns, every other rollout greedy; what is read in between is longer than what is said."""

    name = "walk"

    @dataclass(frozen=True)
    class Params(MethodParams):
        greedy: bool = param(False, "all rollouts are")
        uneven: bool = param(False, "some prompts have longer turns, so ranks are done at different times")

    def rollout(self, prompt):
        most = 2 + sum(prompt.tokens) % 9 if self.params.uneven else 3

        def one(k):
            t = prompt.start()
            for turn in range(6):
                (g,) = yield Generate(t, max_tokens=most, temperature=0 if k % 2 or self.params.greedy else None)
                t = t.add(g).observe(prompt.chat.encode(f"<{k}:{turn}>" * 2))
            return t

        rows = yield from together([one(k) for k in range(prompt.n)])
        SEEN.setdefault("walks", []).extend(rows)
        return rows


class Rows(Probe):
    """Each rollout becomes two rows with prompts of their own; the second row is a sub-agent's."""

    name = "rows"
    rows_per_rollout = 2
    needs = {"column:agent"}

    def rollout(self, prompt):
        made = yield Generate(prompt.start(), n=prompt.n)
        own = Trajectory(prompt.chat.prompt([{"role": "user", "content": f"u{prompt.messages[0]['content']}"}]))
        more = yield [Generate(own, max_tokens=3) for _ in made]
        return [
            [prompt.start().add(g).noted(agent="main"), own.add(s[0]).noted(agent="sub")]
            for g, s in zip(made, more, strict=True)
        ]

    def advantages(self, rollouts):
        SEEN.setdefault("batches", []).append(rollouts)
        return torch.where(rollouts.index == 0, 1.0, -1.0).double()


class Labels(Probe):
    """Half of the rollouts form a group apart."""

    name = "labels"

    def rollout(self, prompt):
        made = yield Generate(prompt.start(), n=prompt.n)
        rows = [prompt.start().add(g) for g in made]
        return [replace(t, group="apart") if k % 2 else t for k, t in enumerate(rows)]

    def advantages(self, rollouts):
        SEEN["rollouts"] = rollouts
        return rollouts.reward


class Zero(Probe):
    """A row without a token, a row that was only read, and fewer rows than asked for."""

    name = "zero"

    def rollout(self, prompt):
        made = yield Generate(prompt.start(), n=prompt.n - 3)
        empty = prompt.start()
        return [empty, empty.observe((9, 9)), *[empty.add(g) for g in made]]

    def shape(self, rollouts, tokens):
        SEEN["rollouts"] = rollouts


class Idle(Probe):
    """Makes no optimizer step."""

    name = "idle"
    aggregation = "none"

    def observe(self, rollouts, tokens, stats):
        self.log("seen", len(rollouts), "sum")


class Raises(Probe):
    """Fails in the middle of a program."""

    name = "raises"

    def rollout(self, prompt):
        yield Generate(prompt.start())
        raise ValueError("the third wheel")

    def observe(self, rollouts, tokens, stats):
        pass


class Evaluated(Probe):
    """Acts in evaluation: writes a digit in the policy's place."""

    name = "evaluated"
    in_eval = ("rollout", "plan")

    def plan(self, plan):
        SEEN.setdefault("plans", []).append(len(plan.rows))
        if all(r.prompt_index == -1 for r in plan.rows):
            edited = [r.replace(edit={**r.edit, "prompt": [{"role": "user", "content": "u:9"}]}) for r in plan.rows]
            return plan.replace(rows=tuple(edited))
        return None

    def rollout(self, prompt):
        SEEN.setdefault("training", []).append((prompt.training, prompt.messages[0]["content"], prompt.n))
        made = yield Generate(prompt.start().force((7,)), n=prompt.n)
        return [prompt.start().force((7,)).add(g) for g in made]


class Over(Probe):
    """Begins `factor` times as many groups as are trained; everything that waits goes on first."""

    name = "over_begin"
    needs = {"tokens", "token_versions", "rollout_logprobs", "old_logprobs"}

    @dataclass(frozen=True)
    class Params(MethodParams):
        factor: float = param(2.0, "groups begun per group trained")

    def admit(self, queue):
        SEEN.setdefault("queues", []).append(queue)
        total = round(queue.groups * self.params.factor)
        resume = tuple(range(min(len(queue.carried), total)))
        return Admission(fresh=total - len(resume), resume=resume)

    def observe(self, rollouts, tokens, stats):
        SEEN.setdefault("batches", []).append((rollouts, tokens))


class Wasteful(Probe):
    """Samples twice as many completions as it keeps."""

    name = "wasteful"
    in_eval = ("rollout",)

    @dataclass(frozen=True)
    class Params(MethodParams):
        tokens: int = param(0, "length of a completion; 0: as the run has it")

    def rollout(self, prompt):
        made = yield Generate(prompt.start(), n=2 * prompt.n, max_tokens=self.params.tokens or None)
        return [prompt.start().add(g) for g in made[: prompt.n]]
