"""What an episode was asked and what it answered: enough to play it again and to see whether it comes out the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .errors import EnvironmentFailedError
from .protocol import Observation

__all__ = ["Outcome", "Played", "Recovery"]


class Recovery(NamedTuple):
    """A session that was lost and replaced.

    Attributes:
        error: How it was lost.
        replayed: How many steps were played again.
        seconds: How long it took until the new session stood where the old one had been.
    """

    error: str
    replayed: int
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """What came of a request, with a digest in the place of each part of the observation, which may be long.

    Args:
        parts: Names of what can be compared, such as ``"reward"``, and their values.
    """

    parts: Mapping[str, object]

    @classmethod
    def of(cls, answer: Observation | EnvironmentFailedError) -> Outcome:
        """The outcome that an answer stands for. Metadata is left out: servers put times and the like there."""
        if isinstance(answer, EnvironmentFailedError):
            return cls({"error": answer.message})
        observation = {f"observation[{key!r}]": _digest(value) for key, value in answer.observation.items()}
        return cls({"reward": answer.reward, "done": answer.done, **observation})

    def differences(self, other: Outcome) -> list[str]:
        """Names of the parts that are not the same in both."""
        names = self.parts.keys() | other.parts.keys()
        # A part that is missing is not one that is None.
        return sorted(name for name in names if self.parts.get(name, self) != other.parts.get(name, other))


class Played(NamedTuple):
    """A request that the environment acted on, as it was sent, and what came of it."""

    request: str
    outcome: Outcome


def _digest(value: object) -> bytes:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()
