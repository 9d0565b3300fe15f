"""``openenv-rollout eval``: play the games that seeds or rows name, and keep each on disk as soon as it ends."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

from schedulers import InferEngine, OpenEnvScheduler, RequestConfig, RolloutInferRequest, RolloutScheduler
from schedulers.commands.names import (
    WrongUse,
    construct,
    engine_named,
    policies_of,
    policy_named,
    rows_named,
    scheduler_named,
)
from schedulers.commands.results import Results
from schedulers.commands.servers import TOKEN_VARIABLE, environment_server
from schedulers.recording import TrajectoryWriter
from schedulers.rows import without_address

__all__ = ["MODEL", "Evaluation", "Settings"]

MODEL = "model"
"""The policy that samples from a model."""

_TRIALS = 10  # games after which it is time to ask whether any can be scored

Progress: TypeAlias = Callable[[Results], None]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides how games are played. Saved with the results; an evaluation is resumed with the same ones.

    Args:
        scheduler: Its name, as `scheduler_named` reads it.
        options: Its keywords.
        max_turns: The most turns of a game; None leaves it to the scheduler.
        policy: ``"model"``, or the name of a player, as `policy_named` reads it.
        engine: Samples from the model.
        engine_options: Its keywords.
        model: The model.
        serve: The game that a server is started for.
        seed_start: The first seed, without a dataset.
        dataset: A file of rows.
        max_tokens: The most tokens of a turn; None is all that there is room for.
        temperature: Of sampling; 0 is greedy.
        top_p: Nucleus sampling; 1 is off.
        sampling_seed: What each game's seed for sampling is counted from.
    """

    scheduler: str
    options: dict[str, Any] = field(default_factory=dict)
    max_turns: int | None = None
    policy: str = MODEL
    engine: str = "transformers"
    engine_options: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    serve: str | None = None
    seed_start: int = 0
    dataset: str | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    sampling_seed: int = 0


@dataclass(frozen=True)
class _Planned:
    """A game that is to be played: its number from 0, its seed if it has one, and its row."""

    number: int
    seed: int | None
    row: dict[str, Any]


class _HopelessError(Exception):
    """No game can be scored."""


