"""Trajectories to JSON lines and back."""

from __future__ import annotations

import functools
import json
import logging
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from schedulers.types import RolloutOutput

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SCHEMA_VERSION", "TrajectoryWriter", "installed_versions", "keep_trajectories", "read_trajectories"]

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 2
"""2 added ``versions``, ``start`` and ``turns`` to what 1 had."""

_FIELDS = (
    "uuid",
    "messages",
    "response_token_ids",
    "response_loss_mask",
    "rollout_logprobs",
    "prompt_token_ids",
    "completion_token_ids",
    "completion_mask",
    "completion_logprobs",
    "rollout_infos",
    "start",
    "turns",
)
_PACKAGES = ("openenv-client", "openenv", "textarena", "torch", "transformers", "trl", "vllm", "openai")


class TrajectoryWriter:
    """Appends trajectories to a file, one JSON object a line; what was written survives whatever happens next.

    Args:
        path: The file; its folder is made if need be.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, outputs: Iterable[RolloutOutput], **labels: Any) -> list[dict[str, Any]]:
        """Append trajectories.

        Args:
            outputs: What ``async_infer`` returned.
            labels: Further fields of each line, such as ``step=3``.

        Returns:
            What was written.
        """
        common = {"versions": installed_versions(), **labels}
        records = [{**common, **{name: getattr(output, name) for name in _FIELDS}} for output in outputs]
        self.write_records(records)
        return records

    def write_records(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records as ``read_trajectories`` gives them, all at once."""
        # A lone surrogate of a model's text cannot be written as UTF-8; escaped it can.
        lines = [json.dumps({"schema_version": SCHEMA_VERSION, **r}, default=_jsonable) + "\n" for r in records]
        self._file.write("".join(lines))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def read_trajectories(path: str | Path) -> Iterator[dict[str, Any]]:
    """The lines of a file that ``TrajectoryWriter`` wrote; docs/reference/recording.md says what is in them.

    Records of schema version 1 are read as if they were of this one, with None for what they lack. A last line without
    its end, cut while it was written, is left out with a warning.

    Raises:
        ValueError: A line is no such record, or of a later version; names the line.
    """
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                logger.warning("%s, line %d was cut while it was written and is left out", path, number)
                return
            yield _parse(line, f"{path}, line {number}")


def keep_trajectories(path: str | Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Drop the records of a file that are not wanted, and a last line that was cut while it was written.

    Args:
        path: The file; nothing happens if there is none.
        wanted: Whether to keep a record.

    Raises:
        ValueError: A line is no record; names the line. The file is then as it was.
    """
    path = Path(path)
    if not path.exists():
        return
    temporary = path.with_name(f"{path.name}.part")
    with path.open("rb") as lines, temporary.open("wb") as kept:
        for number, line in enumerate(lines, 1):
            if line.endswith(b"\n") and wanted(_parse(line, f"{path}, line {number}")):
                kept.write(line)
    temporary.replace(path)


@functools.cache
def installed_versions() -> dict[str, str]:
    """Of Python, this package and what rollouts are made with, as far as it is installed."""
    found = ((name, _version(name)) for name in _PACKAGES)
    return {"python": platform.python_version(), **{name: version for name, version in found if version is not None}}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(line)
        schema = record["schema_version"]
    except (ValueError, KeyError, TypeError) as error:
        why = "it has no schema_version" if isinstance(error, KeyError) else error
        raise ValueError(f"{where}: not a recorded trajectory ({why})") from error
    if schema == 1:
        return {**record, "schema_version": SCHEMA_VERSION, "versions": None, "start": None, "turns": None}
    if schema != SCHEMA_VERSION:
        raise ValueError(
            f"{where}: schema version {schema}, this reader knows 1 and {SCHEMA_VERSION}; read it with the version of "
            "openenv-client that wrote it"
        )
    return record


def _jsonable(value: Any) -> Any:
    return asdict(value) if hasattr(value, "__dataclass_fields__") and not isinstance(value, type) else str(value)
