from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams

from schedulers.engines import InferEngine
from schedulers.engines.transformers import TransformersEngine
from schedulers.engines.vllm import VLLMEngine, _AsyncThread, _StepThread
from schedulers.types import ChatCompletionResponse, RequestConfig, RolloutInferRequest
from tests.vllm.models import changed, forward, forward_logprobs

END = 1
PROMPTS = [[5 + (7 * i + j) % 400 for j in range(length)] for i, length in enumerate([3, 17, 40, 17, 1, 129, 8, 64])]
UNSURE = PROMPTS[1]  # the policy says any of many tokens after it, but an end after most others


def request(ids: list[int] | None = None, text: str = "hi") -> RolloutInferRequest:
    return RolloutInferRequest(messages=[{"role": "user", "content": text}], prompt_token_ids=ids)


async def sample_all(
    engine: InferEngine, prompts: list[list[int]], config: RequestConfig
) -> list[ChatCompletionResponse]:
    return await asyncio.gather(*(engine.infer_async(request(ids), config) for ids in prompts))


async def sample(engine: InferEngine, prompt: list[int], config: RequestConfig) -> ChatCompletionResponse:
    return (await sample_all(engine, [prompt], config))[0]


def ids_of(response: ChatCompletionResponse) -> list[int]:
    ids = response.choices[0].token_ids
    assert ids is not None
    return ids


def logprobs_of(response: ChatCompletionResponse) -> list[float]:
    logprobs = response.choices[0].logprobs
    assert logprobs is not None
    return [item["logprob"] for item in logprobs["content"]]


@pytest.fixture
def model(bpe_policy: tuple[Path, Any, Any]) -> Any:
    return bpe_policy[1]


@pytest.fixture
def tokenizer(bpe_policy: tuple[Path, Any, Any]) -> Any:
    return bpe_policy[2]


@pytest.fixture
def says_anything(engine: VLLMEngine, model: Any) -> Iterator[VLLMEngine]:
    """All tokens are equally likely, and the likeliest, the first, never ends a completion."""
    engine.load_weights({name: torch.zeros_like(weight) for name, weight in model.state_dict().items()})
    yield engine
    engine.load_weights(model.state_dict())


async def endless(engine: VLLMEngine) -> asyncio.Future[Any]:
    """64 requests of thousands of tokens, all of them in vLLM's hands."""
    tasks = asyncio.ensure_future(sample_all(engine, [[7, 8]] * 64, RequestConfig(temperature=0)))
    while unfinished(engine) < 64:  # noqa: ASYNC110 - vLLM has no event to wait for
        await asyncio.sleep(0)
    return tasks


def unfinished(engine: VLLMEngine) -> int:
    """How many requests vLLM has."""
    driver = engine._driver
    vllm = driver._llm if isinstance(driver, _AsyncThread) else driver._engine
    number: int = vllm.output_processor.get_num_unfinished_requests()
    return number


def test_it_is_an_engine(engine: VLLMEngine) -> None:
    assert isinstance(engine, InferEngine)
    assert engine.max_model_len == 4096


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_raw_log_probabilities_are_those_of_a_forward_pass(
    engine: VLLMEngine, model: Any, temperature: float
) -> None:
    config = RequestConfig(max_tokens=12, temperature=temperature, top_p=0.9, top_k=50)
    for prompt, response in zip(PROMPTS, await sample_all(engine, PROMPTS, config), strict=True):
        assert response.prompt_token_ids == prompt
        expected = forward_logprobs(model, prompt, ids_of(response))
        assert logprobs_of(response) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("narrow", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}])
async def test_greedy_sampling_takes_what_transformers_takes(
    engine: VLLMEngine, model: Any, tokenizer: Any, narrow: dict[str, Any]
) -> None:
    expected = await sample_all(
        TransformersEngine(model, tokenizer), PROMPTS, RequestConfig(max_tokens=12, temperature=0)
    )
    responses = await sample_all(engine, PROMPTS, RequestConfig(max_tokens=12, **narrow))
    assert [ids_of(r) for r in responses] == [ids_of(r) for r in expected]
    assert [r.choices[0].message for r in responses] == [r.choices[0].message for r in expected]
    assert [r.choices[0].finish_reason for r in responses] == [r.choices[0].finish_reason for r in expected]
    assert [r.usage for r in responses] == [r.usage for r in expected]


