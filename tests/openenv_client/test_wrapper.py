from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import random
import re
import socket
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from openenv_client import (
    ConfigurationError,
    ConnectError,
    EnvironmentFailedError,
    EpisodeOverError,
    ForkError,
    KeepaliveError,
    MessageTooBigError,
    NotResetError,
    OpenEnvError,
    OpenEnvWrapper,
    ProtocolError,
    RequestError,
    ServerFullError,
    SessionAbortedError,
    SessionFailedError,
    SessionLost,
    StepTimeoutError,
    WrapperClosedError,
)
from openenv_client.testing import Fault, MockEnvServer, reply

ROOT = Path(__file__).parents[2]
MakeWrapper = Callable[..., OpenEnvWrapper]
Retried = Callable[[Callable[[], None]], None]


def kinds(server: MockEnvServer) -> list[str]:
    return [event.kind for event in server.received]


@pytest.fixture
def at_first_failure() -> Any:
    """Calls a function when an attempt to open a session has failed and before the next."""
    logger = logging.getLogger("openenv_client.wrapper")
    handlers: list[logging.Handler] = []

    def register(function: Callable[[], object]) -> None:
        todo = [function]

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                while todo:
                    todo.pop()()

        handlers.append(Handler())
        logger.addHandler(handlers[0])

    logger.setLevel(logging.INFO)
    yield register
    for handler in handlers:
        logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


# An episode


def test_an_episode_unpacks_as_users_of_gym_expect(env: OpenEnvWrapper) -> None:
    observation, metadata = env.reset(seed=3)
    assert (observation, metadata) == ({"step": 0, "reset": {"seed": 3}}, {})

    observation, reward, done, metadata = env.step({"message": "[5 3 7]"})
    assert (observation, reward, done, metadata) == ({"step": 1, "action": {"message": "[5 3 7]"}}, 1.0, False, {})

    assert env.state()["step_count"] == 1


def test_the_configuration_of_a_dataset_row_is_understood(server: MockEnvServer, make: MakeWrapper) -> None:
    row = {
        "name": "openenv",
        "base_url": server.base_url,
        "system_message": "Play.",
        "reset_kwargs": {"seed": 1, "x": 2},
    }
    with OpenEnvWrapper(row, reset_kwargs={"x": 3}) as env:
        assert env.reset().observation["reset"] == {"seed": 1, "x": 3}
        assert env.reset(seed=4).observation["reset"] == {"seed": 4, "x": 3}
        assert env.reset().observation["reset"] == {"seed": 1, "x": 3}
    with OpenEnvWrapper(
        {**row, "base_url": "http://127.0.0.1:9", "reset_kwargs": None}, base_url=server.base_url
    ) as env:
        assert env.reset().observation["reset"] == {}


def test_nothing_is_connected_before_the_first_reset(server: MockEnvServer, make: MakeWrapper) -> None:
    make().close()
    assert server.received == []


def test_a_second_reset_plays_on_in_the_same_session(server: MockEnvServer, env: OpenEnvWrapper) -> None:
    env.step({})
    env.reset()
    assert env.step({}).observation["step"] == 1
    assert kinds(server) == ["connect", "reset", "step", "reset", "step"]


def test_headers_go_with_the_handshake(server: MockEnvServer, make: MakeWrapper) -> None:
    make(headers={"Authorization": "Bearer secret"}).reset()
    assert server.received[0].data["headers"]["Authorization"] == "Bearer secret"


def test_a_missing_reward_is_zero_and_marked(server: MockEnvServer, env: OpenEnvWrapper) -> None:
    """R01."""
    server.script = [
        reply({}),
        reply({"reward": 5, "done": True}),
        {"observation": {}},
        reply({}, reward=0.0, metadata={"a": 1}),
    ]
    env.reset()
    assert env.step({}) == ({"reward": 5, "done": True}, 0.0, False, {"reward_missing": True})
    assert env.step({}) == ({}, 0.0, False, {"reward_missing": True})
    assert env.step({}) == ({}, 0.0, False, {"a": 1})


