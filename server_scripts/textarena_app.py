"""The web application: OpenEnv's routes for TextArena games, and one that counts the sessions."""

from __future__ import annotations

import functools
import os
import threading
from types import FrameType

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from openenv.core.env_server.http_server import HTTPEnvServer

from server_scripts.textarena_environment import (
    RequestError,
    TextArenaAction,
    TextArenaEnvironment,
    TextArenaObservation,
    TextArenaState,
)
from server_scripts.textarena_games import GameSource

__all__ = ["Server", "create_app"]

_GRACE_SECONDS = 2.0


class Server(uvicorn.Server):
    """A uvicorn server that a signal stops within two seconds, whatever the games are doing.

    By then the sockets are closed. What may be left is a thread that makes a puzzle for nobody; it cannot be
    interrupted, and uvicorn and Python would wait for it.
    """

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start to stop, and make sure of the end."""
        super().handle_exit(sig, frame)
        leave = threading.Timer(_GRACE_SECONDS, os._exit, [128 + sig])
        leave.daemon = True
        leave.start()


def create_app(source: GameSource, *, max_concurrent_envs: int) -> FastAPI:
    """Make the application.

    Besides OpenEnv's own routes (WebSocket ``/ws``; ``/health``, ``/metadata``, ``/schema``, ``/docs``) it answers
    ``GET /sessions`` with ``{"active": int, "max": int}``.

    Args:
        source: Makes the games of all sessions.
        max_concurrent_envs: How many sessions may be open at a time; further ones are told that the server is full.
    """
    server = HTTPEnvServer(
        functools.partial(TextArenaEnvironment, source),
        TextArenaAction,
        TextArenaObservation,
        max_concurrent_envs=max_concurrent_envs,
        env_name=source.env_id,
        state_cls=TextArenaState,
    )
    app = FastAPI(title=f"{source.env_id} (TextArena, OpenEnv)")
    server.register_routes(app)

    @app.get("/sessions", tags=["Health"], summary="Count the open sessions")
    async def sessions() -> dict[str, int]:
        return {"active": server.active_sessions, "max": server.max_concurrent_envs}

    @app.exception_handler(RequestError)
    async def refuse(request: Request, error: RequestError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=400)

    return app
