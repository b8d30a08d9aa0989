"""API keys, and what a server that others can reach lets them do."""

from __future__ import annotations

import httpx
import pytest

from mlxpaged.chat.servers import key_of, new_secret
from mlxpaged.server.keys import CONTROL_PATHS
from mlxpaged.server.options import ServerOptions
from tests.server.conftest import Serve

HELLO = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"
KEYS = ("the-first-key", "the-second-key")


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer the-first-key"},
        {"authorization": "bearer  the-second-key"},
        {"x-api-key": "the-second-key"},
        {"authorization": "Bearer the-first-key", "x-api-key": "made-up"},
    ],
)
def test_each_key_is_taken_in_either_header(serve: Serve, headers: dict[str, str]) -> None:
    server = serve(options=ServerOptions(api_keys=KEYS))
    assert server.http.post(CHAT, json=HELLO, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer the-first-keyx"},
        {"authorization": "Basic the-first-key"},
        {"authorization": "Bearer"},
        {"x-api-key": "the-first"},
        {"x-api-key": "\xff\xfe".encode("latin-1")},
    ],
)
def test_any_other_is_a_401_before_anything_runs(serve: Serve, headers: dict) -> None:
    server = serve(options=ServerOptions(api_keys=KEYS))
    answer = server.http.post(CHAT, json=HELLO, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (401, "authentication_error", "invalid_api_key")
    assert "the-first-key" not in answer.text and server.service.submitted == []
    for path in ("/v1/models", "/v1/kv", "/version", "/nothing"):
        assert server.http.get(path, headers=headers).status_code == 401


def test_health_root_and_a_preflight_need_no_key(serve: Serve) -> None:
    server = serve(options=ServerOptions(api_keys=KEYS))
    for path in ("/", "/health", "/v1/health", "/metrics"):
        assert server.http.get(path).status_code == 200
    asking = {"origin": "http://localhost:3000", "access-control-request-method": "POST"}
    assert server.http.options(CHAT, headers=asking).status_code == 200
    refused = server.http.post(CHAT, json=HELLO, headers={"origin": "http://localhost:3000"})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "http://localhost:3000")


def test_without_keys_any_key_is_fine(serve: Serve) -> None:
    server = serve()
    assert server.http.post(CHAT, json=HELLO, headers={"authorization": "Bearer none"}).status_code == 200


def test_this_users_faces_have_a_key_of_their_own(serve: Serve) -> None:
    secret = new_secret()
    server = serve(options=ServerOptions(api_keys=KEYS, secret=secret))
    assert server.http.get("/v1/models", headers={"x-api-key": key_of(secret)}).status_code == 200
    assert server.http.get("/v1/models", headers={"x-api-key": secret}).status_code == 401


@pytest.mark.parametrize("path", sorted(CONTROL_PATHS))
def test_a_keyless_server_open_to_others_is_not_controlled_over_http(serve: Serve, path: str) -> None:
    body = {"model": "scripted"}
    assert serve(options=ServerOptions(loopback=False)).http.post(path, json=body).status_code == 403
    keyed = serve(options=ServerOptions(loopback=False, api_keys=KEYS)).http
    assert keyed.post(path, json=body).status_code == 401
    assert keyed.post(path, json=body, headers={"x-api-key": KEYS[0]}).status_code == 200
    assert keyed.get("/metrics").status_code == 401
    assert serve().http.post(path, json=body).status_code == 200


def test_an_anthropic_client_reads_its_own_shape_of_refusal(serve: Serve) -> None:
    server = serve(options=ServerOptions(api_keys=KEYS))
    answer = server.http.post("/v1/messages", json={}, headers={"x-api-key": "wrong"})
    assert answer.json()["type"] == "error" and answer.json()["error"]["type"] == "authentication_error"


def test_keys_are_in_no_log_and_no_representation(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    options = ServerOptions(api_keys=KEYS)
    server = serve(options=options)
    with caplog.at_level("DEBUG"):
        for key in (*KEYS, "wrong-key-1"):
            httpx.get(f"{server.url}/v1/models", headers={"x-api-key": key}, trust_env=False)
    assert not any(key in caplog.text or key in repr(options) for key in (*KEYS, "wrong-key-1"))
