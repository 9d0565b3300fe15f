"""``openenv-rollout`` as a user runs it: a process of its own, on our server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from schedulers.recording import read_trajectories
from server_scripts.launch import ServerProcess

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "schedulers.cli"]
SUDOKU = ["--scheduler", "examples.sudoku.scheduler:SudokuScheduler"]
Servers = Callable[..., ServerProcess]

STUCK = """
import asyncio, os
from examples.sudoku.policies import POLICIES

async def solve(request, turn):
    '''Solve the first ten games; of the others, say that they have begun, and wait for ever.'''
    if "STUCK" in os.environ and request.data_dict["env_config"]["reset_kwargs"]["seed"] >= 10:
        print("stuck", flush=True)
        await asyncio.Event().wait()
    return POLICIES["solver"](request, turn)
"""

MY_GAME = """
import re
from schedulers import TextArenaGame, TextArenaScheduler

class GuessGame(TextArenaGame):
    reward_names = ("won_reward",)
    def __init__(self, observation):
        super().__init__(observation)
        self.low, self.high, self.won = 1, 20, False
    def prompt(self):
        return f"between {self.low} and {self.high}"
    def record(self, text, action, result):
        super().record(text, action, result)
        if result is None:
            return
        guess = int(action["message"].strip("[]"))
        if "is lower" in self.new_text:
            self.high = guess - 1
        elif "is higher" in self.new_text:
            self.low = guess + 1
        self.won = result.done and result.reward == 1.0
    def rewards(self):
        return {"won_reward": float(self.won)}
    def infos(self):
        return {"solved": self.won}

def halve(request, turn):
    low, high = map(int, re.findall(r"\\d+", request.messages[-1]["content"]))
    return f"[{(low + high) // 2}]"

class GuessScheduler(TextArenaScheduler):
    game_class = GuessGame
    policies = {"halve": halve}
"""


def environment() -> dict[str, str]:
    return {**{k: v for k, v in os.environ.items() if k != "OPENENV_TOKEN"}, "COLUMNS": "120"}


def run(*arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env={**environment(), **variables})


@contextmanager
def stuck_after_ten_games(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A run whose first ten games are over, and whose others have all slots and never end."""
    variables = {**environment(), "STUCK": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*COMMAND, *arguments], cwd=ROOT, stdout=pipe, stderr=pipe, text=True, env=variables
    ) as process:
        try:
            assert process.stdout is not None
            for _ in range(4):
                line = process.stdout.readline()
                assert line == "stuck\n", process.communicate()
            yield process
        finally:
            process.kill()


@pytest.fixture
def options(environment_server: Servers, tmp_path: Path) -> list[str]:
    """Twenty games, four at a time."""
    (tmp_path / "stuck.py").write_text(STUCK)
    options = ["--base-url", environment_server().base_url, *SUDOKU, "--seed-start", "0", "--games", "20"]
    options += ["--concurrency", "4", "--policy", f"{tmp_path / 'stuck.py'}:solve", "--output", str(tmp_path / "out")]
    return options


def records(folder: Path) -> list[dict[str, Any]]:
    return list(read_trajectories(folder / "trajectories.jsonl"))


def test_the_command_of_the_documentation(tmp_path: Path) -> None:
    """A server is started on the spot, and all games are solved."""
    options = ["--serve", "Sudoku-v0-very-easy", "--policy", "solver", "--games", "20"]
    done = run("eval", *options, "--output", str(tmp_path / "results"))
    assert done.returncode == 0, done.stderr
    assert "100.0%" in done.stdout
    assert len(records(tmp_path / "results")) == 20
    summary = json.loads((tmp_path / "results" / "results.json").read_text())["summary"]
    assert summary["means"]["correct_reward"]["value"] == 1.0


def test_server_with_a_token(tmp_path: Path) -> None:
    """The server that is started asks for the token that is in the environment, and the command has it."""
    options = ["--serve", "Sudoku-v0-very-easy", "--policy", "solver", "--games", "2"]
    done = run("eval", *options, "--output", str(tmp_path / "out"), OPENENV_TOKEN="a-token-of-the-test")
    assert done.returncode == 0, done.stderr
    assert "a-token-of-the-test" not in (tmp_path / "out" / "trajectories.jsonl").read_text()


