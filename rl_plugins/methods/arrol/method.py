"""ARRoL (arXiv 2603.24840): rollouts are pruned during generation, so that half of the survivors are right."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rl_plugins import Idle, Method, Plan, Rollouts, Run, Tokens, from_params
from rl_plugins.core.requests import Call, Called, Generate, Generated, Program, Prompt, Trajectory
from rl_plugins.kit.start_checks import refuse_beyond_completion, refuse_whole_group
from rl_plugins.methods.arrol import survivors
from rl_plugins.methods.arrol.head import Calibrator, features_of, fit, quality, with_prompt
from rl_plugins.methods.arrol.params import ArrolParams
from rl_plugins.methods.arrol.survivors import Array, Mask


class Arrol(Method):
    """Stops about half of a prompt's rollouts early and aims at survivors that are half right and half wrong.

    Reconstruction: how the head is built and trained is not published. The paper's head reads hidden states; here it
    reads log-probs, or `features`.

    A rollout that is unfinished after L = `detect_tokens` tokens is continued to its end with the probability

        p_i = clip(K + shift + strength (rho - q_i), low, high)        K keep_ratio, rho positive_ratio

    where q_i is the calibrated probability that it will be right, and the shift makes the mean of p over the last
    rollouts of all prompts equal to K. Only survivors are trained, with the host's advantages in smaller groups. That
    is `selection: survival`. `balanced` (ours) favors right rollouts where they are rare: with the mean of q over the n
    undecided rollouts of the prompt

        a = min(1, K rho / mean q),  b = min(1, K (1 - rho) / (1 - mean q)),  s_i = q_i a + (1 - q_i) b

    scaled to the sum k = round(K n) (halves up). With `independent: false` exactly k rollouts of every prompt survive.
    `extremes` (ours) keeps the round(rho k) best and the worst, `random` any k.

    The head is an MLP (features -> width -> 1, GELU, sigmoid) on the log-probs of the first L tokens (`features_of`)
    and their mean over the prompt. The driver trains it after each batch, with the same AdamW, on the last `window`
    rollouts, weighted by min(1 / p_i, max_weight); `Calibrator` turns its earlier outputs into the posterior per bin.

    Symbols: q, p (n,) float64 per prompt; features (rows, d) float64. Right is a reward >= success_threshold. A row's
    column `arrol` has its features, p and q, also for a vote over answers.

    Special cases: a rollout that ended within L tokens is never stopped, one interrupted before L is continued, and at
    least min_keep of a prompt remain. Nothing is stopped in the first `cold_start` batches, until both right and wrong
    rollouts were seen, and for a prompt whose `features` fail; the rollouts of the latter do not train the head.

    State: the window (features, labels, weights, outputs), the head and its optimizer. Survivors and initial weights
    are drawn.

    Source: arXiv 2603.24840, read through notes by others; its repository has no code (2026-11-26).
    """

    name = "arrol"
    fidelity = "reconstruction"
    brings = frozenset({"column:arrol"})
    state_version = 2  # the optimizer of the head
    does = "Stops about half of the rollouts early, keeping right and wrong ones in balance"
    problems = ("no_signal", "long_tail")
    needs = from_params(
        lambda p: {"column:arrol"} | ({f"engine:logprobs={p.top}"} if p.top and p.features is None else set())
    )
    idle = (
        Idle({"stopped": 0}, "no rollout was stopped. Lower `keep_ratio`, or `detect_tokens` if most end before it."),
        Idle({"right": 0}, "no rollout counts as right, so the head is of no use. Lower `success_threshold`."),
        Idle({"right": 1}, "every rollout counts as right, so the head is of no use. Raise `success_threshold`."),
    )

    Params = ArrolParams

    # ---- driver

    def check(self, run: Run) -> None:
        p, why = self.params, "nothing is ever stopped"
        if p.keep_ratio < 1:
            refuse_beyond_completion(run, "detect_tokens", p.detect_tokens, why, run.max_completion_length - 1)
            refuse_whole_group(run, "min_keep", p.min_keep, why)

    def start(self, run: Run) -> None:
        none = torch.zeros(0, dtype=torch.float64)
        window = {"features": none.view(0, 0), "label": none, "weight": none, "score": none}
        self.state = {"head": None, "moments": None, **window}

    def plan(self, plan: Plan) -> Plan | None:
        """Attaches the head, once it may be used."""
        s, p = self.state, self.params
        known = s["head"] is not None and bool((s["label"] != s["label"][:1]).any())
        if plan.batch < p.cold_start or not known or p.keep_ratio == 1:
            return None
        calibrator = Calibrator.fitted(s["score"], s["label"], s["weight"], p.bins)
        judge = {
            "head": {k: v.tolist() for k, v in s["head"].items()},
            "rates": list(calibrator.rates),
            "shift": survivors.shift_for(calibrator(s["score"]).numpy(), s["weight"].numpy(), p.rule),
        }
        return plan.replace(rows=tuple(row.marked(self.name, judge) for row in plan.rows))

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        """Trains the head on what ended with a reward."""
        p, s = self.params, self.state
        rewards, notes = rollouts.reward.tolist(), rollouts.meta.get(self.name, [None] * len(rollouts))
        rows = [
            (note["features"], float(reward >= p.success_threshold), min(1 / note["keep"], p.max_weight))
            for note, reward in zip(notes, rewards, strict=True)
            if isinstance(note, Mapping) and note.get("features") and not math.isnan(reward)
        ]
        size = s["features"].shape[1] or (len(rows[0][0]) if rows else 0)
        if any(len(row[0]) != size for row in rows):
            self.warn("`features` gives different numbers of features; only as many as at first are used.")
            rows = [row for row in rows if len(row[0]) == size]
        if not rows:
            return
        each = [torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)]
        features, label, weight = each
        score = None if s["head"] is None else quality(s["head"], features)
        window = {
            name: torch.cat([s[name], new] if len(s[name]) else [new])[-p.window :]
            for name, new in (("features", features), ("label", label), ("weight", weight))
        }
        head, moments = fit(
            s["head"],
            s["moments"],
            *window.values(),
            width=p.width,
            steps=p.fit_steps,
            learning_rate=p.learning_rate,
            rng=self.rng("head"),
        )
        if score is None:
            score = quality(head, features)
        else:
            self.log("accuracy", ((score >= 0.5) == (label > 0)).double().mean(), weight=len(label))
            self.log("brier", ((score - label) ** 2).mean(), weight=len(label))
        self.log("right", window["label"].mean())
        self.state = {**window, "head": head, "moments": moments, "score": torch.cat([s["score"], score])[-p.window :]}

    # ---- generation

    def rollout(self, prompt: Prompt) -> Program:
        p, start, n = self.params, prompt.start(), prompt.n
        judge: Any = prompt.mark(self.name) if p.keep_ratio < 1 else None
        top = p.top if p.features is None else 0
        begun = yield Generate(start, n=n, max_tokens=None if judge is None else p.detect_tokens, top=top)
        rows = [start.add(g) for g in begun]
        features: Any = yield from self._features(start, begun)
        stays, keep, q = np.ones(n, dtype=bool), np.ones(n), np.full(n, np.nan)
        if judge is not None and features is not None:
            q = Calibrator(judge["rates"])(quality(judge["head"], features)).numpy()
            undecided = going(prompt, begun, rows, p.detect_tokens)
            if undecided.any():
                ended = int((~undecided).sum())
                stays[undecided], keep[undecided] = self._survivors(prompt, q[undecided], ended, judge["shift"])
                self.log("expected_right", q[stays].mean(), weight=int(stays.sum()))
            self.log("stopped", float((~stays).mean()), weight=n)
        if judge is not None:
            which = (stays & going(prompt, begun, rows, 0)).nonzero()[0].tolist()
            rest = yield [Generate(rows[i]) for i in which]
            for i, (made,) in zip(which, rest, strict=True):
                rows[i] = rows[i].add(made)
        return [rows[i].noted(**{self.name: self._noted(features, keep, q, i)}) for i in stays.nonzero()[0].tolist()]

    @staticmethod
    def _noted(features: Any, keep: Array, q: Array, i: int) -> dict[str, Any]:
        """What the driver gets to know of rollout i."""
        mine = None if features is None else features[i]
        return {"features": mine, "keep": float(keep[i]), "q": None if np.isnan(q[i]) else float(q[i])}

    def _features(self, start: Trajectory, begun: Sequence[Generated]) -> Any:
        """(rows, d) of what the head sees; None if `features` failed. A part of a program."""
        p = self.params
        if p.features is None:
            own = [features_of(g.logprobs, g.top, p.detect_tokens, p.top > 0) for g in begun]
            return with_prompt(own)
        contexts = [list(start.context + g.tokens[: p.detect_tokens]) for g in begun]
        called: Called = yield Call(p.features, (contexts,), p.features_timeout, "`features` of arrol")
        why = called.error
        if not why:
            try:
                found = np.asarray(called.value, dtype=float)
                if found.ndim == 2 and len(found) == len(begun) and found.size and np.isfinite(found).all():
                    return found.tolist()
                why = f"an answer of shape {found.shape} for {len(begun)} contexts, or numbers that are not finite"
            except (TypeError, ValueError) as e:
                why = f"an answer that is no list of numbers per context: {e}"
        self.warn(f"`features` gave {why}; all rollouts of that prompt are continued.")
        return None

    def _survivors(self, prompt: Prompt, q: Array, ended: int, shift: float) -> tuple[Mask, Array]:
        """The undecided rollouts that are continued, and the probability of each."""
        p, rng = self.params, prompt.rng("survivors")
        least = min(len(q), p.min_keep - ended)
        k = survivors.count_to_keep(len(q), p.keep_ratio, least)
        if p.selection == "extremes":
            return survivors.extremes(q, k, p.positive_ratio), np.ones(len(q))
        if p.selection == "survival":
            keep = survivors.survival(q, p.rule, shift)
        else:
            balanced = p.selection == "balanced"
            wanted = survivors.balanced(q, p.keep_ratio, p.positive_ratio) if balanced else np.ones(len(q))
            keep = survivors.inclusion(wanted, k)
        chosen = rng.random(len(q)) < keep if p.independent else survivors.draw(keep, rng)
        return survivors.at_least(least, chosen, keep), keep


def going(prompt: Prompt, begun: Sequence[Generated], rows: Sequence[Trajectory], least: int) -> Mask:
    """(n,) rollouts that have not ended, have room and at least this many new tokens."""
    pairs = zip(begun, rows, strict=True)
    return np.array(
        [g.finish in ("length", "abort") and len(g.tokens) >= least and prompt.room(r) > 0 for g, r in pairs],
        dtype=bool,
    )
