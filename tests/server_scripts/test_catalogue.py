"""Which games run here: each is tried, quickly, quietly, and without a network."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nltk  # type: ignore[import-untyped]
import pytest
import textarena
from textarena.envs.registration import ENV_REGISTRY

from server_scripts.catalogue import VARIANTS, Trial, describe, try_games

SCRIPT = Path(__file__).parents[2] / "server_scripts" / "start_textarena_server.py"
NAME = "Tried-v0"


@pytest.fixture
def reason() -> Iterator[Callable[..., str | None]]:
    """Give what came of trying a game that does something of the test's own when it is made or played."""

    def reason(
        *, made: Callable[[], object] = list, played: Callable[[], object] = list, seconds: float = 10.0
    ) -> str | None:
        class Tried(textarena.Env):  # type: ignore[misc]
            def reset(self, num_players: int, seed: int | None = None) -> None:
                self.state = textarena.SinglePlayerState(num_players=num_players, seed=seed, max_turns=9)
                self.state.reset(game_state={}, player_prompt_function=lambda player_id, game_state: "Say anything.")
                made()

            def step(self, action: str) -> Any:
                played()
                return self.state.step()

        ENV_REGISTRY.pop(NAME, None)
        textarena.register(id=NAME, entry_point=Tried)
        [trial] = try_games([NAME], seconds=seconds)
        assert trial.env_id == NAME
        return trial.reason

    yield reason
    ENV_REGISTRY.pop(NAME, None)


def test_games_of_the_examples_run() -> None:
    """And one that keeps a method of its generator."""
    names = ["Sudoku-v0-very-easy", "GuessTheNumber-v0", "Mastermind-v0", "Minesweeper-v0", "Secretary-v0"]
    assert try_games(names) == [Trial(name) for name in names]
    assert all(name + variant in ENV_REGISTRY for name in names for variant in VARIANTS)


@pytest.mark.parametrize(
    ("env_id", "expected"),
    [
        ("TicTacToe-v0", "is not a game of one player."),
        ("Sudoku-v0-nonsense", "has no game 'Sudoku-v0-nonsense'"),
        ("BabyAiText-v0", "cannot be loaded here: No module named 'gym'"),
        ("Countdown-v0", "fails in its first move: AttributeError"),
    ],
)
def test_others_say_why_not(env_id: str, expected: str) -> None:
    [trial] = try_games([env_id])
    assert trial.reason is not None
    assert expected in trial.reason


def test_missing_data_is_named_whether_it_is_missed_at_import_or_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """S11: nothing is downloaded to make up for it."""
    monkeypatch.setattr(nltk.data, "path", [])
    for module in ("LetterAuction", "Hangman"):
        monkeypatch.delitem(sys.modules, f"textarena.envs.{module}.env", raising=False)
    for trial in try_games(["LetterAuction-v0", "Hangman-v0"]):
        assert trial.reason is not None
        assert "needs data that is not installed" in trial.reason


def test_game_that_runs(reason: Callable[..., str | None]) -> None:
    assert reason() is None


def test_network_is_shut_for_games(reason: Callable[..., str | None]) -> None:
    """Names and addresses, while a game is made and while it is played."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        for connect in (lambda: socket.create_connection(address), lambda: socket.getaddrinfo("localhost", 80)):
            assert "there is no network" in str(reason(made=connect))
            assert "there is no network" in str(reason(played=connect))
        socket.create_connection(address).close()  # and is open again


def test_downloads_of_nltk_do_nothing(reason: Callable[..., str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not even tried, which would only print complaints."""
    asked: list[str] = []
    monkeypatch.setattr(nltk, "download", asked.append)
    assert reason(made=lambda: nltk.download("words")) is None
    assert asked == []
    nltk.download("words")
    assert asked == ["words"]


def test_slow_game_is_stopped(reason: Callable[..., str | None]) -> None:
    """One that never ends, even one that swallows the first exception."""

    def spin() -> None:
        with contextlib.suppress(TimeoutError):
            while True:
                pass
        while True:
            pass

    before = signal.getsignal(signal.SIGVTALRM)
    assert reason(made=spin, seconds=1) == "cannot be played here: a game takes more than 1 s to make"
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_whatever_a_game_raises_is_a_reason(reason: Callable[..., str | None]) -> None:
    def fail() -> None:
        raise ZeroDivisionError("by nought")

    assert reason(made=fail) == "cannot be played here: by nought"
    assert reason(played=fail) == "fails in its first move: ZeroDivisionError: by nought"


def test_what_games_print_is_dropped(reason: Callable[..., str | None], capfd: pytest.CaptureFixture[str]) -> None:
    def chat() -> None:
        sys.stdout.write("thinking")
        sys.stderr.write("hard")

    assert reason(made=chat, played=chat) is None
    assert capfd.readouterr() == ("", "")


def test_description() -> None:
    trials = [Trial("A-v0"), Trial("B-v0", "is odd."), Trial("C-v0", "is even."), Trial("D-v0", "is even."), Trial("E")]
    assert describe(trials).splitlines() == [
        "These 2 run here, each also with -raw or -train behind its id:",
        "  A-v0",
        "  E",
        "",
        "The others, by reason:",
        "* is even.",
        "  C-v0, D-v0",
        "* is odd.",
        "  B-v0",
    ]


def test_script_lists_all_games_of_textarena() -> None:
    """Each id stands there once."""
    done = subprocess.run([sys.executable, str(SCRIPT), "--list"], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    running, others = done.stdout.split("The others, by reason:")
    ids = [line.strip() for line in running.splitlines()[1:] if line.strip()]
    assert {"Sudoku-v0", "GuessTheNumber-v0", "Mastermind-v0"} <= set(ids)
    rest = [name for line in others.splitlines() if line.startswith("  ") for name in line.strip().split(", ")]
    assert sorted(ids + rest) == sorted(name for name in ENV_REGISTRY if not name.endswith(VARIANTS))


def test_script_takes_the_options_of_the_server() -> None:
    command = [sys.executable, str(SCRIPT), "--env-id", "Mastermindd-v0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "The nearest: Mastermind-v0" in " ".join(done.stderr.split())
