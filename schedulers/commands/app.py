"""The command line ``openenv-rollout``: eval, compare, rescore."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from schedulers.commands.console import say, warn
from schedulers.commands.ending import ending_well
from schedulers.commands.evaluate import MODEL, Evaluation, Settings
from schedulers.commands.names import (
    ENGINES,
    WrongUse,
    construct,
    pairs,
    scheduler_for,
    scheduler_named,
    server_process,
)
from schedulers.commands.results import trajectories_of
from schedulers.commands.servers import TOKEN_VARIABLE
from schedulers.commands.tables import comparison_table, live, summary_table
from schedulers.evaluation import HELD_OUT_SEED, Game, began_differently, compare, summarise
from schedulers.multi_turn import RolloutScheduler
from schedulers.recording import TrajectoryWriter, read_trajectories
from schedulers.rescoring import RescoreError, rescore

__all__ = ["app"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Evaluate models and players on any environment, compare evaluations, and score recorded games anew.",
)
_WIDE = {"max_content_width": 120}


@app.command("eval", context_settings=_WIDE)
def evaluate(
    context: typer.Context,
    *,
    serve: Annotated[
        str | None,
        typer.Option(
            metavar="ENV_ID",
            help="Start a server for this TextArena game, such as Sudoku-v0-very-easy. In the checkout only.",
            rich_help_panel="Game",
        ),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help=f"A server that runs, instead; its token, if it wants one, in {TOKEN_VARIABLE}.",
            rich_help_panel="Game",
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What plays: a registered name, module:Class or path.py:Class.",
            show_default="the example's for --serve, in the checkout",
            rich_help_panel="Game",
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A keyword of the scheduler; repeatable.", rich_help_panel="Game"),
    ] = None,
    difficulty: Annotated[
        str | None, typer.Option(help="Short for --option difficulty=…", rich_help_panel="Game")
    ] = None,
    max_turns: Annotated[
        int | None, typer.Option(min=1, help="Turns a game.", show_default="the game's own", rich_help_panel="Game")
    ] = None,
    games: Annotated[
        int | None,
        typer.Option(min=1, help="How many.", show_default="20, or all rows of --dataset", rich_help_panel="Game"),
    ] = None,
    seed_start: Annotated[
        int, typer.Option(min=0, help="The first game's seed; the others count up.", rich_help_panel="Game")
    ] = HELD_OUT_SEED,
    dataset: Annotated[
        Path | None,
        typer.Option(help="Play the rows of this file (JSON lines) instead of seeds.", rich_help_panel="Game"),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"Who plays: {MODEL}, one of the game's policies (Sudoku has random, hints, solver), "
            "module:function or path.py:function.",
            rich_help_panel="Player",
        ),
    ] = MODEL,
    model: Annotated[
        str | None, typer.Option(help="Folder or name of the model, for --policy model.", rich_help_panel="Player")
    ] = None,
    engine: Annotated[
        str, typer.Option(metavar="NAME", help=f"What samples: {', '.join(ENGINES)}.", rich_help_panel="Player")
    ] = "transformers",
    engine_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A keyword of the engine, such as base_url=… for openai; repeatable.",
            rich_help_panel="Player",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens a turn.", rich_help_panel="Player")] = 512,
    temperature: Annotated[
        float, typer.Option(min=0, help="Of sampling; 0 is greedy.", rich_help_panel="Player")
    ] = 1.0,
    top_p: Annotated[
        float, typer.Option(min=0.001, max=1, help="Nucleus sampling; 1 is off.", rich_help_panel="Player")
    ] = 1.0,
    sampling_seed: Annotated[int, typer.Option(min=0, help="Makes sampling repeatable.", rich_help_panel="Player")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Games at a time.", rich_help_panel="Run")] = 16,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for the results.", show_default="a new one in results", rich_help_panel="Run"),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the results in --output; scored games are not played again. Give the same options, "
            "--games may be more.",
            rich_help_panel="Run",
        ),
    ] = False,
    max_unscored: Annotated[
        int, typer.Option(min=0, help="So many games may fail before the exit code is 1.", rich_help_panel="Run")
    ] = 0,
    compared: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", metavar="A B", help="Play nothing, and do what the command compare does."),
    ] = None,
) -> None:
    """Play games with a model or another player, and say how well it did.

    Every game goes into OUTPUT/trajectories.jsonl as soon as it ends; OUTPUT/results.json has what they come to.

    Exit codes: 0; 1 when more games than --max-unscored could not be scored; 2 for wrong use; 130 when interrupted.

    Example: openenv-rollout eval --serve Sudoku-v0-very-easy --policy solver --games 20 --output results/solver
    """
    with ending_well():
        if compared is not None:
            _refuse_others(context, "compared")
            _compare(*compared)
            return
        if resume and output is None:
            raise WrongUse("--resume: name the folder of the evaluation with --output")
        if serve is not None and base_url is not None:
            raise WrongUse("--serve and --base-url: one server is enough; leave one of them out")
        if serve is not None:
            server_process()  # is it there?
            scheduler = scheduler or scheduler_for(serve)
        if scheduler is None:
            raise WrongUse("name what plays: --scheduler module:Class, or --serve ENV_ID in the checkout")
        options = pairs("--option", option or ())
        settings = Settings(
            scheduler=scheduler,
            options=options if difficulty is None else {**options, "difficulty": difficulty},
            max_turns=max_turns,
            policy=policy,
            engine=engine,
            engine_options=pairs("--engine-option", engine_option or ()),
            model=model,
            serve=serve,
            seed_start=seed_start,
            dataset=None if dataset is None else str(dataset),
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            sampling_seed=sampling_seed,
        )
        folder = output or Path("results") / datetime.now().strftime("%Y%m%d-%H%M%S")
        evaluation = Evaluation(settings, folder, games=games, resume=resume)
        unscored = _run(evaluation, base_url=base_url, concurrency=concurrency, max_unscored=max_unscored)
    if unscored > max_unscored:
        raise typer.Exit(1)


def _run(evaluation: Evaluation, *, base_url: str | None, concurrency: int, max_unscored: int) -> int:
    """Play, show what came of it, and return how many games could not be scored."""
    results = evaluation.results
    try:
        with live(Console(stderr=True), evaluation.total) as progress:
            evaluation.run(base_url=base_url, concurrency=concurrency, progress=progress, max_unscored=max_unscored)
    except KeyboardInterrupt:
        kept = f"{len(results.games)} of {evaluation.total} games are in {results.folder}; --resume goes on"
        say(f"stopped: {kept}" if results.games else "stopped before the first game was over")
        raise
    summary = summarise(results.games)
    settings = evaluation.settings
    player = settings.model if settings.policy == MODEL else settings.policy
    title = f"{player}, {settings.serve or settings.scheduler}"
    Console().print(summary_table(summary, title=title, games_per_minute=results.games_per_minute))
    say(f"results: {results.folder}")
    if len(results.games) < evaluation.total:
        say(f"stopped: none of the first {len(results.games)} games could be scored", error=True)
    if summary.first_error is not None:
        say(f"first error: {summary.first_error}; tracebacks are in {results.folder}/eval.log", error=True)
    return summary.unscored


@app.command("compare", context_settings=_WIDE)
def compare_(
    first: Annotated[Path, typer.Argument(metavar="A", help="Folder or file of an evaluation or a training run.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another one of the same games.")],
) -> None:
    """Compare two evaluations game by game: games of the same seed are paired.

    Of a training run, the held-out games after it count.

    The intervals are those of the difference: Agresti and Min's for shares, the normal one of paired differences else.

    Example: openenv-rollout compare results/before results/after
    """
    with ending_well():
        _compare(first, second)


def _compare(first: Path, second: Path) -> None:
    one, other = _games(first), _games(second)
    differences = compare(one, other)
    if not differences:
        raise WrongUse(f"{first} and {second} have no scored game in common; evaluate the same seeds in both")
    if strange := began_differently(one, other):
        what = f"{strange} pairs of the same seed began with different games, whose difference means little"
        warn("warning", f"{what}; was it another game, or does the environment ignore its seed?", style="yellow")
    Console().print(comparison_table(differences, first="A", second="B"))
    pairs_ = max(difference.change.count for difference in differences.values())
    for name, path, games in (("A", first, one), ("B", second, other)):
        say(f"{name}: {path}, {len(games)} games, {len(games) - pairs_} of them unscored or without a counterpart")


@app.command("rescore", context_settings=_WIDE)
def rescore_(
    file: Annotated[Path, typer.Argument(help="Folder or file of an evaluation or a training run.")],
    *,
    weights: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Weight of a reward component; repeatable."),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A registered name, module:Class or path.py:Class, such as your game with changed rewards.",
            show_default="the one that played",
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A keyword of the scheduler; repeatable. Others stay as they were."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="The file to write.", show_default="FILE with .rescored before its ending")
    ] = None,
) -> None:
    """Score recorded games anew, with the reward code as it is now or other weights. Nothing is sampled or served.

    Each game is played again from its record: the model says what it said, the environment answers what it answered. A
    scheduler that would have sent other moves cannot be scored that way; the first such game ends the command.

    Example: openenv-rollout rescore results/solver --weights correct_reward=5
    """
    with ending_well():
        path = trajectories_of(file)
        target = output or path.with_suffix(f".rescored{path.suffix}")
        if target.exists():
            raise WrongUse(f"{target} is there already; remove it, or name another --output")
        options = pairs("--option", option or ())
        if weights:
            options["reward_weights"] = pairs("--weights", weights)
        before, after = _rescore_into(target, path, scheduler, options)
        differences = compare(before, after)
        changed = {name: d for name, d in differences.items() if d.first != d.second or name == "total_reward"}
        Console().print(comparison_table(changed, first="before", second="after"))
        say(f"{len(after)} games: {target}")


def _rescore_into(
    target: Path, path: Path, scheduler: str | None, options: dict[str, Any]
) -> tuple[list[Game], list[Game]]:
    """Write the file, whole or not at all; returns the games as they were and as they are now."""
    logging.getLogger("schedulers").addHandler(logging.NullHandler())  # what fails is said once
    before: list[Game] = []
    after: list[Game] = []
    part = target.with_name(f"{target.name}.part")
    try:
        part.unlink(missing_ok=True)
        with TrajectoryWriter(part) as writer:
            for number, record in enumerate(_records(path), 1):
                make, played_by = _maker(record, scheduler, options)
                try:
                    new = {**rescore(record, make), "played_by": played_by}
                except (RescoreError, TypeError) as error:
                    raise WrongUse(f"{path}, line {number}: {error}") from error
                writer.write_records([new])
                before.append(Game.of(record))
                after.append(Game.of(new))
        if not any(game.error is None for game in before):
            raise WrongUse(f"{path} has no scored game")
        part.replace(target)
    except OSError as error:
        raise WrongUse(f"--output {target}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    return before, after


def _maker(
    record: dict[str, Any], scheduler: str | None, options: dict[str, Any]
) -> tuple[Callable[..., RolloutScheduler], dict[str, Any]]:
    """What makes the scheduler for a record, and how that is told to the next reader."""
    played_by = record.get("played_by") or {}
    name = scheduler or played_by.get("scheduler")
    if name is None:
        raise WrongUse("the records do not say what played them; name it with --scheduler")
    options = {**(played_by.get("options") or {}), **options}
    try:
        make = partial(construct, scheduler_named(name), f"--scheduler {name}")
    except WrongUse as error:
        remedy = "" if scheduler else ". That is what played, by the record; name with --scheduler where it is now"
        raise WrongUse(f"{error}{remedy}") from error
    return partial(make, **options), {"scheduler": name, "options": options}


def _records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        yield from read_trajectories(path)
    except ValueError as error:
        raise WrongUse(str(error)) from error


def _games(path: Path) -> list[Game]:
    """All games of an evaluation, and of a training run the held-out ones after it."""
    records = _records(trajectories_of(path))
    games = [Game.of(record) for record in records if record.get("phase", "after") == "after"]
    if not games:
        raise WrongUse(f"{path} has no game that could be compared; of a training run, those after the training count")
    return games


def _refuse_others(context: typer.Context, name: str) -> None:
    """Refuse options that would have no effect beside this one."""
    for param in context.command.params:
        source = context.get_parameter_source(param.name or "")
        if param.name != name and source is not None and source.name != "DEFAULT":
            raise WrongUse(f"--compare plays nothing: leave {param.opts[0]} out")
