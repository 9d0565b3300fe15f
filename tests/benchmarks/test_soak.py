"""The soak passes with this client, fails with a broken one, and says how to repeat it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import soak
from benchmarks.soak import Report, Settings, fault_rates
from benchmarks.soak_game import CHECKS
from openenv_client import OpenEnvWrapper, SessionLost, StepResult
from openenv_client.testing import FaultProxy
from schedulers import Episode
from server_scripts.launch import ServerProcess

ROOT = Path(__file__).parents[2]
SETTINGS = Settings(seed=7, games=60, concurrency=16, env_id="Sudoku-v0-very-easy", fault_rate=0.08)
UNHARMED = replace(SETTINGS, games=8, fault_rate=0.0)


@pytest.fixture
def server(environment_server: Callable[..., ServerProcess]) -> Iterator[ServerProcess]:
    server = environment_server(env_id=SETTINGS.env_id, max_concurrent_envs=16)
    server.wait_until_idle()
    yield server
    server.wait_until_idle()


def test_with_many_faults_no_reward_belongs_to_another_move(server: ServerProcess) -> None:
    report = soak.run(SETTINGS, server, quiet=True)
    assert report.failure is None
    assert report.games == SETTINGS.games
    assert report.scored + report.unscored.total() == report.games
    assert report.recovered > 0
    assert len(report.faults) > 10
    assert report.checks["each step was sent once"] == report.checks["lost games are unscored"] + report.scored
    assert report.checks["rewards belong to their moves"] == report.scored > 20
    assert report.checks.keys() >= {*CHECKS, "no session is left", "no thread is left", "no descriptor is left"}
    assert report.checks["memory is flat"] == 2


def test_without_faults_every_game_is_scored(server: ServerProcess) -> None:
    report = soak.run(UNHARMED, server, quiet=True)
    assert (report.failure, report.scored, report.unscored, report.faults) == (None, UNHARMED.games, {}, {})


# -- it can fail ------------------------------------------------------------------------------------


def test_a_step_that_is_applied_twice_is_found(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    step = OpenEnvWrapper.step

    def twice(self: OpenEnvWrapper, action: Mapping[str, Any]) -> StepResult:
        result = step(self, action)
        return result if result.done else step(self, action)

    monkeypatch.setattr(OpenEnvWrapper, "step", twice)
    report = soak.run(replace(UNHARMED, concurrency=1), server, quiet=True)
    assert report.failure is not None
    assert report.failure.startswith("each step was sent once: game 0, ")


def test_a_reply_that_belongs_to_the_move_before_is_found(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W01: from some step on, every reply is that of the step before."""
    step = OpenEnvWrapper.step
    previous: dict[OpenEnvWrapper, StepResult] = {}

    def late(self: OpenEnvWrapper, action: Mapping[str, Any]) -> StepResult:
        result = step(self, action)
        shown = previous.get(self, result)
        previous[self] = result
        return shown

    monkeypatch.setattr(OpenEnvWrapper, "step", late)
    report = soak.run(replace(UNHARMED, concurrency=1), server, quiet=True)
    assert report.failure is not None
    assert report.failure.startswith("observations belong to their moves: game 0, ")


