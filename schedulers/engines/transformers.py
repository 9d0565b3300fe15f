"""Sampling from a Hugging Face model in this process, concurrent requests batched into one ``generate`` call."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from schedulers.checks import check_whole
from schedulers.engines.completions import prompt_of, response_of, token_limit, turn_seed
from schedulers.extras import missing_extra
from schedulers.types import ChatCompletionResponse, RequestConfig, RolloutInferRequest

try:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
except ImportError as error:
    raise missing_extra("TransformersEngine needs torch and transformers", "train", "torch", "transformers") from error

__all__ = ["TransformersEngine"]


class TransformersEngine:
    """Samples from a causal language model of transformers: token ids in, the very ids that were sampled out.

    Requests that run concurrently share ``generate`` calls. The rule has no clock in it: when nothing is being
    sampled, a request waits for as long as each pass of the event loop brings further requests, and then all of them
    start; while a batch is being sampled, requests collect, and all that did start when it ends. They are split by
    temperature, ``top_p`` and ``top_k``, sorted by length and cut into batches of ``max_batch_size``.

    Sampling runs in one thread of the engine's own, so the event loop stays free and any number of event loops, one
    after the other or at once, can use the same engine. The model is in evaluation mode while it samples and as it
    was afterwards. Its ``generation_config`` is not applied, except that its end tokens end a completion; only the
    ``RequestConfig`` decides how to sample.

    The model may be the one that a trainer is training: there are no copies of its weights, so they are always in step.
    Do not train and sample at the same time.

    A seed makes a completion repeatable: it then depends on the seed, the prompt and the weights, and on nothing else
    in the batch but the rounding of floating-point numbers. Trajectories that are to differ though they begin with the
    same prompt need seeds of their own, or none.

    Args:
        model: A causal language model, bare or wrapped by PEFT.
        tokenizer: Its tokenizer.
        max_batch_size: The most rows of one ``generate`` call.
        logprobs_mode: ``"raw"`` log-probabilities are those of the model's own distribution; ``"processed"`` ones are
            taken after the temperature, as trainers compute theirs. Neither is changed by ``top_p`` or ``top_k``.
        max_model_len: The most tokens of prompt and completion; by default what the model's configuration says, None
            if it says nothing.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_batch_size: int = 32,
        logprobs_mode: Literal["raw", "processed"] = "raw",
        max_model_len: int | None = None,
    ) -> None:
        check_whole("max_batch_size", max_batch_size, least=1)
        check_whole("max_model_len", max_model_len, least=2, none="the model's own")
        if logprobs_mode not in ("raw", "processed"):
            raise ValueError(f"logprobs_mode must be 'raw' or 'processed', not {logprobs_mode!r}")
        config = model.config.get_text_config()
        self.model = model
        self.tokenizer = tokenizer
        self.max_batch_size = max_batch_size
        self.logprobs_mode = logprobs_mode
        self.max_model_len: int | None = max_model_len or getattr(config, "max_position_embeddings", None)
        self._vocab_size: int = config.vocab_size
        self._end_ids = _end_ids(model, tokenizer)
        self._lock = threading.Lock()
        self._waiting: list[_Row] = []
        self._sampling = False
        # One thread for good, not one a batch: torch keeps a team of compute threads for each thread that calls it.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="transformers-engine")

    @classmethod
    def from_pretrained(
        cls,
        model_name_or_path: str | Path,
        *,
        dtype: Any = "auto",
        device: str | None = None,
        max_batch_size: int = 32,
        logprobs_mode: Literal["raw", "processed"] = "raw",
        max_model_len: int | None = None,
    ) -> TransformersEngine:
        """Load a model and its tokenizer.

        Args:
            model_name_or_path: A folder written by ``save_pretrained``, or the name of a model on the hub.
            dtype: The type of the weights; ``"auto"`` is the checkpoint's.
            device: Where to put them; by default the first GPU if there is one, else the CPU.
            max_batch_size: See the class.
            logprobs_mode: See the class.
            max_model_len: See the class.

        Raises:
            OSError: There is no such model.
        """
        name = os.path.expanduser(model_name_or_path)
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
            model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        except (OSError, ValueError) as error:
            raise OSError(
                f"cannot load a causal language model from {str(model_name_or_path)!r}. Pass the folder of a saved "
                "model (with config.json, weights and tokenizer files) or the name of a model on the Hugging Face hub, "
                f"such as 'HuggingFaceTB/SmolLM2-135M-Instruct'. What went wrong: {error}"
            ) from error
        model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        return cls(
            model.eval(),
            tokenizer,
            max_batch_size=max_batch_size,
            logprobs_mode=logprobs_mode,
            max_model_len=max_model_len,
        )

    async def infer_async(self, request: RolloutInferRequest, request_config: RequestConfig) -> ChatCompletionResponse:
        """Sample one completion; see ``InferEngine``.

        The text ends before a stop string; the ids are all that were sampled. Cancelling takes the request out of its
        batch and leaves the others alone.

        Raises:
            ValueError: The prompt is empty, holds ids that the model does not know or leaves no room for a completion;
                ``n`` is not 1; there is neither ``max_tokens`` nor a context length.
        """
        row = self._row(request, request_config)
        try:
            with self._lock:
                self._waiting.append(row)
            await self._until_no_more_arrive()
            self._start()
            await asyncio.wrap_future(row.sampled)
        except asyncio.CancelledError:
            row.abandoned = True
            raise
        return self._response(row)

    def _row(self, request: RolloutInferRequest, config: RequestConfig) -> _Row:
        prompt = prompt_of(request, self.tokenizer, vocab_size=self._vocab_size)
        return _Row(prompt, token_limit(prompt, config, max_model_len=self.max_model_len), config)

    async def _until_no_more_arrive(self) -> None:
        seen = 0
        while len(self._waiting) > seen:
            seen = len(self._waiting)
            await asyncio.sleep(0)

    def _start(self) -> None:
        with self._lock:
            if self._sampling:
                return  # the thread takes what waits when it has finished its batches
            self._sampling = True
        self._executor.submit(self._sample_all)

    def _sample_all(self) -> None:
        while True:
            with self._lock:
                rows, self._waiting = self._waiting, []
                if not rows:
                    self._sampling = False
                    return
            for batch in self._batches(rows):
                self._sample(batch)

    def _batches(self, rows: list[_Row]) -> Iterator[list[_Row]]:
        groups: dict[tuple[float, float, int], list[_Row]] = {}
        for row in rows:
            groups.setdefault((row.config.temperature, row.config.top_p, row.config.top_k), []).append(row)
        for group in groups.values():
            group.sort(key=lambda row: len(row.prompt))  # neighbours of like length need the least padding
            batch: list[_Row] = []
            for row in group:
                if batch and (len(batch) == self.max_batch_size or not self._fits([*batch, row])):
                    yield batch
                    batch = []
                batch.append(row)
            yield batch

    def _fits(self, batch: list[_Row]) -> bool:
        """Whether the padded prompts and the longest completion stay within the context."""
        longest = max(len(row.prompt) for row in batch) + max(row.max_tokens for row in batch)
        return self.max_model_len is None or longest <= self.max_model_len

    def _sample(self, batch: list[_Row]) -> None:
        batch = [row for row in batch if row.sampled.set_running_or_notify_cancel() and not row.abandoned]
        if not batch:
            return
        try:
            self._generate(batch)
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to the callers, each of whom waits for it
            for row in batch:
                row.sampled.set_exception(error)
        else:
            for row in batch:
                row.sampled.set_result(None)

    def _generate(self, batch: list[_Row]) -> None:
        device = self.model.device
        width = max(len(row.prompt) for row in batch)
        pad_id = self._pad_id
        ids = torch.tensor([[pad_id] * (width - len(row.prompt)) + row.prompt for row in batch], device=device)
        mask = torch.tensor([[0] * (width - len(row.prompt)) + [1] * len(row.prompt) for row in batch], device=device)
        sampler = _Sampler(
            batch,
            tokenizer=self.tokenizer,
            end_ids=self._end_ids,
            pad_id=pad_id,
            processed=self.logprobs_mode == "processed",
            device=device,
        )
        # no_grad, not inference_mode: what a model caches on the way must stay usable when it is trained.
        with torch.no_grad(), _sampling_mode(self.model):
            self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=GenerationConfig(
                    max_new_tokens=max(row.max_tokens for row in batch), do_sample=False, pad_token_id=pad_id
                ),
                logits_processor=[sampler],
                stopping_criteria=[sampler.finished],
            )

    @property
    def _pad_id(self) -> int:
        pad_id: int | None = self.tokenizer.pad_token_id
        return min(self._end_ids, default=0) if pad_id is None else pad_id

    def _response(self, row: _Row) -> ChatCompletionResponse:
        return response_of(
            row.prompt,
            row.ids,
            row.logprobs if row.config.logprobs else None,
            finish_reason=row.finish_reason or "length",
            stop=row.config.stop,
            tokenizer=self.tokenizer,
            model=self.model.config.name_or_path,
        )


