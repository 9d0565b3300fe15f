"""What guessing games share: numbers in brackets, and the reward."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.guessing import GUESSING_REWARDS, GuessingGame, bracketed_numbers
from schedulers import EnvError
from tests.examples.texts import answer, observation

LIMIT = 10


class Even(GuessingGame):
    """Even numbers agree with all that is known; an answer that says nothing is a refusal."""

    reminder = "No guess."
    env_id = "Even-v0"
    announcement = re.compile(r"(?P<limit>\d+) turns")

    def agrees(self, guess: tuple[int, ...]) -> bool:
        return guess[0] % 2 == 0

    def learn(self, guess: tuple[int, ...]) -> str | None:
        return self.new_text or None


def play(*guesses: int | None, won: bool = False) -> Even:
    game = Even(observation(f"{LIMIT} turns"))
    for turn, guess in enumerate(guesses, 1):
        last = won and turn == len(guesses)
        reply = answer("wrong", reward=float(last), done=last)
        if guess is None:
            game.record("hmm", None, None)
        else:
            game.record("", {"message": f"[{guess}]"}, reply)
    return game


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("[7]", [(7,)]),
        ("first [7], no: [ 12 ]", [(7,), (12,)]),
        ("[2 1 4 5]", [(2, 1, 4, 5)]),
        ("[2, 1,4 ,5]", [(2, 1, 4, 5)]),
        ("[007]", [(7,)]),
        ("[\N{ARABIC-INDIC DIGIT SEVEN}]", [(7,)]),
        (f"[{'9' * 100_000}]", [(10**9,)]),
        ("<think>[7]</think>[8]", [(8,)]),
        ("<think>[7]", []),
        ("[7", []),
        ("7]", []),
        ("[]", []),
        ("[-7]", []),
        ("[7.5]", []),
        ("[1,,2]", []),
        ("[1\n2]", []),
        ("[seven]", []),
        ("7", []),
    ],
)
def test_numbers_in_brackets(text: str, numbers: list[tuple[int, ...]]) -> None:
    assert bracketed_numbers(text) == numbers


@given(st.lists(st.integers(0, 10**9), min_size=1), st.text(alphabet="[]0123456789 ,\n<think>/", max_size=40))
def test_the_last_canonical_bracket_is_read_back(numbers: list[int], before: str) -> None:
    """Whatever stands before it outside an open thought."""
    text = f"{before}</think>[{' '.join(map(str, numbers))}]"
    assert bracketed_numbers(text)[-1] == tuple(numbers)


@given(st.text())
def test_no_text_raises(text: str) -> None:
    bracketed_numbers(text)


@pytest.mark.parametrize(
    ("game", "rewards"),
    [
        (play(), (0.0, 0.0, 0.0)),
        (play(2), (0.0, 0.0, 0.0)),
        (play(2, 3), (-0.5, 0.0, 0.0)),
        (play(2, None), (-0.5, 0.0, 0.0)),
        (play(1, 3, None), (-1.0, 0.0, 0.0)),
        (play(2, won=True), (0.0, 0.9, 1.0)),
        (play(3, None, 4, 6, won=True), (-0.5, 0.6, 1.0)),
        (play(*[2] * 12, won=True), (0.0, 0.0, 1.0)),
    ],
)
def test_rewards(game: Even, rewards: tuple[float, ...]) -> None:
    """Penalties for wasted answers; speed and the prize for finding only."""
    assert game.rewards() == pytest.approx(dict(zip(GUESSING_REWARDS, rewards, strict=True)))
    assert game.infos() == {"solved": rewards[-1] == 1.0}
    assert tuple(game.rewards()) == game.reward_names


@given(st.lists(st.one_of(st.none(), st.integers(0, 99)), max_size=15))
def test_losing_never_pays_and_winning_always_does(guesses: list[int | None]) -> None:
    """Whatever was guessed: a lost game gets nothing at best, a won one more than that."""
    assert sum(play(*guesses).rewards().values()) <= 0
    assert sum(play(*guesses, 2, won=True).rewards().values()) > 0


def test_lost_game_that_the_environment_pays_for_is_not_won() -> None:
    """TextArena pays a share for coming near."""
    game = play(2)
    game.record("", {"message": "[4]"}, answer("near", reward=0.95, done=True))
    assert game.infos() == {"solved": False}
    assert sum(game.rewards().values()) == 0


def test_feedback_says_what_came_of_the_answer() -> None:
    assert play().feedback == ""
    assert play(None).feedback == "No guess."
    assert play(2).feedback == "wrong"
    assert play(2, won=True).feedback == "That is right."
    refused = play()
    refused.record("", {"message": "[4]"}, answer(reward=0.5, done=True))  # the refusal that loses is without words
    assert refused.feedback == "[4] was refused."


def test_turn_limit_is_the_announced_one() -> None:
    assert play().max_turns == LIMIT


def test_another_game_is_refused() -> None:
    with pytest.raises(EnvError, match="states no rules of Even-v0"):
        Even(observation("Let us play chess."))
