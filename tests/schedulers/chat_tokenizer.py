"""A tokenizer small enough to read: one id a character, one a special token, and a template that is a function."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from schedulers.types import Messages

START, END, PLAIN = 1, 2, 3
_SPECIAL = {"<|im_start|>": START, "<|im_end|>": END}
_MERGED = {"[5 3 7]": PLAIN}
_PIECES = re.compile("|".join(map(re.escape, [*_SPECIAL, *_MERGED])) + "|.", re.DOTALL)
_FIRST_CHARACTER = 100

Template = Callable[[Messages, bool], str]


def chatml(messages: Messages, generation_prompt: bool) -> str:
    """Render as ChatML does."""
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return turns + "<|im_start|>assistant\n" * generation_prompt


class ChatTokenizer:
    """Characters as ids, but ``[5 3 7]`` is one token of its own, so that a text has more than one spelling.

    Args:
        template: Renders messages; the flag asks for the beginning of an answer.
    """

    def __init__(self, template: Template = chatml) -> None:
        self.template = template
        self.eos_token_id: int | None = END
        self.all_special_ids = [START, END]

    def apply_chat_template(
        self, conversation: Messages, *, tokenize: bool = True, add_generation_prompt: bool = False, **kwargs: Any
    ) -> str:
        assert not tokenize
        return self.template(conversation, add_generation_prompt, **kwargs)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        known = _SPECIAL | _MERGED
        return [known.get(piece) or _FIRST_CHARACTER + ord(piece) for piece in _PIECES.findall(text)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        names = {token_id: text for text, token_id in (_SPECIAL | _MERGED).items()}
        return "".join(
            names.get(token_id) or chr(token_id - _FIRST_CHARACTER)
            for token_id in token_ids
            if not (skip_special_tokens and token_id in self.all_special_ids)
        )


def characters(text: str) -> list[int]:
    """The spelling of a text that the tokenizer itself would not choose: every character by itself."""
    return [_FIRST_CHARACTER + ord(character) for character in text]
