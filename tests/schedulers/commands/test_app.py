"""The command line, in this process and against the mock server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from openenv_client import OpenEnvWrapper
from openenv_client.testing import Fault, MockEnvServer
from schedulers.commands.app import app
from schedulers.recording import TrajectoryWriter, keep_trajectories, read_trajectories
from tests.examples.sudoku.games import seeded
from tests.schedulers.engines.mock_openai import MockOpenAI, Reply, chat

SUDOKU = "examples.sudoku.scheduler:SudokuScheduler"
Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENENV_TOKEN", raising=False)


@pytest.fixture
def server() -> Iterator[MockEnvServer]:
    with MockEnvServer(seeded(4)) as server:
        yield server


@pytest.fixture
def run(server: MockEnvServer, tmp_path: Path) -> Run:
    """Evaluate on the mock server, eight games and into ``tmp_path / "out"`` unless told otherwise."""

    def run(*arguments: str, policy: str = "solver", games: int = 8, output: str = "out") -> Result:
        options = ["--base-url", server.base_url, "--scheduler", SUDOKU, "--policy", policy, "--games", str(games)]
        return invoke("eval", *options, "--output", str(tmp_path / output), *arguments)

    return run


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120"}, prog_name="openenv-rollout")


def results(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return content


def cell(output: str, row: str) -> list[str]:
    """The cells of a table's row after its name."""
    rows = [[part.strip() for part in line.strip("│").split("│")] for line in output.splitlines() if "│" in line]
    [cells] = [cells for name, *cells in rows if name == row]
    return cells


# -- eval -------------------------------------------------------------------------------------------


def test_evaluation_ends_with_a_table_and_files(run: Run, tmp_path: Path, server: MockEnvServer) -> None:
    """Every game with its seed, row, versions and what played it; means with intervals; settings and date."""
    done = run("--difficulty", "hard", "--seed-start", "40")
    assert done.exit_code == 0, done.output
    assert cell(done.output, "solved") == ["100.0%", "67.6% to 100.0%"]
    assert cell(done.output, "accepted_moves") == ["4.000", "4.000 to 4.000"]
    assert cell(done.output, "correct_reward") == ["1.000", "1.000 to 1.000"]
    assert cell(done.output, "total reward")[0] == "4.000"
    assert cell(done.output, "turns")[0] == "4.000"
    assert cell(done.output, "ended: env_done")[0] == "8"
    assert cell(done.output, "errors (unscored)")[0] == "0"
    assert float(cell(done.output, "games per minute")[0]) > 0
    saved = results(tmp_path / "out")
    assert saved["complete"] is True
    assert saved["settings"]["options"] == {"difficulty": "hard"}
    assert saved["summary"]["shares"]["solved"]["value"] == 1.0
    assert "Wilson" in saved["intervals"]
    assert saved["versions"]["python"]
    assert saved["started"] <= saved["saved"]
    records = list(read_trajectories(tmp_path / "out" / "trajectories.jsonl"))
    assert sorted(record["seed"] for record in records) == list(range(40, 48))
    assert records[0]["played_by"] == {"scheduler": SUDOKU, "options": {"difficulty": "hard"}}
    assert server.base_url not in (tmp_path / "out" / "trajectories.jsonl").read_text()
    server.wait_until(lambda: server.sessions == 0)


def test_progress_says_the_means_and_the_time_left(run: Run) -> None:
    """Where nobody watches, a line at each tenth of the games."""
    done = run(games=20, policy="random")
    lines = [line for line in done.stderr.splitlines() if "games: solved" in line]
    assert len(lines) == 10
    assert "reward" in lines[4]
    assert "left" in lines[4]
    assert lines[-1].startswith("20/20 games: solved")


def test_chance_is_the_same_every_time(run: Run) -> None:
    first, second = run(policy="random"), run(policy="random", output="again")
    assert cell(first.output, "total reward") == cell(second.output, "total reward")


def test_token_comes_from_the_environment_and_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_TOKEN", "t0psecret")
    with MockEnvServer(seeded(4), token="t0psecret") as server:
        options = ["--base-url", server.base_url, "--scheduler", SUDOKU, "--policy", "solver", "--games", "2"]
        assert invoke("eval", *options, "--output", str(tmp_path / "out")).exit_code == 0
        monkeypatch.delenv("OPENENV_TOKEN")
        assert_wrong(invoke("eval", *options, "--output", str(tmp_path / "none")), "--base-url: ")
    assert not any("t0psecret" in file.read_text() for file in (tmp_path / "out").iterdir())


