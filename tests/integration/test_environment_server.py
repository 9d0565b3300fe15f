"""The environment server as clients meet it."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from websockets.sync.client import connect

from server_scripts.launch import ServerProcess


def test_sixteen_sessions_at_once_get_the_games_of_their_seeds(
    environment_server: Callable[..., ServerProcess],
) -> None:
    """S13: Sessions with the same seed see the same board whatever the others do; those without see different ones."""
    server = environment_server(env_id="Sudoku-v0-very-easy", max_concurrent_envs=16)

    def first_board(seed: int | None) -> Any:
        with connect(server.base_url.replace("http", "ws") + "/ws") as session:
            session.send(json.dumps({"type": "reset", "data": {"seed": seed}}))
            return json.loads(session.recv())["data"]["observation"]["board"]

    with ThreadPoolExecutor(16) as pool:
        boards = list(pool.map(first_board, [1, None] * 8))
    seeded, unseeded = boards[0::2], boards[1::2]
    assert all(board == seeded[0] for board in seeded)
    assert len({str(board) for board in unseeded}) == len(unseeded)
    server.wait_until_idle()
