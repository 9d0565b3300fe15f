"""Token ids, masks and log-probabilities of a trajectory."""

from __future__ import annotations

from typing import Any

import pytest

from schedulers.episode import Episode, Turn
from schedulers.types import ChatCompletionResponseChoice, ChatMessage, RolloutInferRequest, StopReason


def choice(
    token_ids: list[int] | None, logprobs: list[float] | None = None, text: str = "x"
) -> ChatCompletionResponseChoice:
    content = None if logprobs is None else {"content": [{"logprob": value} for value in logprobs]}
    return ChatCompletionResponseChoice(ChatMessage(text), token_ids=token_ids, logprobs=content)


def turn(prompt: list[int] | None, token_ids: list[int] | None, **options: Any) -> Turn:
    logprobs = None if token_ids is None else [-i / 1000 for i in token_ids]
    return Turn.from_choice(choice(token_ids, logprobs), prompt, **options)


def episode(*turns: Turn, reason: StopReason = StopReason.ENV_DONE) -> Episode:
    return Episode(RolloutInferRequest(uuid="u"), turns=list(turns), stop_reason=reason)


# Prompts [1, 2] + answer [30, 31] + environment [4, 5] + answer [60] + environment [7] + answer [80, 81]
THREE_TURNS = (
    turn([1, 2], [30, 31]),
    turn([1, 2, 30, 31, 4, 5], [60]),
    turn([1, 2, 30, 31, 4, 5, 60, 7], [80, 81]),
)


def test_ids_and_masks_by_turn() -> None:
    """T08: every turn of the model is trained on."""
    output = episode(*THREE_TURNS).to_output()
    assert output.response_token_ids == [[30, 31], [60], [80, 81]]
    assert output.response_loss_mask == [[1, 1], [1], [1, 1]]
    assert output.rollout_logprobs == [[-0.03, -0.031], [-0.06], [-0.08, -0.081]]


def test_flat_view_masks_what_the_environment_said() -> None:
    """T07: mask 1 on sampled tokens and 0 on all others; its sum is the number of sampled tokens."""
    output = episode(*THREE_TURNS).to_output()
    assert output.prompt_token_ids == [1, 2]
    assert output.completion_token_ids == [30, 31, 4, 5, 60, 7, 80, 81]
    assert output.completion_mask == [1, 1, 0, 0, 1, 0, 1, 1]


def test_flat_view_keeps_each_logprob_at_its_token() -> None:
    """T04: position i holds the value of id i, across the borders of turns; where nothing was sampled stands 0."""
    output = episode(*THREE_TURNS).to_output()
    assert output.completion_token_ids is not None
    assert output.completion_mask is not None
    assert output.completion_logprobs == [
        -i / 1000 if sampled else 0.0
        for i, sampled in zip(output.completion_token_ids, output.completion_mask, strict=True)
    ]


@pytest.mark.parametrize("reason", [StopReason.ENV_LOST, StopReason.ERROR, StopReason.CANCELLED])
def test_unscored_trajectory_is_masked_and_has_no_reward(reason: StopReason) -> None:
    """A10: a failure is told apart from a reward of 0, and nothing of it is trained on."""
    failed = episode(*THREE_TURNS)
    failed.step_rewards = [1.0, 2.0]
    failed.rewards = {"a": 3.0}
    failed.fail(reason, OSError("gone"))
    output = failed.to_output()
    assert output.total_reward is None
    assert output.error == "OSError: gone"
    assert output.exception is failed.exception
    assert output.stop_reason is reason
    assert output.rollout_infos["rewards"] == {}
    assert output.response_loss_mask == [[0, 0], [0], [0, 0]]
    assert output.completion_mask == [0] * 8
    assert output.completion_token_ids == [30, 31, 4, 5, 60, 7, 80, 81]


def test_infos_are_one_value_a_trajectory() -> None:
    """T14: flags are not collected by turn; what is by turn stands in lists of its own."""
    played = episode(*THREE_TURNS, reason=StopReason.LENGTH)
    played.step_rewards = [0.5, -1.0, 0.25]
    infos = played.to_output().rollout_infos
    assert infos["num_turns"] == 3
    assert infos["stop_reason"] == "length"
    assert infos["total_reward"] == -0.25
    assert infos["step_rewards"] == [0.5, -1.0, 0.25]
    assert infos["error"] is None
    assert infos["segments"] == 1


def test_first_reason_stays() -> None:
    played = Episode(RolloutInferRequest())
    played.stop(StopReason.PARSE_ERROR)
    played.stop(StopReason.MAX_TURNS)
    assert played.stop_reason is StopReason.PARSE_ERROR


def test_failure_counts_even_after_another_ending() -> None:
    """A fault after the last turn makes the trajectory unscored: nobody knows what is missing from its rewards."""
    played = episode(*THREE_TURNS)
    played.fail(StopReason.ENV_LOST, OSError("gone"))
    assert played.stop_reason is StopReason.ENV_LOST


