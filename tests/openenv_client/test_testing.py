from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from openenv_client import EnvironmentFailedError, OpenEnvWrapper, SessionLost
from openenv_client.testing import Fault, MockEnvServer, Received, reply

MakeWrapper = Callable[..., OpenEnvWrapper]


@pytest.fixture
def raw(server: MockEnvServer) -> Iterator[ClientConnection]:
    """A bare socket to the server."""
    with connect(server.base_url.replace("http", "ws") + "/ws", proxy=None) as connection:
        yield connection


def ask(connection: ClientConnection, message: object) -> Any:
    connection.send(message if isinstance(message, str) else json.dumps(message))
    return json.loads(connection.recv())


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
    def add(reset_kwargs: dict[str, Any]) -> Generator[dict[str, Any], dict[str, Any], None]:
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


def test_scripts_of_two_sessions_may_wait_for_each_other(server: MockEnvServer) -> None:
    together = threading.Barrier(8)

    def meet(reset_kwargs: dict[str, Any]) -> list[dict[str, Any]]:
        together.wait()
        return [reply({})]

    server.script = meet

    def play(_: int) -> None:
        with OpenEnvWrapper(base_url=server.base_url) as env:
            env.reset()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(play, range(8)))
    assert (server.sessions, server.peak_sessions) == (0, 8)


def test_what_arrived_is_kept_in_order(make: MakeWrapper, server: MockEnvServer) -> None:
    env = make(headers={"X-Team": "a"})
    env.reset(seed=1)
    server.inject(Fault("error", "step", "EXECUTION_ERROR"))
    with pytest.raises(EnvironmentFailedError):
        env.step({"n": 1})
    env.step({"n": 2})
    env.close()

    connected, *requests = server.received
    assert (connected.kind, connected.data["path"], connected.data["headers"]["X-Team"]) == ("connect", "/ws", "a")
    assert requests == [
        Received(1, "reset", {"seed": 1}),
        Received(1, "step", {"n": 1}),
        Received(1, "step", {"n": 2}),
        Received(1, "close", {}),
    ]
    assert server.applied == [requests[0], requests[2]]


def test_a_fault_strikes_the_events_that_it_names_counted_from_when_it_is_given(
    make: MakeWrapper, server: MockEnvServer
) -> None:
    env = make()
    env.reset()
    env.step({})
    server.inject(Fault("error", "step", "EXECUTION_ERROR", nth=2, times=2))
    outcomes = []
    for _ in range(4):
        try:
            outcomes.append(env.step({}).observation["step"])
        except EnvironmentFailedError:  # noqa: PERF203
            outcomes.append("error")
    assert outcomes == [2, "error", "error", 3]


def test_requests_that_are_none_are_answered_as_the_real_server_does(raw: ClientConnection) -> None:
    assert ask(raw, "garbage")["data"]["code"] == "INVALID_JSON"
    assert ask(raw, [1])["data"]["code"] == "UNKNOWN_TYPE"
    assert ask(raw, {"type": "dance"})["data"]["code"] == "UNKNOWN_TYPE"
    assert ask(raw, {"type": "step", "data": {}, "request_id": 1})["data"]["code"] == "VALIDATION_ERROR"
    assert ask(raw, {"type": "state", "data": {}})["data"]["code"] == "VALIDATION_ERROR"
    assert ask(raw, {"type": "step", "data": "x"})["data"]["code"] == "VALIDATION_ERROR"
    assert ask(raw, {"type": "state"}) == {"type": "state", "data": {"episode_id": "1-0", "step_count": 0}}


def test_close_is_answered_by_closing(raw: ClientConnection, server: MockEnvServer) -> None:
    raw.send('{"type":"close"}')
    with pytest.raises(ConnectionClosed) as caught:
        raw.recv()
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1000
    assert server.sessions == 0


def test_a_stopped_server_starts_again_on_its_port(make: MakeWrapper, server: MockEnvServer) -> None:
    address = server.base_url
    env = make()
    env.reset()
    server.restart()
    assert (server.base_url, server.sessions) == (address, 0)
    with pytest.raises(SessionLost):
        env.step({})
    env.reset()
    with pytest.raises(RuntimeError, match="running already"):
        server.start()


def test_stopping_does_not_wait_for_what_is_held_back(make: MakeWrapper) -> None:
    with MockEnvServer() as server:
        env = make(base_url=server.base_url)
        env.reset()
        server.inject(Fault("delay", "step"))
        outcome: list[str] = []

        def play() -> None:
            try:
                env.step({})
            except SessionLost:
                outcome.append("lost")

        thread = threading.Thread(target=play)
        thread.start()
        server.wait_until(lambda: server.received[-1].kind == "step")
    thread.join()
    assert outcome == ["lost"]
    server.stop()


def test_a_port_that_has_been_taken_is_an_error(server: MockEnvServer) -> None:
    other = MockEnvServer()
    other._port = server._port
    with pytest.raises(OSError, match="address already in use"):
        other.start()


def test_a_condition_that_stays_false_says_what_arrived(server: MockEnvServer) -> None:
    with pytest.raises(AssertionError, match=r"still not true after 0\.01 s; received: \[\]"):
        server.wait_until(lambda: server.received, timeout=0.01)
