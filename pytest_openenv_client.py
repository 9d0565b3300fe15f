"""The pytest fixture that comes with the package; pytest finds it by the entry point ``pytest11``.

Every run of pytest loads this module, of whatever project. So it is no part of ``openenv_client``, whose import would
bring websockets with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from openenv_client.testing import MockEnvServer

__all__ = ["mock_env_server"]


@pytest.fixture
def mock_env_server() -> Iterator[MockEnvServer]:
    """A running `MockEnvServer`. Assign to ``script`` and call ``inject`` to make it do more than echo."""
    from openenv_client.testing import MockEnvServer

    with MockEnvServer() as server:
        yield server