async def test_top_k_and_top_p_keep_only_the_likeliest_tokens(batched: VLLMEngine, model: Any) -> None:
    probabilities = forward(model, UNSURE)[-1].exp().sort(descending=True)
    share = float(probabilities.values[:3].sum()) - 1e-4  # reached by the third token, not by the second
    for narrow in ({"top_k": 3}, {"top_p": share}):
        drawn = await sample_all(batched, [UNSURE] * 256, RequestConfig(max_tokens=1, **narrow))
        assert {ids_of(r)[0] for r in drawn} == set(probabilities.indices[:3].tolist())


async def test_a_seed_repeats_a_completion_whatever_else_is_in_the_batch(engine: VLLMEngine) -> None:
    seeded = RequestConfig(max_tokens=20, seed=7)
    alone = await sample(engine, UNSURE, seeded)
    among = await asyncio.gather(
        *(engine.infer_async(request(ids), RequestConfig(max_tokens=10)) for ids in PROMPTS[3:]),
        engine.infer_async(request(UNSURE), seeded),
    )
    assert ids_of(among[-1]) == ids_of(alone)
    others = [await sample(engine, UNSURE, RequestConfig(max_tokens=20, seed=seed)) for seed in (8, 9, 10)]
    assert any(ids_of(other) != ids_of(alone) for other in others)


async def test_a_completion_ends_with_the_end_token_it_sampled(engine: VLLMEngine, tokenizer: Any) -> None:
    responses = await sample_all(engine, PROMPTS * 4, RequestConfig(max_tokens=200))
    finished = [r.choices[0] for r in responses if r.choices[0].finish_reason == "stop"]
    assert finished
    for choice in finished:
        assert choice.token_ids is not None
        assert choice.token_ids.index(END) == len(choice.token_ids) - 1
        assert choice.message.content == tokenizer.decode(choice.token_ids, skip_special_tokens=True)


async def test_a_completion_is_cut_at_max_tokens(says_anything: VLLMEngine) -> None:
    for max_tokens in (1, 5):
        response = await sample(says_anything, PROMPTS[1], RequestConfig(max_tokens=max_tokens, seed=0))
        assert len(ids_of(response)) == max_tokens
        assert response.choices[0].finish_reason == "length"


async def test_without_max_tokens_a_completion_fills_the_context(says_anything: VLLMEngine) -> None:
    prompt = [9] * (says_anything.max_model_len - 3)
    response = await sample(says_anything, prompt, RequestConfig(temperature=0))
    assert ids_of(response) == [0, 0, 0]
    assert response.choices[0].finish_reason == "length"


async def test_a_stop_string_ends_the_text_before_it_and_keeps_all_ids(
    says_anything: VLLMEngine, tokenizer: Any
) -> None:
    whole = await sample(says_anything, PROMPTS[1], RequestConfig(max_tokens=20, seed=1))
    text = whole.choices[0].message.content
    stop = text[12:15]
    config = RequestConfig(max_tokens=20, seed=1, stop=("not there", stop))
    stopped = await sample(says_anything, PROMPTS[1], config)
    assert stopped.choices[0].message.content == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    ids = ids_of(stopped)
    assert ids == ids_of(whole)[: len(ids)]
    assert len(logprobs_of(stopped)) == len(ids)
    assert stop in tokenizer.decode(ids, skip_special_tokens=True)
    assert stop not in tokenizer.decode(ids[:-1], skip_special_tokens=True)


async def test_log_probabilities_are_left_out_on_request(batched: VLLMEngine) -> None:
    response = await sample(batched, [7, 8], RequestConfig(max_tokens=2, logprobs=False))
    assert response.choices[0].logprobs is None


async def test_messages_are_rendered_when_there_are_no_prompt_ids(engine: VLLMEngine, tokenizer: Any) -> None:
    response = await engine.infer_async(request(text="[1 2 3]"), RequestConfig(max_tokens=1))
    assert response.prompt_token_ids == tokenizer.encode("<user>[1 2 3]<end><assistant>", add_special_tokens=False)


