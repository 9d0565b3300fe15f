"""Sampling from a server that speaks OpenAI's protocol: vLLM's with exact tokens, hosted models with text alone."""

from __future__ import annotations

import asyncio
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from schedulers.checks import as_dict, check_seconds, check_whole
from schedulers.engines.addresses import http_address
from schedulers.engines.base import ContextOverflowError, Tokenizer
from schedulers.engines.completions import Prompt, prompt_of, refuse_several, response_of, token_limit, turn_seed
from schedulers.engines.json_http import JsonClient, ServerError
from schedulers.loop_thread import LoopThread
from schedulers.types import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    Messages,
    RequestConfig,
    RolloutInferRequest,
)

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["OpenAIEngine"]

_T = TypeVar("_T")
_OVERFLOW = re.compile(r"context_length_exceeded|exceed_context_size|maximum context length", re.IGNORECASE)


class OpenAIEngine:
    """Samples from a server over HTTP. Whether a tokenizer is given decides what is asked for.

    * **With the model's tokenizer** the server must be vLLM's. Prompts go out as token ids, and the ids that were
      sampled come back with their log-probabilities (``return_token_ids``): nothing is tokenised again.
    * **Without one** any server of chat completions will do, also of a hosted model. Messages go out and text comes
      back; ``token_ids`` and ``logprobs`` are None, since no such server tells ids.

    With a tokenizer only the ``RequestConfig`` decides how to sample; without one the server may have defaults for what
    OpenAI's interface does not know (vLLM: ``min_p``, ``repetition_penalty``), which ``extra_body`` can set. A seed
    makes a completion as repeatable as the server makes it.

    Requests are sent from a thread of the engine's own, so any number of event loops, one after the other or at once,
    can use it. Failures that are safe to repeat are repeated: the server was not reached, the connection broke, or it
    answered 408, 429 (after its ``Retry-After``) or 5xx. A completion that took too long is not asked for again: that
    would favour the short ones.

    Args:
        base_url: Where the server is, as OpenAI's own client takes it, such as ``https://api.openai.com/v1``. Without a
            path it gets ``/v1``.
        model: The name that the server knows the model by.
        tokenizer: The model's tokenizer, for exact tokens.
        api_key: Sent as a bearer token. Over ``http`` to another machine everybody on the way can read it.
        api_key_variable: The environment variable that holds the key, in place of ``api_key``. None is read unasked.
        max_model_len: The most tokens of prompt and completion; by default what a vLLM server says.
        max_concurrency: The most requests on their way at a time; others wait.
        request_timeout: Seconds that one attempt may take.
        total_timeout: Seconds for all attempts, delays and the wait for a place included.
        max_retries: How often a request is sent again.
        retry_delay: Seconds before the first retry; doubled for each further one, up to 30.
        max_tokens_name: What the server calls the limit of a chat completion; some models of OpenAI's take only
            ``"max_completion_tokens"``.
        extra_body: Further fields of the requests. None takes one out that the server refuses, as in
            ``{"temperature": None}``; it then samples as it pleases.

    Raises:
        ValueError: An argument is out of range, or there is no such variable.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        tokenizer: Tokenizer | None = None,
        api_key: str | None = None,
        api_key_variable: str | None = None,
        max_model_len: int | None = None,
        max_concurrency: int = 64,
        request_timeout: float = 300.0,
        total_timeout: float = 600.0,
        max_retries: int = 5,
        retry_delay: float = 0.5,
        max_tokens_name: str = "max_tokens",
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        check_whole("max_model_len", max_model_len, least=2, none="the server's")
        check_whole("max_concurrency", max_concurrency, least=1)
        check_whole("max_retries", max_retries, least=0)
        check_seconds("request_timeout", request_timeout)
        check_seconds("total_timeout", total_timeout)
        check_seconds("retry_delay", retry_delay, or_zero=True)
        self.tokenizer = tokenizer
        self.model = model
        self.max_model_len = max_model_len
        self.max_tokens_name = max_tokens_name
        self.extra_body = as_dict("extra_body", extra_body)
        self._knows_context = max_model_len is not None
        self._client = JsonClient(
            http_address(base_url),
            api_key=_checked_key(api_key, api_key_variable),
            max_concurrency=max_concurrency,
            request_timeout=request_timeout,
            total_timeout=total_timeout,
            max_retries=max_retries,
            retry_delay=retry_delay,
        )
        self._closed = False
        self._thread = LoopThread("openai-engine")

    async def infer_async(self, request: RolloutInferRequest, request_config: RequestConfig) -> ChatCompletionResponse:
        """Sample one completion; see ``InferEngine``. Cancelling closes the connection, so that the server stops.

        Raises:
            ContextOverflowError: The prompt leaves no room for a completion.
            ServerTimeoutError: It took too long.
            ServerError: The server cannot be reached, refused, failed, or gave what was not asked for.
            ValueError: The request cannot be sent like this.
            RuntimeError: The engine is closed.
        """
        if self._closed:
            raise RuntimeError("this OpenAIEngine is closed")
        refuse_several(request_config)
        if self.tokenizer is None:
            return await self._thread.call(self._infer_text(request, request_config))
        return await self._thread.call(self._infer_ids(request, request_config, self.tokenizer))

    async def aclose(self) -> None:
        """Cancel what is being sampled and close all connections. The engine cannot be used again."""
        if not self._closed:
            self._closed = True
            await self._thread.call(self._shut_down())
            self._thread.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def _shut_down(self) -> None:
        requests = asyncio.all_tasks() - {asyncio.current_task()}
        for task in requests:
            task.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        await self._client.aclose()

    # -- with token ids -----------------------------------------------------------------------------

    async def _infer_ids(
        self, request: RolloutInferRequest, config: RequestConfig, tokenizer: Tokenizer
    ) -> ChatCompletionResponse:
        await self._learn_context()
        prompt = prompt_of(request, tokenizer, vocab_size=None)  # the server knows, and refuses others
        body = {
            "prompt": prompt,
            "max_tokens": token_limit(prompt, config, max_model_len=self.max_model_len),
            "top_k": config.top_k,
            "min_p": 0.0,  # this and the next, or the checkpoint's defaults would apply
            "repetition_penalty": 1.0,
            "logprobs": 0 if config.logprobs else None,
            "return_token_ids": True,
        }
        choice, model, _ = await self._ask("/completions", body, config, turn_seed(config, prompt))
        ids, logprobs = self._read("/completions", choice, lambda c: _tokens(c, prompt, wants_logprobs=config.logprobs))
        return response_of(
            prompt,
            ids,
            logprobs,
            finish_reason=choice["finish_reason"],
            stop=config.stop,
            tokenizer=tokenizer,
            model=model,
        )

    async def _learn_context(self) -> None:
        if not self._knows_context:
            try:
                models = await self._models()
            except ServerError as error:
                raise self._explained(error) from error
            if self.model not in models:
                raise self._no_such_model(models)
            self.max_model_len = models[self.model]
            self._knows_context = True

    # -- with messages ------------------------------------------------------------------------------

    async def _infer_text(self, request: RolloutInferRequest, config: RequestConfig) -> ChatCompletionResponse:
        if request.prompt_token_ids is not None:
            raise ValueError(
                "OpenAIEngine has no tokenizer and cannot sample from token ids: pass it the tokenizer that the "
                "scheduler has, if the server is vLLM's; else let the scheduler have none"
            )
        if request.messages and request.messages[-1]["role"] == "assistant":
            raise ValueError("chat completions cannot go on in an assistant's message: pass the engine a tokenizer")
        messages: Messages = [{"role": m["role"], "content": m["content"]} for m in request.messages]
        body: dict[str, Any] = {"messages": messages}
        if config.max_tokens is not None:
            body[self.max_tokens_name] = config.max_tokens
        if config.top_k:
            body["top_k"] = config.top_k  # not OpenAI's, so only where it is wanted
        choice, model, usage = await self._ask("/chat/completions", body, config, turn_seed(config, messages))
        text = self._read("/chat/completions", choice, _text)
        return ChatCompletionResponse(
            [ChatCompletionResponseChoice(ChatMessage(text), finish_reason=choice["finish_reason"])],
            model=model,
            usage=usage,
        )

    # -- the server ---------------------------------------------------------------------------------

    async def _ask(
        self, path: str, body: Mapping[str, Any], config: RequestConfig, seed: int | None
    ) -> tuple[dict[str, Any], str, dict[str, int]]:
        """The first choice of the answer, the model's name and what was used."""
        common = {
            "model": self.model,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "seed": seed,
            "stop": list(config.stop) or None,
        }
        fields = {**common, **body, **self.extra_body}
        try:
            answer = await self._client.request(
                "POST", path, {name: value for name, value in fields.items() if value is not None}
            )
        except ServerError as error:
            unknown = await self._unknown_model() if error.status == 404 else None
            raise (unknown or self._explained(error)) from error
        choice = self._read(path, answer, _choice)
        usage = answer.get("usage")
        counts = {k: v for k, v in usage.items() if type(v) is int} if isinstance(usage, dict) else {}
        return choice, str(answer.get("model", self.model)), counts

    def _read(self, path: str, answer: Any, read: Callable[[Any], _T]) -> _T:
        """Take from an answer what is needed."""
        url = self._client.base_url + path
        try:
            return read(answer)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            problem = str(error) if type(error) is ValueError else repr(error)
            shown = f"{answer!r:.300}"
            raise ServerError(f"{url} answered in an unexpected form ({problem}): {shown}", url=url) from error

    async def _models(self) -> dict[str, int | None]:
        """What the server serves, with context lengths where it says them."""
        answer = await self._client.request("GET", "/models")
        return self._read("/models", answer, lambda a: {card["id"]: card.get("max_model_len") for card in a["data"]})

    async def _unknown_model(self) -> ServerError | None:
        """Whether that is what the server has not found."""
        try:
            models = await self._models()
        except ServerError:
            return None  # it does not say; perhaps nothing is where base_url is
        return None if self.model in models else self._no_such_model(models)

    def _explained(self, error: ServerError) -> Exception:
        """The same failure with its remedy."""
        if error.status in (400, 413, 422) and _OVERFLOW.search(error.text):
            return ContextOverflowError(str(error))
        remedy = ""
        if error.status in (401, 403):
            remedy = "; is api_key (or the variable of api_key_variable) the right one?"
        elif error.status == 404:
            remedy = "; is base_url right? It is what the paths /models and /chat/completions follow"
        elif error.status is None and not isinstance(error, TimeoutError):
            remedy = "; is the server running, and base_url right?"
        return type(error)(f"{error}{remedy}", url=error.url, status=error.status, text=error.text)

    def _no_such_model(self, models: Mapping[str, object]) -> ServerError:
        url = self._client.base_url
        return ServerError(f"{url} serves no model {self.model!r}; it has {', '.join(sorted(models))}", url=url)


