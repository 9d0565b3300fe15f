from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from openenv_client import ConfigurationError, EnvironmentFailedError, OpenEnvWrapper
from openenv_client.testing import Fault, MockEnvServer, record, reply, transcript

MakeWrapper = Callable[..., OpenEnvWrapper]

RECORDED = sorted((Path(__file__).parents[2] / "data" / "transcripts").glob("*.jsonl"))


def observation(number: int) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {"n": number}, "reward": number / 2, "done": number == 2}}


def game(seed: int, *moves: str) -> list[dict[str, Any]]:
    turns = [{"send": {"type": "reset", "data": {"seed": seed}}, "recv": observation(0)}]
    for number, move in enumerate(moves, start=1):
        turns.append({"send": {"type": "step", "data": {"move": move}}, "recv": observation(number)})
    return turns


def write(path: Path, *turns: Any) -> Path:
    path.write_text("".join(f"{json.dumps(turn)}\n" for turn in turns))
    return path


@pytest.fixture
def two_games(tmp_path: Path) -> Path:
    return write(tmp_path / "two.jsonl", *game(1, "a", "b"), *game(2, "x"))


# Playing


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recording_is_answered_frame_by_frame(path: Path) -> None:
    """Every answer is the recorded one, that to state included."""
    frames = [json.loads(line) for line in path.read_text().splitlines()]
    with (
        MockEnvServer(transcript(path)) as server,
        connect(server.base_url.replace("http", "ws") + "/ws", proxy=None) as connection,
    ):
        for frame in frames:
            connection.send(json.dumps(frame["send"]))
            assert json.loads(connection.recv()) == frame["recv"]
    assert len(frames) > 2


def test_the_reset_arguments_choose_the_episode(make: MakeWrapper, server: MockEnvServer, two_games: Path) -> None:
    """Sessions play side by side, and an episode can be played again."""
    server.script = transcript(two_games)
    one, other = make(), make()
    for _ in range(2):
        one.reset(seed=1)
        other.reset(seed=2)
        assert one.step({"move": "a"}).reward == 0.5
        assert other.step({"move": "x"}).reward == 0.5
        assert one.step({"move": "b"}).done


@pytest.mark.parametrize(
    ("seed", "moves", "message"),
    [
        (3, [], "two.jsonl: no episode was recorded for the reset {'seed': 3}, only line 1: {'seed': 1}; line 4: {'se"),
        (1, ["b"], "two.jsonl, line 2: recorded step {'move': 'a'}, received {'move': 'b'}"),
        (2, ["x", "y"], "two.jsonl: the episode ends after line 5, but received step {'move': 'y'}"),
    ],
)
def test_a_request_that_differs_fails_the_client_and_the_test(
    two_games: Path, seed: int, moves: list[str], message: str
) -> None:
    def play(server: MockEnvServer) -> None:
        with OpenEnvWrapper(base_url=server.base_url) as env:
            env.reset(seed=seed)
            for move in moves:
                env.step({"move": move})

    def play_in_spite_of_errors() -> None:
        with MockEnvServer(transcript(two_games)) as server, pytest.raises(EnvironmentFailedError) as caught:
            play(server)
        assert message in str(caught.value)

    with pytest.raises(AssertionError, match=re.escape(message)):
        play_in_spite_of_errors()


def test_without_strictness_answers_come_in_order(make: MakeWrapper, server: MockEnvServer, two_games: Path) -> None:
    server.script = transcript(two_games, strict=False)
    env = make()
    env.reset(seed=7)
    assert env.step({"move": "z"}).observation == {"n": 1}
    assert env.step({}).observation == {"n": 2}
    env.reset(seed=2)
    env.step({})
    with pytest.raises(EnvironmentFailedError, match="the script has no reply number 3"):
        env.step({})
    assert server.failures == []


