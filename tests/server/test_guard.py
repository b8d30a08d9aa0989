"""Who may speak to the server, in what wrapping, and under which paths."""

from __future__ import annotations

import json
import socket
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import pytest

from mlxpaged.server.guard import normal_path
from mlxpaged.server.options import ServerOptions
from tests.scripted import ScriptedService
from tests.server.conftest import Serve

HELLO = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8642", "127.0.0.1:1", "[::1]:8642", "a.localhost", "10.0.0.7"]
)
def test_names_of_this_machine_are_answered(serve: Serve, host: str) -> None:
    assert serve().http.get("/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8642", "localhost.evil.example", "127.0.0.1.evil.example", "[x"]
)
def test_any_other_name_is_a_403_before_anything_runs(serve: Serve, host: str) -> None:
    server = serve()
    answer = server.http.post(CHAT, json=HELLO, headers={"host": host})
    assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")
    assert "--allowed-host" in answer.json()["error"]["message"]
    assert server.service.submitted == []


def test_more_names_can_be_allowed(serve: Serve) -> None:
    server = serve(options=ServerOptions(allowed_hosts=("Studio.Lan",)))
    assert server.http.get("/health", headers={"host": "studio.lan:8642"}).status_code == 200


def test_a_public_bind_does_not_check_names(serve: Serve) -> None:
    server = serve(options=ServerOptions(loopback=False))
    assert server.http.get("/health", headers={"host": "anything.example"}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost.evil.example", "https://127.0.0.1.x"]
)
def test_a_foreign_page_is_a_403_before_anything_runs(serve: Serve, origin: str) -> None:
    server = serve()
    answer = server.http.post(CHAT, json=HELLO, headers={"origin": origin})
    assert answer.status_code == 403
    assert "--cors-origin" in answer.json()["error"]["message"]
    assert "access-control-allow-origin" not in answer.headers
    assert server.service.submitted == []


@pytest.mark.parametrize(
    "origin", ["http://localhost:3000", "http://127.0.0.1", "app://obsidian.md", "tauri://localhost"]
)
def test_a_local_page_or_app_may_read_the_answer(serve: Serve, origin: str) -> None:
    answer = serve().http.post(CHAT, json=HELLO, headers={"origin": origin})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)


def test_more_origins_can_be_allowed(serve: Serve) -> None:
    server = serve(options=ServerOptions(cors_origins=("https://ui.example",)))
    answer = server.http.get("/v1/models", headers={"origin": "https://ui.example"})
    assert answer.headers["access-control-allow-origin"] == "https://ui.example"


def test_a_preflight_of_an_allowed_origin_passes(serve: Serve) -> None:
    asking = {
        "origin": "http://localhost:3000",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    answer = serve().http.options(CHAT, headers=asking)
    assert answer.status_code == 200
    assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
    assert "POST" in answer.headers["access-control-allow-methods"]


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
)
def test_only_json_is_read(serve: Serve, kind: str) -> None:
    """A form or a beacon needs no preflight, so a page of any site could send it."""
    server = serve()
    answer = server.http.post(CHAT, content=b'{"messages":[]}', headers={"content-type": kind})
    assert (answer.status_code, "application/json" in answer.json()["error"]["message"]) == (415, True)
    assert server.service.submitted == []


def test_a_charset_beside_the_content_type_is_fine(serve: Serve) -> None:
    body = b'{"messages":[{"role":"user","content":"hi"}]}'
    answer = serve().http.post(CHAT, content=body, headers={"content-type": "Application/JSON; charset=utf-8"})
    assert answer.status_code == 200


def test_a_body_over_the_limit_is_a_413_with_or_without_its_length(serve: Serve) -> None:
    server = serve(options=ServerOptions(max_body_bytes=1000))
    headers = {"content-type": "application/json"}
    for content in (b" " * 1001, iter([b" " * 600, b" " * 600])):
        answer = server.http.post(CHAT, content=content, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("megabytes", [60, 120])
def test_a_client_that_sends_all_before_it_listens_sees_the_413(serve: Serve, megabytes: int) -> None:
    """Python's own client asks for the connection to be closed; unread bytes would make that a reset."""
    asking = Request(serve().url + CHAT, bytes(megabytes * 10**6), {"content-type": "application/json"})
    with pytest.raises(HTTPError) as refused:
        build_opener(ProxyHandler({})).open(asking, timeout=60)
    with refused.value as answer:
        error = json.load(answer)["error"]
    assert (answer.code, error["message"]) == (413, f"the body has {megabytes}000000 bytes; the limit is 33554432")


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (CHAT, {}, 401),
        (CHAT, {"origin": "http://evil.example"}, 403),
        (CHAT, {"x-api-key": "the-key", "content-type": "text/plain"}, 415),
        ("/v1/models", {"x-api-key": "the-key"}, 405),
        ("/v1/nope", {"x-api-key": "the-key"}, 404),
    ],
)
def test_so_does_one_that_is_refused_for_anything_else(
    serve: Serve, path: str, headers: dict[str, str], status: int
) -> None:
    server = serve(options=ServerOptions(api_keys=("the-key",)))
    asking = Request(server.url + path, bytes(30 * 10**6), {"content-type": "application/json", **headers})
    with pytest.raises(HTTPError) as refused:
        build_opener(ProxyHandler({})).open(asking, timeout=60)
    with refused.value as answer:
        assert (answer.code, set(json.load(answer))) == (status, {"error"})
    assert server.service.submitted == []


