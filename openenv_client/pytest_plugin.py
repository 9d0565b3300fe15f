"""The pytest fixture that comes with the package; pytest finds it by the entry point ``pytest11``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .testing import MockEnvServer

__all__ = ["mock_env_server"]


@pytest.fixture
def mock_env_server() -> Iterator[MockEnvServer]:
    """A running `MockEnvServer`; assign to ``script`` and call ``inject`` to make it do more than echo."""
    with MockEnvServer() as server:
        yield server
