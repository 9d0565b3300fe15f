"""The folder of an evaluation."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from schedulers import RolloutOutput
from schedulers.commands.names import WrongUse
from schedulers.commands.results import Results, trajectories_of


def output(reward: float | None = 1.0) -> RolloutOutput:
    infos = {"stop_reason": "env_done", "total_reward": reward, "num_turns": 1, "error": None}
    return RolloutOutput(response=None, messages=[], uuid="u", rollout_infos=infos)


def test_game_is_on_disk_as_soon_as_it_is_added(tmp_path: Path) -> None:
    results = Results(tmp_path / "new" / "out", {"a": 1}, resume=False)
    with results.open() as writer:
        assert json.loads((results.folder / "results.json").read_text())["complete"] is False
        for number in range(3):
            results.add(writer, [output()], game=number)
            assert len((results.folder / "trajectories.jsonl").read_text().splitlines()) == number + 1
    assert json.loads((results.folder / "results.json").read_text())["summary"]["games"] == 0  # not saved since
    results.save(complete=True)
    assert json.loads((results.folder / "results.json").read_text())["summary"]["games"] == 3


def test_scored_games_are_taken_up_and_others_are_dropped(tmp_path: Path) -> None:
    """Speed is that of this run; when the evaluation was started stays."""
    first = Results(tmp_path, {"a": 1}, resume=False)
    with first.open() as writer:
        for number, reward in enumerate((1.0, None, 2.0)):
            first.add(writer, [output(reward)], game=number)
    started = json.loads((tmp_path / "results.json").read_text())["started"]
    second = Results(tmp_path, {"a": 1}, resume=True)
    assert second.numbers == {0, 2}
    assert len(second.games) == 2
    assert second.games_per_minute is None
    with second.open() as writer:
        second.add(writer, [output()], game=1)
        second.seconds = 2.0
    assert second.games_per_minute == 30.0
    second.save(complete=True)
    assert json.loads((tmp_path / "results.json").read_text())["started"] == started
    assert len((tmp_path / "trajectories.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"settings": 3}'])
def test_file_that_holds_no_results_is_left_alone(tmp_path: Path, content: str) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(WrongUse, match="holds no results of an evaluation; name another folder"):
        Results(tmp_path, {}, resume=True)
    assert (tmp_path / "results.json").read_text() == content


def test_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    results = Results(tmp_path, {}, resume=False)
    with results.open() as writer:
        results.add(writer, [output()], game=0)
    path = tmp_path / "trajectories.jsonl"
    path.write_text("broken\n" + path.read_text())
    with pytest.raises(WrongUse, match=r"--resume: .*line 1: not a recorded trajectory"):
        Results(tmp_path, {}, resume=True)


def test_log_is_there_only_if_something_was_logged(tmp_path: Path) -> None:
    results = Results(tmp_path, {}, resume=False)
    with results.open():
        pass
    assert not (tmp_path / "eval.log").exists()
    with results.open():
        logging.getLogger("schedulers").warning("something")
    logging.getLogger("schedulers").warning("afterwards")
    assert (tmp_path / "eval.log").read_text().endswith("WARNING schedulers: something\n")


def test_trajectories_are_found_by_any_of_their_names(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    path.write_text("")
    assert trajectories_of(tmp_path) == trajectories_of(tmp_path / "results.json") == trajectories_of(path) == path
    with pytest.raises(WrongUse, match="no such file"):
        trajectories_of(tmp_path / "none")