def test_an_episode_may_be_over_before_it_begins(server: MockEnvServer, env: OpenEnvWrapper) -> None:
    server.script = [reply({}, done=True)]
    assert env.reset().metadata == {"done": True}
    with pytest.raises(EpisodeOverError):
        env.step({})


def test_a_bad_action_costs_that_action_only(server: MockEnvServer, env: OpenEnvWrapper) -> None:
    """W19."""
    with pytest.raises(RequestError):
        env.step({"message": object()})
    result = env.step({"message": "bad \ud83d [5 3 7]"})

    assert result.observation == {"step": 1, "action": {"message": "bad \ufffd [5 3 7]"}}
    server.inject(
        Fault("send", "step", r'{"type":"observation","data":{"observation":{"text":"bad \ud83d"},"reward":1}}')
    )
    text = env.step({}).observation["text"]
    assert env.step({"message": text}).observation["action"] == {"message": "bad \ufffd"}


# Order


def test_calls_out_of_order_say_so_and_send_nothing(server: MockEnvServer, make: MakeWrapper) -> None:
    server.script = [reply({}), reply({}, done=True)]
    env = make()
    with pytest.raises(NotResetError, match=r"Call reset\(\) first"):
        env.step({})
    with pytest.raises(NotResetError):
        env.state()
    env.reset()
    assert env.step({}).done
    with pytest.raises(EpisodeOverError, match=r"Call reset\(\)"):
        env.step({})
    assert env.state()["step_count"] == 1
    env.close()
    for call in (env.reset, env.state, lambda: env.step({})):
        with pytest.raises(WrapperClosedError):
            call()
    assert kinds(server) == ["connect", "reset", "step", "state", "close"]


# What a step may meet

STEP_FAULTS: list[tuple[Fault, type[OpenEnvError], str]] = [
    (Fault("drop", "step"), SessionLost, "cut during step"),
    (Fault("drop_after", "step"), SessionLost, "cut during step"),
    (Fault("close", "step", 1000), SessionLost, "code 1000"),
    (Fault("close", "step", (1001, "going away")), SessionLost, r"code 1001 \(going away\)"),
    (Fault("close", "step", (1011, "internal error")), SessionLost, "code 1011"),
    (Fault("close", "step", (1011, "keepalive ping timeout")), KeepaliveError, "the server got no answer"),
    (Fault("close", "step", 1009), MessageTooBigError, "the server refused step"),
    (Fault("big", "step", 3000), MessageTooBigError, "max_message_size=2000"),
    (Fault("error", "step", "SESSION_ERROR"), SessionFailedError, "SESSION_ERROR"),
    (Fault("error", "step", "FACTORY_ERROR"), SessionFailedError, "FACTORY_ERROR"),
    (Fault("error", "step", "CAPACITY_REACHED"), SessionFailedError, "full"),
    (Fault("send", "step", "garbage"), ProtocolError, "not JSON"),
    (Fault("send", "step", b"\x00\x01"), ProtocolError, "binary"),
    (Fault("send", "step", '{"type":"state","data":{}}'), ProtocolError, "type 'state'"),
    (Fault("send", "step", '{"type":"observation","data":{"observation":{},"reward":"1"}}'), ProtocolError, "reward"),
    (Fault("delay", "step"), StepTimeoutError, "within 0.1 s"),
]


@pytest.mark.parametrize(("fault", "error_type", "message"), STEP_FAULTS)
def test_a_step_that_fails_loses_the_episode_and_is_never_sent_again(
    server: MockEnvServer, make: MakeWrapper, fault: Fault, error_type: type[OpenEnvError], message: str
) -> None:
    """W01, W02, W05, W07: one frame for each call of step, whatever happens; then a clear loss until the next reset."""
    env = make(max_message_size=2000, step_timeout=0.1 if fault.kind == "delay" else 10)
    env.reset()
    server.inject(fault)

    with pytest.raises(error_type, match=message) as caught:
        env.step({"move": "A"})
    server.release()
    with pytest.raises(SessionLost, match="the session is gone"):
        env.step({"move": "B"})

    assert type(caught.value) is error_type
    assert caught.value.maybe_applied
    assert caught.value.url == server.base_url.replace("http", "ws") + "/ws"
    assert [event.data for event in server.received if event.kind == "step"] == [{"move": "A"}]
    env.reset()
    assert env.step({"move": "C"}).observation == {"step": 1, "action": {"move": "C"}}
    assert kinds(server) == ["connect", "reset", "step", "connect", "reset", "step"]


