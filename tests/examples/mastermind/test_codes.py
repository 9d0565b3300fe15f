"""Mastermind's codes, pegs and boards."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.mastermind.codes import Board, Code, Guess, Pegs, count_pegs, parse_board, render_code

EASY = Board(4, 6, repeats=False)

codes = st.lists(st.integers(1, 6), min_size=4, max_size=4).map(tuple)


def board_after(secret: Code, *guesses: Code, repeats: bool = True) -> Board:
    return Board(4, 6, repeats, tuple(Guess(guess, count_pegs(secret, guess)) for guess in guesses))


@pytest.mark.parametrize(
    ("secret", "guess", "pegs"),
    [
        ((2, 5, 6, 4), (1, 2, 3, 4), (1, 1)),
        ((1, 2, 3, 4), (1, 2, 3, 4), (4, 0)),
        ((1, 2, 3, 4), (4, 3, 2, 1), (0, 4)),
        ((1, 2, 3, 4), (5, 6, 5, 6), (0, 0)),
        ((1, 1, 2, 2), (1, 2, 1, 1), (1, 2)),
        ((1, 2, 2, 2), (1, 1, 1, 1), (1, 0)),
    ],
)
def test_pegs(secret: Code, guess: Code, pegs: tuple[int, int]) -> None:
    """Each digit of the code answers for one digit of the guess."""
    assert count_pegs(secret, guess) == pegs


@given(codes, codes)
def test_pegs_by_their_definition(secret: Code, guess: Code) -> None:
    """Black and white together are the best that any order of the guess could get in black."""
    pegs = count_pegs(secret, guess)
    assert sum(pegs) == max(count_pegs(secret, order).black for order in itertools.permutations(guess))
    assert pegs == count_pegs(guess, secret)


@pytest.mark.parametrize(
    ("code", "allowed"),
    [((1, 2, 3, 4), True), ((1, 2, 3), False), ((1, 2, 3, 7), False), ((0, 1, 2, 3), False), ((1, 1, 2, 3), False)],
)
def test_codes_without_repeats(code: Code, allowed: bool) -> None:
    assert EASY.allows(code) is allowed
    assert Board(4, 6, repeats=True).allows((1, 1, 2, 3))


def test_candidates_are_all_codes_in_order() -> None:
    assert list(EASY.candidates()) == list(itertools.permutations(range(1, 7), 4))
    assert list(Board(2, 2, repeats=True).candidates()) == [(1, 1), (1, 2), (2, 1), (2, 2)]


@given(codes, st.lists(codes, max_size=4))
def test_secret_always_agrees_with_its_own_board(secret: Code, guesses: list[Code]) -> None:
    """And a guess that was not right agrees no longer."""
    board = board_after(secret, *guesses)
    assert board.agrees(secret)
    assert not any(board.agrees(guess) for guess in guesses if guess != secret)


@given(codes, st.lists(codes, max_size=4), st.booleans())
def test_board_is_read_back_from_its_text(secret: Code, guesses: list[Code], repeats: bool) -> None:
    board = board_after(secret, *guesses, repeats=repeats)
    assert parse_board(f"[1 2 3 4] was refused.\n{board}") == board


def test_text_of_a_board() -> None:
    board = Board(4, 6, False, (Guess((1, 2, 3, 4), Pegs(1, 1)),))
    assert str(board) == "The code has 4 digits from 1 to 6, no digit twice.\n[1 2 3 4] black 1, white 1"
    assert str(Board(6, 12, True)) == "The code has 6 digits from 1 to 12, a digit may repeat."
    assert render_code((2, 1, 4, 5)) == "[2 1 4 5]"
    assert parse_board("[1 2 3 4] black 1, white 1") is None
