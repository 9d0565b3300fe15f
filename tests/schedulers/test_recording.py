"""Trajectories in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from schedulers import RequestConfig, RolloutInferRequest, RolloutOutput, StopReason
from schedulers.recording import TrajectoryWriter, read_trajectories


def output(**fields: Any) -> RolloutOutput:
    infos = {"stop_reason": "env_done", "total_reward": 1.5, "error": None, "step_rewards": [0.5, 1.0]}
    return RolloutOutput(
        response=None,
        messages=[{"role": "user", "content": "数独"}, {"role": "assistant", "content": "[5 3 7]"}],
        uuid="u",
        response_token_ids=[[1, 2]],
        response_loss_mask=[[1, 1]],
        rollout_logprobs=[[-0.1, -0.25]],
        prompt_token_ids=[9],
        completion_token_ids=[1, 2],
        completion_mask=[1, 1],
        completion_logprobs=[-0.1, -0.25],
        rollout_infos={**infos, **fields},
    )


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    """Everything of a trajectory but the engine's answer and the exception, and the labels of the call."""
    path = tmp_path / "new" / "trajectories.jsonl"
    with TrajectoryWriter(path) as writer:
        writer.write([output(), output(total_reward=None)], step=3, split="train")
    first, second = read_trajectories(path)
    written = output()
    for name in ("uuid", "messages", "response_token_ids", "response_loss_mask", "rollout_logprobs"):
        assert first[name] == getattr(written, name)
    for name in ("prompt_token_ids", "completion_token_ids", "completion_mask", "completion_logprobs"):
        assert first[name] == getattr(written, name)
    assert first["rollout_infos"] == written.rollout_infos
    assert (first["step"], first["split"]) == (3, "train")
    assert second["rollout_infos"]["total_reward"] is None
    assert "exception" not in first


def test_batches_are_on_disk_at_once_and_added_to_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for expected in (1, 2):
        with TrajectoryWriter(path) as writer:
            writer.write([output()])
            assert len(list(read_trajectories(path))) == expected


def test_one_line_each(tmp_path: Path) -> None:
    with TrajectoryWriter(tmp_path / "t.jsonl") as writer:
        writer.write([output(note="a\nb\u2028c\r")] * 3)
    assert len((tmp_path / "t.jsonl").read_text(encoding="utf-8").split("\n")) == 4


def test_half_a_character_of_a_model_survives(tmp_path: Path) -> None:
    """W19: a lone surrogate has no UTF-8 form and must not break the file."""
    with TrajectoryWriter(tmp_path / "t.jsonl") as writer:
        writer.write([output(text="bad \ud83d [5 3 7]")])
    [record] = read_trajectories(tmp_path / "t.jsonl")
    assert record["rollout_infos"]["text"] == "bad \ud83d [5 3 7]"


def test_infos_of_any_kind_can_be_written(tmp_path: Path) -> None:
    """Dataclasses become objects, all else its text: a hook's odd info must not lose a trajectory."""
    infos = {
        "request": RolloutInferRequest(uuid="r"),
        "config": RequestConfig(),
        "reason": StopReason.LENGTH,
        "path": Path("a"),
        "class": RolloutInferRequest,
    }
    with TrajectoryWriter(tmp_path / "t.jsonl") as writer:
        writer.write([output(**infos)])
    [record] = read_trajectories(tmp_path / "t.jsonl")
    read = record["rollout_infos"]
    assert read["request"]["uuid"] == "r"
    assert read["config"]["temperature"] == 1.0
    assert read["reason"] == "length"
    assert read["path"] == "a"
    assert "RolloutInferRequest" in read["class"]


@pytest.mark.parametrize("line", ["{", "[]", "3", '{"uuid": "u"}', ""])
def test_line_that_is_no_trajectory_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "t.jsonl"
    with TrajectoryWriter(path) as writer:
        writer.write([output()])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=r"t\.jsonl, line 2: not a recorded trajectory"):
        list(read_trajectories(path))


def test_file_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"schema_version": 99}) + "\n")
    with pytest.raises(ValueError, match="line 1: schema version 99, this reader knows 1"):
        list(read_trajectories(path))
