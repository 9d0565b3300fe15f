"""A lost session is replaced by one in which the same game has been played as far, or the loss is said."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest

from openenv_client import (
    ConfigurationError,
    EnvironmentFailedError,
    OpenEnvWrapper,
    RecoveryError,
    ServerFullError,
    SessionAbortedError,
    SessionLost,
    StepTimeoutError,
    WrapperClosedError,
)
from openenv_client.testing import Fault, MockEnvServer, Received, reply

MakeWrapper = Callable[..., OpenEnvWrapper]


def dice(kwargs: dict[str, Any]) -> Generator[dict[str, Any], dict[str, Any], None]:
    """A game of chance that is the same for the same seed: throws, and the sum of what was bet on them."""
    generator = random.Random(kwargs.get("seed"))
    action = yield reply({"throw": generator.random(), "seed": kwargs.get("seed")})
    for step in range(1, 100):
        action = yield reply({"throw": generator.random(), **action}, reward=float(action["bet"]), done=step == 6)


@pytest.fixture
def server(server: MockEnvServer) -> MockEnvServer:
    server.script = dice
    return server


def play(env: OpenEnvWrapper, steps: int = 6) -> list[Any]:
    """A whole game, as a caller sees it."""
    return [env.reset(seed=7).observation, *(env.step({"bet": n})[:3] for n in range(1, steps + 1))]


def steps_of(events: list[Received], session: int) -> list[int]:
    return [event.data["bet"] for event in events if event.kind == "step" and event.session == session]


LOSSES = {
    "cut before the step": Fault("drop", "step"),
    "cut after the step": Fault("drop_after", "step"),
    "late answer": Fault("delay", "step"),
    "server restarts": Fault("close", "step", (1012, "service restart")),
    "keepalive": Fault("close", "step", (1011, "keepalive ping timeout")),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("nth", [1, 4, 6])
def test_a_game_with_a_seed_goes_on_as_if_nothing_had_happened(
    server: MockEnvServer, make: MakeWrapper, loss: Fault, nth: int
) -> None:
    """W02: each session of the server gets each step once, and the caller the answers of one game."""
    undisturbed = play(make())
    env = make(step_timeout=0.2 if loss.kind == "delay" else 10)
    server.inject(Fault(loss.kind, "step", loss.value, nth=nth))

    assert play(env) == undisturbed

    assert [recovery.replayed for recovery in env.recoveries] == [nth - 1]
    assert steps_of(server.received, 2) == list(range(1, nth + 1))
    assert steps_of(server.received, 3) == [1, 2, 3, 4, 5, 6]
    server.release()


def test_the_step_in_which_it_happened_says_so(server: MockEnvServer, make: MakeWrapper) -> None:
    """Metadata, a property, and the log."""
    env = make()
    env.reset(seed=7)
    env.step({"bet": 1})
    server.inject(Fault("drop_after", "step", times=1))

    recovered = env.step({"bet": 2})

    assert recovered.metadata["recoveries"] == env.recoveries
    assert env.recoveries[0].error.startswith("the connection was cut during step")
    assert env.recoveries[0].replayed == 1
    assert env.recoveries[0].seconds > 0
    assert "recoveries" not in env.step({"bet": 3}).metadata
    assert len(env.recoveries) == 1
    env.reset(seed=7)
    assert env.recoveries == []


def test_a_session_that_went_while_nobody_looked_is_rebuilt(server: MockEnvServer, make: MakeWrapper) -> None:
    """W03: the server restarted between two steps."""
    undisturbed = play(make())
    env = make()
    observed: list[Any] = [env.reset(seed=7).observation]
    for n in range(1, 7):
        observed.append(env.step({"bet": n})[:3])
        if n == 3:
            server.restart()
    assert observed == undisturbed


def test_state_is_asked_in_the_rebuilt_game(server: MockEnvServer, make: MakeWrapper) -> None:
    env = make()
    env.reset(seed=7)
    env.step({"bet": 1})
    server.inject(Fault("drop", "state"))
    assert env.state()["step_count"] == 1
    assert len(env.recoveries) == 1


def test_several_losses_in_one_step_and_while_rebuilding(server: MockEnvServer, make: MakeWrapper) -> None:
    """The step is lost, then the third step of its replay, then the reset of the next."""
    undisturbed = play(make())
    env = make()
    server.inject(Fault("drop_after", "step", nth=5))
    server.inject(Fault("drop_after", "step", nth=8))
    server.inject(Fault("drop", "reset", nth=3))

    assert play(env) == undisturbed

    assert [recovery.replayed for recovery in env.recoveries] == [4]
    assert "the connection was cut during step" in env.recoveries[0].error


def test_a_limit_ends_the_recoveries_of_an_episode(server: MockEnvServer, make: MakeWrapper) -> None:
    env = make(max_recoveries=2)
    env.reset(seed=7)
    server.inject(Fault("drop_after", "step", times=3))

    with pytest.raises(SessionLost) as caught:
        env.step({"bet": 1})
    with pytest.raises(SessionLost, match="the session is gone"):
        env.step({"bet": 1})

    assert type(caught.value) is SessionLost
    assert caught.value.maybe_applied
    assert len(server.applied) == 6  # three resets, three steps
    env.reset(seed=7)
    assert env.step({"bet": 1}).reward == 1.0


@pytest.mark.parametrize(
    ("settings", "seed"),
    [
        ({}, {}),
        ({}, {"seed": None}),
        ({"recover": "never"}, {"seed": 7}),
        ({"recover": "always", "max_recoveries": 0}, {"seed": 7}),
    ],
)
def test_a_game_that_is_not_to_be_rebuilt_is_lost(
    server: MockEnvServer, make: MakeWrapper, settings: dict[str, Any], seed: dict[str, Any]
) -> None:
    env = make(**settings)
    env.reset(**seed)
    server.inject(Fault("drop_after", "step"))
    with pytest.raises(SessionLost):
        env.step({"bet": 1})
    assert [event.kind for event in server.received] == ["connect", "reset", "step"]


def test_a_seed_of_the_configuration_counts(server: MockEnvServer, make: MakeWrapper) -> None:
    env = make(env_config={"reset_kwargs": {"seed": 0}})
    env.reset()
    server.inject(Fault("drop", "step"))
    assert env.step({"bet": 1}).reward == 1.0


def test_an_environment_without_chance_is_rebuilt_on_request(server: MockEnvServer, make: MakeWrapper) -> None:
    server.script = [reply({"n": 0}), reply({"n": 1}, reward=1.0), reply({"n": 2}, reward=2.0)]
    env = make(recover="always")
    env.reset()
    env.step({"bet": 1})
    server.inject(Fault("drop_after", "step"))
    assert env.step({"bet": 2}).reward == 2.0


@pytest.mark.parametrize(
    ("other", "step", "parts"),
    [
        ([reply({"n": 5})], 0, "observation['n']"),
        ([reply({"m": 0, "n": 0})], 0, "observation['m']"),
        ([reply({}, done=True)], 0, "done, observation['n']"),
        ([reply({"n": 0}), reply({"n": 1}, reward=0.5)], 1, "reward"),
        ([reply({"n": 0}), reply({"n": 1}, reward=1.0, done=True)], 1, "done"),
        ([reply({"n": 0}), reply({"n": 1}, reward=1.0), reply({"n": None})], 2, "observation['n']"),
        ([reply({"n": 0}), reply({"n": 1}, reward=1.0), reply({})], 2, "observation['n']"),
        ([reply({"n": 0}), reply({"n": 1}, reward=1.0)], 2, "done, error, observation['n'], reward"),
    ],
)
def test_a_game_that_comes_out_otherwise_is_lost(
    server: MockEnvServer, make: MakeWrapper, other: list[dict[str, Any]], step: int, parts: str
) -> None:
    """The pending step is never sent into it, and the error says where it differed and in what."""
    server.script = [reply({"n": 0}), reply({"n": 1}, reward=1.0), reply({"n": 2}), reply({"n": 3})]
    env = make(recover="always")
    env.reset()
    env.step({"bet": 1})
    env.step({"bet": 2})
    server.script = other
    server.inject(Fault("drop_after", "step"))

    with pytest.raises(RecoveryError) as caught:
        env.step({"bet": 3})
    with pytest.raises(SessionLost, match="the session is gone"):
        env.step({"bet": 3})

    assert caught.value.step == step
    assert f"has another {parts} (" in str(caught.value)
    assert str(caught.value).endswith('set recover="never".')
    assert caught.value.maybe_applied
    assert 3 not in steps_of(server.received, 2)
    server.wait_until(lambda: server.sessions == 0)
    server.script = [reply({"n": 0})]
    assert env.reset().observation == {"n": 0}


def test_a_step_that_the_environment_failed_is_part_of_the_game(server: MockEnvServer, make: MakeWrapper) -> None:
    """One that was refused unseen is not."""

    def fussy(kwargs: dict[str, Any]) -> Generator[dict[str, Any], dict[str, Any], None]:
        action = yield reply({"said": None})
        while True:
            action = yield {"observation": 1} if action["bet"] < 0 else reply({"said": action["bet"]})

    server.script = fussy
    env = make()
    env.reset(seed=1)
    env.step({"bet": 1})
    for code in ("EXECUTION_ERROR", "VALIDATION_ERROR"):
        server.inject(Fault("error", "step", code))
        with pytest.raises(EnvironmentFailedError):
            env.step({"bet": 2})
    server.inject(Fault("drop", "step"))
    server.inject(Fault("error", "step", "EXECUTION_ERROR", nth=3))

    assert env.step({"bet": 3}).observation == {"said": 3}
    assert steps_of(server.received, 2) == [1, 2, 3]


def test_a_server_that_does_not_come_back_loses_the_game(server: MockEnvServer, make: MakeWrapper) -> None:
    env = make(open_deadline=0.2)
    env.reset(seed=7)
    server.stop()
    with pytest.raises(RecoveryError, match="no other could be opened: connection refused") as caught:
        env.step({"bet": 1})
    assert caught.value.step is None
    assert caught.value.url == env_url(server)
    with pytest.raises(SessionLost, match="the session is gone"):
        env.step({"bet": 1})


def env_url(server: MockEnvServer) -> str:
    return server.base_url.replace("http", "ws") + "/ws"


def test_time_for_rebuilding_is_one_deadline(server: MockEnvServer, make: MakeWrapper) -> None:
    """A server that answers every second session too late costs recovery_timeout and not many step_timeouts."""
    env = make(step_timeout=0.1, recovery_timeout=0.15, max_recoveries=10**6)
    env.reset(seed=7)
    server.inject(Fault("delay", "step", times=None))
    with pytest.raises((StepTimeoutError, RecoveryError)):
        env.step({"bet": 1})
    server.release()


def test_a_full_server_is_no_loss(server: MockEnvServer, make: MakeWrapper) -> None:
    """The caller may wait as it likes and go on with the same step."""
    undisturbed = play(make())
    env = make(capacity_timeout=0)
    observed = [env.reset(seed=7).observation, env.step({"bet": 1})[:3]]
    server.inject(Fault("drop_after", "step"))
    server.inject(Fault("full", "connect", times=2))

    for _ in range(2):
        with pytest.raises(ServerFullError) as caught:
            env.step({"bet": 2})
        assert caught.value.maybe_applied  # in the session that was lost
    observed += [env.step({"bet": n})[:3] for n in range(2, 7)]

    assert observed == undisturbed
    assert [recovery.replayed for recovery in env.recoveries] == [1]


@pytest.mark.parametrize(
    "fault",
    [
        Fault("send", "step", "garbage"),
        Fault("send", "step", b"\x00"),
        Fault("close", "step", (1009, "too big")),
        Fault("error", "step", "SESSION_ERROR"),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.value!r:.12}",
)
def test_what_would_happen_again_is_not_tried_again(server: MockEnvServer, make: MakeWrapper, fault: Fault) -> None:
    env = make()
    env.reset(seed=7)
    server.inject(fault)
    with pytest.raises(SessionLost) as caught:
        env.step({"bet": 1})
    assert not isinstance(caught.value, RecoveryError)
    assert [event.kind for event in server.received].count("connect") == 1


@pytest.mark.parametrize("end", ["abort", "close"])
@pytest.mark.parametrize("phase", ["connect", "reset", "step"])
def test_rebuilding_is_ended_from_another_thread(
    server: MockEnvServer, make: MakeWrapper, end: str, phase: str
) -> None:
    """W13: whatever it waits for."""
    env = make()
    env.reset(seed=7)
    env.step({"bet": 1})
    server.inject(Fault("drop_after", "step"))
    server.inject(Fault("delay", phase, nth=2 if phase == "step" else 1))  # type: ignore[arg-type]
    seen = len(server.received)
    raised: list[BaseException] = []

    def step() -> None:
        try:
            env.step({"bet": 2})
        except SessionLost as error:
            raised.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    kinds = {"connect": ["step", "connect"], "reset": ["step", "connect", "reset"]}
    awaited = kinds.get(phase, ["step", "connect", "reset", "step"])
    server.wait_until(lambda: [event.kind for event in server.received[seen:]] == awaited)
    getattr(env, end)()
    thread.join()
    assert [type(error) for error in raised] == [SessionAbortedError]
    server.release()
    with pytest.raises(WrapperClosedError if end == "close" else SessionLost):
        env.step({"bet": 2})


def test_an_interrupted_rebuilding_begins_anew(
    server: MockEnvServer, make: MakeWrapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a notebook while the game is being rebuilt; the cell is then run again."""
    undisturbed = play(make())
    env = make()
    observed = [env.reset(seed=7).observation, env.step({"bet": 1})[:3], env.step({"bet": 2})[:3]]
    server.inject(Fault("drop_after", "step"))
    replay = env._replay

    def interrupt(*args: Any, first: bool) -> Any:
        if not first:
            raise KeyboardInterrupt
        return replay(*args, first=first)

    monkeypatch.setattr(env, "_replay", interrupt)
    with pytest.raises(KeyboardInterrupt):
        env.step({"bet": 3})
    monkeypatch.undo()

    observed += [env.step({"bet": n})[:3] for n in range(3, 7)]
    assert observed == undisturbed