@pytest.mark.parametrize(
    ("header", "status"), [("", 413), ("Origin: http://evil.example", 403), ("Content-Type: text/plain", 415)]
)
def test_a_client_that_waits_for_leave_is_refused_before_it_sends(serve: Serve, header: str, status: int) -> None:
    address = urlsplit(serve().url)
    with socket.create_connection((address.hostname, address.port), timeout=20) as client:
        lines = [f"POST {CHAT} HTTP/1.1", "Host: localhost", "Content-Length: 60000000", "Expect: 100-continue"]
        lines += [header] if header else []
        lines += ["Content-Type: application/json"] if "Type" not in header else []
        client.sendall("\r\n".join([*lines, "", ""]).encode())
        assert client.recv(1000).startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize(
    ("method", "path", "message"),
    [
        (
            "GET",
            "/v1/nope",
            "there is nothing at /v1/nope; try /v1/models, /v1/chat/completions, /v1/messages or /health",
        ),
        ("GET", "/nope/", "there is nothing at /nope/; try /v1/models, /v1/chat/completions, /v1/messages or /health"),
        ("GET", CHAT, "GET is not a method of /v1/chat/completions; use POST"),
        ("GET", "/v1/" + "a" * 500, f"there is nothing at /v1/{'a' * 93}...; try "),
    ],
)
def test_a_wrong_path_is_told_as_it_was_asked(serve: Serve, method: str, path: str, message: str) -> None:
    told = serve().http.request(method, path).json()["error"]["message"]
    assert told.startswith(message)


@pytest.mark.parametrize(
    "path",
    ["/v1/models", "/models", "/v1/models/", "//v1/models", "/v1//models", "/models/scripted", "/v1/models/scripted/"],
)
def test_both_base_urls_and_stray_slashes_lead_to_the_same_place(serve: Serve, path: str) -> None:
    assert serve().http.get(serve().url + path).json().get("id") in {None, "scripted"}
    assert serve().http.get(path).status_code == 200


@pytest.mark.parametrize(
    ("path", "normal"),
    [
        ("/", "/"),
        ("//", "/"),
        ("/v1", "/"),
        ("/v1/", "/"),
        ("//v1//chat/completions/", "/chat/completions"),
        ("/v1/models/org/name", "/models/org/name"),
        ("/v1x/models", "/v1x/models"),
    ],
)
def test_the_normal_form_of_a_path(path: str, normal: str) -> None:
    assert normal_path(path) == normal


def test_a_model_is_found_by_a_name_with_slashes_and_by_its_aliases(serve: Serve) -> None:
    service = ScriptedService(name="org/small-1B", created=1700000000)
    server = serve(service, aliases=("gpt-small",))
    assert [entry["id"] for entry in server.http.get("/v1/models").json()["data"]] == ["org/small-1B", "gpt-small"]
    for path in ("/v1/models/org/small-1B", "/v1/models/org%2Fsmall-1B", "/models/gpt-small"):
        assert server.http.get(path).json()["max_model_len"] == 4096
    for asked, told in [("org/small-1B", "org/small-1B"), ("gpt-small", "gpt-small"), ("default", "org/small-1B")]:
        assert server.http.post(CHAT, json={**HELLO, "model": asked}).json()["model"] == told


def test_a_request_id_comes_back(serve: Serve) -> None:
    server = serve()
    assert server.http.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert "x-request-id" not in server.http.get("/health").headers


def test_the_root_and_health_answer_without_an_engine(serve: Serve) -> None:
    server = serve()
    assert server.http.get("/").text == "mlxpaged is running\n"
    assert server.http.head("/").status_code == 200
    for path in ("/health", "/v1/health"):
        assert server.http.get(path).json() == {"status": "ok", "model": "scripted", "heartbeat_s": 0.0}
    assert "server" not in server.http.get("/").headers