@dataclass
class _Row:
    """One request in a batch, and what has been sampled for it."""

    prompt: list[int]
    max_tokens: int
    config: RequestConfig
    sampled: Future[None] = field(default_factory=Future)
    abandoned: bool = False
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None

    def generator(self, device: Any) -> Any:
        """A generator of the row's own, or None without a seed."""
        seed = turn_seed(self.config, self.prompt)
        return None if seed is None else torch.Generator(device).manual_seed(seed)


class _Sampler:
    """Chooses the tokens.

    ``generate`` runs the model and its cache. This object, its logits processor, samples, notes the exact ids and
    log-probabilities, and leaves ``generate`` a distribution with the chosen token only. That is the one place that
    sees the logits of the same pass without keeping those of every step in memory.
    """

    def __init__(
        self,
        batch: Sequence[_Row],
        *,
        tokenizer: Any,
        end_ids: frozenset[int],
        pad_id: int,
        processed: bool,
        device: Any,
    ) -> None:
        self.batch = batch
        self.tokenizer = tokenizer
        self.end_ids = end_ids
        self.pad_id = pad_id
        self.processed = processed
        self.generators = [row.generator(device) for row in batch]

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Sample the next token of each row; ``scores`` are its logits, shape (rows, vocabulary)."""
        tokens, logprobs = self._sample(scores.float())
        chosen = tokens.tolist()
        for index, (row, token, logprob) in enumerate(zip(self.batch, chosen, logprobs.tolist(), strict=True)):
            if row.finish_reason is None:
                self._accept(row, token, logprob)
            else:
                chosen[index] = self.pad_id
        only_chosen = torch.full_like(scores, -torch.inf)
        return only_chosen.scatter_(1, torch.tensor(chosen, device=scores.device)[:, None], 0.0)

    def finished(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Which rows are complete; the stopping criterion of ``generate``, which passes more than is needed."""
        done = [row.finish_reason is not None or row.abandoned for row in self.batch]
        return torch.tensor(done, device=input_ids.device)

    def _accept(self, row: _Row, token: int, logprob: float) -> None:
        if not logprob > -torch.inf:  # also true of NaN
            raise FloatingPointError(
                f"the model gave its chosen token the log-probability {logprob}: its weights are NaN or infinite"
            )
        row.ids.append(token)
        row.logprobs.append(logprob)
        if token in self.end_ids or self._has_stop(row):
            row.finish_reason = "stop"
        elif len(row.ids) >= row.max_tokens:
            row.finish_reason = "length"

    def _has_stop(self, row: _Row) -> bool:
        if not row.config.stop:
            return False
        text = self.tokenizer.decode(row.ids, skip_special_tokens=True)
        return any(stop in text for stop in row.config.stop)

    def _sample(self, logits: Any) -> tuple[Any, Any]:
        config = self.batch[0].config  # rows of a batch agree in what is read here
        greedy = config.temperature == 0
        tempered = logits if greedy else logits / config.temperature
        if greedy:
            tokens = logits.argmax(-1)
        else:
            # The largest of logit + Gumbel noise is a sample of the softmax, and each row can have noise of its own.
            tokens = (_keep_likeliest(tempered, config.top_k, config.top_p) + self._gumbel(tempered)).argmax(-1)
        logprobs = (tempered if self.processed else logits).log_softmax(-1)
        return tokens, logprobs.gather(1, tokens[:, None])[:, 0]

    def _gumbel(self, logits: Any) -> Any:
        noise = torch.empty_like(logits)
        if any(self.generators):
            for row, generator in zip(noise, self.generators, strict=True):
                row.exponential_(generator=generator)
        else:
            noise.exponential_()
        return -noise.clamp_(min=torch.finfo(noise.dtype).tiny).log()


