"""Tokenizer and chat template as rollout programs see them: pure functions on token ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.files import read_json
from rl_plugins.kit.prompts import NO_CHARACTER, as_content, as_text

_PRIVATE = 0xE000  # first character of Unicode's private use area

TEMPLATE_FILES = (
    "tokenizer_config.json",
    "processor_config.json",
    "chat_template*",
    "*_chat_templates/*",
    "tekken.json",
)
"""Files of a model's folder that hold a chat template, or are a tokenizer's that brings its own."""

NO_TEMPLATE = (
    "the tokenizer of {model} has no chat template. Give it one (tokenizer.chat_template), or take a model that has it."
)


def has_template(folder: str | Path) -> bool | None:
    """Whether the tokenizer saved in a folder has a chat template; None if there is no such tokenizer.

    Args:
        folder: of a model, or of the tokenizer alone, as transformers saves it.
    """
    config = Path(folder) / "tokenizer_config.json"
    if not config.is_file():
        return None
    others = [f for pattern in TEMPLATE_FILES[2:] for f in Path(folder).glob(pattern)]
    try:
        told = [read_json(f.read_text(encoding="utf-8")) for f in Path(folder).glob("*_config.json")]
    except (OSError, ValueError):
        return None
    return bool(others) or any(isinstance(t, dict) and t.get("chat_template") for t in told)


def check_teacher(tokenizer: Any, teacher: str, **options: Any) -> None:
    """Raises ConfigError for a teacher in whose tokenizer a token of the policy's has another id.

    Args:
        tokenizer: of the policy.
        teacher: path or name of its model.
        options: of `from_pretrained`.
    """
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(teacher, **options).get_vocab()
    other = [token for token, i in tokenizer.get_vocab().items() if theirs.get(token) != i]
    if other:
        raise ConfigError(
            f"The teacher {teacher} has another tokenizer: {len(other)} tokens of the policy have other ids in it, one "
            f"is {min(other)!r}. Its log-probs would be of other texts. Take a teacher of the policy's family."
        )


class TokenizerChat:
    """`requests.Chat` on a tokenizer of transformers.

    Args:
        tokenizer: with a chat template, unless prompts are plain texts.
        eos: tokens that end a completion; None: the tokenizer's.
        template: instead of the tokenizer's own.
        **options: of the template.
    """

    def __init__(
        self, tokenizer: Any, eos: Sequence[int] | None = None, template: str | None = None, **options: Any
    ) -> None:
        self.tokenizer = tokenizer
        self._eos = tuple(eos) if eos is not None else (tokenizer.eos_token_id,)
        self._options = {**options, **({"chat_template": template} if template else {})}
        self._replies: dict[tuple[tuple[str, str], ...], tuple[int, ...]] = {}

    @property
    def eos(self) -> tuple[int, ...]:
        return self._eos

    @property
    def vocabulary(self) -> int:
        return len(self.tokenizer)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(as_text(text), add_special_tokens=False))

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=not special))

    def piece(self, token: int) -> str:
        text = self.decode((token,), special=True)
        if NO_CHARACTER not in text:
            return text
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        name = str(self.tokenizer.convert_ids_to_tokens(token))
        if not byte_of.keys() >= set(name):
            return name  # not a byte-level vocabulary: SentencePiece writes <0xE6>
        return bytes(byte_of[character] for character in name).decode("utf-8", "backslashreplace")

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        return self._render(messages, True)

    def reply(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        key = tuple((str(m["role"]), str(m["content"])) for m in messages)
        if key not in self._replies:
            self._replies[key] = self._reply(messages)
            if len(self._replies) > 4096:
                self._replies.pop(next(iter(self._replies)))
        return self._replies[key]

    def _reply(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """What the template adds behind the end of an assistant's turn, found on a conversation of two messages."""
        before = [{"role": "user", "content": "."}, {"role": "assistant", "content": "."}]
        begun, whole = self._render(before, False), self._render_as_said([*before, *messages])
        ends = [i for i, token in enumerate(begun) if token in self._eos]
        if ends:  # some templates write a line break behind the end; the policy's own turn has only the end
            begun = begun[: ends[-1] + 1]
        if whole[: len(begun)] != begun:
            raise ConfigError(
                "The chat template writes earlier messages differently once others follow, so a conversation cannot "
                "grow token by token. Use a template that only appends (TRL ships such training templates), or leave "
                "out the method that makes conversations."
            )
        return whole[len(begun) :]

    def _render_as_said(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Up to where the policy answers, with names of special tokens in the messages as text."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        names = [t.content for t in added if t.special and any(t.content in str(m["content"]) for m in messages)]
        if not names:
            return self._render(messages, True)
        marks = {chr(_PRIVATE + i): name for i, name in enumerate(names)}  # while the template is applied
        marked = [dict(message) for message in messages]
        for message in marked:
            message["content"] = as_text(message["content"])
            for mark, name in marks.items():
                message["content"] = message["content"].replace(name, mark)
        ids: list[int] = []
        for part in re.split(f"([{''.join(marks)}])", self._templated(marked, True, tokenize=False)):
            how = {"add_special_tokens": False, "split_special_tokens": part in marks}
            ids += self.tokenizer.encode(marks.get(part, part), **how)
        return tuple(ids)

    def _render(self, messages: Sequence[Mapping[str, Any]], generate: bool) -> tuple[int, ...]:
        return tuple(self._templated(messages, generate, tokenize=True, return_dict=False))

    def _templated(self, messages: Sequence[Mapping[str, Any]], generate: bool, **how: bool) -> Any:
        if getattr(self.tokenizer, "chat_template", None) is None and "chat_template" not in self._options:
            raise ConfigError(
                "The tokenizer has no chat template, and a method renders conversations with it. Set one "
                "(tokenizer.chat_template), or give the prompts as texts to a method that needs no conversation."
            )
        return self.tokenizer.apply_chat_template(
            [{**m, "content": as_content(m["content"])} if m.get("content") is not None else dict(m) for m in messages],
            add_generation_prompt=generate,
            **how,
            **self._options,
        )