def test_rows_of_a_dataset_are_played(run: Run, tmp_path: Path) -> None:
    """All of them, on the server of the command line, whatever theirs was."""
    config = {"name": "openenv", "base_url": "http://127.0.0.1:1", "system_message": "Play."}
    rows = [{"env_config": {**config, "reset_kwargs": {"seed": seed}}, "level": 3} for seed in (5, 3, 5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--dataset", str(tmp_path / "rows.jsonl")]
    assert run(*arguments).exit_code == 0
    records = sorted(read_trajectories(tmp_path / "out" / "trajectories.jsonl"), key=lambda record: record["game"])
    assert [record["seed"] for record in records] == [5, 3, 5]
    assert {record["messages"][0]["content"] for record in records} == {"Play."}
    assert records[0]["row"]["level"] == 3
    assert run(*arguments, games=2, output="two").exit_code == 0
    assert results(tmp_path / "two")["summary"]["games"] == 2


def test_game_without_a_server_is_evaluated_the_same_way(tmp_path: Path) -> None:
    options = ["--scheduler", "gym_scheduler", "--option", "gym_env=frozen_lake", "--games", "4"]
    for policy in ("examples.frozen_lake.policies:perfect", "solver"):
        done = invoke("eval", *options, "--policy", policy, "--output", str(tmp_path / policy))
        assert done.exit_code == 0, done.output
        assert cell(done.output, "solved")[0] == "100.0%"
    other = [*options, "--output", str(tmp_path / "no"), "--policy"]
    assert_wrong(invoke("eval", *other, "solver", "--base-url", "http://127.0.0.1:1"), "plays without a server")
    assert_wrong(invoke("eval", *other, "hints"), "--policy hints: GYMScheduler has random, solver; one of your own")
    assert_wrong(invoke("eval", *other, "model"), "or take another --policy: random, solver")


def test_rows_say_which_game_without_a_server_is_played(tmp_path: Path) -> None:
    """A question is in its row, and nothing can be made of a seed alone."""
    options = ["--scheduler", "gym_scheduler", "--policy", "solver", "--games", "3"]
    done = invoke("eval", *options, "--dataset", "examples/maths/maths.jsonl", "--output", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    assert cell(done.output, "solved")[0] == "100.0%"
    done = invoke("rescore", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output


def test_model_is_evaluated_with_its_tokens(run: Run, tmp_path: Path) -> None:
    options = ["--model", "examples/sudoku/policy", "--max-tokens", "16", "--temperature", "0"]
    done = run(*options, policy="model", games=4)
    assert done.exit_code == 0, done.output
    assert float(cell(done.output, "tokens")[0]) > 4
    [record, *_] = read_trajectories(tmp_path / "out" / "trajectories.jsonl")
    assert len(record["response_token_ids"]) == len(record["rollout_logprobs"]) == len(record["turns"])


def test_sampling_is_repeatable(run: Run, tmp_path: Path) -> None:
    """Each game has a seed of its own for sampling, whatever is sampled beside it."""
    options = ["--model", "examples/sudoku/policy", "--max-tokens", "16", "--concurrency"]
    answers = []
    for concurrency in ("4", "1"):
        assert run(*options, concurrency, policy="model", games=4, output=concurrency).exit_code == 0
        records = read_trajectories(tmp_path / concurrency / "trajectories.jsonl")
        answers.append({record["seed"]: [turn["text"] for turn in record["turns"]] for record in records})
    assert answers[0] == answers[1]


# -- failures and wrong use -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("drop", "ServerError: POST .* failed 2 times, .*; is the server running"),
        ("hang", "ServerTimeoutError: POST .* no answer within request_timeout=0.3 s"),
    ],
)
def test_model_server_that_dies_on_the_way_ends_the_command_with_its_error(run: Run, fault: str, said: str) -> None:
    with MockOpenAI(chat("[1 1 1]"), Reply(fault=fault)) as models:
        options = {"base_url": models.base_url, "max_retries": 1, "retry_delay": 0.001, "request_timeout": 0.3}
        arguments = [part for name, value in options.items() for part in ("--engine-option", f"{name}={value}")]
        done = run("--engine", "openai", "--model", "tiny", *arguments, policy="model", games=3)
    assert done.exit_code == 1
    assert cell(done.output, "errors (unscored)")[0] == "3"
    assert re.search(f"first error: {said}", done.output), done.output


def test_games_that_fail_are_counted_and_decide_the_exit_code(run: Run, server: MockEnvServer, tmp_path: Path) -> None:
    server.inject(Fault("error", "step", nth=1, times=2))
    done = run()
    assert done.exit_code == 1
    assert cell(done.output, "errors (unscored)")[0] == "2"
    assert cell(done.output, "EnvironmentFailedError")[0] == "2"
    assert cell(done.output, "games")[0] == "6"
    assert "first error: EnvironmentFailedError: " in done.stderr
    assert "Traceback" not in done.output
    assert "Traceback" in (tmp_path / "out" / "eval.log").read_text()
    server.inject(Fault("error", "step", nth=1, times=2))
    assert run("--max-unscored", "2", output="other").exit_code == 0


def test_games_that_failed_are_played_when_it_is_resumed(run: Run, server: MockEnvServer, tmp_path: Path) -> None:
    server.inject(Fault("error", "step", nth=3))
    assert run().exit_code == 1
    done = run("--resume")
    assert done.exit_code == 0, done.output
    assert cell(done.output, "games")[0] == "8"
    assert len(list(read_trajectories(tmp_path / "out" / "trajectories.jsonl"))) == 8


def test_resume_plays_what_is_missing_and_nothing_else(run: Run, server: MockEnvServer, tmp_path: Path) -> None:
    """After a kill in the middle of a line as well; more games may be asked for."""
    path = tmp_path / "out" / "trajectories.jsonl"
    assert run().exit_code == 0
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:5]) + lines[5][:100])
    begun = server.kinds.count("connect")
    done = run("--resume", games=9)
    assert done.exit_code == 0, done.output
    assert server.kinds.count("connect") - begun == 1 + 4  # one to see that the server is there
    records = list(read_trajectories(path))
    assert sorted(record["game"] for record in records) == list(range(9))
    assert path.read_bytes().startswith(b"".join(lines[:5]))
    again = run("--resume", games=9)
    assert again.exit_code == 0
    assert server.kinds.count("connect") - begun == 1 + 4
    assert results(tmp_path / "out")["complete"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "holds results already; --resume goes on with them, or name another --output"),
        (("--resume", "--difficulty", "hard"), "are of options {}, not {'difficulty': 'hard'}; give the options that"),
        (("--resume", "--seed-start", "7"), "are of seed_start 1000000, not 7"),
        (("--resume", "--games", "2"), "holds 1 games more than these 2; raise --games"),
    ],
)
def test_results_of_another_evaluation_are_not_mixed(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    assert run(games=3).exit_code == 0
    before = (tmp_path / "out" / "trajectories.jsonl").read_bytes()
    assert_wrong(run(*arguments, games=3), message)
    assert (tmp_path / "out" / "trajectories.jsonl").read_bytes() == before


def test_when_nothing_can_be_scored_it_stops_and_can_be_run_again_with_other_options(run: Run, tmp_path: Path) -> None:
    """A wrong name shows after some games, not after all of them, and what they left is in nobody's way."""
    (tmp_path / "broken.py").write_text("def player(request, turn):\n    raise LookupError('no such move')\n")
    done = run("--concurrency", "4", policy=f"{tmp_path / 'broken.py'}:player", games=100)
    assert done.exit_code == 1
    assert "stopped: none of the first 1" in done.stderr
    assert "first error: LookupError: no such move" in done.stderr
    assert results(tmp_path / "out")["complete"] is False
    assert run("--difficulty", "hard").exit_code == 0
    assert len(list(read_trajectories(tmp_path / "out" / "trajectories.jsonl"))) == 8


def test_full_server_is_said(run: Run, tmp_path: Path) -> None:
    with MockEnvServer(seeded(4), capacity=1) as full:
        holder = OpenEnvWrapper(base_url=full.base_url)
        holder.reset(seed=1)
        options = ["--scheduler", SUDOKU, "--policy", "solver", "--games", "2", "--output", str(tmp_path / "full")]
        done = invoke("eval", "--base-url", full.base_url, *options, "--option", "slot_timeout=0.01")
        holder.close()
    assert done.exit_code == 1
    assert "Games will wait for free sessions." in done.stderr


def test_model_server_may_be_another_one_when_it_is_resumed(run: Run) -> None:
    for games in (1, 2):
        with MockOpenAI(chat("[1 1 1]")) as models:
            options = ["--engine", "openai", "--model", "tiny", "--engine-option", f"base_url={models.base_url}"]
            done = run(*options, *["--resume"] * (games - 1), policy="model", games=games)
            assert done.exit_code == 0, done.output


def test_changed_dataset_is_noticed(run: Run, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"env_config": {"reset_kwargs": {"seed": 1}}}\n')
    assert run("--dataset", str(rows)).exit_code == 0
    rows.write_text('{"env_config": {"reset_kwargs": {"seed": 2}}}\n')
    assert_wrong(run("--dataset", str(rows), "--resume"), "are of dataset_digest")


def assert_wrong(done: Result, message: str) -> None:
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name what plays: --scheduler module:Class, or --serve ENV_ID in the checkout"),
        (["--scheduler", SUDOKU, "--policy", "solver"], "plays on a server: give the address of one (--base-url), or"),
        (["--scheduler", "sudoku"], "--scheduler sudoku: "),
        (
            ["--scheduler", SUDOKU],
            "--policy model needs a model: name it with --model, or take another --policy: random",
        ),
        (["--scheduler", SUDOKU, "--policy", "hints", "--model", "m"], "--model is for --policy model, not for hints"),
        (["--scheduler", SUDOKU, "--policy", "best"], "SudokuScheduler has random, hints, solver"),
        (["--serve", "Sudoku-v0", "--base-url", "http://a"], "one server is enough"),
        (["--serve", "Sudoku-v0", "--resume"], "name the folder of the evaluation with --output"),
        (["--scheduler", SUDOKU, "--option", "difficulty"], "--option difficulty: write it as NAME=VALUE"),
        (["--scheduler", SUDOKU, "--dataset", "none.jsonl"], "--dataset none.jsonl: No such file or directory"),
        (
            ["--scheduler", SUDOKU, "--option", 'env_settings={"token": "t"}'],
            "the token belongs into the variable OPENENV_TOKEN",
        ),
        (
            ["--scheduler", SUDOKU, "--policy", "solver", "--base-url", "http://127.0.0.1:1"],
            "--base-url: ",
        ),
        (["--scheduler", SUDOKU, "--policy", "solver", "--base-url", "nonsense"], "--base-url: "),
    ],
)
def test_wrong_use_is_one_line_with_the_remedy(arguments: list[str], message: str, tmp_path: Path) -> None:
    output = [] if "--resume" in arguments else ["--output", str(tmp_path / "out")]
    assert_wrong(invoke("eval", *arguments, *output), message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--difficulty", "none"], f"--scheduler {SUDOKU}: difficulty must be one of easy, medium, hard, not 'none'"),
        (["--option", "dificulty=easy"], "there is no option 'dificulty'; did you mean 'difficulty'?"),
        (["--option", 'reward_weights={"win": 1}'], "no reward component is called 'win'"),
    ],
)
def test_options_that_the_scheduler_does_not_take(run: Run, options: list[str], message: str) -> None:
    assert_wrong(run(*options), message)


