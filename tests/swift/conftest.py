"""These tests need ms-swift, which needs other versions than TRL does: ``make swift-test`` runs them where it is."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

collect_ignore_glob: list[str] = []

if importlib.util.find_spec("swift") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it imports
        import swift.arguments
        import swift.infer_engine
        import swift.rollout

    from examples.sudoku.scheduler import SudokuScheduler
    from schedulers.trainers.swift import SwiftScheduler, register
    from tests.swift.native import POLICY, template_of


@pytest.fixture(scope="session")
def template() -> Any:
    """ms-swift's template of the embedded policy, with its tokenizer."""
    return template_of(POLICY)


@pytest.fixture
def make_scheduler(template: Any) -> Iterator[Any]:
    """Make a scheduler as ms-swift does: with an engine for server mode, else for colocate mode."""
    made: list[SwiftScheduler] = []

    def make(scheduler_class: Any = SudokuScheduler, engine: Any = None, **arguments: Any) -> SwiftScheduler:
        options = arguments.pop("options", {"max_concurrent_envs": 4})
        register("under_test", scheduler_class, options=options)
        given = {"infer_engine": engine} if engine else {"tokenizer": template.tokenizer, "template": template}
        made.append(swift.rollout.multi_turns["under_test"](**given, **arguments))
        return made[-1]

    yield make
    for scheduler in made:
        scheduler.close()
