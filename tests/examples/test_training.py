"""A training run, its options, what it leaves on disk, and what it says when something is wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from examples import train_grpo
from examples.registry import EXAMPLES
from examples.sudoku.make_dataset import DATASET
from examples.sudoku.rewards import REWARD_NAMES
from examples.training import Results, Settings, choose_folder, environment
from schedulers import RolloutOutput
from schedulers.commands.app import app
from schedulers.commands.names import WrongUse
from schedulers.recording import read_trajectories
from server_scripts.launch import ServerProcess, count_sessions

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "sudoku" / "train_grpo.py"
SETTINGS = Settings(
    game="sudoku",
    model=str(ROOT / "examples" / "sudoku" / "policy"),
    base_url=None,
    env_id=None,
    difficulty=None,
    dataset=str(DATASET),
    max_turns=None,
    max_concurrent_envs=4,
    steps=2,
    prompts_per_step=1,
    num_generations=4,
    micro_batch_size=4,
    learning_rate=5e-4,
    beta=0.0,
    temperature=1.0,
    max_new_tokens=16,
    max_completion_length=8192,
    lora_rank=None,
    use_vllm=False,
    vllm={},
    vllm_server=None,
    vllm_weights_dir=None,
    reward_weights={},
    seed=0,
    save_steps=1,
    eval_games=4,
    eval_seed=1_000_000,
    grpo={},
)
# Whoever runs the tests may have a token for a server of their own.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "OPENENV_TOKEN"} | {"HF_HUB_OFFLINE": "1"}
FEW = ["--prompts-per-step", "1", "--num-generations", "4", "--eval-games", "4"]


def train(*options: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command, in a folder of its own."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        cwd=cwd,
        env={**ENVIRONMENT, "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def sudoku(environment_server: Callable[..., ServerProcess]) -> ServerProcess:
    return environment_server(env_id="Sudoku-v0-very-easy", max_concurrent_envs=16)


def test_a_run_and_its_continuation(tmp_path: Path) -> None:
    """A run of one step prints the table and leaves everything on disk; --resume adds the second step."""
    first = train(*FEW, "--steps", "1", "--save-steps", "1", cwd=tmp_path)  # a checkpoint after each step
    assert first.returncode == 0, first.stdout + first.stderr
    (folder,) = (tmp_path / "outputs" / "sudoku").iterdir()
    assert "4 pairs of games" in first.stdout
    for label in ("solved", "accepted_moves", *REWARD_NAMES, "total reward"):
        assert label in first.stdout
    for name in ("trajectories.jsonl", "metrics.json", "rewards.png", "model"):
        assert name in first.stdout
        assert (folder / name).exists()
    with Image.open(folder / "rewards.png") as plot:
        assert plot.format == "PNG"

    second = train(*FEW, "--steps", "2", "--resume", cwd=tmp_path)
    assert second.returncode == 0, second.stdout + second.stderr
    metrics = json.loads((folder / "metrics.json").read_text())
    assert [step["step"] for step in metrics["steps"]] == [1, 2]
    assert metrics["evaluation"]["before"]["games"] == metrics["evaluation"]["after"]["games"] == 4
    records = list(read_trajectories(folder / "trajectories.jsonl"))
    phases = [record["phase"] for record in records]
    assert [phases.count(phase) for phase in ("before", "train", "after")] == [4, 8, 4]
    for record in records:
        infos = record["rollout_infos"]
        assert infos["total_reward"] == pytest.approx(sum(infos["step_rewards"]))
        assert len(record["completion_token_ids"]) == len(record["completion_mask"])
        assert sum(record["completion_mask"]) == sum(map(len, record["response_token_ids"]))
    assert_rescored(folder)


def assert_rescored(folder: Path) -> None:
    """`openenv-rollout` needs no options to rescore a training run, and with unchanged code gives the same file."""
    done = CliRunner().invoke(app, ["rescore", str(folder / "trajectories.jsonl")])
    assert done.exit_code == 0, done.output
    assert (folder / "trajectories.rescored.jsonl").read_bytes() == (folder / "trajectories.jsonl").read_bytes()
    held_out = [record for record in read_trajectories(folder / "trajectories.jsonl") if record["phase"] == "after"]
    done = CliRunner().invoke(app, ["eval", "--compare", str(folder), str(folder / "metrics.json")])
    assert f"{len(held_out)} pairs of games" in done.output


@pytest.mark.parametrize("game", sorted(EXAMPLES.keys() - {"sudoku"}))
def test_every_game_is_trained_by_the_same_command(game: str, tmp_path: Path) -> None:
    """One step, with a model that knows none of them."""
    model = str(EXAMPLES["sudoku"].model)
    options = ["--game", game, "--model", model, "--steps", "1", "--prompts-per-step", "1", "--num-generations", "2"]
    done = train(*options, "--eval-games", "2", "--max-turns", "2", "--max-new-tokens", "8", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "outputs" / game).iterdir()
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["evaluation"]["after"]["games"] == 2
    assert metrics["steps"][0]["unscored"] == 0
    assert_rescored(folder)
    assert (folder / "model" / "config.json").exists()


def test_lora_on_a_running_server(sudoku: ServerProcess, tmp_path: Path) -> None:
    """--lora trains an adapter, --base-url plays on the server that is there, and no session stays open on it."""
    options = ["--lora", "--base-url", sudoku.base_url, "--steps", "1", "--output-dir", "run", "--eval-games", "0"]
    done = train(*FEW[:-2], *options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "model" / "adapter_config.json").exists()
    sudoku.wait_until_idle()


@pytest.mark.parametrize("interruption", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_process(interruption: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C (or SIGTERM) while games are played ends the run with 130, and the server that it started with it."""
    process = subprocess.Popen(
        [sys.executable, "-u", str(SCRIPT), *FEW, "--output-dir", "run"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    address = next(found[0] for line in process.stdout if (found := re.search(r"http://\S+", line)))
    while not count_sessions(address).active:
        assert process.poll() is None
    os.killpg(process.pid, interruption)
    rest, _ = process.communicate()
    assert process.returncode == 130, rest
    assert "Traceback" not in rest
    with pytest.raises(ConnectionRefusedError):
        count_sessions(address)


@pytest.mark.parametrize("package", ["rich", "transformers"])
def test_an_interrupt_while_it_imports_ends_it_quietly(package: str, tmp_path: Path) -> None:
    """Ctrl-C in the first seconds is no error: no traceback, and 130."""
    (tmp_path / f"{package}.py").write_text("import signal\nprint('importing', flush=True)\nsignal.pause()\n")
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), "--output-dir", str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == ""
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--base-url", "http://127.0.0.1:{unused}"], "start_textarena_server.py"),
        (["--base-url", "nowhere.invalid"], "nowhere.invalid"),
        (["--base-url", "ftp://nowhere"], "--base-url ftp://nowhere"),
        (["--env-id", "Sudoku-v0-very-eazy"], "Sudoku-v0-very-easy"),
        (["--use-vllm"], "--use-vllm: "),
        (["--difficulty", "simple"], "easy, medium, hard"),
        (["--game", "frozen_lake", "--model", "x", "--difficulty", "easy"], "those of frozen_lake are none"),
        (["--game", "frozen_lake", "--model", "x", "--env-id", "Sudoku-v0"], "needs no server"),
        (["--game", "frozen_lake", "--model", "x", "--reward-weight", "won=1"], "none for this game"),
        (["--dataset", "nowhere.jsonl"], "make_dataset.py"),
        (["--micro-batch-size", "5"], "must divide"),
        (["--grpo", "learning_rat=1"], "learning_rate"),
        (["--grpo", "epsilon"], "NAME=VALUE"),
        (["--grpo", "max_steps=3"], "set by the other options"),
        (["--grpo", "num_iterations=abc"], "num_iterations='abc'"),
        (["--output-dir", "/dev/null/run"], "--output-dir /dev/null/run"),
        (["--env-id", "Minesweeper-v0"], "--env-id Minesweeper-v0"),
        (["--reward-weight", "correct=2"], "correct_reward"),
        (["--resume", "--output-dir", "nowhere"], "no run in nowhere"),
    ],
)
def test_a_wrong_option_is_refused(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot work is said in one line with the remedy, without a traceback, and nothing is left running."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENENV_TOKEN", raising=False)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        options = [option.replace("{unused}", str(unused.getsockname()[1])) for option in options]
        done = CliRunner().invoke(train_grpo.app, options, env={"COLUMNS": "200"})
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert "Traceback" not in done.output
    assert not list(tmp_path.rglob("metrics.json"))  # the command can be given again, corrected, as it is


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    """The same of the real command."""
    done = train("--model", "no/such/model", cwd=tmp_path)
    assert (done.returncode, "no/such/model" in done.stderr) == (2, True), done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_plays_something_else(environment_server: Callable[..., ServerProcess], tmp_path: Path) -> None:
    """A server of another game is found out before anything is trained."""
    server = environment_server(env_id="GuessTheNumber-v0", max_concurrent_envs=4)
    done = train("--base-url", server.base_url, cwd=tmp_path)
    assert (done.returncode, "no Sudoku board" in done.stderr) == (2, True), done.stdout + done.stderr


