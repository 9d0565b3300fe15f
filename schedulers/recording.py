"""Trajectories to JSON lines and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from schedulers.types import RolloutOutput

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SCHEMA_VERSION", "TrajectoryWriter", "keep_trajectories", "read_trajectories"]

SCHEMA_VERSION = 1
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
)


class TrajectoryWriter:
    """Appends trajectories to a file, one JSON object a line; what was written survives whatever happens next.

    Args:
        path: The file; its folder is made if need be.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, outputs: Iterable[RolloutOutput], **labels: Any) -> None:
        """Append trajectories.

        Args:
            outputs: What ``async_infer`` returned.
            labels: Further fields of each line, such as ``step=3``.
        """
        for output in outputs:
            record = {name: getattr(output, name) for name in _FIELDS}
            line = {"schema_version": SCHEMA_VERSION, **labels, **record}
            # A lone surrogate of a model's text cannot be written as UTF-8; escaped it can.
            self._file.write(json.dumps(line, default=_jsonable) + "\n")
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
    """The lines of a file that ``TrajectoryWriter`` wrote.

    Raises:
        ValueError: A line is no such record; names the line.
    """
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                version = record["schema_version"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: not a recorded trajectory ({error})") from error
            if version != SCHEMA_VERSION:
                raise ValueError(f"{path}, line {number}: schema version {version}, this reader knows {SCHEMA_VERSION}")
            yield record


def keep_trajectories(path: str | Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Drop the records of a file that are not wanted, and a last line that was cut while it was written.

    Args:
        path: The file; nothing happens if there is none.
        wanted: Whether to keep a record.
    """
    path = Path(path)
    if not path.exists():
        return
    temporary = path.with_name(f"{path.name}.part")
    with path.open(encoding="utf-8") as lines, temporary.open("w", encoding="utf-8") as kept:
        kept.writelines(line for line in lines if line.endswith("\n") and wanted(json.loads(line)))
    temporary.replace(path)


def _jsonable(value: Any) -> Any:
    return asdict(value) if hasattr(value, "__dataclass_fields__") and not isinstance(value, type) else str(value)
