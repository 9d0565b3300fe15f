"""The web application: OpenEnv's routes for TextArena games, and one that counts the sessions."""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Mapping
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from openenv.core.env_server.http_server import HTTPEnvServer
from starlette.exceptions import HTTPException
from starlette.responses import Response

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
    ``GET /sessions`` with ``{"active": int, "max": int}``. ``/mcp`` answers that there are no tools.

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
    # Over OpenEnv's /mcp anybody can make sessions that have no connection to end them.
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) != "/mcp"]

    @app.post("/mcp", tags=["MCP"], summary="Say that there are no tools")
    async def mcp() -> dict[str, Any]:
        return {"jsonrpc": "2.0", "id": None, "error": {"code": -32601, "message": "These games offer no tools."}}

    @app.get("/sessions", tags=["Health"], summary="Count the open sessions")
    async def sessions() -> dict[str, int]:
        return {"active": server.active_sessions, "max": server.max_concurrent_envs}

    @app.exception_handler(RequestError)
    @app.exception_handler(TypeError)  # OpenEnv passes the names in a body on as keywords; "self" is taken
    async def refuse(request: Request, error: Exception) -> Response:
        return _refusal(400, str(error))

    @app.exception_handler(RequestValidationError)
    async def refuse_body(request: Request, error: RequestValidationError) -> Response:
        return _refusal(422, error.errors())

    @app.exception_handler(HTTPException)
    async def refuse_request(request: Request, error: HTTPException) -> Response:
        return _refusal(error.status_code, error.detail, error.headers)

    return app


def _refusal(status: int, detail: Any, headers: Mapping[str, str] | None = None) -> Response:
    """What is wrong with a request, without its own values: FastAPI fails at some, such as half a surrogate pair."""
    if not isinstance(detail, str):
        detail = [{name: error[name] for name in ("type", "loc", "msg")} for error in detail]
    return Response(json.dumps({"detail": detail}), status, headers, media_type="application/json")
