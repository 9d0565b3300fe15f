"""Keeps OpenEnv's web page out of this process, as the start script does: importing it takes seconds."""

from __future__ import annotations

import sys

sys.modules["openenv.core.env_server.web_interface"] = None  # type: ignore[assignment]