class Evaluation:
    """Games, and what has become of them.

    Args:
        settings: How to play.
        folder: Where the results go.
        games: How many; None is 20, or all rows of the dataset.
        resume: Go on with what is in the folder.

    Raises:
        WrongUse: The settings or the folder are not as they should be.
    """

    def __init__(self, settings: Settings, folder: Path, *, games: int | None = None, resume: bool = False) -> None:
        if "token" in (settings.options.get("env_settings") or {}):
            raise WrongUse(f"--option env_settings: the token belongs into the variable {TOKEN_VARIABLE}")
        self.settings = settings
        self._scheduler_class = scheduler_named(settings.scheduler)
        self._on_server = issubclass(self._scheduler_class, OpenEnvScheduler)
        rows = None if settings.dataset is None else rows_named(settings.dataset)
        plan = self._plan_of_seeds(games) if rows is None else self._plan_of_rows(rows[:games])
        self.total = len(plan)
        self.results = Results(folder, {**asdict(settings), "dataset_digest": _digest(rows)}, resume=resume)
        if surplus := self.results.numbers - {planned.number for planned in plan}:
            raise WrongUse(f"--resume: {folder} holds {len(surplus)} games more than these {len(plan)}; raise --games")
        self._left = [planned for planned in plan if planned.number not in self.results.numbers]

    def run(self, *, base_url: str | None, concurrency: int, progress: Progress, max_unscored: int = 0) -> None:
        """Play what is left, unless none of the first games can be scored.

        Args:
            base_url: A running server; None starts one if ``settings.serve`` says so.
            concurrency: The most games at a time.
            progress: Called with the results after every game.
            max_unscored: So many games may fail.

        Raises:
            WrongUse: Something that was named is not there, or does not fit.
        """
        if not self._left:
            self.results.save(complete=True)
            return
        engine = self._make_engine()
        try:
            with environment_server(
                self._scheduler_class,
                serve=self.settings.serve,
                base_url=base_url,
                sessions=concurrency,
                reset_kwargs=self._left[0].row["env_config"].get("reset_kwargs") or {},
            ) as address:
                scheduler = self._make_scheduler(engine, address, concurrency)
                with self.results.open() as writer:
                    asyncio.run(self._play(scheduler, writer, concurrency, progress, max(max_unscored, _TRIALS)))
        finally:
            _close(engine)

    async def _play(
        self, scheduler: RolloutScheduler, writer: TrajectoryWriter, concurrency: int, progress: Progress, trials: int
    ) -> None:
        settings, results = self.settings, self.results
        config = RequestConfig(settings.max_tokens, settings.temperature, settings.top_p)
        played_by = {"scheduler": settings.scheduler, "options": settings.options}
        gate = asyncio.Semaphore(concurrency)
        started = time.monotonic()

        async def play(game: _Planned) -> None:
            async with gate:
                # A seed of its own for each game, so that those which begin alike do not go on alike.
                own = replace(config, seed=settings.sampling_seed + game.number)
                outputs = await scheduler.rollout_one(RolloutInferRequest.from_row(game.row), own)
            results.seconds = time.monotonic() - started
            results.add(writer, outputs, game=game.number, seed=game.seed, row=game.row, played_by=played_by)
            progress(results)
            if len(results.games) > trials and all(game.error is not None for game in results.games):
                raise _HopelessError

        complete = False
        try:
            async with scheduler:
                tasks = [asyncio.ensure_future(play(game)) for game in self._left]
                try:
                    await asyncio.gather(*tasks)
                    complete = True
                except _HopelessError:
                    pass  # the results say it
                finally:  # when one could not be kept, the others need not be played
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            results.save(complete=complete)

    @property
    def _env(self) -> str | None:
        """Which environment of this process the scheduler plays, if it plays one."""
        return self._left[0].row["env_config"].get("name") or self.settings.options.get("gym_env")

    def _make_engine(self) -> InferEngine:
        settings = self.settings
        if settings.policy != MODEL:
            if settings.model is not None:
                raise WrongUse(f"--model is for --policy {MODEL}, not for {settings.policy}; leave one of them out")
            return policy_named(settings.policy, self._scheduler_class, self._env)
        if settings.model is None:
            others = ", ".join(policies_of(self._scheduler_class, self._env))
            hint = f", or take another --policy: {others}" if others else ""
            raise WrongUse(f"--policy {MODEL} needs a model: name it with --model{hint}")
        return engine_named(settings.engine, settings.model, settings.engine_options)

    def _make_scheduler(self, engine: InferEngine, base_url: str | None, concurrency: int) -> RolloutScheduler:
        options = dict(self.settings.options)
        if self._on_server:
            options = {"base_url": base_url, "max_concurrent_envs": concurrency, **options}
            if token := os.environ.get(TOKEN_VARIABLE):
                options["env_settings"] = {**(options.get("env_settings") or {}), "token": token}
        what = f"--scheduler {self.settings.scheduler}"
        scheduler = construct(self._scheduler_class, what, engine, self.settings.max_turns, **options)
        return cast("RolloutScheduler", scheduler)

    def _plan_of_seeds(self, games: int | None) -> list[_Planned]:
        start = self.settings.seed_start
        seeds = range(start, start + (20 if games is None else games))
        return [
            _Planned(n, seed, {"env_config": {"reset_kwargs": {"seed": seed}} if self._on_server else {"seed": seed}})
            for n, seed in enumerate(seeds)
        ]

    def _plan_of_rows(self, rows: list[dict[str, Any]]) -> list[_Planned]:
        plan = []
        for number, row in enumerate(rows):
            row = without_address(row)  # where to play is said on the command line
            config = row["env_config"]
            seed = (config.get("reset_kwargs") or {}).get("seed", config.get("seed"))
            plan.append(_Planned(number, seed, row))
        return plan


def _close(engine: InferEngine) -> None:
    """Close an engine that can be closed, with connections or processes of its own."""
    if hasattr(engine, "aclose"):
        asyncio.run(engine.aclose())
    elif hasattr(engine, "close"):
        engine.close()


def _digest(rows: list[dict[str, Any]] | None) -> str | None:
    """Tells whether a dataset is the same later."""
    return None if rows is None else hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
