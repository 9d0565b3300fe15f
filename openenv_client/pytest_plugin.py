"""The pytest fixture that comes with the package; pytest finds it by the entry point ``pytest11``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .testing import MockEnvServer

__all__ = ["mock_env_server"]


@pytest.fixture
def mock_env_server() -> Iterator[MockEnvServer]:
    """A running `MockEnvServer`. Assign to ``script`` and call ``inject`` to make it do more than echo."""
    from .testing import MockEnvServer  # here, since every run of pytest loads this module, of whatever project

    with MockEnvServer() as server:
        yield server
