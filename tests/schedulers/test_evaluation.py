"""Means, shares and differences of recorded games."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from schedulers.evaluation import Game, began_differently, compare, mean, share, summarise


def record(seed: int | None = 1, *, reward: float | None = 1.0, **infos: Any) -> dict[str, Any]:
    known = {"seed": seed, "stop_reason": "env_done", "total_reward": reward, "num_turns": 3, "error": None}
    return {"uuid": "u", "response_loss_mask": [[1, 1, 0], [1]], "rollout_infos": {**known, **infos}}


def failed(seed: int, error: str = "SessionLost: gone") -> dict[str, Any]:
    return record(seed, reward=None, stop_reason="env_lost", error=error)


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
        (1, 1, 0.2065, 1.0),
        (81, 263, 0.2553, 0.3662),
    ],
)
def test_share_has_wilsons_interval(successes: int, count: int, low: float, high: float) -> None:
    """Published values (81 of 263: Newcombe 1998)."""
    estimate = share(successes, count)
    assert estimate.value == successes / count
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=5e-5)


def test_mean_has_the_normal_interval() -> None:
    estimate = mean([1.0, 2.0, 3.0, 4.0])
    half = 1.959964 * math.sqrt(5 / 3) / 2
    assert (estimate.value, estimate.count) == (2.5, 4)
    assert (estimate.low, estimate.high) == pytest.approx((2.5 - half, 2.5 + half))


def test_one_game_has_no_interval() -> None:
    estimate = mean([2.0])
    assert (estimate.value, estimate.low, estimate.high) == (2.0, None, None)


def test_intervals_cover_the_truth_about_19_times_in_20() -> None:
    rng = random.Random(5)
    covered = {"share": 0, "mean": 0, "difference": 0}
    rounds = 1000
    for _ in range(rounds):
        wins = [rng.random() < 0.3 for _ in range(40)]
        others = [rng.random() < 0.5 for _ in wins]
        estimates = {
            "share": (share(sum(wins), 40), 0.3),
            "mean": (mean([rng.gauss(1, 2) for _ in range(60)]), 1.0),
            "difference": (compare(games(wins), games(others))["solved"].change, 0.2),
        }
        for name, (estimate, truth) in estimates.items():
            assert estimate.low is not None
            assert estimate.high is not None
            covered[name] += estimate.low <= truth <= estimate.high
    for count in covered.values():
        assert 0.93 < count / rounds < 0.98


@pytest.mark.parametrize(
    ("gained", "lost", "same", "low", "high"), [(5, 1, 14, -0.04131, 0.40495), (0, 0, 100, -0.0192, 0.0192)]
)
def test_difference_of_shares_has_agresti_and_mins_interval(
    gained: int, lost: int, same: int, low: float, high: float
) -> None:
    """Computed by hand: ((b + .5) - (c + .5)) / (n + 2), and so on; never without width."""
    first = games([False] * gained + [True] * lost + [True] * same)
    second = games([True] * gained + [False] * lost + [True] * same)
    difference = compare(first, second)["solved"]
    assert difference.change.value == pytest.approx((gained - lost) / (gained + lost + same))
    assert (difference.change.low, difference.change.high) == pytest.approx((low, high), abs=5e-5)


def games(outcomes: list[bool]) -> list[Game]:
    return [Game.of(record(seed, solved=outcome)) for seed, outcome in enumerate(outcomes)]


def test_game_has_what_its_record_says() -> None:
    """Flags apart from numbers; measures, rewards, total, turns, sampled tokens and times, in this order."""
    game = Game.of(
        record(
            5,
            solved=True,
            gym_done=True,
            accepted_moves=6,
            fingerprint="f",
            odd=float("nan"),
            rewards={"win": 1.0},
            recoveries=[{}, {}],
            sampling_seconds=0.5,
        )
    )
    assert game.key == "seed 5"
    assert game.flags == {"solved": True}
    assert list(game.numbers.items()) == [
        ("accepted_moves", 6.0),
        ("win", 1.0),
        ("total_reward", 1.0),
        ("turns", 3),
        ("tokens", 3),
        ("sampling_seconds", 0.5),
    ]
    assert game.recoveries == 2


def test_unscored_games_are_counted_and_left_out_of_the_means() -> None:
    """A10: they are no defeats."""
    records = [record(1, reward=1.0, solved=True), record(2, reward=3.0), failed(3), failed(4, "ValueError: x: y")]
    summary = summarise(map(Game.of, records))
    assert (summary.games, summary.unscored) == (2, 2)
    assert summary.means["total_reward"].value == 2.0
    assert summary.shares["solved"].value == 0.5  # a game that never came to say so has not solved anything
    assert summary.stop_reasons == {"env_done": 2, "env_lost": 2}
    assert summary.errors == {"SessionLost": 1, "ValueError": 1}
    assert summary.first_error == "SessionLost: gone"


def test_summary_of_nothing_is_empty() -> None:
    summary = summarise([])
    assert (summary.games, summary.shares, summary.means) == (0, {}, {})
    assert summarise([Game.of(failed(1))]).means == {}


def test_games_of_the_same_seed_are_paired() -> None:
    """Whatever their order; games in one evaluation only, and unscored ones, are left out."""
    ones = [record(1, reward=1.0), record(2, reward=2.0), record(3, reward=100.0), failed(4)]
    others = [record(4, reward=100.0), record(2, reward=2.5), record(1, reward=3.0)]
    difference = compare(map(Game.of, ones), map(Game.of, others))["total_reward"]
    assert (difference.first, difference.second) == (1.5, 2.75)
    assert difference.change.value == 1.25
    assert difference.change.count == 2


def test_a_seed_that_was_played_twice_is_paired_in_order() -> None:
    ones = [record(1, reward=1.0), record(1, reward=2.0)]
    others = [record(1, reward=2.0), record(1, reward=1.0), record(1, reward=50.0)]
    difference = compare(map(Game.of, ones), map(Game.of, others))["total_reward"]
    assert difference.change.count == 2
    assert difference.change.value == 0.0


def test_a_flag_that_one_side_never_reports_is_not_compared() -> None:
    ones, others = [Game.of(record(solved=True))], [Game.of(record())]
    assert "solved" not in compare(ones, others)
    assert "solved" in compare(ones, ones)


def test_pairs_that_began_differently_are_counted_where_that_is_known() -> None:
    ones = [Game.of(record(seed, fingerprint=f"a{seed}")) for seed in (1, 2, 3)]
    others = [Game.of(record(1, fingerprint="a1")), Game.of(record(2, fingerprint="b")), Game.of(record(3))]
    assert began_differently(ones, others) == 1


def test_games_without_a_seed_are_paired_by_number() -> None:
    ones = [{**record(None, reward=1.0), "game": 0}, {**record(None, reward=2.0), "game": 1}]
    assert compare(map(Game.of, ones), map(Game.of, ones[1:]))["total_reward"].change.count == 1


def test_nothing_in_common_compares_to_nothing() -> None:
    assert compare(games([True]), [Game.of(record(9))]) == {}


def test_pairing_tells_small_differences_apart() -> None:
    """The same spread in both, and a constant gain: unpaired it would drown."""
    rewards = [random.Random(seed).gauss(0, 10) for seed in range(30)]
    ones = [Game.of(record(seed, reward=reward)) for seed, reward in enumerate(rewards)]
    others = [Game.of(record(seed, reward=reward + 1)) for seed, reward in enumerate(rewards)]
    change = compare(ones, others)["total_reward"].change
    assert (change.low, change.high) == pytest.approx((1.0, 1.0))
