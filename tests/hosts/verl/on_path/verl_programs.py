"""On PYTHONPATH of the real runs: rollout programs, a tiny environment, and a reward function that reads its score."""

from __future__ import annotations

import math
import os
import time

import probes
import torch
from verl_probes import OUT, note

from rl_plugins.core.redundancy import independent
from rl_plugins.core.requests import Call, Generate, Score, together
from rl_plugins.core.rollouts import Shape
from rl_plugins.kit.agents import Observation, play
from rl_plugins.tools.messages.contracts import Contract


class Ladder:
    """Three turns. An odd last digit is a step up; the observation is the height, rewards are 1 per step."""

    def reset(self, columns):
        self.height = self.turns = 0
        self.level = columns["level"]  # a field of `extra_info`
        return Observation("", state=0)

    def act(self, action):
        self.turns += 1
        climbed = action[-1:] in tuple("13579")
        self.height += climbed
        return Observation(
            str(self.height), float(climbed), self.turns == 3, valid=any(c.isdigit() for c in action), state=self.height
        )

    def score(self):
        return self.height / 3 + 0.01 * self.level

    def close(self):
        pass


def reward(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """The environment's score where the program noted one, else the share of odd digits."""
    note("scored", text=solution_str)
    if (OUT / "outage").exists():
        return {"score": math.nan, "length": 0.0, "had_score": 0.0, "edited": 0.0}
    noted = extra_info.get("score")
    if noted is None or math.isnan(noted):
        noted = sum(c in "13579" for c in solution_str) / 10
    had, edited = float("score" in extra_info), float(extra_info.get("edited", 0))
    return {"score": noted, "length": float(len(solution_str)), "had_score": had, "edited": edited}


class Program(probes.Probe):
    in_eval = ("rollout",)


class Agent(Program):
    """Plays the ladder."""

    name = "ladder"
    needs = frozenset({"tokens", "column:score", "column:turns", "column:level", "text", "raw_text"})
    in_eval = ("rollout", "plan")

    def plan(self, plan):
        """In evaluation all prompts become one."""
        if plan.rows[0].prompt_index != -1:
            return plan
        edit = {"prompt": [{"role": "user", "content": "e:21"}]}
        return plan.replace(rows=tuple(r.replace(edit=edit, payload=r.edit["level"]) for r in plan.rows))

    def rollout(self, prompt):
        self.log("asked", prompt.n, "sum")
        rows = yield from together([play(prompt, Ladder, max_turns=3, turn_tokens=6) for _ in range(prompt.n)])
        edited = prompt.chat.decode(prompt.tokens) == "e:21" and prompt.payload == prompt.columns["level"]
        return [r.noted(edited=float(edited and not prompt.training)) for r in rows]

    def observe(self, rollouts, tokens, stats):
        torch.save((rollouts, tokens), OUT / f"ladder{rollouts.batch}.pt")


class TurnsApart(Program):
    """Two rows per rollout: the second turn has what came before it as its prompt."""

    name = "turns_apart"
    rows_per_rollout = 2
    needs = frozenset({"tokens", "column:place", "turns"})

    def rollout(self, prompt):
        first = yield Generate(prompt.start(), n=prompt.n, max_tokens=4)
        begun = [prompt.start().add(g).turn(0, "start").noted(place=0) for g in first]
        bridge = prompt.chat.reply([{"role": "user", "content": "go"}])
        contexts = [type(b)(b.context + bridge) for b in begun]
        second = yield [Generate(c, max_tokens=5) for c in contexts]
        rows = [c.add(g[0]).turn(0, "again").noted(place=1) for c, g in zip(contexts, second, strict=True)]
        return [list(pair) for pair in zip(begun, rows, strict=True)]

    def observe(self, rollouts, tokens, stats):
        torch.save((rollouts, tokens), OUT / "apart.pt")


class Grafting(Program):
    """Everything a row can be made of: a forced start, the argmax, what was only read, a stop text, rewards of its own,
    a group apart, rows without a token and without a trained one, and fewer rollouts than were asked for."""

    name = "grafting"
    brings = {"forced_tokens"}
    needs = frozenset({"tokens", "engine:logprobs=3", "old_logprobs"})

    def plan(self, plan):
        rows = [r.replace(payload={"number": i}) for i, r in enumerate(plan.rows)]
        rows[0] = rows[0].replace(prefix=(10, 11), max_tokens=12)
        rows[1] = rows[1].replace(given=(probes.Completion((7, 8, 9, 1)),))
        return plan.replace(rows=tuple(rows))

    def rollout(self, prompt):
        greedy, sampled = yield [
            Generate(prompt.start(), temperature=0.0, max_tokens=3, top=3),
            Generate(prompt.start(), n=prompt.n - 3, max_tokens=8, stop=("1", "3"), top=2),
        ]
        assert [place[0][0] for place in greedy[0].top] == list(greedy[0].tokens), "the argmax is the most likely one"
        assert all(len(place) == 2 for g in sampled for place in g.top)
        for g in sampled:
            assert g.finish != "stop" or prompt.chat.decode(g.tokens)[-1] in "13"
        mixed = prompt.start().add(greedy[0]).observe(prompt.chat.encode("ok"))
        (tail,) = yield Generate(mixed, max_tokens=2)
        rows = [mixed.add(tail), *[prompt.start().add(g) for g in sampled]]
        scored = yield [Score(r) for r in rows[:2]]
        rows[:2] = [r.scored(s) for r, s in zip(rows[:2], scored, strict=True)]
        rows[2] = type(rows[2])(**{**vars(rows[2]), "group": ("apart", 1)})
        rows.append(type(rows[0])(prompt.tokens))  # no token
        self.log("number", prompt.payload["number"] if prompt.payload else -1, "max")
        return [*rows, type(rows[0])(prompt.tokens).observe((7, 8))]

    def shape(self, rollouts, tokens):
        torch.save((rollouts, tokens), OUT / "grafting.pt")
        return Shape()


class Idle(Program):
    """Makes no optimizer step."""

    name = "idle"
    aggregation = "none"

    def rollout(self, prompt):
        made = yield Generate(prompt.start(), n=prompt.n, max_tokens=4)
        return [prompt.start().add(g) for g in made]


class Sleepy(Program):
    """A tool that hangs, one that raises and one that works; each error becomes a column."""

    name = "sleepy"
    needs = frozenset({"tokens", "column:errors"})

    def rollout(self, prompt):
        made = yield Generate(prompt.start(), n=prompt.n, max_tokens=4)
        if prompt.payload != "hang":
            return [prompt.start().add(g).noted(errors=()) for g in made]
        called = yield [
            Call(time.sleep, (3600,), timeout=0.5, name="a sleep"),
            Call(int, ("x",)),
            Call(int, ("7",)),
        ]
        assert called[2].value == 7
        return [prompt.start().add(g).noted(errors=[c.error for c in called[:2]]) for g in made]

    def plan(self, plan):
        return plan.replace(rows=(plan.rows[0].replace(payload="hang"), *plan.rows[1:]))

    def observe(self, rollouts, tokens, stats):
        torch.save((rollouts, tokens), OUT / "sleepy.pt")


class Uneven(Ladder):
    """Longer episodes in a group are slower too, and in every group one environment never returns."""

    def __init__(self, number):
        self.number = number
        note("environment", what="open", number=number)

    def act(self, action):
        time.sleep(3600 if self.number == 3 else 0.02 * self.number)
        return super().act(action)

    def close(self):
        note("environment", what="close", number=self.number)


class Spared(Program):
    """Plays the ladder with rollouts that may be closed."""

    name = "spared"
    brings = {"redundancy"}
    needs = frozenset({"tokens", "column:score", "column:error"})

    def rollout(self, prompt):
        def one(k):
            t = yield from play(prompt, lambda: Uneven(k), max_turns=3, timeout=600, turn_tokens=6)
            return t.noted(number=k)

        return (yield from independent(prompt, one))

    def observe(self, rollouts, tokens, stats):
        torch.save((rollouts, tokens), OUT / "spared.pt")


class Routed(Program):
    """Two turns of four tokens; the prompt of the second holds the first."""

    name = "routed"
    brings = {"redundancy"}

    def rollout(self, prompt):
        def one(k):
            t = prompt.start()
            for _ in range(2):
                (made,) = yield Generate(t, max_tokens=4)
                t = t.add(made)
            return t

        return (yield from independent(prompt, one))


class Failing(Program):
    """Raises for one prompt of a later step than the first."""

    name = "failing"

    def plan(self, plan):
        return plan.replace(rows=tuple(r.replace(payload=plan.batch + i) for i, r in enumerate(plan.rows)))

    def rollout(self, prompt):
        made = yield Generate(prompt.start(), n=prompt.n, max_tokens=4)
        if prompt.batch > 0 and prompt.payload == prompt.batch:
            raise ValueError("the program gave up")
        return [prompt.start().add(g) for g in made]


class Wasteful(Program):
    """Samples twice as many completions as it keeps."""

    name = "wasteful"

    def rollout(self, prompt):
        made = yield Generate(prompt.start(), n=2 * prompt.n, max_tokens=4)
        return [prompt.start().add(g) for g in made[: prompt.n]]


class Gone(probes.Probe):
    """No row stays."""

    name = "gone"
    needs = frozenset({"tokens", "old_logprobs"})

    def select(self, rollouts):
        return torch.zeros(len(rollouts), dtype=torch.bool)

    def observe(self, rollouts, tokens, stats):
        self.log("seen", len(rollouts) - len(tokens))


class Watch(probes.Probe):
    """Only looks: what a step generated, in a file of its own."""

    name = "watch"
    needs = frozenset({"tokens", "raw_text"})
    if "RL_PLUGINS_TEST_VERSIONS" in os.environ:
        needs |= {"token_versions"}

    def observe(self, rollouts, tokens, stats):
        torch.save((rollouts, tokens), OUT / f"watch{rollouts.batch}.pt")


class Recorded(probes.Probe):
    """Gives every prompt two recorded steps, in a column the data has."""

    name = "recorded"

    def plan(self, plan):
        return plan.replace(rows=tuple(r.replace(edit={"level": [["7", "7"], ["8", "8"]]}) for r in plan.rows))


def digit_first(response, expert, columns):
    """Matched where the second character is an odd digit."""
    right = response[1:2] in tuple("13579")
    return right, float(right)


class Fussy(Ladder):
    """The ladder, where a turn that does not end with an odd digit is an error."""

    def act(self, action):
        after = super().act(action)
        right = action[-1:] in tuple("13579")
        return Observation("" if right else "no", after.reward, after.done, right, after.state)


def first_digits(text):
    """The answer of a vote: the first three characters."""
    return text[:3] or None


def step_scores(messages, steps, columns):
    """The first step of every answer is wrong from its second character on."""
    return [0.9] * (len(steps) - 1) + [0.1]


def completed(messages, prefix, columns):
    return "=13579"


def short_result():
    return Contract("result", {"type": "string"}, size=30)


def asked(text):
    return [text[1:3]] if text[:1] == "=" else []


def complaint(*asked, **more):
    """The error message of a failed answer."""
    return "no"
