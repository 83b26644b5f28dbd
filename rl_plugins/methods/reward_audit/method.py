"""Audit of rewards, before and during training: a defence against what DecepChain (arXiv 2510.00319) shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_plugins import Idle, Method, MethodParams, Rollouts, Run, Tokens
from rl_plugins.core.errors import RunStopped
from rl_plugins.core.rollouts import PerRollout, weighted_reward
from rl_plugins.kit.services import Failure, Service, number
from rl_plugins.methods.reward_audit.params import RewardAuditParams
from rl_plugins.tools.audit import Finding, Options, Preflight, online, preflight
from rl_plugins.tools.audit.answers import extract_answer
from rl_plugins.tools.audit.online import Flag, PromptFeatures
from rl_plugins.tools.audit.provenance import changed, provenance
from rl_plugins.tools.audit.rows import Row, read_row

MOST_FINDINGS = 1000  # of a run that are kept


class RewardAudit(Method):
    """Looks for rewards that are turned around: on dataset rows before training, on features of prompts during it.

    Reconstruction: the paper describes an attack, which turns rewards around where the prompt has a trigger. This audit
    is the defence; its design and its defaults are ours.

    Before the first step (`preflight`, the same as `rl-plugins audit`):

        D = R(right answer) - mean R(wrong answers) in every row; D < 0 is critical

    and changed prompts, repeated calls, near-duplicates and the source are looked at. During training:

        C1  s = mean reward of a group's most frequent answer - mean reward of its other answers
            z of a feature = (mean s with it - mu) / (sigma sqrt((1 - n/N) / n)), q by Benjamini and Hochberg
            flagged if q < alpha and mean s < 0; below 30 groups a permutation test inside sources must agree
        C2  e = [reward above the middle of its range] differs from `verifier`, for most of a group's checked rollouts
            flagged if Fisher's exact test has q < alpha and the odds ratio is above 3
        C3  CUSUM of the mean of s, and of the correlation of reward and verifier, against the first ten batches

    A feature that C1 flags alone is a warning, because the most frequent answer may be wrong. It is critical if C2
    flags it, too, or if most rows that have it have D < 0. What C2 flags is critical if e = 1 in most of its groups.

    Actions on what is critical: `warn`; `quarantine`, rewards of matching rows become NaN, so they leave every
    statistic and get the advantage 0; `stop`, during training with a checkpoint.

    Symbols: R weighted sum of the reward functions; N, n groups with a sign, and those with the feature; mu, sigma mean
    and deviation of s over N. Features are words, pairs of words, strange characters, column values, length, system
    prompt.

    Special cases: groups without a single most frequent answer, or with one answer only, have no s. Foreign prompts and
    streams have features of their text alone. On a resume the audit before training runs again. If code, dataset or
    config of the rewards changed, the run ends unless `allow_change`.

    State: counts per feature (at most `max_features`), s of the last `window` groups, findings, quarantine, hashes.

    Raises:
        RunStopped: something is critical and the action is `stop`; on a resume the rewards are not what they were.
        MethodError: the answer column that is named does not exist.

    Source: the threat is from arXiv 2510.00319, abstract. Everything else is ours.
    """

    name = "reward_audit"
    fidelity = "reconstruction"
    does = "Looks for rewards that are turned around, and takes out the rows they concern"
    problems = ("wrong_rewards",)
    needs = frozenset({"text", "column:prompt"})
    idle = (Idle({"groups": 0.0}, "no group had answers that differ. Check that `answer_extractor` finds them."),)
    Params = RewardAuditParams

    def __init__(self, params: MethodParams | None = None) -> None:
        super().__init__(params)
        p = self.params
        self._dataset: Any = None
        self._now: dict[str, str] = {}
        self._inverted: frozenset[int] = frozenset()
        self._looked: tuple[int, ...] = ()
        self._verifier = None if p.verifier is None else Service(_item(p.verifier), "the verifier", answer=number(0, 1))

    # ---- before training

    def start(self, run: Run) -> None:
        self._dataset, self._now = run.dataset, provenance(run)
        self.state = {
            **online.empty(self.params.window),
            "provenance": dict(self._now),
            "drift": {"sign": online.start_drift(), "verifier": online.start_drift()},
            "findings": [],
            "rows": [],
            "features": {},
            "warned": [],
            "low": float("inf"),
            "high": float("-inf"),
            "batches": 0,
        }
        for part, why in self._not_served(run).items():
            self.warn(f"{part} cannot be served: {why}.")
        if self.params.preflight:
            self._act_before(self._preflight(run))

    def _not_served(self, run: Run) -> dict[str, str]:
        """Parts during training that lack something."""
        missing = {}
        if self.params.online and self._verifier is None:
            missing["C2 (shadow check)"] = "no `verifier` is given, so C1 needs the gold contrast to be confirmed"
        if run.dataset is None:
            missing["features of columns"] = "the dataset is a stream"
        return missing

    def _preflight(self, run: Run) -> Preflight:
        p = self.params
        options = Options(
            answer_column=p.answer_column,
            gold_renderer=p.gold_renderer,
            corrupter=p.corrupter,
            wrong_answers=p.wrong_answers,
            max_rows=p.max_rows,
            tol=p.tol,
            tol_stochastic=p.tol_stochastic,
            tau=p.tau,
            delta=p.delta,
            declared_prompt_features=p.declared_prompt_features,
            seed=int(self.rng("preflight").integers(1 << 31)),
        )
        found = preflight(run, options)
        for part, why in found.report.not_served.items():
            self.warn(f"{part} cannot be served: {why}.")
        return found

    def _act_before(self, found: Preflight) -> None:
        report = found.report
        self._inverted = frozenset(found.inverted)
        self._looked = () if found.contrast is None else tuple(found.contrast.rows.tolist())
        self.state["findings"] = [f.plain() for f in report.findings][:MOST_FINDINGS]
        for f in report.findings:
            if f.severity != "info":
                self.warn(f"{f.severity}, {f.part}: {f.shown}")
        if not report.critical:
            return
        if self.params.on_preflight == "stop":
            told = " ".join(f.shown for f in report.critical)
            raise RunStopped(
                f"`reward_audit` found {len(report.critical)} critical error(s) before training. {told} Run "
                f"`rl-plugins audit` to see all of it. To train without these rows set "
                f"method_params.reward_audit.on_preflight to quarantine."
            )
        if self.params.on_preflight == "quarantine":
            self.state["rows"] = sorted(self._inverted)
            if not self._inverted:
                self.warn("No single row is known to be wrong, so there is nothing to quarantine.")

    # ---- during training

    def rewards(self, rollouts: Rollouts) -> Tensor | None:
        self._check_provenance()
        out = torch.zeros(len(rollouts), dtype=torch.bool)
        if self.state["rows"]:
            out |= torch.isin(rollouts.prompt_index, torch.tensor(self.state["rows"]))
        if self.state["features"]:
            first, index = _first_rows(rollouts)
            prompts = PromptFeatures.of([self._row(rollouts, i) for i in first], self.params.source_column)
            marked = prompts.with_any([int(b) for b in self.state["features"]])
            out |= torch.from_numpy(marked)[index]
        self.log("quarantined", out.double().mean())
        self.note(out, "the audit found a wrong reward for this prompt or one like it")
        return torch.where(out, torch.nan, rollouts.reward) if bool(out.any()) else None

    def _check_provenance(self) -> None:
        """The state of a resumed run came from the checkpoint, the hashes of now from `start`."""
        before = self.state["provenance"]
        other = changed(before, self._now) if self._now else []
        if not other:
            return
        told = ", ".join(other)
        if not self.params.allow_change:
            raise RunStopped(
                f"`reward_audit`: since the checkpoint these changed: {told}. Restore them, start a new run, or set "
                f"method_params.reward_audit.allow_change to true from the beginning of a run."
            )
        self._note([Finding("warn", "provenance", "changed", f"Since the checkpoint these changed: {told}.")])
        self.state["provenance"] = dict(self._now)

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        if self.params.online:
            self._count(rollouts)
            self.state["batches"] += 1
            if self.state["batches"] % self.params.every_n_batches == 0:
                self._test()
        self.log("critical", sum(f["severity"] == "critical" for f in self.state["findings"]))

    def _count(self, rollouts: Rollouts) -> None:
        """Adds a batch to the statistics; rewards as the functions gave them."""
        p, once = self.params, rollouts.per_rollout
        texts = rollouts.text
        assert texts is not None  # in `needs`
        extract = p.answer_extractor or extract_answer
        answers = [extract(texts[i]) for i in once.last.tolist()]
        reward = once.rows.mean(weighted_reward(rollouts.rewards, rollouts.reward_weights))
        group = once.groups.index
        first, _ = _first_rows(rollouts)
        prompts = PromptFeatures.of([self._row(rollouts, i) for i in first], p.source_column)
        s = online.majority_signs(group, answers, reward, len(first))
        known = reward[~torch.isnan(reward)]
        if len(known):
            self.state["low"] = min(self.state["low"], float(known.min()))
            self.state["high"] = max(self.state["high"], float(known.max()))
        checks, pairs = self._checks(rollouts, once, reward, len(first))
        self.state = online.add(self.state, prompts, s, checks, p.window, p.max_features)
        self.log("groups", (~torch.isnan(s)).double().mean())
        signs = s[~torch.isnan(s)]
        if len(signs):
            self.log("mean_sign", signs.mean())
            spread = float(self.state["signs"].std(correction=0)) if len(self.state["signs"]) else 0.0
            self._drift("sign", float(signs.mean()), spread / len(signs) ** 0.5)
        if len(pairs) > 3 and min(np.ptp(pairs, axis=0)) > 0:
            self._drift("verifier", float(np.corrcoef(pairs.T)[0, 1]), (len(pairs) - 3) ** -0.5)

    def _checks(
        self, rollouts: Rollouts, once: PerRollout, reward: Tensor, groups: int
    ) -> tuple[Tensor, np.ndarray[Any, np.dtype[np.float64]]]:
        """(groups, 2) whether the verifier looked at the group, and whether it disagrees about most of what it saw; and
        (reward, verdict) of every rollout. A group counts once, because its rollouts are right or wrong together."""
        checks = torch.zeros(groups, 2, dtype=torch.float64)
        if self._verifier is None:
            return checks, np.zeros((0, 2))
        chosen = torch.from_numpy(self.rng("verify").random(len(reward)) < self.params.verify_share)
        places = (chosen & ~torch.isnan(reward)).nonzero()[:, 0]
        texts = rollouts.text
        assert texts is not None  # in `needs`
        rows = once.last[places].tolist()
        found = self._verifier.ask([(dict(self._row(rollouts, i)), texts[i]) for i in rows], strict=False)
        good = [i for i, answer in enumerate(found) if not isinstance(answer, Failure)]
        if len(good) < len(found):
            self.warn("the verifier failed on some rollouts; they are not checked.")
        if not good:
            return checks, np.zeros((0, 2))
        places, verdict = places[good], torch.tensor([float(found[i]) for i in good], dtype=torch.float64)
        middle = (self.state["low"] + self.state["high"]) / 2
        wrong = ((reward[places] > middle) != (verdict > 0.5)).double()
        of = once.groups.index[places]
        checks.index_add_(0, of, torch.stack([torch.ones_like(wrong), wrong], dim=1))
        checks = torch.stack([checks[:, 0] > 0, checks[:, 1] > checks[:, 0] / 2], dim=1).double()
        self.log("errors", wrong.mean())
        return checks, torch.stack([reward[places], verdict], dim=1).numpy()

    def _drift(self, what: str, value: float, deviation: float) -> None:
        self.state["drift"][what], alarm = online.drift(self.state["drift"][what], value, deviation)
        if not alarm:
            return
        if what == "sign":
            text = f"The most frequent answer of a group is worth less than it was at the beginning ({value:+.3g} now)."
            if value < 0:
                text += " Other answers get more: the reward may be turned around everywhere."
        else:
            text = f"The reward agrees less with the verifier than at the beginning (correlation {value:+.2f} now)."
        self._note([Finding("warn", "drift", what, text)])

    def _test(self) -> None:
        p = self.params
        inverted = online.inverted_features(self.state, p.n_min, p.alpha, self.rng("permutation"))
        disagreeing = online.disagreeing_features(self.state, p.n_min, p.alpha)
        self.log("flagged", len({f.bucket for f in (*inverted, *disagreeing)}))
        sure = {f.bucket for f in disagreeing if f.mean > 0.5}
        for flag in inverted:
            critical = flag.bucket in sure or self._confirmed(flag)
            self._flagged(flag, "majority sign", critical, f"mean sign {flag.mean:+.3g} in {flag.groups} groups")
        for flag in disagreeing:
            wrong = f"the verifier disagrees about {flag.mean:.0%} of {flag.groups} groups"
            self._flagged(flag, "shadow check", flag.mean > 0.5, wrong)

    def _confirmed(self, flag: Flag) -> bool:
        """Whether rows on which the reward prefers a wrong answer have the feature, and most rows with it are such."""
        if not self._inverted or self._dataset is None:
            return False
        having = [n for n in self._looked if flag.bucket in online.buckets_of(online.features_of(self._own(n)))]
        return sum(n in self._inverted for n in having) > len(having) / 2

    def _flagged(self, flag: Flag, part: str, critical: bool, numbers: str) -> None:
        """Notes a flag once at each severity, and acts."""
        mark = f"{part}|{flag.bucket}|{critical}"
        if mark in self.state["warned"]:
            return
        self.state["warned"] = [*self.state["warned"], mark][-MOST_FINDINGS:]
        text = f"Prompts with {flag.name!r}: {numbers} (q = {flag.q:.2g})."
        details = {"feature": flag.name, "groups": flag.groups, "mean": flag.mean, "q": flag.q}
        if not critical:
            text += (
                " The most frequent answer may honestly be wrong there; nothing else confirms an error."
                if part == "majority sign"
                else " The reward is right on most of them: they may only share words with others."
            )
            self._note([Finding("warn", part, "suspicious", text, (), details)])
            return
        self._note([Finding("critical", part, "inverted_feature", text, (), details)])
        if self.params.on_training == "quarantine":
            self.state["features"] = {**self.state["features"], str(flag.bucket): flag.name}
        elif self.params.on_training == "stop":
            self.stop(f"{part}: {text}")

    def _note(self, findings: Sequence[Finding]) -> None:
        for f in findings:
            self.warn(f"{f.severity}, {f.part}: {f.shown}")
        self.state["findings"] = [*self.state["findings"], *(f.plain() for f in findings)][-MOST_FINDINGS:]

    # ---- rows

    def _row(self, rollouts: Rollouts, i: int) -> Row:
        """The dataset row of a rollout, with the prompt as it was asked; of a foreign prompt the prompt alone."""
        n = int(rollouts.prompt_index[i])
        own = self._own(n) if n >= 0 and self._dataset is not None else {}
        return {**own, "prompt": rollouts.meta["prompt"][i]}

    def _own(self, number: int) -> Row:
        return read_row(self._dataset, number)


def _first_rows(rollouts: Rollouts) -> tuple[list[int], Tensor]:
    """The first row of every group, and the number of each row's group."""
    index = rollouts.groups.index
    first = torch.full((rollouts.groups.count,), len(rollouts), dtype=torch.int64)
    first.scatter_reduce_(0, index, torch.arange(len(rollouts)), "amin")
    return first.tolist(), index


def _item(verifier: Callable[..., Any]) -> Callable[[tuple[dict[str, Any], str]], Any]:
    return lambda item: verifier(*item)
