"""Rollout programs on the fake engine: what they return, and what their rows say of every token."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rl_plugins.core.errors import MethodError, shown
from rl_plugins.core.method import Method
from rl_plugins.core.redundancy import NOTE
from rl_plugins.core.requests import Chat, Kind, Prompt, Trajectory
from rl_plugins.core.rollouts import PlanRow
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.programs import Running, run
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.runtime.turn_table import FlatTurns, spans, token_turns, turn_table
from rl_plugins.testing.contract.dataset import StoredDataset
from rl_plugins.testing.contract.kit import BUDGET, GROUP_SIZE, GROUPS, PROMPTS, Kit, short_error
from rl_plugins.testing.engine import EOS, TableEngine

VERSION = 7  # published weights of the fake engine
MAX_TOKENS = 24
LETTERS = "ab 01=[]\n"
CLOSE = 1e-6  # between a row's log-prob and the engine's


def writes_text(cls: type[Method]) -> bool:
    """Whether its rollout program is one of language models."""
    return "rollout" in cls.claims() and bool({"trl", "verl"} & set(cls.hosts))


def check_programs(kit: Kit) -> bool:
    """programs on the fake engine: legal rows, their groups, the same rows again, and decisions on them"""
    if not writes_text(kit.cls):
        return False
    with kit.at("a program"):
        made = _made(kit, _Setting())
        if made is None:
            return True
        again = _made(kit, _Setting())
        if again is not None and [r.rows for r in made.programs] != [r.rows for r in again.programs]:
            kit.fail("the same prompts and the same engine give other rows; random numbers come from `prompt.rng`.")
        errors = [row.meta.get("error") for row in made.all_rows]
        if errors and all(errors):
            kit.fail(f"every rollout ended with an error, the first with: {errors[0]}")
        _check_groups(kit, made)
        _check_decisions(kit, made)
    if "redundancy" in kit.build().brings:
        with kit.at("redundant rollouts"):
            _check_redundancy(kit)
    return True


def check_books(kit: Kit) -> bool:
    """tokens of programs: log-prob, version and kind are those of the engine that made them"""
    if not writes_text(kit.cls):
        return False
    with kit.at("tokens"):
        _check_rows(kit, _made(kit, _Setting()))
    return True


def check_odd_engines(kit: Kit) -> bool:
    """programs where rewards are missing or equal, there is room for one token or none, or the engine is interrupted"""
    if not writes_text(kit.cls):
        return False
    for name, setting in {
        "one rollout": _Setting(prompt={"n": 1}),
        "no rewards": _Setting(reward=lambda text, columns: None),
        "equal rewards": _Setting(reward=lambda text, columns: 1.0),
        "room for one token": _Setting(prompt={"max_tokens": 1}),
        "no room": _Setting(prompt={"max_context": 1}),
        "an engine that is interrupted": _Setting(engine={"abort_after": 3}),
        "evaluation": _Setting(prompt={"training": False}),
    }.items():
        with kit.at(name):
            _check_rows(kit, _made(kit, setting))
    with kit.at("a forced prefix"):
        made = _made(kit, _Setting(prompt={"prefix": (97, 98)}), may_refuse=True)
        for row in made.all_rows if made else ():
            begins = tuple(row.tokens[:2]) == (97, 98) and tuple(row.kinds[:2]) == (Kind.FORCED,) * 2
            if made is not None and tuple(row.prompt) == made.prompt_of(row).tokens and not begins:
                kit.fail("a row of the prompt lacks the prefix of the plan; begin with `prompt.start()`.")
    return True


# ---- one batch of programs


@dataclass(frozen=True)
class _Setting:
    """What is given: fields of every prompt, options of the engine, and rewards of texts."""

    prompt: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    reward: Any = lambda text, columns: float(text.count("a") > text.count("b"))


@dataclass(frozen=True)
class _Made:
    """Programs that have ended, and what made them."""

    stack: MethodStack
    method: Method
    engine: TableEngine
    plan: Sequence[PlanRow]
    programs: Sequence[Running]

    @property
    def all_rows(self) -> list[Trajectory]:
        return [row for program in self.programs for rollout in program.rows or () for row in rollout]

    def prompt_of(self, row: Trajectory) -> Prompt:
        return next(p.prompt for p in self.programs if any(row in rollout for rollout in p.rows or ()))


def chances(text: str) -> dict[str, float]:
    """Probabilities of the next character that differ from text to text, so that no other context fits."""
    digest = hashlib.sha256(text.encode()).digest()
    weights = {letter: 1 + digest[i] / 16 for i, letter in enumerate(LETTERS)}
    return {**weights, EOS: sum(weights.values()) / 8}


def _made(kit: Kit, setting: _Setting, may_refuse: bool = False) -> _Made | None:
    """The programs of a planned batch, run to their end; None if one failed.

    Args:
        may_refuse: a MethodError of the program's own is no problem.
    """
    stack = kit.stack()
    method = stack.methods[-1]
    engine = TableEngine(chances, setting.reward, version=VERSION, **setting.engine)
    dataset = kit.dataset
    budget = BUDGET * kit.rows_per_rollout
    plan = first_plan(stack, range(GROUPS), GROUP_SIZE, budget, PROMPTS, dataset).rows
    prompts = [_prompt(row, dataset, engine.chat, stack.batch, setting) for row in plan]
    try:
        programs = [Running(method, p) for p in prompts if p.n]
        run(programs, engine)
    except MethodError as e:
        if not (may_refuse and e.__cause__ is None):
            kit.fail(short_error(e))
        return None
    finally:
        stack.metrics.take()
    _check_requests(kit, method, engine)
    return _Made(stack, method, engine, [row for row, p in zip(plan, prompts, strict=True) if p.n], programs)


def _prompt(row: PlanRow, dataset: StoredDataset, chat: Chat, batch: int, setting: _Setting) -> Prompt:
    columns = {**dataset[max(row.prompt_index, 0)], **(row.edit or {})}
    given = columns["prompt"]
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    fields = dict(
        tokens=chat.prompt(messages),
        messages=messages,
        columns=columns,
        n=row.n + row.spare - len(row.given),
        max_tokens=min(row.max_tokens or MAX_TOKENS, MAX_TOKENS),
        max_context=10_000,
        chat=chat,
        prefix=tuple(row.prefix),
        payload=row.payload,
        batch=batch,
        reward_names=("reward",),
        max_turns=row.max_turns,
        redundant=row.redundant,
        seed=f"0|check|{row.group}",
    )
    return Prompt(**{**fields, **setting.prompt})


def _check_requests(kit: Kit, method: Method, engine: TableEngine) -> None:
    told = [int(need.partition("=")[2]) for need in method.needs if need.startswith("engine:logprobs=")]
    asked = max((request.top for request in engine.requests), default=0)
    if asked > max(told, default=0):
        kit.fail(f'it asks the engine for {asked} log-probs per token; add "engine:logprobs={asked}" to `needs`.')


def _check_groups(kit: Kit, made: _Made) -> None:
    for program in made.programs:
        rollouts = program.rows or []
        labels = [row.group for rollout in rollouts for row in rollout]
        if len(rollouts) > 1 and None not in labels and len(set(labels)) == len(labels):
            kit.fail(
                f"every row has a `group` of its own ({shown(labels[:3])}), so nothing is compared. Rows with the same "
                f"label are compared; None is the prompt's own group."
            )


def _check_redundancy(kit: Kit) -> None:
    """Rows say what became of the rollouts that are no rows."""
    made = _made(kit, _Setting(prompt={"redundant": 2}))
    for row in made.all_rows if made else ():
        note = row.meta.get(NOTE, {})
        if note.get("closed", 0) + note.get("failed", 0) < 2:
            kit.fail(
                'it says `brings = {"redundancy"}`, and of 2 redundant rollouts of a prompt its rows tell nothing; '
                "make its rollouts with `rl_plugins.core.redundancy.independent`."
            )


def _check_rows(kit: Kit, made: _Made | None) -> None:
    if made is not None:
        for row in made.all_rows:
            _check_row(kit, made, row)


def _check_row(kit: Kit, made: _Made, row: Trajectory) -> None:
    """The engine's probabilities are known, so each token's log-prob can be compared."""
    engine, prompt, chat = made.engine, made.prompt_of(row), made.engine.chat
    asked = {engine.temperature if r.temperature is None else r.temperature for r in engine.requests} - {0}
    for i, (token, kind) in enumerate(zip(row.tokens, row.kinds, strict=True)):
        if kind == Kind.FORCED and i >= len(prompt.prefix) and "forced_tokens" not in made.method.brings:
            kit.fail(
                "a row has tokens that were put in the policy's place (`force`, the argmax, another context); say so: "
                '`brings = {"forced_tokens"}`.'
            )
        if kind != Kind.SAMPLED:
            continue
        context = (*row.prompt, *row.tokens[:i])
        known = [engine.logprob(context, token, temperature) for temperature in sorted(asked)]
        if not any(abs(row.logprobs[i] - p) < CLOSE for p in known):
            told = ", ".join(f"{p:.3f}" for p in known) or "none"
            kit.fail(
                f"a row says that {shown(chat.decode((token,), special=True))} was sampled behind "
                f"{shown(chat.decode(context, special=True)[-20:])} with the log-prob {row.logprobs[i]:.3f}; the "
                f"engine's is {told}. Tokens sampled in another context lose theirs: `force`, `forget_sampling`."
            )
            return
        if row.versions[i] != VERSION:
            kit.fail(f"a sampled token has the version {row.versions[i]}, and weights {VERSION} made it; use `add`.")
            return
    if row.rewards is not None and made.engine.scores:
        (scored,) = engine.score([(prompt, row)])
        same = {k: v for k, v in scored.rewards.items() if not math.isnan(v)}
        if {k: v for k, v in row.rewards.items() if not math.isnan(v)} != same:
            kit.fail(
                f"a row has the rewards {shown(dict(row.rewards))}; the reward functions give it "
                f"{shown(dict(scored.rewards))}. Score the finished row."
            )


def _check_decisions(kit: Kit, made: _Made) -> None:
    """The method's other hooks on what its program made."""
    numbers: dict[Any, int] = {}
    facts: dict[str, list[Any]] = {n: [] for n in ("group", "prompt_index", "rollout", "index", "payload")}
    rows: list[Trajectory] = []
    count: dict[int, int] = {}
    for place, (planned, program) in enumerate(zip(made.plan, made.programs, strict=True)):
        for rollout in program.rows or []:
            seen: dict[int, int] = {}
            for index, row in enumerate(rollout):
                group = planned.group
                if row.group is not None:
                    group = numbers.setdefault((place, row.group), 1000 + len(numbers))
                if group not in seen:
                    seen[group] = count.get(group, 0)
                    count[group] = seen[group] + 1
                for name, value in zip(
                    facts, (group, planned.prompt_index, seen[group], index, planned.payload), strict=True
                ):
                    facts[name].append(value)
                rows.append(row)
    if not rows:
        kit.fail("the program returns no rollout for any prompt.")
        return
    prompts = [made.prompt_of(row) for row in rows]
    scored = made.engine.score(list(zip(prompts, rows, strict=True)))
    noted = {name for row in rows for name in row.meta}
    stored = {c: [p.columns.get(c) for p in prompts] for c in kit.columns if c not in noted}
    rollouts = kit.rollouts(
        [s.reward for s in scored],
        facts["group"],
        lengths=[sum(row.trained) for row in rows],
        prompt_index=facts["prompt_index"],
        rollout=torch.tensor(facts["rollout"]),
        index=torch.tensor(facts["index"]),
        payload=facts["payload"],
        meta=stored,
        truncated=torch.tensor([row.finish == "length" for row in rows]),
        version=torch.full((len(rows),), VERSION),
        current_version=VERSION,
    )
    own = {name: [row.meta.get(name) for row in rows] for name in noted}
    rollouts = rollouts.replace(meta={**rollouts.meta, **own})
    turns = FlatTurns.of([tuple(row.turns) or spans(row.trained) for row in rows])
    if "turns" in kit.needs:
        rollouts = rollouts.replace(turns=turn_table(rollouts, turns))
    trained = [torch.tensor(row.trained, dtype=torch.bool) for row in rows]
    position = torch.cat([t.nonzero()[:, 0] for t in trained])
    of = torch.repeat_interleave(torch.arange(len(rows)), rollouts.length)
    kinds = torch.cat([torch.tensor(tuple(row.kinds), dtype=torch.int64) for row in rows])[torch.cat(trained)]
    logprobs = torch.tensor([p for row in rows for p in row.logprobs])[torch.cat(trained)]
    told = {"position": position, "forced": kinds == Kind.FORCED, "rollout_logprobs": logprobs.float()}
    if rollouts.turns is not None:
        told["turn"] = token_turns(of, position, turns)
    kit.decide(made.stack, rollouts, kit.tokens(rollouts, **told), BUDGET * kit.rows_per_rollout)
