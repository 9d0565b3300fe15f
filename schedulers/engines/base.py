"""What a scheduler asks of an inference engine and of its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from schedulers.types import ChatCompletionResponse, Messages, RequestConfig, RolloutInferRequest

__all__ = ["ContextOverflowError", "InferEngine", "Tokenizer"]


class ContextOverflowError(ValueError):
    """A prompt leaves no room for a completion in the model's context.

    An engine that knows it only when it samples raises this; a scheduler then ends the trajectory with
    ``StopReason.CONTEXT`` and the rewards that it has.
    """


@runtime_checkable
class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that schedulers use."""

    eos_token_id: int | None

    def apply_chat_template(
        self, conversation: Messages, *, tokenize: bool = ..., add_generation_prompt: bool = ..., **kwargs: Any
    ) -> Any:
        """Render messages; with ``tokenize=False`` the result is the text."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Text to ids."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str:
        """Ids to text."""


@runtime_checkable
class InferEngine(Protocol):
    """Anything that samples completions.

    ``tokenizer`` is None for an engine that works on text alone; token ids are then as the engine reports them.
    An engine may also have ``max_model_len: int``, the context length; a scheduler then ends a trajectory that would
    not fit instead of asking for it.
    """

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the model, or None."""

    async def infer_async(self, request: RolloutInferRequest, request_config: RequestConfig) -> ChatCompletionResponse:
        """Sample one completion for ``request``.

        When ``request.prompt_token_ids`` is set the engine samples from exactly these ids, and ``token_ids`` of the
        answer are exactly those that it sampled. An engine that cannot tell ids leaves ``token_ids`` None.

        Raises:
            ContextOverflowError: The prompt does not fit.
        """
