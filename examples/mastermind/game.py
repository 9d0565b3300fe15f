"""TextArena's Mastermind: a move of several digits, and a prompt that shows the whole board of guesses and pegs."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, ClassVar

from examples.guessing import GuessingGame, bracketed_numbers
from examples.mastermind.codes import Board, Guess, Pegs, render_code
from examples.mastermind.policies import POLICIES
from schedulers import TextArenaGame, TextArenaScheduler, multi_turns

__all__ = ["MastermindGame", "MastermindScheduler"]

_PEGS = re.compile(r"Feedback: (\d+) black peg\(s\), (\d+) white peg\(s\)")


class MastermindGame(GuessingGame):
    """One secret code, and the board of guesses and pegs."""

    system_prompt = """\
You are playing Mastermind. Find the secret code in as few guesses as you can.

Answer with exactly one guess, its digits in square brackets, and nothing else, like this:
[2 1 4 5]

Each guess is answered with pegs: a black one for each digit in its right place, a white one for each other digit that \
the code has in another place. A guess that was made before, or that breaks the rules of the code, is refused; two \
refused guesses in a row lose the game."""
    reminder = "No guess found. Answer with the digits of one guess in square brackets, for example [2 1 4 5]."
    env_id = "Mastermind-v0"
    announcement = re.compile(
        r"(?P<length>\d+) digits long, each digit from 1 to (?P<highest>\d+), with (?P<repeats>possible repeats|no dup)"
        r".*You have (?P<limit>\d+) turns",
        re.DOTALL,
    )

    def __init__(self, observation: dict[str, Any]) -> None:
        super().__init__(observation)
        repeats = self.announced["repeats"] == "possible repeats"
        self.board = Board(int(self.announced["length"]), int(self.announced["highest"]), repeats)

    def prompt(self) -> str:
        """What came of the last answer, and the board."""
        return f"{self.feedback}\n{self.board}".lstrip()

    def agrees(self, guess: tuple[int, ...]) -> bool:
        """Whether the board allows it to be the code."""
        return self.board.agrees(guess)

    def learn(self, guess: tuple[int, ...]) -> str | None:
        """Put the guess and its pegs on the board, which shows them."""
        pegs = _PEGS.search(self.new_text)
        if pegs is None:
            return None
        answered = Guess(guess, Pegs(int(pegs[1]), int(pegs[2])))
        self.board = replace(self.board, guesses=(*self.board.guesses, answered))
        return ""


class MastermindScheduler(TextArenaScheduler):
    """Plays TextArena's Mastermind."""

    game_class: ClassVar[type[TextArenaGame]] = MastermindGame
    policies = POLICIES

    def parse_action(self, text: str) -> dict[str, Any] | None:
        """The last bracket with two numbers or more, in its canonical form; None when there is none."""
        guesses = [numbers for numbers in bracketed_numbers(text) if len(numbers) > 1]
        return {"message": render_code(guesses[-1])} if guesses else None


multi_turns["mastermind_scheduler"] = MastermindScheduler
