"""AReaL's admission of new rollouts (arXiv 2505.24298): generation runs a limited number of batches ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl_plugins import Admission, ConfigError, Method, MethodParams, Queue, Run, from_params, param

WARMUP = ("trainer.v1.colocate_async.num_warmup_batches", "trainer.v1.separate_async.num_warmup_batches")
THRESHOLD = "trainer.v1.sampler.max_off_policy_threshold"
STRATEGY = "trainer.v1.sampler.max_off_policy_strategy"


class ArealAdmission(Method):
    """Starts new groups as long as at most eta + 1 batches of them are ahead of training.

    With v the published weights, B the groups (prompts) of a batch, and the groups accepted (complete and kept, trained
    ones included) and running since the start:

        capacity = min(C - running, (eta + v + 1) B - accepted - running)      start a group while it is above 0

    eta = 0 is synchronous generation. The trainer takes the B complete groups that were started first.

    The rule limits the number of groups ahead and not the age of a group: a straggler started at version v is trained
    whenever it is complete. `bound`, our addition, limits the age: groups older than eta are dropped (`drop`), or
    training waits until none can become older (`wait`).

    verl applies this rule itself in its asynchronous modes, and the method sets verl's options: num_warmup_batches =
    eta, and max_off_policy_threshold = none, or with a `bound` eta + 1 (it counts versions, both ends included).

    Symbols: eta = `max_staleness` in published weights, C = `max_concurrent`, all whole numbers. See `capacity`.

    State: none; after a resume at version v the counts are accepted = v B, running = 0 (`recovered`).

    Raises:
        ConfigError: TRL's GRPOTrainer, or `max_concurrent` in verl.

    Source: arXiv 2505.24298 and areal/infra/staleness_manager.py of inclusionAI/AReaL (StalenessManager, commit
    4aef98d8), whose capacities are the golden cases.
    """

    name = "areal_admission"
    fidelity = "code"
    does = "Lets generation run a fixed number of batches ahead of training"
    problems = ("long_tail", "stale")
    hosts = ("verl",)
    host_options = from_params(
        lambda p: {
            "verl": {
                **dict.fromkeys(WARMUP, p.max_staleness),
                **({THRESHOLD: None} if p.bound == "none" else {THRESHOLD: p.max_staleness + 1, STRATEGY: p.bound}),
            }
        }
    )

    @dataclass(frozen=True)
    class Params(MethodParams):
        max_staleness: int = param(4, "eta, number of batches that generation may be ahead of training", ge=0, le=63)
        max_concurrent: int | None = param(None, "C, most groups in progress at once; none: no limit", ge=1)
        bound: Literal["none", "drop", "wait"] = param(
            "none", "treatment of older groups: trained (paper), dropped, or waited for"
        )

    def check(self, run: Run) -> None:
        if run.host == "trl":
            raise ConfigError(
                "TRL's GRPOTrainer does not generate while it trains, so rollouts started ahead "
                "would become stale and save no time. Use `april` (which does not wait for long "
                "rollouts) and `decoupled_ppo` instead, or verl's asynchronous modes."
            )
        if run.host == "verl" and self.params.max_concurrent is not None:
            raise ConfigError(
                f"`max_concurrent` is {self.params.max_concurrent}, and verl limits the prompts in progress by "
                f"num_warmup_batches only. Remove it; the engine has its own limit "
                f"(actor_rollout_ref.rollout.max_num_seqs)."
            )

    def admit(self, queue: Queue) -> Admission:
        """The rule for a host that asks before each batch, as in a simulation."""
        p = self.params
        old = tuple(
            i
            for i, group in enumerate(queue.carried)
            if p.bound == "drop" and queue.batch - group.drawn > p.max_staleness
        )
        go = tuple(i for i in range(len(queue.carried)) if i not in old)
        complete = sum(all(queue.carried[i].finished) for i in go)
        most = p.max_concurrent if p.max_concurrent is None else max(p.max_concurrent, queue.groups)
        accepted = queue.batch * queue.groups + complete
        room = capacity(queue.batch, accepted, len(go) - complete, queue.groups, p.max_staleness, most)
        return Admission(max(room, queue.groups - len(go), 0), go, drop=old)


def capacity(
    version: int, accepted: int, running: int, batch: int, max_staleness: int, max_concurrent: int | None = None
) -> int:
    """The number of groups that may be started now; none if it is 0 or less.

        min(C - running, (eta + v + 1) B - (accepted + running))

    Args:
        version: v, published weights since the start of the run. accepted: groups that are complete and kept, those
        trained included. One that is rejected is in no count. running: groups started and not complete. batch: B,
        groups per batch. max_staleness: eta. max_concurrent: C; None: no limit.
    """
    room = (max_staleness + version + 1) * max(1, batch) - (accepted + running)
    return room if max_concurrent is None else min(max(1, max_concurrent) - running, room)
