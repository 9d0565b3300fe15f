"""MathEnv: a question of mathematics with one or several attempts; an environment that lives in this process."""

from __future__ import annotations

import asyncio
from typing import Any

from examples.maths.policies import POLICIES
from schedulers import Env, Messages, RolloutInferRequest, envs
from schedulers.maths import math_grader
from schedulers.names import did_you_mean

__all__ = ["NAME", "SYSTEM_PROMPT", "MathEnv"]

NAME = "math"
"""In ``envs`` and in a row's ``env_config``."""

SYSTEM_PROMPT = """\
Solve the problem. Reason step by step, then give the final answer, and nothing but the answer, in \\boxed{}."""

_SETTINGS = ("question", "answer", "attempts")
_SCHEDULERS_OWN = {"name", "system_message"}


class MathEnv(Env):
    r"""Asks a question and grades the answers with math-verify (the extra ``math``).

    The reward is 1.0 for the right answer, which ends the episode, and 0.0 for a wrong one. After a wrong one the model
    is told so while attempts are left.

    Args:
        env_config: ``question`` and ``answer`` (its value, or a text that ends in ``\boxed{…}`` or ``#### number``),
            and ``attempts``, 1 by default.

    Raises:
        ImportError: math-verify is not installed.
        ValueError: A setting is missing, unknown or does not fit.
    """

    policies = POLICIES

    def __init__(self, env_config: dict[str, Any]) -> None:
        super().__init__(env_config)
        for name in env_config.keys() - _SCHEDULERS_OWN:
            if name not in _SETTINGS:
                hint = did_you_mean(name, _SETTINGS) or f"there are {', '.join(_SETTINGS)}"
                raise ValueError(f"env_config: a question has no setting {name!r}; {hint}")
        self.question = _text(env_config, "question")
        self.answer = _text(env_config, "answer")
        attempts = env_config.get("attempts")
        if attempts is not None and (type(attempts) is not int or attempts < 1):
            raise ValueError(f"env_config: attempts must be a whole number from 1, not {attempts!r}")
        self.attempts_left: int = attempts or 1
        self._grader = math_grader()

    async def reset(self, config: RolloutInferRequest) -> tuple[str, dict[str, Any], str]:
        """Ask."""
        return self.question, {"solved": False}, SYSTEM_PROMPT

    async def step(self, action: Messages) -> tuple[str, float, bool, dict[str, Any]]:
        """Grade the newest answer."""
        [accuracy] = await asyncio.to_thread(self._grader, [str(action[-1]["content"])], [self.answer])
        self.attempts_left -= 1
        solved = accuracy == 1
        done = solved or self.attempts_left == 0
        if solved:
            observation = "That is correct."
        elif done:
            observation = "That is not correct."
        else:
            observation = (
                f"That is not correct. Find the mistake and answer again in \\boxed{{}}; attempts left: "
                f"{self.attempts_left}."
            )
        return observation, accuracy, done, {"solved": solved}

    async def close(self) -> None:
        """There is nothing to release."""


def _text(env_config: dict[str, Any], name: str) -> str:
    value = env_config.get(name)
    if not isinstance(value, (str, int, float)) or not str(value).strip():
        raise ValueError(f"env_config: {name} must be a text (an answer may be a number), not {value!r}")
    return str(value)


envs[NAME] = MathEnv
