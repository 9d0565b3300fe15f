from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest

from openenv_client import (
    ConnectError,
    EnvironmentFailedError,
    KeepaliveError,
    MessageTooBigError,
    OpenEnvWrapper,
    ProtocolError,
    SessionFailedError,
    SessionLost,
    StepTimeoutError,
)
from openenv_client.testing import Fault, MockEnvServer

MakeWrapper = Callable[..., OpenEnvWrapper]


# What is refused


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("exploded", "step"), "there is no fault 'exploded'; use one of refuse, http, full, drop, delay"),
        (("http", "step"), "'http' cannot happen on 'step', only on connect"),
        (("garbage", "connect"), "'garbage' cannot happen on 'connect', only on reset, step, state"),
        (("drop", "dance"), "'drop' cannot happen on 'dance', only on connect, reset, step, state, close"),
        (
            ("http", "connect", 101),
            "the value of 'http' is 101; give an HTTP status that ends a handshake, such as 503",
        ),
        (("http", "connect", "503"), "the value of 'http' is '503'"),
        (("full", "connect", 3), "the value of 'full' is 3; give none"),
        (("delay", "step", -1), "the value of 'delay' is -1; give seconds from 0, or None until release()"),
        (("delay", "step", float("inf")), "the value of 'delay' is inf"),
        (("delay", "step", True), "the value of 'delay' is True"),
        (("restart", "step", "1"), "the value of 'restart' is '1'; give seconds from 0"),
        (("close", "step", 1006), "the value of 'close' is 1006; give a close code such as 1011, or a tuple"),
        (("close", "step", (1000, 1)), "the value of 'close' is (1000, 1)"),
        (("close", "step", (1000, "x" * 124)), "the value of 'close' is (1000, 'xxx"),
        (("error", "step", 3), "the value of 'error' is 3; give a code such as 'SESSION_ERROR'"),
        (("send", "step"), "the value of 'send' is None; give a str or bytes"),
        (("extra", "step", {}), "the value of 'extra' is {}; give a str or bytes"),
        (("wrong_type", "step", "rewards"), "the value of 'wrong_type' is 'rewards'; give one of type, data, obs"),
        (("wrong_type", "state", "reward"), "an answer to 'state' has no field 'reward'; give 'type' or 'data'"),
        (("big", "step", 0), "the value of 'big' is 0; give a number of bytes"),
        (("drop", "step", None, 0), "nth is 0; give a whole number, 1 for the first step"),
        (("drop", "step", None, 1, 0), "times is 0; give a whole number from 1, or None for all from then on"),
        (("refuse", "connect", None, 1, 2), "times is 2, but a refused connection cannot be counted"),
    ],
)
def test_a_fault_that_cannot_be_is_refused_with_its_value_and_the_remedy(
    arguments: tuple[Any, ...], complaint: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        Fault(*arguments)


def test_the_value_has_a_default_where_one_makes_sense() -> None:
    assert Fault("http", "connect").value == 503
    assert Fault("close", "step").value == 1011
    assert Fault("error", "step").value == "EXECUTION_ERROR"
    assert Fault("restart", "step").value == 0
    assert Fault("big", "step").value == 64 * 2**20


def test_a_fault_strikes_the_events_that_it_names() -> None:
    assert [n for n in range(1, 6) if Fault("drop", "step", nth=2, times=2).strikes(n)] == [2, 3]
    assert [n for n in range(1, 6) if Fault("drop", "step", nth=4, times=None).strikes(n)] == [4, 5]


# What a client sees, kind by kind


@pytest.mark.parametrize(
    ("fault", "error", "text", "applied"),
    [
        (Fault("drop", "step"), SessionLost, "cut during step", False),
        (Fault("drop_after", "step"), SessionLost, "cut during step", True),
        (Fault("delay", "step"), StepTimeoutError, "within 0.2 s", True),
        (Fault("freeze", "step"), StepTimeoutError, "within 0.2 s", False),
        (Fault("restart", "step"), SessionLost, "cut during step", False),
        (Fault("close", "step"), SessionLost, "code 1011", False),
        (Fault("close", "step", (1001, "away")), SessionLost, r"code 1001 \(away\)", False),
        (Fault("error", "step"), EnvironmentFailedError, "EXECUTION_ERROR", False),
        (Fault("error", "step", "SESSION_ERROR"), SessionFailedError, "SESSION_ERROR", False),
        (Fault("garbage", "step"), ProtocolError, "not JSON", True),
        (Fault("garbage", "step", b"\x00"), ProtocolError, "binary", True),
        (Fault("wrong_type", "step"), ProtocolError, "data", True),
        (Fault("wrong_type", "step", "type"), ProtocolError, "type", True),
        (Fault("wrong_type", "step", "observation"), ProtocolError, "observation", True),
        (Fault("wrong_type", "step", "reward"), ProtocolError, "reward", True),
        (Fault("wrong_type", "step", "done"), ProtocolError, "done", True),
        (Fault("wrong_type", "step", "metadata"), ProtocolError, "metadata", True),
        (Fault("big", "step", 2000), MessageTooBigError, "max_message_size=2000", True),
        (Fault("send", "step", "[]"), ProtocolError, "not a JSON object", True),
    ],
    ids=str,
)
def test_a_step_fails_as_its_fault_says_and_is_acted_on_or_not(
    server: MockEnvServer, make: MakeWrapper, fault: Fault, error: type[Exception], text: str, applied: bool
) -> None:
    env = make(step_timeout=0.2 if fault.kind in ("delay", "freeze") else 60, max_message_size=2000)
    env.reset()
    server.inject(fault)
    with pytest.raises(error, match=text):
        env.step({"move": 1})
    assert [event.kind for event in server.received[2:3]] == ["step"]
    assert server.actions == [{"move": 1}] * applied


@pytest.mark.parametrize("fault", [Fault("wrong_type", "state"), Fault("big", "state", 2000)], ids=str)
def test_an_answer_to_state_can_be_wrong_too(server: MockEnvServer, make: MakeWrapper, fault: Fault) -> None:
    env = make(max_message_size=2000)
    env.reset()
    server.inject(fault)
    with pytest.raises((ProtocolError, MessageTooBigError)):
        env.state()


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (Fault("http", "connect", 404), "HTTP 404"),
        (Fault("full", "connect"), "full"),
        (Fault("drop", "connect", times=None), "connection"),
        (Fault("delay", "connect", times=None), "no connection within"),
        (Fault("refuse", "connect"), "refused|no connection within"),
    ],
    ids=str,
)
def test_a_connect_fails_as_its_fault_says(make: MakeWrapper, server: MockEnvServer, fault: Fault, text: str) -> None:
    server.inject(fault)
    env = make(open_deadline=0.1 if fault.kind in ("drop", "delay", "refuse") else 60, capacity_timeout=0)
    with pytest.raises(ConnectError, match=text):
        env.reset()
    assert (server.sessions, server.applied) == (0, [])
    assert (server.received == []) == (fault.kind == "refuse")


