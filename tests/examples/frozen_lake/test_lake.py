"""The lake: random maps, ways to the goal, and text."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.frozen_lake.lake import Cell, Lake, parse_lake, random_lake

LAKE = Lake(("SFH", "HFF", "GHF"))
WAY = Lake(("SFF", "HHF", "GFF"))

lakes = st.builds(
    lambda seed, size, p: random_lake(random.Random(seed), size=size, p=p),
    st.integers(0, 10**6),
    st.integers(2, 8),
    st.floats(0, 1),
)


@given(lakes)
def test_every_random_lake_can_be_crossed(lake: Lake) -> None:
    """One start, one goal, and a way that ends on the goal without touching a hole, as short as any."""
    cells = "".join(lake.rows)
    assert (cells.count("S"), cells.count("G")) == (1, 1)
    assert set(cells) <= set("SGFH")
    player = lake.find("S")
    path = lake.path(player)
    assert len(path) == lake.distances()[player] < len(cells)
    for direction in path:
        assert lake.at(player) in "SF"
        player = lake.move(player, direction)
    assert lake.at(player) == "G"


@given(lakes)
def test_lake_is_read_back_from_what_the_player_sees(lake: Lake) -> None:
    start = lake.find("S")
    seen = parse_lake(f"You moved.\n{lake.render(start)}")
    assert seen is not None
    assert seen[1] == start
    assert seen[0].path(start) == lake.path(start)


def test_same_seed_same_lake() -> None:
    """S12, S14: a group walks over one lake, on every machine; the process's own random state has no part in it."""
    random.seed(1)
    state = random.getstate()
    assert random_lake(random.Random(5), size=4, p=0.8).rows == ("SFFH", "FHFF", "HFHG", "FFFF")
    assert random.getstate() == state
    assert len({random_lake(random.Random(seed), size=4, p=0.8) for seed in range(100)}) > 90


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_extreme_shares_of_ice(p: float) -> None:
    """Without any ice the goal lies beside the start; without any hole the way is straight."""
    lake = random_lake(random.Random(0), size=6, p=p)
    start, goal = lake.find("S"), lake.find("G")
    straight = abs(start.row - goal.row) + abs(start.col - goal.col)
    assert len(lake.path(start)) == straight
    assert p == 1.0 or straight == 1


def test_moves_stop_at_the_edge() -> None:
    corner = Cell(0, 0)
    assert [LAKE.move(corner, d) for d in ("up", "left", "down", "right")] == [corner, corner, (1, 0), (0, 1)]


def test_shortest_way() -> None:
    assert WAY.path(Cell(0, 0)) == ["right", "right", "down", "down", "left", "left"]
    assert WAY.path(Cell(2, 0)) == []
    with pytest.raises(ValueError, match="no way leads from row 0, column 0"):
        LAKE.path(Cell(0, 0))
    with pytest.raises(ValueError, match="has no 'G'"):
        Lake(("SF", "FF")).path(Cell(0, 0))


@pytest.mark.parametrize(
    "text",
    ["", "no map", "S F\nF G", "P F\nF F", "P F\nF G F", "P P\nF G", "P F\nF X"],
    ids=["empty", "words", "no player", "no goal", "ragged", "two players", "letter"],
)
def test_what_is_no_map(text: str) -> None:
    assert parse_lake(text) is None


def test_the_last_map_counts() -> None:
    assert parse_lake("P G\nF F\n\nthen\nF G\nP F\n") == (Lake(("FG", "FF")), Cell(1, 0))
