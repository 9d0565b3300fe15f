"""How a wrapper ends: closed at any moment, interrupted, collected, forked, or with its program."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from openenv_client import OpenEnvError, OpenEnvWrapper, SessionAbortedError, WrapperClosedError
from openenv_client.testing import Fault, MockEnvServer
from tests.programs import program

MakeWrapper = Callable[..., OpenEnvWrapper]


def count(server: MockEnvServer, kind: str) -> int:
    return [event.kind for event in server.received].count(kind)


def idle(server: MockEnvServer) -> None:
    server.wait_until(lambda: server.sessions == 0)


class Phase:
    """A call that does not come back by itself, and the sign by which the server knows that it is under way."""

    def __init__(self, server: MockEnvServer, env: OpenEnvWrapper, name: str) -> None:
        fault, self.kind = {
            "connect": (Fault("delay", "connect"), "connect"),
            "full": (Fault("full", "connect", times=None), "connect"),
            "reset": (Fault("delay", "reset"), "reset"),
            "step": (Fault("delay", "step"), "step"),
            "state": (Fault("delay", "state"), "state"),
            "recovery": (Fault("drop", "step"), "reset"),
            "recovery on a full server": (Fault("drop", "step"), "connect"),
        }[name]
        self.call: Callable[[], Any] = {"step": lambda: env.step({}), "state": env.state}.get(name, env.reset)
        if name in ("step", "state") or name.startswith("recovery"):
            env.reset(seed=1)
        server.inject(fault)
        if name == "recovery":
            server.inject(Fault("delay", "reset"))
        if name == "recovery on a full server":
            server.inject(Fault("full", "connect", times=None))
        if name.startswith("recovery"):
            self.call = lambda: env.step({})
        self._server = server
        self._before = count(server, self.kind)

    def wait(self) -> None:
        """Until it waits."""
        self._server.wait_until(lambda: count(self._server, self.kind) > self._before)


PHASES = ["connect", "full", "reset", "step", "state", "recovery", "recovery on a full server"]


# -- threads and signals ----------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
def test_many_threads_close_a_wrapper_whose_call_is_under_way(
    server: MockEnvServer, make: MakeWrapper, phase: str
) -> None:
    """W12, W13: every one of them comes back, the call fails, and nothing is left."""
    env = make()
    waiting = Phase(server, env, phase)
    caught: list[OpenEnvError] = []

    def call() -> None:
        try:
            waiting.call()
        except OpenEnvError as error:
            caught.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    waiting.wait()
    closers = [threading.Thread(target=env.close) for _ in range(8)]
    for thread in closers:
        thread.start()
    for thread in [*closers, caller]:
        thread.join()

    assert [type(error) for error in caught] == [SessionAbortedError]
    with pytest.raises(WrapperClosedError):
        env.reset()
    server.release()
    idle(server)


@contextlib.contextmanager
def when(waiting: Phase, action: Callable[[], None]) -> Iterator[None]:
    """Run an action in a signal handler of this thread, once the server has seen the call that is made inside."""
    main, handled = threading.get_ident(), threading.Event()

    def send() -> None:
        waiting.wait()
        while not handled.wait(0.05):  # Python notices one that comes just before a wait only after the wait
            signal.pthread_kill(main, signal.SIGUSR1)

    def handle(number: int, frame: object) -> None:
        if not handled.is_set():
            handled.set()
            action()

    before = signal.signal(signal.SIGUSR1, handle)
    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("end", ["close", "abort"])
@pytest.mark.parametrize("phase", PHASES)
def test_signal_handler_ends_the_call_that_it_interrupts(
    server: MockEnvServer, make: MakeWrapper, phase: str, end: str
) -> None:
    """The thread that waits holds the wrapper's lock: a handler that asked for it would wait for itself."""
    env = make()
    waiting = Phase(server, env, phase)
    with when(waiting, getattr(env, end)), pytest.raises(SessionAbortedError):
        waiting.call()
    server.release()
    idle(server)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("phase", PHASES)
