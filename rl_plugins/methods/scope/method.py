"""SCOPE (arXiv 2602.24110): corrects a failed rollout, starting with its first wrong reasoning step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rl_plugins import ConfigError, Idle, Method, MethodParams, from_params, ppo_clip
from rl_plugins.core.losses import Live
from rl_plugins.core.requests import Call, Called, Generate, Generated, Program, Prompt, Score, Scored, Trajectory
from rl_plugins.core.rollouts import Rollouts, Run, Shape, Terms, Tokens
from rl_plugins.kit.prompts import appended, as_text
from rl_plugins.kit.start_checks import refuse_beyond_completion
from rl_plugins.kit.texts import tokens_before
from rl_plugins.methods.scope.params import ScopeParams
from rl_plugins.methods.scope.steps import checked_scores, first_wrong, split_steps

_COLUMN = "scope_foreign"  # 1 for tokens of the corrector


class Scope(Method):
    """Step-wise Correction for On-Policy Exploration: gives a hard prompt a right answer that starts like the policy's.

    Reconstruction: no code was published, and we read only the abstract and summaries (last look 2026-11-26). The
    choice of rollouts, threshold, corrector, replaced part and loss (LUFFY's) are ours.

    For each prompt with fewer than `min_correct` right rollouts (reward >= success_threshold):

        reasoning steps s_1 .. s_T of each wrong rollout, split at `separator`;  v = prm(messages, steps, columns)
        t = first reasoning step with v_t < threshold           (none: `no_error`: skip, or the one of lowest score)
        candidates have (t - 1) / T >= min_prefix;  the best `corrections` of them (`rank`) are corrected
        hybrid = own tokens of s_1 .. s_{t-1}  +  correction;  if its reward is >= success_threshold it takes the place
        of the rollout it began as, else that stays

    The correction is the rest of the answer by the `corrector`. Without one the policy continues from its prefix and
    sees the text of `solution_column` in the prompt (`hint`). `extent: step` takes only the next reasoning step from
    the correction, and the policy finishes without help. The host aggregates this loss per token:

        own tokens:          -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A),   r = exp(lp - old)
        corrector's tokens:  -A p / (p + gamma),   p = exp(lp)                    `off_policy: shaped` (LUFFY)
                             -A lp                                                `sft`
                             as own tokens                                        `plain`

    Symbols: v (T,) per rollout; A the advantage, lp the log-prob, old that of the policy before the update. Own tokens
    keep their log-probs (a token that extends into the wrong reasoning step is not kept); the correction is forced:
    trained, without a rollout log-prob. Column `scope` of a row: first corrected token and the position after the last
    one, [0, 0] without a correction.

    Special cases: a call that fails or gives an unreadable answer leaves the rollout unchanged. A correction that does
    not fit or is unfinished is dropped. A prefix of the plan is never cut.

    Raises:
        ConfigError: no `prm`.

    Source: arXiv 2602.24110 (abstract); loss from LUFFY (arXiv 2504.14945, ElliottYan/LUFFY, mix_core_alg.py).
    """

    name = "scope"
    fidelity = "reconstruction"
    brings = frozenset({"column:scope", "forced_tokens"})
    does = "Corrects a failed rollout from its first wrong reasoning step on"
    problems = ("too_hard", "no_signal", "exploration")
    needs = from_params(
        lambda p: (
            {"tokens", "column:scope"} | (set() if p.corrector else {"chat_template", f"column:{p.solution_column}"})
        )
    )
    idle = (
        Idle({"eligible": 0}, "no group had wrong and too few right rollouts. Look at `min_correct`."),
        Idle({"corrected": 0}, "no correction was right. Look at `located`, `verified`, `threshold`, `corrector`."),
    )
    Params = ScopeParams

    def __init__(self, params: MethodParams | None = None) -> None:
        super().__init__(params)
        if self.params.prm is None:
            raise ConfigError(
                "Method `scope` needs `prm`, a function (messages, steps, columns) -> one score per reasoning step: a "
                'process reward model. Give it as "module:attribute" or as the object itself.'
            )

    # ---- generation

    def check(self, run: Run) -> None:
        p, most = self.params, run.max_completion_length - 1
        if p.min_prefix > 0:
            refuse_beyond_completion(run, "min_step", p.min_step, "a whole rollout is one wrong reasoning step", most)

    def rollout(self, prompt: Prompt) -> Program:
        p = self.params
        made = yield Generate(prompt.start(), n=prompt.n)
        rows = [prompt.start().add(g) for g in made]
        scores: list[Scored] = yield [Score(row) for row in rows]
        rows = [row.scored(s).noted(scope=[0, 0]) for row, s in zip(rows, scores, strict=True)]
        wrong = [i for i, s in enumerate(scores) if s.reward < p.success_threshold]  # NaN is neither
        eligible = bool(wrong) and sum(s.reward >= p.success_threshold for s in scores) < p.min_correct
        self.log("eligible", float(eligible))
        if not eligible:
            return rows
        candidates: list[Candidate] = yield from self._locate(prompt, rows, wrong)
        self.log("located", len(candidates) / len(wrong), weight=len(wrong))
        chosen = sorted(candidates, key=lambda c: -c.rank)[: p.corrections]
        hybrids: list[Trajectory | None] = yield from self._correct(prompt, [rows[c.place].cut(c.kept) for c in chosen])
        ready = [(c.place, h) for c, h in zip(chosen, hybrids, strict=True) if h is not None]
        verdicts: list[Scored] = yield [Score(h) for _, h in ready]
        for (place, hybrid), verdict in zip(ready, verdicts, strict=True):
            right = verdict.reward >= p.success_threshold
            self.log("verified", float(right))
            if right:
                start, stop = hybrid.meta["scope"]
                self.log("kept", 1 - (stop - start) / len(hybrid))
                rows[place] = hybrid.scored(verdict)
        self.log("corrected", sum(row.meta["scope"] != [0, 0] for row in rows) / len(rows))
        return rows

    def _locate(self, prompt: Prompt, rows: Sequence[Trajectory], wrong: Sequence[int]) -> Any:
        """The wrong rollouts that are right for long enough. A part of a program."""
        p, chat = self.params, prompt.chat

        def size(step: str) -> int:
            return len(chat.encode(step))

        steps = {i: split_steps(chat.decode(rows[i].tokens), p.separator, p.min_step, size) for i in wrong}
        steps = {i: s for i, s in steps.items() if any(s)}
        calls = [
            Call(p.prm, (prompt.messages, s, dict(prompt.columns)), p.prm_timeout, "the PRM") for s in steps.values()
        ]
        answers: list[Called] = yield calls
        found = []
        for (i, own), called in zip(steps.items(), answers, strict=True):
            try:
                if called.error:
                    raise ValueError(called.error)
                values = checked_scores(called.value, len(own))
            except ValueError as e:
                self._failed(f"the PRM gave {e}")
                continue
            first = first_wrong(values, p.threshold, p.no_error == "lowest")
            if first is None or first / len(own) < p.min_prefix:
                continue
            kept = tokens_before(rows[i].tokens, chat.decode, len("".join(own[:first])))
            rank = first / len(own) if p.rank == "prefix" else sum(values) / len(values)
            found.append(Candidate(i, max(kept, len(prompt.prefix)), rank))
        return found

    def _correct(self, prompt: Prompt, prefixes: Sequence[Trajectory]) -> Any:
        """The hybrid that grows from each prefix, None where there is none. A part of a program."""
        if self.params.corrector is None:
            grown = yield from self._by_solution(prompt, prefixes)
        else:
            grown = yield from self._by_corrector(prompt, prefixes)
        grown = [h if h is not None and (h.finish or prompt.room(h)) else None for h in grown]
        unfinished = [i for i, h in enumerate(grown) if h is not None and not h.finish]
        rest: list[list[Generated]] = yield [Generate(grown[i]) for i in unfinished]
        for i, (g,) in zip(unfinished, rest, strict=True):
            grown[i] = grown[i].add(g) if g.finish == "eos" else None
        return grown

    def _by_corrector(self, prompt: Prompt, prefixes: Sequence[Trajectory]) -> Any:
        p, chat = self.params, prompt.chat
        texts = [chat.decode(t.tokens) for t in prefixes]
        calls = [
            Call(p.corrector, (prompt.messages, text, dict(prompt.columns)), p.corrector_timeout, "the corrector")
            for text in texts
        ]
        answers: list[Called] = yield calls
        grown: list[Trajectory | None] = []
        for prefix, text, called in zip(prefixes, texts, answers, strict=True):
            good = isinstance(called.value, str) and called.value.strip()
            if called.error or not good:
                self._failed(f"the corrector gave {called.error or f'no text ({type(called.value).__name__})'}")
                grown.append(None)
                continue
            new = called.value.lstrip("\n") if text.endswith("\n") else called.value
            head, separator, tail = new.partition(p.separator)
            ends = p.extent == "suffix" or not tail
            tokens = chat.encode(new) + chat.eos[:1] if ends else chat.encode(head + separator)
            grown.append(self._graft(prompt, prefix, tokens, ends))
        return grown

    def _by_solution(self, prompt: Prompt, prefixes: Sequence[Trajectory]) -> Any:
        """The policy continues from its own prefix, with the solution shown in the prompt."""
        p = self.params
        solution = prompt.columns.get(p.solution_column)
        if solution is None or not prefixes:
            if solution is None:
                self._failed(f"a row of the dataset has nothing in `{p.solution_column}`")
            return [None] * len(prefixes)
        hint = p.hint.replace("{solution}", as_text(solution))
        shown = prompt.chat.prompt(appended(prompt.messages, f"\n{hint}"))
        stop = (p.separator,) if p.extent == "step" else ()
        made: list[list[Generated]] = yield [
            Generate(replace(t, prompt=shown), max_tokens=max(1, prompt.room(t)), stop=stop) for t in prefixes
        ]
        return [
            self._graft(prompt, t, g.tokens, g.finish == "eos") if g.finish in ("eos", "stop") else None
            for t, (g,) in zip(prefixes, made, strict=True)
        ]

    def _graft(self, prompt: Prompt, prefix: Trajectory, tokens: Sequence[int], ends: bool) -> Trajectory | None:
        """The prefix followed by a correction; None if that does not fit."""
        if not tokens or len(tokens) > prompt.room(prefix):
            return None
        hybrid = prefix.force(tokens).noted(scope=[len(prefix), len(prefix) + len(tokens)])
        return replace(hybrid, finish="eos" if ends else "")

    def _failed(self, why: str) -> None:
        self.log("failed", 1.0, "sum")
        self.warn(f"{why}; the rollout stays unchanged.")

    # ---- driver and update

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape:
        """Marks the corrector's tokens."""
        notes = rollouts.meta.get(self.name, [None] * len(rollouts))
        ranges = [note if isinstance(note, (list, tuple)) and len(note) == 2 else (0, 0) for note in notes]
        start, stop = torch.tensor(ranges, dtype=torch.int64).view(-1, 2)[tokens.row].T
        foreign = tokens.forced & (tokens.position >= start) & (tokens.position < stop)
        self.log("foreign", foreign.double().mean() if len(tokens) else 0.0)
        return Shape(token_columns={_COLUMN: foreign.float()})

    def policy_loss(self, terms: Terms) -> Tensor:
        p, live = self.params, Live(terms)
        lp, old, adv = live.all("logprobs", "old_logprobs", "advantages")
        own = ppo_clip(lp, old, adv, p.clip_low, p.clip_high)
        if p.off_policy == "plain":
            return own
        value = torch.sigmoid(lp - math.log(p.gamma)) if p.off_policy == "shaped" else lp  # p / (p + gamma)
        return torch.where(terms.columns[_COLUMN] > 0, -adv * value, own)


@dataclass(frozen=True)
class Candidate:
    """A failed rollout whose first wrong reasoning step is known.

    Args:
        place: of the row among the prompt's.
        kept: tokens before the first wrong reasoning step.
        rank: the larger, the earlier it is corrected.
    """

    place: int
    kept: int
    rank: float
