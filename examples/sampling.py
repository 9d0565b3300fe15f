"""What samples the games of training in place of the trained model itself: vLLM, in this process or as a server."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from schedulers import InferEngine, RequestConfig, RolloutInferRequest
from schedulers.commands.names import WrongUse
from schedulers.engines.vllm_server import VLLMServerWeights

if TYPE_CHECKING:
    from examples.training import Settings
    from schedulers.engines.openai import OpenAIEngine

__all__ = ["Sampler", "sampler"]

_TRIAL_TIMEOUT = 60.0


@dataclass(frozen=True)
class Sampler:
    """An engine that has a copy of the model's weights.

    Args:
        engine: Samples.
        load_weights: Brings the copy into step with the trainer.
    """

    engine: InferEngine
    load_weights: Callable[[Mapping[str, Any]], None]


@contextlib.contextmanager
def sampler(settings: Settings, model: Any, tokenizer: Any) -> Iterator[Sampler | None]:
    """What ``--use-vllm`` and ``--vllm-server`` ask for; None when the model samples itself.

    Raises:
        WrongUse: It does not start, or the server is not what training needs.
    """
    if settings.vllm_server is not None:
        with _server(settings, settings.vllm_server, model, tokenizer) as found:
            yield found
    elif settings.use_vllm:
        with _in_process(settings) as engine:
            yield Sampler(engine, engine.load_weights)
    else:
        yield None


def _in_process(settings: Settings) -> Any:
    import torch

    # In this process, which starts in seconds and takes new weights without a file; read when vLLM is imported.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        from schedulers.engines.vllm import VLLMEngine
    except ImportError as error:
        raise WrongUse(f"--use-vllm: {error}") from error
    # Beside the trainer on one device: its own defaults would take nearly all of the memory.
    gpu = torch.cuda.is_available()
    defaults = {"gpu_memory_utilization": 0.4} if gpu else {"enforce_eager": True, "kv_cache_memory_bytes": 2**30}
    try:
        return VLLMEngine.from_pretrained(
            settings.model, dtype="auto" if gpu else "float32", options={**defaults, **settings.vllm}
        )
    except (OSError, TypeError, ValueError, RuntimeError) as error:
        raise WrongUse(f"--use-vllm: vLLM does not start with {settings.model}: {error}") from error


@contextlib.contextmanager
def _server(settings: Settings, url: str, model: Any, tokenizer: Any) -> Iterator[Sampler]:
    """Ask the server for a token with its id, and give it the weights once, so that what is wrong shows now."""
    try:
        from schedulers.engines.openai import OpenAIEngine
    except ImportError as error:
        raise WrongUse(f"--vllm-server: {error}") from error
    with _explained(settings):
        weights = VLLMServerWeights(url, weights_dir=settings.vllm_weights_dir)
        make = partial(OpenAIEngine, f"{weights.base_url}/v1", weights.served_model(), tokenizer=tokenizer)
        asyncio.run(_sample_a_token(make(max_retries=0, total_timeout=_TRIAL_TIMEOUT)))
        weights.load_weights(model.state_dict())

    def load_weights(new: Mapping[str, Any]) -> None:
        with _explained(settings):
            weights.load_weights(new)

    engine = make(max_concurrency=settings.games_per_step)
    try:
        yield Sampler(engine, load_weights)
    finally:
        asyncio.run(engine.aclose())


async def _sample_a_token(engine: OpenAIEngine) -> None:
    async with engine:
        request = RolloutInferRequest([{"role": "user", "content": "Play"}])
        await engine.infer_async(request, RequestConfig(max_tokens=1))


@contextlib.contextmanager
def _explained(settings: Settings) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise WrongUse(
            f"--vllm-server {settings.vllm_server}: {error}. Training needs a server of its own, which holds "
            f"{settings.model} and can read --vllm-weights-dir: VLLM_SERVER_DEV_MODE=1 python -m "
            f"vllm.entrypoints.openai.api_server --model {settings.model} (docs/how-to/use-vllm.md)"
        ) from error
