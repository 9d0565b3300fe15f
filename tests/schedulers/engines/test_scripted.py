from __future__ import annotations

import asyncio
from typing import Any

import pytest

from schedulers.engines import InferEngine, ScriptedEngine
from schedulers.types import (
    ChatCompletionResponseChoice,
    ChatMessage,
    Messages,
    RequestConfig,
    RolloutInferRequest,
)


class Letters:
    """A tokenizer whose ids are code points; 0 ends."""

    eos_token_id: int | None = 0

    def apply_chat_template(
        self, conversation: Messages, *, tokenize: bool = True, add_generation_prompt: bool = False, **kwargs: Any
    ) -> str:
        return "".join(f"{m['role'][0]}:{m['content']}\n" for m in conversation) + "a:" * add_generation_prompt

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(id_) for id_ in token_ids if id_ or not skip_special_tokens)


CONFIG = RequestConfig()


def request(*answers: str) -> RolloutInferRequest:
    messages = [{"role": "user", "content": "go"}]
    for answer in answers:
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "and then?"}]
    return RolloutInferRequest(messages=messages)


async def say(engine: ScriptedEngine, *answers: str, config: RequestConfig = CONFIG) -> ChatCompletionResponseChoice:
    return (await engine.infer_async(request(*answers), config)).choices[0]


def test_it_is_an_engine() -> None:
    assert isinstance(ScriptedEngine([]), InferEngine)


async def test_the_reply_is_chosen_by_the_turn_of_the_conversation() -> None:
    engine = ScriptedEngine(["one", "two"])
    said = await asyncio.gather(say(engine, "one"), say(engine), say(engine, "one"), say(engine))
    assert [choice.message.content for choice in said] == ["two", "one", "two", "one"]


async def test_a_function_sees_the_request_and_the_turn() -> None:
    engine = ScriptedEngine(lambda request, turn: f"{request.messages[0]['content']} {turn}")
    assert (await say(engine, "x")).message.content == "go 1"


async def test_an_asynchronous_function_can_wait() -> None:
    gate = asyncio.Event()

    async def script(request: RolloutInferRequest, turn: int) -> str:
        await gate.wait()
        return "late"

    engine = ScriptedEngine(script)
    task = asyncio.ensure_future(say(engine))
    await asyncio.sleep(0)
    assert not task.done()
    assert len(engine.calls) == 1
    gate.set()
    assert (await task).message.content == "late"


async def test_an_exception_in_the_script_is_raised() -> None:
    with pytest.raises(TimeoutError, match="slow"):
        await say(ScriptedEngine([TimeoutError("slow")]))


async def test_a_whole_completion_is_handed_on_untouched() -> None:
    choice = ChatCompletionResponseChoice(ChatMessage("x"), finish_reason="length", token_ids=[])
    assert await say(ScriptedEngine([choice], Letters())) is choice


async def test_a_turn_beyond_the_script_is_an_error_that_says_so() -> None:
    with pytest.raises(IndexError, match=r"has 1 replies, but trajectory .* asks for number 2"):
        await say(ScriptedEngine(["one"]), "one")


@pytest.mark.parametrize("reply", [{"content": "one"}, None, 3])
def test_a_reply_of_a_wrong_type_is_refused_at_once(reply: Any) -> None:
    with pytest.raises(TypeError, match=f"a script's replies are texts, .*, not {reply!r}"):
        ScriptedEngine(["one", reply])


def test_a_single_text_is_not_taken_for_a_script() -> None:
    with pytest.raises(TypeError, match="not the text 'one'"):
        ScriptedEngine("one")


@pytest.mark.parametrize("reply", [None, ["[1 1 4]"], {"content": "[1 1 4]"}])
async def test_a_reply_that_is_none_is_shown(reply: Any) -> None:
    with pytest.raises(TypeError, match=r"the script's reply to turn 1 is .*; it must be a text"):
        await ScriptedEngine(lambda request, turn: reply).infer_async(request("one"), CONFIG)


async def test_without_a_tokenizer_ids_and_log_probabilities_are_unknown() -> None:
    response = await ScriptedEngine(["one"]).infer_async(request(), CONFIG)
    assert response.prompt_token_ids is None
    assert response.choices[0].token_ids is None
    assert response.choices[0].logprobs is None


async def test_with_a_tokenizer_ids_end_with_the_end_token_and_log_probabilities_tell_them_apart() -> None:
    response = await ScriptedEngine(["hi"], Letters()).infer_async(request(), CONFIG)
    assert response.prompt_token_ids == [ord(c) for c in "u:go\na:"]
    choice = response.choices[0]
    assert choice.token_ids == [ord("h"), ord("i"), 0]
    assert choice.logprobs == {"content": [{"logprob": -0.104}, {"logprob": -0.105}, {"logprob": 0.0}]}


async def test_log_probabilities_follow_the_given_rule_and_can_be_left_out() -> None:
    engine = ScriptedEngine(["h"], Letters(), logprob=lambda token_id: -1.5)
    assert (await say(engine)).logprobs == {"content": [{"logprob": -1.5}, {"logprob": -1.5}]}
    assert (await say(engine, config=RequestConfig(logprobs=False))).logprobs is None


@pytest.mark.parametrize(
    ("limit", "text", "reason"), [(1, "h", "length"), (2, "hi", "length"), (3, "hi", "stop"), (None, "hi", "stop")]
)
async def test_a_reply_longer_than_max_tokens_is_cut(limit: int | None, text: str, reason: str) -> None:
    choice = await say(ScriptedEngine(["hi"], Letters()), config=RequestConfig(max_tokens=limit))
    assert (choice.message.content, choice.finish_reason) == (text, reason)
    assert len(choice.token_ids or []) == (limit or 3)


async def test_prompt_ids_are_reported_as_they_were_asked_for() -> None:
    asked = RolloutInferRequest(prompt_token_ids=[1, 2, 3])
    assert (await ScriptedEngine(["x"], Letters()).infer_async(asked, CONFIG)).prompt_token_ids == [1, 2, 3]


async def test_calls_are_kept_as_they_were_made() -> None:
    engine = ScriptedEngine(["one"])
    asked = request()
    await engine.infer_async(asked, RequestConfig(max_tokens=7))
    asked.messages.append({"role": "assistant", "content": "one"})
    (call,) = engine.calls
    assert call.request.messages == [{"role": "user", "content": "go"}]
    assert call.request.uuid == asked.uuid
    assert (call.request_config.max_tokens, call.turn) == (7, 0)
