"""Prompts of a plan as verl's prompt batch: rows of the dataset by number, edits, how many rollouts, what is given.

Everything that must be known again when the rollouts come back travels with them in one column, `rl_plugins`; so
nothing has to be kept in the driver while prompts are in flight, and a resumed run finds it in its checkpoint.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NotRequired, TypedDict

from rl_plugins.core.entries import Entries
from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.rollouts import PlanRow
from rl_plugins.runtime.plan import check_length, check_versions
from rl_plugins.verl.capabilities import NESTED_COLUMNS
from rl_plugins.verl.host import Columns, Dataset, Output

PROMPT_INDEX = "rl_plugins_prompt_index"  # column of the dataset row's number, added to what the dataset yields
COLUMN = "rl_plugins"  # column of what the plan said about a prompt
# What an agent loop says of a row, in its `extra_fields`:
FORCED, UNKNOWN = "rl_plugins_forced", "rl_plugins_unknown_logprobs"  # [start, stop) of tokens, see `ranges`
VERSIONS = "rl_plugins_versions"  # of its trained tokens, see `rows.token_versions`
TURNS = "rl_plugins_turns"  # of the agent, see `rows.read_turns`
MADE = "rl_plugins_program"  # what a rollout program says of its row, see session.py
NUMBERS = "rl_plugins_numbers"  # see `numbers_of`
STEPS = "rl_plugins_steps"  # see `scores.sums`
TECHNICAL = (PROMPT_INDEX, "dummy_tensor", "index", "tools_kwargs", "interaction_kwargs", "raw_prompt", "extra_info")
PLANNED_AGENT = "rl_plugins_planned"  # agent loop that serves given completions, prefixes and token limits
PROGRAM_AGENT = "rl_plugins_program"  # agent loop that runs a rollout program

Ranges = Sequence[Sequence[int]]  # [start, stop) of every unbroken run
Numbers = tuple[int, int, int | None, float | None]


def numbers_of(output: Output, score: float | None) -> Numbers:
    """What the driver would have to read columns of tokens for: tokens of the response, those that are trained, the
    last one, and the score; None: not known yet."""
    ids = output.response_ids
    return len(ids), sum(output.response_mask), ids[-1] if ids else None, None if score is None else float(score)


class Given(TypedDict):
    """A completion of the plan, and the weighted sum of its rewards. Every row of a group carries all of them, so they
    are numbers in their bytes (`Entries`), which are copied as a whole."""

    tokens: Sequence[int]
    logprobs: Sequence[float] | None  # float32, as verl keeps them
    versions: NotRequired[Sequence[int] | None]
    observed: NotRequired[Sequence[bool] | None]
    rewards: NotRequired[dict[str, float] | None]
    reward: NotRequired[float | None]
    prompt: NotRequired[Sequence[int] | None]
    turns: NotRequired[list[dict[str, Any]]]


class Note(TypedDict):
    """What the plan says about a prompt and must be known again later. Plain data: it lies in the queue and its
    checkpoints.

    Args:
        wave: names the plan of the first round; groups are numbered in it.
        place: of the plan row in its plan.
        round: of the plan.
        planned_at: generation batch in which it was planned.
        draw: number of the plan in that batch, from 1.
        prompt_index, group, prefix, max_tokens, max_turns, redundant, given, payload: of the plan row.
    """

    prompt_index: int
    wave: str
    group: int
    place: int
    round: int
    prefix: list[int]
    max_tokens: int | None
    given: list[Given]
    payload: Any
    max_turns: NotRequired[int | None]
    redundant: NotRequired[int]
    planned_at: NotRequired[int]
    draw: NotRequired[int]


def ranges(marks: Any) -> list[list[int]]:
    """Where marks are set, as [start, stop) of every unbroken run."""
    import numpy as np

    inside = np.concatenate([[False], np.asarray(marks, dtype=bool), [False]])
    found: list[list[int]] = np.flatnonzero(inside[1:] != inside[:-1]).reshape(-1, 2).tolist()
    return found


def runs(values: Any) -> list[list[int]]:
    """Whole numbers as [value, how many] of every unbroken run."""
    import numpy as np

    values = np.asarray(values, dtype=np.int64)
    starts = np.flatnonzero(np.diff(values, prepend=-2))  # no value is below -1
    lengths = np.diff(starts, append=len(values))
    return np.stack([values[starts], lengths], axis=1).tolist()  # type: ignore[no-any-return]


def flat_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of verl's dataset as methods see it: its columns, the fields of those whose fields count as columns, and
    the messages as "prompt"."""
    fields: dict[str, Any] = {}
    for nested in reversed(NESTED_COLUMNS):
        if isinstance(row.get(nested), Mapping):
            fields |= row[nested]
    return {**fields, "prompt": row["raw_prompt"], **row}


