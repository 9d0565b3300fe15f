"""FrozenLakeEnv: cross a random frozen lake to the goal; an environment that lives in this process."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, fields
from typing import Any

from examples.frozen_lake.lake import DIRECTIONS, random_lake
from examples.frozen_lake.policies import POLICIES
from schedulers import Env, Messages, RolloutInferRequest, envs
from schedulers.names import did_you_mean
from schedulers.thinking import visible_text

__all__ = ["NAME", "REMINDER", "SYSTEM_PROMPT", "FrozenLakeEnv", "LakeSettings", "parse_direction"]

NAME = "frozen_lake"
"""In ``envs`` and in a row's ``env_config``."""

SYSTEM_PROMPT = """\
You are crossing a frozen lake, one step per turn.

The map shows where you are (P), the goal (G), where you started (S), ice that holds (F) and holes (H). Walk to the \
goal in as few steps as you can. Stepping into a hole loses; a step off the map leaves you where you are.

Answer with exactly one step, up, down, left or right, like this:
<action>up</action>"""

REMINDER = "No step found. Answer with up, down, left or right, for example <action>up</action>."
"""What the model reads after an answer without a step."""

MAX_FAILURES = 2
"""So many answers in a row without a step lose the game."""

_FEEDBACK = {
    "moved": "",
    "blocked": "That is off the map; you stay where you are.",
    "no_step": REMINDER,
    "goal": "You reached the goal.",
    "hole": "You fell into a hole.",
}
_ACTION = re.compile(r"<action>([^<>]*)</action>", re.IGNORECASE)
_SCHEDULERS_OWN = {"name", "system_message"}


@dataclass(frozen=True)
class LakeSettings:
    """What an ``env_config`` may set.

    Args:
        seed: The same seed gives the same lake; None draws one.
        size: Rows and columns, 2 to 20.
        p: How likely a cell is to hold, 0 to 1.
        max_turns: The game is lost after so many answers; None is ``size * size``, more than any shortest way.
        progress_weight: The weight of coming nearer to the goal, beside 1.0 for reaching it.
    """

    seed: int | None = None
    size: int = 4
    p: float = 0.8
    max_turns: int | None = None
    progress_weight: float = 0.0

    @classmethod
    def from_config(cls, env_config: dict[str, Any]) -> LakeSettings:
        """Read and check the settings; an entry that is None counts as not given.

        Raises:
            ValueError: There is no such setting, or its value does not fit.
        """
        known = [field.name for field in fields(cls)]
        given = {k: v for k, v in env_config.items() if v is not None and k not in _SCHEDULERS_OWN}
        for name in given:
            if name not in known:
                hint = did_you_mean(name, known) or f"there are {', '.join(known)}"
                raise ValueError(f"env_config: the frozen lake has no setting {name!r}; {hint}")
        settings = cls(**given)
        settings._check("seed", "a whole number from 0", _is_int(settings.seed, 0))
        settings._check("size", "a whole number from 2 to 20", _is_int(settings.size, 2, 20))
        settings._check("p", "a number from 0 to 1", _is_number(settings.p) and settings.p <= 1)
        settings._check("max_turns", "a whole number from 1", _is_int(settings.max_turns, 1))
        settings._check("progress_weight", "a number from 0", _is_number(settings.progress_weight))
        return settings

    def _check(self, name: str, wanted: str, holds: bool) -> None:
        if not holds:
            raise ValueError(f"env_config: {name} must be {wanted}, not {getattr(self, name)!r}")


class FrozenLakeEnv(Env):
    """One walk over a lake.

    The reward is 1.0 for the step onto the goal and 0.0 for all others. With ``progress_weight`` w, each step also gets
    w times the share of the way that it won or lost, so that the goal is worth 1 + w in the end; a game that is lost
    gives back what it had won that way.

    Args:
        env_config: See ``LakeSettings``.

    Raises:
        ValueError: A setting is wrong.
    """

    policies = POLICIES

    def __init__(self, env_config: dict[str, Any]) -> None:
        super().__init__(env_config)
        self.settings = LakeSettings.from_config(env_config)
        self.lake = random_lake(random.Random(self.settings.seed), size=self.settings.size, p=self.settings.p)
        self.player = self.lake.find("S")
        self.turns_left = self.settings.max_turns or self.settings.size**2
        self.failures = 0
        self._distances = self.lake.distances()
        self._progress = 0.0

    async def reset(self, config: RolloutInferRequest) -> tuple[str, dict[str, Any], str]:
        """Show the lake."""
        info = {"seed": self.settings.seed, "solved": False, "shortest_path": self._distances[self.player]}
        return self.lake.render(self.player), info, SYSTEM_PROMPT

    async def step(self, action: Messages) -> tuple[str, float, bool, dict[str, Any]]:
        """Take the step of the newest answer; its ``status`` in the info says what came of it."""
        direction = parse_direction(str(action[-1]["content"]))
        status = "no_step" if direction is None else self._walk(direction)
        self.failures = self.failures + 1 if status == "no_step" else 0
        self.turns_left -= 1
        solved = status == "goal"
        done = solved or status == "hole" or self.failures == MAX_FAILURES or self.turns_left == 0
        reward = float(solved) + self._advance(lost=done and not solved)
        observation = "\n".join(filter(None, [_FEEDBACK[status], self.lake.render(self.player)]))
        return observation, reward, done, {"status": status, "solved": solved}

    async def close(self) -> None:
        """There is nothing to release."""

    def _walk(self, direction: str) -> str:
        before, self.player = self.player, self.lake.move(self.player, direction)
        letter = self.lake.at(self.player)
        if letter in "GH":
            return "goal" if letter == "G" else "hole"
        return "blocked" if self.player == before else "moved"

    def _advance(self, *, lost: bool) -> float:
        """The weighted change of the share of the way that lies behind the player; a lost game has come nowhere."""
        before = self._progress
        self._progress = 0.0 if lost else 1 - self._distances[self.player] / self._distances[self.lake.find("S")]
        return self.settings.progress_weight * (self._progress - before)


def parse_direction(text: str) -> str | None:
    """The step of an answer: what the last ``<action>`` outside thinking says, or None when that is no step."""
    actions = _ACTION.findall(visible_text(text))
    direction = actions[-1].strip().lower() if actions else None
    return direction if direction in DIRECTIONS else None


def _is_int(value: object, low: int, high: int | None = None) -> bool:
    return value is None or (type(value) is int and low <= value and (high is None or value <= high))


def _is_number(value: object) -> bool:
    return type(value) in {int, float} and 0 <= value < float("inf")  # type: ignore[operator]


envs[NAME] = FrozenLakeEnv
