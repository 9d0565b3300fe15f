"""The code in README and docs runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from transformers import AutoTokenizer

from openenv_client import OpenEnvWrapper
from openenv_client.testing import Fault, MockEnvServer
from server_scripts.launch import ServerProcess
from tests.schedulers.engines.mock_openai import MockOpenAI, completion

ROOT = Path(__file__).parents[1]
ADDRESS = "http://127.0.0.1:8000"


def snippets(document: str) -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```$", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def run(code: str, base_url: str, folder: Path) -> str:
    assert (ADDRESS in code) == (base_url != "")
    script = folder / "snippet.py"
    script.write_text(code.replace(ADDRESS, base_url).replace("outputs/trl", str(folder)), encoding="utf-8")
    python = [sys.executable, "-W", "ignore::FutureWarning", str(script)]
    done = subprocess.run(python, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@pytest.fixture
def sudoku(environment_server: Callable[..., ServerProcess]) -> str:
    return environment_server(env_id="Sudoku-v0-very-easy", max_concurrent_envs=16).base_url


def test_readme_rollouts(sudoku: str, tmp_path: Path) -> None:
    """README: eight games with the embedded policy end with their rewards."""
    lines = run(snippets("README.md")[0], sudoku, tmp_path).splitlines()
    assert len(lines) == 8
    assert all("correct_reward" in line for line in lines)


def test_readme_client(sudoku: str, tmp_path: Path) -> None:
    """README: the client alone resets and steps."""
    run(snippets("README.md")[1], sudoku, tmp_path)


def test_add_a_game(environment_server: Callable[..., ServerProcess], tmp_path: Path) -> None:
    """docs/how-to/add-a-game.md: the new game is played to its end and rewarded by its own components."""
    server = environment_server(env_id="GuessTheNumber-v0", max_concurrent_envs=4)
    game, play = snippets("docs/how-to/add-a-game.md")
    assert len(game.splitlines()) < 48
    (tmp_path / "guess.py").write_text(game)
    output = run(play, server.base_url, tmp_path)
    assert output.startswith("env_done {'narrowing_reward': ")


def test_add_a_reward(tmp_path: Path) -> None:
    """docs/how-to/add-a-reward.md: a reward of one's own stands beside the environment's, which stays as it is."""
    output = run(snippets("docs/how-to/add-a-reward.md")[0], "", tmp_path)
    assert output == "1.0 {'format_reward': 0.5}\n"
    assert output.strip() in (ROOT / "docs/how-to/add-a-reward.md").read_text(encoding="utf-8")


def test_weigh_a_reward_with_trl(sudoku: str, tmp_path: Path) -> None:
    """docs/how-to/add-a-reward.md: TRL logs both and trains on their weighted sum."""
    output = run(snippets("docs/how-to/add-a-reward.md")[1], sudoku, tmp_path)
    reward, total, brevity = map(float, output.splitlines()[-1].split())
    assert brevity < 0
    assert reward == pytest.approx(total + 0.2 * brevity, abs=1e-3)


def test_train_with_trl(sudoku: str, tmp_path: Path) -> None:
    """docs/how-to/train-with-trl.md: one step of training with four games."""
    run(snippets("docs/how-to/train-with-trl.md")[0], sudoku, tmp_path)


def test_sample_from_a_server(sudoku: str, tmp_path: Path) -> None:
    """docs/how-to/write-an-engine.md: prompts go to the server as ids, and what it sampled is what comes out."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples/sudoku/policy")
    sampled = [*tokenizer.encode("[1 1 1]"), tokenizer.eos_token_id]
    code = snippets("docs/how-to/write-an-engine.md")[0]
    with MockOpenAI(completion(sampled), models={"policy": 8192}) as server:
        output = run(code.replace("http://127.0.0.1:8001", server.base_url), sudoku, tmp_path)
    assert len(output.splitlines()) == 4
    assert all(str(sampled) in line for line in output.splitlines())
    assert all(type(body["prompt"][0]) is int for body in server.posts)


def test_write_an_engine(sudoku: str, tmp_path: Path) -> None:
    """docs/how-to/write-an-engine.md: an engine of some 20 lines plays with exact ids."""
    code = snippets("docs/how-to/write-an-engine.md")[1]
    engine = code.partition("class ")[2].partition("\n\n\n")[0]
    assert len(engine.splitlines()) <= 20
    lines = run(code, sudoku, tmp_path).splitlines()
    assert len(lines) == 2
    assert lines[0] == lines[1]
    assert "[" in lines[0]


def test_run_a_soak(sudoku: str, tmp_path: Path) -> None:
    """docs/how-to/run-a-soak.md: the proxy stands before a real server, and lost games alone are unscored."""
    assert "faults; " in run(snippets("docs/how-to/run-a-soak.md")[0], sudoku, tmp_path)


def test_mock_the_server_with_pytest(tmp_path: Path) -> None:
    """docs/how-to/mock-the-server.md: a complete test file of under 30 lines, run by pytest, with the given fixture."""
    code = snippets("docs/how-to/mock-the-server.md")[0]
    assert len(code.splitlines()) < 30
    (tmp_path / "test_my_scheduler.py").write_text(code)
    # A checkout that was not installed has no entry point; where there is one, it must do.
    installed = any(point.value == "pytest_openenv_client" for point in entry_points(group="pytest11"))
    plugin = [] if installed else ["-p", "pytest_openenv_client"]
    options = ["-q", "-W", "error", "-p", "no:cacheprovider", "-p", "no:asyncio", "--rootdir", str(tmp_path), *plugin]
    command = [sys.executable, "-m", "pytest", *options, "test_my_scheduler.py"]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_mock_the_server_with_a_script_of_its_own() -> None:
    """docs/how-to/mock-the-server.md: a generator gets the reset arguments and the actions."""
    code = "from openenv_client.testing import reply\n" + snippets("docs/how-to/mock-the-server.md")[1]
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102
    with MockEnvServer(names["game"]) as server, OpenEnvWrapper(base_url=server.base_url) as env:
        assert env.reset(seed=3).observation == {"goal": 3}
        assert env.step({"number": 5}) == ({"n": 5}, 1.0, True, {})


def test_mock_the_server_with_a_recording(sudoku: str, tmp_path: Path) -> None:
    """docs/how-to/mock-the-server.md: a game of the real server is recorded, and played again without it."""
    run(snippets("docs/how-to/mock-the-server.md")[2], sudoku, tmp_path)
    assert len((tmp_path / "snippet.py.jsonl").read_text().splitlines()) == 2


def test_the_table_of_faults_names_every_kind() -> None:
    """docs/how-to/mock-the-server.md: what each kind is called, on what it can be, and its default."""
    text = (ROOT / "docs/how-to/mock-the-server.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\|[^|]+\| `(\w+)` \|", text, re.MULTILINE)) == set(get_args(get_type_hints(Fault)["kind"]))