def messages_of(prompt: Any) -> list[Any]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def number_rows(dataset: Dataset) -> None:
    """Makes a map-style dataset yield the number of each row in the column `PROMPT_INDEX`.

    The object stays what it is for everybody else: its class is replaced by a subclass of it.
    """
    cls = type(dataset)
    if not hasattr(cls, "__getitem__") or not hasattr(cls, "__len__") or getattr(cls, "rl_plugins_numbered", False):
        return

    def __getitem__(self: Any, i: Any) -> Any:
        row = cls.__getitem__(self, i)  # type: ignore[attr-defined]
        row[PROMPT_INDEX] = int(i)
        return row

    body = {"__getitem__": __getitem__, "rl_plugins_numbered": True, "__module__": cls.__module__}
    dataset.__class__ = type(cls.__name__, (cls,), body)


class PromptBatches:
    """Makes prompt batches of plan rows.

    Args:
        dataset: verl's training dataset, numbered.
        config: the whole config.
        rewards: of the run, see `Settings`.
    """

    def __init__(self, dataset: Dataset, config: Any, rewards: Mapping[str, float] | None = None) -> None:
        self.dataset = dataset
        self.rewards = rewards or SCORE
        rollout = config.actor_rollout_ref.rollout
        self.group_size: int = rollout.n
        self.response_length: int = config.data.max_response_length
        self.default_agent: str = rollout.agent.default_agent_loop
        self.prompt_key: str = config.data.get("prompt_key", "prompt")
        correction = config.algorithm.get("rollout_correction", None)
        self.bypass = bool(correction and correction.get("bypass_mode", False))

    def build(
        self,
        rows: Sequence[PlanRow],
        wave: str | None = None,
        round_: int = 0,
        number: int = 0,
        draw: int = 1,
        by_program: bool = False,
        sizes: Sequence[int] = (),
        published: int | None = None,
    ) -> Columns:
        """A TensorDict with one row per plan row, each under a uid of its own.

        Args:
            wave: of the plan whose groups these rows continue; a new one if None.
            round_: of the plan.
            number: generation batch in which the plan was made.
            draw: number of the plan in that batch, from 1.
            by_program: a method makes the rollouts with a program.
            sizes: rows of each plan, where several were made one after the other; `draw` is then of the first.
            published: the newest published weights; None where it is not known.

        Raises:
            MethodError: a completion or prefix that does not fit, a completion of weights that are not published yet,
                or an edit that lacks columns.
            ConfigError: something is given that this run's agent loop or correction cannot serve.
        """
        import numpy as np
        import torch
        from verl.utils import tensordict_utils as tu
        from verl.utils.dataset.rl_dataset import collate_fn

        batch = collate_fn([self._row(p) for p in rows])
        batch.pop(PROMPT_INDEX, None)
        batch["uid"] = np.array([str(uuid.uuid4()) for _ in rows], dtype=object)
        planned = [bool(p.given or p.prefix or p.max_tokens is not None) for p in rows]
        if any(planned) or by_program:
            self._check_planned(rows, batch, by_program, published)
        batch[COLUMN] = np.array([None] * len(rows), dtype=object)
        first = 0
        for later, size in enumerate(sizes or [len(rows)]):
            of_plan = wave or uuid.uuid4().hex
            for place, p in enumerate(rows[first : first + size]):
                note = note_of(p, of_plan, place, round_, self.rewards)
                batch[COLUMN][first + place] = note | {"planned_at": number, "draw": draw + later}
            first += size
        counts = [p.n + p.spare for p in rows]
        if any(n != self.group_size for n in counts):
            batch["__rollout_n__"] = torch.tensor(counts)
        if any(planned) and not by_program:  # a program serves all of that itself
            agents = list(batch.get("agent_name", [self.default_agent] * len(rows)))
            batch["agent_name"] = np.array(
                [PLANNED_AGENT if own else agent for own, agent in zip(planned, agents, strict=True)], dtype=object
            )
        return tu.get_tensordict(batch)

    def _row(self, plan: PlanRow) -> dict[str, Any]:
        row = dict(self.dataset[plan.prompt_index if plan.prompt_index >= 0 else 0])
        edit = dict(plan.edit or {})
        if plan.prompt_index < 0:
            missing = sorted(set(row) - set(TECHNICAL) - set(edit))
            if missing:
                raise MethodError(
                    f"The plan has a foreign prompt with the columns {', '.join(sorted(edit))}; the dataset's rows "
                    f"have {', '.join(missing)}, too. A foreign prompt needs all of them in `edit`."
                )
            row["extra_info"] = {}
        for name, value in edit.items():
            self.set(row, name, value, foreign=plan.prompt_index < 0)
        if self.prompt_key in edit and "raw_prompt" not in edit:
            row["raw_prompt"] = messages_of(edit[self.prompt_key])
        return row

    def set(self, row: dict[str, Any], name: str, value: Any, foreign: bool) -> None:
        """Changes a column, or a field of one of the columns whose fields count as columns."""
        if name in row:
            row[name] = value
            return
        for nested in NESTED_COLUMNS:
            if isinstance(row.get(nested), Mapping) and (name in row[nested] or (foreign and nested == "extra_info")):
                row[nested] = {**row[nested], name: value}
                return
        raise MethodError(
            f"The plan edits the column `{name}`, which the dataset does not have; it has "
            f"{', '.join(sorted(set(row) - set(TECHNICAL)))} and the fields of {' and '.join(NESTED_COLUMNS)}."
        )

    def _check_planned(
        self, rows: Sequence[PlanRow], batch: Mapping[str, Any], by_program: bool, published: int | None
    ) -> None:
        agents = {str(a) for a in batch.get("agent_name", [self.default_agent])}
        if agents != {"single_turn_agent"}:
            what = (
                "A rollout program makes the completions"
                if by_program
                else ("The plan gives completions, prefixes or token limits")
            )
            raise ConfigError(
                f"{what}, which is served for the agent loop single_turn_agent; this run uses "
                f"{', '.join(sorted(agents))}, which makes its completions itself. Remove the method, or use "
                f"single_turn_agent."
            )
        for p in rows:
            if self.bypass and (p.prefix or any(c.logprobs is None for c in p.given)):
                raise ConfigError(
                    "The plan gives tokens without log-probs, and algorithm.rollout_correction.bypass_mode takes the "
                    "sampled log-probs for those of the policy. Set bypass_mode=False, or remove the method."
                )
            unknown = sorted({name for c in p.given for name in c.rewards or ()} - set(self.rewards))
            if unknown:
                raise MethodError(
                    f"The plan gives a completion with rewards of {', '.join(unknown)}; those of this run are "
                    f"{', '.join(self.rewards)}. Give rewards of these names, or none."
                )
            check_length(p, self.response_length)
            if published is not None:
                check_versions(p, published)


