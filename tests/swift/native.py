"""ms-swift without a model: its requests, its two loops, and an engine that says what it is told."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    UsageInfo,
)
from swift.model import get_processor
from swift.rollout import invoke_async_hook, run_multi_turn
from swift.template import get_template
from swift.utils import import_external_file

ROOT = Path(__file__).parents[2]
POLICY = ROOT / "examples" / "sudoku" / "policy"
PLUGIN = ROOT / "examples" / "sudoku" / "swift_plugin.py"
TEMPLATE_PLUGIN = Path(__file__).with_name("policy_template.py")

Reply: TypeAlias = str | BaseException | ChatCompletionResponseChoice
Script: TypeAlias = Sequence[Reply] | Callable[[RolloutInferRequest, int], Reply]


def template_of(model: Path) -> Any:
    import_external_file(str(TEMPLATE_PLUGIN))
    return get_template(get_processor(str(model), model_type="llama"), template_type="sudoku_policy")


def row(base_url: str, seed: int = 0) -> dict[str, Any]:
    return {"env_config": {"name": "openenv", "base_url": base_url, "reset_kwargs": {"seed": seed}}}


def requests_of(rows: Sequence[dict[str, Any]]) -> list[RolloutInferRequest]:
    """Requests as the trainer makes them."""
    return [
        RolloutInferRequest(messages=[{"role": "user", "content": "Play"}], data_dict=dict(r), uuid=uuid.uuid4().hex)
        for r in rows
    ]


@dataclass
class NativeEngine:
    """Answers from a script, by the number of answers in the request; ids are the tokenizer's, with the end token.

    Args:
        template: ms-swift's.
        script: Replies by turn, or a function of the request and the turn.
        max_model_len: The context length.
        prompts: What was sampled from, as token ids, in order.
        seen: Copies of the requests.
    """

    template: Any
    script: Script
    max_model_len: int = 8192
    prompts: list[list[int]] = field(default_factory=list)
    seen: list[RolloutInferRequest] = field(default_factory=list)

    @property
    def tokenizer(self) -> Any:
        return self.template.tokenizer

    @property
    def engine(self) -> Any:
        return self

    def answer(self, request: RolloutInferRequest) -> ChatCompletionResponse:
        self.template.set_mode("vllm")
        self.prompts.append(self.template.encode(request)["input_ids"])
        turn = sum(message["role"] == "assistant" for message in request.messages)
        reply = self.script(request, turn) if callable(self.script) else self.script[turn]
        if isinstance(reply, BaseException):
            raise reply
        choice = self._speak(reply) if isinstance(reply, str) else reply
        return ChatCompletionResponse("scripted", [choice], UsageInfo(0, 0, 0), id=request.uuid)

    def _speak(self, text: str) -> ChatCompletionResponseChoice:
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        logprobs = {"content": [{"logprob": -token_id / 1000} for token_id in ids]}
        return ChatCompletionResponseChoice(0, ChatMessage("assistant", text), "stop", logprobs, ids)

    def rollout(self, requests: list[RolloutInferRequest], config: RequestConfig) -> list[RolloutOutput]:
        """A turn of a batch, as the trainer samples it."""
        return [RolloutOutput(response=self.answer(request)) for request in requests]

    async def infer_async(
        self, request: RolloutInferRequest, config: RequestConfig, **_: Any
    ) -> ChatCompletionResponse:
        """A turn of one trajectory, as the rollout server samples it."""
        await asyncio.sleep(0)
        return self.answer(request)

    async def _batch_infer_stream(self, tasks: Any, stream: bool, use_tqdm: bool, metrics: Any) -> list[Any]:
        """As vLLM's engine of ms-swift does it: the first exception is that of the batch."""
        return list(await asyncio.gather(*tasks))


def colocate(
    scheduler: Any, requests: list[RolloutInferRequest], engine: NativeEngine, max_turns: int | None = None
) -> list[RolloutOutput]:
    """What the trainer does with a batch."""
    config = RequestConfig()
    invoke_async_hook(scheduler.on_trajectory_start(requests))
    first = engine.rollout(requests, config)
    outputs: list[RolloutOutput] = run_multi_turn(requests, first, scheduler, engine.rollout, config, max_turns)
    return outputs


async def serve(scheduler: Any, requests: Sequence[Any]) -> list[RolloutOutput]:
    """What the rollout server does with a batch."""
    outputs: list[RolloutOutput] = await scheduler.async_infer(list(requests), RequestConfig())
    return outputs


def server(scheduler: Any, requests: Sequence[Any]) -> list[RolloutOutput]:
    """The same, from outside of an event loop."""
    return asyncio.run(serve(scheduler, requests))
