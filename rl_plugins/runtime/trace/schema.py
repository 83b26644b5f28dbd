"""The tables of a trace. A change of a column's meaning raises `VERSION`; columns may be added without that.

    trace/rollouts/batch-00000012.parquet   a record for each recorded row of generation batch 12
    trace/batches/batch-00000012.parquet    one record of the batch, with a summary of every group
    trace/tokens/batch-00000012.parquet     texts of token ids that appear for the first time
    trace/updates/batch-00000012.parquet    a record for each optimizer step of the batch (verl: one of all of them)

Lists per token are as long as the completion; a place without a value is NaN (null for whole numbers).
"""

from __future__ import annotations

import pyarrow as pa

VERSION = 1
STAYS = -1
"""In `token_left`: the token was trained, or never could be."""

_FLOATS, _STRINGS = pa.list_(pa.float32()), pa.list_(pa.string())
# named numbers; no map, which `datasets` cannot read
_VALUES = pa.list_(pa.struct({"name": pa.string(), "value": pa.float64()}))

ROLLOUTS = pa.schema(
    {
        "schema": pa.int16(),
        "batch": pa.int32(),
        "row": pa.int32(),  # place in the batch
        "group": pa.int64(),
        "prompt_index": pa.int64(),  # dataset row, -1: foreign
        "rollout": pa.int32(),
        "index": pa.int32(),  # of the row in its rollout
        "prompt": pa.string(),  # special tokens kept, as in `completion`
        "completion": pa.string(),
        "prompt_ids": pa.list_(pa.int32()),
        "completion_ids": pa.list_(pa.int32()),
        # of each token, rl_plugins.core.requests.Kind: 0 read, 1 sampled, 2 forced (1 in rows that `select` took out)
        "kinds": pa.list_(pa.int8()),
        "origin": pa.string(),  # generated, given (by a plan), carried (begun in an earlier batch)
        "version": pa.int32(),  # published weights of the oldest token
        "newest_version": pa.int32(),
        "current_version": pa.int32(),
        "versions": pa.list_(pa.int32()),  # of each token, if asked for
        "truncated": pa.bool_(),
        "length": pa.int32(),  # tokens that may carry a gradient
        "rewards": _VALUES,  # of each reward function
        "raw_reward": pa.float64(),  # their weighted sum
        "reward": pa.float64(),  # after all `rewards` hooks
        "rewarded": pa.list_(pa.struct({"method": pa.string(), "reward": pa.float64()})),
        "trained": pa.bool_(),
        "left": pa.list_(pa.struct({"method": pa.string(), "hook": pa.string(), "tokens": pa.int32()})),
        "token_left": pa.list_(pa.int8()),  # of each token, the entry of `left` that took it out, or STAYS
        "grpo": pa.float64(),  # advantage that plain GRPO gives to `raw_reward` in the whole group
        "advantage": pa.float64(),  # mean over the trained tokens
        "advantages": pa.list_(  # after each stage; `tokens` where they differ inside the row
            pa.struct({"stage": pa.string(), "advantage": pa.float64(), "tokens": _FLOATS})
        ),
        "old_logprobs": _FLOATS,
        "rollout_logprobs": _FLOATS,
        "ref_logprobs": _FLOATS,
        "entropies": _FLOATS,
        "turns": pa.list_(
            pa.struct(
                {
                    "turn": pa.int32(),
                    "start": pa.int32(),
                    "stop": pa.int32(),
                    "anchor": pa.string(),
                    "reward": pa.float64(),
                    "valid": pa.bool_(),
                    # turns that a method compares this one with, e.g. those that begin in the same state (`gigpo`);
                    # several where it compares in several ways (`hgpo`, by the length of the history)
                    "compared": pa.list_(
                        pa.struct(
                            {
                                "method": pa.string(),
                                "name": pa.string(),  # "state", "history of 2"
                                "set": pa.int64(),  # equal for turns that are compared with each other
                                "size": pa.int32(),  # turns of that set
                                "advantage": pa.float64(),  # from this comparison
                            }
                        )
                    ),
                }
            )
        ),
        # where the row parted from another one (trees); null: nobody said
        "branch": pa.struct(
            {
                "parent": pa.int32(),  # `row` it grew from; null: it began at the prompt
                "start": pa.int32(),  # place in the completion where it parted
                "score": pa.float64(),  # by which the method chose to branch here, e.g. an entropy
                "why": pa.string(),
            }
        ),
        # what grew on this row and was cut off; `ids` are its tokens from `start` on, in the place of the row's own
        "pruned": pa.list_(
            pa.struct(
                {
                    "start": pa.int32(),
                    "ids": pa.list_(pa.int32()),
                    "text": pa.string(),
                    "score": pa.float64(),  # by which it was pruned
                    "why": pa.string(),
                }
            )
        ),
        "plan": pa.struct(
            {
                "by": _STRINGS,  # methods that changed it
                "n": pa.int32(),
                "spare": pa.int32(),
                "given": pa.int32(),
                "prefix": pa.int32(),  # tokens
                "edited": _STRINGS,  # columns
                "max_tokens": pa.int32(),
                "max_turns": pa.int32(),
            }
        ),
        # `values`: the named numbers of the text
        "notes": pa.list_(
            pa.struct({"method": pa.string(), "hook": pa.string(), "text": pa.string(), "values": _VALUES})
        ),
        "row_columns": _VALUES,
        "token_columns": pa.list_(pa.struct({"name": pa.string(), "values": _FLOATS})),
    }
)

