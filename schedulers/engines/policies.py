"""Players without a model, as baselines: what they say is the script of a ``ScriptedEngine``."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeAlias

from schedulers.types import Messages, RolloutInferRequest

__all__ = ["Player", "Policy", "policy_of"]

Policy: TypeAlias = Callable[[RolloutInferRequest, int], str]
"""The answer to a request in a turn, counted from 0."""

Player: TypeAlias = Callable[[Messages, random.Random], str]
"""The answer to a conversation, for players that leave something to chance."""


def policy_of(player: Player, *, seed: int = 0) -> Policy:
    """Make a policy of a player.

    Its chance follows from the seed and the conversation and from nothing else: the same game is played the same way,
    whatever else is played beside it.

    Args:
        player: Answers.
        seed: Another one gives other games.
    """

    def policy(request: RolloutInferRequest, turn: int) -> str:
        said = [(message["role"], message["content"]) for message in request.messages]
        return player(request.messages, random.Random(repr((seed, said))))

    return policy
