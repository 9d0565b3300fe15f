from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from typing import Any

import pytest

from schedulers import Env, GYMScheduler, RolloutError, StopReason, envs
from schedulers.engines import ContextOverflowError, InferEngine
from schedulers.engines.completions import turn_seed
from schedulers.engines.json_http import ServerError, ServerTimeoutError
from schedulers.engines.openai import OpenAIEngine
from schedulers.types import ChatCompletionResponse, Messages, RequestConfig, RolloutInferRequest
from tests.schedulers.chat_tokenizer import END, ChatTokenizer, characters
from tests.schedulers.engines.mock_openai import MODEL, Asked, MockOpenAI, Reply, chat, completion

KEY = "sk-0123456789abcdef"
MOVE = [*characters("[1 2 3]"), END]


def request(ids: list[int] | None = None, text: str = "hi") -> RolloutInferRequest:
    return RolloutInferRequest(messages=[{"role": "user", "content": text}], prompt_token_ids=ids)


def engine_of(server: MockOpenAI, **options: Any) -> OpenAIEngine:
    return OpenAIEngine(server.base_url, MODEL, **{"retry_delay": 0.001, **options})


async def ask(
    server: MockOpenAI, config: RequestConfig | None = None, *, ids: list[int] | None = None, **options: Any
) -> ChatCompletionResponse:
    async with engine_of(server, **options) as engine:
        return await engine.infer_async(request(ids), config or RequestConfig())


# With token ids


async def test_ids_go_out_and_exactly_the_sampled_ones_come_back(tokenizer: ChatTokenizer) -> None:
    """The server's text is not looked at: the tokenizer says what the ids mean."""
    with MockOpenAI(completion(MOVE)) as server:
        response = await ask(server, ids=[200, 201, 202], tokenizer=tokenizer)
    choice = response.choices[0]
    assert server.posts[0]["prompt"] == [200, 201, 202] == response.prompt_token_ids
    assert server.posts[0]["return_token_ids"] is True
    assert choice.token_ids == MOVE
    assert choice.logprobs == {"content": [{"logprob": -token / 1000} for token in MOVE]}
    assert choice.message.content == "[1 2 3]"
    assert response.usage == {"prompt_tokens": 3, "completion_tokens": len(MOVE)}
    assert response.model == MODEL


