"""The web application, in this process: sessions, capacity, and sessions that do not hold each other up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import textarena
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from textarena.envs.registration import ENV_REGISTRY

from server_scripts.textarena_app import create_app
from server_scripts.textarena_games import GameSource

RESET = {"type": "reset", "data": {}}


def step(message: str) -> dict[str, Any]:
    return {"type": "step", "data": {"message": message}}


class Sleeper(textarena.Env):  # type: ignore[misc]
    """A game whose step ``[sleep]`` ends when the test says so."""

    sleeping = threading.Event()
    wake = threading.Event()

    def reset(self, num_players: int, seed: int | None = None) -> None:
        self.state = textarena.SinglePlayerState(num_players=num_players, seed=seed)
        self.state.reset(game_state={}, player_prompt_function=lambda player_id, game_state: "Sleep?")

    def step(self, action: str) -> Any:
        if action == "[sleep]":
            self.sleeping.set()
            self.wake.wait()
        return self.state.step()


@pytest.fixture
def client() -> Iterator[TestClient]:
    textarena.register(id="Sleeper-v0", entry_point=Sleeper)
    try:
        with TestClient(create_app(GameSource("Sleeper-v0"), max_concurrent_envs=2)) as client:
            yield client
    finally:
        del ENV_REGISTRY["Sleeper-v0"]


def test_a_session_that_blocks_does_not_hold_up_another(client: TestClient) -> None:
    """S08: While one session's step is being made, another session's step and the health check are answered."""
    with client.websocket_connect("/ws") as blocked, client.websocket_connect("/ws") as other:
        for session in (blocked, other):
            session.send_json(RESET)
            session.receive_json()
        blocked.send_json(step("[sleep]"))
        Sleeper.sleeping.wait()
        try:
            other.send_json(step("[hello]"))
            assert other.receive_json()["type"] == "observation"
            assert client.get("/health").json() == {"status": "healthy"}
        finally:
            Sleeper.wake.set()
        assert blocked.receive_json()["type"] == "observation"


def test_a_full_server_says_so_and_its_slots_come_back(client: TestClient) -> None:
    """S01: One session too many is told how many are open and allowed; a closed session frees its slot."""
    with client.websocket_connect("/ws") as first, client.websocket_connect("/ws") as second:
        for session in (first, second):
            session.send_json(RESET)
            session.receive_json()
        assert client.get("/sessions").json() == {"active": 2, "max": 2}
        with client.websocket_connect("/ws") as refused:
            error = refused.receive_json()["data"]
        assert (error["code"], error["active_sessions"], error["max_sessions"]) == ("CAPACITY_REACHED", 2, 2)
    assert client.get("/sessions").json() == {"active": 0, "max": 2}


def test_a_refused_request_costs_that_request_only(client: TestClient) -> None:
    """An unknown setting and a step that comes too early are errors; the session goes on."""
    with client.websocket_connect("/ws") as session:
        for request, message in (
            (step("[hello]"), "call reset before step"),
            ({"type": "reset", "data": {"sed": 1}}, "Unknown reset setting 'sed'"),
        ):
            session.send_json(request)
            answer = session.receive_json()
            assert (answer["type"], answer["data"]["code"]) == ("error", "EXECUTION_ERROR")
            assert message in answer["data"]["message"]
        session.send_json(RESET)
        assert session.receive_json()["type"] == "observation"


def test_a_refused_request_over_http_is_the_callers_fault(client: TestClient) -> None:
    answer = client.post("/reset", json={"sed": 1})
    assert (answer.status_code, "Unknown reset setting 'sed'" in answer.json()["detail"]) == (400, True)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/reset", b"no JSON", 422),
        ("/reset", b'{"seed": NaN}', 422),
        ("/reset", b'{"seed": "\\ud800"}', 422),
        ("/reset", b'{"\\ud800": 1}', 422),
        ("/reset", b'{"self": 1}', 400),
        ("/step", b'{"action": {"\\udfff": 1e999}}', 422),
        ("/step", b'{"action": {"message": "[1 1 1]"}}', 400),
        ("/Sleeper-v0/task", b'{"split": Infinity}', 422),
        ("/nowhere", b"{}", 404),
        ("/health", b"{}", 405),
    ],
)
def test_what_no_answer_could_repeat_is_refused_without_it(
    client: TestClient, path: str, body: bytes, status: int
) -> None:
    """Halves of surrogate pairs and infinite numbers have no JSON; they are the caller's fault, not the server's."""
    answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status
    assert answer.json()["detail"]


def test_no_session_is_made_without_a_connection_that_ends_it(client: TestClient) -> None:
    """OpenEnv would make one for each such request, and keep it for ever: these games have no tools for /mcp."""
    create = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"}
    assert client.post("/mcp", json=create).json()["error"]["message"] == "These games offer no tools."
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/mcp"):
        pass
    assert client.get("/sessions").json()["active"] == 0


def test_the_schema_names_the_fields(client: TestClient) -> None:
    schema = client.get("/schema").json()
    assert set(schema["observation"]["properties"]) >= {"prompt", "messages", "board", "solved", "refused", "info"}
    assert "message" in schema["action"]["properties"]