def test_a_recorded_error_is_answered_and_the_episode_goes_on(make: MakeWrapper, tmp_path: Path) -> None:
    error = {"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "no such move"}}
    turns = [{"send": turn["send"], "recv": error} if n == 1 else turn for n, turn in enumerate(game(1, "a", "b"))]
    with MockEnvServer(transcript(write(tmp_path / "error.jsonl", *turns))) as server:
        env = make(base_url=server.base_url)
        env.reset(seed=1)
        with pytest.raises(EnvironmentFailedError, match="no such move"):
            env.step({"move": "a"})
        assert env.step({"move": "b"}).done


def test_a_lost_session_is_rebuilt_from_a_recording(make: MakeWrapper, two_games: Path) -> None:
    with MockEnvServer(transcript(two_games), faults=[Fault("drop", "step", nth=2)]) as server:
        env = make(base_url=server.base_url)
        env.reset(seed=1)
        env.step({"move": "a"})
        assert env.step({"move": "b"}).done
        assert server.actions == [{"move": "a"}, {"move": "a"}, {"move": "b"}]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], 'bad.jsonl holds no episode; a line is {"send": {"type": "reset", …}, "recv": {…}}'),
        (["{"], "bad.jsonl, line 1: not {"),
        ([[1]], "bad.jsonl, line 1: not {"),
        ([{"send": {"type": "reset"}}], "bad.jsonl, line 1: not {"),
        ([{"send": {"type": "dance"}, "recv": {"data": {}}}], "bad.jsonl, line 1: {"),
        ([{"send": {"type": "reset", "data": 1}, "recv": {"data": {}}}], "is no request of an OpenEnv client"),
        (game(1, "a")[1:], "bad.jsonl, line 1: a step comes before the first reset; record whole episodes"),
    ],
)
def test_a_file_that_holds_no_recording_is_refused_with_its_line(
    tmp_path: Path, lines: list[Any], message: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    with pytest.raises(ValueError, match=re.escape(message)):
        transcript(path)


def test_blank_lines_and_a_close_are_no_part_of_the_game(make: MakeWrapper, tmp_path: Path) -> None:
    path = write(tmp_path / "game.jsonl", *game(1, "a"), {"send": {"type": "close"}})
    path.write_text("\n" + path.read_text() + "\n\n")
    with MockEnvServer(transcript(path)) as server:
        env = make(base_url=server.base_url)
        env.reset(seed=1)
        assert env.step({"move": "a"}).reward == 0.5


# Recording


@pytest.fixture
def recorder(server: MockEnvServer, tmp_path: Path) -> Iterator[MockEnvServer]:
    """A server that records a game of another server, which stands for the real one."""
    server.script = [reply({"n": 0}), reply({"n": 1}, reward=0.5), reply({"n": 2}, reward=1.0, done=True)]
    with MockEnvServer(record(server.base_url, tmp_path / "game.jsonl")) as recording:
        yield recording


def test_what_was_recorded_can_be_played(
    server: MockEnvServer, recorder: MockEnvServer, make: MakeWrapper, tmp_path: Path
) -> None:
    def play(base_url: str) -> list[Any]:
        with OpenEnvWrapper(base_url=base_url) as env:
            return [env.reset(seed=1), env.step({"a": 1}), env.step({"a": "é"})]

    recorded = play(recorder.base_url)
    recorder.stop()
    assert (server.sessions, server.actions) == (0, [{"a": 1}, {"a": "é"}])
    with MockEnvServer(transcript(tmp_path / "game.jsonl")) as played:
        assert play(played.base_url) == recorded


def test_each_episode_is_recorded_as_one_piece(recorder: MockEnvServer, make: MakeWrapper, tmp_path: Path) -> None:
    envs = [make(base_url=recorder.base_url) for _ in range(2)]
    for seed in (1, 2):
        for number, env in enumerate(envs):
            env.reset(seed=10 * number + seed)
    for number, env in enumerate(envs):
        env.step({"move": number})
    recorder.stop()
    sent = [json.loads(line)["send"] for line in (tmp_path / "game.jsonl").read_text().splitlines()]
    kinds = [send["type"] for send in sent]
    assert sorted(send["data"]["seed"] for send in sent if send["type"] == "reset") == [1, 2, 11, 12]
    for n, send in enumerate(sent):
        if kinds[n] == "step":
            assert sent[n - 1] == {"type": "reset", "data": {"seed": 10 * send["data"]["move"] + 2}}


def test_an_error_of_the_real_server_reaches_the_client_and_the_recording(
    server: MockEnvServer, recorder: MockEnvServer, make: MakeWrapper, tmp_path: Path
) -> None:
    env = make(base_url=recorder.base_url)
    env.reset()
    server.inject(Fault("error", "step", "VALIDATION_ERROR"))
    with pytest.raises(EnvironmentFailedError, match="VALIDATION_ERROR"):
        env.step({})
    server.inject(Fault("drop", "step"))
    with pytest.raises(EnvironmentFailedError, match="cut during step"):
        env.step({})
    recorder.stop()
    codes = [
        json.loads(line)["recv"]["data"].get("code") for line in (tmp_path / "game.jsonl").read_text().splitlines()
    ]
    assert codes == [None, "VALIDATION_ERROR"]


def test_the_address_of_the_real_server_is_checked_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        record("ftp://x", tmp_path / "game.jsonl")