def test_rows_that_are_none(run: Run, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    for content, message in (("{}\nx\n", "line 2: "), ("[]\n", "line 1: "), ("\n", "has no rows")):
        rows.write_text(content)
        assert_wrong(run("--dataset", str(rows)), message)


def test_folder_that_cannot_be_made(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_wrong(run(output="file/out"), "Not a directory")


def test_options_of_a_wrong_kind_are_refused_by_name() -> None:
    done = invoke("eval", "--games", "0")
    assert done.exit_code == 2
    assert "--games" in done.stderr


# -- compare ----------------------------------------------------------------------------------------


def test_compare_pairs_games_of_the_same_seed(run: Run, tmp_path: Path) -> None:
    """Folders, results and trajectories are all taken; games without a counterpart are told."""
    run(policy="solver", output="a")
    run("--max-turns", "2", policy="solver", games=10, output="b")
    for first, second in (("a", "b"), ("a/results.json", "b/trajectories.jsonl")):
        done = invoke("compare", str(tmp_path / first), str(tmp_path / second))
        assert done.exit_code == 0, done.output
        assert "8 pairs of games" in done.output
        assert cell(done.output, "solved")[:3] == ["100.0%", "0.0%", "-100.0%"]
        assert cell(done.output, "turns") == ["4.000", "2.000", "-2.000", "-2.000 to -2.000"]
        assert "10 games, 2 of them unscored or without a counterpart" in done.output


def test_evaluation_has_the_comparison_as_an_option(run: Run, tmp_path: Path) -> None:
    """And says which other options would have no effect."""
    run(games=4, output="a")
    run("--max-turns", "2", games=4, output="b")
    both = [str(tmp_path / "a" / "results.json"), str(tmp_path / "b")]
    done = invoke("eval", "--compare", *both)
    assert (done.exit_code, done.output) == (0, invoke("compare", *both).output)
    assert "4 pairs of games" in done.output
    done = invoke("eval", "--compare", *both, "--policy", "solver")
    assert_wrong(done, "--compare plays nothing: leave --policy out")


def test_of_a_training_run_the_games_after_it_are_compared(run: Run, tmp_path: Path) -> None:
    """With those of another run, or of an evaluation of the same seeds."""
    run(games=4, output="a")
    records = list(read_trajectories(tmp_path / "a" / "trajectories.jsonl"))
    worse = {**records[0]["rollout_infos"], "total_reward": 0.0}
    phases = ("before", "train", "after")
    (tmp_path / "run").mkdir()
    with TrajectoryWriter(tmp_path / "run" / "trajectories.jsonl") as writer:
        for phase in phases:
            infos = {} if phase == "after" else {"rollout_infos": worse}
            writer.write_records({**record, "phase": phase, **infos} for record in records)
    done = invoke("compare", str(tmp_path / "run"), str(tmp_path / "a"))
    assert "4 pairs of games" in done.output
    assert cell(done.output, "total reward")[2] == "+0.000"
    keep_trajectories(tmp_path / "run" / "trajectories.jsonl", lambda record: record["phase"] != "after")
    done = invoke("compare", str(tmp_path / "a"), str(tmp_path / "run"))
    assert_wrong(done, "of a training run, those after the training count")


def test_compare_warns_of_pairs_that_are_different_games(run: Run, tmp_path: Path) -> None:
    run(output="a")
    options = ["--policy", "solver", "--games", "8", "--output", str(tmp_path / "b")]
    with MockEnvServer(seeded(5)) as other:
        invoke("eval", "--base-url", other.base_url, "--scheduler", SUDOKU, *options)
    done = invoke("compare", str(tmp_path / "a"), str(tmp_path / "b"))
    assert done.exit_code == 0, done.output
    assert "warning: 8 pairs of the same seed began with different games" in done.stderr
    assert "warning" not in invoke("compare", str(tmp_path / "a"), str(tmp_path / "a")).stderr


def test_what_the_user_wrote_is_shown_as_it_is(tmp_path: Path) -> None:
    assert_wrong(invoke("compare", str(tmp_path / "a:bug:[red]"), "b"), "a:bug:[red]")


def test_compare_needs_games_in_common(run: Run, tmp_path: Path) -> None:
    run(output="a")
    run("--seed-start", "5", output="b")
    assert_wrong(invoke("compare", str(tmp_path / "a"), str(tmp_path / "b")), "evaluate the same seeds in both")
    assert_wrong(invoke("compare", str(tmp_path / "a"), str(tmp_path / "c")), "no such file; name the folder")


# -- rescore ----------------------------------------------------------------------------------------

OTHER_REWARD = """
from examples.sudoku.scheduler import SudokuGame, SudokuScheduler

class Game(SudokuGame):
    reward_names = ("win_reward",)
    def rewards(self):
        return {"win_reward": 10.0 * self.board.is_solved}

class MyScheduler(SudokuScheduler):
    game_class = Game
"""


def test_rescore_with_unchanged_code_gives_the_same_file(run: Run, tmp_path: Path) -> None:
    run(policy="random")
    done = invoke("rescore", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    path = tmp_path / "out" / "trajectories.jsonl"
    assert path.with_name("trajectories.rescored.jsonl").read_bytes() == path.read_bytes()
    assert_wrong(invoke("rescore", str(tmp_path / "out")), "is there already; remove it, or name another --output")


def test_rescore_with_other_weights(run: Run, tmp_path: Path) -> None:
    """On top of the options that the games were played with, and remembered for the next time."""
    run("--difficulty", "hard")
    target = tmp_path / "new.jsonl"
    weights = ["--weights", "correct_reward=5", "--weights", "empty_cell_reward=0"]
    done = invoke("rescore", str(tmp_path / "out"), *weights, "--output", str(target))
    assert done.exit_code == 0, done.output
    assert cell(done.output, "total reward")[:3] == ["4.000", "7.000", "+3.000"]
    [record, *_] = read_trajectories(target)
    expected = {"difficulty": "hard", "reward_weights": {"correct_reward": 5, "empty_cell_reward": 0}}
    assert record["played_by"]["options"] == expected
    assert invoke("rescore", str(target), "--output", str(tmp_path / "same.jsonl")).exit_code == 0
    assert (tmp_path / "same.jsonl").read_bytes() == target.read_bytes()
    assert cell(invoke("compare", str(tmp_path / "out"), str(target)).output, "total reward")[2] == "+3.000"


def test_rescore_with_changed_code(run: Run, tmp_path: Path) -> None:
    run()
    (tmp_path / "my_game.py").write_text(OTHER_REWARD)
    target = tmp_path / "new.jsonl"
    scheduler = ["--scheduler", f"{tmp_path / 'my_game.py'}:MyScheduler"]
    done = invoke("rescore", str(tmp_path / "out"), *scheduler, "--output", str(target))
    assert done.exit_code == 0, done.output
    assert cell(done.output, "total reward")[:2] == ["4.000", "10.000"]
    assert [record["rollout_infos"]["rewards"] for record in read_trajectories(target)] == [{"win_reward": 10.0}] * 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--weights", "win=1"], "no reward component is called 'win'"),
        (["--weights", "win"], "--weights win: write it as NAME=VALUE"),
        (["--scheduler", "textarena_scheduler"], "trajectories.jsonl, line 1: in turn 1 the scheduler now plays"),
        (["--scheduler", "gym_scheduler"], "line 1: it was played on a server, and GYMScheduler does not play on one"),
    ],
)
def test_rescore_that_cannot_be_is_one_line(run: Run, tmp_path: Path, arguments: list[str], message: str) -> None:
    run("--max-turns", "1", policy=f"{write_talker(tmp_path)}:talk")
    assert_wrong(invoke("rescore", str(tmp_path / "out"), *arguments), message)
    assert not (tmp_path / "out" / "trajectories.rescored.jsonl").exists()


def write_talker(folder: Path) -> Path:
    """A player whose answers are read in two ways."""
    (folder / "talker.py").write_text("def talk(request, turn):\n    return '[1 1 1] or [so]'\n")
    return folder / "talker.py"


def test_rescore_of_records_that_do_not_say_what_played(run: Run, tmp_path: Path) -> None:
    run(games=1)
    path = tmp_path / "plain.jsonl"
    record = json.loads((tmp_path / "out" / "trajectories.jsonl").read_text())
    path.write_text(json.dumps({k: v for k, v in record.items() if k != "played_by"}) + "\n")
    assert_wrong(invoke("rescore", str(path)), "name it with --scheduler")
    assert invoke("rescore", str(path), "--scheduler", SUDOKU).exit_code == 0
    path.write_bytes(b"\xb0\n")
    assert_wrong(invoke("rescore", str(path), "--output", str(tmp_path / "o")), "line 1: not a recorded trajectory")
    path.write_text(json.dumps({**record, "played_by": {"scheduler": "gone.py:Gone"}}) + "\n")
    assert_wrong(invoke("rescore", str(path), "--output", str(tmp_path / "o")), "name with --scheduler where it is now")
    path.write_text("")
    assert_wrong(invoke("rescore", str(path), "--output", str(tmp_path / "o")), "has no scored game")
    assert not (tmp_path / "o").exists()


# -- help -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["eval", "compare", "rescore"])
def test_help_has_an_example(command: str) -> None:
    done = invoke(command, "--help")
    assert done.exit_code == 0
    assert f"Example: openenv-rollout {command}" in done.output


@pytest.mark.parametrize("command", ["eval", "compare", "rescore"])
def test_help_has_whole_names_on_a_narrow_terminal(command: str) -> None:
    output = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}).output
    assert max(map(len, output.splitlines())) == 80
    assert re.findall(r"--[a-z-]*…", output) == []


def test_documentation_names_options_that_there_are() -> None:
    """docs/how-to/evaluate-a-model.md."""
    text = (Path(__file__).parents[3] / "docs/how-to/evaluate-a-model.md").read_text(encoding="utf-8")
    lines = re.findall(r"^ *openenv-rollout (\w+) (.*)$", text.replace("\\\n", ""), re.MULTILINE)
    assert {command for command, _ in lines} == {"eval", "compare", "rescore"}
    for command, arguments in lines:
        known = invoke(command, "--help").output
        assert all(option in known for option in re.findall(r"--[a-z-]+", arguments)), arguments


def test_help_lists_the_commands() -> None:
    output = invoke("--help").output
    assert all(command in output for command in ("eval", "compare", "rescore"))