def test_what_a_caller_does_to_an_observation_does_not_matter(server: MockEnvServer, make: MakeWrapper) -> None:
    env = make()
    env.reset(seed=7).observation.clear()
    env.step({"bet": 1}).observation["throw"] = "changed"
    server.inject(Fault("drop_after", "step"))
    assert env.step({"bet": 2}).reward == 2.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("recover", "sometimes"),
        ("recover", True),
        ("max_recoveries", -1),
        ("max_recoveries", "3"),
        ("recovery_timeout", 0),
    ],
)
def test_a_bad_setting_is_refused_by_name(make: MakeWrapper, name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} is {value!r}"):
        make(**{name: value})


def test_a_loss_is_logged_once(server: MockEnvServer, make: MakeWrapper, caplog: pytest.LogCaptureFixture) -> None:
    env = make()
    env.reset(seed=7)
    server.inject(Fault("drop_after", "step"))
    with caplog.at_level(logging.INFO, "openenv_client.wrapper"):
        env.step({"bet": 1})
    lost, rebuilt = (record for record in caplog.records if record.name == "openenv_client.wrapper")
    assert (lost.levelname, rebuilt.levelname) == ("WARNING", "INFO")
    assert "cut during step" in lost.getMessage()
    assert "a game of 0 steps" in rebuilt.getMessage()
