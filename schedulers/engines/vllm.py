"""Sampling with vLLM in this process: requests join and leave its continuous batch at any time."""

from __future__ import annotations

import asyncio
import math
import os
import queue
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from schedulers.checks import check_seconds
from schedulers.engines.completions import Prompt, prompt_of, response_of, token_limit, turn_seed
from schedulers.engines.vllm_server import refuse_without_output_layer, saved_weights
from schedulers.extras import missing_extra
from schedulers.loop_thread import LoopThread
from schedulers.types import ChatCompletionResponse, RequestConfig, RolloutInferRequest

try:
    import torch
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
except ImportError as error:
    raise missing_extra("VLLMEngine needs vLLM", "vllm", "vllm", "torch", "transformers") from error

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["VLLMEngine"]


class VLLMEngine:
    """Samples with vLLM: token ids in, the very ids that were sampled out.

    Every call of ``infer_async`` is a request of its own in vLLM's continuous batch. It joins the batch between two of
    its steps and leaves it when it is complete, so a trajectory that waits for its environment holds up no other one.
    For a whole batch in one blocking call, as ``run_multi_turn`` wants it, there is ``rollout_fn_of(engine)``.

    vLLM runs in a thread of the engine's own, so the event loop stays free and any number of event loops, one after the
    other or at once, can use the same engine. Sampling defaults of the checkpoint's ``generation_config`` do not apply,
    except that its end tokens end a completion; only the ``RequestConfig`` decides how to sample.

    The weights are vLLM's copy. ``load_weights`` replaces them by a trainer's.

    A seed makes a completion repeatable: it then depends on the seed, the prompt and the weights, and on nothing else
    in the batch but the rounding of floating-point numbers.

    Args:
        llm: vLLM's ``LLM``, or an ``AsyncLLM`` that was made where no event loop was running. It is the engine's from
            then on: do not call its methods, and ``close`` shuts it down.
        tokenizer: Used instead of vLLM's.
        request_timeout: Seconds that a request may take, its wait for a place in the batch included; None is no limit.
        weights_dir: A folder that all of vLLM's workers can read, for ``load_weights``. Only several nodes need to be
            told one.

    Raises:
        TypeError: ``llm`` is of another kind.
        ValueError: The ``AsyncLLM`` belongs to an event loop already, or ``request_timeout`` is not positive.
    """

    def __init__(
        self,
        llm: LLM | AsyncLLM,
        *,
        tokenizer: Any = None,
        request_timeout: float | None = None,
        weights_dir: str | Path | None = None,
    ) -> None:
        check_seconds("request_timeout", request_timeout, none="no limit")
        self.tokenizer = llm.get_tokenizer() if tokenizer is None else tokenizer
        self.request_timeout = request_timeout
        self._driver: _StepThread | _AsyncThread
        if isinstance(llm, LLM):
            model_config = llm.llm_engine.model_config
            self._driver = _StepThread(llm.llm_engine, weights_dir)
        elif isinstance(llm, AsyncLLM):
            model_config = llm.model_config
            self._driver = _AsyncThread(llm, weights_dir)
        else:
            raise TypeError(f"VLLMEngine takes vLLM's LLM or AsyncLLM, not {llm!r}; see VLLMEngine.from_pretrained")
        self.max_model_len: int = model_config.max_model_len
        self._model: str = model_config.model
        self._vocab_size: int = model_config.get_vocab_size()

    @classmethod
    def from_pretrained(
        cls,
        model_name_or_path: str | Path,
        *,
        dtype: str = "auto",
        max_model_len: int | None = None,
        logprobs_mode: Literal["raw", "processed"] = "raw",
        asynchronous: bool = False,
        request_timeout: float | None = None,
        weights_dir: str | Path | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> VLLMEngine:
        """Start vLLM with a model and its tokenizer.

        Args:
            model_name_or_path: A folder written by ``save_pretrained``, or the name of a model on the hub.
            dtype: The type of the weights; ``"auto"`` is the checkpoint's.
            max_model_len: The most tokens of prompt and completion; by default the model's.
            logprobs_mode: ``"raw"`` log-probabilities are those of the model's own distribution; ``"processed"`` ones
                are taken of what is sampled from, after temperature, ``top_p`` and ``top_k``.
            asynchronous: Take ``AsyncLLM``, which computes in a process of its own, not ``LLM``.
            request_timeout: See the class.
            weights_dir: See the class.
            options: Further arguments of vLLM's ``EngineArgs``, such as ``{"tensor_parallel_size": 2}``.

        Raises:
            ValueError: ``logprobs_mode`` is neither.
        """
        if logprobs_mode not in ("raw", "processed"):
            raise ValueError(f"logprobs_mode must be 'raw' or 'processed', not {logprobs_mode!r}")
        arguments: dict[str, Any] = {
            "model": os.path.expanduser(model_name_or_path),
            "dtype": dtype,
            "max_model_len": max_model_len,
            "logprobs_mode": f"{logprobs_mode}_logprobs",
            **(options or {}),
        }
        if current_platform.is_cpu():
            # Of a request with a seed whose prompt came in pieces, vLLM rewinds the generator, which a CPU's cannot do.
            arguments.setdefault("enable_chunked_prefill", False)
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments)) if asynchronous else LLM(**arguments)
        return cls(llm, request_timeout=request_timeout, weights_dir=weights_dir)

    async def infer_async(self, request: RolloutInferRequest, request_config: RequestConfig) -> ChatCompletionResponse:
        """Sample one completion; see ``InferEngine``.

        The text ends before a stop string; the ids are all that were sampled. Cancelling takes the request out of
        vLLM's batch.

        Raises:
            ValueError: The prompt is empty, holds ids that the model does not know or leaves no room for a completion,
                or ``n`` is not 1.
            TimeoutError: It took longer than ``request_timeout``.
            FloatingPointError: The weights are not finite.
        """
        prompt = prompt_of(request, self.tokenizer, vocab_size=self._vocab_size)
        limit = token_limit(prompt, request_config, max_model_len=self.max_model_len)
        sampled = self._driver.sample(prompt, _sampling_params(request_config, prompt, limit))
        try:
            output = await asyncio.wait_for(sampled, self.request_timeout)
        except asyncio.TimeoutError:
            raise TimeoutError(
                f"trajectory {request.uuid}: vLLM gave no completion within request_timeout={self.request_timeout} s"
            ) from None
        completion = output.outputs[0]
        if completion.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"trajectory {request.uuid}: vLLM ended the request with {completion.finish_reason!r}")
        ids = list(completion.token_ids)
        return response_of(
            prompt,
            ids,
            _logprobs(completion.logprobs, ids) if request_config.logprobs else None,
            finish_reason=completion.finish_reason,
            stop=request_config.stop,
            tokenizer=self.tokenizer,
            model=self._model,
        )

    def load_weights(self, weights: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Replace the model's weights, and forget what was computed with the old ones. Blocks until it is done.

        Args:
            weights: All tensors by the names of the checkpoint: ``model.state_dict()``. Not ``named_parameters()``,
                which leaves out an output layer that shares the embedding's weights; vLLM may hold a copy of it.

        Raises:
            ValueError: The output layer is missing, or vLLM knows no such weight.
            RuntimeError: Something is being sampled.
        """
        tensors = dict(weights)
        refuse_without_output_layer(tensors)
        self._driver.load_weights(tensors)

    def close(self) -> None:
        """Cancel what is being sampled and shut vLLM down."""
        self._driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _sampling_params(config: RequestConfig, prompt: Prompt, limit: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=limit,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        seed=turn_seed(config, prompt),
        stop=list(config.stop),
        logprobs=0 if config.logprobs else None,
        detokenize=bool(config.stop),  # the text is made of the ids at the end; only stop strings need it on the way
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _logprobs(positions: Any, ids: list[int]) -> list[float]:
    values = [position[token].logprob for position, token in zip(positions, ids, strict=True)]
    for value in values:
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the model gave its chosen token the log-probability {value}: its weights are NaN or infinite"
            )
    return values


class _StepThread:
    """Steps vLLM's synchronous engine, and is the only thread that touches it.

    Whatever is asked of the engine goes through one queue and is done between two steps, in order.
    """

    def __init__(self, engine: Any, weights_dir: str | Path | None) -> None:
        self._engine = engine
        self._weights_dir = weights_dir
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: dict[str, Future[Any]] = {}  # by vLLM's request id; the thread's own
        self._closed = False
        self._device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)
        self._thread.start()

    async def sample(self, prompt: Prompt, params: SamplingParams) -> Any:
        """Return the finished ``RequestOutput`` of vLLM."""
        _refuse_if_closed(self._closed)
        future: Future[Any] = Future()
        request_id = uuid.uuid4().hex
        self._inbox.put(partial(self._add, request_id, prompt, params, future))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._inbox.put(partial(self._abort, request_id))
            raise

    def load_weights(self, weights: dict[str, Any]) -> None:
        """Load them between two steps, while there are no requests."""
        done: Future[None] = Future()
        self._inbox.put(partial(self._load, weights, done))
        done.result()

    def close(self) -> None:
        """Cancel the requests, and end the thread and the engine."""
        if self._closed:
            return
        self._closed = True
        self._inbox.put(None)
        self._thread.join()
        for future in self._waiting.values():
            future.cancel()
        self._engine.engine_core.shutdown()

    def _run(self) -> None:
        if self._device is not None:
            torch.accelerator.set_device_index(self._device)  # each thread has a current one of its own
        while True:
            while not self._waiting or not self._inbox.empty():
                act = self._inbox.get()
                if act is None:
                    return
                act()
            self._step()

    def _add(self, request_id: str, prompt: Prompt, params: SamplingParams, future: Future[Any]) -> None:
        try:
            self._engine.add_request(request_id, TokensPrompt(prompt_token_ids=prompt), params)
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to the caller, who waits for it
            _settle(future, error=error)
        else:
            self._waiting[request_id] = future

    def _abort(self, request_id: str) -> None:
        if self._waiting.pop(request_id, None) is not None:
            self._engine.abort_request([request_id])

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:  # noqa: BLE001 - it belongs to the callers, each of whom waits for it
            failed, self._waiting = self._waiting, {}
            for future in failed.values():
                _settle(future, error=error)
            self._engine.abort_request(list(failed))
            return
        for output in outputs:
            if output.finished and output.request_id in self._waiting:
                _settle(self._waiting.pop(output.request_id), output)

    def _load(self, weights: dict[str, Any], done: Future[None]) -> None:
        try:
            _refuse_while_sampling(len(self._waiting))
            if isinstance(getattr(self._engine, "model_executor", None), UniProcExecutor):
                arguments = {"weights_iterator": ((name, tensor.detach()) for name, tensor in weights.items())}
                self._engine.collective_rpc("reload_weights", kwargs=arguments)
            else:
                with saved_weights(weights, self._weights_dir) as folder:
                    self._engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})
            _check_reset(self._engine.reset_prefix_cache())
        except Exception as error:  # noqa: BLE001 - as above
            _settle(done, error=error)
        else:
            _settle(done)


class _AsyncThread:
    """Runs vLLM's asynchronous engine in an event loop of its own, since it stays with the first that it meets."""

    def __init__(self, llm: AsyncLLM, weights_dir: str | Path | None) -> None:
        if llm.output_handler is not None:
            raise ValueError(
                "this AsyncLLM belongs to the event loop in which it was made; make it where no event loop is running, "
                "or with VLLMEngine.from_pretrained(…, asynchronous=True)"
            )
        self._llm = llm
        self._weights_dir = weights_dir
        self._requests = 0  # the loop's own
        self._closed = False
        self._loop = LoopThread("vllm-engine")

    async def sample(self, prompt: Prompt, params: SamplingParams) -> Any:
        """Return the finished ``RequestOutput`` of vLLM."""
        _refuse_if_closed(self._closed)
        return await self._loop.call(self._sample(prompt, params))

    def load_weights(self, weights: dict[str, Any]) -> None:
        """Load them while there are no requests."""
        with saved_weights(weights, self._weights_dir) as folder:
            self._loop.run(self._load(folder))

    def close(self) -> None:
        """Cancel the requests, and end the loop and the engine."""
        if not self._closed:
            self._closed = True
            self._loop.run(self._shut_down())
            self._loop.close()

    async def _sample(self, prompt: Prompt, params: SamplingParams) -> Any:
        self._requests += 1
        try:
            outputs = self._llm.generate(TokensPrompt(prompt_token_ids=prompt), params, uuid.uuid4().hex)
            return [output async for output in outputs][-1]  # there is one, FINAL_ONLY
        finally:
            self._requests -= 1

    async def _shut_down(self) -> None:
        self._llm.shutdown()
        rest = asyncio.all_tasks() - {asyncio.current_task()}  # requests, and vLLM's own
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _load(self, folder: str) -> None:
        _refuse_while_sampling(self._requests)
        await self._llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        _check_reset(await self._llm.reset_prefix_cache())


def _refuse_if_closed(closed: bool) -> None:
    if closed:
        raise RuntimeError("this VLLMEngine is closed")


def _refuse_while_sampling(requests: int) -> None:
    if requests:
        raise RuntimeError(f"load_weights was called while {requests} requests are sampled; await or cancel them first")


def _check_reset(was_reset: bool) -> None:
    if not was_reset:
        raise RuntimeError("vLLM did not forget its prefix cache, which belongs to the old weights")


def _settle(future: Future[Any], result: Any = None, *, error: Exception | None = None) -> None:
    """Tell a caller, unless it has been cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
