"""What to say when a library of an extra cannot be imported."""

from __future__ import annotations

import importlib.util

__all__ = ["missing_extra"]


def missing_extra(what: str, extra: str, *libraries: str) -> ImportError:
    """The error for a library that is not there, or behind a file of the user's that has its name.

    Args:
        what: What needs which libraries.
        extra: The extra that brings them.
        libraries: Their names; all of them are packages, never a single file.
    """
    for name in libraries:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is None:
            return ImportError(f"{what}, but {spec.origin} is found in the place of {name}: rename that file")
    return ImportError(f'{what}: pip install "openenv-client[{extra}]"')
