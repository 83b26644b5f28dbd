"""Everything the adapter changes in objects that are not its own; docs/trl.md shows this table (a test compares them).

Overriding a method in `MethodsMixin` changes nothing of TRL; what is overridden stands in `compat.PRIVATE`. Where no
method is named, nothing is touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple


class Change(NamedTuple):
    """One change of a foreign object.

    Args:
        what: the object.
        how: what it is, and for how long.
        why: what for.
        when: what switches it on.
        patch: of patches/trl that ends it; "-": none.
        by: modules and names of the adapter.
    """

    what: str
    how: str
    why: str
    when: str
    patch: str
    by: str


_TABLE = """
`transformers.trainer.DEFAULT_CALLBACKS` | one callback more, for good | TRL's own trainer would ignore the methods of a config in silence | a `GRPOConfig` names methods | - | config.refuse_stock_trainers
`trl.GRPOTrainer` | ours, while TRL's script runs | the script takes its trainer from there | `rl-plugins trl grpo` with methods | - | script.run
the parser accelerate makes for `launch` | `error` raises | an argument it cannot read is one paragraph | `rl-plugins trl grpo` | - | script.launch
the config | options that a method sets, for good | `host_options`; a value of the user's own is an error instead | a method with `host_options` | - | trainer.MethodsMixin
the trainer's `callback_handler` | one callback more | start, state, learning rate of a step | methods are named | - | trainer.MethodsMixin
the trainer | `num_generations` and `rollout_func` are others while it makes a batch | groups of other sizes mean nothing to TRL; rows of programs are served where it has a place for them | methods are named | - | generation.GenerationBatch, evaluation.evaluation_view
the trainer | `train_dataset` yields rows with their number while the dataloader is made; one more in `_signature_columns` | prompts are told apart; the collator would drop the number | methods are named | - | trainer.MethodsMixin
the trainer | `state.num_input_tokens_seen`, `_metrics` and `_pending_extra_logs` are put back | rows are counted and logged once, when TRL makes its batch of them | rounds; programs that ask for rewards | - | generation.GenerationBatch, engine.TrlEngine
the trainer | `_metrics` and `_logs` of the batch just made are rewritten | the numbers shown are the numbers used | a decision that is not TRL's own; values that methods log | T2 (in part) | logs, checkpoint.MethodsCallback
TRL's batch | advantages, masks, columns; rows cut away, moved, masked | it is trained as decided | methods are named | T2, T5 (in part) | batch.apply_decision, loss.before_update
TRL's batch | in a copy for its loss, advantages are 0 | its own surrogate vanishes, the method's takes its place | `policy_loss` | T3 | loss.compute_loss
the model | `generate`, while a request is served | limits, temperature, stop texts and top log-probs of each request; keys and values that are kept | `rollout`, `admit` | - | engine.TrlEngine
`VLLMGeneration` and its `llm` or `vllm_client` | `generation_kwargs` and `generate`, while a request is served | the same, where TRL has one limit for all | `rollout` with `use_vllm` | - | engine.TrlEngine
the optimizer | learning rates times a factor, for one optimizer step | `Update.lr_scale`; a step without a trained token moves nothing | `before_update`, rows that leave | - | checkpoint.MethodsCallback
"""  # noqa: E501
CHANGES = tuple(Change(*line.split(" | ")) for line in _TABLE.strip().splitlines())


def table() -> str:
    """The changes as a table in Markdown."""
    lines = ["| what | how | why | when | patch |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(c[:5])} |" for c in CHANGES)])


@contextlib.contextmanager
def changed(thing: Any, **values: Any) -> Iterator[None]:
    """An object with other attributes, as long as this lasts."""
    before = {name: vars(thing)[name] for name in values if name in vars(thing)}
    for name, value in values.items():
        setattr(thing, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(thing, name, before[name])
            else:
                delattr(thing, name)
