"""What recorded games come to: means and shares with intervals, and two evaluations game by game. Pure: no I/O."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = [
    "HELD_OUT_SEED",
    "INTERVALS",
    "Difference",
    "Estimate",
    "Game",
    "Summary",
    "compare",
    "mean",
    "share",
    "summarise",
]

HELD_OUT_SEED = 1_000_000
"""Seeds from here on are for evaluation; no dataset of the examples and no training of a policy uses them."""

INTERVALS = "95%; shares: Wilson, means: normal; differences: Agresti-Min for shares, normal of paired differences else"

_Z = statistics.NormalDist().inv_cdf(0.975)
# Numbers in rollout_infos that describe the run or are shown elsewhere, and are no measure of play.
_BOOKKEEPING = {"num_turns", "total_reward", "segments", "seed", "gym_done"}


@dataclass(frozen=True)
class Estimate:
    """A mean or a share.

    Args:
        value: The mean, or the share from 0 to 1.
        low: The lower end of its 95% interval; None when one game says nothing of it.
        high: The upper end.
        count: Of how many games.
    """

    value: float
    low: float | None
    high: float | None
    count: int


def share(successes: float, count: int) -> Estimate:
    """A share with Wilson's interval."""
    value = successes / count
    spread = _Z**2 / count
    middle = (value + spread / 2) / (1 + spread)
    half = _Z * math.sqrt(value * (1 - value) / count + spread / (4 * count)) / (1 + spread)
    # At 0 and 1 the formula's end is exact but for rounding.
    return Estimate(value, min(value, max(0.0, middle - half)), max(value, min(1.0, middle + half)), count)


def mean(values: Sequence[float]) -> Estimate:
    """A mean with the normal interval."""
    value = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(value, None, None, len(values))
    half = _Z * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(value, value - half, value + half, len(values))


@dataclass(frozen=True)
class Game:
    """What a recorded game counts for.

    Args:
        key: Tells which game it was: its seed, else its number.
        stop_reason: How it ended.
        error: Why it is unscored; None of a scored one.
        flags: What it did or did not, such as ``solved``.
        numbers: What it measured, each reward and the total among them, in the order of the table.
        recoveries: How many lost sessions were replaced.
        fingerprint: The same for games that began alike; None when that is not known.
    """

    key: str
    stop_reason: str
    error: str | None = None
    flags: dict[str, bool] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    recoveries: int = 0
    fingerprint: str | None = None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Game:
        """Read a record, as ``read_trajectories`` gives it."""
        infos = record["rollout_infos"]
        seed, number = record.get("seed", infos.get("seed")), record.get("game", record.get("uuid"))
        game = cls(
            key=f"game {number}" if seed is None else f"seed {seed}",
            stop_reason=str(infos.get("stop_reason")),
            error=str(infos.get("error")) if infos.get("total_reward") is None else None,
            recoveries=len(infos.get("recoveries") or ()),
            fingerprint=infos.get("fingerprint"),
        )
        if game.error is not None:
            return game
        seconds = {name: value for name, value in infos.items() if name.endswith("_seconds")}
        measures = {k: v for k, v in infos.items() if k not in _BOOKKEEPING and k not in seconds}
        game.flags.update({k: v for k, v in measures.items() if isinstance(v, bool)})
        game.numbers.update({k: float(v) for k, v in measures.items() if k not in game.flags and _is_number(v)})
        game.numbers.update(infos.get("rewards") or {})
        game.numbers.update(total_reward=infos["total_reward"], turns=infos["num_turns"])
        mask = record.get("response_loss_mask")
        if mask is not None:
            game.numbers["tokens"] = sum(map(sum, mask))
        game.numbers.update(seconds)
        return game