async def test_messages_are_rendered_where_there_are_no_ids_yet(tokenizer: ChatTokenizer) -> None:
    with MockOpenAI(completion(MOVE)) as server:
        response = await ask(server, tokenizer=tokenizer)
    assert server.posts[0]["prompt"] == response.prompt_token_ids
    assert tokenizer.decode(server.posts[0]["prompt"]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_the_request_config_alone_says_how_to_sample(tokenizer: ChatTokenizer) -> None:
    """Whatever the checkpoint's own defaults are: none of what they may set is left out."""
    config = RequestConfig(max_tokens=5, temperature=0.3, top_p=0.8, top_k=7, seed=4, stop=("]",))
    with MockOpenAI(completion(MOVE)) as server:
        await ask(server, config, ids=[200], tokenizer=tokenizer)
        await ask(server, RequestConfig(logprobs=False), ids=[200], tokenizer=tokenizer)
    first, second = server.posts
    assert first == {
        "model": MODEL, "prompt": [200], "max_tokens": 5, "temperature": 0.3, "top_p": 0.8, "top_k": 7, "min_p": 0.0,
        "repetition_penalty": 1.0, "seed": turn_seed(config, [200]), "stop": ["]"], "logprobs": 0,
        "return_token_ids": True,
    }  # fmt: skip
    assert second == {
        "model": MODEL, "prompt": [200], "max_tokens": 4095, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
        "repetition_penalty": 1.0, "return_token_ids": True,
    }  # fmt: skip


async def test_text_ends_before_a_stop_string_and_ids_do_not(tokenizer: ChatTokenizer) -> None:
    with MockOpenAI(completion(MOVE)) as server:
        response = await ask(server, RequestConfig(stop=(" 3",)), ids=[200], tokenizer=tokenizer)
    assert response.choices[0].message.content == "[1 2"
    assert response.choices[0].token_ids == MOVE


async def test_the_context_length_is_the_servers(tokenizer: ChatTokenizer) -> None:
    with MockOpenAI(completion(MOVE, finish_reason="length"), models={MODEL: 12}) as server:
        async with engine_of(server, tokenizer=tokenizer) as engine:
            response = await engine.infer_async(request([200] * 4), RequestConfig(max_tokens=64))
            assert engine.max_model_len == 12
            with pytest.raises(ContextOverflowError, match="12 tokens leaves no room"):
                await engine.infer_async(request([200] * 12), RequestConfig())
    assert server.posts[0]["max_tokens"] == 8
    assert response.choices[0].finish_reason == "length"
    assert [asked.path for asked in server.asked] == ["/v1/models", "/v1/completions"]


async def test_a_context_length_that_is_given_is_not_asked_for(tokenizer: ChatTokenizer) -> None:
    with MockOpenAI(completion(MOVE)) as server:
        await ask(server, ids=[200], tokenizer=tokenizer, max_model_len=64)
    assert [asked.path for asked in server.asked] == ["/v1/completions"]


async def test_a_server_that_says_no_context_length_needs_max_tokens(tokenizer: ChatTokenizer) -> None:
    with MockOpenAI(completion(MOVE), models={MODEL: None}) as server:
        with pytest.raises(ValueError, match="max_tokens"):
            await ask(server, ids=[200], tokenizer=tokenizer)
        await ask(server, RequestConfig(max_tokens=9), ids=[200], tokenizer=tokenizer)
    assert server.posts[0]["max_tokens"] == 9


class Chat(Env):
    """Asks for three moves."""

    async def reset(self, config: RolloutInferRequest) -> tuple[str, dict[str, Any], str]:
        self.turns = 0
        return "Play", {}, ""

    async def step(self, action: Messages) -> tuple[str, float, bool, dict[str, Any]]:
        self.turns += 1
        return "and now?", 1.0, self.turns == 3, {}

    async def close(self) -> None: ...


@pytest.fixture
def _chat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(envs, "chat", Chat)


@pytest.mark.usefixtures("_chat")
async def test_prompts_of_a_trajectory_extend_each_other(tokenizer: ChatTokenizer) -> None:
    """T01: ``[5 3 7]`` would be one token; the seven that the server sampled are sent back to it in the next turn."""
    spelled = [*characters("[5 3 7]"), END]
    with MockOpenAI(completion(spelled)) as server:
        async with engine_of(server, tokenizer=tokenizer) as engine, GYMScheduler(engine, gym_env="chat") as scheduler:
            [output] = await scheduler.async_infer([{}])
    prompts = [body["prompt"] for body in server.posts]
    assert len(prompts) == 3
    for prompt, following in itertools.pairwise(prompts):
        assert following[: len(prompt) + len(spelled)] == prompt + spelled
    assert output.response_token_ids == [spelled] * 3
    assert output.rollout_logprobs == [[-token / 1000 for token in spelled]] * 3
    assert output.total_reward == 3.0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"token_ids": None}, "no vLLM server that knows return_token_ids, .*; without a tokenizer"),
        ({"token_ids": ["a"]}, "no whole numbers"),
        ({"token_ids": 3}, "TypeError"),
        ({"prompt_token_ids": [1]}, "another prompt than it was sent"),
        ({"logprobs": None}, "TypeError"),
        ({"logprobs": {"token_logprobs": [-1.0]}}, "1 log-probabilities for 8 tokens"),
        ({"logprobs": {"token_logprobs": [None] * 8}}, "TypeError"),
        ({"logprobs": {"token_logprobs": [float("nan")] * 8}}, "not finite"),
        ({"finish_reason": "abort"}, "ended with 'abort'"),
    ],
)
async def test_tokens_that_are_not_what_was_asked_for_are_an_error(
    tokenizer: ChatTokenizer, changes: dict[str, Any], problem: str
) -> None:
    """T12: nothing is invented in their place."""
    wrong = pytest.raises(ServerError, match=f"unexpected form .*{problem}")
    with MockOpenAI(completion(MOVE, **changes)) as server, wrong as caught:
        await ask(server, ids=[200], tokenizer=tokenizer)
    assert len(server.posts) == 1
    assert caught.value.url == f"{server.base_url}/completions"


# With messages