def test_a_reply_that_reaches_another_game_is_found(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    take_reply = FaultProxy._take_reply
    strayed: list[str] = []

    async def lead_astray(self: FaultProxy, link: Any, frame: str | bytes) -> None:
        data = json.loads(frame)["data"]
        turn = data["observation"]["info"]["turn"] if "observation" in data else None
        if turn == 2 and not strayed:
            strayed.append(str(frame))
        elif turn == 1 and len(strayed) == 1:
            strayed.append(frame := strayed[0])
        await take_reply(self, link, frame)

    monkeypatch.setattr(FaultProxy, "_take_reply", lead_astray)
    report = soak.run(replace(UNHARMED, concurrency=1), server, quiet=True)
    assert len(strayed) == 2
    assert report.failure is not None
    assert report.failure.startswith("observations belong to their moves: game 1, ")


def test_a_client_that_resets_and_sends_the_lost_step_again_is_found(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W02: reconnecting and sending the step again plays it in a game that lacks the steps before."""
    step = OpenEnvWrapper.step

    def careless(self: OpenEnvWrapper, action: Mapping[str, Any]) -> StepResult:
        try:
            return step(self, action)
        except SessionLost:
            self.reset()
            return step(self, action)

    monkeypatch.setattr(OpenEnvWrapper, "step", careless)
    monkeypatch.setitem(soak.ENV_SETTINGS, "recover", "never")
    report = soak.run(SETTINGS, server, quiet=True)
    assert report.failure is not None


def test_a_lost_game_that_counts_as_zero_is_found(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Episode, "total_reward", property(lambda episode: sum(episode.step_rewards)))
    report = soak.run(SETTINGS, server, quiet=True)
    assert report.failure is not None
    assert report.failure.startswith("lost games are unscored: game ")


def test_a_session_that_is_left_is_found(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "LATE", 0.1)
    with OpenEnvWrapper(base_url=server.base_url) as env:
        env.reset()
        report = soak.run(replace(UNHARMED, games=1), server, quiet=True)
    assert report.failure == "no session is left: 1 sessions are still open after 0.4 s"


def test_a_thread_that_is_left_is_found(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "SETTLE", 0.5)
    close = OpenEnvWrapper.close
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")

    def leave_a_thread(self: OpenEnvWrapper) -> None:
        close(self)
        if threading.current_thread() is not threading.main_thread():
            thread.start()

    with monkeypatch.context() as patch:
        patch.setattr(OpenEnvWrapper, "close", leave_a_thread)
        report = soak.run(replace(UNHARMED, games=1), server, quiet=True)
    stop.set()
    thread.join()
    assert report.failure is not None
    assert report.failure.startswith("no thread is left: {<Thread(forgotten, ")


def test_memory_that_grows_is_found(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "MEMORY_BOUND", -1000.0)
    report = soak.run(UNHARMED, server, quiet=True)
    assert report.failure is not None
    assert report.failure.startswith("memory is flat: the client grew from ")


def test_a_run_in_which_nothing_was_scored_is_no_success(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "_FAULTS", [("error reply", 1, "error", "EXECUTION_ERROR", ("step",))])
    report = soak.run(replace(UNHARMED, games=2, fault_rate=1.0), server, quiet=True)
    assert report.failure == "games are scored: none was"


# -- the command ------------------------------------------------------------------------------------


def test_the_command_survives_a_server_that_is_killed_and_saves_what_came_of_it(tmp_path: Path) -> None:
    options = "--games 24 --seed 3 --env-id Sudoku-v0-very-easy --concurrency 8 --fault-rate 0.02 --restart"
    command = [sys.executable, "benchmarks/soak.py", *options.split(), "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "report.json").read_text())
    assert result["games"] == 24
    assert result["failure"] is None
    assert result["faults"]["server killed and started again"] == 1
    assert result["recovered"] > 0
    assert f"to repeat: {result['command']}" in done.stdout


@contextmanager
def no_server(settings: Settings) -> Iterator[tuple[None, None]]:
    yield None, None


Invoke = Callable[..., tuple[int, str, list[Settings]]]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Invoke:
    """Runs the command without playing: gives the exit code, the output, and what was to be played."""

    def invoke(*options: str, report: Report | None = None) -> tuple[int, str, list[Settings]]:
        seen: list[Settings] = []

        def run(settings: Settings, server: object, restart: object) -> Report:
            seen.append(settings)
            return report or Report()

        monkeypatch.setattr(soak, "run", run)
        result = CliRunner().invoke(soak.app, list(options))
        return result.exit_code, result.output, seen

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(soak, "_own_server", no_server)
    return invoke


def test_the_command_that_is_printed_repeats_the_run(invoke: Invoke) -> None:
    options = "--games 5 --concurrency 3 --env-id Sudoku-v0 --difficulty hard --fault-rate 0.5 --restart --only 4"
    code, output, [settings] = invoke(*options.split())
    assert code == 0
    printed = output.partition("to repeat: ")[2].splitlines()[0]
    make, soak_target, args = shlex.split(printed)
    assert (make, soak_target) == ("make", "soak")
    assert invoke(*shlex.split(args.removeprefix("ARGS=")))[2] == [settings]


def test_a_failed_check_is_exit_code_1_and_says_what_differs_and_how_to_repeat_it(invoke: Invoke) -> None:
    code, output, [settings] = invoke(report=Report(failure="rewards: game 3: [1] instead of [2]"))
    assert code == 1
    assert "failed: rewards: game 3: [1] instead of [2]" in output
    assert output.count(settings.command) == 2
    assert f"--seed {settings.seed}" in settings.command


def test_seeds_are_fresh_unless_they_are_given(invoke: Invoke) -> None:
    seeds = {invoke()[2][0].seed for _ in range(3)}
    assert len(seeds) == 3


def test_a_difficulty_that_is_none_is_refused(invoke: Invoke) -> None:
    code, output, _ = invoke("--difficulty", "harder")
    assert (code, "easy, medium, hard" in output) == (2, True)


@pytest.mark.parametrize("blocked", ["a_file", "a_file/run"])
def test_a_folder_that_cannot_be_written_is_refused_before_a_game_is_played(
    invoke: Invoke, tmp_path: Path, blocked: str
) -> None:
    (tmp_path / "a_file").touch()
    code, output, seen = invoke("--output", blocked)
    assert (code, seen) == (2, [])
    said = " ".join(output.replace("│", " ").split())
    assert f"'--output': {blocked}: " in said
    assert "; name another folder" in said


def test_each_sort_of_event_meets_faults_at_the_rate_that_was_asked_for() -> None:
    rates, names = fault_rates(0.04)
    for event in ("connect", "reset", "step", "state"):
        assert sum(rate for fault, rate in rates.items() if fault.on == event) == pytest.approx(0.04)
    assert rates.keys() == names.keys()
