"""An engine that says what it is told, for tests."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from schedulers.checks import check_whole
from schedulers.engines.base import Tokenizer
from schedulers.types import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    RequestConfig,
    RolloutInferRequest,
)

__all__ = ["Reply", "Script", "ScriptedCall", "ScriptedEngine"]

Reply: TypeAlias = "str | ChatCompletionResponseChoice | BaseException"
"""A text, a whole completion that is handed on untouched, or an exception to raise."""

Script: TypeAlias = "Sequence[Reply] | Callable[[RolloutInferRequest, int], Reply | Awaitable[Reply]]"
"""Replies by turn, or a function (asynchronous or not) of the request and the turn, counted from 0."""


@dataclass(frozen=True)
class ScriptedCall:
    """One request as the engine saw it.

    Args:
        request: A copy made at the time of the call; schedulers go on changing theirs.
        request_config: How it was to be sampled.
        turn: Which turn of its trajectory it was, from 0.
    """

    request: RolloutInferRequest
    request_config: RequestConfig
    turn: int


@dataclass
class ScriptedEngine:
    """Answers from a script.

    The turn is the number of assistant messages in the request, not the number of calls, so any number of
    trajectories can play the same script side by side::

        engine = ScriptedEngine(["[1 1 4]", "[2 5 9]"])
        engine = ScriptedEngine(lambda request, turn: MOVES[request.data_dict["seed"]][turn])

    An asynchronous function can wait (for an ``asyncio.Event``, say) before it answers, and a function may raise.

    Args:
        script: Replies by turn, or a function of the request and the turn.
        tokenizer: Turns texts into ids, with its end token behind them; completions longer than ``max_tokens`` are
            then cut with finish reason ``"length"``. Without one, texts come without ids.
        logprob: The log-probability to report for a token id. The default tells ids apart, so that a value at the wrong
            place shows.
        max_model_len: The context length that schedulers are to keep to; None is no limit.
        calls: What was asked for, in order.
    """

    script: Script
    tokenizer: Tokenizer | None = None
    logprob: Callable[[int], float] = field(default=lambda token_id: -token_id / 1000, kw_only=True)
    max_model_len: int | None = field(default=None, kw_only=True)
    calls: list[ScriptedCall] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if isinstance(self.script, str):
            raise TypeError(f"a script is a list of replies, one a turn, or a function; not the text {self.script!r}")
        if not callable(self.script):
            for reply in self.script:
                if not isinstance(reply, (str, ChatCompletionResponseChoice, BaseException)):
                    raise TypeError(
                        f"a script's replies are texts, ChatCompletionResponseChoice or exceptions, not {reply!r:.100}"
                    )
        check_whole("max_model_len", self.max_model_len, least=1, none="no limit")

    async def infer_async(self, request: RolloutInferRequest, request_config: RequestConfig) -> ChatCompletionResponse:
        """Answer with the script's reply for the request's turn.

        Raises:
            IndexError: The script has no reply for this turn.
            TypeError: Its reply is none.
        """
        turn = sum(message["role"] == "assistant" for message in request.messages)
        seen = replace(
            request,
            messages=[dict(message) for message in request.messages],
            data_dict=dict(request.data_dict),
            prompt_token_ids=None if request.prompt_token_ids is None else list(request.prompt_token_ids),
        )
        self.calls.append(ScriptedCall(seen, request_config, turn))
        reply = await self._reply(request, turn)
        if isinstance(reply, BaseException):
            raise reply
        choice = self._speak(reply, request_config) if isinstance(reply, str) else reply
        if not isinstance(choice, ChatCompletionResponseChoice):
            raise TypeError(
                f"the script's reply to turn {turn} is {reply!r:.100}; it must be a text, a "
                "ChatCompletionResponseChoice or an exception"
            )
        return ChatCompletionResponse(
            choices=[choice], model="scripted", prompt_token_ids=self._prompt_ids(request), usage=_usage(choice)
        )

    async def _reply(self, request: RolloutInferRequest, turn: int) -> Reply:
        if callable(self.script):
            reply = self.script(request, turn)
            return await reply if inspect.isawaitable(reply) else reply
        if turn >= len(self.script):
            raise IndexError(
                f"the script has {len(self.script)} replies, but trajectory {request.uuid} asks for number {turn + 1}"
            )
        return self.script[turn]

    def _speak(self, text: str, request_config: RequestConfig) -> ChatCompletionResponseChoice:
        """The text as a model would have sampled it."""
        if self.tokenizer is None:
            return ChatCompletionResponseChoice(ChatMessage(text))
        ids = list(self.tokenizer.encode(text, add_special_tokens=False))
        if self.tokenizer.eos_token_id is not None:
            ids.append(self.tokenizer.eos_token_id)
        finish_reason = "stop"
        if request_config.max_tokens is not None and len(ids) > request_config.max_tokens:
            ids = ids[: request_config.max_tokens]
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            finish_reason = "length"
        logprobs = {"content": [{"logprob": self.logprob(token_id)} for token_id in ids]}
        return ChatCompletionResponseChoice(
            ChatMessage(text),
            finish_reason=finish_reason,
            token_ids=ids,
            logprobs=logprobs if request_config.logprobs else None,
        )

    def _prompt_ids(self, request: RolloutInferRequest) -> list[int] | None:
        if request.prompt_token_ids is not None or self.tokenizer is None:
            return request.prompt_token_ids
        text = self.tokenizer.apply_chat_template(request.messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def _usage(choice: ChatCompletionResponseChoice) -> dict[str, int]:
    return {} if choice.token_ids is None else {"completion_tokens": len(choice.token_ids)}