async def test_a_hosted_model_is_asked_with_messages_and_tells_no_ids() -> None:
    """T12: ids and log-probabilities are None and not empty."""
    config = RequestConfig(max_tokens=5, temperature=0.0, seed=4, stop=("]", "\n"))
    with MockOpenAI(chat("[1 2 3")) as server:
        response = await ask(server, config)
    messages = [{"role": "user", "content": "hi"}]
    assert server.posts == [
        {
            "model": MODEL, "messages": messages, "max_tokens": 5, "temperature": 0.0, "top_p": 1.0,
            "seed": turn_seed(config, messages), "stop": ["]", "\n"],
        }
    ]  # fmt: skip
    assert [asked.path for asked in server.asked] == ["/v1/chat/completions"]
    choice = response.choices[0]
    assert (choice.message.content, choice.token_ids, choice.logprobs) == ("[1 2 3", None, None)
    assert response.prompt_token_ids is None
    assert (response.model, response.usage) == ("tiny-0711", {"prompt_tokens": 9, "completion_tokens": 3})


async def test_servers_with_names_of_their_own_are_sent_those() -> None:
    extra = {"temperature": None, "reasoning_effort": "low"}
    with MockOpenAI(chat("")) as server:
        config = RequestConfig(max_tokens=5, top_k=3)
        await ask(server, config, max_tokens_name="max_completion_tokens", extra_body=extra)
    assert server.posts[0].keys() == {
        "model",
        "messages",
        "max_completion_tokens",
        "top_p",
        "top_k",
        "reasoning_effort",
    }


async def test_only_role_and_content_of_a_message_are_sent() -> None:
    message = {"role": "user", "content": "hi", "env_config": {"seed": 3}}
    with MockOpenAI(chat("")) as server:
        async with engine_of(server) as engine:
            await engine.infer_async(RolloutInferRequest(messages=[message]), RequestConfig())
    assert server.posts[0]["messages"] == [{"role": "user", "content": "hi"}]


async def test_an_answer_cut_while_thinking_is_empty() -> None:
    with MockOpenAI(chat(None, finish_reason="length")) as server:
        response = await ask(server)
    assert response.choices[0].message.content == ""
    assert response.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ([], "TypeError"),
        ({}, "KeyError"),
        ({"choices": []}, "IndexError"),
        ({"choices": [{"finish_reason": "stop"}]}, "KeyError"),
        ({"choices": [{"finish_reason": "stop", "message": {"content": ["a"]}}]}, "no text"),
        ({"choices": [{"finish_reason": "content_filter", "message": {"content": ""}}]}, "'content_filter'"),
        ({"choices": [{"finish_reason": None, "message": {"content": ""}}]}, "ended with None"),
    ],
)
async def test_an_answer_of_a_wrong_shape_is_an_error(body: Any, problem: str) -> None:
    with MockOpenAI(Reply(body)) as server, pytest.raises(ServerError, match=f"unexpected form .*{problem}"):
        await ask(server)
    assert len(server.posts) == 1


async def test_an_answer_that_is_no_json_is_an_error() -> None:
    html = "<html>Sign in</html>"
    with MockOpenAI(Reply(html)) as server, pytest.raises(ServerError, match=f"no JSON: {html}"):
        await ask(server)
    assert len(server.posts) == 1


@pytest.mark.usefixtures("_chat")
async def test_a_trajectory_without_ids_has_none_anywhere() -> None:
    with MockOpenAI(chat("[1 2 3]")) as server:
        async with engine_of(server) as engine, GYMScheduler(engine, gym_env="chat") as scheduler:
            [output] = await scheduler.async_infer([{}])
    assert output.total_reward == 3.0
    assert (output.response_token_ids, output.rollout_logprobs, output.completion_token_ids) == (None, None, None)
    assert [message["role"] for message in server.posts[2]["messages"]] == ["user", "assistant"] * 2 + ["user"]


async def test_ids_cannot_be_sampled_from_without_a_tokenizer() -> None:
    with MockOpenAI() as server, pytest.raises(ValueError, match="pass it the tokenizer that the scheduler has"):
        await ask(server, ids=[200])


async def test_chat_completions_cannot_go_on_in_a_message() -> None:
    unfinished = RolloutInferRequest(messages=[{"role": "assistant", "content": "Let"}])
    with MockOpenAI() as server:
        async with engine_of(server) as engine:
            with pytest.raises(ValueError, match="go on in an assistant's message"):
                await engine.infer_async(unfinished, RequestConfig())


