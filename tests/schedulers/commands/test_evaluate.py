"""Games that are named by seeds or rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from openenv_client.testing import MockEnvServer
from schedulers import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    RequestConfig,
    RolloutInferRequest,
)
from schedulers.commands import evaluate
from schedulers.commands.evaluate import Evaluation, Settings
from schedulers.recording import read_trajectories
from tests.examples.sudoku.games import seeded

SUDOKU = "examples.sudoku.scheduler:SudokuScheduler"


class Engine:
    """Keeps what it was asked for, and says nothing of use."""

    tokenizer = None

    def __init__(self) -> None:
        self.configs: dict[int, RequestConfig] = {}
        self.running = self.peak = 0
        self.closed = False

    async def infer_async(self, request: RolloutInferRequest, request_config: RequestConfig) -> ChatCompletionResponse:
        seed: int = request.data_dict["env_config"]["reset_kwargs"]["seed"]
        assert self.configs.setdefault(seed, request_config) == request_config
        return ChatCompletionResponse([ChatCompletionResponseChoice(ChatMessage("[1 1 1]"))])

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    monkeypatch.setattr(evaluate, "engine_named", lambda name, model, options: engine)
    return engine


def run(folder: Path, settings: Settings, *, games: int = 6, concurrency: int = 2, **options: Any) -> Evaluation:
    with MockEnvServer(seeded(4)) as server:
        evaluation = Evaluation(settings, folder, games=games, **options)
        evaluation.run(base_url=server.base_url, concurrency=concurrency, progress=lambda results: None)
        server.wait_until(lambda: server.sessions == 0)
        assert server.peak_sessions <= concurrency
    return evaluation


def test_no_more_games_at_a_time_than_asked_for(tmp_path: Path, engine: Engine) -> None:
    evaluation = run(tmp_path / "out", Settings(scheduler=SUDOKU, model="m"), games=12, concurrency=3)
    assert len(evaluation.results.games) == evaluation.total == 12


def test_each_game_samples_with_a_seed_of_its_own(tmp_path: Path, engine: Engine) -> None:
    settings = Settings(scheduler=SUDOKU, model="m", max_tokens=7, temperature=0.5, top_p=0.9, sampling_seed=100)
    run(tmp_path / "out", settings)
    assert engine.configs == {
        seed: RequestConfig(max_tokens=7, temperature=0.5, top_p=0.9, seed=100 + seed) for seed in range(6)
    }


def test_engine_is_closed(tmp_path: Path, engine: Engine) -> None:
    run(tmp_path / "out", Settings(scheduler=SUDOKU, model="m"))
    assert engine.closed


def test_resumed_games_keep_their_seeds_for_sampling(tmp_path: Path, engine: Engine) -> None:
    settings = Settings(scheduler=SUDOKU, model="m")
    run(tmp_path / "whole", settings)
    whole = dict(engine.configs)
    run(tmp_path / "parts", settings, games=3)
    engine.configs.clear()
    run(tmp_path / "parts", settings, resume=True)
    assert engine.configs == {seed: whole[seed] for seed in (3, 4, 5)}


def test_games_are_kept_though_the_progress_fails(tmp_path: Path, engine: Engine) -> None:
    """Whatever ends the run, the games before are on disk and summed up."""

    def fail(results: Any) -> None:
        if len(results.games) == 3:
            raise LookupError("no screen")

    with MockEnvServer(seeded(4)) as server:
        evaluation = Evaluation(Settings(scheduler=SUDOKU, model="m"), tmp_path / "out", games=6)
        with pytest.raises(LookupError, match="no screen"):
            evaluation.run(base_url=server.base_url, concurrency=1, progress=fail)
        server.wait_until(lambda: server.sessions == 0)
    assert len(list(read_trajectories(tmp_path / "out" / "trajectories.jsonl"))) == 3
