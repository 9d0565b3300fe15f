"""A tip after a wrong answer: in the same message, or in a new round."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedulers import (
    ChatCompletionResponseChoice,
    ChatMessage,
    Episode,
    MathTipsScheduler,
    RequestConfig,
    RolloutError,
    RolloutInferRequest,
    RolloutOutput,
    StopReason,
    ThinkingModelTipsScheduler,
    multi_turns,
    rollout_fn_of,
    run_multi_turn,
)
from schedulers.engines import ScriptedEngine
from schedulers.maths import math_grader
from schedulers.tips import TipsScheduler, tokens_before
from tests.schedulers.chat_tokenizer import END, PLAIN, ChatTokenizer, characters, chatml

QUESTION = {"role": "user", "content": "What is 3 + 4?"}
TIP = MathTipsScheduler.tips_prompt
ADVICE = ThinkingModelTipsScheduler.tips_prompt

_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def trained_tokenizer(mark: str, **added: Any) -> Any:
    """A byte-level BPE that has seen enough sums to have tokens like ``.</``, as a language model has."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        [f"The sum is {i}.</think><answer>{i}</answer> But wait, that cannot be right." for i in range(50)],
        trainers.BpeTrainer(
            vocab_size=500,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<|im_start|>", "<|im_end|>"],
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", chat_template=_CHATML)
    if added:
        tokenizer.add_tokens([AddedToken(mark, **added)])
    return tokenizer


TOKENIZERS = {
    "characters": ChatTokenizer(),
    "bpe": trained_tokenizer("</think>"),
    "bpe, the mark is a token": trained_tokenizer("</think>", special=False),
    "bpe, the mark is special": trained_tokenizer("</think>", special=True),
}
each_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


def is_seven(completions: list[str], solutions: list[str]) -> list[float]:
    """Right is what ends in its solution, tags aside."""
    plain = [text.replace("</answer>", "") for text in completions]
    return [float(text.endswith(solution)) for text, solution in zip(plain, solutions, strict=True)]


def ask(uuid: str = "u", **data: Any) -> RolloutInferRequest:
    return RolloutInferRequest([dict(QUESTION)], data_dict={"solution": "7", **data}, uuid=uuid)


async def roll(scheduler: TipsScheduler, *requests: RolloutInferRequest) -> list[RolloutOutput]:
    return await scheduler.async_infer(requests or [ask()], RequestConfig(max_tokens=500))


async def one(scheduler: TipsScheduler, *requests: RolloutInferRequest) -> RolloutOutput:
    [output] = await roll(scheduler, *requests)
    return output


def tips(script: Any, tokenizer: Any = None, max_turns: int | None = None, **options: Any) -> MathTipsScheduler:
    options = {"acc_function": is_seven, **options}
    return MathTipsScheduler(ScriptedEngine(script, tokenizer), max_turns, **options)


def sampled_by(scheduler: TipsScheduler, text: str) -> list[int]:
    """The ids that the scripted engine gives for a text."""
    tokenizer = scheduler.tokenizer
    assert tokenizer is not None
    return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id or 0]


def test_names_that_users_know() -> None:
    assert multi_turns["math_tip_trick"] is MathTipsScheduler
    assert multi_turns["thinking_tips_scheduler"] is ThinkingModelTipsScheduler


# -- what both have ---------------------------------------------------------------------------------

both = pytest.mark.parametrize("kind", [MathTipsScheduler, ThinkingModelTipsScheduler])


@both
async def test_right_answer_gets_no_tip(kind: Callable[..., TipsScheduler]) -> None:
    output = await one(kind(ScriptedEngine(["<think>3 + 4</think>7"]), acc_function=is_seven))
    assert output.stop_reason is StopReason.FINISHED
    assert output.messages == [QUESTION, {"role": "assistant", "content": "<think>3 + 4</think>7"}]
    assert output.total_reward == 1.0
    assert output.rollout_infos["rewards"] == {"accuracy_reward": 1.0}