def test_an_extra_message_comes_after_the_answer(server: MockEnvServer, env: OpenEnvWrapper) -> None:
    server.inject(Fault("extra", "step", '{"type":"state","data":{}}'))
    assert env.step({}).observation["step"] == 1
    with pytest.raises(ProtocolError):
        env.step({})


def test_a_delay_ends_after_its_time_or_when_it_is_released(server: MockEnvServer, env: OpenEnvWrapper) -> None:
    server.inject(Fault("delay", "step", 0.01))
    assert env.step({}).observation["step"] == 1
    server.inject(Fault("delay", "step"))
    waiting = threading.Thread(target=env.step, args=({},))
    waiting.start()
    server.wait_until(lambda: len(server.actions) == 2)
    server.release()
    waiting.join()
    assert env.step({}).observation["step"] == 3


@pytest.mark.parametrize("kind", ["delay", "drop"])
def test_a_close_can_stall_or_be_cut(server: MockEnvServer, make: MakeWrapper, kind: Any) -> None:
    """S07: what was measured stays, whatever closing does."""
    env = make(close_timeout=0.1)
    env.reset()
    result = env.step({})
    server.inject(Fault(kind, "close"))
    env.close()
    assert result.reward == 1.0
    server.release()
    server.wait_until(lambda: server.sessions == 0)


def test_a_frozen_connection_answers_no_ping_while_others_go_on(server: MockEnvServer, make: MakeWrapper) -> None:
    """W06: the client finds out by its keepalive, and is not told something else by a later answer."""
    silent, other = make(ping_interval=0.05, ping_timeout=0.05), make()
    silent.reset()
    other.reset()
    server.inject(Fault("freeze", "step"))
    with pytest.raises(KeepaliveError):
        silent.step({})
    assert other.step({}).observation["step"] == 1
    server.release()
    server.wait_until(lambda: server.sessions == 1)


def test_a_refused_connection_is_tried_again_until_the_server_listens(make: MakeWrapper) -> None:
    with MockEnvServer(faults=[Fault("refuse", "connect")]) as server:
        env = make(base_url=server.base_url, open_deadline=0.05)
        with pytest.raises(ConnectError, match="refused"):
            env.reset()
        server.release()
        make(base_url=server.base_url).reset()
        assert server.kinds == ["connect", "reset"]


def test_while_connections_are_refused_sessions_go_on(server: MockEnvServer, make: MakeWrapper) -> None:
    server.inject(Fault("refuse", "connect", nth=2))
    env = make()
    env.reset()
    with pytest.raises(ConnectError, match="refused"):
        make(open_deadline=0.05).reset()
    assert env.step({}).observation["step"] == 1
    server.release()
    make().reset()


@pytest.mark.parametrize("first", [Fault("http", "connect"), Fault("drop", "connect")], ids=str)
def test_connections_are_refused_after_one_that_failed(make: MakeWrapper, first: Fault) -> None:
    with MockEnvServer(faults=[first, Fault("refuse", "connect", 0.05, nth=2)]) as server:
        make(base_url=server.base_url).reset()
        assert server.kinds == ["connect", "connect", "reset"]


@pytest.mark.parametrize("on", ["connect", "reset", "step", "state"])
def test_a_restart_ends_all_sessions_and_keeps_the_port(server: MockEnvServer, make: MakeWrapper, on: Any) -> None:
    address = server.base_url
    env, other = make(), make()
    env.reset()
    other.reset()
    server.inject(Fault("restart", on, 0.01))
    if on in ("connect", "reset"):
        third = make()
        third.reset()  # in a second attempt
        assert third.step({}).observation["step"] == 1
    else:
        with pytest.raises(SessionLost):
            env.step({}) if on == "step" else env.state()
    with pytest.raises(SessionLost):
        other.step({})
    other.reset()
    assert server.base_url == address
    server.wait_until(lambda: server.sessions == (2 if on in ("connect", "reset") else 1))