def _choice(answer: Any) -> dict[str, Any]:
    choice: dict[str, Any] = answer["choices"][0]
    if choice["finish_reason"] not in ("stop", "length"):
        raise ValueError(f"the completion ended with {choice['finish_reason']!r}, which is neither 'stop' nor 'length'")
    return choice


def _tokens(choice: dict[str, Any], prompt: Prompt, *, wants_logprobs: bool) -> tuple[list[int], list[float] | None]:
    """The ids that were sampled, and their log-probabilities if they were asked for."""
    ids = choice.get("token_ids")
    if ids is None:
        raise ValueError(
            "there are no token_ids: this is no vLLM server that knows return_token_ids, which exact tokens need; "
            "without a tokenizer the engine takes text from any server"
        )
    if not all(type(token) is int for token in ids):
        raise ValueError("token_ids are no whole numbers")
    if choice.get("prompt_token_ids") not in (None, prompt):
        raise ValueError("it sampled from another prompt than it was sent")
    if not wants_logprobs:
        return list(ids), None
    logprobs = [float(value) for value in choice["logprobs"]["token_logprobs"]]
    if len(logprobs) != len(ids) or not all(map(math.isfinite, logprobs)):
        raise ValueError(f"there are {len(logprobs)} log-probabilities for {len(ids)} tokens, or some are not finite")
    return list(ids), logprobs


def _text(choice: dict[str, Any]) -> str:
    content = choice["message"]["content"]
    if content is not None and not isinstance(content, str):
        raise ValueError("the content is no text")
    return content or ""  # None: it was cut while it was thinking


def _checked_key(key: str | None, variable: str | None) -> str | None:
    """The key, or the one in a variable; never shown."""
    if variable is not None:
        if key is not None:
            raise ValueError("give api_key or api_key_variable, not both")
        key = os.environ.get(variable)
        if key is None:
            raise ValueError(f"the environment has no variable {variable} (api_key_variable)")
    if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
        raise ValueError("the API key is empty or has blanks, line ends or characters that are not ASCII")
    return key
