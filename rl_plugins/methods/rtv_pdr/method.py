"""RTV and PDR (arXiv 2604.16529): attempts are summarized, compared in a tournament, and refined in a second wave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from rl_plugins import Idle, Method, Run, from_params, signals
from rl_plugins.core.requests import Call, Generate, Generated, Program, Prompt, Score, Trajectory, together
from rl_plugins.kit.agents import play
from rl_plugins.kit.prompts import as_messages, as_text
from rl_plugins.kit.services import fill, prompt_text, with_task
from rl_plugins.kit.start_checks import refuse_beyond_completion
from rl_plugins.methods.rtv_pdr import texts
from rl_plugins.methods.rtv_pdr.params import RtvPdrParams
from rl_plugins.methods.rtv_pdr.tournament import Group, Vote, orders, preferred, rtv_rounds

if TYPE_CHECKING:
    import numpy as np

Part = Generator[Any, Any, Any]


class RtvPdr(Method):
    """Answers a prompt with the winner of a tournament among many attempts; later waves read earlier summaries.

    Made for evaluation, and optionally for exploration in training. With N attempts, T waves, K summaries, groups of G
    and V votes:

        wave 0:    tau_1 .. tau_N ~ pi(. | p);  s_i = Sum(p, tau_i)
        wave w:    C = RTV(s of wave w-1, down to K);  tau_i ~ pi(. | p + C), N of them, environments reset
        answer:    RTV(s of wave T-1, down to 1)                         (`final_pool: all`: of all waves)

        RTV:  while more than wanted are left: deal them to groups of G at random; in each the V votes of the judge
              decide (a group of one goes on unasked); the winners are left

    The judge sees the problem and the summaries of a group in a random order per vote and names the best. The rounds
    end as soon as at most K are left; if fewer are left, the losers of that round with the most votes return.
    Summarizer and judge are the policy itself, or callables. Neither sees rewards or reference answers.

    In evaluation the selected rollout is returned with the prompt it was made from; let the host ask for one rollout.
    In training, with n the host's group size, refined rollouts are a group whose prompt holds the summaries:

        plain     ordinary rollouts; the method acts in evaluation only
        refined   waves 0 .. T-2 as above, then the group is n rollouts of p + C, the same C for all of them
        hard      n rollouts of p; if no reward exceeds `hard_below`, they are wave 0, and n of p + C replace them

    Symbols: p prompt, tau attempt, s summary, a text cut to `summary_chars`. A judge's vote is a number from 1 on (or a
    text with "Best: 2"). Dealing, ties and orders are drawn from the prompt's generator.

    Special cases: the end of the attempt replaces a summary that fails or is empty. A vote that fails or cannot be read
    does not count; without any valid vote the winner is drawn. The summarizer sees the end of an attempt that is too
    long. Summaries may take half of the room for an answer. An attempt whose environment cannot be made or reset is
    not compared; where its row is needed it has no tokens and no reward (NaN).

    Raises:
        ConfigError: a class that is no environment, training without a wave that reads summaries.

    Source: arXiv 2604.16529, without code of the authors; N, T, K, G, V as independent readers and an unofficial
    implementation report them (genji970/Scaling-Test-Time-Compute-for-Agentic-Coding-, e4d81a6).
    """

    name = "rtv_pdr"
    fidelity = "paper"
    does = "Answers with the winner of a tournament among many attempts, refined in a second wave"
    problems = ("no_verifier",)
    in_eval = ("rollout",)
    needs = from_params(
        lambda p: signals(chat_template=p.environment or p.waves > 1 or p.summarizer is None or p.judge is None)
    )
    idle = (Idle({"refined": 0}, "no prompt was hard enough for another wave. Raise `hard_below`."),)
    Params = RtvPdrParams

    def check(self, run: Run) -> None:
        refuse_beyond_completion(run, "turn_tokens", self.params.turn_tokens, "this limit has no effect")

    def rollout(self, prompt: Prompt) -> Program:
        p = self.params
        if not prompt.training:
            return (yield from self._answer(prompt))
        if p.training == "plain":
            return (yield from self._attempts(prompt, prompt.n))
        return (yield from self._explore(prompt))

    def _answer(self, prompt: Prompt) -> Part:
        """The selected rollout."""
        p, context, problem = self.params, prompt, ""
        pool: list[Trajectory] = []
        said: list[str] = []
        for wave in range(p.waves):
            attempts = yield from self._attempts(context, p.attempts)
            made = _begun(attempts)
            if not made:
                continue
            keep = p.final_pool == "all"
            pool, said = [*pool, *made] if keep else made, said if keep else []
            if wave < p.waves - 1 or len(pool) > 1:
                problem = problem or self._problem(prompt, made)
                new = yield from self._summaries(prompt, problem, made)
                said = [*said, *new]
                if wave < p.waves - 1:
                    context = yield from self._next(prompt, problem, new, wave)
        if not pool:
            return attempts[:1]
        (winner,) = yield from self._tournament(prompt, problem, said or [""], 1, "answer")
        return [pool[winner]]

    def _explore(self, prompt: Prompt) -> Part:
        """Rollouts of the prompt with summaries; in `hard` those of the prompt itself where some succeed."""
        p, context, problem = self.params, prompt, ""
        made = yield from self._attempts(prompt, prompt.n if p.training == "hard" else p.attempts)
        if p.training == "hard":
            begun = _begun(made)
            scores = yield [Score(t) for t in begun]
            hard = not any(s.reward > p.hard_below for s in scores)
            self.log("refined", float(hard))
            if not hard:
                others = [t for t in made if t.rewards is not None]
                return [*(t.scored(s) for t, s in zip(begun, scores, strict=True)), *others]
        for wave in range(p.waves - 1):
            if begun := _begun(made):
                problem = problem or self._problem(prompt, begun)
                said = yield from self._summaries(prompt, problem, begun)
                context = yield from self._next(prompt, problem, said, wave)
            made = yield from self._attempts(context, p.attempts if wave < p.waves - 2 else prompt.n)
        return [replace(t, group="refined") for t in made]

    def _next(self, prompt: Prompt, problem: str, said: Sequence[str], wave: int) -> Part:
        """The prompt of the next wave, with the summaries that win."""
        best = yield from self._tournament(prompt, problem, said, self.params.keep, f"wave {wave}")
        return self._refined(prompt, [said[i] for i in best])

    def _attempts(self, prompt: Prompt, n: int) -> Part:
        p = self.params
        if p.environment is None:
            start = prompt.start()
            return [start.add(g) for g in (yield Generate(start, n=n))]
        episode = partial(play, prompt, p.environment, p.max_turns, p.call_timeout, p.turn_tokens)
        made: list[Trajectory] = yield from together([episode() for _ in range(n)])
        for error in {t.meta["error"]: None for t in made if t.meta["error"]}:
            self.warn(f"an attempt has no score: {error}")
        return made

    # ---- summaries

    def _problem(self, prompt: Prompt, made: Sequence[Trajectory]) -> str:
        """The task as summarizer and judge see it, with the first observation of an environment."""
        return prompt.chat.decode(made[0].prompt) if self.params.environment else prompt_text(prompt.messages)

    def _summaries(self, prompt: Prompt, problem: str, made: Sequence[Trajectory]) -> Part:
        """A text for each rollout."""
        p = self.params
        attempts = [prompt.chat.decode(t.tokens).strip() for t in made]
        if p.summarizer is not None:
            answers = yield [Call(p.summarizer, (problem, a), p.call_timeout, "the summarizer") for a in attempts]
            said = [as_text(a.value).strip() if isinstance(a.value, (str, bytes)) else "" for a in answers]
        else:
            asked = [Generate(self._about(prompt, problem, a), max_tokens=p.summary_tokens) for a in attempts]
            said = [prompt.chat.decode(g.tokens).strip() for (g,) in (yield asked)]
        self.log("summaries_failed", sum(not s for s in said) / len(said), weight=len(said))
        size = p.summary_chars
        return [s[:size] or a[-size:] for s, a in zip(said, attempts, strict=True)]

    def _about(self, prompt: Prompt, problem: str, attempt: str) -> Trajectory:
        """The summarizer's conversation, with as much of the end of the attempt as leaves room for the summary."""
        needed = min(self.params.summary_tokens, prompt.max_tokens)
        while True:
            fields = {"problem": problem, "attempt": attempt, "chars": self.params.summary_chars}
            asked = _asked(prompt, fill(texts.summary_prompt(self.params.summary_shape), fields))
            if prompt.room(asked) >= needed or not attempt:
                return asked
            attempt = attempt[len(attempt) // 4 + 1 :]

    def _refined(self, prompt: Prompt, summaries: Sequence[str]) -> Prompt:
        """The prompt with summaries, for the next wave."""
        room = prompt.room(prompt.start())
        for count in range(len(summaries), 0, -1):
            shown = texts.numbered(summaries[:count])

            def told(problem: str, shown: str = shown) -> str:
                return fill(texts.REFINE, {"problem": problem, "summaries": shown})

            messages = as_messages(with_task(prompt.messages, told))
            context = replace(prompt, messages=messages, tokens=prompt.chat.prompt(messages))
            if 2 * context.room(context.start()) >= room:
                return context
        self.warn(
            "summaries leave too little room for an answer, so a wave runs without them. Raise the context length."
        )
        return prompt

    # ---- the tournament

    def _tournament(self, prompt: Prompt, problem: str, said: Sequence[str], stop: int, purpose: str) -> Part:
        """Numbers of the summaries that are left."""
        p = self.params

        def rng(what: str) -> np.random.Generator:
            return prompt.rng(f"{purpose} {what}")

        rules = {name: getattr(p, name) for name in ("group_size", "ties", "unparsable", "shuffle")}
        rounds = rtv_rounds(len(said), stop=stop, rng=rng, **rules)
        number, votes = 0, None
        while True:
            try:
                groups = rounds.send(votes)  # type: ignore[arg-type]
            except StopIteration as done:
                return done.value
            shown = [
                orders(group, p.votes, rng if p.permute else None, f"round {number} group {g}")
                for g, group in enumerate(groups)
            ]
            votes = yield from self._votes(prompt, problem, said, shown)
            number += 1

    def _votes(self, prompt: Prompt, problem: str, said: Sequence[str], shown: Sequence[Sequence[Group]]) -> Part:
        """The votes of every group, all asked for at the same time."""
        asked = [(g, order, n) for g, of_group in enumerate(shown) for order, n in Counter(of_group).items()]
        replies = iter((yield from self._replies(prompt, problem, said, [(order, n) for _, order, n in asked])))
        votes: list[list[Vote]] = [[] for _ in shown]
        for g, order, n in asked:
            votes[g] += [preferred(reply, order) for reply in islice(replies, n)]
        for given in votes:
            counted = Counter(v for v in given if v is not None)
            self.log("votes", len(given), "sum")
            self.log("unparsable", given.count(None) / len(given), weight=len(given))
            if counted:
                self.log("agreement", max(counted.values()) / counted.total())
        return votes

    def _replies(self, prompt: Prompt, problem: str, said: Sequence[str], asked: Sequence[tuple[Group, int]]) -> Part:
        """What the judge replies, as often as asked about the candidates in each order."""
        p, shown = self.params, [([said[c] for c in order], n) for order, n in asked]
        if p.judge is not None:
            calls = [Call(p.judge, (problem, some), p.call_timeout, "the judge") for some, n in shown for _ in range(n)]
            return [a.value for a in (yield calls)]
        fields = [{"problem": problem, "summaries": texts.numbered(some)} for some, _ in shown]
        votes = [
            Generate(_asked(prompt, fill(texts.JUDGE, f)), n, p.judge_tokens, temperature=p.judge_temperature)
            for f, (_, n) in zip(fields, asked, strict=True)
        ]
        return [_reply(prompt, one) for many in (yield votes) for one in many]


def _begun(attempts: Sequence[Trajectory]) -> list[Trajectory]:
    """Those whose environment could be had: the others have no reward from the start."""
    return [t for t in attempts if t.rewards is None]


def _asked(prompt: Prompt, question: str) -> Trajectory:
    """A separate conversation."""
    return Trajectory(prompt.chat.prompt([{"role": "user", "content": question}]))


def _reply(prompt: Prompt, made: Generated) -> str:
    """A vote's text; nothing of one that was cut off before its verdict, where a number may be anything."""
    text = prompt.chat.decode(made.tokens)
    return text if made.finish in ("eos", "stop") or "best" in text.lower() else ""
