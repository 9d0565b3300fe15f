"""What guessing games share: numbers in brackets, and a reward that pays for nothing but finding. Pure: no I/O."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from openenv_client import StepResult
from schedulers import EnvError, TextArenaGame
from schedulers.thinking import visible_text

__all__ = ["GUESSING_REWARDS", "GuessingGame", "bracketed_numbers"]

GUESSING_REWARDS = ("consistency_reward", "speed_reward", "correct_reward")

_BRACKETS = re.compile(r"\[[^\S\n]*(\d+(?:[^\S\n]*,[^\S\n]*\d+|[^\S\n]+\d+)*)[^\S\n]*\]")


class GuessingGame(TextArenaGame, ABC):
    """A TextArena game in which a secret is guessed. A subclass keeps what is known of the secret.

    Losing never pays: all that a lost game can get is the penalty for answers that could not have won.

    Args:
        observation: The environment's first observation.

    Attributes:
        env_id: The game's id, for the error when the server plays another one.
        announcement: Finds the rules in the first observation; its group ``limit`` is the number of turns.
        announced: What it found.
        feedback: What came of the last answer; empty before the first one.

    Raises:
        EnvError: The observation does not state the rules.
    """

    reward_names = GUESSING_REWARDS
    env_id: ClassVar[str]
    announcement: ClassVar[re.Pattern[str]]

    def __init__(self, observation: dict[str, Any]) -> None:
        super().__init__(observation)
        found = self.announcement.search(self.new_text)
        if found is None:
            raise EnvError(f"the observation states no rules of {self.env_id}; is the server running it (--env-id)?")
        self.announced = found
        self.feedback = ""
        self.solved = False
        self._consistent: list[bool] = []

    @abstractmethod
    def agrees(self, guess: tuple[int, ...]) -> bool:
        """Whether the guess may be right by all that the player has been told."""

    @abstractmethod
    def learn(self, guess: tuple[int, ...]) -> str | None:
        """Take in ``new_text``, the answer to a guess that is not right.

        Returns:
            What to say of it; None when it was refused.
        """

    @property
    def max_turns(self) -> int:
        """What the environment announces. It takes one guess more; in some games that one cannot win."""
        return int(self.announced["limit"])

    def record(self, text: str, action: dict[str, Any] | None, result: StepResult | None) -> None:
        """Judge the guess by what was known before it, then learn from it."""
        super().record(text, action, result)
        if action is None or result is None:
            self._consistent.append(False)
            self.feedback = self.reminder
            return
        guess = bracketed_numbers(action["message"])[-1]
        self._consistent.append(self.agrees(guess))
        self.solved = result.done and result.reward >= 1
        said = "That is right." if self.solved else self.learn(guess)
        self.feedback = f"{action['message']} was refused." if said is None else said

    def rewards(self) -> dict[str, float]:
        """The components.

        Returns:
            ``consistency_reward``: mean over answers of -1 for one that could not have been right or held no guess,
                else 0.
            ``speed_reward``: of a game that was won, the share of the turns that it did not need; else 0.
            ``correct_reward``: 1 if the secret was found, else 0.
        """
        turns = len(self._consistent)
        wasted = self._consistent.count(False)
        speed = max(0.0, 1 - turns / self.max_turns) if self.solved else 0.0
        return dict(zip(GUESSING_REWARDS, (-wasted / turns if wasted else 0.0, speed, float(self.solved)), strict=True))

    def infos(self) -> dict[str, Any]:
        """Whether the secret was found."""
        return {"solved": self.solved}


def bracketed_numbers(text: str) -> list[tuple[int, ...]]:
    """The brackets outside thinking that hold whole numbers and nothing else, in order.

    The numbers stand on one line, with blanks or one comma between them; digits of any script count. A number of more
    than nine digits is read as 10**9, which is out of every range.
    """
    return [
        tuple(int(digits) if len(digits) <= 9 else 10**9 for digits in re.findall(r"\d+", numbers))
        for numbers in _BRACKETS.findall(visible_text(text))
    ]
