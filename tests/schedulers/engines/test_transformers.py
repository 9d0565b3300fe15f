from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from schedulers.engines import InferEngine
from schedulers.engines.transformers import TransformersEngine
from schedulers.types import ChatCompletionResponse, RequestConfig, RolloutInferRequest
from tests.schedulers.engines.tiny_model import make_model, make_tokenizer

END = 1


@pytest.fixture
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture
def model() -> Any:
    return make_model()


@pytest.fixture
def engine(model: Any, tokenizer: Any) -> TransformersEngine:
    return TransformersEngine(model, tokenizer)


def endless(**options: Any) -> Any:
    """A model that hardly ever samples the end token."""
    model = make_model(**options)
    model.generation_config.eos_token_id = None
    return model


class Generate:
    """Stands in for ``model.generate``: notes the rows of each call and can hold or fail it."""

    def __init__(self, model: Any) -> None:
        self.rows: list[int] = []
        self.entered = threading.Event()
        self.proceed = threading.Event()
        self.proceed.set()
        self.error: Exception | None = None
        self._generate = model.generate
        model.generate = self

    def __call__(self, **kwargs: Any) -> Any:
        self.rows.append(len(kwargs["input_ids"]))
        self.entered.set()
        assert self.proceed.wait(timeout=60)
        if self.error is not None:
            raise self.error
        return self._generate(**kwargs)


async def some_passes() -> None:
    """Let the event loop run everything that is ready."""
    for _ in range(10):
        await asyncio.sleep(0)


def request(ids: list[int] | None = None, text: str = "hi") -> RolloutInferRequest:
    return RolloutInferRequest(messages=[{"role": "user", "content": text}], prompt_token_ids=ids)


async def sample_all(
    engine: TransformersEngine, prompts: list[list[int]], config: RequestConfig
) -> list[ChatCompletionResponse]:
    return await asyncio.gather(*(engine.infer_async(request(ids), config) for ids in prompts))


def ids_of(response: ChatCompletionResponse) -> list[int]:
    ids = response.choices[0].token_ids
    assert ids is not None
    return ids


def logprobs_of(response: ChatCompletionResponse) -> list[float]:
    logprobs = response.choices[0].logprobs
    assert logprobs is not None
    return [item["logprob"] for item in logprobs["content"]]


def forward_logprobs(model: Any, prompt: list[int], ids: list[int], temperature: float = 1.0) -> list[float]:
    """What a plain forward pass over prompt and completion says, without a cache, padding or a batch."""
    model.eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0].float() / temperature
    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return [float(row[id_]) for row, id_ in zip(logprobs, ids, strict=True)]


PROMPTS = [[5 + (7 * i + j) % 30 for j in range(length)] for i, length in enumerate([3, 17, 40, 17, 1, 29, 8, 64])]


def test_it_is_an_engine(engine: TransformersEngine) -> None:
    assert isinstance(engine, InferEngine)


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_raw_log_probabilities_are_those_of_a_forward_pass(
    model: Any, tokenizer: Any, rows: int, temperature: float
) -> None:
    engine = TransformersEngine(model, tokenizer)
    config = RequestConfig(max_tokens=12, temperature=temperature)
    for prompt, response in zip(PROMPTS, await sample_all(engine, PROMPTS[:rows], config), strict=False):
        assert response.prompt_token_ids == prompt
        expected = forward_logprobs(model, prompt, ids_of(response))
        assert logprobs_of(response) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        transformers.GPT2Config(vocab_size=46, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=END),
        transformers.MistralConfig(
            vocab_size=46, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, sliding_window=8, bos_token_id=None, eos_token_id=END,
        ),
        transformers.MambaConfig(vocab_size=46, hidden_size=16, num_hidden_layers=2, state_size=4, eos_token_id=END),
    ],
    ids=["absolute-positions", "sliding-window", "no-attention"],
)  # fmt: skip
async def test_padding_is_right_for_models_of_other_kinds(tokenizer: Any, config: Any) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for prompt, response in zip(
        PROMPTS,
        await sample_all(TransformersEngine(model, tokenizer), PROMPTS, RequestConfig(max_tokens=6)),
        strict=True,
    ):
        expected = forward_logprobs(model, prompt, ids_of(response))
        assert logprobs_of(response) == pytest.approx(expected, abs=1e-4)


