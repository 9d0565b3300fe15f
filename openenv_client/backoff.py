"""How long to wait before the next attempt."""

from __future__ import annotations

import random

__all__ = ["retry_delay"]

_chance = random.SystemRandom()  # not the global generator: training code seeds it and counts on its sequence


def retry_delay(failures: int, *, first: float, longest: float) -> float:
    """Seconds to wait after so many failures: doubled each time, and less by up to a half, by chance.

    Without chance all that failed together would come back together.

    Args:
        failures: How many there were, 1 at least.
        first: Seconds after the first one.
        longest: What the doubling stops at.
    """
    return min(first * 2.0 ** min(failures - 1, 60), longest) * _chance.uniform(0.5, 1.0)
