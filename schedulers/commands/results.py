"""The folder of an evaluation: its games one by one, what they come to, and how they were played."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from schedulers.commands.names import WrongUse
from schedulers.evaluation import INTERVALS, Game, summarise
from schedulers.recording import TrajectoryWriter, installed_versions, keep_trajectories, read_trajectories
from schedulers.types import RolloutOutput

__all__ = ["Results", "trajectories_of"]

_RESULTS = "results.json"
_TRAJECTORIES = "trajectories.jsonl"
_LOG = "eval.log"


class Results:
    """What an evaluation has so far; a game is on disk as soon as it is added.

    Args:
        folder: Where everything goes; made when the first game is expected (`open`).
        settings: How the games are played, as JSON.
        resume: Take up what is there: games that were scored are kept, others can be played again. Without it a folder
            is refused that has such games.

    Attributes:
        games: What is known of each game.
        numbers: Those that need not be played any more.
        seconds: How long this run has taken.

    Raises:
        WrongUse: The folder holds other results, or none to resume.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, resume: bool) -> None:
        self.folder = folder
        self.games: list[Game] = []
        self.numbers: set[int] = set()
        self.seconds = 0.0
        self._settings = json.loads(json.dumps(settings))
        self._started = _now()
        self._before = 0
        self._path = folder / _RESULTS
        if resume or self._path.exists():
            self._take_up(resume=resume)

    @property
    def games_per_minute(self) -> float | None:
        """How fast this run is; None before its first game."""
        played = len(self.games) - self._before
        return 60 * played / self.seconds if played and self.seconds else None

    @contextlib.contextmanager
    def open(self) -> Iterator[TrajectoryWriter]:
        """Write games, and at the end, however it comes, what they come to; warnings go into a log."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.save(complete=False)
            with _log_to(self.folder / _LOG), TrajectoryWriter(self.folder / _TRAJECTORIES) as writer:
                yield writer
        except OSError as error:
            raise WrongUse(f"--output {self.folder}: {error.strerror or error}") from error

    def add(self, writer: TrajectoryWriter, outputs: Sequence[RolloutOutput], **labels: Any) -> None:
        """Add what came of a game, with its labels ``game``, ``seed`` and so on."""
        self.games += map(Game.of, writer.write(outputs, **labels))

    def save(self, *, complete: bool) -> None:
        """Write what the games come to; never half a file."""
        speed = self.games_per_minute
        content = {
            "complete": complete,
            "started": self._started,
            "saved": _now(),
            "games_per_minute": None if speed is None else round(speed, 3),
            "settings": self._settings,
            "versions": installed_versions(),
            "intervals": INTERVALS,
            "summary": summarise(self.games).as_dict(),
        }
        temporary = self._path.with_suffix(".part")
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        temporary.replace(self._path)

    def _take_up(self, *, resume: bool) -> None:
        """Take over the games that were scored. Where there are none, the evaluation is as good as not begun."""
        if not self._path.exists():
            raise WrongUse(f"--resume: there are no results in {self.folder}; leave --resume out to begin")
        saved = read_results(self._path)
        path = self.folder / _TRAJECTORIES
        try:
            records = [record for record in read_trajectories(path) if _scored(record)] if path.exists() else []
        except ValueError as error:
            raise WrongUse(f"--resume: {error}" if resume else str(error)) from error
        if records and not resume:
            raise WrongUse(f"{self.folder} holds results already; --resume goes on with them, or name another --output")
        for name, value in self._settings.items() if records else ():
            if _without_address(value) != _without_address(saved["settings"].get(name)):
                raise WrongUse(
                    f"--resume: the results in {self.folder} are of {name} {saved['settings'].get(name)!r}, not "
                    f"{value!r}; give the options that it was started with (only --games may be others)"
                )
        keep_trajectories(path, _scored)
        if records:
            self._started = saved.get("started", self._started)
        self.games = [Game.of(record) for record in records]
        self.numbers = {record["game"] for record in records}
        self._before = len(self.games)


def _without_address(value: Any) -> Any:
    """A setting, less where a server of the engine was: it may be another one after an interruption."""
    return {k: v for k, v in value.items() if k != "base_url"} if isinstance(value, dict) else value


def _scored(record: Mapping[str, Any]) -> bool:
    return record["rollout_infos"].get("total_reward") is not None


def read_results(path: Path) -> dict[str, Any]:
    """Read what `Results` has saved.

    Raises:
        WrongUse: It is no such file.
    """
    try:
        results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        dict(results["settings"])
    except (ValueError, KeyError, TypeError) as error:
        raise WrongUse(f"{path} holds no results of an evaluation; name another folder ({error})") from error
    return results


def trajectories_of(path: Path) -> Path:
    """The trajectories of an evaluation or a training run.

    Args:
        path: Its folder, its results (a file of JSON in that folder), or the trajectories themselves.

    Raises:
        WrongUse: There are none.
    """
    if path.is_dir():
        path /= _TRAJECTORIES
    elif path.suffix == ".json":
        path = path.with_name(_TRAJECTORIES)
    if not path.is_file():
        raise WrongUse(f"{path}: no such file; name the folder of an evaluation or a run, or a file of trajectories")
    return path


@contextlib.contextmanager
def _log_to(path: Path) -> Iterator[None]:
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
