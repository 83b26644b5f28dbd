"""The trainers of TRL: which of them serve methods, why the others do not, and what the loss that runs averages over.

docs/trl_details.md shows the table; a test holds it against the trainers of the installed TRL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import trl
from trl.trainer.grpo_trainer import GRPOTrainer

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.losses import TRL_AGGREGATION
from rl_plugins.trl.config import GRPOConfig

LOSSES = ("_compute_loss", "compute_loss")
"""Where TRL's GRPOTrainer computes its loss: a class that overrides one of them has a loss of its own."""


@dataclass(frozen=True)
class TrlTrainer:
    """A trainer of TRL.

    Args:
        module, name: where it is defined.
        methods: what it serves; empty if it serves no method.
        why: what a method would need and it does not have, or what holds for it.
        unchanged: whether two steps with the mixin and without methods were run, and ended at TRL's own weights.
        loss_like: for a loss of its own: the `loss_type` of TRL that averages rows as it does.
    """

    module: str
    name: str
    methods: str
    why: str
    unchanged: bool = False
    loss_like: str = ""


def _no(module: str, name: str, why: str, unchanged: bool = False) -> TrlTrainer:
    return TrlTrainer(f"trl.{module}", name, "", why, unchanged=unchanged)


_GIVEN = "it trains on given answers and generates none"
_TEACHER = "it learns from a teacher's distribution; there are no rewards, groups or advantages"

TRAINERS = (
    TrlTrainer("trl.trainer.grpo_trainer", "GRPOTrainer", "all", "the one the adapter is made for", unchanged=True),
    TrlTrainer(
        "trl.experimental.gmpo.gmpo_trainer",
        "GMPOTrainer",
        "all, with one advantage per row",
        "GRPOTrainer with a loss of its own: a mean over rows, whatever `loss_type` says",
        unchanged=True,
        loss_like="grpo",
    ),
    _no(
        "trainer.rloo_trainer",
        "RLOOTrainer",
        "its KL penalty is inside the reward, where no method sees it, and its loss reads one log-prob per row and no "
        "mask of tokens, so neither tokens nor rows can leave. Without that penalty its advantages are those of "
        "GRPOTrainer with `scale_rewards='none'` times G/(G-1)",
        unchanged=True,
    ),
    TrlTrainer(
        "trl.experimental.async_grpo.async_grpo_trainer",
        "AsyncGRPOTrainer",
        "in `rl_plugins.trl.asynchronous`: all but those that decide what is generated, and some of these",
        "it has a mixin of its own, `rl_plugins.trl.asynchronous.AsyncMethodsMixin`, which decides on groups as they "
        "leave the queue",
        unchanged=True,
    ),
    _no(
        "experimental.a2po.a2po_trainer",
        "A2POTrainer",
        "one completion per prompt and a regression on its reward: no groups and no advantages",
        unchanged=True,
    ),
    _no(
        "experimental.online_dpo.online_dpo_trainer",
        "OnlineDPOTrainer",
        "its loss compares the two completions of a prompt: no advantages",
        unchanged=True,
    ),
    _no(
        "experimental.sdpo.sdpo_trainer",
        "SDPOTrainer",
        "its batches hold rollouts and prompts for a teacher, which is the policy itself, and are made in another way "
        "than GRPO's",
        unchanged=True,
    ),
    _no("experimental.sdft.sdft_trainer", "SDFTTrainer", _TEACHER),
    _no("experimental.gkd.gkd_trainer", "GKDTrainer", _TEACHER),
    _no("experimental.gold.gold_trainer", "GOLDTrainer", _TEACHER),
    _no("experimental.iw_opd.iw_opd_trainer", "IWOPDTrainer", _TEACHER),
    _no("experimental.async_distillation.async_distillation_trainer", "AsyncDistillationTrainer", _TEACHER),
    _no("experimental.server_distillation.server_distillation_trainer", "ServerDistillationTrainer", _TEACHER),
    _no("trainer.distillation_trainer", "DistillationTrainer", _TEACHER),
    _no("experimental.tpo.tpo_trainer", "TPOTrainer", _GIVEN, unchanged=True),
    _no("experimental.cpo.cpo_trainer", "CPOTrainer", _GIVEN, unchanged=True),
    _no("experimental.orpo.orpo_trainer", "ORPOTrainer", _GIVEN, unchanged=True),
    _no("trainer.dpo_trainer", "DPOTrainer", _GIVEN, unchanged=True),
    _no("trainer.kto_trainer", "KTOTrainer", _GIVEN, unchanged=True),
    _no("trainer.reward_trainer", "RewardTrainer", "it trains a reward model"),
    _no("trainer.sft_trainer", "SFTTrainer", _GIVEN, unchanged=True),
)


