"""Prompts as token ids, extended from turn to turn without ever tokenising what the model sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from schedulers.engines.base import Tokenizer
from schedulers.types import Messages

__all__ = ["ChatPrompts"]

# Stands for an assistant's text while the template is rendered around it; no template looks for it and no text
# contains it.
_SENTINEL = "\N{SYMBOL FOR SUBSTITUTE}assistant\N{SYMBOL FOR SUBSTITUTE}"


class ChatPrompts:
    """Renders conversations with a tokenizer's chat template.

    Args:
        tokenizer: The model's.
        template_kwargs: Further variables of the chat template, such as ``{"enable_thinking": False}``.
    """

    def __init__(self, tokenizer: Tokenizer, *, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        # Not all of them have a name: some models end a turn with a token that is special and nothing more.
        added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        unnamed = {token_id for token_id, token in added.items() if token.special}
        self._special_ids = {*getattr(tokenizer, "all_special_ids", ()), tokenizer.eos_token_id, *unnamed}

    def first(self, messages: Messages) -> list[int]:
        """The ids of a whole conversation, up to where the assistant's answer begins, or goes on in its message."""
        if messages and messages[-1]["role"] == "assistant":
            around = [*messages[:-1], {**messages[-1], "content": _SENTINEL}]
            before, found, _ = self._render(around, generation_prompt=False).partition(_SENTINEL)
            if found:
                return self._encode(before + messages[-1]["content"])
        return self._encode(self._render(messages))

    def extend(
        self, messages: Messages, answer: int, prompt_ids: Sequence[int], token_ids: Sequence[int]
    ) -> list[int] | None:
        """The next prompt: what was sampled from, what was sampled, and the template's text for what came after.

        Args:
            messages: The conversation now.
            answer: The index in ``messages`` of the assistant message that ``token_ids`` was sampled for.
            prompt_ids: The prompt that it was sampled from.
            token_ids: What was sampled, as it is to be kept.

        Returns:
            Ids that start with ``prompt_ids + token_ids``, or None when the template rewrites history (it removes
            earlier thinking or adds to an answer that has ended, say), so that no extension shows the model what the
            template would show.
        """
        if answer == len(messages) - 1:  # the assistant goes on in the same message
            return [*prompt_ids, *token_ids]
        around = [dict(message) for message in messages]
        around[answer]["content"] = _SENTINEL
        before, found, after = self._render(around).partition(_SENTINEL)
        content = messages[answer]["content"]
        rendered = self._render(messages)
        # A template may trim an answer. The ids stay as sampled; only text that went missing is a rewritten history.
        trimmed = (content, content.strip(), content.lstrip(), content.rstrip())
        unchanged = any(rendered == before + text + after for text in trimmed)
        if (
            not found
            or not unchanged
            or not before.startswith(self._render(messages[:answer], generation_prompt=False))
        ):
            return None
        glue = self._encode(after)
        end = token_ids[-1] if token_ids else None
        if end in self._special_ids and end in glue:
            if glue[0] != end:
                return None  # the template puts something (a newline, say) between an answer and its end
            glue = glue[1:]  # the model sampled the end token that the template puts there as well
        return [*prompt_ids, *token_ids, *glue]

    def _render(self, messages: Messages, *, generation_prompt: bool = True) -> str:
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation_prompt, **self.template_kwargs
        )
        if not isinstance(text, str):
            raise TypeError(f"the tokenizer's chat template gave {type(text).__name__}, not text")
        return text

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))
