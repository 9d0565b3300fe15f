from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from openenv_client import (
    ConfigurationError,
    ConnectError,
    EnvironmentFailedError,
    OpenEnvWrapper,
    ServerFullError,
    SessionLost,
)
from openenv_client.testing import Fault, MockEnvServer, Received, reply

MakeWrapper = Callable[..., OpenEnvWrapper]


def open_raw(server: MockEnvServer, headers: dict[str, str]) -> ClientConnection:
    """A bare socket to the server."""
    url = server.base_url.replace("http", "ws") + "/ws"
    return connect(url, proxy=None, additional_headers=headers).__enter__()


@pytest.fixture
def raw(server: MockEnvServer) -> Iterator[ClientConnection]:
    with open_raw(server, {}) as connection:
        yield connection


def ask(connection: ClientConnection, message: object) -> Any:
    connection.send(message if isinstance(message, str) else json.dumps(message))
    return json.loads(connection.recv())


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


def test_close_is_answered_by_closing(raw: ClientConnection, server: MockEnvServer) -> None:
    raw.send('{"type":"close"}')
    with pytest.raises(ConnectionClosed) as caught:
        raw.recv()
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1000
    assert server.sessions == 0


def test_the_log_has_short_forms(make: MakeWrapper, server: MockEnvServer) -> None:
    """`kinds` is what arrived; `actions` is what was acted on, so a refused step is not among them."""
    env = make()
    env.reset()
    server.inject(Fault("drop_after", "step", nth=2))
    env.step({"n": 1})
    with pytest.raises(SessionLost):
        env.step({"n": 2})
    server.inject(Fault("error", "step"))
    env.reset()
    with pytest.raises(EnvironmentFailedError):
        env.step({"n": 3})
    assert server.kinds == ["connect", "reset", "step", "step", "connect", "reset", "step"]
    assert server.actions == [{"n": 1}, {"n": 2}]


def test_a_server_with_a_capacity_refuses_the_session_above_it(make: MakeWrapper) -> None:
    with MockEnvServer(capacity=1) as server:
        first = make(base_url=server.base_url)
        first.reset()
        with pytest.raises(ServerFullError, match="1 of 1 sessions are in use"):
            make(base_url=server.base_url, capacity_timeout=0).reset()
        first.close()
        make(base_url=server.base_url).reset()
        assert server.peak_sessions == 1


@pytest.mark.parametrize("option", [{"capacity": "2"}, {"capacity": -1}, {"max_message_size": 0.5}])
def test_a_number_that_is_none_is_refused_at_once(option: dict[str, Any]) -> None:
    [[name, value]] = option.items()
    with pytest.raises(ConfigurationError, match=f"^{name} is {value!r}. Give a whole number of"):
        MockEnvServer(**option)


@pytest.mark.parametrize("faults", [["drop"], "drop", Fault("drop", "step")])
def test_what_are_no_faults_is_refused_at_once(faults: Any) -> None:
    with pytest.raises(TypeError, match=r"^faults is .*drop.*; give a list such as"):
        MockEnvServer(faults=faults)


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic secret", "secret", "Bearer secret2", "Bearer s\u00e9"])
def test_a_handshake_without_the_token_is_refused_before_there_is_a_session(header: str | None) -> None:
    with MockEnvServer(token="secret", faults=[Fault("full", "connect", nth=2)]) as server:
        with pytest.raises(InvalidStatus) as caught:
            open_raw(server, {} if header is None else {"Authorization": header})
        assert caught.value.response.status_code == 401
        assert caught.value.response.headers["WWW-Authenticate"] == "Bearer"
        assert (server.peak_sessions, server.kinds) == (0, ["connect"])


def test_a_handshake_with_the_token_is_taken() -> None:
    with MockEnvServer(token="secret") as server:
        with open_raw(server, {"Authorization": "Bearer secret"}) as connection:
            assert ask(connection, {"type": "reset", "data": {}})["type"] == "observation"
        with pytest.raises(ConnectError, match="401"):
            OpenEnvWrapper(base_url=server.base_url).reset()


def test_another_path_is_answered_with_403() -> None:
    with MockEnvServer(path="/env/ws") as server, OpenEnvWrapper(base_url=server.base_url) as env:
        env.reset()
        wrong = OpenEnvWrapper(base_url=server.base_url.removesuffix("/env"))
        with pytest.raises(ConnectError, match="403"):
            wrong.reset()


def doubting(reset_kwargs: dict[str, Any]) -> Generator[dict[str, Any], dict[str, Any], None]:
    action = yield reply({})
    assert action == {"move": 1}
    yield reply({})


def play(server: MockEnvServer) -> None:
    with OpenEnvWrapper(base_url=server.base_url) as env:
        env.reset()
        env.step({"move": 2})


def play_in_spite_of_errors(server: MockEnvServer) -> None:
    with server, pytest.raises(EnvironmentFailedError):
        play(server)


def test_an_assertion_of_a_script_is_raised_when_the_server_is_left() -> None:
    server = MockEnvServer(doubting)
    with pytest.raises(AssertionError, match="'move': 2"):
        play_in_spite_of_errors(server)
    assert len(server.failures) == 1


def test_pytest_fail_in_a_script_fails_the_test() -> None:
    def never(reset_kwargs: dict[str, Any]) -> list[dict[str, Any]]:
        pytest.fail("nobody should reset this")

    with pytest.raises(pytest.fail.Exception, match="nobody should"):
        play_in_spite_of_errors(MockEnvServer(never))


def test_the_error_of_the_test_itself_comes_first() -> None:
    with pytest.raises(EnvironmentFailedError), MockEnvServer(doubting) as server:
        play(server)


def test_a_bug_in_a_script_is_the_environments_error_and_fails_nothing_else() -> None:
    def broken(reset_kwargs: dict[str, Any]) -> list[dict[str, Any]]:
        raise StopIteration

    server = MockEnvServer(broken)
    play_in_spite_of_errors(server)
    assert server.failures == []