def test_a_finished_run_is_not_overwritten(tmp_path: Path) -> None:
    """A folder that holds a run is used again only to go on with it."""
    (tmp_path / "metrics.json").write_text("{}")
    with pytest.raises(WrongUse, match="holds a run already"):
        choose_folder("sudoku", tmp_path, resume=False)
    assert choose_folder("sudoku", tmp_path, resume=True) == tmp_path


def test_a_batch_without_a_scored_game(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unscored games count in no mean, and their step says so."""
    lost = RolloutOutput(None, [], rollout_infos={"total_reward": None, "stop_reason": "env_lost", "num_turns": 0})
    results = Results(tmp_path, SETTINGS)
    results.add_evaluation("before", [{}], [lost])
    results.add_evaluation("after", [{}], [lost])
    results.add_batch([{}, {}], [lost, lost], 0)
    results.finish_step(1, {"loss": float("nan")})
    results.close()
    results.show(seconds=1.0)
    (step,) = json.loads((tmp_path / "metrics.json").read_text())["steps"]
    assert (step["games"], step["means"], step["unscored"], step["trainer"]) == (0, {}, 2, {})
    assert "no game was scored" in capsys.readouterr().out


def test_a_run_is_resumed_with_its_own_options_only(tmp_path: Path) -> None:
    """What was done after the last checkpoint is dropped, and another model is refused by name."""
    played = RolloutOutput(None, [], rollout_infos={"total_reward": None, "stop_reason": "env_lost", "num_turns": 0})
    results = Results(tmp_path, SETTINGS)
    results.add_evaluation("before", [{}], [played])
    for step in (1, 2):
        results.add_batch([{}], [played], step - 1)
        results.finish_step(step, {"loss": 0.0})
    results.close()
    with (tmp_path / "trajectories.jsonl").open("a") as file:
        file.write('{"schema_version": 1, "phase": "tr')
    (tmp_path / "checkpoint-1").mkdir()
    with pytest.raises(WrongUse, match=r"has model .*policy', not 'other'"):
        Results(tmp_path, replace(SETTINGS, model="other"), resume=True)
    resumed = Results(tmp_path, replace(SETTINGS, steps=9), resume=True)
    resumed.close()
    assert [step["step"] for step in resumed.steps] == [1]
    records = list(read_trajectories(tmp_path / "trajectories.jsonl"))
    assert [(record["phase"], record.get("step")) for record in records] == [("before", None), ("train", 1)]


def test_settings_are_checked_by_name() -> None:
    """A weight that is no number names the option."""
    with pytest.raises(WrongUse, match="--reward-weight correct_reward=x"):
        replace(SETTINGS, reward_weights={"correct_reward": "x"}).check()  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vllm": {"dtype": "half"}}, "--vllm dtype: .* which --use-vllm starts"),
        ({"vllm": {"dtype": "half"}, "use_vllm": True, "vllm_server": "http://a"}, "--vllm dtype: .* a server"),
        ({"vllm_server": "127.0.0.1:8000"}, "--vllm-server: base_url must be an address such as"),
        ({"vllm_server": "http://a:secret@b"}, "--vllm-server: base_url must have no user name"),
        ({"vllm_weights_dir": "."}, "--vllm-weights-dir: it is for --vllm-server"),
        ({"vllm_server": "http://a", "vllm_weights_dir": "nowhere"}, "--vllm-weights-dir nowhere: .* no such folder"),
    ],
)
def test_options_of_vllm_that_cannot_be_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(WrongUse, match=said) as caught:
        replace(SETTINGS, **changes).check()
    assert "secret" not in str(caught.value)


def test_a_vllm_server_that_is_not_there_is_said_before_anything_is_played(tmp_path: Path) -> None:
    """With the command that starts one; and the run can be started again, as it is."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        options = ["--game", "frozen_lake", "--model", SETTINGS.model, "--output-dir", str(tmp_path)]
        done = CliRunner().invoke(train_grpo.app, [*options, "--vllm-server", address])
    assert done.exit_code == 2, done.output
    assert f"{address}/v1/models cannot be reached" in done.output
    assert "VLLM_SERVER_DEV_MODE=1 python -m vllm" in done.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [train_grpo.app, app], ids=["train_grpo.py", "openenv-rollout"])
def test_help_cuts_no_name_of_an_option(command: typer.Typer) -> None:
    """In a terminal of the usual 80 columns."""
    group = typer.main.get_command(command)
    for name, one in getattr(group, "commands", {"": group}).items():
        shown = CliRunner().invoke(command, [*name.split(), "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
        names = {option for parameter in one.params for option in parameter.opts if option.startswith("--")}
        assert names <= set(shown.output.split()), name


@pytest.mark.parametrize("token", ["", "short"])
def test_a_token_that_cannot_be_one_is_refused(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_TOKEN", token)
    with pytest.raises(WrongUse, match="OPENENV_TOKEN: the token must be 16 to 4096"), environment(SETTINGS):
        pass
