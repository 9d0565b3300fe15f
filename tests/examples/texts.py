"""TextArena's texts as the server frames them, for games that are tested without a server."""

from __future__ import annotations

from typing import Any

from openenv_client import StepResult

REFUSED = "You attempted an invalid move. Reason: … Please resubmit a valid move."


def observation(*texts: str) -> dict[str, Any]:
    """What the game says."""
    return {"prompt": "", "messages": [{"sender_id": -1, "content": text, "category": ""} for text in texts]}


def answer(*texts: str, reward: float = 0.0, done: bool = False) -> StepResult:
    """What a move is answered with."""
    return StepResult(observation(*texts), reward, done, {})