@pytest.mark.parametrize("place", [0, 1, 2])
def test_ids_of_one_turn_unknown_are_unknown_for_all(place: int) -> None:
    """T12: what is missing is None for the whole trajectory, never an empty list."""
    turns = list(THREE_TURNS)
    turns[place] = turn(None, None)
    output = episode(*turns).to_output()
    assert output.response_token_ids is None
    assert output.response_loss_mask is None
    assert output.rollout_logprobs is None
    assert output.prompt_token_ids is None
    assert output.completion_token_ids is None
    assert output.completion_mask is None
    assert output.completion_logprobs is None


def test_prompt_unknown_leaves_the_turns_known() -> None:
    """T12: completion ids without prompt ids are kept; the flat view needs both and is None."""
    output = episode(turn(None, [30]), turn(None, [60])).to_output()
    assert output.response_token_ids == [[30], [60]]
    assert output.prompt_token_ids is None
    assert output.completion_token_ids is None


@pytest.mark.parametrize("logprobs", [None, [-0.1], [-0.1, -0.2, -0.3]])
def test_logprobs_that_do_not_fit_one_turn_are_dropped_for_all(logprobs: list[float] | None) -> None:
    """T03: a turn without log-probabilities, or with too few or too many, leaves none to the trajectory."""
    odd = Turn.from_choice(choice([60, 61], logprobs), [1, 2, 30, 31])
    output = episode(THREE_TURNS[0], odd).to_output()
    assert output.response_token_ids == [[30, 31], [60, 61]]
    assert output.rollout_logprobs is None
    assert output.completion_mask == [1, 1, 1, 1]
    assert output.completion_logprobs is None


def test_trajectory_that_was_split_shows_its_last_segment() -> None:
    """T09: a prompt that does not extend the turn before it begins a segment, and the number of segments tells."""
    output = episode(turn([1], [30]), turn([1, 30, 4], [50]), turn([9, 8], [70])).to_output()
    assert output.rollout_infos["segments"] == 2
    assert output.response_token_ids == [[30], [50], [70]]
    assert output.prompt_token_ids == [9, 8]
    assert output.completion_token_ids == [70]
    assert output.completion_mask == [1]


def test_continuation_is_part_of_the_turn_before_it() -> None:
    """The assistant's one message is one entry: what was sampled, the scheduler's words with mask 0, what followed."""
    first = turn([1, 2], [30, 31, 32]).with_tokens([30, 31, 90, 91], [1, 1, 0, 0], [-0.03, -0.031])
    output = episode(first, turn([1, 2, 30, 31, 90, 91], [40], continues=True)).to_output()
    assert output.response_token_ids == [[30, 31, 90, 91, 40]]
    assert output.response_loss_mask == [[1, 1, 0, 0, 1]]
    assert output.rollout_logprobs == [[-0.03, -0.031, -0.04]]
    assert output.completion_token_ids == [30, 31, 90, 91, 40]
    assert output.completion_logprobs == [-0.03, -0.031, 0.0, 0.0, -0.04]


def test_tokens_without_a_mask_are_all_trained_on() -> None:
    assert turn([1], [30, 31]).with_tokens([30, 31]).loss_mask == (1, 1)


def test_logprobs_for_all_tokens_are_cut_to_the_sampled_ones() -> None:
    given = turn([1], [30]).with_tokens([30, 90], [1, 0], [-0.5, -9.0])
    assert given.logprobs == (-0.5,)


def test_logprobs_of_the_engine_that_no_longer_fit_are_dropped() -> None:
    """A hook that cuts tokens without cutting log-probabilities leaves none, rather than shifted ones."""
    assert turn([1], [30, 31, 32]).with_tokens([30, 31]).logprobs is None


@pytest.mark.parametrize("logprobs", [None, []])
def test_logprobs_of_a_turn_that_was_cut_to_nothing_are_known(logprobs: list[float] | None) -> None:
    """The other turns' need not be dropped for it, whatever the engine gave for what is gone."""
    assert turn([1], [30, 31]).with_tokens([90, 91, 92], [0, 0, 0], logprobs).logprobs == ()


def test_mask_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="response_loss_mask has 1 entries and response_token_ids 2"):
        turn([1], [30, 31]).with_tokens([30, 31], [1])


def test_logprobs_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="rollout_logprobs has 3 entries for 2 tokens with loss mask 1"):
        turn([1], [30, 31]).with_tokens([30, 31], [1, 1], [-0.1, -0.2, -0.3])


def test_only_an_end_token_is_a_turn_of_one_token() -> None:
    """P09: an empty text with one id has one id and mask 1."""
    output = episode(Turn.from_choice(choice([2], [-0.7], text=""), [1])).to_output()
    assert output.response_token_ids == [[2]]
    assert output.completion_mask == [1]
    assert output.completion_logprobs == [-0.7]


def test_nothing_sampled_is_an_empty_turn() -> None:
    """P09: an engine that says it sampled no token at all is believed: known to be empty is not unknown."""
    output = episode(Turn.from_choice(choice([], [], text=""), [1])).to_output()
    assert output.response_token_ids == [[]]
    assert output.completion_token_ids == []
    assert output.rollout_infos["num_turns"] == 1


def test_no_turn_at_all() -> None:
    output = episode(reason=StopReason.CONTEXT).to_output()
    assert output.response is None
    assert output.response_token_ids == []
    assert output.prompt_token_ids is None
    assert output.completion_token_ids is None
    assert output.total_reward == 0.0
