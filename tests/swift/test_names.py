"""Every name in docs/reference/ms-swift-names.md exists, theirs and ours."""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import pytest
from swift.arguments import RLHFArguments, RolloutArguments
from swift.rollout import multi_turn

from tests.swift.native import ROOT

PAGE = (ROOT / "docs" / "reference" / "ms-swift-names.md").read_text(encoding="utf-8")
ROWS = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| ") and "`" in line]


def names(column: int) -> Iterator[str]:
    for row in ROWS:
        yield from re.findall(r"`([^`]+)`", row[column])


def exists(name: str) -> bool:
    """A dotted name, a field of a dataclass or of a pydantic model, or ``Class(parameter=)``."""
    if match := re.fullmatch(r"(.+)\((\w+)=\)", name):
        return match[2] in parameters(pkgutil.resolve_name(match[1]))
    owner, _, attribute = name.rpartition(".")
    holder = pkgutil.resolve_name(owner)
    fields = {field.name for field in dataclasses.fields(holder)} if dataclasses.is_dataclass(holder) else set()
    return hasattr(holder, attribute) or attribute in fields | getattr(holder, "model_fields", {}).keys()


def parameters(scheduler_class: Any) -> set[str]:
    return set(inspect.signature(scheduler_class).parameters)


@pytest.mark.parametrize("name", [*names(1), *(name for name in names(2) if name.startswith("schedulers."))])
def test_ours(name: str) -> None:
    assert exists(name)


@pytest.mark.parametrize("name", [*names(0)])
def test_theirs(name: str) -> None:
    if name.startswith("--"):
        known = {
            field.name for arguments in (RLHFArguments, RolloutArguments) for field in dataclasses.fields(arguments)
        }
        assert name.removeprefix("--") in known
    elif match := re.fullmatch(r'rollout_infos\["(\w+)"\]', name):
        assert f"'{match[1]}'" in inspect.getsource(multi_turn)
    else:
        assert exists(name)


def test_the_page_has_tables() -> None:
    assert len(ROWS) > 50