@both
async def test_one_tip_is_given_and_no_second(kind: Callable[..., TipsScheduler]) -> None:
    engine = ScriptedEngine(["8", "9", "7"])
    outputs = await roll(kind(engine, acc_function=is_seven))
    assert len(engine.calls) == 2
    assert [output.total_reward for output in outputs] == [0.0] * len(outputs)
    assert outputs[-1].stop_reason is StopReason.FINISHED


@both
async def test_model_that_says_the_tip_itself_still_gets_one(kind: Callable[..., TipsScheduler]) -> None:
    """A model that was trained this way says these words by itself; that is no tip given."""
    engine = ScriptedEngine([f"8 {TIP} {ADVICE} 9", "7"])
    outputs = await roll(kind(engine, acc_function=is_seven))
    assert len(engine.calls) == 2
    assert outputs[-1].total_reward == 1.0


@both
@pytest.mark.parametrize("max_turns", [1, None])
async def test_no_tip_after_the_last_turn_or_a_cut_answer(
    kind: Callable[..., TipsScheduler], max_turns: int | None
) -> None:
    cut = ChatCompletionResponseChoice(ChatMessage("8"), finish_reason="stop" if max_turns else "length")
    output = await one(kind(ScriptedEngine([cut, "7"]), max_turns, acc_function=is_seven))
    assert output.stop_reason is (StopReason.MAX_TURNS if max_turns else StopReason.LENGTH)
    assert output.total_reward == 0.0


@both
async def test_the_solution_is_the_rows(kind: Callable[..., TipsScheduler]) -> None:
    calls: list[tuple[list[str], list[str]]] = []

    def grade(completions: list[str], solutions: list[str]) -> list[float]:
        calls.append((completions, solutions))
        return [1]

    await roll(kind(ScriptedEngine(["seven"]), acc_function=grade), ask(solution=7))
    assert calls == [(["seven"], ["7"])]


@both
async def test_row_without_a_solution_is_refused(kind: Callable[..., TipsScheduler]) -> None:
    request = RolloutInferRequest([dict(QUESTION)], data_dict={"answer": "7"})
    with pytest.raises(RolloutError, match=r"the row has no 'solution' to grade answers by, only \['answer'\]"):
        await roll(kind(ScriptedEngine(["7"]), acc_function=is_seven), request)


@both
async def test_grading_does_not_stop_the_event_loop(kind: Callable[..., TipsScheduler]) -> None:
    """Two answers are under way at once: each one's grading waits for the other's."""
    together = threading.Barrier(2, timeout=60)

    def grade(completions: list[str], solutions: list[str]) -> list[float]:
        together.wait()
        return [1.0]

    outputs = await roll(kind(ScriptedEngine(["7"]), acc_function=grade), ask("a"), ask("b"))
    assert [output.total_reward for output in outputs] == [1.0, 1.0]


@both
async def test_grader_that_raises_leaves_the_trajectory_unscored(kind: Callable[..., TipsScheduler]) -> None:
    def grade(completions: list[str], solutions: list[str]) -> list[float]:
        if completions == ["bad"]:
            raise ArithmeticError("no number")
        return [1.0]

    engine = ScriptedEngine(lambda request, turn: request.uuid)
    good, bad = await roll(kind(engine, acc_function=grade), ask("good"), ask("bad"))
    assert good.total_reward == 1.0
    assert bad.total_reward is None
    assert bad.error == "ArithmeticError: no number"


@both
async def test_math_verify_grades_unless_told_otherwise(kind: Callable[..., TipsScheduler]) -> None:
    script = ["<think>a</think>\\boxed{8}", "<think>b</think>\\boxed{\\frac{14}{2}}"]
    outputs = await roll(kind(ScriptedEngine(script)))
    assert outputs[-1].total_reward == 1.0