@pytest.mark.parametrize("code", ["EXECUTION_ERROR", "VALIDATION_ERROR", "UNKNOWN_TYPE", "SOMETHING_NEW"])
def test_an_error_reply_leaves_the_episode_where_it_is(server: MockEnvServer, env: OpenEnvWrapper, code: str) -> None:
    server.inject(Fault("error", "step", code))

    with pytest.raises(EnvironmentFailedError, match=code) as caught:
        env.step({"move": "A"})

    assert caught.value.code == code
    assert caught.value.maybe_applied == (code in ("EXECUTION_ERROR", "SOMETHING_NEW"))
    assert env.step({"move": "B"}).observation == {"step": 1, "action": {"move": "B"}}


def test_a_session_that_was_lost_between_two_steps_is_not_replaced(server: MockEnvServer, env: OpenEnvWrapper) -> None:
    """W03: step says that the session is lost; reset on the same wrapper opens a new one."""
    env.step({})
    server.restart()

    with pytest.raises(SessionLost):
        env.step({})
    assert env.reset().observation["step"] == 0
    server.restart()
    assert env.reset().observation["step"] == 0
    assert kinds(server).count("step") == 1


def test_reset_drops_a_session_in_which_something_arrived_unasked(server: MockEnvServer, env: OpenEnvWrapper) -> None:
    """W01."""
    server.inject(Fault("extra", "state", '{"type":"observation","data":{"observation":{"stale":true}}}'))
    env.state()
    assert env._session is not None
    assert env._session._connection is not None
    env._session._connection.ping().wait()  # its answer comes after the extra message
    assert env.reset().observation["step"] == 0


def test_other_sessions_do_not_notice(server: MockEnvServer, make: MakeWrapper) -> None:
    """W08."""
    one, other = make(max_message_size=1000), make()
    one.reset()
    other.reset()
    server.inject(Fault("big", "step", 5000))
    with pytest.raises(MessageTooBigError):
        one.step({})
    assert other.step({}).observation["step"] == 1


# Opening


@pytest.mark.parametrize("status", [500, 502, 503, 504, 429, 408])
def test_a_passing_refusal_of_a_gateway_is_retried(server: MockEnvServer, make: MakeWrapper, status: int) -> None:
    """W10."""
    server.inject(Fault("http", "connect", status))
    assert make().reset().observation["step"] == 0
    assert kinds(server) == ["connect", "connect", "reset"]


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404])
def test_a_lasting_refusal_is_not_retried(server: MockEnvServer, make: MakeWrapper, status: int) -> None:
    """W10."""
    server.inject(Fault("http", "connect", status, times=None))

    with pytest.raises(ConnectError, match=f"HTTP {status}") as caught:
        make(headers={"Authorization": "secret"}).reset()

    assert (caught.value.status, caught.value.attempts) == (status, 1)
    assert "secret" not in str(caught.value)
    assert kinds(server) == ["connect"]


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (Fault("drop", "connect"), ["connect", "connect", "reset"]),
        (Fault("drop", "reset"), ["connect", "reset", "connect", "reset"]),
        (Fault("drop_after", "reset"), ["connect", "reset", "connect", "reset"]),
        (Fault("close", "reset", 1012), ["connect", "reset", "connect", "reset"]),
        (Fault("delay", "reset"), ["connect", "reset", "connect", "reset"]),
        (Fault("delay", "connect"), ["connect", "connect", "reset"]),
    ],
)
def test_connect_and_reset_are_retried_in_a_new_session(
    server: MockEnvServer, make: MakeWrapper, fault: Fault, seen: list[str]
) -> None:
    server.inject(fault)
    waits = {"connect_timeout": 0.5, "reset_timeout": 0.5} if fault.kind == "delay" else {}

    assert make(**waits).reset().observation["step"] == 0
    assert kinds(server) == seen
    server.release()
    server.wait_until(lambda: server.sessions == 1)