def test_call_that_is_interrupted_leaves_no_session(server: MockEnvServer, make: MakeWrapper, phase: str) -> None:
    """Ctrl-C: the episode is lost rather than out of step, unless its game was being rebuilt: that begins anew."""
    env = make()
    waiting = Phase(server, env, phase)
    with when(waiting, interrupt), pytest.raises(KeyboardInterrupt):
        waiting.call()
    server.release()
    idle(server)
    if phase == "recovery":
        assert env.step({}).observation["step"] == 1
    elif phase != "recovery on a full server":
        with pytest.raises(OpenEnvError):
            env.step({})


def test_close_that_is_interrupted_closes(server: MockEnvServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C, in the midst of a goodbye to a server that does not answer."""
    env = OpenEnvWrapper(base_url=server.base_url)
    env.reset()
    assert env._session is not None
    monkeypatch.setattr(env._session._connection, "recv", lambda timeout: interrupt())
    with server.frozen(), pytest.raises(KeyboardInterrupt):
        env.close()
    del env
    gc.collect()  # and nothing warns
    idle(server)


async def test_wrapper_works_inside_a_running_event_loop(server: MockEnvServer) -> None:
    """It blocks the loop, as a script may well do; it needs none of its own."""
    with OpenEnvWrapper(base_url=server.base_url) as env:
        env.reset()
        assert env.step({}).reward == 1.0
        assert (await asyncio.to_thread(env.step, {})).reward == 2.0
    assert server.sessions == 0


# -- copies and collection --------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copying_a_connection_is_refused(env: OpenEnvWrapper, copied: Callable[[Any], Any]) -> None:
    """Two of them on one socket would read each other's replies."""
    with pytest.raises(TypeError, match=r"<OpenEnvWrapper ws://.*> .*cannot be copied or sent to another process"):
        copied(env)
    assert env.step({}).reward == 1.0


def test_wrapper_in_a_cycle_is_collected_with_a_warning(server: MockEnvServer) -> None:
    """S04: in whatever thread the collector runs."""
    env = OpenEnvWrapper(base_url=server.base_url)
    env.reset()
    cycle: list[Any] = [env]
    cycle.append(cycle)
    del env, cycle
    collector = threading.Thread(target=gc.collect)
    with pytest.warns(ResourceWarning, match="was never closed"):  # noqa: PT031 - it comes from another thread
        collector.start()
        collector.join()
    idle(server)


@pytest.mark.parametrize("phase", ["reset", "step", "recovery"])
def test_wrapper_that_is_dropped_after_an_interrupt_frees_its_session(server: MockEnvServer, phase: str) -> None:
    """Nobody closes it any more, and nothing warns: its session ended with the interrupt."""
    env = OpenEnvWrapper(base_url=server.base_url)
    waiting = Phase(server, env, phase)
    with when(waiting, interrupt), pytest.raises(KeyboardInterrupt):
        waiting.call()
    del env, waiting
    gc.collect()
    server.release()
    idle(server)


# -- forks ------------------------------------------------------------------------------------------

FORK = """
    import gc, os, sys, threading, warnings
    from openenv_client import ForkError, OpenEnvWrapper
    env, idle = (OpenEnvWrapper(base_url={base_url!r}, step_timeout=600) for _ in range(2))
    env.reset(); idle.reset()
    stepping = threading.Thread(target=lambda: print(env.step({{}}).reward, flush=True))
    stepping.start()
    input()
    warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
    child = os.fork()
    if child == 0:
        for call in (env.reset, env.state, lambda: env.step({{}}), idle.reset):
            try:
                call()
            except ForkError:
                continue
            sys.exit(1)
        {ending}
        with OpenEnvWrapper(base_url={base_url!r}) as own:
            own.reset()
            assert own.step({{}}).reward == 1.0
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    print("child has ended", flush=True)
    stepping.join()
    print(env.step({{}}).reward, idle.step({{}}).reward, flush=True)
    env.close(); idle.close()
"""


@pytest.mark.parametrize("ending", ["env.close(); idle.close()", "del env, idle; gc.collect()", "pass"])
def test_forked_process_opens_its_own_connection_and_leaves_its_parents_alone(
    server: MockEnvServer, ending: str
) -> None:
    """One wrapper is in the midst of a step, its lock held; the child closes, collects or forgets both, and exits."""
    server.inject(Fault("delay", "step"))
    with program(FORK.format(base_url=server.base_url, ending=ending), "-W", "error") as parent:
        server.wait_until(lambda: count(server, "step") == 1)
        parent.write()
        assert parent.read() == "child has ended"
        assert server.sessions == 2
        server.release()
        assert [parent.read(), parent.read()] == ["1.0", "2.0 1.0"]
        assert parent.end() == (0, "")
    idle(server)


# -- the end of the program -------------------------------------------------------------------------

OPEN = """
    import atexit, builtins, os, sys, threading
    from openenv_client import OpenEnvWrapper
    env = OpenEnvWrapper(base_url={base_url!r}, step_timeout=100_000, close_timeout=0.2)
    env.reset(seed=1)
    step = lambda: env.step({{}})
    {beginning}
    print("ready", flush=True)
    {ending}
"""


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize(
    ("beginning", "ending", "code"),
    [
        ("", "input()", 0),
        ("", "input(); sys.exit(3)", 3),
        ("", "input(); os._exit(4)", 4),
        ("", "input(); 1 / 0", 1),
        ("", "step()", -signal.SIGTERM),
        ("", "step()", -signal.SIGINT),
        ("atexit.register(env.close)", "input()", 0),
        ("builtins.kept = [env]; builtins.kept.append(builtins.kept); del env", "input()", 0),
        ("sys.modules['kept'] = env", "input()", 0),
        ("threading.Thread(target=step, daemon=True).start()", "input()", 0),
        ("threading.Thread(target=step, daemon=True).start()", "input(); sys.exit(3)", 3),
    ],
)
def test_program_that_ends_with_an_open_session(
    server: MockEnvServer, beginning: str, ending: str, code: int, frozen: bool
) -> None:
    """W13: it ends at once, with its own exit code and nothing but its own words, and frees the session."""
    server.inject(Fault("delay", "step", times=None))
    with program(OPEN.format(base_url=server.base_url, beginning=beginning, ending=ending)) as child:
        assert child.read() == "ready"
        if "step" in beginning or "step" in ending:
            server.wait_until(lambda: count(server, "step"))
        with server.frozen() if frozen else contextlib.nullcontext():
            if code < 0:
                child.process.send_signal(-code)
            else:
                child.write()
            returned, stderr = child.end()
    assert returned == code
    last = {1: ["ZeroDivisionError: division by zero"], -signal.SIGINT: ["KeyboardInterrupt"]}.get(code, [])
    assert stderr.splitlines()[-1:] == last
    assert "Exception in" not in stderr
    assert "Exception ignored" not in stderr
    server.release()
    idle(server)


def test_program_in_development_mode_is_told_of_the_open_session(server: MockEnvServer) -> None:
    """The warning comes out whole, although the interpreter is being taken down."""
    with program(OPEN.format(base_url=server.base_url, beginning="", ending=""), "-X", "dev") as child:
        code, stderr = child.end()
    assert code == 0
    assert "was never closed" in stderr
    assert "Exception ignored" not in stderr
    idle(server)


def test_thread_that_waits_does_not_hold_a_program_that_closes(server: MockEnvServer) -> None:
    """Python waits for threads that are no daemons; close ends the wait of this one."""
    server.inject(Fault("delay", "step"))
    script = OPEN.format(base_url=server.base_url, beginning="threading.Thread(target=step).start()", ending="input()")
    with program(script + "\n    env.close()") as child:
        server.wait_until(lambda: count(server, "step"))
        with server.frozen():
            child.write()
            code, stderr = child.end()
    assert code == 0
    assert "SessionAbortedError" in stderr
    server.release()
    idle(server)