@dataclass(frozen=True)
class Loss:
    """The loss that runs.

    Args:
        like: the `loss_type` of TRL that averages rows and tokens as it does; empty if nobody says.
        own: the class whose loss it is; empty if it is that of TRL's GRPOTrainer.
    """

    like: str
    own: str = ""

    @property
    def about(self) -> str:
        return f"the loss of {self.own} (like {self.like!r})" if self.own else f"loss_type={self.like!r}"


def check_served(cls: type) -> None:
    """Raises ConfigError for a trainer that serves no method, with the reason."""
    if issubclass(cls, GRPOTrainer):
        return
    known = {(t.module, t.name): t for t in TRAINERS}
    found = next((known[key] for c in cls.__mro__ if (key := (c.__module__, c.__name__)) in known), None)
    name, why = (found.name, found.why) if found else (cls.__name__, "it is no trl.GRPOTrainer")
    raise ConfigError(
        f"Methods are not served by {name}: {why}. Use rl_plugins.trl.GRPOTrainer, or leave `methods` empty. "
        f"docs/trl_details.md has the table of TRL's trainers."
    )


def loss_of(cls: type, args: GRPOConfig, mixin: type) -> Loss:
    """The loss a trainer computes, by the functions it would run.

    Args:
        cls: the trainer.
        mixin: ours, which wraps the loss and changes none.

    Raises:
        ConfigError: `loss_like` of the class is none of those allowed.
    """
    known = {(t.module, t.name): t.loss_like for t in TRAINERS if t.loss_like}
    for c in cls.__mro__:
        if c is GRPOTrainer:
            break
        own = vars(c)
        stated = own.get("loss_like") or known.get((c.__module__, c.__name__))
        if c is not mixin and stated is not None:
            if stated == "host":
                break
            if stated not in TRL_AGGREGATION:
                raise ConfigError(
                    f"{c.__name__}.loss_like is {stated!r}; allowed: 'host' (TRL's own loss), "
                    f"{', '.join(map(repr, TRL_AGGREGATION))}."
                )
            return Loss(stated, c.__name__)
        if c is not mixin and any(name in own for name in LOSSES):
            return Loss("", c.__name__)
    return Loss(args.loss_type)


def unknown_loss(loss: Loss, names: str) -> str:
    """Why methods that take out rows or tokens, or touch the surrogate, are refused under a loss nobody knows."""
    return (
        f"{loss.own} has a loss of its own, and nobody says how it averages rows; {names} cannot be exact with it. "
        f'State it in the class of the trainer, for example `loss_like = "grpo"` for a mean over rows '
        f"(docs/trl_details.md, Trainers), or remove the method."
    )


def trainer_table(trainers: Sequence[TrlTrainer] = TRAINERS) -> str:
    """The table of docs/trl_details.md, in Markdown."""
    rows = [("trainer", "methods", "why", "two steps without methods"), ("---",) * 4]
    for t in trainers:
        stable = hasattr(trl, t.name) and t.module.startswith("trl.trainer")
        module = "trl" if stable else t.module.rpartition(".")[0]
        rows.append(
            (f"`{module}.{t.name}`", t.methods or "no", t.why, "TRL's own weights" if t.unchanged else "not run")
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