@pytest.mark.parametrize(
    ("fault", "error_type"),
    [
        (Fault("error", "reset", "FACTORY_ERROR", times=None), SessionFailedError),
        (Fault("error", "reset", "EXECUTION_ERROR", times=None), EnvironmentFailedError),
        (Fault("send", "reset", "<html>", times=None), ProtocolError),
        (Fault("big", "reset", 5000, times=None), MessageTooBigError),
    ],
)
def test_what_another_attempt_would_meet_again_is_not_retried(
    server: MockEnvServer, make: MakeWrapper, fault: Fault, error_type: type[OpenEnvError]
) -> None:
    server.inject(fault)
    env = make(max_message_size=2000)

    with pytest.raises(error_type) as caught:
        env.reset()
    assert caught.value.attempts == 1
    with pytest.raises(NotResetError):
        env.step({})
    assert kinds(server) == ["connect", "reset"]


def test_a_refused_reset_keeps_the_session(server: MockEnvServer, env: OpenEnvWrapper) -> None:
    server.inject(Fault("error", "reset", "EXECUTION_ERROR"))
    with pytest.raises(EnvironmentFailedError):
        env.reset(unknown=1)
    env.reset()
    assert kinds(server) == ["connect", "reset", "reset", "reset"]


def test_a_server_that_is_not_up_yet_is_waited_for(
    server: MockEnvServer, make: MakeWrapper, at_first_failure: Any
) -> None:
    server.stop()
    at_first_failure(server.start)
    assert make().reset().observation["step"] == 0


def test_giving_up_says_how_often_how_long_and_why(server: MockEnvServer, make: MakeWrapper) -> None:
    server.stop()

    with pytest.raises(
        ConnectError, match=r"refused.*\d+ attempts in [\d.]+ s\)\. Check that the server runs"
    ) as caught:
        make(open_deadline=0.5).reset()
    assert (caught.value.attempts or 0) > 1
    assert (caught.value.elapsed or 0) > 0
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)