SCORE: Mapping[str, float] = {"score": 1.0}
"""Rewards of a run that names none: what verl's reward function answers."""


def weighted(rewards: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Weighted sum of the rewards that are there; NaN if none is."""
    known = [w * rewards[k] for k, w in weights.items() if k in rewards and not math.isnan(rewards[k])]
    return sum(known) if known else math.nan


def note_of(plan: PlanRow, wave: str, place: int, round_: int, weights: Mapping[str, float] = SCORE) -> Note:
    """What a plan row says that must be known again later."""
    return {
        "prompt_index": plan.prompt_index,
        "wave": wave,
        "group": plan.group,
        "place": place,
        "round": round_,
        "prefix": list(plan.prefix),
        "max_tokens": plan.max_tokens,
        "max_turns": plan.max_turns,
        "redundant": plan.redundant,
        "given": [
            {
                "tokens": Entries(c.tokens, "i"),
                "logprobs": None if c.logprobs is None else Entries(c.logprobs, "f"),
                "versions": None if c.versions is None else Entries(c.versions, "i"),
                "observed": None if c.observed is None else Entries(c.observed, "b"),
                "rewards": None if c.rewards is None else dict(c.rewards),
                "reward": None if c.rewards is None else weighted(c.rewards, weights),
                "prompt": None if c.prompt is None else Entries(c.prompt, "i"),
                "turns": [asdict(turn) for turn in c.turns],
            }
            for c in plan.given
        ],
        "payload": plan.payload,
    }