async def test_several_completions_a_request_are_refused() -> None:
    with MockOpenAI() as server, pytest.raises(ValueError, match="n must be 1, not 2"):
        await ask(server, RequestConfig(n=2))


# Failures


@pytest.mark.parametrize(
    "fault",
    [
        Reply({"error": "busy"}, 429),
        Reply({"error": "busy"}, 429, {"Retry-After": "0"}),
        Reply({"error": "busy"}, 429, {"Retry-After": "soon"}),
        Reply({"error": "busy"}, 429, {"Retry-After": "inf"}),
        Reply({"error": "busy"}, 429, {"Retry-After": format_datetime(datetime(2020, 1, 1, tzinfo=timezone.utc))}),
        Reply("slow", 408),
        Reply("oops", 500),
        Reply("<html>Bad gateway</html>", 502),
        Reply("starting", 503),
        Reply({}, fault="cut"),
        Reply(fault="drop"),
    ],
)
async def test_a_failure_that_passes_is_asked_again(fault: Reply) -> None:
    """The same request, with the same seed."""
    with MockOpenAI(fault, fault, chat("[1 2 3]")) as server:
        response = await ask(server, RequestConfig(seed=1))
    assert response.choices[0].message.content == "[1 2 3]"
    assert len(server.posts) == 3
    assert server.posts[0] == server.posts[1] == server.posts[2]


async def test_a_failure_that_stays_says_how_often_and_what() -> None:
    says = pytest.raises(ServerError, match=r"/v1/chat/completions failed 3 times, .*503: .*overloaded")
    with MockOpenAI(Reply({"error": "overloaded"}, 503)) as server, says as caught:
        await ask(server, max_retries=2)
    assert caught.value.status == 503
    assert len(server.posts) == 3


async def test_a_server_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with OpenAIEngine(f"http://127.0.0.1:{port}", MODEL, max_retries=1, retry_delay=0.001) as engine:
        where = rf"http://127\.0\.0\.1:{port}/v1/chat/completions failed 2 times.*is the server running"
        with pytest.raises(ServerError, match=where):
            await engine.infer_async(request(), RequestConfig())


@pytest.mark.parametrize("after", ["3600", format_datetime(datetime.now(timezone.utc) + timedelta(hours=1))])
async def test_a_server_that_wants_to_be_left_alone_for_too_long_is_an_error_at_once(after: str) -> None:
    too_late = pytest.raises(ServerError, match=r"next attempt, in 3\d\d\d s, would come after total_timeout=60")
    with MockOpenAI(Reply({}, 429, {"Retry-After": after})) as server, too_late:
        await ask(server, total_timeout=60)
    assert len(server.posts) == 1


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (400, "answered 400: .*no such parameter"),
        (401, "api_key .*the right one"),
        (403, "api_key .*the right one"),
        (404, "'tiny'; it has large, small"),
        (422, "answered 422"),
        (302, "answered 302"),
    ],
)
async def test_what_the_server_refuses_is_not_asked_again(status: int, says: str) -> None:
    says_so = pytest.raises(ServerError, match=says)
    refused = Reply({"error": "no such parameter"}, status)
    with MockOpenAI(refused, models={"small": 1, "large": None}) as server, says_so as caught:
        await ask(server)
    assert len(server.posts) == 1
    assert server.base_url in str(caught.value)


async def test_a_wrong_path_is_named() -> None:
    with MockOpenAI(Reply({}, 404), models={}) as server, pytest.raises(ServerError, match="is base_url right"):
        await ask(server)


async def test_with_a_tokenizer_a_wrong_model_is_found_before_anything_is_sampled(tokenizer: ChatTokenizer) -> None:
    unknown = pytest.raises(ServerError, match="serves no model 'tiny'; it has small")
    with MockOpenAI(completion(MOVE), models={"small": 1}) as server, unknown:
        await ask(server, tokenizer=tokenizer)
    assert server.posts == []


OVERFLOW = [
    {"error": {"code": "context_length_exceeded"}},
    {"message": "This model's maximum context length is 4096 tokens. However, you requested 5000."},
]


