"""Steps of a completion that a text separates."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from rl_plugins.core.groups import spread
from rl_plugins.core.requests import Chat
from rl_plugins.core.rollouts import Jagged


def separated(completion: Jagged, separator: str, chat: Chat) -> Tensor:
    """(tokens,) int64: the step of each token, from 0, as `text.split(separator)` numbers them.

    A token belongs to the step in which it begins, so one that ends a separator belongs to the step before it.

    Args:
        completion: token ids of each row.
        separator: without NUL, with which texts of rows are joined here.
        chat: tokenizer of the run.
    """
    known, which = torch.unique(completion.values, return_inverse=True)
    pieces = [chat.piece(token).replace("\0", " ") for token in known.tolist()]
    letters = torch.tensor([len(piece) for piece in pieces], dtype=torch.int64)[which]
    row = spread(torch.arange(len(completion)), completion.length)
    begin = torch.cumsum(letters, 0) - letters + row  # in the text of all rows, a NUL after each
    text = "\0".join("".join(map(pieces.__getitem__, of.tolist())) for of in Jagged(which, completion.offsets))
    ends = torch.tensor([found.end() for found in re.finditer(re.escape(separator), text)], dtype=torch.int64)
    before = torch.searchsorted(ends, begin, right=True)
    return before - before[completion.offsets[row]]  # separators of earlier rows