async def test_processed_log_probabilities_are_taken_after_the_temperature(model: Any, tokenizer: Any) -> None:
    engine = TransformersEngine(model, tokenizer, logprobs_mode="processed")
    config = RequestConfig(max_tokens=12, temperature=0.5, top_k=10)
    for prompt, response in zip(PROMPTS, await sample_all(engine, PROMPTS, config), strict=True):
        expected = forward_logprobs(model, prompt, ids_of(response), temperature=0.5)
        assert logprobs_of(response) == pytest.approx(expected, abs=1e-4)


async def test_log_probabilities_stay_exact_when_prompts_grow_from_turn_to_turn(model: Any, tokenizer: Any) -> None:
    engine = TransformersEngine(model, tokenizer)
    prompts = [list(prompt) for prompt in PROMPTS]
    for turn in range(4):
        responses = await sample_all(engine, prompts, RequestConfig(max_tokens=6))
        for prompt, response in zip(prompts, responses, strict=True):
            expected = forward_logprobs(model, prompt, ids_of(response))
            assert logprobs_of(response) == pytest.approx(expected, abs=1e-4)
            prompt += [*ids_of(response), 3, 10 + turn, END, 4]


async def test_temperature_zero_is_what_generate_picks_greedily(engine: TransformersEngine, model: Any) -> None:
    config = RequestConfig(max_tokens=10, temperature=0)
    responses = await sample_all(engine, PROMPTS, config)
    for prompt, response in zip(PROMPTS, responses, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=10, do_sample=False
        )
        assert ids_of(response) == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}])
async def test_keeping_only_the_likeliest_token_is_greedy(engine: TransformersEngine, narrow: dict[str, Any]) -> None:
    greedy = await sample_all(engine, PROMPTS, RequestConfig(max_tokens=8, temperature=0))
    narrowed = await sample_all(engine, PROMPTS, RequestConfig(max_tokens=8, temperature=1.5, **narrow))
    assert [ids_of(r) for r in narrowed] == [ids_of(r) for r in greedy]


async def test_tokens_are_drawn_from_the_models_distribution(tokenizer: Any) -> None:
    model = make_model()
    engine = TransformersEngine(model, tokenizer, max_batch_size=4096)
    torch.manual_seed(1)
    drawn = await sample_all(engine, [[7, 8, 9]] * 4096, RequestConfig(max_tokens=1, temperature=2.0, top_k=5))
    counts = torch.bincount(torch.tensor([ids_of(r)[0] for r in drawn]), minlength=46) / 4096
    logits = model(torch.tensor([[7, 8, 9]])).logits[0, -1].detach() / 2.0
    kept = logits.topk(5).indices
    expected = torch.zeros(46).scatter(0, kept, logits[kept].softmax(0))
    assert set(counts.nonzero().flatten().tolist()) == set(kept.tolist())
    assert torch.allclose(counts, expected, atol=0.03)


async def test_top_p_keeps_the_fewest_tokens_that_reach_the_share(engine: TransformersEngine, model: Any) -> None:
    probabilities = model(torch.tensor([[7, 8, 9]])).logits[0, -1].detach().softmax(0).sort(descending=True)
    share = float(probabilities.values[:3].sum()) - 1e-4  # reached by the third token, not by the second
    drawn = await sample_all(engine, [[7, 8, 9]] * 512, RequestConfig(max_tokens=1, top_p=share))
    assert {ids_of(r)[0] for r in drawn} == set(probabilities.indices[:3].tolist())


