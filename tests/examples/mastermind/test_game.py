"""Mastermind as the model meets it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.mastermind.codes import Board, Code, count_pegs, render_code
from examples.mastermind.example import EXAMPLE
from examples.mastermind.game import MastermindGame, MastermindScheduler
from examples.mastermind.policies import first_candidate
from schedulers import RolloutInferRequest, multi_turns
from tests.examples.texts import REFUSED, answer, observation

RULES = (
    "You are playing Mastermind.\n"
    "You need to find the code that is {} digits long, each digit from 1 to {}, with {}.\n"
    "In your response, you can submit your guess in the following format: '[2 1 4 5]'.\n"
    "You have {} turns to guess the code.\n"
)
EASY = RULES.format(4, 6, "no duplicates", 20)
SECRET = (2, 5, 6, 4)
CODES = list(itertools.permutations(range(1, 7), 4))


def play(secret: Code, *guesses: Code | None) -> MastermindGame:
    """The game after these guesses; None is an answer without one."""
    game = MastermindGame(observation(EASY))
    for guess in guesses:
        if guess is None:
            game.record("Hm.", None, None)
            continue
        action = {"message": render_code(guess)}
        if guess == secret:
            game.record("", action, answer(reward=1.0, done=True))
        elif not game.board.allows(guess) or guess in [known.code for known in game.board.guesses]:
            game.record("", action, answer(REFUSED))
        else:
            pegs = count_pegs(secret, guess)
            text = f"Submitted {action['message']}. Feedback: {pegs.black} black peg(s), {pegs.white} white peg(s)."
            game.record("", action, answer(text))
    return game


def test_prompt_is_the_board() -> None:
    game = play(SECRET, (1, 2, 3, 4), (2, 1, 5, 4))
    assert game.prompt() == (
        "The code has 4 digits from 1 to 6, no digit twice.\n[1 2 3 4] black 1, white 1\n[2 1 5 4] black 2, white 1"
    )


@pytest.mark.parametrize(
    ("guesses", "feedback"),
    [
        ([(1, 2, 3, 4)], ""),
        ([(1, 2, 3, 4), (1, 2, 3, 4)], "[1 2 3 4] was refused."),
        ([(1, 1, 1, 1)], "[1 1 1 1] was refused."),
        ([(1, 2)], "[1 2] was refused."),
        ([None], MastermindGame.reminder),
        ([SECRET], "That is right."),
    ],
)
def test_line_before_the_board_says_what_was_wrong(guesses: list[Code | None], feedback: str) -> None:
    game = play(SECRET, *guesses)
    assert game.prompt() == f"{feedback}\n{game.board}".lstrip()


@pytest.mark.parametrize(
    ("guesses", "rewards"),
    [
        ([(1, 2, 3, 4)], [0.0, 0.0, 0.0]),
        ([(1, 2, 3, 4), (1, 3, 2, 5)], [-0.5, 0.0, 0.0]),
        ([(1, 2, 3, 4), (1, 2, 3, 4), None, (1, 1, 1, 1)], [-0.75, 0.0, 0.0]),
        ([SECRET], [0.0, 0.95, 1.0]),
        ([(1, 2, 3, 4), (1, 3, 2, 5), (1, 5, 6, 2), SECRET], [-0.5, 0.8, 1.0]),
    ],
)
def test_guesses_that_the_board_rules_out_are_wasted(guesses: list[Code | None], rewards: list[float]) -> None:
    game = play(SECRET, *guesses)
    assert list(game.rewards().values()) == pytest.approx(rewards)
    assert game.infos() == {"solved": rewards[-1] == 1.0}


@given(st.sampled_from(CODES), st.lists(st.sampled_from(CODES), max_size=4))
def test_prompt_tells_apart_no_codes_that_the_pegs_do_not(secret: Code, guesses: list[Code]) -> None:
    """What is hidden does not leak: any other code that agrees with the board makes the same prompt."""
    guesses = [guess for guess in guesses if guess != secret]
    game = play(secret, *guesses)
    assert game.board.agrees(secret)
    for other in itertools.islice(game.board.candidates(), 5):
        assert play(other, *guesses).prompt() == game.prompt()


def test_first_candidate_finds_every_code() -> None:
    """All 360, within a third of the turns."""
    for secret in CODES:
        guesses: list[Code] = []
        while not (game := play(secret, *guesses)).solved:
            text = first_candidate(RolloutInferRequest(messages=[{"role": "user", "content": game.prompt()}]), 0)
            guesses.append(tuple(map(int, text.strip("[]").split())))
        assert len(guesses) <= 7
        assert game.rewards()["consistency_reward"] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[2 1 4 5]", "[2 1 4 5]"),
        ("[2, 1, 4, 5]", "[2 1 4 5]"),
        ("not [1 2 3 4] but [ 02 1 4 5 ], see [1]", "[2 1 4 5]"),
        ("[1 2 3]", "[1 2 3]"),
        ("<think>[1 2 3 4]</think>[2 1 4 5]", "[2 1 4 5]"),
        ("<think>[1 2 3 4]", None),
        ("[2145]", None),
        ("2 1 4 5", None),
        ("[2 1\n4 5]", None),
        ("", None),
    ],
)
def test_the_last_code_in_brackets_is_sent(text: str, message: str | None) -> None:
    expected: dict[str, Any] | None = None if message is None else {"message": message}
    assert MastermindScheduler().parse_action(text) == expected


def test_examples_shown_to_the_model_parse() -> None:
    """P04."""
    for text in (MastermindGame.system_prompt, MastermindGame.reminder):
        assert MastermindScheduler().parse_action(text) == {"message": "[2 1 4 5]"}


def test_other_codes_are_read_from_the_rules() -> None:
    game = MastermindGame(observation(RULES.format(6, 12, "possible repeats", 50)))
    assert game.board == Board(6, 12, repeats=True)
    assert game.max_turns == 50


def test_names() -> None:
    assert multi_turns["mastermind_scheduler"] is MastermindScheduler
    assert EXAMPLE.env_id == MastermindGame.env_id
