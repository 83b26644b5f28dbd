"""Fission-GRPO (arXiv 2601.15625): failed tool calls become recovery prompts with groups of their own."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rl_plugins import (
    ConfigError,
    Idle,
    Method,
    MethodParams,
    Plan,
    PlanRow,
    Rollouts,
    Run,
    Tokens,
    from_params,
    signals,
)
from rl_plugins.core.errors import shown
from rl_plugins.kit.prompts import as_messages, as_text
from rl_plugins.kit.services import Failure, NotAsked, Service, failures
from rl_plugins.kit.start_checks import refuse_no_group, refuse_one_prompt
from rl_plugins.methods.fission_grpo.calls import GENERIC, as_calls, leaks, read_calls, simulate
from rl_plugins.methods.fission_grpo.params import FissionParams


class FissionGrpo(Method):
    """Turns an error of the policy into a prompt: the failed call and the tool's message about it.

    Reconstruction: group sizes, trigger, thresholds and the error simulator were not published (last look 2026-11-26:
    the authors' page announces code) and are ours. Recovery prompts join the next batch, where the paper updates
    separately.

    After each generation batch, for each rollout that is an error (reward < error_threshold, or, with `error_column`,
    an error text of its own), at most `max_per_prompt` of a prompt:

        f = message about the error         the column's; or `message`(..); or the rules of `simulate`; never the answer
        x_corr = [prompt; assistant: the failed answer; tool: f]        pushed on the pool, a stack

    Errors are the same if prompt and calls are (or texts); one that is in the pool or the batch is left out. The rules
    compare the calls with `tools_column` (schemas) and `gold_column` (the right calls).

    In every `every`-th batch, if the pool holds `trigger` entries of at most `max_age` batches, the newest are popped,
    as many as fit into `share` of the rows. Each gets `group_size` rollouts in its own group, A_j = (R_j - mean) / std,
    in free rows first, then in those of random prompts. Columns are the original prompt's; x_corr has no loss.

    Symbols: R, A (rows,) float64. Recovery prompts are foreign (-1) to other methods.

    Special cases: a general message replaces a missing one, and one that reveals a value of the right arguments which
    is neither in the prompt nor in the failed answer. Rollouts of several rows or turns are left out; those without a
    reward (NaN) are no errors. A failed recovery is pushed again up to `max_depth` times in a row.

    State: the pool (prompt, digest of the error, dataset row, batch, depth), at most `capacity` entries.

    Raises:
        ConfigError: a reward function the run does not have.

    Source: arXiv 2601.15625, as four independent notes report it.
    """

    name = "fission_grpo"
    fidelity = "reconstruction"
    does = "Turns failed tool calls into prompts about recovering from the error"
    problems = ("agents", "no_signal")
    needs = from_params(
        lambda p: signals(
            "text", "prompt_index", columns=(p.prompt_column, p.gold_column, p.tools_column, p.error_column)
        )
    )
    idle = (Idle({"served": 0}, "no recovery prompt was trained. Look at `errors`, `pool`, `trigger` and `share`."),)
    state_version = 2  # entries have the digest of their error
    Params = FissionParams

    def __init__(self, params: MethodParams | None = None) -> None:
        super().__init__(params)
        self._service: Service | None = None
        self._dataset: Any = None

    def check(self, run: Run) -> None:
        name = self.params.correctness
        if run.reward_names and name is not None and name not in run.reward_names:
            raise ConfigError(
                f"`correctness` is {name!r}, and the reward functions are {', '.join(run.reward_names)}. Name one of "
                f"them, or none for the total reward."
            )
        p = self.params
        refuse_no_group(run, f"`share` is {p.share:g}", p.share, "for recovery", p.group_size)
        if p.share < 1:
            refuse_one_prompt(run, "recoveries would replace all of the batch; `share: 1` allows that")

    def start(self, run: Run) -> None:
        p = self.params
        self._dataset = run.dataset
        if p.message is not None:
            self._service = Service(p.message, "`message` of fission_grpo", answer=_text, timeout=p.message_timeout)
        self.state = {"pool": []}

    # ---- before generation

    def plan(self, plan: Plan) -> Plan | None:
        """Serves the newest entries, in the place of other prompts."""
        p = self.params
        pool = [entry for entry in self.state["pool"] if plan.batch - entry["batch"] <= p.max_age]
        self.state["pool"] = pool
        if plan.batch % p.every == 0:
            self.log("served", 0, "sum")
        if plan.batch % p.every or len(pool) < p.trigger or not plan.rows:
            return None
        size = p.group_size or plan.group_size
        free, groups = plan.budget - plan.trained, list(dict.fromkeys(row.group for row in plan.rows))
        rows_of = {g: sum(row.n for row in plan.rows if row.group == g) for g in groups}
        count = min(len(pool), int(p.share * plan.budget + 1e-9) // size)
        # what may go: any, for the same ones each epoch would never be trained where the order of prompts is fixed
        left = self.rng("left out").permutation(groups).tolist()[0 if p.share == 1 else 1 :]
        count = min(count, (free + sum(rows_of[g] for g in left)) // size)
        if count < 1:
            return None
        gone: set[int] = set()
        while free < count * size:
            group = left.pop()
            gone.add(group)
            free += rows_of[group]
        first = max(groups) + 1
        served = [pool.pop() for _ in range(count)]
        self.log("served", count, "sum")
        rows = [row for row in plan.rows if row.group not in gone]
        return plan.replace(rows=(*rows, *(self._row(entry, first + i, size) for i, entry in enumerate(served))))

    def _row(self, entry: Mapping[str, Any], group: int, size: int) -> PlanRow:
        columns = dict(self._dataset[entry["source"]])
        columns.pop("raw_prompt", None)  # verl's copy of the prompt, which it makes anew
        prompt = entry["prompt"]
        columns[self.params.prompt_column] = prompt if isinstance(prompt, str) else [dict(m) for m in prompt]
        origin = {"source": entry["source"], "depth": entry["depth"]}
        return PlanRow(-1, group, size, edit=columns).marked(self.name, origin)

    # ---- after it

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        """Pushes the errors of the batch."""
        p, own, wrong = self.params, self._origins(rollouts), self._wrong(rollouts)
        self._report(rollouts, own, wrong)
        errors, dropped = self._new_errors(rollouts, own, wrong)
        pushed = []
        for (i, error), f in zip(errors.items(), self._messages(rollouts, list(errors)), strict=True):
            prompt = _extended(rollouts.meta[p.prompt_column][i], _answer(rollouts, i), p.role, f)
            if len(_plain(prompt)) > p.max_characters:
                dropped += 1
                continue
            source, depth = own[i]
            entry = {"prompt": prompt, "error": error, "source": source, "batch": rollouts.batch, "depth": depth + 1}
            pushed.append(entry)
        self.state["pool"] = [*self.state["pool"], *pushed][-p.capacity :]
        self.log("pushed", len(pushed), "sum")
        self.log("dropped", dropped, "sum")
        self.log("pool", len(self.state["pool"]))

    def _new_errors(
        self, rollouts: Rollouts, own: Sequence[tuple[int, int]], wrong: Sequence[bool]
    ) -> tuple[dict[int, str], int]:
        """Row -> digest of each error that is not known yet, at most `max_per_prompt` of a prompt; and how many were
        too long."""
        p, prompts, many = self.params, rollouts.meta[self.params.prompt_column], self._several(rollouts)
        known = {entry["error"] for entry in self.state["pool"]}
        taken: Counter[int] = Counter()
        errors, dropped = {}, 0
        for i in (i for i, bad in enumerate(wrong) if bad and not many[i]):
            source, depth = own[i]
            if source < 0 or depth >= p.max_depth or taken[source] >= p.max_per_prompt:
                continue
            error = _error(prompts[i], _answer(rollouts, i))
            if error in known:  # a repeated error does not use up `max_per_prompt`, nor does one that is too long
                continue
            known.add(error)
            if len(_plain(prompts[i])) + len(_answer(rollouts, i)) > p.max_characters:
                dropped += 1
                continue
            errors[i] = error
            taken[source] += 1
        return errors, dropped

    def _origins(self, rollouts: Rollouts) -> list[tuple[int, int]]:
        """Of each row the dataset row it is about (-1: unknown) and how many recoveries led to it."""
        rows = zip(rollouts.prompt_index.tolist(), rollouts.marks(self.name), strict=True)
        return [(mine["source"], mine["depth"]) if mine else (prompt, 0) for prompt, mine in rows]

    def _wrong(self, rollouts: Rollouts) -> list[bool]:
        p, reward = self.params, rollouts.reward
        if p.correctness is not None:
            said = rollouts.rewards[:, rollouts.reward_names.index(p.correctness)]
            reward = torch.where(torch.isnan(reward), reward, said)  # a row that was withdrawn stays so
        low = [value < p.error_threshold for value in reward.tolist()]  # NaN is not
        if p.error_column is None:
            return low
        texts = rollouts.meta[p.error_column]
        return [bad or (_said(s) and not math.isnan(r)) for bad, s, r in zip(low, texts, reward.tolist(), strict=True)]

    def _several(self, rollouts: Rollouts) -> list[bool]:
        """Rows of rollouts that are more than one answer."""
        several = rollouts.per_rollout.rows.rows(rollouts.per_rollout.rows.size > 1)
        if rollouts.turns is not None:
            several = several | (torch.bincount(rollouts.turns.row, minlength=len(rollouts)) > 1)
        if bool(several.any()):
            self.warn(
                "rollouts of several rows or turns do not become recovery prompts, because their last answer is not "
                "known."
            )
        return several.tolist()

    def _report(self, rollouts: Rollouts, own: Sequence[tuple[int, int]], wrong: Sequence[bool]) -> None:
        self.log("errors", sum(wrong) / max(len(wrong), 1), weight=len(wrong))
        of_recovery = [i for i, (_, depth) in enumerate(own) if depth]
        if of_recovery:
            good = sum(not wrong[i] for i in of_recovery)
            reward = [r for i in of_recovery if not math.isnan(r := float(rollouts.reward[i]))]
            self.log("recovered", good / len(of_recovery), weight=len(of_recovery))
            if reward:
                self.log("reward", sum(reward) / len(reward), weight=len(reward))

    def _messages(self, rollouts: Rollouts, errors: Sequence[int]) -> list[str]:
        """What is said about each of these errors; nothing in it gives the answer away."""
        p = self.params

        def column(name: str | None, i: int) -> Any:
            return rollouts.meta[name][i] if name else None

        said: dict[int, Any] = {i: as_text(text) for i in errors if _said(text := column(p.error_column, i))}
        if self._service is not None:
            facts = ("prompt", p.prompt_column), ("gold", p.gold_column), ("tools", p.tools_column)
            silent = [i for i in errors if i not in said]
            items = [{"answer": _answer(rollouts, i)} | {k: column(c, i) for k, c in facts} for i in silent]
            answers = self._service.ask(items, strict=False)
            said |= dict(zip(silent, answers, strict=True))
            if bad := failures(answers):
                self.warn(f"`message` failed on some errors; a general message is used for them: {bad[0].error}")
        found, leaked, failed = [], 0, 0
        for i in errors:
            gold, tools = as_calls(column(p.gold_column, i)), column(p.tools_column, i)
            f = said.get(i) or simulate(read_calls(_answer(rollouts, i)), gold, tools)
            if isinstance(f, Failure):
                f, failed = GENERIC, failed + (not isinstance(f, NotAsked))
            known = f"{_plain(rollouts.meta[p.prompt_column][i])} {tools} {_answer(rollouts, i)}"
            if gold and leaks(f, gold, known):
                f, leaked = GENERIC, leaked + 1
            found.append(as_text(f))
        self.log("leaks", leaked, "sum")
        self.log("failed", failed, "sum")
        return found


def _text(value: Any) -> str:
    """The check of a message."""
    if not _said(value):
        raise ValueError(f"{shown(value)} is no text.")
    return as_text(value)


def _said(value: Any) -> bool:
    return isinstance(value, (str, bytes)) and bool(value.strip())


def _answer(rollouts: Rollouts, i: int) -> str:
    assert rollouts.text is not None  # in `needs`
    return rollouts.text[i]


def _extended(prompt: Any, answer: str, role: str, message: str) -> Any:
    """The prompt with the failed answer and the message appended."""
    if isinstance(prompt, str):
        return f"{prompt}\n{answer}\n{message}\n"
    return [*as_messages(prompt), {"role": "assistant", "content": answer}, {"role": role, "content": message}]


def _plain(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(as_text(m.get("content")) for m in prompt)


def _error(prompt: Any, answer: str) -> str:
    """The same text for the same calls (of an unreadable answer: the same text) to the same prompt."""
    calls = read_calls(answer)
    said = answer if calls is None else [(c.name, dict(c.arguments)) for c in calls]
    text = json.dumps([prompt, said], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