def test_server_that_does_not_start_is_one_line(tmp_path: Path) -> None:
    done = run("eval", "--serve", "Sudoku-v9", "--policy", "solver", "--output", str(tmp_path / "out"))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: --serve Sudoku-v9: The server ended with code ")
    assert not (tmp_path / "out").exists()


def test_killed_evaluation_goes_on_where_it_was(
    options: list[str], environment_server: Servers, tmp_path: Path
) -> None:
    """SIGKILL, and half a line: games on disk are not played again, and all others are."""
    path = tmp_path / "out" / "trajectories.jsonl"
    with stuck_after_ten_games("eval", *options) as process:
        process.kill()
    before = path.read_bytes()
    assert before.count(b"\n") == 10
    assert json.loads((tmp_path / "out" / "results.json").read_text())["complete"] is False
    path.write_bytes(before + before.splitlines()[3][:500])
    done = run("eval", *options, "--resume")
    assert done.returncode == 0, done.stderr
    assert path.read_bytes().startswith(before)
    assert sorted(record["game"] for record in records(tmp_path / "out")) == list(range(20))
    environment_server().wait_until_idle()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_evaluation_leaves_what_it_has(
    options: list[str], environment_server: Servers, tmp_path: Path, number: signal.Signals
) -> None:
    """Exit code 130, no traceback, sessions closed, a summary of the games so far; --resume goes on."""
    with stuck_after_ten_games("eval", *options) as process:
        process.send_signal(number)
        stdout, stderr = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert f"stopped: 10 of 20 games are in {tmp_path / 'out'}; --resume goes on" in stdout
    saved = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (saved["complete"], saved["summary"]["games"]) == (False, 10)
    environment_server().wait_until_idle()
    assert run("eval", *options, "--resume").returncode == 0
    assert len(records(tmp_path / "out")) == 20


def test_game_of_ones_own_outside_the_checkout(environment_server: Servers, tmp_path: Path) -> None:
    """Installed packages alone, in another folder: the same command; --serve says what it needs."""
    server = environment_server(env_id="GuessTheNumber-v0", max_concurrent_envs=4)
    installed, home = tmp_path / "site-packages", tmp_path / "home"
    installed.mkdir()
    home.mkdir()
    for package in ("openenv_client", "schedulers"):
        (installed / package).symlink_to(ROOT / package)
    (home / "guess.py").write_text(MY_GAME)
    variables = {"PYTHONPATH": str(installed)}
    for name in ("guess.py:GuessScheduler", "guess:GuessScheduler"):
        options = ["--scheduler", name, "--policy", "halve", "--max-turns", "10", "--games", "8"]
        out = ["--output", name.partition(":")[0].replace(".", "-")]
        done = run("eval", "--base-url", server.base_url, *options, *out, cwd=home, **variables)
        assert done.returncode == 0, done.stderr
        assert json.loads((home / out[1] / "results.json").read_text())["summary"]["shares"]["solved"]["value"] == 1.0
        refused = run("eval", "--serve", "GuessTheNumber-v0", *options, "--output", "no", cwd=home, **variables)
        assert refused.returncode == 2
        assert "--serve needs the server scripts, which are in the checkout only" in refused.stderr
    assert run("rescore", "guess-py", cwd=home, **variables).returncode == 0


@pytest.mark.parametrize(
    ("env_id", "policy"),
    [
        ("Sudoku-v0-very-easy", "random"),
        ("Sudoku-v0-very-easy", "model"),
        ("GuessTheNumber-v0", "random"),
        ("Mastermind-v0", "random"),
    ],
)
def test_unchanged_rewards_are_reproduced_from_real_games(tmp_path: Path, env_id: str, policy: str) -> None:
    """Won and lost games, refused and repeated moves: rescored files are the same, byte for byte."""
    player = ["--policy", policy]
    if policy == "model":  # it plays about a third of its moves at random
        player = ["--model", "examples/sudoku/policy", "--max-tokens", "16"]
    options = ["--serve", env_id, *player, "--games", "16", "--seed-start", "0"]
    done = run("eval", *options, "--output", str(tmp_path / "out"), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    target = tmp_path / "rescored.jsonl"
    assert run("rescore", str(tmp_path / "out"), "--output", str(target)).returncode == 0
    assert target.read_bytes() == (tmp_path / "out" / "trajectories.jsonl").read_bytes()