@both
def test_missing_extra_is_named_when_the_scheduler_is_made(
    kind: Callable[..., TipsScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    math_grader.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "openenv-client\[math\]"'):
        kind()
    assert kind(acc_function=is_seven).acc_func is is_seven


# -- the tip in the same message --------------------------------------------------------------------

FIRST = "<think>The sum is 8.\n</think><answer>8</answer>"
SECOND = " It is 7.</think><answer>7</answer>"


@each_tokenizer
async def test_answer_is_taken_back_and_the_message_goes_on(tokenizer: Any) -> None:
    """The model goes on from its own tokens up to the answer and the tip's; the whole is one message and one row."""
    scheduler = tips([FIRST, SECOND], tokenizer)
    output = await one(scheduler)
    first, second = (call.request.prompt_token_ids or [] for call in scheduler.engine.calls)  # type: ignore[union-attr]
    head = tokenizer.encode("<think>The sum is 8.\n", add_special_tokens=False)
    tip = tokenizer.encode(TIP, add_special_tokens=False)
    assert output.messages == [QUESTION, {"role": "assistant", "content": f"<think>The sum is 8.\n{TIP}{SECOND}"}]
    assert second == [*first, *head, *tip]
    rest = sampled_by(scheduler, SECOND)
    assert output.prompt_token_ids == first
    assert output.response_token_ids == [[*head, *tip, *rest]]
    assert output.response_loss_mask == [[1] * len(head) + [0] * len(tip) + [1] * len(rest)]
    assert output.rollout_logprobs == [[-i / 1000 for i in [*head, *rest]]]
    assert output.completion_token_ids == output.response_token_ids[0]
    assert output.completion_mask == output.response_loss_mask[0]
    assert output.completion_logprobs == [-i / 1000 for i in head] + [0.0] * len(tip) + [-i / 1000 for i in rest]
    assert output.rollout_infos["segments"] == 1
    assert output.rollout_infos["num_turns"] == 2
    assert output.rollout_infos["step_rewards"] == [0.0, 1.0]
    assert output.total_reward == 1.0


@each_tokenizer
@pytest.mark.parametrize(
    "first", ["8.</think>8", "8</think>8", "\n\n</think>8", "8 <answer>8", "8.", "8é😀</think>8", ""]
)
async def test_tokens_with_mask_1_are_the_engines(tokenizer: Any, first: str) -> None:
    """Of each completion a beginning, token for token with its log-probability; the text says the same."""
    scheduler = tips([first, SECOND], tokenizer)
    output = await one(scheduler)
    assert output.response_token_ids is not None
    assert output.response_loss_mask is not None
    ids, mask = output.response_token_ids[0], output.response_loss_mask[0]
    trained_on = [i for i, sampled in zip(ids, mask, strict=True) if sampled]
    kept = mask.index(0)
    assert trained_on[:kept] == sampled_by(scheduler, first)[:kept]
    assert trained_on[kept:] == sampled_by(scheduler, SECOND)
    assert output.rollout_logprobs == [[-i / 1000 for i in trained_on]]
    content = output.messages[-1]["content"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == content + "<|im_end|>"
    before = first.partition("</think>")[0].partition("<answer>")[0]
    assert before.startswith(content.partition(TIP)[0])


async def test_token_across_the_border_is_left_out() -> None:
    """This tokenizer has a token for the full stop and the beginning of the mark; the full stop goes with it."""
    tokenizer = TOKENIZERS["bpe"]
    ids = tokenizer.encode("The sum is 8.</think>", add_special_tokens=False)
    assert ".</" in map(tokenizer.decode, ([i] for i in ids))
    output = await one(tips(["The sum is 8.</think>8", "7"], tokenizer))
    assert output.messages[-1]["content"] == f"The sum is 8{TIP}7"


async def test_sampled_ids_are_never_tokenised_again() -> None:
    """T01: an unusual spelling of what is kept stays as it was sampled."""
    unusual = [*characters("[5 3 7]</think>8"), END]
    odd = ChatCompletionResponseChoice(ChatMessage("[5 3 7]</think>8"), token_ids=unusual)
    output = await one(tips([odd, "7"], ChatTokenizer()))
    assert output.response_token_ids is not None
    assert output.response_token_ids[0][:7] == characters("[5 3 7]")
    assert PLAIN not in output.response_token_ids[0]


async def test_answer_without_a_mark_only_loses_the_end_of_the_turn() -> None:
    output = await one(tips(["The answer is \\boxed{8}.", " 7"], ChatTokenizer()))
    assert output.messages[-1]["content"] == f"The answer is \\boxed{{8}}.{TIP} 7"
    assert output.response_token_ids is not None
    assert output.response_token_ids[0].count(END) == 1


async def test_marks_and_tip_are_a_subclass_away() -> None:
    class Boxed(MathTipsScheduler):
        tips_prompt = " Hm."
        answer_marks = ("\\boxed",)

    scheduler = Boxed(ScriptedEngine(["It is \\boxed{8}", " \\boxed{7}"], ChatTokenizer()))
    output = await one(scheduler)
    assert output.messages[-1]["content"] == "It is  Hm. \\boxed{7}"
    assert output.total_reward == 1.0


async def test_engine_on_text_is_given_the_text() -> None:
    """T12: without ids there is nothing to cut but the text, and the output says that ids are unknown."""
    scheduler = tips([FIRST, SECOND])
    output = await one(scheduler)
    assert output.messages[-1]["content"] == f"<think>The sum is 8.\n{TIP}{SECOND}"
    assert output.response_token_ids is None
    assert output.total_reward == 1.0


async def test_ids_without_a_tokenizer_cannot_be_cut() -> None:
    choice = ChatCompletionResponseChoice(ChatMessage("8"), token_ids=[1, 2])
    with pytest.raises(RolloutError, match="MathTipsScheduler cannot cut token ids without their tokenizer: pass"):
        await roll(tips([choice, "7"]))


@pytest.mark.parametrize("place", [0, 1])
async def test_logprobs_missing_in_one_turn_are_dropped_for_all(place: int) -> None:
    """T03: ids and masks stay."""
    script: list[Any] = [FIRST, SECOND]
    tokenizer = ChatTokenizer()
    ids = [*tokenizer.encode(script[place], add_special_tokens=False), END]
    script[place] = ChatCompletionResponseChoice(ChatMessage(script[place]), token_ids=ids)
    output = await one(tips(script, tokenizer))
    assert output.rollout_logprobs is None
    assert output.completion_logprobs is None
    assert output.completion_mask is not None
    assert sum(output.completion_mask) == len("<think>The sum is 8.\n" + SECOND) + 1


# -- where to cut -----------------------------------------------------------------------------------

MARKS = MathTipsScheduler.answer_marks
TEXTS = st.lists(
    st.sampled_from(["</think>", "<answer>", "The sum is 8.", ".</", "</thin", "é", "😀", "\n", " 8", "<|im_end|>"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=3),
    max_size=8,
).map("".join)


def longest_beginning(token_ids: Sequence[int], tokenizer: Any) -> int:
    """The same number, found by trying them all."""
    end = len(token_ids)
    specials = {i for i in token_ids if tokenizer.decode([i], skip_special_tokens=True) == ""}
    while end and token_ids[end - 1] in specials:
        end -= 1
    whole = tokenizer.decode(token_ids[:end], skip_special_tokens=False)
    before = whole[: min((whole.index(mark) for mark in MARKS if mark in whole), default=len(whole))]
    texts = (tokenizer.decode(token_ids[:n], skip_special_tokens=False) for n in range(end + 1))
    return max(n for n, text in enumerate(texts) if before.startswith(text))


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None, max_examples=100)
@given(text=TEXTS)
def test_the_cut_keeps_all_that_it_can(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokens_before(MARKS, ids, tokenizer) == longest_beginning(ids, tokenizer)


@settings(deadline=None, max_examples=100)
@given(ids=st.lists(st.integers(0, 499), max_size=40), text=TEXTS)
def test_the_cut_in_what_no_tokenizer_would_write(ids: list[int], text: str) -> None:
    """A model may sample any tokens, halves of characters included."""
    tokenizer = TOKENIZERS["bpe"]
    ids = [i for i in ids if i < len(tokenizer)] + tokenizer.encode(text, add_special_tokens=False)
    assert tokens_before(MARKS, ids, tokenizer) == longest_beginning(ids, tokenizer)


# -- rounds -----------------------------------------------------------------------------------------

WRONG, RIGHT = "<think>hm, 8</think>\n\nIt is 8", "<think>no</think>It is 7"


def thinking(script: Any, tokenizer: Any = None, **options: Any) -> ThinkingModelTipsScheduler:
    return ThinkingModelTipsScheduler(ScriptedEngine(script, tokenizer), acc_function=is_seven, **options)


@each_tokenizer
async def test_every_round_is_an_output(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Messages as the model saw them, with the last thinking alone; ids, masks and log-probabilities of the round."""
    scheduler = thinking([WRONG, RIGHT], tokenizer)
    first, second = await roll(scheduler)
    prompts = [call.request.prompt_token_ids for call in scheduler.engine.calls]  # type: ignore[union-attr]
    assert first.messages == [QUESTION, {"role": "assistant", "content": WRONG}]
    assert second.messages == [
        QUESTION,
        {"role": "assistant", "content": "It is 8"},
        {"role": "user", "content": ADVICE},
        {"role": "assistant", "content": RIGHT},
    ]
    for output, prompt, text in zip((first, second), prompts, (WRONG, RIGHT), strict=True):
        ids = sampled_by(scheduler, text)
        assert prompt is not None
        assert tokenizer.decode(prompt, skip_special_tokens=False) == chatml(output.messages[:-1], True)
        assert output.prompt_token_ids == prompt
        assert output.response_token_ids == [ids]
        assert output.completion_token_ids == ids
        assert output.completion_mask == [1] * len(ids)
        assert output.completion_logprobs == [-i / 1000 for i in ids]
        assert output.response is not None
        assert output.response.choices[0].message.content == text
        assert output.rollout_infos["segments"] == 1
    assert caplog.records == []


async def test_rounds_have_rewards_numbers_and_reasons_of_their_own() -> None:
    first, second = await roll(thinking([WRONG, RIGHT]))
    assert [first.total_reward, second.total_reward] == [0.0, 1.0]
    assert [first.rollout_infos["rewards"], second.rollout_infos["rewards"]] == [
        {"accuracy_reward": 0.0},
        {"accuracy_reward": 1.0},
    ]
    assert [first.rollout_infos["num_turns"], second.rollout_infos["num_turns"]] == [1, 2]
    assert [first.stop_reason, second.stop_reason] == [StopReason.FINISHED, StopReason.FINISHED]
    assert [first.uuid, second.uuid] == ["u", "u"]


async def test_extra_rewards_are_those_of_the_round() -> None:
    scheduler = thinking([WRONG, RIGHT], extra_rewards={"length": lambda episode: len(episode.turns[-1].text)})
    outputs = await roll(scheduler)
    assert [output.rollout_infos["rewards"]["length"] for output in outputs] == [len(WRONG), len(RIGHT)]


def test_extra_reward_that_raises_for_a_round_leaves_its_own_trajectory_unscored() -> None:
    """All rounds of it, in both modes; the other trajectory stands."""

    def fragile(episode: Episode) -> float:
        if episode.turns[-1].text == WRONG:
            raise LookupError("a bug")
        return 1.0

    def script(request: RolloutInferRequest, turn: int) -> str:
        return WRONG if request.uuid == "b" and turn == 0 else RIGHT

    scheduler = thinking(script, extra_rewards={"mine": fragile})
    free = asyncio.run(roll(scheduler, ask("a"), ask("b")))
    engine = scheduler.engine
    assert engine is not None
    lockstep = run_multi_turn([ask("a"), ask("b")], None, scheduler, rollout_fn_of(engine), RequestConfig())
    for a, *rounds in (free, lockstep):
        assert a.rollout_infos["rewards"] == {"accuracy_reward": 1.0, "mine": 1.0}
        assert [(output.error, output.total_reward) for output in rounds] == [("LookupError: a bug", None)] * 2


async def test_reason_of_the_last_round_is_the_trajectorys() -> None:
    cut = ChatCompletionResponseChoice(ChatMessage("<think>hm"), finish_reason="length")
    outputs = await roll(thinking([WRONG, cut]))
    assert [output.stop_reason for output in outputs] == [StopReason.FINISHED, StopReason.LENGTH]


async def test_rounds_stand_in_the_place_of_their_request() -> None:
    scheduler = thinking(lambda request, turn: WRONG if request.uuid == "b" and turn == 0 else RIGHT)
    outputs = await roll(scheduler, ask("a"), ask("b"), ask("c"))
    assert [(output.uuid, output.rollout_infos["num_turns"]) for output in outputs] == [
        ("a", 1),
        ("b", 1),
        ("b", 2),
        ("c", 1),
    ]


async def test_thinking_in_the_datasets_answers_is_not_shown() -> None:
    earlier = {"role": "assistant", "content": "<think>hello?</think>Hello!"}
    request = RolloutInferRequest([{"role": "user", "content": "Hi"}, earlier, QUESTION], data_dict={"solution": "7"})
    output = await one(thinking(["", RIGHT]), request)
    assert [message["content"] for message in output.messages] == ["Hi", "Hello!", QUESTION["content"], RIGHT]


async def test_answer_without_thinking_stays_as_it_was_sampled() -> None:
    """The second prompt then begins with the first and the ids of its answer."""
    unusual = [*characters("[5 3 7] 8 "), END]
    odd = ChatCompletionResponseChoice(ChatMessage("[5 3 7] 8 "), token_ids=unusual)
    first, second = await roll(thinking([odd, RIGHT], ChatTokenizer()))
    assert first.prompt_token_ids is not None
    assert second.prompt_token_ids is not None
    assert second.prompt_token_ids[: len(first.prompt_token_ids) + len(unusual)] == [*first.prompt_token_ids, *unusual]


async def test_failure_leaves_all_rounds_unscored() -> None:
    """A09: what had been played is there, masked, and says what went wrong."""

    class Patient(ThinkingModelTipsScheduler):
        def check_finished(self, request: Any, choice: ChatCompletionResponseChoice, current_turn: int) -> bool:
            return current_turn == 3

    engine = ScriptedEngine(
        lambda request, turn: OSError("gone") if (request.uuid, turn) == ("b", 2) else WRONG, ChatTokenizer()
    )
    outputs = await roll(Patient(engine, acc_function=is_seven), ask("a"), ask("b"))
    assert [output.total_reward for output in outputs] == [0.0, 0.0, 0.0, None, None]
    for output in outputs[3:]:
        assert output.stop_reason is StopReason.ERROR
        assert output.error == "OSError: gone"
        assert isinstance(output.exception, OSError)
        assert output.messages[-1]["content"] == WRONG
        assert output.completion_mask == [0] * (len(WRONG) + 1)


async def test_failure_before_the_first_answer_is_one_output() -> None:
    scheduler = thinking(lambda request, turn: OSError("gone") if request.uuid == "b" else RIGHT)
    good, bad = await roll(scheduler, ask("a"), ask("b"))
    assert good.total_reward == 1.0
    assert bad.error == "OSError: gone"
    assert bad.rollout_infos["num_turns"] == 0


async def test_cancelled_rounds_end_their_trajectory() -> None:
    started = asyncio.Event()

    async def script(request: RolloutInferRequest, turn: int) -> str:
        if turn == 1:
            started.set()
            await asyncio.Event().wait()
        return WRONG

    async with thinking(script) as scheduler:
        running = asyncio.ensure_future(roll(scheduler))
        await started.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert scheduler._episodes == {}
