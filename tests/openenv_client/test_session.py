from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from openenv_client.errors import (
    KeepaliveError,
    MessageTooBigError,
    OpenEnvError,
    ProtocolError,
    ServerFullError,
    SessionAbortedError,
    SessionLost,
    StepTimeoutError,
)
from openenv_client.protocol import Observation, encode_reset, encode_step, parse_observation, websocket_url
from openenv_client.session import Deadline, Session, SessionSettings
from openenv_client.testing import Fault, MockEnvServer

MakeSession = Callable[..., Session]


@pytest.fixture
def make_session(server: MockEnvServer) -> Iterator[MakeSession]:
    """Makes connected sessions that are closed at the end."""
    sessions: list[Session] = []

    def make(**settings: float) -> Session:
        session = Session(websocket_url(server.base_url), SessionSettings(**{"close_timeout": 0.2, **settings}))  # type: ignore[arg-type]
        session.connect(Deadline(10))
        sessions.append(session)
        return session

    yield make
    for session in sessions:
        session.close()


def reset(session: Session, seconds: float = 10) -> Observation:
    return session.exchange("reset", encode_reset({}), parse_observation, Deadline(seconds))


def step(session: Session, text: str = "", seconds: float = 10) -> Observation:
    return session.exchange("step", encode_step({"text": text}), parse_observation, Deadline(seconds))


def wait_until_the_end_has_arrived(session: Session) -> None:
    connection = session._connection
    assert connection is not None
    connection.recv_events_thread.join()


def test_a_deadline_is_spent_over_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    deadline = Deadline(10)
    now[0] += 4
    part = deadline.at_most(60)
    assert (deadline.elapsed(), deadline.remaining(), part.seconds) == (4, 6, 6)
    assert deadline.at_most(2).seconds == 2
    now[0] += 7
    assert (deadline.remaining(), part.remaining(), deadline.at_most(60).seconds) == (0, 0, 0)


def test_a_refusal_that_arrived_with_the_close_is_read_before_anything_is_sent(
    server: MockEnvServer, make_session: MakeSession
) -> None:
    """S01: the server closes before the first request; what it said is the reason, not the closed socket."""
    server.inject(Fault("full", "connect"))
    session = make_session()
    wait_until_the_end_has_arrived(session)

    with pytest.raises(ServerFullError) as caught:
        reset(session)
    assert not caught.value.maybe_applied


