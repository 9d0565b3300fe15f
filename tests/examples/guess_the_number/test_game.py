"""GuessTheNumber as the model meets it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.guess_the_number.example import EXAMPLE
from examples.guess_the_number.game import GuessTheNumberGame, GuessTheNumberScheduler
from examples.guess_the_number.policies import bisect
from schedulers import RolloutInferRequest, multi_turns
from tests.examples.texts import REFUSED, answer, observation

RULES = (
    "You are Player 0. You are playing Guess The Number.\n"
    "You have to guess the number between 1 and 20 within 10 turns.\n"
    "As you enter your guess, the game will provide you with hints such as 'higher' or 'lower'."
)


def play(secret: int, *guesses: int | None) -> GuessTheNumberGame:
    """The game after these guesses; None is an answer without one."""
    game = GuessTheNumberGame(observation(RULES))
    seen: set[int] = set()
    for guess in guesses:
        if guess is None:
            game.record("Hm.", None, None)
            continue
        action = {"message": f"[{guess}]"}
        if guess == secret:
            game.record("", action, answer(reward=1.0, done=True))
        elif guess in seen or not 1 <= guess <= 20:
            game.record("", action, answer(REFUSED))
        else:
            hint = "lower" if guess > secret else "higher"
            game.record("", action, answer(f"The target number is {hint}."))
        seen.add(guess)
    return game


@pytest.mark.parametrize(
    ("guesses", "prompt"),
    [
        ([], "The number lies between 1 and 20."),
        ([10], "The number is lower than 10.\nThe number lies between 1 and 9."),
        ([10, 5], "The number is higher than 5.\nThe number lies between 6 and 9."),
        ([10, 15], "The number is lower than 15.\nThe number lies between 1 and 9."),
        ([10, 10], "[10] was refused.\nThe number lies between 1 and 9."),
        ([99], "[99] was refused.\nThe number lies between 1 and 20."),
        ([10, None], f"{GuessTheNumberGame.reminder}\nThe number lies between 1 and 9."),
    ],
)
def test_prompt_says_what_is_known(guesses: list[int | None], prompt: str) -> None:
    assert play(7, *guesses).prompt() == prompt


@pytest.mark.parametrize(
    ("guesses", "rewards"),
    [
        ([10, 5, 6], [0.0, 0.0, 0.0]),
        ([10, 15], [-0.5, 0.0, 0.0]),
        ([10, 10], [-0.5, 0.0, 0.0]),
        ([0, None], [-1.0, 0.0, 0.0]),
        ([7], [0.0, 0.9, 1.0]),
        ([10, 12, 5, 7], [-0.25, 0.6, 1.0]),
    ],
)
def test_guesses_outside_of_what_is_left_are_wasted(guesses: list[int | None], rewards: list[float]) -> None:
    game = play(7, *guesses)
    assert list(game.rewards().values()) == pytest.approx(rewards)
    assert game.infos() == {"solved": rewards[-1] == 1.0}


@given(st.integers(1, 20), st.lists(st.one_of(st.none(), st.integers(0, 21)), max_size=10))
def test_what_the_prompt_says_is_true(secret: int, guesses: list[int | None]) -> None:
    """The secret stays in the range; whoever was told the same knows the same, so the prompt cannot tell more."""
    guesses = [guess for guess in guesses if guess != secret]
    game = play(secret, *guesses)
    assert game.low <= secret <= game.high
    for other in range(game.low, game.high + 1):
        if other not in guesses:
            assert play(other, *guesses).prompt() == game.prompt()


@pytest.mark.parametrize("secret", range(1, 21))
def test_bisecting_finds_every_number_within_five_guesses(secret: int) -> None:
    guesses: list[int | None] = []
    while not (game := play(secret, *guesses)).solved:
        text = bisect(RolloutInferRequest(messages=[{"role": "user", "content": game.prompt()}]), len(guesses))
        guesses.append(int(text.strip("[]")))
    assert len(guesses) <= 5
    assert game.rewards()["consistency_reward"] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[7]", "[7]"),
        ("I say [ 07 ].", "[7]"),
        ("[3] is too low, so [12]", "[12]"),
        ("[12], since it lies in [11 20]", "[12]"),
        ("<think>[3]</think>[12]", "[12]"),
        ("<think>[3]", None),
        ("7", None),
        ("[11 20]", None),
        ("[seven]", None),
        ("", None),
    ],
)
def test_the_last_single_number_in_brackets_is_sent(text: str, message: str | None) -> None:
    expected: dict[str, Any] | None = None if message is None else {"message": message}
    assert GuessTheNumberScheduler().parse_action(text) == expected


def test_examples_shown_to_the_model_parse() -> None:
    """P04."""
    for text in (GuessTheNumberGame.system_prompt, GuessTheNumberGame.reminder):
        assert GuessTheNumberScheduler().parse_action(text) == {"message": "[7]"}


def test_other_ranges_are_read_from_the_rules() -> None:
    game = GuessTheNumberGame(observation("guess the number between 1 and 50 within 12 turns."))
    assert (game.low, game.high, game.max_turns) == (1, 50, 12)


def test_names() -> None:
    assert multi_turns["guess_the_number_scheduler"] is GuessTheNumberScheduler
    assert EXAMPLE.env_id == GuessTheNumberGame.env_id