def test_a_name_that_does_not_exist_is_not_retried(make: MakeWrapper, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(ConnectError, match="cannot be resolved") as caught:
        make(base_url="http://no-such-host.example").reset()
    assert caught.value.attempts == 1


def test_the_random_state_of_the_program_is_not_touched(server: MockEnvServer, make: MakeWrapper) -> None:
    state = random.getstate()
    server.inject(Fault("http", "connect", 503))
    make().reset()
    assert random.getstate() == state


# A full server


def test_a_full_server_is_reported_at_once_if_so_wished(make: MakeWrapper) -> None:
    """S01."""
    with MockEnvServer(capacity=1) as server:
        first = make(base_url=server.base_url)
        first.reset()

        with pytest.raises(ServerFullError, match=r"1 of 1 sessions are in use.*MAX_CONCURRENT_ENVS") as caught:
            make(base_url=server.base_url, capacity_timeout=0).reset()

        assert (caught.value.active, caught.value.maximum, caught.value.attempts) == (1, 1, 1)
        assert first.step({}).observation["step"] == 1


def test_a_full_server_is_waited_for(make: MakeWrapper, at_first_failure: Any) -> None:
    """S01: the wait is not bounded by the deadline for opening, since the server is there."""
    with MockEnvServer(capacity=1) as server:
        first = make(base_url=server.base_url)
        first.reset()
        at_first_failure(first.close)

        second = make(base_url=server.base_url, open_deadline=0.05, capacity_timeout=30)
        assert second.reset().observation["step"] == 0
        assert server.peak_sessions == 1


def test_waiting_for_a_full_server_ends(make: MakeWrapper) -> None:
    """S01."""
    with MockEnvServer(capacity=0) as server:
        with pytest.raises(ServerFullError, match=r"\d+ attempts") as caught:
            make(base_url=server.base_url, capacity_timeout=0.3).reset()
        assert (caught.value.attempts or 0) > 1


def test_more_wrappers_than_sessions_all_play(make: MakeWrapper) -> None:
    """S01."""
    with MockEnvServer(capacity=4) as server:

        def play(number: int) -> int:
            with OpenEnvWrapper(base_url=server.base_url) as env:
                env.reset()
                return int(env.step({"number": number}).observation["action"]["number"])

        with ThreadPoolExecutor(16) as pool:
            assert list(pool.map(play, range(16))) == list(range(16))
        assert server.peak_sessions <= 4
        assert server.sessions == 0


# Threads


def test_calls_from_many_threads_wait_for_each_other(server: MockEnvServer, env: OpenEnvWrapper) -> None:
    """W12: no reply reaches another caller, and no two requests are under way at a time."""

    async def play() -> list[Any]:
        return list(await asyncio.gather(*(asyncio.to_thread(env.step, {"caller": caller}) for caller in range(20))))

    results = asyncio.run(play())

    assert [result.observation["action"]["caller"] for result in results] == list(range(20))
    assert sorted(result.reward for result in results) == list(range(1, 21))


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    caught: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - it is looked at by the test
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, caught


@pytest.mark.parametrize("end", ["close", "abort"])
@pytest.mark.parametrize("operation", ["reset", "step", "state"])
def test_a_waiting_call_is_ended_from_another_thread(
    server: MockEnvServer, env: OpenEnvWrapper, operation: str, end: str
) -> None:
    """W12, W13, A04: the waiting thread gets a clear error, and the late reply is thrown away."""
    calls: dict[str, Callable[[], object]] = {"reset": env.reset, "step": lambda: env.step({}), "state": env.state}
    server.inject(Fault("delay", operation))  # type: ignore[arg-type]
    before = len(server.received)
    thread, caught = in_thread(calls[operation])
    server.wait_until(lambda: len(server.received) > before)

    getattr(env, end)()
    thread.join()

    assert [type(error) for error in caught] == [SessionAbortedError]
    server.release()
    server.wait_until(lambda: server.sessions == 0)
    if end == "abort":
        assert env.reset().observation["step"] == 0
        assert env.step({}).observation["step"] == 1


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_handshake_that_waits_is_ended_from_another_thread(
    server: MockEnvServer, make: MakeWrapper, end: str
) -> None:
    server.inject(Fault("delay", "connect"))
    env = make()
    thread, caught = in_thread(env.reset)
    server.wait_until(lambda: server.received)

    getattr(env, end)()
    thread.join()

    assert [type(error) for error in caught] == [SessionAbortedError]
    assert kinds(server) == ["connect"]


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_wait_for_a_full_server_is_ended_from_another_thread(
    make: MakeWrapper, at_first_failure: Any, end: str
) -> None:
    with MockEnvServer(capacity=0) as server:
        env = make(base_url=server.base_url)
        at_first_failure(getattr(env, end))
        with pytest.raises(SessionAbortedError):
            env.reset()
        assert kinds(server) == ["connect"]


def test_an_abort_between_two_steps_loses_the_episode(server: MockEnvServer, env: OpenEnvWrapper) -> None:
    env.abort()
    with pytest.raises(SessionLost, match="aborted"):
        env.step({})
    server.wait_until(lambda: server.sessions == 0)


# The end


def test_leaving_the_context_frees_the_slot_whatever_happened(server: MockEnvServer) -> None:
    with OpenEnvWrapper(base_url=server.base_url) as env:
        env.reset()
    assert server.sessions == 0
    with pytest.raises(RequestError), OpenEnvWrapper(base_url=server.base_url, reset_kwargs={"seed": object()}) as env:
        env.reset()


def test_closing_twice_or_before_anything_is_fine(make: MakeWrapper) -> None:
    env = make()
    env.close()
    env.close()
    env.abort()


def test_close_raises_nothing_when_the_server_is_gone_or_frozen(server: MockEnvServer, make: MakeWrapper) -> None:
    """S07, W13: the episode's last result stands."""
    frozen, gone = make(close_timeout=0.02), make()
    frozen.reset()
    gone.reset()
    with server.frozen():
        frozen.close()
    server.stop()
    gone.close()


def test_a_wrapper_that_is_never_closed_warns_and_frees_the_slot(server: MockEnvServer) -> None:
    env = OpenEnvWrapper(base_url=server.base_url)
    env.reset()
    wrappers = [env]
    del env
    with pytest.warns(ResourceWarning, match=r"<OpenEnvWrapper ws://127\.0\.0\.1:\d+/ws> was never closed"):
        wrappers.clear()
    server.wait_until(lambda: server.sessions == 0)


def test_a_wrapper_whose_session_is_gone_does_not_warn(server: MockEnvServer) -> None:
    env = OpenEnvWrapper(base_url=server.base_url)
    env.reset()
    server.inject(Fault("drop", "step"))
    with pytest.raises(SessionLost):
        env.step({})
    del env
    gc.collect()


def test_a_frozen_server_does_not_hold_the_exit_of_the_program(server: MockEnvServer) -> None:
    """W13."""
    script = f"""
        import threading
        from openenv_client import OpenEnvWrapper
        env, other = (OpenEnvWrapper(base_url={server.base_url!r}) for _ in range(2))
        env.reset(); other.reset()
        threading.Thread(target=env.step, args=({{}},), daemon=True).start()
        print("ready", flush=True)
        input()
    """
    command = [sys.executable, "-W", "ignore::ResourceWarning", "-c", textwrap.dedent(script)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        server.wait_until(lambda: "step" in kinds(server))
        with server.frozen():
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.wait() == 0


def test_a_forked_process_gets_a_clear_error_and_does_not_disturb_its_parent(
    server: MockEnvServer, env: OpenEnvWrapper
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # Python warns of forks beside threads: that is the case here
        child = os.fork()
    if child == 0:
        status = 1
        try:
            env.step({})
        except ForkError:
            env.abort()
            env.close()
            del env
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert env.step({}).observation["step"] == 1
    assert kinds(server) == ["connect", "reset", "step"]


# Settings


@pytest.mark.parametrize(
    "name",
    [
        *["connect_timeout", "reset_timeout", "step_timeout", "close_timeout", "open_deadline", "capacity_timeout"],
        *["max_message_size", "ping_interval", "ping_timeout"],
    ],
)
@pytest.mark.parametrize("value", [-1, float("inf"), float("nan"), "5", True])
def test_a_setting_out_of_range_is_refused_by_name(make: MakeWrapper, name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} is {re.escape(repr(value))}"):
        make(**{name: value})


@pytest.mark.parametrize("name", ["env_config", "reset_kwargs", "headers"])
def test_what_should_be_a_dict_is_checked(make: MakeWrapper, name: str) -> None:
    """And not shown: an address that was given first, as if it were the configuration, may hold a password."""
    with pytest.raises(ConfigurationError, match=f"^{name} is a str") as caught:
        make(**{name: "http://user:secret@host"})
    assert "secret" not in str(caught.value)
    assert ("base_url=" in str(caught.value)) == (name == "env_config")


@pytest.mark.parametrize("value", ["Bearer secret\n", "secret\r\nX-Other: 1", "secret é", 5])
def test_a_header_that_would_corrupt_the_request_is_refused_without_showing_it(make: MakeWrapper, value: Any) -> None:
    with pytest.raises(ConfigurationError, match="'Authorization'") as caught:
        make(headers={"Authorization": value})
    assert "secret" not in str(caught.value)


def test_a_token_goes_with_the_handshake_and_is_shown_nowhere(
    server: MockEnvServer, make: MakeWrapper, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "s3cr3t-t0ken"
    with caplog.at_level(logging.DEBUG, "openenv_client.wrapper"):
        env = make(token=secret, open_deadline=1)
        env.reset()
        assert server.received[0].data["headers"]["Authorization"] == f"Bearer {secret}"
        server.inject(Fault("http", "connect", 401))
        env.abort()
        with pytest.raises(ConnectError, match="HTTP 401") as caught:
            env.reset()
    assert secret not in f"{env!r} {caught.value} {caught.value!r} {vars(env)} {caplog.text}"


@pytest.mark.parametrize("token", ["", "two words", "line\n", "t\u00f6ken", b"bytes", 7])
def test_a_token_that_is_none_is_refused_without_showing_it(make: MakeWrapper, token: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^token is no text of visible ASCII characters\. Strip it\.$"):
        make(token=token)


@pytest.mark.parametrize(
    "settings", [{"headers": {"authorization": "Basic x"}}, {"base_url": "http://user:pw@127.0.0.1:1"}]
)
def test_a_token_beside_another_authorization_is_refused(make: MakeWrapper, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="token is not the only authorization"):
        make(token="secret", **settings)


@pytest.mark.parametrize("name", ["", "a b", "Authorization: Bearer secret", "X\r\nEvil", "é", 5])
def test_a_header_without_a_proper_name_is_refused(make: MakeWrapper, name: Any) -> None:
    with pytest.raises(ConfigurationError, match="no name of a header") as caught:
        make(headers={name: "secret"})
    assert "secret" not in str(caught.value)


def test_an_address_is_needed() -> None:
    for config in (None, {}, {"base_url": None}):
        with pytest.raises(ConfigurationError, match="no base_url is given"):
            OpenEnvWrapper(config)
    with pytest.raises(ConfigurationError, match="ftp"):
        OpenEnvWrapper(base_url="ftp://h")


# Proxies and versions


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_no_proxy_is_asked_for_this_machine(
    server: MockEnvServer, make: MakeWrapper, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """U01."""
    for variable in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    assert make(base_url=server.base_url.replace("127.0.0.1", host)).reset().observation["step"] == 0


def test_other_hosts_are_reached_through_the_proxy(make: MakeWrapper, monkeypatch: pytest.MonkeyPatch) -> None:
    """U01."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as proxy:

        def refuse() -> None:
            client, _ = proxy.accept()
            with client:
                asked.append(client.recv(1000))
                client.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=refuse)
        thread.start()
        for variable in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(variable, f"http://user:secret@127.0.0.1:{proxy.getsockname()[1]}")
        for variable in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(variable, raising=False)
        with pytest.raises(ConnectError, match="the proxy answered the handshake with HTTP 403") as caught:
            make(base_url="http://env.example:8000").reset()
        thread.join()
    assert asked[0].startswith(b"CONNECT env.example:8000 ")
    assert "secret" not in str(caught.value)


def test_a_path_prefix_leads_to_its_endpoint(make: MakeWrapper) -> None:
    """U03."""
    with MockEnvServer(path="/envs/sudoku/ws") as server:
        assert server.base_url.endswith("/envs/sudoku")
        for base_url in (server.base_url, server.base_url + "/", server.base_url + "//", server.base_url + "/ws/"):
            assert make(base_url=base_url).reset().observation["step"] == 0
        with pytest.raises(ConnectError, match=r"HTTP 403.*Check the path of base_url"):
            make(base_url=server.base_url.replace("sudoku", "chess")).reset()


def test_the_client_warns_of_nothing_in_a_whole_life(server: MockEnvServer, make: MakeWrapper) -> None:
    """W17: no form of connect that a version of websockets is to change is used."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        server.inject(Fault("http", "connect", 503))
        server.inject(Fault("drop", "step"))
        env = make()
        env.reset()
        with pytest.raises(SessionLost):
            env.step({})
        env.reset()
        env.step({})
        env.close()


def test_the_metadata_forbids_versions_of_websockets_that_lack_what_is_used() -> None:
    """W15, W16: keepalive of the threaded client and ``proxy=`` came with 15.0."""
    assert '"websockets>=15.0"' in (ROOT / "pyproject.toml").read_text()


def test_the_validation_errors_of_a_server_arrive(server: MockEnvServer, env: OpenEnvWrapper) -> None:
    errors = [{"loc": ["data", "message"], "msg": "Field required"}]
    data = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}
    server.inject(Fault("send", "step", json.dumps({"type": "error", "data": data})))
    with pytest.raises(EnvironmentFailedError, match=r"data\.message: Field required") as caught:
        env.step({})
    assert caught.value.errors == errors
