"""Marks every test of this folder, so that ``-m "not integration"`` leaves out those that start a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

_FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the marker ``integration``."""
    for item in items:
        if item.path.is_relative_to(_FOLDER):
            item.add_marker("integration")
