"""MathTipsScheduler and ThinkingModelTipsScheduler: a wrong answer gets a tip and a second try."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from schedulers.engines.base import InferEngine, Tokenizer
from schedulers.episode import Episode
from schedulers.maths import AccuracyFunction, math_grader
from schedulers.multi_turn import MultiTurnScheduler, SchedulerOptions
from schedulers.thinking import visible_text
from schedulers.types import (
    ChatCompletionResponseChoice,
    Message,
    RolloutInferRequest,
    RolloutOutput,
    StopReason,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["MathTipsScheduler", "ThinkingModelTipsScheduler", "TipsScheduler"]


class TipsScheduler(MultiTurnScheduler):
    """Grades every answer and gives one tip after a wrong one. A subclass's ``step`` says how the tip is given.

    The row's ``solution`` is what answers are compared with. The accuracy of the last answer is the trajectory's
    reward, as ``total_reward`` and as ``rewards["accuracy_reward"]``; ``step_rewards`` say what each turn changed.

    Args:
        infer_engine: Samples the completions.
        max_turns: The most turns of a trajectory; 1 gives no tip.
        acc_function: Grades lists of answers against lists of solutions, 1.0 for right. It is called in a thread, for
            one answer at a time. None takes math-verify (the extra ``math``).
        options: Keywords of ``RolloutScheduler``.

    Attributes:
        tips_prompt: The tip.

    Raises:
        ImportError: There is no ``acc_function``, and math-verify is not installed.
    """

    tips_prompt: ClassVar[str]

    def __init__(
        self,
        infer_engine: InferEngine | None = None,
        max_turns: int | None = None,
        *,
        acc_function: AccuracyFunction | None = None,
        **options: Unpack[SchedulerOptions],
    ) -> None:
        super().__init__(infer_engine, max_turns, **options)
        self.acc_func: AccuracyFunction = math_grader() if acc_function is None else acc_function

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Grade the answer as it stands in the conversation.

        Raises:
            ValueError: The row has no ``solution``, or the accuracy is no finite number.
        """
        solution = infer_request.data_dict.get("solution")
        if solution is None:
            columns = sorted(infer_request.data_dict)
            raise ValueError(f"the row has no 'solution' to grade answers by, only {columns}; add that column")
        answer = infer_request.messages[-1]["content"]
        [accuracy] = await asyncio.to_thread(self.acc_func, [answer], [str(solution)])
        if not math.isfinite(accuracy):
            raise ValueError(f"acc_function gave {accuracy} for an answer; it must give a finite number")
        episode = self.episode(infer_request)
        episode.step_rewards.append(accuracy - episode.rewards.get("accuracy_reward", 0.0))
        episode.rewards["accuracy_reward"] = float(accuracy)
        return {}

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> bool:
        """Whether the answer is right, or the tip has been given, or the default rules end the trajectory."""
        tipped = current_turn > 1  # not a search for the tip's words: models learn to say them
        right = self.episode(infer_request).rewards["accuracy_reward"] == 1
        return tipped or right or super().check_finished(infer_request, response_choice, current_turn)


