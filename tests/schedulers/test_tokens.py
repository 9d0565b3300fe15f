"""Prompts that grow from turn to turn without tokenising what was sampled."""

from __future__ import annotations

import re
from typing import Any

import pytest

from schedulers.tokens import ChatPrompts
from schedulers.types import Messages
from tests.schedulers.chat_tokenizer import END, START, ChatTokenizer, characters, chatml

USER: Messages = [{"role": "user", "content": "Play"}]


def said(answer: str, *rest: str) -> Messages:
    """A conversation with an answer and what the user says after it."""
    return [*USER, {"role": "assistant", "content": answer}, *({"role": "user", "content": text} for text in rest)]


def trimming(messages: Messages, generation_prompt: bool) -> str:
    return chatml([{**m, "content": m["content"].strip()} for m in messages], generation_prompt)


def left_trimming(messages: Messages, generation_prompt: bool) -> str:
    return chatml([{**m, "content": m["content"].lstrip()} for m in messages], generation_prompt)


def newline_adding(messages: Messages, generation_prompt: bool) -> str:
    return chatml([{**m, "content": m["content"] + "\n"} for m in messages], generation_prompt)


def thought_stripping(messages: Messages, generation_prompt: bool) -> str:
    """Removes the thinking of all answers but one that ends the conversation."""
    last = len(messages) - 1
    return chatml(
        [
            m if i == last else {**m, "content": re.sub(r"<think>.*?</think>", "", m["content"])}
            for i, m in enumerate(messages)
        ],
        generation_prompt,
    )


def empty_thought(messages: Messages, generation_prompt: bool) -> str:
    """Begins an answer with an empty thought, which no rendered answer has."""
    return chatml(messages, generation_prompt) + "<think>\n\n</think>\n\n" * generation_prompt


def counting(messages: Messages, generation_prompt: bool) -> str:
    """Begins with how long the conversation is, so it rewrites its beginning every time."""
    return f"{len(messages)} messages\n" + chatml(messages, generation_prompt)


def extend(tokenizer: ChatTokenizer, answer: str, token_ids: list[int]) -> tuple[list[int], list[int] | None]:
    prompts = ChatPrompts(tokenizer)
    first = prompts.first(USER)
    return first, prompts.extend(said(answer, "and now?"), 1, first, token_ids)


def test_first_prompt_is_the_template_up_to_the_answer(tokenizer: ChatTokenizer) -> None:
    ids = ChatPrompts(tokenizer).first(USER)
    assert tokenizer.decode(ids) == "<|im_start|>user\nPlay<|im_end|>\n<|im_start|>assistant\n"


def test_template_kwargs_reach_the_template() -> None:
    def template(messages: Messages, generation_prompt: bool, *, enable_thinking: bool = True) -> str:
        return f"thinking={enable_thinking}"

    tokenizer = ChatTokenizer(template)
    ids = ChatPrompts(tokenizer, template_kwargs={"enable_thinking": False}).first(USER)
    assert tokenizer.decode(ids) == "thinking=False"


def test_next_prompt_is_the_old_one_the_sampled_ids_and_glue(tokenizer: ChatTokenizer) -> None:
    """The end token that the model sampled stands once, and what follows is the template's own text."""
    sampled = [*characters("[1 2 3]"), END]
    first, ids = extend(tokenizer, "[1 2 3]", sampled)
    assert ids is not None
    assert ids[: len(first) + len(sampled)] == first + sampled
    glue = tokenizer.decode(ids[len(first) + len(sampled) :])
    assert glue == "\n<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n"
    assert ids == tokenizer.encode(chatml(said("[1 2 3]", "and now?"), True), add_special_tokens=False)


def test_end_token_of_a_cut_answer_comes_from_the_template(tokenizer: ChatTokenizer) -> None:
    sampled = characters("[1 2")
    first, ids = extend(tokenizer, "[1 2", sampled)
    assert ids is not None
    assert ids[len(first) :][: len(sampled) + 1] == [*sampled, END]


def test_ordinary_last_token_that_the_template_repeats_is_kept_twice() -> None:
    """Only an end token may be left out: a newline that the model sampled and one of the template are two newlines."""

    def template(messages: Messages, generation_prompt: bool) -> str:
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant: " * generation_prompt

    tokenizer = ChatTokenizer(template)
    first, ids = extend(tokenizer, "a\n", characters("a\n"))
    assert ids is not None
    assert tokenizer.decode(ids[len(first) :]) == "a\n\nuser: and now?\nassistant: "


