"""TextArena's GuessTheNumber: a numeric move, and a prompt that says what is known of the number."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from examples.guess_the_number.policies import POLICIES
from examples.guessing import GuessingGame, bracketed_numbers
from schedulers import TextArenaGame, TextArenaScheduler, multi_turns

__all__ = ["GuessTheNumberGame", "GuessTheNumberScheduler"]


class GuessTheNumberGame(GuessingGame):
    """One secret number, and the range that it must lie in."""

    system_prompt = """\
You are playing Guess The Number. Find the secret whole number in as few guesses as you can.

Answer with exactly one guess in square brackets, and nothing else, like this:
[7]

After each guess you learn whether the number is lower or higher. A guess that was made before, or that lies outside \
of the range at the start, is refused; two refused guesses in a row lose the game."""
    reminder = "No guess found. Answer with one number in square brackets, for example [7]."
    env_id = "GuessTheNumber-v0"
    announcement = re.compile(r"between (?P<low>\d+) and (?P<high>\d+) within (?P<limit>\d+) turns")

    def __init__(self, observation: dict[str, Any]) -> None:
        super().__init__(observation)
        self.low, self.high = int(self.announced["low"]), int(self.announced["high"])

    def prompt(self) -> str:
        """What came of the last answer, and the range that is left."""
        return f"{self.feedback}\nThe number lies between {self.low} and {self.high}.".lstrip()

    def agrees(self, guess: tuple[int, ...]) -> bool:
        """Whether it lies in the range that is left."""
        return self.low <= guess[0] <= self.high

    def learn(self, guess: tuple[int, ...]) -> str | None:
        """Narrow the range."""
        [number] = guess
        if "is lower" in self.new_text:
            self.high = min(self.high, number - 1)
            return f"The number is lower than {number}."
        if "is higher" in self.new_text:
            self.low = max(self.low, number + 1)
            return f"The number is higher than {number}."
        return None


class GuessTheNumberScheduler(TextArenaScheduler):
    """Plays TextArena's GuessTheNumber."""

    game_class: ClassVar[type[TextArenaGame]] = GuessTheNumberGame
    policies = POLICIES

    def parse_action(self, text: str) -> dict[str, Any] | None:
        """The last number that stands alone in brackets, in its canonical form; None when there is none."""
        guesses = [numbers[0] for numbers in bracketed_numbers(text) if len(numbers) == 1]
        return {"message": f"[{guesses[-1]}]"} if guesses else None


multi_turns["guess_the_number_scheduler"] = GuessTheNumberScheduler