class MathTipsScheduler(TipsScheduler):
    """Takes a wrong answer back and lets the model go on in the same message, after a tip in its own voice.

    The message is cut where the answer begins, at the first of ``answer_marks``, or not at all when there is none. The
    cut lies between two tokens: what is kept are the very tokens that were sampled, with mask 1 and their
    log-probabilities, and a token that reaches across the border is left out whole, as is the end of the turn. The
    tip's tokens follow with mask 0, and the model's next ones after them.
    """

    tips_prompt = "But wait, that cannot be right."
    answer_marks: ClassVar[tuple[str, ...]] = ("</think>", "<answer>")

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Put the tip in the place of the answer.

        Raises:
            TypeError: The engine gave token ids, but there is no tokenizer to cut them with.
        """
        message = infer_request.messages[-1]
        text = response_choice.message.content
        before = message["content"][: len(message["content"]) - len(text)]
        if response_choice.token_ids is None:
            message["content"] = before + text[: _first(self.answer_marks, text)] + self.tips_prompt
            return {"infer_request": infer_request}
        if self.tokenizer is None:
            raise TypeError(
                f"{type(self).__name__} cannot cut token ids without their tokenizer: pass tokenizer=…, or take an "
                "engine that has one"
            )
        sampled = response_choice.token_ids
        kept = tokens_before(self.answer_marks, sampled, self.tokenizer)
        tip = list(self.tokenizer.encode(self.tips_prompt, add_special_tokens=False))
        token_ids = [*sampled[:kept], *tip]
        message["content"] = before + self.tokenizer.decode(token_ids, skip_special_tokens=False)
        result = {
            "infer_request": infer_request,
            "response_token_ids": token_ids,
            "response_loss_mask": [1] * kept + [0] * len(tip),
        }
        logprobs = self.episode(infer_request).turns[-1].logprobs
        return result if logprobs is None else {**result, "rollout_logprobs": list(logprobs[:kept])}


class ThinkingModelTipsScheduler(TipsScheduler):
    """Tells a thinking model that its answer was wrong, and gives one output for each round.

    Every round is a sample of its own: the conversation as the model saw it, in which earlier answers have lost their
    thinking, then what was sampled, with the ids, masks and log-probabilities of that round alone. A round's reward is
    the accuracy of its answer, and its ``num_turns`` the number of the round. If the trajectory fails, all of its
    rounds are unscored.
    """

    tips_prompt = "That answer is not correct. Go through your reasoning again, step by step, and find the mistake."
    _keeps_segments = True  # each round is an output of its own, so nothing gets lost where prompts change

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        """Take the thinking out of what the dataset's assistant has said."""
        for request in requests:
            request.messages[:] = map(_without_thinking, request.messages)

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Grade the answer and keep the round."""
        result = await super().on_turn_end(infer_request, response_choice, current_turn)
        episode = self.episode(infer_request)
        earlier: list[Episode] = episode.state or []
        this = Episode(
            replace(infer_request, messages=[dict(message) for message in infer_request.messages]),
            turns=[episode.turns[-1]],
            response=episode.response,
            rewards=dict(episode.rewards),
            step_rewards=[episode.rewards["accuracy_reward"]],
            sampling_seconds=episode.sampling_seconds - sum(each.sampling_seconds for each in earlier),
        )
        episode.state = [*earlier, this]
        return result

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        """Take the thinking out of the answer and put the tip after it."""
        messages = infer_request.messages
        messages[-1] = _without_thinking(messages[-1])
        messages.append({"role": "user", "content": self.tips_prompt})
        return {"infer_request": infer_request}

    def _add_rewards(self, episode: Episode) -> None:
        for each in self._rounds(episode) or [episode]:
            super()._add_rewards(each)

    def outputs_of(self, episode: Episode) -> list[RolloutOutput]:
        """One output for each round; the trajectory's own when it has none."""
        outputs = [this.to_output() for this in self._rounds(episode)]
        for number, output in enumerate(outputs, start=1):
            output.rollout_infos["num_turns"] = number
        return outputs or [episode.to_output()]

    def _rounds(self, episode: Episode) -> list[Episode]:
        """The rounds so far, which end as their trajectory does."""
        rounds: list[Episode] = episode.state or []
        for this in rounds:
            last = this is rounds[-1] or not episode.scored
            this.stop_reason = episode.stop_reason if last else StopReason.FINISHED
            this.exception = episode.exception
            this.infos = episode.infos
        return rounds


def tokens_before(marks: Sequence[str], token_ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """How many tokens from the first on hold nothing of the first mark, nor of what follows it.

    Args:
        marks: Texts to look for, wherever token borders lie.
        token_ids: What was sampled.
        tokenizer: What it was sampled with.

    Returns:
        The greatest such number; special tokens at the end, of which the end of the turn is one, never count.
    """

    def decode(count: int) -> str:
        return tokenizer.decode(token_ids[:count], skip_special_tokens=False)

    count = len(token_ids)
    while count and _is_special(token_ids[count - 1], tokenizer):
        count -= 1
    whole = decode(count)
    end = _first(marks, whole)
    # Not exact, because part of a character decodes to one or several replacement characters; hence the steps back.
    near = bisect_right(range(count + 1), end, key=lambda n: len(decode(n)))
    return next(n for n in range(min(near + 8, count), -1, -1) if whole[:end].startswith(decode(n)))


def _first(marks: Sequence[str], text: str) -> int:
    """Where the first of the marks begins; the text's length when there is none."""
    return min((text.index(mark) for mark in marks if mark in text), default=len(text))


def _is_special(token_id: int, tokenizer: Tokenizer) -> bool:
    shown = tokenizer.decode([token_id], skip_special_tokens=False)
    return shown != "" and tokenizer.decode([token_id], skip_special_tokens=True) == ""


def _without_thinking(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    shown = visible_text(message["content"])
    return message if shown == message["content"] else {**message, "content": shown.strip()}