@pytest.mark.usefixtures("_chat")
@pytest.mark.parametrize("body", OVERFLOW)
async def test_a_trajectory_that_overflows_the_context_ends_with_what_it_has(body: Any) -> None:
    with MockOpenAI(chat("[1 2 3]"), Reply(body, 400)) as server:
        async with engine_of(server) as engine, GYMScheduler(engine, gym_env="chat") as scheduler:
            [output] = await scheduler.async_infer([{}])
    assert output.stop_reason is StopReason.CONTEXT
    assert output.total_reward == 1.0
    assert output.error is None


@pytest.mark.usefixtures("_chat")
async def test_a_first_prompt_that_overflows_the_context_is_an_error() -> None:
    with MockOpenAI(Reply(OVERFLOW[0], 400)) as server:
        async with engine_of(server) as engine, GYMScheduler(engine, gym_env="chat") as scheduler:
            with pytest.raises(RolloutError, match="ContextOverflowError"):
                await scheduler.async_infer([{}])


# Deadlines, concurrency, cancellation


async def test_an_attempt_has_a_deadline_and_is_not_repeated() -> None:
    """To ask again would favour short completions."""
    with MockOpenAI(Reply(fault="hang")) as server:
        with pytest.raises(ServerTimeoutError, match=r"no answer within request_timeout=0\.5 s") as caught:
            await ask(server, request_timeout=0.5)
        assert isinstance(caught.value, TimeoutError)
        assert await asyncio.to_thread(server.left.wait)
    assert len(server.posts) == 1


async def test_all_attempts_together_have_a_deadline() -> None:
    with MockOpenAI(Reply("oops", 500), Reply(fault="hang")) as server:
        with pytest.raises(ServerTimeoutError, match=r"total_timeout=1\.0 s; failure 1: answered 500: oops"):
            await ask(server, total_timeout=1.0)
        assert await asyncio.to_thread(server.left.wait)