BATCHES = pa.schema(
    {
        "schema": pa.int16(),
        "batch": pa.int32(),
        "time": pa.timestamp("ms", tz="UTC"),
        "host": pa.string(),
        "methods": _STRINGS,
        "rows": pa.int32(),
        "trained_rows": pa.int32(),
        "tokens": pa.int64(),
        "trained_tokens": pa.int64(),
        "current_version": pa.int32(),
        "stages": _STRINGS,
        "selected_by": pa.string(),
        "selected": pa.list_(pa.int64()),  # dataset rows
        "stats": _VALUES,  # logged by the methods in this batch so far, and by the updates before
        # notes of prompts, where they were chosen (`select_prompts`) or planned (`plan`)
        "prompts": pa.list_(
            pa.struct(
                {
                    "prompt_index": pa.int64(),
                    "group": pa.int64(),  # null where it was chosen
                    "method": pa.string(),
                    "hook": pa.string(),
                    "text": pa.string(),
                    "values": _VALUES,  # e.g. mean and deviation of a posterior
                }
            )
        ),
        "groups": pa.list_(
            pa.struct(
                {
                    "group": pa.int64(),
                    "prompt_index": pa.int64(),
                    "rows": pa.int32(),
                    "trained": pa.int32(),
                    "reward": pa.float64(),  # mean of the raw rewards
                    "spread": pa.float64(),  # largest minus smallest
                    "change": pa.float64(),  # largest |advantage - GRPO's|
                    "truncated": pa.int32(),
                    "age": pa.int32(),  # versions between the oldest token and now
                    "recorded": pa.bool_(),
                }
            )
        ),
    }
)

UPDATES = pa.schema(
    {
        "schema": pa.int16(),
        "batch": pa.int32(),
        "update": pa.int32(),  # number in the batch, from 0
        "lr_scale": pa.float64(),  # factor of the methods on the learning rate; null: the host does not say it
        "stats": _VALUES,  # logged by the methods in this step, e.g. the mean weight that a surrogate gave to tokens
        "scaled": pa.list_(pa.struct({"method": pa.string(), "lr_scale": pa.float64()})),
        # with the signal `ratio`: of the batch's first and last optimizer step, a record for each recorded row
        "ratios": pa.list_(
            pa.struct(
                {
                    "row": pa.int32(),
                    "ratio": _FLOATS,  # of each token of the completion, NaN where it is not trained
                    "clipped": pa.list_(pa.int8()),  # 1: no gradient because of the clip; null: the method has its own
                }
            )
        ),
    }
)

TOKENS = pa.schema({"id": pa.int32(), "text": pa.string()})
