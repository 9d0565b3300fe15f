"""How well a policy plays."""

from __future__ import annotations

import json
from typing import Any

import pytest

from examples.evaluation import play, summarise
from examples.frozen_lake.example import EXAMPLE as FROZEN_LAKE
from examples.sudoku.example import EXAMPLE
from examples.sudoku.policies import perfect
from examples.sudoku.rewards import REWARD_NAMES
from examples.sudoku.scheduler import SudokuScheduler
from openenv_client.testing import Fault, MockEnvServer
from schedulers import RequestConfig, RolloutInferRequest, RolloutOutput
from schedulers.engines import ScriptedEngine
from tests.examples.sudoku.games import seeded


async def outputs(player: Any, *faults: Fault) -> list[RolloutOutput]:
    with MockEnvServer(seeded(6), faults=faults) as server:
        async with SudokuScheduler(ScriptedEngine(player), env_settings={"recover": "never"}) as scheduler:
            return await play(EXAMPLE, scheduler, range(4), base_url=server.base_url, request_config=RequestConfig())


async def test_one_game_for_each_seed_in_order() -> None:
    infos = [output.rollout_infos for output in await outputs(perfect)]
    assert [info["seed"] for info in infos] == [0, 1, 2, 3]
    assert len({info["fingerprint"] for info in infos}) == 4


async def test_perfect_player() -> None:
    summary = summarise(EXAMPLE, await outputs(perfect))
    assert (summary.games, summary.unscored, summary.solved) == (4, 0, 1.0)
    assert (summary.measures, summary.turns) == ({"accepted_moves": 6.0}, 6.0)
    assert summary.rewards == dict(zip(REWARD_NAMES, (1.0, 1.0, 0.0, 1.0, 1.0), strict=True))
    assert summary.stop_reasons == {"env_done": 4}


async def test_means_are_over_all_games_that_count() -> None:
    """One of four gives up at once."""

    def player(request: RolloutInferRequest, turn: int) -> str:
        seed = request.data_dict["env_config"]["reset_kwargs"]["seed"]
        return perfect(request, turn) if seed else "I give up."

    summary = summarise(EXAMPLE, await outputs(player))
    assert summary.solved == 0.75
    assert summary.turns == (3 * 6 + 2) / 4
    assert summary.measures["accepted_moves"] == 18 / 4
    assert summary.rewards["empty_cell_reward"] == pytest.approx((3 - 1) / 4)
    assert summary.stop_reasons == {"env_done": 3, "parse_error": 1}


async def test_lost_games_do_not_count() -> None:
    """A10: they are no defeats; how many there were is said beside the means."""
    summary = summarise(EXAMPLE, await outputs(perfect, Fault("drop", "reset", nth=1), Fault("drop", "step", nth=5)))
    assert (summary.games, summary.unscored, summary.solved) == (3, 1, 1.0)
    assert summary.stop_reasons == {"env_done": 3, "env_lost": 1}


def test_no_game_at_all_has_no_means() -> None:
    summary = summarise(EXAMPLE, [])
    assert (summary.games, summary.solved, summary.turns) == (0, None, None)
    assert summary.rewards == dict.fromkeys(REWARD_NAMES)


async def test_a_game_of_this_process_needs_no_server() -> None:
    async with FROZEN_LAKE.scheduler(ScriptedEngine(FROZEN_LAKE.policy)) as scheduler:
        played = await play(FROZEN_LAKE, scheduler, range(4), base_url=None, request_config=RequestConfig())
    summary = summarise(FROZEN_LAKE, played)
    assert (summary.games, summary.solved, summary.total_reward, summary.rewards) == (4, 1.0, 1.0, {})


async def test_summary_can_be_written_as_json() -> None:
    summary = summarise(EXAMPLE, await outputs(perfect))
    assert json.loads(json.dumps(summary.as_dict()))["rewards"]["correct_reward"] == 1.0
