"""Sudoku, whole: our server in a process of its own, the client, the schedulers and the game."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from examples.sudoku.board import Board, solve
from examples.sudoku.example import perfect
from examples.sudoku.rewards import REWARD_NAMES
from examples.sudoku.scheduler import SudokuScheduler
from openenv_client import OpenEnvWrapper
from openenv_client.testing import MockEnvServer
from schedulers import (
    ChatCompletionResponseChoice,
    ChatMessage,
    OpenEnvScheduler,
    RolloutInferRequest,
    RolloutOutput,
    StopReason,
)
from schedulers.engines import ScriptedEngine
from server_scripts.launch import ServerProcess
from tests.examples.sudoku.games import right_moves, sudoku, wrong_move

Servers = Callable[..., ServerProcess]


@pytest.fixture
def server(environment_server: Servers) -> ServerProcess:
    """Six empty cells, four sessions."""
    return environment_server(env_id="Sudoku-v0-very-easy", max_concurrent_envs=4)


def rows(server: ServerProcess, seeds: Any) -> list[dict[str, Any]]:
    config = {"name": "openenv", "base_url": server.base_url}
    return [{"messages": [], "env_config": {**config, "reset_kwargs": {"seed": seed}}} for seed in seeds]


async def play(server: ServerProcess, script: Any, seeds: Any = range(16), **options: Any) -> list[RolloutOutput]:
    """Play, and see that every session is gone."""
    async with SudokuScheduler(ScriptedEngine(script), **options) as scheduler:
        outputs = await scheduler.async_infer(rows(server, seeds))
    await asyncio.to_thread(server.wait_until_idle)
    return outputs


async def test_perfect_player_wins_every_game(server: ServerProcess) -> None:
    """Sixteen trajectories share four sessions, all finish, and none of the sessions stays open."""
    outputs = await play(server, perfect)
    for output in outputs:
        assert output.stop_reason is StopReason.ENV_DONE
        assert output.rollout_infos["rewards"] == dict(zip(REWARD_NAMES, (1.0, 1.0, 0.0, 1.0, 1.0), strict=True))
        assert output.total_reward == pytest.approx(4.0)
        assert output.rollout_infos["environment_reward"] == 1.0
    assert server.count_sessions().active == 0


async def test_perfect_player_finishes_within_the_default_limit(environment_server: Servers) -> None:
    """The most empty cells that the environment makes quickly; their one solution is the one that it accepts."""
    server = environment_server(env_id="Sudoku-v0-medium", max_concurrent_envs=4)
    outputs = await play(server, perfect, range(4))
    assert [output.rollout_infos["solved"] for output in outputs] == [True] * 4
    assert {output.rollout_infos["empty_cells"] for output in outputs} <= {39, 40, 41}


async def test_two_wrong_moves_lose(server: ServerProcess) -> None:
    def wrong(request: RolloutInferRequest, turn: int) -> str:
        board, solution = solved(server, request.data_dict["env_config"]["reset_kwargs"]["seed"])
        return str(wrong_move(board, solution, turn))

    [output] = await play(server, wrong, [3])
    assert output.stop_reason is StopReason.ENV_DONE
    assert list(output.rollout_infos["rewards"].values()) == [1.0, -0.25, 0.0, 0.0, 0.0]
    assert output.rollout_infos["num_turns"] == 2


def solved(server: ServerProcess, seed: int) -> tuple[Board, Board]:
    with OpenEnvWrapper(base_url=server.base_url) as env:
        board = Board.from_rows(env.reset(seed=seed).observation["board"])
    solution = solve(board)
    assert solution is not None
    return board, solution


async def test_group_plays_one_puzzle(server: ServerProcess) -> None:
    """S14: eight members of two groups side by side, and the same groups once more."""
    first, second = [
        [output.rollout_infos["fingerprint"] for output in await play(server, perfect, [5, 5, 5, 5, 6, 6, 6, 6])]
        for _ in range(2)
    ]
    assert first == second
    assert len(set(first[:4])) == len(set(first[4:])) == 1
    assert first[0] != first[4]


def crash(request: RolloutInferRequest, turn: int) -> Any:
    return OSError("no GPU") if turn == 1 and request.data_dict["env_config"]["reset_kwargs"]["seed"] else "[1 1 1]"


@pytest.mark.parametrize(
    ("script", "max_turns", "reason"),
    [
        (perfect, 2, StopReason.MAX_TURNS),
        (
            [ChatCompletionResponseChoice(ChatMessage("I will play [5 3"), finish_reason="length")],
            None,
            StopReason.LENGTH,
        ),
        (lambda request, turn: "no move", None, StopReason.PARSE_ERROR),
        (crash, None, StopReason.ERROR),
    ],
    ids=["max_turns", "length", "parse_error", "exception"],
)
async def test_session_is_closed_whatever_ends_the_game(
    server: ServerProcess, script: Any, max_turns: int | None, reason: StopReason
) -> None:
    """S03: sixteen games that are not done, on a server with four slots."""
    outputs = await play(server, script, max_turns=max_turns)
    assert {output.stop_reason for output in outputs[1:]} == {reason}


async def test_session_is_closed_when_the_batch_is_cancelled(server: ServerProcess) -> None:
    """S03: four trajectories hold all slots and twelve wait for one."""
    waiting = 0
    everybody = asyncio.Event()

    async def script(request: RolloutInferRequest, turn: int) -> str:
        nonlocal waiting
        waiting += 1
        if waiting == 4:
            everybody.set()
        await asyncio.Event().wait()
        return "never"

    async with SudokuScheduler(ScriptedEngine(script)) as scheduler:
        running = asyncio.ensure_future(scheduler.async_infer(rows(server, range(16))))
        await everybody.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.to_thread(server.wait_until_idle)


async def test_session_is_closed_when_its_connection_is_lost(server: ServerProcess) -> None:
    """A09: half of sixteen trajectories are cut off in their second turn; the others win."""

    def script(request: RolloutInferRequest, turn: int) -> str:
        if turn == 1 and request.data_dict["env_config"]["reset_kwargs"]["seed"] % 2:
            scheduler.episode(request).env.abort()
        return perfect(request, turn)

    async with SudokuScheduler(ScriptedEngine(script)) as scheduler:
        outputs = await scheduler.async_infer(rows(server, range(16)))
    assert [output.stop_reason for output in outputs] == [StopReason.ENV_DONE, StopReason.ENV_LOST] * 8
    assert [output.total_reward is None for output in outputs] == [False, True] * 8
    await asyncio.to_thread(server.wait_until_idle)


async def test_setting_that_the_environment_does_not_know_is_unscored(server: ServerProcess) -> None:
    """The server's words reach the output."""
    [row] = rows(server, [1])
    row["env_config"]["reset_kwargs"]["sed"] = 1
    async with OpenEnvScheduler(ScriptedEngine([])) as scheduler:
        [output] = await scheduler.async_infer([row])
    assert output.stop_reason is StopReason.ENV_LOST
    assert output.error is not None
    assert "Unknown reset setting 'sed'" in output.error


