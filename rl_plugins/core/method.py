"""`Method`: the hooks a paper may change. A method overrides what its paper changes and nothing else.

Start reading here. The hooks in the order of one training step:

    hook             place       decides                                                                kind
    select_prompts   driver      dataset rows that come next                                            exclusive
    plan             driver      rollouts per prompt, edits, limits, completions given                  chain
    admit            driver      over-provisioned generation: which groups begin, go on, are given up   exclusive
    rollout          generation  how the completions of one prompt are made: a program                  exclusive
    rewards          driver      new, shaped or withdrawn (NaN) rewards                                 chain
    select           driver      rows that leave before the advantages, out of every statistic          chain (and)
    teacher_prompts  driver      prompts under which a teacher reads the completions                    exclusive
    advantages       driver      one number per row, or per agent turn                                  exclusive
    shape            driver      token advantages, tokens and rows that leave the update, columns       chain
    observe          driver      feedback into the state                                                all
    before_update    update      of one optimizer step: learning-rate scale, columns per row            chain
    policy_loss      update      the surrogate per token                                                exclusive
    regularize       update      a term per token added to the loss                                     chain

Three places, one rule. The driver is one process (TRL: the main one; verl: the trainer); it sees every row of the step,
holds the only copy of the state, and what it decides is broadcast. Generation and update run everywhere, see their part
only and have no state: `self.state` raises there. What they need of it travels as a payload or as a column.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rl_plugins.core.errors import MethodError
from rl_plugins.core.params import MethodParams

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from rl_plugins.core.requests import Program, Prompt
    from rl_plugins.core.rollouts import (
        Admission,
        Plan,
        PromptPool,
        Queue,
        Rollouts,
        Rows,
        Run,
        Shape,
        Terms,
        Tokens,
        Update,
    )

logger = logging.getLogger("rl_plugins")

Fidelity = Literal["code", "paper", "abstract", "reconstruction", "own"]
Reduce = Literal["mean", "sum", "min", "max"]
Aggregation = Literal["host", "sum", "none"]
OldPolicy = Literal["host", "proximal", "generating"]


@dataclass(frozen=True)
class Hook:
    """Where a hook runs and how several methods that claim it combine."""

    place: Literal["driver", "generation", "update"]
    kind: Literal["exclusive", "chain", "all"]


HOOKS: dict[str, Hook] = {
    "select_prompts": Hook("driver", "exclusive"),
    "plan": Hook("driver", "chain"),
    "admit": Hook("driver", "exclusive"),
    "rollout": Hook("generation", "exclusive"),
    "rewards": Hook("driver", "chain"),
    "select": Hook("driver", "chain"),
    "teacher_prompts": Hook("driver", "exclusive"),
    "advantages": Hook("driver", "exclusive"),
    "shape": Hook("driver", "chain"),
    "observe": Hook("driver", "all"),
    "before_update": Hook("update", "chain"),
    "policy_loss": Hook("update", "exclusive"),
    "regularize": Hook("update", "chain"),
}

# Signals a method may ask for in `needs`; "column:NAME" (a dataset column) and "engine:logprobs=N" come on top.
SIGNALS: dict[str, str] = {
    "tokens": "every token of the batch in `shape` and `observe`: its row, place and advantage",
    "old_logprobs": "log-probs of the policy at the start of the step",
    "rollout_logprobs": "log-probs of the distribution the engine sampled from",
    "ref_logprobs": "log-probs of the reference policy",
    "teacher_logprobs": "log-probs of the same completion under another prompt (`teacher_prompts`) or of another model "
    "(`Method.teacher`), in `shape` and `observe`",
    "token_versions": "the published weights that made each token, in `shape`, `observe` and the loss",
    "token_ids": "token ids of every row's prompt and whole completion, and which of them were only read",
    "entropies": "entropy of the policy at every token, at the start of the step",
    "sum_squared_probs": "sum of the squared probabilities of all tokens, in the place of every token, at the start of "
    "the step",
    "text": "completions as text, special tokens removed",
    "raw_text": "completions as text, special tokens kept",
    "messages": "completions as the host's list of messages",
    "prompt_index": "a stable dataset row for every prompt (a dataset with random access, not a stream)",
    "several_rewards": "two or more reward functions",
    "step_rewards": "rewards per step: reward functions may return a list in the place of a number, whose sum is the "
    "reward",
    "several_rollouts": "two or more rollouts per prompt",
    "whole_groups": "whole groups in every optimizer step, for `before_update`",
    "whole_batches": "the prompts that were planned together in one batch, when they are rewarded and trained",
    "off_policy": "tokens that another policy sampled than the one that is updated",
    "several_updates": "several optimizer steps between one pass of old log-probs and the next",
    "current_logprobs": "row sums of log-probs at the weights of each optimizer step (one extra pass)",
    "current_entropies": "entropy of the policy at every token in the loss, with gradient",
    "cheap_copy": "a cheap copy of the policy, which makes samples that are only looked at",
    "chat_template": "a chat template of the tokenizer, with which it writes messages",
    "turn_limits": "agents that keep the turn limit of their plan row (`PlanRow.max_turns`)",
    "redundancy": "rollouts that begin beyond those that are kept (`PlanRow.redundant`), and that a program or the "
    "queue of waiting groups closes",
    "turns": "turns of agents: environments or tools with what was observed and a reward per turn",
}

# What the rollouts and plans of a method may hold, in `brings`; "column:NAME" (a column that its program notes, or the
# runtime for it) comes on top. Where the word is a signal's, no run has to offer it.
BRINGS: dict[str, str] = {
    "off_policy": "plans give completions that an older policy sampled",
    "forced_tokens": "trained tokens that were not sampled in their place (argmax, grafted, given by another model); "
    "no importance weight of the sampling policy exists for them",
    "redundancy": "rollouts made with `rl_plugins.core.redundancy.independent`, so that redundant ones can be closed",
}

# Those that are one value per token.
TOKEN_SIGNALS = frozenset(
    {
        "old_logprobs",
        "rollout_logprobs",
        "ref_logprobs",
        "teacher_logprobs",
        "entropies",
        "token_versions",
        "sum_squared_probs",
    }
)


@dataclass(frozen=True)
class Idle:
    """How a batch shows in a method's own metrics that it did nothing. After several such batches in a row the run says
    so, once.

    Args:
        signs: names the method logs in driver or generation hooks -> the value of each in such a batch; all must hold.
        advice: why that may be, and which parameters to look at.
    """

    signs: Mapping[str, float]
    advice: str


def from_params(value: Callable[[Any], Any]) -> Any:
    """An attribute of a method that depends on its parameters: `value(params)`, a property. Type checkers take it for
    the attribute itself.

        needs = from_params(lambda p: signals("text", columns=[p.prompt_column], turns=p.by_turn))
    """
    return property(lambda method: value(method.params))


def signals(*names: str, columns: Iterable[str | None] = (), **others: Any) -> set[str]:
    """A value of `needs` or `brings`: `names`, "column:NAME" of every column that is named, and those of `others` that
    are true."""
    return {*names, *(f"column:{c}" for c in columns if c), *(name for name, on in others.items() if on)}


@dataclass(frozen=True)
class SameAs:
    """In `host_options`: the value that another option of the host has."""

    option: str

    def __repr__(self) -> str:
        return f"the value of {self.option}"


@dataclass(frozen=True)
class RowNote:
    """What a method said with `Method.note`."""

    method: str
    rows: Any
    text: str
    values: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TurnNote:
    """What a method said with `Method.note_turns`."""

    method: str
    name: str
    compared: Tensor
    size: Tensor
    advantage: Tensor


class Method:
    """Base of all methods.

    Class attributes a method sets; `from_params` makes one that depends on the parameters.

    What is it?
        name: its slug, which users write in `methods: [...]`.
        fidelity: "code" (equal to the authors' code), "paper" (from the paper's text), "abstract" (only an abstract, a
            figure or summaries were read) or "reconstruction" (something needed was not published; the docstring opens
            with what). A method of your own leaves it out: "own".
        does: what it does in one line of at most 100 characters, verb first; shown by the chooser and `list`.
        problems: what a run suffers from that it answers; `rl-plugins list` shows the words.
        Params: a frozen dataclass of parameters.

    What must the run have, and what do its rollouts bring?
        needs: signals (see SIGNALS). Only what somebody needs is computed; a run that lacks one is refused.
        brings: what its own rollouts or plans hold (see BRINGS).

    Where does it act?
        hosts: those that can serve it at all; `check` says why another cannot. A `rollout` program is one of language
            models ("trl", "verl") or of diffusion policies ("diffusion"). Every other method runs on "diffusion" as
            well if that serves its hooks and needs, and names it here where this is tested.
        host_options: {"trl": {"option": value}}: host settings this method sets; a value may be `SameAs("other")`. A
            different value of the user's own is an error that shows both.
        in_eval: hooks that also act in evaluation.

    How many rollouts and rows are there?
        decides_rollouts: its `plan` sets how many rollouts prompts get. Two such methods are refused, because the later
            one would win. Spare rollouts and edits are no such decision, and compose. A host that takes groups of one
            size out of a buffer (verl's asynchronous modes) refuses it.
        rounds: `plan` is called again with the rewards so far until it asks for nothing.
        rows_per_rollout: most rows that one rollout becomes (agents, turns).
        keeps_batch_size: as many rows are trained as the host planned. What this method takes out it has asked for in
            addition (`spare`), so a loss that depends on the number of rows is exact with it. A run ends if a row is
            missing nevertheless.

    What do its numbers mean?
        advantages_per: what `advantages` returns: "row" (rows,), or "turn" (turns,) over `rollouts.turns`, which
            `needs` must then name.
        aggregation: "host" (per-token losses are averaged as the host would), "sum" (the objective brings its own
            weights: plain sum over the optimizer step) or "none" (the run makes no optimizer step at all).
        old_policy: whose log-probs the old ones are. "host": those that the host takes. "proximal": of a policy of
            their own, at the start of the step. "generating": of the weights that generated each token; a host that
            keeps older weights computes them (`Run.keeps_versions`), elsewhere all are of the newest weights. A host
            that uses the rollout log-probs in their place (verl's `bypass_mode`) is refused with the last two.
        teacher: whose log-probs `teacher_logprobs` are. None: the policy's, at the start of the step. Else the path or
            name of a model with the policy's tokenizer, which the host loads beside it and never trains.
        corrects_sampling: its loss, or its advantages, hold the weight of the sampling policy (current or old over
            rollout log-probs). The host's own such correction and a second such method are refused with it: the
            weight would count twice.

    What is told and kept?
        idle: signs in its metrics that it did nothing in a batch, where that can happen in a run that looks healthy.
        state_version: raised when the meaning of the state changes.

    What a reader who chooses is told (the paper, when to use it, its cost, an example of the parameters that must be
    given) is data, `NAME.toml` next to the class; `rl-plugins new` writes one. A method works without it.
    """

    name: ClassVar[str] = ""
    fidelity: ClassVar[Fidelity] = "own"
    does: ClassVar[str] = ""
    problems: ClassVar[Sequence[str]] = ()
    Params: ClassVar[type[MethodParams]] = MethodParams
    needs: Set[str] = frozenset()
    brings: Set[str] = frozenset()
    hosts: ClassVar[Sequence[str]] = ("trl", "verl")
    host_options: Mapping[str, Mapping[str, Any]] = {}
    in_eval: ClassVar[Sequence[str]] = ()
    decides_rollouts: bool = False
    rounds: bool = False
    rows_per_rollout: int = 1
    keeps_batch_size: ClassVar[bool] = False
    advantages_per: ClassVar[Literal["row", "turn"]] = "row"
    aggregation: ClassVar[Aggregation] = "host"
    old_policy: OldPolicy = "host"
    teacher: str | None = None
    corrects_sampling: bool = False
    idle: ClassVar[Sequence[Idle]] = ()
    state_version: ClassVar[int] = 1

    def __init__(self, params: MethodParams | None = None) -> None:
        self.params: Any = self.Params() if params is None else params
        self._state: dict[str, Any] = {}
        self._context: Context | None = None
        self._place = "driver"

    # ---- hooks (optional)

    def check(self, run: Run) -> None:
        """Raises ConfigError for what does not fit the run. Called before the model is loaded and in dry runs, with
        what is known then, and again before `start`. It keeps nothing."""

    def start(self, run: Run) -> None:
        """Called once on the driver before the first step; fills `self.state`. On resume the saved state follows."""

    def select_prompts(self, pool: PromptPool, n: int) -> Sequence[int]:
        """Returns `n` different prompts 0..pool.size-1 that come next, in order."""
        raise MethodError(self._unclaimed("select_prompts"))

    def plan(self, plan: Plan) -> Plan | None:
        """Returns the plan to use, changed relative to what is given; None leaves it."""
        raise MethodError(self._unclaimed("plan"))

    def admit(self, queue: Queue) -> Admission:
        """Over-provisioned generation: returns which waiting groups go on and how many new ones begin. Generation stops
        when as many groups are complete as the batch trains; the others wait, with what they have, for a later one."""
        raise MethodError(self._unclaimed("admit"))

    def rollout(self, prompt: Prompt) -> Program:
        """A program (generator) that makes the rollouts of one prompt: yields requests, returns trajectories; none for
        a prompt that it leaves out, which it may not do with all of a batch. See `rl_plugins.core.requests`."""
        raise MethodError(self._unclaimed("rollout"))

    def rewards(self, rollouts: Rollouts) -> Any:
        """Returns (rows,) rewards to use instead of `rollouts.reward`, NaN = withdrawn; None leaves them. May be
        `async def`."""
        raise MethodError(self._unclaimed("rewards"))

    def select(self, rollouts: Rollouts) -> Tensor:
        """Returns (rows,) bool: True stays; None keeps all. Rows that leave are out of every statistic and of the
        batch."""
        raise MethodError(self._unclaimed("select"))

    def teacher_prompts(self, rollouts: Rollouts) -> Sequence[Any]:
        """Returns for each row the prompt under which `teacher_logprobs` of its completion are taken: with a hint, the
        answer or feedback in it; a text or messages, as in the dataset. None: the row has none, its values are NaN. A
        method that needs the signal without this hook gets it under every row's own prompt."""
        raise MethodError(self._unclaimed("teacher_prompts"))

    def advantages(self, rollouts: Rollouts) -> Tensor:
        """Returns (rows,) advantages, or (turns,) with `advantages_per = "turn"`; finite, and 0 where there is nothing
        to compare with. Rows whose reward is NaN get the advantage 0 whatever is returned for them."""
        raise MethodError(self._unclaimed("advantages"))

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape | None:
        """Acts after any estimator, the host's included: returns what changes. Reading `tokens`, here and in `observe`,
        takes "tokens" in `needs`; a stack that decides by rows never gathers them."""
        raise MethodError(self._unclaimed("shape"))

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        """Feedback into the state, once per generation batch. Sees every row, those that left included
        (`rollouts.kept`); `tokens.row` points into these rows; `stats` holds the logged values of the last updates."""
        raise MethodError(self._unclaimed("observe"))

    def before_update(self, rows: Rows) -> Update | None:
        """Called on every rank with the same `rows` before each optimizer step."""
        raise MethodError(self._unclaimed("before_update"))

    def policy_loss(self, terms: Terms) -> Tensor:
        """Returns the surrogate per token, (rows, time). The adapter masks and aggregates."""
        raise MethodError(self._unclaimed("policy_loss"))

    def regularize(self, terms: Terms) -> Tensor:
        """Returns a term per token, (rows, time), added to the loss and aggregated like it; with a gradient, or 0."""
        raise MethodError(self._unclaimed("regularize"))

    # ---- a dry run

    def stages(self) -> Sequence[int]:
        """Generation batches in which the parameters begin another part of a schedule. `rl-plugins doctor` and dry runs
        plan these batches, in addition to the first, to show how large they are."""
        return ()

    def further_rounds(self, plan: Plan) -> tuple[int, int]:
        """Of a method with `rounds`: most rounds after the first, and most rollouts that they generate, in a batch with
        this first plan. `rl-plugins doctor` and dry runs show both."""
        from rl_plugins.core.rollouts import MAX_ROUNDS  # loads torch

        return MAX_ROUNDS - 1, plan.budget

    # ---- what they offer

    @property
    def state(self) -> dict[str, Any]:
        """Plain data (numbers, strings, lists, dicts, tensors), saved in the host's checkpoint. Driver hooks only.

        Tensors may be changed in place with torch's functions, also through views and numpy arrays made from them in
        the same generation batch. An array kept from an earlier batch may write past the copy that a checkpoint saves,
        and `resize_` is not allowed: take them from the state again in every batch.

        Raises:
            MethodError: in the generation or update place, where no state exists.
        """
        if self._place != "driver":
            raise MethodError(
                f"Method `{self.name}` reads self.state in the {self._place} place, where no state exists. Send what "
                f"is needed as a payload of the plan or as a column of `shape`."
            )
        return self._state

    @state.setter
    def state(self, value: dict[str, Any]) -> None:
        value = dict(value)  # `value` may be the state itself
        self.state.clear()
        self._state.update(value)

    def log(self, name: str, value: Any, reduce: Reduce = "mean", weight: Any = 1.0) -> None:
        """Logs `<method>/<name>` in the host's logger. Values of one step are combined over micro-batches and ranks:
        weighted mean, sum, min or max. `value` and `weight` may be tensors of one element."""
        if self._context is not None:
            self._context.metrics.add(f"{self.name}/{name}", value, reduce, weight)

    def warn(self, message: str) -> None:
        """Logs a warning once per run and message."""
        if self._context is None:
            logger.warning("%s: %s", self.name, message)
        else:
            self._context.warn_once(f"{self.name}: {message}")

    @property
    def traced(self) -> bool:
        """Whether the run has a trace, so that notes are kept: what only a note needs is computed then."""
        return self._context is not None and self._context.notes is not None and self._place == "driver"

    def note(self, rows: Tensor | int | Sequence[int] | None, text: str, *values: Any, **named: Any) -> None:
        """Says why something became of rows, for the trace of the run. Without a trace it costs nothing.

            self.note(left, "posterior {mean:.2f} +- {std:.2f}", mean=mean, std=std)

        Args:
            rows: of the hook that is running: (rows,) bool, numbers of rows, one number, or None for all of them. In
                `select_prompts` these are dataset rows, in `plan` groups.
            text: a template of `str.format`.
            values, named: for the template: one for all of these rows, or a tensor or array. Where `rows` are numbers,
                it has one for each of them, else one for each row of the hook. The trace keeps named ones as numbers.
        """
        if self.traced:
            assert self._context is not None and self._context.notes is not None
            self._context.notes.append(RowNote(self.name, rows, text, values, named))

    def note_turns(self, name: str, compared: Tensor, size: Tensor, advantage: Tensor) -> None:
        """Says which turns `advantages` compares with each other, for the trace. Without a trace it costs nothing.

        Args:
            name: of the comparison, "state" for example; a hook may make several.
            compared: (turns,) int64, equal for turns that are compared with each other; negative: with none.
            size: (turns,) turns that are compared.
            advantage: (turns,) from this comparison.
        """
        if self.traced:
            assert self._context is not None and self._context.notes is not None
            self._context.notes.append(TurnNote(self.name, name, compared, size, advantage))

    def stop(self, reason: str) -> None:
        """Ends the run with this message when the optimizer steps of the batch are done and a checkpoint is saved."""
        if self._context is not None:
            self._context.stop_reason = f"{self.name}: {reason}"

    def rng(self, purpose: str) -> np.random.Generator:
        """A fresh generator from (seed, method, generation batch, purpose): the same after a resume, nothing to save,
        and the global generators are never touched."""
        if self._context is None:
            raise MethodError(f"Method `{self.name}` asked for a random generator outside of a run.")
        return self._context.rng(self.name, purpose)

    @classmethod
    def claims(cls) -> tuple[str, ...]:
        """The hooks this class overrides, in step order."""
        return tuple(hook for hook in HOOKS if getattr(cls, hook) is not getattr(Method, hook))

    def _unclaimed(self, hook: str) -> str:
        return f"Method `{self.name}` does not claim the hook `{hook}`; nothing should have called it."


class Context:
    """What the stack lends to its methods: metrics, warnings, notes, random generators.

    Attributes:
        notes: of methods since the last hook ended, as `Method.note` was called; None without a trace.
    """

    metrics: Any
    warn_once: Callable[[str], None]
    stop_reason: str
    notes: list[RowNote | TurnNote] | None = None

    def rng(self, method: str, purpose: str) -> np.random.Generator:
        raise MethodError("no run")


@dataclass(frozen=True)
class Bundle:
    """A name that stands for several methods with the paper's settings.

    Args:
        name: what users write in `methods: [...]`.
        parts: method name -> parameters the paper uses for it. Users set parameters under the names of the parts.
        does, problems: as of `Method`.
    """

    name: str
    parts: Mapping[str, Mapping[str, Any]]
    does: str = ""
    problems: Sequence[str] = ()
