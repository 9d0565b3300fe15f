"""Players of Mastermind without a model. They see what a model sees."""

from __future__ import annotations

import random

from examples.mastermind.codes import Board, parse_board, render_code
from schedulers import Messages, RolloutInferRequest
from schedulers.engines.policies import policy_of

__all__ = ["POLICIES", "first_candidate", "random_legal"]


def first_candidate(request: RolloutInferRequest, turn: int) -> str:
    """Guess the first code that agrees with the board that is shown.

    Raises:
        ValueError: No board is shown, or one that no code agrees with.
    """
    code = next(_shown(request.messages).candidates(), None)
    if code is None:
        raise ValueError(f"there is no code to be found in {request.messages[-1]['content']!r}")
    return render_code(code)


def random_legal(messages: Messages, rng: random.Random) -> str:
    """Any code that has not been guessed, whatever the pegs say.

    Raises:
        ValueError: No board is shown.
    """
    board = _shown(messages)
    guessed = {guess.code for guess in board.guesses}
    digits = range(1, board.highest + 1)
    while True:
        drawn = rng.choices(digits, k=board.length) if board.repeats else rng.sample(digits, board.length)
        if tuple(drawn) not in guessed:
            return render_code(tuple(drawn))


def _shown(messages: Messages) -> Board:
    board = parse_board(messages[-1]["content"])
    if board is None:
        raise ValueError(f"there is no code to be found in {messages[-1]['content']!r}")
    return board


POLICIES = {"random": policy_of(random_legal), "solver": first_candidate}
