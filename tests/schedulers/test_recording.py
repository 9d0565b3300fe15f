"""Trajectories in files."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from openenv_client.testing import MockEnvServer, reply
from schedulers import OpenEnvScheduler, RequestConfig, RolloutInferRequest, RolloutOutput, StopReason
from schedulers.engines import ScriptedEngine
from schedulers.episode import Episode
from schedulers.recording import (
    SCHEMA_VERSION,
    TrajectoryWriter,
    installed_versions,
    keep_trajectories,
    read_trajectories,
)
from schedulers.types import Exchange, TurnRecord
from tests.schedulers.chat_tokenizer import ChatTokenizer


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
        start=Exchange(observation={"n": 0}),
        turns=[
            TurnRecord("[5 3 7]", reward=1.5, exchange=Exchange({"move": 1}, {"n": 1}, 0.1 + 0.2, True, {"k": "v"}))
        ],
        rollout_infos={**infos, **fields},
    )


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    """Everything of a trajectory but the engine's answer and the exception, the labels of the call, and versions."""
    path = tmp_path / "new" / "trajectories.jsonl"
    with TrajectoryWriter(path) as writer:
        returned = writer.write([output(), output(total_reward=None)], step=3, split="train")
    assert [(record["step"], record["rollout_infos"]["total_reward"]) for record in returned] == [(3, 1.5), (3, None)]
    first, second = read_trajectories(path)
    written = output()
    for name in ("uuid", "messages", "response_token_ids", "response_loss_mask", "rollout_logprobs"):
        assert first[name] == getattr(written, name)
    for name in ("prompt_token_ids", "completion_token_ids", "completion_mask", "completion_logprobs"):
        assert first[name] == getattr(written, name)
    assert first["rollout_infos"] == written.rollout_infos
    assert first["start"] == asdict(Exchange(observation={"n": 0}))
    assert first["turns"] == [asdict(turn) for turn in written.turns]
    assert (first["step"], first["split"]) == (3, "train")
    assert first["versions"] == installed_versions()
    assert {"python", "openenv"} <= first["versions"].keys()
    assert first["schema_version"] == SCHEMA_VERSION == 2
    assert second["rollout_infos"]["total_reward"] is None
    assert "exception" not in first


DOCUMENT = Path(__file__).parents[2] / "docs/reference/recording.md"


def test_documentation_has_every_field(tmp_path: Path) -> None:
    """docs/reference/recording.md: the fields of a record, and no others."""
    with TrajectoryWriter(tmp_path / "t.jsonl") as writer:
        writer.write([output()])
    [record] = read_trajectories(tmp_path / "t.jsonl")
    table = DOCUMENT.read_text(encoding="utf-8").partition("## Fields")[2].partition("Of a trajectory")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(record)
    infos = Episode(RolloutInferRequest()).to_output().rollout_infos
    assert all(f"`{name}`" in DOCUMENT.read_text(encoding="utf-8") for name in infos)


def test_code_of_the_documentation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/reference/recording.md."""
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)[0]
    exec(code, {"outputs": [output()]})  # noqa: S102
    assert capsys.readouterr().out == "1.5\n"


async def test_a_game_is_recorded_turn_by_turn(tmp_path: Path) -> None:
    """What the model said, what the server got and answered, what that was worth, how long it took, ids and seed."""

    def game(reset_kwargs: dict[str, Any]) -> Any:
        action = yield reply({"text": "go"}, reward=0.0)
        action = yield reply({"text": f"saw {action['message']}"}, reward=0.5)
        yield reply({"text": "over"}, reward=1.0, done=True)

    tokenizer = ChatTokenizer()
    with MockEnvServer(game) as server:
        row = {"env_config": {"base_url": server.base_url, "reset_kwargs": {"seed": 7}}}
        async with OpenEnvScheduler(ScriptedEngine(["a", " ", "b"], tokenizer)) as scheduler:
            outputs = await scheduler.async_infer([row])
    with TrajectoryWriter(tmp_path / "t.jsonl") as writer:
        writer.write(outputs)
    [record] = read_trajectories(tmp_path / "t.jsonl")
    infos, turns = record["rollout_infos"], record["turns"]
    assert record["start"]["observation"] == {"text": "go"}
    assert [turn["text"] for turn in turns] == ["a", " ", "b"]
    assert [turn["reward"] for turn in turns] == infos["step_rewards"] == [0.5, 0.0, 1.0]
    assert [turn["exchange"]["action"] for turn in turns] == [{"message": "a"}, None, {"message": "b"}]
    assert [turn["exchange"]["observation"] for turn in turns] == [{"text": "saw a"}, None, {"text": "over"}]
    assert [turn["exchange"]["done"] for turn in turns] == [False, False, True]
    for name in ("sampling", "environment", "waiting"):
        assert all(turn["seconds"][name] >= 0 for turn in turns)
        assert sum(turn["seconds"][name] for turn in turns) <= infos[f"{name}_seconds"] + 1e-5
    assert infos["waiting_seconds"] <= infos["environment_seconds"]
    assert (infos["seed"], infos["stop_reason"], infos["recoveries"]) == (7, "env_done", [])
    assert len(record["response_token_ids"]) == len(record["rollout_logprobs"]) == 3
    assert len(infos["fingerprint"]) == 16


def test_batches_are_on_disk_at_once_and_added_to_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for expected in (1, 2):
        with TrajectoryWriter(path) as writer:
            writer.write([output()])
            assert len(list(read_trajectories(path))) == expected


def test_records_that_were_read_are_written_as_they_are(tmp_path: Path) -> None:
    with TrajectoryWriter(tmp_path / "a.jsonl") as writer:
        writer.write([output(), output(note="x")], game=3)
    records = list(read_trajectories(tmp_path / "a.jsonl"))
    with TrajectoryWriter(tmp_path / "b.jsonl") as writer:
        writer.write_records(records)
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "a.jsonl").read_bytes()


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
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"t\.jsonl, line 2: not a recorded trajectory"):
        keep_trajectories(path, lambda record: True)
    assert path.read_bytes() == before


def test_file_of_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"schema_version": 99}) + "\n")
    with pytest.raises(ValueError, match=r"line 1: schema version 99, this reader knows 1 and 2; read it with"):
        list(read_trajectories(path))


def test_file_of_version_1_is_read_with_none_for_what_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"schema_version": 1, "uuid": "u", "rollout_infos": {"total_reward": 1.0}}) + "\n")
    [record] = read_trajectories(path)
    assert record["uuid"] == "u"
    assert record["turns"] is record["start"] is record["versions"] is None


def test_last_line_that_was_cut_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the length at which the process was killed; the reader says so, and a resumed run drops it."""
    path = tmp_path / "t.jsonl"
    with TrajectoryWriter(path) as writer:
        writer.write([output(note="first"), output(note="second")])
    content = path.read_bytes()
    begin = content.index(b"\n") + 1
    for length in (1, 20, len(content) - begin - 1):
        path.write_bytes(content[: begin + length])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            [record] = read_trajectories(path)
        assert record["rollout_infos"]["note"] == "first"
        assert "line 2 was cut" in caplog.text
        keep_trajectories(path, lambda record: True)
        assert path.read_bytes() == content[:begin]


def test_what_is_not_wanted_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    keep_trajectories(path, lambda record: False)
    assert not path.exists()
    with TrajectoryWriter(path) as writer:
        for game in range(4):
            writer.write([output()], game=game)
    keep_trajectories(path, lambda record: record["game"] % 2 == 1)
    assert [record["game"] for record in read_trajectories(path)] == [1, 3]