async def test_plain_scheduler_plays_with_json(server: ServerProcess) -> None:
    """Without anything written for the game: an action as JSON, an observation as JSON."""
    board, solution = solved(server, 1)
    answers = [f'```json\n{{"message": "{move}"}}\n```' for move in right_moves(board, solution)]
    async with OpenEnvScheduler(ScriptedEngine(answers)) as scheduler:
        [output] = await scheduler.async_infer(rows(server, [1]))
    assert output.stop_reason is StopReason.ENV_DONE
    assert output.total_reward == 1.0
    assert '"solved": false' in output.messages[0]["content"]


async def test_mock_game_of_the_tests_is_the_real_one(server: ServerProcess) -> None:
    """Good, bad, filled and unparsable answers: the same conversation and the same rewards from both."""
    board, solution = solved(server, 2)
    right, wrong = right_moves(board, solution), wrong_move(board, solution, 5)
    scripts: list[list[Any]] = [
        [right[0], wrong, right[1], right[0], "hmm", right[2], wrong, *right[3:]],
        [right[0], wrong, right[0]],
        [wrong, wrong],
    ]
    with MockEnvServer(sudoku(board, solution)) as mock:
        for script in scripts:
            answers = [str(answer) for answer in script]
            async with SudokuScheduler(ScriptedEngine(answers), max_turns=20) as scheduler:
                [theirs] = await scheduler.async_infer([{"env_config": {"base_url": mock.base_url}}])
            [ours] = await play(server, answers, [2], max_turns=20)
            assert theirs.messages == ours.messages
            for name in ("rewards", "step_rewards", "stop_reason", "solved", "environment_reward", "fingerprint"):
                assert theirs.rollout_infos[name] == ours.rollout_infos[name]
