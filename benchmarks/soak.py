"""Play Sudoku on a real server through a proxy that injects faults, and check every reward: ``make soak``."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import random
import secrets
import shlex
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, cast

import psutil
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm

if not __package__:  # run as a script: make the checkout importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.soak_game import Difference, PlayedGame, answer, check
from examples.sudoku.board import Board
from examples.sudoku.hints import DIFFICULTIES, Difficulty
from examples.sudoku.scheduler import SudokuScheduler, read_board
from openenv_client import OpenEnvError, OpenEnvWrapper
from openenv_client.testing import Fault, FaultProxy
from schedulers import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    Episode,
    RequestConfig,
    RolloutError,
    RolloutInferRequest,
)
from server_scripts.launch import ServerProcess, ServerStartError

__all__ = ["Report", "Settings", "run"]

RUNS = Path("outputs/soak")
GAMES_OF_A_PUZZLE = 8  # as in a GRPO group

# Seconds. A late reply comes after its request has timed out; a frozen connection is given up by the keepalive first.
STEP_TIMEOUT = 2.0
LATE = 3.0
ENV_SETTINGS = {
    "connect_timeout": STEP_TIMEOUT,
    "reset_timeout": STEP_TIMEOUT,
    "step_timeout": STEP_TIMEOUT,
    "close_timeout": 1.0,
    "ping_interval": 0.5,
    "ping_timeout": 1.0,
    "max_message_size": 2**20,
}

SETTLE = 5.0  # for threads to end

MEMORY_BOUND = 16.0
"""MiB that client and server may each grow by, from a quarter of the games to their end."""

console = Console()


def _observation(**data: Any) -> str:
    return json.dumps({"type": "observation", "data": data})


_ALL = ("reset", "step", "state")
_FAULTS: list[tuple[str, int, str, Any, tuple[str, ...]]] = [
    ("handshake answered with HTTP 502", 2, "http", 502, ("connect",)),
    ("handshake answered with HTTP 503", 2, "http", 503, ("connect",)),
    ("handshake cut", 2, "drop", None, ("connect",)),
    ("handshake slow", 2, "delay", 0.2, ("connect",)),
    ("handshake too slow", 1, "delay", LATE, ("connect",)),
    ("server full", 2, "full", None, ("connect",)),
    ("cut before the server knew", 5, "drop", None, _ALL),
    ("cut after the server had acted", 5, "drop_after", None, _ALL),
    ("reply slow", 4, "delay", 0.1, _ALL),
    ("reply too late", 2, "delay", LATE, _ALL),
    ("no pongs", 1, "freeze", LATE, ("step",)),
    ("closed with 1012", 2, "close", (1012, "restart"), _ALL),
    ("closed with 1011", 1, "close", (1011, "internal error"), _ALL),
    ("error reply", 1, "error", "EXECUTION_ERROR", ("step",)),
    ("no JSON", 1, "send", "<html>502 Bad Gateway</html>", _ALL),
    ("binary frame", 1, "send", b'{"type":"observation"}', _ALL),
    ("reward of a wrong type", 1, "send", _observation(observation={}, reward="1", done=False), ("step",)),
    ("done of a wrong type", 1, "send", _observation(observation={}, reward=1.0, done="false"), ("step",)),
    ("reply to another request", 1, "send", '{"type":"state","data":{}}', ("reset", "step")),
    ("reply too big", 1, "big", 2 * ENV_SETTINGS["max_message_size"], ("step",)),
    ("message unasked", 2, "extra", _observation(observation={"board": None}, reward=1.0, done=False), _ALL),
]
"""What may go wrong: name, weight, kind, value, and to what it happens."""


def fault_rates(fault_rate: float) -> tuple[dict[Fault, float], dict[Fault, str]]:
    """How often each fault happens, and its name. Of all connects, resets, … ``fault_rate`` have one."""
    weights: dict[Fault, int] = {}
    names: dict[Fault, str] = {}
    for name, weight, kind, value, events in _FAULTS:
        for event in events:
            fault = Fault(cast("Any", kind), cast("Any", event), value)
            weights[fault], names[fault] = weight, name
    sums: Counter[str] = Counter()
    for fault, weight in weights.items():
        sums[fault.on] += weight
    return {fault: fault_rate * weight / sums[fault.on] for fault, weight in weights.items()}, names


@dataclass(frozen=True)
class Settings:
    """The options of a run; the same ones give the same puzzles, answers and chances of faults.

    Args:
        seed: Where all chance comes from.
        games: How many.
        concurrency: How many at a time.
        env_id: TextArena's id of the Sudoku.
        difficulty: How many hints the player gets.
        fault_rate: How many of all connects and requests have a fault, 0 to 1.
        restart: Kill the server half-way and start it again on its port.
        only: Play this game alone.
    """

    seed: int
    games: int = 2000
    concurrency: int = 32
    env_id: str = "Sudoku-v0-easy"
    difficulty: Difficulty = "easy"
    fault_rate: float = 0.04
    restart: bool = False
    only: int | None = None

    @property
    def numbers(self) -> range:
        """The games to play."""
        return range(self.games) if self.only is None else range(self.only, self.only + 1)

    @property
    def capacity(self) -> int:
        """Sessions of the server: fewer than games, so that it is full at times."""
        return max(2, self.concurrency - self.concurrency // 8)

    @property
    def command(self) -> str:
        """What repeats the run."""
        options = [f"--seed {self.seed}"]
        for option in fields(self)[1:]:
            value, name = getattr(self, option.name), f"--{option.name.replace('_', '-')}"
            if value != option.default:
                options.append(name if value is True else f"{name} {shlex.quote(str(value))}")
        return f'make soak ARGS="{" ".join(options)}"'

    def reset_of(self, number: int) -> dict[str, Any]:
        """The reset arguments of a game. Eight games have the same puzzle."""
        puzzle = random.Random(f"{self.seed} {number // GAMES_OF_A_PUZZLE}").randrange(2**31)
        return {"seed": puzzle, "episode_id": f"soak-{self.seed}-{number}"}


@dataclass
class Report:
    """What came of a run.

    Attributes:
        games: How many were played and found right.
        scored: How many of them have a reward.
        steps: Steps that the environment took for them, those of recovery not counted.
        recovered: How many scored games went on in a new session after theirs was lost.
        recoveries: How many sessions were replaced in them.
        unscored: How many games were lost to which error.
        faults: How many faults of which kind were injected.
        checks: How often each check found what it should.
        memory: MiB in use by the client (proxy included) and the server, after the warm-up and at the end.
        seconds: How long the games took.
        failure: The first difference, if there was one.
    """

    games: int = 0
    scored: int = 0
    steps: int = 0
    recovered: int = 0
    recoveries: int = 0
    unscored: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    checks: Counter[str] = field(default_factory=Counter)
    memory: dict[str, list[float]] = field(default_factory=lambda: {"client": [], "server": []})
    seconds: float = 0.0
    failure: str | None = None

    @property
    def games_per_minute(self) -> float:
        """The speed."""
        return 60 * self.games / self.seconds if self.seconds else 0.0

    def count(self, game: PlayedGame, passed: Iterable[str]) -> None:
        """Add a game that was found right."""
        infos = game.output.rollout_infos
        self.games += 1
        self.checks.update(passed)
        self.steps += sum(received.kind == "step" for received in game.forwarded)
        recoveries = infos.get("recoveries") or []
        if game.scored:
            self.scored += 1
            self.recovered += bool(recoveries)
            self.recoveries += len(recoveries)
        else:
            self.unscored[type(game.output.exception).__name__] += 1

    def table(self) -> Table:
        """For the screen."""
        table = Table("", "", title="soak", show_header=False)
        rows: list[tuple[str, object]] = [
            ("games", self.games),
            ("scored", self.scored),
            ("  of which recovered", f"{self.recovered} ({self.recoveries} sessions replaced)"),
            ("unscored", self.unscored.total()),
            *((f"  {name}", count) for name, count in self.unscored.most_common()),
            ("faults injected", self.faults.total()),
            *((f"  {name}", count) for name, count in self.faults.most_common()),
            ("steps sent", self.steps),
            ("seconds", f"{self.seconds:.0f}"),
            ("games per minute", f"{self.games_per_minute:.0f}"),
            *((f"MiB of the {who}", " → ".join(f"{value:.0f}" for value in mib)) for who, mib in self.memory.items()),
            ("checks passed", self.checks.total()),
            *((f"  {name}", count) for name, count in self.checks.items()),
        ]
        for name, value in rows:
            table.add_row(name, str(value))
        return table


class _Player:
    """An engine that plays by `answer`; what it says depends on the seed, the game, the turn and what it reads."""

    tokenizer = None

    def __init__(self, seed: int) -> None:
        self._seed = seed

    async def infer_async(self, request: RolloutInferRequest, request_config: RequestConfig) -> ChatCompletionResponse:
        """Answer the last message."""
        rng = random.Random(f"{self._seed} {request.uuid} {len(request.messages)}")
        return ChatCompletionResponse([ChatCompletionResponseChoice(ChatMessage(answer(request.messages, rng)))])


class _Scheduler(SudokuScheduler):
    """Asks the server for its state before a session is closed."""

    async def close_env(self, episode: Episode) -> None:
        """Ask, and close."""
        if episode.scored:
            with contextlib.suppress(OpenEnvError):  # the question too can meet a fault
                episode.infos["server_state"] = await self._bridge.call(episode.env, episode.env.state)
        await super().close_env(episode)


class _Soak:
    def __init__(self, settings: Settings, server: ServerProcess, report: Report, restart: Callable[[], ServerProcess]):
        self._settings = settings
        self._server = server
        self._report = report
        self._restart = restart
        rates, self._names = fault_rates(settings.fault_rate)
        self._proxy = FaultProxy(server.base_url, rates=rates, seed=settings.seed)
        self._puzzles = self._fetch_puzzles()

    def _fetch_puzzles(self) -> dict[int, Board]:
        """The first board of every seed, from the server itself."""
        puzzles: dict[int, Board] = {}
        with OpenEnvWrapper(base_url=self._server.base_url) as env:
            for seed in {self._settings.reset_of(number)["seed"] for number in self._settings.numbers}:
                board = read_board(env.reset(seed=seed).observation)
                if board is None:
                    raise Difference("puzzles", f"{self._settings.env_id} is no Sudoku")
                puzzles[seed] = board
        return puzzles

    def play(self, progress: tqdm[Any]) -> None:
        """Play and check every game.

        Raises:
            Difference: The first that was found.
        """
        started = time.monotonic()
        try:
            with self._proxy:
                asyncio.run(self._play(progress))
                self._check_sessions()
        finally:
            self._report.seconds = time.monotonic() - started
            for fault, count in self._proxy.struck.items():
                self._report.faults[self._names[fault]] += count

    async def _play(self, progress: tqdm[Any]) -> None:
        settings = self._settings
        games = iter(settings.numbers)
        async with _Scheduler(
            _Player(settings.seed),
            difficulty=settings.difficulty,
            max_concurrent_envs=settings.concurrency,
            env_settings=ENV_SETTINGS,
        ) as scheduler:

            async def work() -> None:
                for number in games:
                    await self._play_one(scheduler, number)
                    progress.set_postfix(scored=self._report.scored, faults=self._proxy.struck.total(), refresh=False)
                    progress.update()
                    await self._at_milestones()

            workers = [asyncio.create_task(work()) for _ in range(settings.concurrency)]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
        self._measure()

    async def _play_one(self, scheduler: SudokuScheduler, number: int) -> None:
        reset = self._settings.reset_of(number)
        # A query of its own gives each game the same chances again, however the games overlap.
        env_config = {"base_url": f"{self._proxy.base_url}?game={number}", "reset_kwargs": reset}
        request = RolloutInferRequest(uuid=reset["episode_id"], data_dict={"env_config": env_config})
        try:
            [output] = await scheduler.async_infer([request], use_tqdm=False)
            forwarded = self._proxy.take(f"/ws?game={number}")
            game = PlayedGame(self._puzzles[reset["seed"]], self._settings.difficulty, reset, output, forwarded)
            self._report.count(game, check(game))
        except RolloutError as error:
            raise Difference("no exceptions", str(error)).located(f"game {number}, {reset}") from error
        except Difference as difference:
            raise difference.located(f"game {number}, {reset}") from None

    async def _at_milestones(self) -> None:
        games, done = len(self._settings.numbers), self._report.games
        if self._settings.restart and done == max(1, games // 2):
            self._server = await asyncio.to_thread(self._restart)
            self._report.faults["server killed and started again"] += 1
        if done == max(1, 3 * games // 4 if self._settings.restart else games // 4):
            self._measure()  # what there is to be filled once is full now

    def _measure(self) -> None:
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # glibc: give back what is free, of which threads keep much
            ctypes.CDLL(None).malloc_trim(0)
        for name, pid in (("client", None), ("server", self._server.process.pid)):
            self._report.memory[name].append(psutil.Process(pid).memory_info().rss / 2**20)

    def _check_sessions(self) -> None:
        try:
            self._server.wait_until_idle(timeout=4 * LATE)  # the proxy holds a frozen one for LATE
        except TimeoutError as error:
            raise Difference("no session is left", str(error)) from None
        self._report.checks["no session is left"] += 1

    def check_scored(self) -> None:
        """See that there was something to check."""
        if not self._report.scored:
            raise Difference("games are scored", "none was")

    def check_memory(self) -> None:
        """Compare the end with the state after the warm-up."""
        for name, (before, *_, after) in self._report.memory.items():
            if after - before > MEMORY_BOUND:
                text = f"the {name} grew from {before:.0f} to {after:.0f} MiB, by more than {MEMORY_BOUND:.0f}"
                raise Difference("memory is flat", text)
            self._report.checks["memory is flat"] += 1


def run(
    settings: Settings,
    server: ServerProcess,
    *,
    restart: Callable[[], ServerProcess] | None = None,
    quiet: bool = False,
) -> Report:
    """Play all games and check them.

    Args:
        settings: What to play.
        server: Plays ``settings.env_id``; used by nobody else.
        restart: Replaces the server by another on the same port, for ``settings.restart``.
        quiet: Show no progress.

    Returns:
        What came of it; ``failure`` is None if everything was right.
    """
    report = Report()
    process = psutil.Process()
    try:
        soak = _Soak(settings, server, report, restart or (lambda: server))
        with tqdm(total=len(settings.numbers), unit="game", disable=quiet or None) as progress:
            threads, descriptors = set(threading.enumerate()), process.num_fds()  # that of tqdm included
            soak.play(progress)
        _check_settles(report, "no thread is left", lambda: set(threading.enumerate()) - threads)
        _check_settles(report, "no descriptor is left", lambda: max(0, process.num_fds() - descriptors))
        soak.check_scored()
        soak.check_memory()
    except Difference as difference:
        report.failure = str(difference)
    return report


def _check_settles(report: Report, name: str, left: Callable[[], object]) -> None:
    """Threads of a pool end a moment after they are told to."""
    deadline = time.monotonic() + SETTLE
    while rest := left():
        if time.monotonic() > deadline:
            raise Difference(name, str(rest))
        time.sleep(0.05)
    report.checks[name] += 1


@contextlib.contextmanager
def _own_server(settings: Settings) -> Iterator[tuple[ServerProcess, Callable[[], ServerProcess]]]:
    """A server, and what kills it and starts another on its port."""
    with contextlib.ExitStack() as servers:

        def start(port: int = 0) -> ServerProcess:
            server = ServerProcess(env_id=settings.env_id, max_concurrent_envs=settings.capacity, port=port)
            return servers.enter_context(server)

        first = start()

        def restart() -> ServerProcess:
            first.process.kill()
            first.stop()
            return start(int(first.base_url.rpartition(":")[2]))

        yield first, restart


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings={"max_content_width": 120})
def main(
    games: Annotated[int, typer.Option(min=1, help="How many games to play.")] = Settings.games,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Where all chance comes from.", show_default="a fresh one, printed")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Games at a time.")] = Settings.concurrency,
    env_id: Annotated[
        str, typer.Option(help="Which Sudoku: Sudoku-v0-very-easy has 6 empty cells, -easy 11, Sudoku-v0 21.")
    ] = Settings.env_id,
    difficulty: Annotated[str, typer.Option(help=f"Hints: {', '.join(DIFFICULTIES)}.")] = Settings.difficulty,
    fault_rate: Annotated[
        float, typer.Option(min=0, max=1, help="Share of all connects and requests that meet a fault.")
    ] = Settings.fault_rate,
    restart: Annotated[
        bool, typer.Option("--restart", help="Kill the server half-way and start it again on its port.")
    ] = False,
    only: Annotated[
        int | None, typer.Option(min=0, help="Play the game of this number alone, as it is played among the others.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help=f"Folder for report.json and soak.log; by default a new one in {RUNS}.")
    ] = None,
) -> None:
    """Play Sudoku through a proxy that injects faults, and check that no reward belongs to another move.

    A server of its own, a scripted player, no model. Every game is played again on paper and compared: all that the
    player was shown, every reward, what each session was sent, and what the server says. At the end no session, thread
    or descriptor may be left and memory must be flat. Exits with 1, and says what and where, if anything differs.
    """
    if difficulty not in DIFFICULTIES:
        raise typer.BadParameter(f"{difficulty!r}: it takes {', '.join(DIFFICULTIES)}", param_hint="'--difficulty'")
    settings = Settings(
        seed=secrets.randbelow(2**32) if seed is None else seed,
        games=games,
        concurrency=concurrency,
        env_id=env_id,
        difficulty=difficulty,
        fault_rate=fault_rate,
        restart=restart,
        only=only,
    )
    console.print(f"to repeat: {escape(settings.command)}", highlight=False, soft_wrap=True)
    folder = output or RUNS / datetime.now().strftime("%Y%m%d-%H%M%S")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        logging.basicConfig(filename=folder / "soak.log", level=logging.WARNING)
    except OSError as error:
        raise typer.BadParameter(f"{folder}: {error.strerror}; name another folder", param_hint="'--output'") from None
    try:
        with _own_server(settings) as (server, restart_server):
            report = run(settings, server, restart=restart_server)
    except ServerStartError as error:
        console.print("[bold red]error:[/]", escape(str(error)), highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        console.print("interrupted")
        raise typer.Exit(130) from None
    _save(report, settings, folder / "report.json")
    console.print(report.table())
    console.print(f"{folder / 'report.json'}", highlight=False, soft_wrap=True)
    if report.failure is not None:
        console.print(f"[bold red]failed:[/] {escape(report.failure)}", highlight=False, soft_wrap=True)
        console.print(f"to repeat: {escape(settings.command)}", highlight=False, soft_wrap=True)
        raise typer.Exit(1)


def _save(report: Report, settings: Settings, path: Path) -> None:
    result = {
        "command": settings.command,
        "settings": asdict(settings),
        **vars(report),
        "games_per_minute": report.games_per_minute,
    }
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app()