def _keep_likeliest(logits: Any, top_k: int, top_p: float) -> Any:
    """All but the ``top_k`` likeliest, and of these all beyond the share ``top_p``, at minus infinity."""
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        shares = ordered.softmax(-1)
        beyond = shares.cumsum(-1) - shares >= top_p  # the share before this token suffices; the likeliest always stays
        logits = logits.masked_fill(beyond.scatter(1, order, beyond), -torch.inf)
    return logits


@contextmanager
def _sampling_mode(model: Any) -> Iterator[None]:
    """Evaluation mode and no defaults of the checkpoint's; everything is put back afterwards, module by module."""
    training = [module for module in model.modules() if module.training]
    # PEFT hands its own generation_config down to the model that it wraps.
    owners = [model, model.get_base_model()] if hasattr(model, "get_base_model") else [model]
    configs = [owner.generation_config for owner in owners]
    model.eval()
    for owner in owners:
        owner.generation_config = GenerationConfig()
    try:
        yield
    finally:
        for owner, config in zip(owners, configs, strict=True):
            owner.generation_config = config
        for module in training:
            module.training = True


def _end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """What ends a completion: chat models often have an end of turn beside the tokenizer's end of text."""
    ids = model.generation_config.eos_token_id
    several = ids if isinstance(ids, (list, tuple)) else [ids]
    return frozenset(id_ for id_ in (*several, tokenizer.eos_token_id) if id_ is not None)