@pytest.mark.parametrize(
    ("ids", "config", "message"),
    [
        ([7] * 4096, RequestConfig(max_tokens=4), "prompt of 4096 tokens leaves no room .* context of 4096"),
        ([], RequestConfig(max_tokens=4), "is empty"),
        ([5, 9999], RequestConfig(max_tokens=4), "ids from 5 to 9999, but the model knows 0 to 511"),
        ([5], RequestConfig(max_tokens=4, n=2), "n must be 1, not 2"),
    ],
)
async def test_a_request_that_cannot_be_sampled_is_refused(
    engine: VLLMEngine, ids: list[int], config: RequestConfig, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        await engine.infer_async(request(ids), config)


@pytest.mark.parametrize("engine", ["batched"], indirect=True)
async def test_a_cancelled_request_leaves_the_batch_to_the_others(
    says_anything: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = says_anything._driver
    assert isinstance(driver, _StepThread)
    stepping, proceed = threading.Event(), threading.Event()
    step = driver._engine.step

    def held() -> Any:
        stepping.set()
        assert proceed.wait(60)
        return step()

    monkeypatch.setattr(driver._engine, "step", held)
    config = RequestConfig(max_tokens=6, temperature=0)
    tasks = [asyncio.ensure_future(says_anything.infer_async(request(ids), config)) for ids in PROMPTS[:4]]
    await asyncio.to_thread(stepping.wait, 60)
    tasks[2].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[2]
    proceed.set()
    rest = await asyncio.gather(*tasks[:2], tasks[3])
    assert [ids_of(r) for r in rest] == [[0] * 6] * 3
    assert unfinished(says_anything) == 0


async def test_after_a_cancellation_nothing_is_left_in_vllm(says_anything: VLLMEngine) -> None:
    tasks = await endless(says_anything)
    tasks.cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks
    await sample(says_anything, [7], RequestConfig(max_tokens=1))
    assert unfinished(says_anything) == 0


async def test_a_request_that_takes_too_long_is_given_up(
    says_anything: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(says_anything, "request_timeout", 1e-3)
    with pytest.raises(TimeoutError, match=r"request_timeout=0\.001 s"):
        await sample(says_anything, [7, 8], RequestConfig(temperature=0))
    monkeypatch.undo()
    assert ids_of(await sample(says_anything, [7], RequestConfig(max_tokens=1)))


async def test_an_exception_of_vllm_reaches_every_caller_and_no_later_one(
    batched: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    assert isinstance(batched._driver, _StepThread)
    monkeypatch.setattr(batched._driver._engine, "step", fail)
    config = RequestConfig(max_tokens=1)
    results = await asyncio.gather(
        *(batched.infer_async(request([7]), config) for _ in range(3)), return_exceptions=True
    )
    assert [str(result) for result in results] == ["out of memory"] * 3
    monkeypatch.undo()
    assert ids_of(await sample(batched, [7], config))


def test_one_event_loop_after_the_other_can_use_an_engine(engine: VLLMEngine) -> None:
    for _ in range(2):
        responses = asyncio.run(sample_all(engine, PROMPTS, RequestConfig(max_tokens=2)))
        assert len(responses) == len(PROMPTS)


def test_event_loops_of_several_threads_can_use_an_engine_at_once(engine: VLLMEngine) -> None:
    results: list[list[list[int]]] = []

    def play() -> None:
        config = RequestConfig(max_tokens=5, temperature=0)
        results.append([ids_of(r) for r in asyncio.run(sample_all(engine, PROMPTS, config))])

    threads = [threading.Thread(target=play) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(result == results[0] for result in results)


# -- weights ---------------------------------------------------------------------------------------------


def worst(model: Any, prompt: list[int], response: ChatCompletionResponse) -> float:
    expected = forward_logprobs(model, prompt, ids_of(response))
    return max(abs(a - b) for a, b in zip(logprobs_of(response), expected, strict=True))


def test_new_weights_of_a_tied_model_are_sampled_with_at_once(engine: VLLMEngine, model: Any) -> None:
    """The output layer shares the embedding's weights, of which vLLM holds a copy; the prefix cache is of the old."""
    config = RequestConfig(max_tokens=12, temperature=0)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    prompt = PROMPTS[5]
    before = asyncio.run(sample(engine, prompt, config))
    assert worst(model, prompt, before) < 1e-4
    for seed in (1, 2):
        other = changed(model, seed)
        engine.load_weights(other.state_dict())
        after = asyncio.run(sample(engine, prompt, config))
        assert worst(other, prompt, after) < 1e-4
        assert worst(model, prompt, after) > 1e-3
    engine.load_weights(model.state_dict())
    again = asyncio.run(sample(engine, prompt, config))
    assert ids_of(again) == ids_of(before)
    assert logprobs_of(again) == pytest.approx(logprobs_of(before), abs=1e-5)


def test_weights_without_the_tied_output_layer_are_refused(engine: VLLMEngine, model: Any) -> None:
    with pytest.raises(ValueError, match=r"lack lm_head\.weight.*pass model\.state_dict\(\)"):
        engine.load_weights(model.named_parameters())


def test_weights_of_another_model_are_an_error(engine: VLLMEngine, model: Any) -> None:
    weights = {**model.state_dict(), "model.layers.0.adapter": torch.zeros(1)}
    with pytest.raises(Exception, match=r"adapter|reload_weights"):
        engine.load_weights(weights)
    engine.load_weights(model.state_dict())
    response = asyncio.run(sample(engine, PROMPTS[1], RequestConfig(max_tokens=4)))
    assert worst(model, PROMPTS[1], response) < 1e-4


async def test_weights_are_not_changed_under_a_request(says_anything: VLLMEngine, model: Any) -> None:
    tasks = await endless(says_anything)
    with pytest.raises(RuntimeError, match="while 64 requests are sampled"):
        await asyncio.to_thread(says_anything.load_weights, model.state_dict())
    tasks.cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks
    await asyncio.to_thread(says_anything.load_weights, model.state_dict())


async def test_weights_that_are_not_finite_are_an_error(batched: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with real ones: what they compute would stay in the cache of an engine that other tests use."""

    async def sampled(prompt: list[int], params: Any) -> Any:
        completion = SimpleNamespace(
            finish_reason="stop", token_ids=[3], logprobs=[{3: SimpleNamespace(logprob=float("nan"))}]
        )
        return SimpleNamespace(outputs=[completion])

    monkeypatch.setattr(batched._driver, "sample", sampled)
    with pytest.raises(FloatingPointError, match="NaN"):
        await sample(batched, [7, 8], RequestConfig(max_tokens=2))


# -- options ---------------------------------------------------------------------------------------------


def test_an_option_out_of_range_is_refused(batched: VLLMEngine) -> None:
    with pytest.raises(ValueError, match="'raw' or 'processed', not 'cooked'"):
        VLLMEngine.from_pretrained("x", logprobs_mode="cooked")  # type: ignore[arg-type]
    llm = object.__new__(LLM)
    with pytest.raises(ValueError, match="request_timeout must be above 0 seconds"):
        VLLMEngine(llm, request_timeout=0)


async def test_an_asynchronous_engine_of_a_running_event_loop_is_refused(asynchronous: VLLMEngine) -> None:
    assert isinstance(asynchronous._driver, _AsyncThread)
    await sample(asynchronous, [7], RequestConfig(max_tokens=1))
    with pytest.raises(ValueError, match="belongs to the event loop in which it was made"):
        VLLMEngine(asynchronous._driver._llm)


class StuckEngine:
    """As much of vLLM's synchronous engine as is needed; its steps never finish a request."""

    def __init__(self) -> None:
        self.engine_core = self
        self.stepping = threading.Event()
        self.is_shut_down = False

    def add_request(self, *_: Any) -> None: ...

    def step(self) -> list[Any]:
        self.stepping.set()
        return []

    def shutdown(self) -> None:
        self.is_shut_down = True


async def test_closing_ends_the_requests_and_takes_no_more() -> None:
    engine = StuckEngine()
    driver = _StepThread(engine, None)
    task = asyncio.ensure_future(driver.sample([7], SamplingParams()))
    await asyncio.to_thread(engine.stepping.wait, 60)
    await asyncio.to_thread(driver.close)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.is_shut_down
    with pytest.raises(RuntimeError, match="closed"):
        await driver.sample([7], SamplingParams())
    driver.close()
