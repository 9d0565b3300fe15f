from __future__ import annotations

import re
import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest

from openenv_client import EnvironmentFailedError, OpenEnvWrapper, ProtocolError, SessionLost
from openenv_client.testing import MockEnvServer, reply

MakeWrapper = Callable[..., OpenEnvWrapper]
Game = Generator[dict[str, Any], dict[str, Any], None]


def test_a_list_is_played_anew_with_every_reset(make: MakeWrapper, server: MockEnvServer) -> None:
    server.script = [reply({"n": 0}), reply({"n": 1}, reward=0.5, done=True, metadata={"a": 1})]
    env = make()
    for _ in range(2):
        assert env.reset().observation == {"n": 0}
        assert env.step({}) == ({"n": 1}, 0.5, True, {"a": 1})


def test_a_request_beyond_the_script_is_an_error_of_the_environment(make: MakeWrapper, server: MockEnvServer) -> None:
    server.script = [reply({})]
    env = make()
    env.reset()
    with pytest.raises(EnvironmentFailedError, match="the script has no reply number 2"):
        env.step({})
    assert [event.kind for event in server.applied] == ["reset"]


def test_a_generator_plays_a_game_for_each_session(make: MakeWrapper, server: MockEnvServer) -> None:
    def add(reset_kwargs: dict[str, Any]) -> Game:
        total = reset_kwargs["start"]
        while total < 10:
            action = yield reply({"total": total})
            total += action["add"]
        yield reply({"total": total}, reward=1.0, done=True)

    server.script = add
    one, other = make(), make()
    one.reset(start=0)
    other.reset(start=8)
    assert other.step({"add": 1}).observation == {"total": 9}
    assert one.step({"add": 4}).observation == {"total": 4}
    assert other.step({"add": 1}) == ({"total": 10}, 1.0, True, {})
    with pytest.raises(EnvironmentFailedError, match="'start'"):
        one.reset()
    one.reset(start=1)
    with pytest.raises(EnvironmentFailedError, match="unsupported operand"):
        one.step({"add": "x"})


def test_scripts_of_many_sessions_may_wait_for_each_other(server: MockEnvServer, make: MakeWrapper) -> None:
    together = threading.Barrier(8)

    def meet(reset_kwargs: dict[str, Any]) -> list[dict[str, Any]]:
        together.wait()
        return [reply({})]

    server.script = meet
    players = [threading.Thread(target=make().reset) for _ in range(8)]
    for player in players:
        player.start()
    for player in players:
        player.join()
    assert (server.sessions, server.peak_sessions) == (8, 8)


def test_a_reply_may_say_what_the_state_is_from_then_on(make: MakeWrapper, server: MockEnvServer) -> None:
    server.script = [reply({}, state={"turn": 1}), reply({"n": 1}), reply({}, state={"step_count": 7})]
    env = make()
    assert env.reset().observation == {}
    assert env.state() == {"episode_id": "1-1", "step_count": 0, "turn": 1}
    env.step({})
    assert env.state() == {"episode_id": "1-1", "step_count": 1, "turn": 1}
    env.step({})
    assert env.state() == {"episode_id": "1-1", "step_count": 7}


def test_a_text_is_sent_as_it_is(make: MakeWrapper, server: MockEnvServer) -> None:
    """A script can give errors that an episode survives."""
    refusal = '{"type":"error","data":{"code":"VALIDATION_ERROR","message":"no such move"}}'
    server.script = [reply({}), refusal, reply({"n": 2})]
    env = make()
    env.reset()
    with pytest.raises(EnvironmentFailedError, match="no such move"):
        env.step({})
    assert env.step({}).observation == {"n": 2}


@pytest.mark.parametrize("answer", [None, 3, {"board": "..."}, reply({"x": object()})])
def test_an_answer_that_cannot_be_sent_is_an_error_of_the_environment(
    make: MakeWrapper, server: MockEnvServer, answer: Any
) -> None:
    server.script = lambda reset_kwargs: [answer]
    with pytest.raises(EnvironmentFailedError, match=r"the script gave|not JSON serializable"):
        make().reset()


@pytest.mark.parametrize("script", ["text", None, 3, (reply({}) for _ in range(1))])
def test_what_is_no_script_is_refused_at_once(server: MockEnvServer, script: Any) -> None:
    with pytest.raises(TypeError, match="give a list of replies or a function"):
        server.script = script
    with pytest.raises(TypeError, match="give a list of replies or a function"):
        MockEnvServer(script)


@pytest.mark.parametrize("answer", [{"board": "..."}, {}, "You are at the gate.", ("x", 0.0), None])
def test_a_script_of_bare_observations_is_refused_at_once_with_the_remedy(server: MockEnvServer, answer: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(repr(answer)) + r".*; give reply\(\{…\}\) for an observation"):
        server.script = [reply({}), answer]


def test_a_wrong_reply_is_sent_if_it_has_a_field_of_one(make: MakeWrapper, server: MockEnvServer) -> None:
    server.script = [{"observation": "not an object"}]
    with pytest.raises(ProtocolError, match="has the observation 'not an object'"):
        make().reset()


def test_a_generator_is_closed_when_its_episode_ends(make: MakeWrapper, server: MockEnvServer) -> None:
    closed: list[int] = []

    def game(reset_kwargs: dict[str, Any]) -> Game:
        try:
            while True:
                yield reply({})
        finally:
            closed.append(reset_kwargs["n"])

    server.script = game
    one, other = make(), make()
    one.reset(n=1)
    one.reset(n=2)
    assert closed == [1]
    other.reset(n=3)
    one.close()
    server.stop()
    assert sorted(closed) == [1, 2, 3]


def test_a_script_that_fails_when_it_is_closed_is_logged(
    make: MakeWrapper, server: MockEnvServer, caplog: pytest.LogCaptureFixture
) -> None:
    def game(reset_kwargs: dict[str, Any]) -> Game:
        try:
            yield reply({})
        finally:
            raise RuntimeError("cannot let go")

    server.script = game
    make().reset()
    server.stop()
    assert "cannot let go" in caplog.text


def test_a_script_that_waits_for_ever_does_not_hold_the_server_or_its_sessions_thread(
    make: MakeWrapper, server: MockEnvServer
) -> None:
    waiting, let_go = threading.Event(), threading.Event()

    def game(reset_kwargs: dict[str, Any]) -> Game:
        waiting.set()
        let_go.wait()
        yield reply({})

    server.script = game
    env = make()

    def play() -> None:
        with pytest.raises(SessionLost):
            env.reset()

    player = threading.Thread(target=play)
    player.start()
    waiting.wait()
    env.abort()
    server.stop()
    player.join()
    [left] = [thread for thread in threading.enumerate() if thread.name.startswith("MockEnvServer")]
    assert left.daemon
    let_go.set()
    left.join()


@pytest.mark.parametrize("count", [1, 3])
def test_threads_end_with_their_sessions(make: MakeWrapper, server: MockEnvServer, count: int) -> None:
    before = set(threading.enumerate())
    for _ in range(count):
        env = make()
        env.reset()
        env.close()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert server.sessions == 0