async def test_a_seed_repeats_a_completion_whatever_else_is_in_the_batch(engine: TransformersEngine) -> None:
    seeded = RequestConfig(max_tokens=10, seed=7)
    alone = await sample_all(engine, [PROMPTS[2]], seeded)
    among = await asyncio.gather(
        *(engine.infer_async(request(ids), RequestConfig(max_tokens=10)) for ids in PROMPTS[3:]),
        engine.infer_async(request(PROMPTS[2]), seeded),
    )
    assert ids_of(among[-1]) == ids_of(alone[0])
    other = await sample_all(engine, [PROMPTS[2]], RequestConfig(max_tokens=10, seed=8))
    assert ids_of(other[0]) != ids_of(alone[0])


async def test_a_completion_ends_with_the_end_token_it_sampled(engine: TransformersEngine, tokenizer: Any) -> None:
    responses = await sample_all(engine, PROMPTS * 8, RequestConfig(max_tokens=200 - 64, temperature=1.5))
    finished = [r.choices[0] for r in responses if r.choices[0].finish_reason == "stop"]
    assert finished
    for choice in finished:
        assert choice.token_ids is not None
        assert choice.token_ids.index(END) == len(choice.token_ids) - 1
        assert choice.message.content == tokenizer.decode(choice.token_ids, skip_special_tokens=True)


async def test_the_checkpoints_further_end_tokens_end_a_completion(model: Any, tokenizer: Any) -> None:
    prompt = PROMPTS[1]
    engine = TransformersEngine(model, tokenizer)
    first = ids_of((await sample_all(engine, [prompt], RequestConfig(max_tokens=4, temperature=0)))[0])
    model.generation_config.eos_token_id = [END, first[1]]
    engine = TransformersEngine(model, tokenizer)
    response = (await sample_all(engine, [prompt], RequestConfig(max_tokens=4, temperature=0)))[0]
    assert ids_of(response) == first[:2]
    assert response.choices[0].finish_reason == "stop"


async def test_a_completion_is_cut_at_max_tokens(tokenizer: Any) -> None:
    engine = TransformersEngine(endless(), tokenizer)
    for max_tokens in (1, 5):
        response = (await sample_all(engine, [[7, 8]], RequestConfig(max_tokens=max_tokens, temperature=0)))[0]
        assert len(ids_of(response)) == max_tokens
        assert response.choices[0].finish_reason == "length"
        assert response.usage == {"prompt_tokens": 2, "completion_tokens": max_tokens}


async def test_rows_with_different_limits_share_a_batch(tokenizer: Any) -> None:
    model = endless()
    engine = TransformersEngine(model, tokenizer)
    generate = Generate(model)
    configs = [RequestConfig(max_tokens=limit, temperature=0) for limit in (1, 9, 4)]
    responses = await asyncio.gather(*(engine.infer_async(request([7, 8]), config) for config in configs))
    assert [len(ids_of(r)) for r in responses] == [1, 9, 4]
    assert generate.rows == [3]


async def test_without_max_tokens_a_completion_fills_the_context(tokenizer: Any) -> None:
    engine = TransformersEngine(endless(max_position_embeddings=24), tokenizer)
    assert engine.max_model_len == 24
    response = (await sample_all(engine, [[7, 8, 9]], RequestConfig(temperature=0)))[0]
    assert len(ids_of(response)) == 21