@dataclass(frozen=True)
class Summary:
    """What games come to.

    Args:
        games: How many are scored. Shares and means are of those that report the value; a flag that a game leaves out
            counts as False.
        unscored: How many are not, because something failed.
        shares: By flag.
        means: By name.
        stop_reasons: How many games ended for which reason, unscored ones included.
        errors: How many games failed with which type of error.
        first_error: One of them, in full.
        recoveries: Lost sessions that were replaced, all games together.
    """

    games: int
    unscored: int
    shares: dict[str, Estimate]
    means: dict[str, Estimate]
    stop_reasons: dict[str, int]
    errors: dict[str, int]
    first_error: str | None
    recoveries: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def summarise(games: Iterable[Game]) -> Summary:
    """Shares, means and counts of games."""
    games = list(games)
    scored = [game for game in games if game.error is None]
    errors = [game.error for game in games if game.error is not None]
    return Summary(
        games=len(scored),
        unscored=len(errors),
        shares={name: share(sum(g.flags.get(name, False) for g in scored), len(scored)) for name in _names(scored)[0]},
        means={name: mean([g.numbers[name] for g in scored if name in g.numbers]) for name in _names(scored)[1]},
        stop_reasons=dict(Counter(game.stop_reason for game in games).most_common()),
        errors=dict(Counter(error.partition(":")[0] for error in errors).most_common()),
        first_error=errors[0] if errors else None,
        recoveries=sum(game.recoveries for game in games),
    )


@dataclass(frozen=True)
class Difference:
    """How a value differs between two evaluations of the same games.

    Args:
        first: In the first one.
        second: In the second one.
        change: ``second`` less ``first``, with its interval.
        is_share: The values are shares, not means.
    """

    first: float
    second: float
    change: Estimate
    is_share: bool = False


def compare(first: Iterable[Game], second: Iterable[Game]) -> dict[str, Difference]:
    """The differences by name, over the pairs of games that are scored in both.

    Where a seed was played several times, the first one is paired with the first one, and so on.
    """
    pairs = _pairs(first, second)
    flags, numbers = _names([game for pair in pairs for game in pair])
    differences: dict[str, Difference] = {}
    for name in flags:
        if not all(any(name in game.flags for game in side) for side in zip(*pairs, strict=True)):
            continue  # that one of them never reports it does not make it False
        outcomes = [(one.flags.get(name, False), other.flags.get(name, False)) for one, other in pairs]
        differences[name] = _share_difference(outcomes)
    for name in numbers:
        values = [(a.numbers[name], b.numbers[name]) for a, b in pairs if name in a.numbers and name in b.numbers]
        if values:
            ones_mean, others_mean = (statistics.fmean(side) for side in zip(*values, strict=True))
            differences[name] = Difference(ones_mean, others_mean, mean([b - a for a, b in values]))
    return differences


def began_differently(first: Iterable[Game], second: Iterable[Game]) -> int:
    """How many pairs of `compare` began with different games, as far as their fingerprints are known."""
    known = [(a.fingerprint, b.fingerprint) for a, b in _pairs(first, second) if a.fingerprint and b.fingerprint]
    return sum(one != other for one, other in known)


def _pairs(first: Iterable[Game], second: Iterable[Game]) -> list[tuple[Game, Game]]:
    """Games of the same seed that are scored in both."""
    ones, others = _by_key(first), _by_key(second)
    pairs = [(ones[key], others[key]) for key in ones if key in others]
    return [(one, other) for one, other in pairs if one.error is None and other.error is None]


def _share_difference(outcomes: Sequence[tuple[bool, bool]]) -> Difference:
    """Agresti and Min's interval for matched pairs: half a pair is added to each of the four cells."""
    first, second = (sum(side) / len(outcomes) for side in zip(*outcomes, strict=True))
    count = len(outcomes) + 2
    gained, lost = outcomes.count((False, True)) + 0.5, outcomes.count((True, False)) + 0.5
    middle = (gained - lost) / count
    half = _Z * math.sqrt(gained + lost - (gained - lost) ** 2 / count) / count
    change = second - first
    low, high = max(-1.0, middle - half), min(1.0, middle + half)
    return Difference(first, second, Estimate(change, low, high, len(outcomes)), is_share=True)


def _by_key(games: Iterable[Game]) -> dict[tuple[str, int], Game]:
    met: Counter[str] = Counter()
    found: dict[tuple[str, int], Game] = {}
    for game in games:
        found[game.key, met[game.key]] = game
        met[game.key] += 1
    return found


def _names(games: Sequence[Game]) -> tuple[list[str], list[str]]:
    """All flags and all numbers, in the order in which games name them."""
    flags = dict.fromkeys(name for game in games for name in game.flags)
    numbers = dict.fromkeys(name for game in games for name in game.numbers)
    return list(flags), list(numbers)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