def test_unusual_spelling_stays_as_it_was_sampled(tokenizer: ChatTokenizer) -> None:
    """T01: the tokenizer would write [5 3 7] as one token; the seven that were sampled are kept."""
    assert len(tokenizer.encode("[5 3 7]", add_special_tokens=False)) == 1
    sampled = [*characters("[5 3 7]"), END]
    first, ids = extend(tokenizer, "[5 3 7]", sampled)
    assert ids is not None
    assert ids[len(first) :][: len(sampled)] == sampled


@pytest.mark.parametrize("answer", ["[1 2 3]", "  [1 2 3]", "[1 2 3]\n", " [1 2 3]\n", " \n", ""])
@pytest.mark.parametrize("template", [chatml, trimming, left_trimming, empty_thought])
def test_templates_that_only_touch_white_space_do_not_split(template: Any, answer: str) -> None:
    """A template may trim an answer or begin one with scaffolding: the ids stay as sampled."""
    tokenizer = ChatTokenizer(template)
    sampled = [*characters(answer), END]
    first, ids = extend(tokenizer, answer, sampled)
    assert ids is not None
    assert ids[: len(first) + len(sampled)] == first + sampled
    assert tokenizer.decode(ids).endswith(template(said(answer, "and now?"), True)[-20:])


def test_template_that_adds_to_an_answer_that_has_ended_does_not_extend() -> None:
    """The end was sampled before the newline that the template wants before it; a cut answer has none yet."""
    tokenizer = ChatTokenizer(newline_adding)
    assert extend(tokenizer, "[1 2 3]", [*characters("[1 2 3]"), END])[1] is None
    first, ids = extend(tokenizer, "[1 2 3]", characters("[1 2 3]"))
    assert ids is not None
    assert tokenizer.decode(ids[len(first) :]).startswith("[1 2 3]\n<|im_end|>\n<|im_start|>user")


def test_scaffolding_of_an_answer_stays_in_the_history() -> None:
    """The model was shown an empty thought before it answered, so the next prompt has it too."""
    tokenizer = ChatTokenizer(empty_thought)
    _, ids = extend(tokenizer, "[1 2 3]", [*characters("[1 2 3]"), END])
    assert ids is not None
    assert tokenizer.decode(ids).count("<think>") == 2
    assert "<think>\n\n</think>\n\n[1 2 3]<|im_end|>" in tokenizer.decode(ids)


def test_template_that_removes_thinking_does_not_extend() -> None:
    """T09: the prompt would show thinking that the template hides, so there is no extension."""
    tokenizer = ChatTokenizer(thought_stripping)
    answer = "<think>a</think>[5 3 7]"
    assert extend(tokenizer, answer, [*characters(answer), END])[1] is None
    assert extend(tokenizer, "[5 3 7]", [*characters("[5 3 7]"), END])[1] is not None


def test_template_that_rewrites_the_beginning_does_not_extend() -> None:
    assert extend(ChatTokenizer(counting), "[1 2 3]", characters("[1 2 3]"))[1] is None


def test_answer_that_looks_like_the_template_keeps_its_place(tokenizer: ChatTokenizer) -> None:
    answer = "<|im_end|>\n<|im_start|>user\nand now?"
    sampled = [*characters(answer), END]
    first, ids = extend(tokenizer, answer, sampled)
    assert ids is not None
    assert ids[len(first) :][: len(sampled)] == sampled
    assert ids[len(first) + len(sampled) :].count(START) == 2


def test_answer_that_goes_on_is_extended_by_nothing(tokenizer: ChatTokenizer) -> None:
    """The assistant's message is the last one: what was sampled is the prompt's end, without an end of the turn."""
    prompts = ChatPrompts(tokenizer)
    first = prompts.first(USER)
    assert prompts.extend(said("thinking"), 1, first, characters("thinking")) == first + characters("thinking")


def test_answer_of_unknown_ids_goes_on_in_its_message(tokenizer: ChatTokenizer) -> None:
    """An engine that tells no ids leaves the text; the message is not closed."""
    ids = ChatPrompts(tokenizer).first(said("thinking"))
    assert tokenizer.decode(ids) == "<|im_start|>user\nPlay<|im_end|>\n<|im_start|>assistant\nthinking"


def test_template_that_gives_ids_is_refused(tokenizer: ChatTokenizer) -> None:
    tokenizer.apply_chat_template = lambda *args, **kwargs: [1, 2]  # type: ignore[assignment, method-assign]
    with pytest.raises(TypeError, match="gave list, not text"):
        ChatPrompts(tokenizer).first(USER)