async def test_cancelling_closes_the_connection_and_leaves_the_others() -> None:
    answers = threading.Event()

    def reply(asked: Asked) -> Reply:
        if asked.body["messages"][0]["content"] == "forget it":
            return Reply(fault="hang")
        answers.wait()
        return chat("[1 2 3]")

    with MockOpenAI(reply) as server:
        async with engine_of(server) as engine:
            tasks = [
                asyncio.ensure_future(engine.infer_async(request(text=text), RequestConfig()))
                for text in ("forget it", "hi")
            ]
            for _ in tasks:
                await asyncio.to_thread(server.arrived.acquire)
            tasks[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await tasks[0]
            assert await asyncio.to_thread(server.left.wait)
            answers.set()
            assert (await tasks[1]).choices[0].message.content == "[1 2 3]"


async def test_no_more_requests_are_on_their_way_than_allowed() -> None:
    three_are_here = threading.Barrier(3)

    def reply(asked: Asked) -> Reply:
        three_are_here.wait()
        return chat("")

    with MockOpenAI(reply) as server:
        async with engine_of(server, max_concurrency=3) as engine:
            await asyncio.gather(*(engine.infer_async(request(), RequestConfig()) for _ in range(39)))
    assert len(server.posts) == 39
    assert server.most_at_once == 3


async def test_requests_run_side_by_side() -> None:
    """Each is answered only when all have arrived: one after the other they never would be."""
    all_here = threading.Barrier(8)

    def reply(asked: Asked) -> Reply:
        all_here.wait()
        return chat(asked.body["messages"][0]["content"])

    with MockOpenAI(reply) as server:
        async with engine_of(server) as engine:
            texts = [str(number) for number in range(8)]
            responses = await asyncio.gather(
                *(engine.infer_async(request(text=text), RequestConfig()) for text in texts)
            )
    assert [response.choices[0].message.content for response in responses] == texts


def test_one_event_loop_after_the_other_can_use_an_engine() -> None:
    with MockOpenAI(chat("[1 2 3]")) as server:
        engine = engine_of(server)
        for _ in range(3):
            response = asyncio.run(engine.infer_async(request(), RequestConfig()))
            assert response.choices[0].message.content == "[1 2 3]"
        asyncio.run(engine.aclose())
    gc.collect()


async def test_closing_cancels_what_is_on_its_way() -> None:
    with MockOpenAI(Reply(fault="hang")) as server:
        engine = engine_of(server)
        task = asyncio.ensure_future(engine.infer_async(request(), RequestConfig()))
        await asyncio.to_thread(server.arrived.acquire)
        await engine.aclose()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.aclose()
        with pytest.raises(RuntimeError, match="is closed"):
            await engine.infer_async(request(), RequestConfig())
    assert "openai-engine" not in [thread.name for thread in threading.enumerate()]


# Keys and addresses


@pytest.fixture(params=["argument", "variable"])
def key(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    if request.param == "argument":
        yield {"api_key": KEY}
    else:
        monkeypatch.setenv("MY_KEY", KEY)
        yield {"api_key_variable": "MY_KEY"}


async def test_the_key_is_sent_and_never_shown(key: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """Not even when a server repeats it."""
    caplog.set_level(logging.DEBUG)
    refused = Reply({"error": f"Incorrect API key provided: {KEY}"}, 401)
    with MockOpenAI(chat(""), Reply(f"{KEY}?", 500), refused) as server:
        async with engine_of(server, **key) as engine:
            await engine.infer_async(request(), RequestConfig())
            with pytest.raises(ServerError) as caught:
                await engine.infer_async(request(), RequestConfig())
            shown = f"{engine!r} {vars(engine)} {vars(engine._client._http)}"
    assert [asked.authorization for asked in server.asked] == [f"Bearer {KEY}"] * 3
    assert "Incorrect API key provided: …" in str(caught.value)
    assert KEY not in f"{caught.value!r} {caught.value.text} {caught.value.__cause__!r} {caplog.text} {shown}"


async def test_no_key_is_sent_unless_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with MockOpenAI(chat("")) as server:
        await ask(server)
    assert server.asked[0].authorization is None


@pytest.mark.parametrize("bad", ["", "a b", "käse", f"{KEY}\n"])
def test_a_key_that_cannot_be_one_is_refused_and_not_shown(bad: str) -> None:
    with pytest.raises(ValueError, match="API key is empty or") as caught:
        OpenAIEngine("http://127.0.0.1:9", MODEL, api_key=bad)
    assert KEY not in str(caught.value)


def test_a_variable_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="no variable NO_SUCH_KEY"):
        OpenAIEngine("http://127.0.0.1:9", MODEL, api_key_variable="NO_SUCH_KEY")
    with pytest.raises(ValueError, match="not both"):
        OpenAIEngine("http://127.0.0.1:9", MODEL, api_key_variable="NO_SUCH_KEY", api_key=KEY)


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
async def test_an_address_without_a_path_is_that_of_version_1(ending: str) -> None:
    with MockOpenAI(chat("")) as server:
        async with OpenAIEngine(server.base_url.removesuffix("/v1") + ending, MODEL) as engine:
            await engine.infer_async(request(), RequestConfig())
    assert server.asked[0].path == "/v1/chat/completions"


async def test_a_path_of_ones_own_is_kept() -> None:
    with MockOpenAI(chat("")) as server:
        async with OpenAIEngine(server.base_url.removesuffix("/v1") + "/openai/v1beta/", MODEL) as engine:
            await engine.infer_async(request(), RequestConfig())
    assert server.asked[0].path == "/openai/v1beta/chat/completions"


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.0.0.1:8000",
        "ftp://host",
        "http://",
        "http://me:secret@host",
        "me:secret@host",
        "http://a?secret",
        "http://a:b",
    ],
)
def test_an_address_that_is_none_is_refused_without_its_secrets(address: str) -> None:
    with pytest.raises(ValueError, match="base_url must") as caught:
        OpenAIEngine(address, MODEL)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "option",
    [
        {"request_timeout": 0},
        {"total_timeout": -1},
        {"max_concurrency": 0},
        {"max_retries": -1},
        {"retry_delay": -0.5},
    ],
)
def test_an_option_out_of_range_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(option))} must be"):
        OpenAIEngine("http://127.0.0.1:9", MODEL, **option)


async def test_it_is_an_engine(tokenizer: ChatTokenizer) -> None:
    async with OpenAIEngine("http://127.0.0.1:9", MODEL, tokenizer=tokenizer) as engine:
        assert isinstance(engine, InferEngine)
        assert engine.tokenizer is tokenizer


def test_without_the_extra_the_import_says_which_one_is_missing() -> None:
    code = "import sys; sys.modules['httpx2'] = None; import schedulers.engines.openai"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert 'pip install "openenv-client[openai]"' in done.stderr
