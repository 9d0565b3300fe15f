from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from openenv_client import OpenEnvWrapper
from openenv_client.testing import MockEnvServer

MakeWrapper = Callable[..., OpenEnvWrapper]


@pytest.fixture
def server() -> Iterator[MockEnvServer]:
    with MockEnvServer() as mock:
        yield mock


@pytest.fixture
def make(server: MockEnvServer) -> Iterator[MakeWrapper]:
    """Makes wrappers of the server that are closed at the end."""
    wrappers: list[OpenEnvWrapper] = []

    def make_wrapper(**settings: object) -> OpenEnvWrapper:
        settings = {"base_url": server.base_url, "close_timeout": 0.2, **settings}
        wrappers.append(OpenEnvWrapper(**settings))  # type: ignore[arg-type]
        return wrappers[-1]

    yield make_wrapper
    for wrapper in wrappers:
        wrapper.close()


@pytest.fixture
def env(make: MakeWrapper) -> OpenEnvWrapper:
    """A wrapper of the server, reset."""
    wrapper = make()
    wrapper.reset()
    return wrapper
