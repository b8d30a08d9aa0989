"""The route by which a server proves itself to this user's faces."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from mlxpaged.chat.backend import LocalBackend
from mlxpaged.chat.servers import new_secret, proof
from mlxpaged.server.app import create_app
from mlxpaged.server.options import ServerOptions
from tests.scripted import ScriptedService

NONCE = "5e" * 32


def client(secret: str | None) -> TestClient:
    app = create_app(LocalBackend(ScriptedService(manual=True), name="scripted"), ServerOptions(secret=secret))
    return TestClient(app, base_url="http://127.0.0.1")


def test_a_nonce_is_answered_with_its_proof() -> None:
    secret = new_secret()
    answer = client(secret).get("/handshake", params={"nonce": NONCE})
    assert (answer.status_code, answer.json()) == (200, {"proof": proof(secret, NONCE)})


@pytest.mark.parametrize("nonce", ["", "5e", "5E" * 32, "zz" * 32, "5e" * 33])
def test_anything_but_a_nonce_is_refused(nonce: str) -> None:
    answer = client(new_secret()).get("/handshake", params={"nonce": nonce})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "nonce"


def test_without_a_secret_there_is_nothing_to_prove() -> None:
    assert client(None).get("/handshake", params={"nonce": NONCE}).status_code == 404