async def test_a_batch_stays_within_the_context(tokenizer: Any) -> None:
    """A long prompt and a short one with much to say are not sampled together where that would pass the context."""
    config = transformers.GPT2Config(
        vocab_size=46, n_embd=16, n_layer=1, n_head=2, n_positions=24, bos_token_id=None, eos_token_id=END
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = None
    generate = Generate(model)
    engine = TransformersEngine(model, tokenizer)
    responses = await sample_all(engine, [[7] * 20, [7, 8], [7, 8]], RequestConfig(temperature=0))
    assert [len(ids_of(response)) for response in responses] == [4, 22, 22]
    assert generate.rows == [2, 1]


async def test_a_stop_string_ends_the_text_before_it_and_keeps_all_ids(tokenizer: Any) -> None:
    engine = TransformersEngine(endless(), tokenizer)
    whole = (await sample_all(engine, [PROMPTS[1]], RequestConfig(max_tokens=12, temperature=0)))[0]
    text = whole.choices[0].message.content
    stop = text[4:6]
    cut = text.index(stop)
    config = RequestConfig(max_tokens=12, temperature=0, stop=("not there", stop))
    stopped = (await sample_all(engine, [PROMPTS[1]], config))[0]
    assert stopped.choices[0].message.content == text[:cut]
    assert stopped.choices[0].finish_reason == "stop"
    ids = ids_of(stopped)
    assert ids == ids_of(whole)[: len(ids)]
    assert stop in tokenizer.decode(ids, skip_special_tokens=True)
    assert stop not in tokenizer.decode(ids[:-1], skip_special_tokens=True)


async def test_log_probabilities_are_left_out_on_request(engine: TransformersEngine) -> None:
    response = (await sample_all(engine, [[7, 8]], RequestConfig(max_tokens=2, logprobs=False)))[0]
    assert response.choices[0].logprobs is None


async def test_messages_are_rendered_when_there_are_no_prompt_ids(engine: TransformersEngine, tokenizer: Any) -> None:
    response = await engine.infer_async(request(text="abc"), RequestConfig(max_tokens=1))
    assert response.prompt_token_ids == tokenizer.encode("<user>abc<end><assistant>", add_special_tokens=False)


async def test_concurrent_requests_share_one_generate_call(engine: TransformersEngine, model: Any) -> None:
    generate = Generate(model)
    await sample_all(engine, PROMPTS, RequestConfig(max_tokens=2))
    assert generate.rows == [8]


async def test_requests_collect_while_a_batch_is_sampled_and_the_event_loop_stays_free(
    engine: TransformersEngine, model: Any
) -> None:
    generate = Generate(model)
    generate.proceed.clear()
    config = RequestConfig(max_tokens=2)
    first = asyncio.ensure_future(engine.infer_async(request([7]), config))
    await asyncio.to_thread(generate.entered.wait, 60)
    later = [asyncio.ensure_future(engine.infer_async(request(ids), config)) for ids in PROMPTS]
    await some_passes()
    generate.proceed.set()
    await asyncio.gather(first, *later)
    assert generate.rows == [1, 8]


async def test_a_batch_has_no_more_rows_than_allowed(model: Any, tokenizer: Any) -> None:
    engine = TransformersEngine(model, tokenizer, max_batch_size=3)
    generate = Generate(model)
    responses = await sample_all(engine, PROMPTS, RequestConfig(max_tokens=2))
    assert generate.rows == [3, 3, 2]
    assert [r.prompt_token_ids for r in responses] == PROMPTS


async def test_requests_that_sample_differently_go_into_different_batches(
    engine: TransformersEngine, model: Any
) -> None:
    generate = Generate(model)
    configs = [RequestConfig(max_tokens=2, temperature=t) for t in (1.0, 0.0, 1.0, 0.5)]
    await asyncio.gather(*(engine.infer_async(request([7, 8]), config) for config in configs))
    assert generate.rows == [2, 1, 1]


async def test_a_cancelled_caller_leaves_its_batch_to_the_others(engine: TransformersEngine, model: Any) -> None:
    generate = Generate(model)
    generate.proceed.clear()
    config = RequestConfig(max_tokens=5, temperature=0)
    tasks = [asyncio.ensure_future(engine.infer_async(request(ids), config)) for ids in PROMPTS]
    await asyncio.to_thread(generate.entered.wait, 60)
    tasks[3].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[3]
    generate.proceed.set()
    rest = await asyncio.gather(*tasks[:3], *tasks[4:])
    expected = await sample_all(engine, PROMPTS[:3] + PROMPTS[4:], config)
    assert [ids_of(r) for r in rest] == [ids_of(r) for r in expected]


async def test_a_caller_cancelled_before_its_batch_starts_is_not_sampled(
    engine: TransformersEngine, model: Any
) -> None:
    generate = Generate(model)
    tasks = [asyncio.ensure_future(engine.infer_async(request([7]), RequestConfig(max_tokens=1))) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[1], asyncio.CancelledError)
    assert generate.rows == [2]


async def test_a_batch_without_callers_stops(tokenizer: Any) -> None:
    model = endless(max_position_embeddings=100_000)
    engine = TransformersEngine(model, tokenizer)
    generate = Generate(model)
    generate.proceed.clear()
    task = asyncio.ensure_future(engine.infer_async(request([7]), RequestConfig()))  # would take 99,999 tokens
    await asyncio.to_thread(generate.entered.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    generate.proceed.set()
    response = await engine.infer_async(request([7]), RequestConfig(max_tokens=1))  # its turn comes after the other
    assert len(ids_of(response)) == 1


async def test_an_exception_reaches_every_caller_of_the_batch_and_no_later_one(
    engine: TransformersEngine, model: Any
) -> None:
    generate = Generate(model)
    generate.error = RuntimeError("out of memory")
    config = RequestConfig(max_tokens=1)
    results = await asyncio.gather(
        *(engine.infer_async(request([7]), config) for _ in range(3)), return_exceptions=True
    )
    assert [str(result) for result in results] == ["out of memory"] * 3
    generate.error = None
    assert ids_of(await engine.infer_async(request([7]), config))


def test_one_event_loop_after_the_other_can_use_an_engine(engine: TransformersEngine) -> None:
    for _ in range(2):
        responses = asyncio.run(sample_all(engine, PROMPTS, RequestConfig(max_tokens=2)))
        assert len(responses) == 8


def test_event_loops_of_several_threads_can_use_an_engine_at_once(engine: TransformersEngine) -> None:
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


async def test_the_model_is_as_it_was_afterwards(engine: TransformersEngine, model: Any) -> None:
    model.train()
    model.model.layers[1].eval()  # a part that its owner keeps in evaluation mode
    modes = [module.training for module in model.modules()]
    generation_config = model.generation_config
    await sample_all(engine, PROMPTS, RequestConfig(max_tokens=2))
    assert [module.training for module in model.modules()] == modes
    assert model.generation_config is generation_config


async def test_the_model_is_as_it_was_after_an_exception(engine: TransformersEngine, model: Any) -> None:
    model.train()
    generation_config = model.generation_config
    Generate(model).error = RuntimeError()
    with pytest.raises(RuntimeError):
        await sample_all(engine, PROMPTS, RequestConfig(max_tokens=2))
    assert model.training
    assert model.generation_config is generation_config


async def test_dropout_is_off_while_sampling(tokenizer: Any) -> None:
    model = make_model(attention_dropout=0.9)
    model.train()
    engine = TransformersEngine(model, tokenizer)
    response = (await sample_all(engine, [PROMPTS[2]], RequestConfig(max_tokens=8)))[0]
    expected = forward_logprobs(model, PROMPTS[2], ids_of(response))
    assert logprobs_of(response) == pytest.approx(expected, abs=1e-4)


async def test_sampling_defaults_of_the_checkpoint_do_not_apply(tokenizer: Any) -> None:
    plain = await sample_all(
        TransformersEngine(make_model(), tokenizer), PROMPTS, RequestConfig(max_tokens=8, temperature=0)
    )
    model = make_model()
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, temperature=5.0, top_k=2, repetition_penalty=9.0, min_new_tokens=8, max_new_tokens=1,
        eos_token_id=END, suppress_tokens=[ids_of(plain[0])[0]],
    )  # fmt: skip
    engine = TransformersEngine(model, tokenizer)
    assert [ids_of(r) for r in await sample_all(engine, PROMPTS, RequestConfig(max_tokens=8, temperature=0))] == [
        ids_of(r) for r in plain
    ]
    drawn = await sample_all(engine, [[7, 8, 9]] * 64, RequestConfig(max_tokens=1, temperature=2.0))
    assert len({ids_of(r)[0] for r in drawn}) > 2


async def test_a_model_that_is_trained_is_sampled_with_its_newest_weights(
    engine: TransformersEngine, model: Any
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        response = (await sample_all(engine, [PROMPTS[2]], RequestConfig(max_tokens=4)))[0]
        expected = forward_logprobs(model, PROMPTS[2], ids_of(response))
        assert logprobs_of(response) == pytest.approx(expected, abs=1e-4)
        ids = torch.tensor([PROMPTS[2]])
        model.train()
        model(ids, labels=ids).loss.backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # read by peft
async def test_a_model_wrapped_by_peft_is_sampled_with_its_adapter(tokenizer: Any) -> None:
    model = peft.get_peft_model(
        make_model(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    generation_config = model.get_base_model().generation_config
    engine = TransformersEngine(model, tokenizer)
    response = (await sample_all(engine, [PROMPTS[2]], RequestConfig(max_tokens=8)))[0]
    expected = forward_logprobs(model, PROMPTS[2], ids_of(response))
    assert logprobs_of(response) == pytest.approx(expected, abs=1e-4)
    assert model.get_base_model().generation_config is generation_config


async def test_weights_that_are_not_finite_are_an_error(engine: TransformersEngine, model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="NaN"):
        await sample_all(engine, [[7, 8]], RequestConfig(max_tokens=2))


@pytest.mark.parametrize(
    ("ids", "config", "message"),
    [
        (list(range(5, 25)), RequestConfig(max_tokens=4), "prompt of 20 tokens leaves no room .* context of 20"),
        ([], RequestConfig(max_tokens=4), "is empty"),
        ([5, 999], RequestConfig(max_tokens=4), "ids from 5 to 999, but the model knows 0 to 45"),
        ([5], RequestConfig(max_tokens=4, n=2), "n must be 1, not 2"),
    ],
)
async def test_a_request_that_cannot_be_sampled_is_refused(
    model: Any, tokenizer: Any, ids: list[int], config: RequestConfig, message: str
) -> None:
    engine = TransformersEngine(model, tokenizer, max_model_len=20)
    with pytest.raises(ValueError, match=message):
        await engine.infer_async(request(ids), config)


async def test_a_model_that_states_no_context_length_needs_max_tokens(model: Any, tokenizer: Any) -> None:
    engine = TransformersEngine(model, tokenizer)
    engine.max_model_len = None
    with pytest.raises(ValueError, match="max_tokens"):
        await engine.infer_async(request([7]), RequestConfig())
    assert len(ids_of(await engine.infer_async(request([7]), RequestConfig(max_tokens=1)))) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m, t: TransformersEngine(m, t, max_batch_size=0), "max_batch_size must be at least 1, not 0"),
        (lambda m, t: TransformersEngine(m, t, max_model_len=1), "max_model_len must be at least 2"),
        (
            lambda m, t: TransformersEngine(m, t, logprobs_mode="cooked"),  # type: ignore[arg-type]
            "'raw' or 'processed', not 'cooked'",
        ),
    ],
)
def test_an_option_out_of_range_is_refused(
    model: Any, tokenizer: Any, make: Callable[[Any, Any], TransformersEngine], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(model, tokenizer)


async def test_a_saved_model_is_loaded_by_its_folder(tmp_path: Path, model: Any, tokenizer: Any) -> None:
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    engine = TransformersEngine.from_pretrained(tmp_path, device="cpu")
    response = await engine.infer_async(request(text="abc"), RequestConfig(max_tokens=8))
    assert response.model == str(tmp_path)
    prompt = response.prompt_token_ids or []
    assert logprobs_of(response) == pytest.approx(forward_logprobs(model, prompt, ids_of(response)), abs=1e-4)


def test_a_wrong_model_path_is_named_with_what_is_accepted(tmp_path: Path) -> None:
    missing = tmp_path / "nothing-here"
    with pytest.raises(OSError, match="Pass the folder of a saved model") as caught:
        TransformersEngine.from_pretrained(missing)
    assert repr(str(missing)) in str(caught.value)


def test_without_the_extra_the_import_says_which_one_is_missing() -> None:
    code = "import sys; sys.modules['torch'] = None; import schedulers.engines.transformers"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert 'pip install "openenv-client[train]"' in result.stderr
