"""From a request to the ids of a prompt, and from sampled ids to a response: what engines that take ids share."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from schedulers.engines.base import ContextOverflowError, Tokenizer
from schedulers.types import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    Messages,
    RequestConfig,
    RolloutInferRequest,
)

__all__ = ["Prompt", "prompt_of", "refuse_several", "response_of", "token_limit", "turn_seed"]

Prompt = list[int]


def prompt_of(request: RolloutInferRequest, tokenizer: Tokenizer, *, vocab_size: int | None) -> Prompt:
    """The ids to sample from: the request's own, else those of its messages.

    Args:
        request: What is asked for.
        tokenizer: Renders the messages.
        vocab_size: How many ids the model knows; None leaves that check to someone else.

    Raises:
        ValueError: There are none, or the model does not know them.
    """
    prompt = request.prompt_token_ids
    if prompt is None:
        text = tokenizer.apply_chat_template(request.messages, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False)
    if not prompt:
        raise ValueError(f"the prompt of trajectory {request.uuid} is empty")
    if vocab_size is not None and not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise ValueError(
            f"the prompt of trajectory {request.uuid} has ids from {min(prompt)} to {max(prompt)}, but the model "
            f"knows 0 to {vocab_size - 1}; do tokenizer and model belong together?"
        )
    return list(prompt)


def token_limit(prompt: Prompt, config: RequestConfig, *, max_model_len: int | None) -> int:
    """The most tokens that the completion of a prompt may have.

    Raises:
        ContextOverflowError: There is no room for one.
        ValueError: There is no limit, or more than one completion is asked for.
    """
    refuse_several(config)
    if max_model_len is None:
        if config.max_tokens is None:
            raise ValueError("the model states no context length: set RequestConfig(max_tokens=…)")
        return config.max_tokens
    room = max_model_len - len(prompt)
    if room < 1:
        raise ContextOverflowError(
            f"a prompt of {len(prompt)} tokens leaves no room for a completion in a context of "
            f"{max_model_len} (max_model_len); shorten it or end the trajectory earlier"
        )
    return room if config.max_tokens is None else min(room, config.max_tokens)


def refuse_several(config: RequestConfig) -> None:
    """Refuse to sample more than one completion a request.

    Raises:
        ValueError: ``n`` is not 1.
    """
    if config.n != 1:
        raise ValueError(f"this engine samples one completion a request: n must be 1, not {config.n}")


def turn_seed(config: RequestConfig, prompt: Prompt | Messages) -> int | None:
    """A seed for this prompt, below 2**63, or None without one.

    Mixing in the prompt keeps the turns of a trajectory from drawing the same numbers over and over.
    """
    if config.seed is None:
        return None
    digest = hashlib.blake2b(repr((config.seed, prompt)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def response_of(
    prompt: Prompt,
    ids: list[int],
    logprobs: Sequence[float] | None,
    *,
    finish_reason: str,
    stop: Sequence[str],
    tokenizer: Tokenizer,
    model: str,
) -> ChatCompletionResponse:
    """The response to one request: all ids that were sampled, and the text before the first stop string."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    ends = [text.find(end) for end in stop if end in text]
    choice = ChatCompletionResponseChoice(
        ChatMessage(text[: min(ends)] if ends else text),
        finish_reason=finish_reason,
        token_ids=ids,
        logprobs=None if logprobs is None else {"content": [{"logprob": value} for value in logprobs]},
    )
    return ChatCompletionResponse(
        choices=[choice],
        model=model,
        prompt_token_ids=prompt,
        usage={"prompt_tokens": len(prompt), "completion_tokens": len(ids)},
    )