def test_a_refusal_that_arrives_while_the_request_is_sent_is_read(
    server: MockEnvServer, make_session: MakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S01: the send fails and the buffered frame says why."""
    server.inject(Fault("full", "connect"))
    session = make_session()
    connection = session._connection
    assert connection is not None
    send = connection.send

    def late_send(text: str) -> None:
        wait_until_the_end_has_arrived(session)
        send(text)

    looks = iter([TimeoutError])
    recv = connection.recv

    def recv_nothing_at_first(timeout: float | None = None) -> str | bytes:
        for error in looks:
            raise error
        return recv(timeout)

    monkeypatch.setattr(connection, "send", late_send)
    monkeypatch.setattr(connection, "recv", recv_nothing_at_first)

    with pytest.raises(ServerFullError):
        reset(session)


def test_a_message_that_nobody_asked_for_is_not_the_next_answer(
    server: MockEnvServer, make_session: MakeSession
) -> None:
    """W01: a second reply to one request would shift all that follow."""
    session = make_session()
    reset(session)
    stale = '{"type":"observation","data":{"observation":{"stale":true},"reward":1.0}}'
    server.inject(Fault("extra", "step", stale))
    step(session)
    connection = session._connection
    assert connection is not None
    connection.ping().wait()  # its answer comes after the message

    with pytest.raises(ProtocolError, match="without a request") as caught:
        step(session)
    assert not caught.value.maybe_applied
    with pytest.raises(SessionLost, match="without a request"):
        step(session)


def test_a_late_reply_is_never_read(server: MockEnvServer, make_session: MakeSession) -> None:
    """W01."""
    session = make_session()
    reset(session)
    server.inject(Fault("delay", "step"))

    with pytest.raises(StepTimeoutError, match=r"no reply to step within 0\.05 s") as caught:
        step(session, "A", seconds=0.05)
    server.release()

    assert caught.value.timeout == 0.05
    assert caught.value.maybe_applied
    assert not session.alive
    with pytest.raises(SessionLost, match="the session is gone: no reply to step") as second:
        step(session, "B")
    assert not second.value.maybe_applied
    assert [event.data for event in server.received if event.kind == "step"] == [{"text": "A"}]


def test_an_interrupted_request_leaves_no_reply_behind(make_session: MakeSession) -> None:
    """Ctrl-C in a notebook, then the next cell."""
    session = make_session()

    def interrupt(_: str | bytes) -> Observation:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.exchange("reset", encode_reset({}), interrupt, Deadline(10))
    with pytest.raises(SessionLost, match="interrupted by KeyboardInterrupt"):
        step(session)


def test_a_request_that_a_frozen_server_does_not_read_times_out(
    server: MockEnvServer, make_session: MakeSession
) -> None:
    """The deadline covers sending: the buffers of the kernel fill up and the send itself blocks."""
    session = make_session()
    reset(session)

    with server.frozen(), pytest.raises(StepTimeoutError):
        step(session, "x" * 15_000_000, seconds=0.1)


def test_an_abort_ends_a_send_that_blocks(server: MockEnvServer, make_session: MakeSession) -> None:
    """W13."""
    session = make_session()
    reset(session)
    caught: list[OpenEnvError] = []

    def play() -> None:
        try:
            step(session, "x" * 15_000_000)
        except OpenEnvError as error:
            caught.append(error)

    with server.frozen():
        thread = threading.Thread(target=play)
        thread.start()
        session.abort()
        thread.join()
    assert [type(error) for error in caught] in ([SessionAbortedError], [SessionLost])


def test_an_aborted_session_sends_nothing_more(server: MockEnvServer, make_session: MakeSession) -> None:
    session = make_session()
    reset(session)
    session.abort()

    with pytest.raises(SessionLost, match="the session is gone: it was aborted") as caught:
        step(session)
    assert not caught.value.maybe_applied
    assert [event.kind for event in server.received] == ["connect", "reset"]


def test_a_session_that_is_aborted_before_it_is_open_never_opens(server: MockEnvServer) -> None:
    session = Session(websocket_url(server.base_url), SessionSettings())
    session.abort()

    with pytest.raises(SessionAbortedError):
        session.connect(Deadline(10))
    with pytest.raises(SessionLost):
        reset(session)
    session.close()


def test_a_server_that_answers_no_pings_is_noticed(server: MockEnvServer, make_session: MakeSession) -> None:
    """W05, W06, W15."""
    session = make_session(ping_interval=0.02, ping_timeout=0.02)
    reset(session)

    with (
        server.frozen(),
        pytest.raises(KeepaliveError, match=r"closed by keepalive .* the client got no answer") as caught,
    ):
        step(session)
    assert caught.value.close_code == 1011


def test_a_reply_over_the_limit_names_the_limit_and_the_side(server: MockEnvServer, make_session: MakeSession) -> None:
    """W07, W08: no retry, no network failure; the limit is ours, finite and a setting."""
    session = make_session(max_message_size=1000)
    reset(session)
    server.inject(Fault("big", "step", 1001))

    with pytest.raises(MessageTooBigError, match="max_message_size=1000") as caught:
        step(session)
    assert (caught.value.side, caught.value.limit, caught.value.maybe_applied) == ("client", 1000, True)


def test_a_megabyte_is_no_limit(server: MockEnvServer, make_session: MakeSession) -> None:
    """W07."""
    session = make_session()
    reset(session)
    server.inject(Fault("big", "step", 2**20 + 10))

    assert len(step(session).observation["padding"]) == 2**20 + 10
    assert step(session, "x" * 1_100_000).observation["step"] == 2


def test_a_request_over_the_servers_limit_says_that_it_is_the_servers() -> None:
    """W07."""
    with MockEnvServer(max_message_size=1000) as server:
        session = Session(websocket_url(server.base_url), SessionSettings())
        session.connect(Deadline(10))
        reset(session)

        with pytest.raises(MessageTooBigError, match="the server refused step as too big: it has about 20") as caught:
            step(session, "x" * 2000)
        assert (caught.value.side, caught.value.limit, caught.value.close_code) == ("server", 1000, 1009)
        assert "--ws-max-size" in str(caught.value)


def test_keepalive_does_not_touch_the_random_state_of_the_program(make_session: MakeSession) -> None:
    connection = make_session()._connection
    assert connection is not None
    state = random.getstate()
    connection.ping().wait()
    assert random.getstate() == state


def test_close_tells_the_server_and_waits_until_the_slot_is_free(
    server: MockEnvServer, make_session: MakeSession
) -> None:
    session = make_session()
    reset(session)
    session.close()

    assert server.sessions == 0
    assert [event.kind for event in server.received] == ["connect", "reset", "close"]
    session.close()


def test_a_frozen_server_does_not_hold_a_close(server: MockEnvServer, make_session: MakeSession) -> None:
    """W13, S07: the last result is there, then the server stalls."""
    sessions = [make_session(close_timeout=0.02) for _ in range(8)]
    for session in sessions:
        reset(session)

    with server.frozen():
        for session in sessions:
            session.close()
        assert server.sessions == len(sessions)
    server.wait_until(lambda: server.sessions == 0)


def test_a_message_that_nobody_asked_for_does_not_disturb_a_close(
    server: MockEnvServer, make_session: MakeSession
) -> None:
    """S07: also when the server has gone after it."""
    session = make_session()
    server.inject(Fault("extra", "reset", '{"type":"state","data":{}}'))
    server.inject(Fault("close", "step", 1001))
    reset(session)
    connection = session._connection
    assert connection is not None
    connection.send(encode_step({}))
    wait_until_the_end_has_arrived(session)
    session.close()
    assert not session.alive


def test_a_closed_session_leaves_no_thread_and_no_socket(server: MockEnvServer, make_session: MakeSession) -> None:
    session = make_session()
    connection = session._connection
    assert connection is not None
    keepalive = connection.keepalive_thread
    assert keepalive is not None
    session.close()
    keepalive.join()

    assert not connection.recv_events_thread.is_alive()
    assert connection.socket.fileno() == -1


def test_a_stranger_on_the_port_is_not_taken_for_a_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            stranger, _ = listener.accept()
            with stranger:
                stranger.recv(1000)
                stranger.sendall(b"SSH-2.0-OpenSSH\r\n")
                while stranger.recv(1000):
                    pass

        thread = threading.Thread(target=greet)
        thread.start()
        session = Session(f"ws://127.0.0.1:{listener.getsockname()[1]}/ws", SessionSettings())
        with pytest.raises(OpenEnvError, match="handshake failed") as caught:
            session.connect(Deadline(10))
        thread.join()
    assert not caught.value.transient
