"""Models by name over HTTP: a request brings its model into memory, others wait their turn, nothing is downloaded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from mlxpaged.chat import residency
from mlxpaged.server.options import OnSwitch, ServerOptions
from tests.scripted import ScriptedService, says
from tests.server.conftest import Running, Serve

CHAT = "/v1/chat/completions"


def hello(model: str, **fields: object) -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], **fields}


def states(server: Running) -> dict[str, str]:
    return {entry["id"]: entry["state"] for entry in server.http.get("/v1/models").json()["data"]}


@pytest.mark.parametrize("stream", [False, True])
def test_naming_another_model_on_disk_loads_it_and_nothing_is_fetched(serve: Serve, stream: bool) -> None:
    server = serve(installed=("org/other",), aliases=("nick",))
    assert states(server) == {"scripted": "ready", "nick": "ready", "org/other": "unloaded"}
    answer = server.http.post(CHAT, json=hello("org/other", stream=stream))
    assert answer.status_code == 200 and '"model":"org/other"' in answer.text
    assert server.service.loads == [("org/other", False)]
    assert states(server) == {"org/other": "ready", "scripted": "unloaded", "nick": "unloaded"}
    assert server.http.post(CHAT, json=hello("nick")).json()["model"] == "nick"
    assert server.service.loads[-1] == ("scripted", False)


def test_an_unknown_name_is_a_404_and_loads_nothing(serve: Serve) -> None:
    server = serve(installed=("org/other",))
    for name in ("org/unknown", "../../etc", "/etc/passwd", "./model.gguf", "gpt-4o"):
        answer = server.http.post(CHAT, json=hello(name))
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert f"the model {name!r} is not here" in answer.json()["error"]["message"]
        assert server.http.post("/models/load", json={"model": name}).status_code == 404
    assert server.service.loads == []


def test_a_running_reply_finishes_before_the_switch_and_the_one_who_waits_is_kept_alive(serve: Serve) -> None:
    service = ScriptedService(lambda *_: says("a", "b"), manual=True)
    server = serve(service, installed=("org/other",), options=ServerOptions(keep_alive_s=0.02))
    with server.http.stream("POST", CHAT, json=hello("scripted", stream=True)) as first:
        service.wait_until(lambda stats: stats.num_running == 1)
        with server.http.stream("POST", CHAT, json=hello("org/other", stream=True)) as second:
            pieces = second.iter_raw()
            seen = b""
            while seen.count(b": ka\n") < 3:  # its headers and these come while the other reply still runs
                seen += next(pieces)
            assert service.model is not None and service.model.name == "scripted"
            for _ in range(3):
                service.step()
            assert first.read().endswith(b"data: [DONE]\n\n")
            service.wait_until(lambda stats: stats.num_running == 1)
            for _ in range(3):
                service.step()
            seen += b"".join(pieces)
    assert b'"model":"org/other"' in seen and seen.endswith(b"data: [DONE]\n\n") and b": ka\n\n" not in seen


@pytest.mark.parametrize("stream", [False, True])
def test_the_servers_end_is_told_to_who_still_waits_for_a_model(serve: Serve, stream: bool) -> None:
    service = ScriptedService(manual=True)
    server = serve(service, installed=("org/other",), options=ServerOptions(shutdown_s=0.05))
    with ThreadPoolExecutor(1) as pool, server.http.stream("POST", CHAT, json=hello("scripted", stream=True)) as first:
        service.wait_until(lambda stats: stats.num_running == 1)
        waiting = pool.submit(server.http.post, CHAT, json=hello("org/other", stream=stream))
        wait_for(server, "waiting")
        server.server.stop()
        answer = waiting.result(20)
        service.step()
        first.read()
    assert answer.status_code == (200 if stream else 503)
    assert "the server is shutting down; the request was given up" in answer.text and "[DONE]" not in answer.text
    assert service.loads == []


def test_told_to_retry_instead_of_waiting(serve: Serve) -> None:
    service = ScriptedService(hold_loads=True)
    server = serve(service, installed=("org/other",), options=ServerOptions(on_switch="retry"))
    answer = server.http.post(CHAT, json=hello("org/other", stream=True))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    service.wait_until(lambda _: service.loads == [("org/other", False)])
    assert states(server)["org/other"] == "loading"
    service.finish_loads()
    answer = retried(server, hello("org/other"))
    assert answer["model"] == "org/other" and len(service.loads) == 1


def retried(server: Running, body: dict[str, object]) -> dict:
    """What a client gets that comes back as long as it is told to; asking is what passes the time."""
    for _ in range(10_000):
        answer = server.http.post(CHAT, json=body)
        if answer.status_code == 200:
            return answer.json()
        assert answer.status_code == 503
    raise AssertionError(answer.text)


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_cannot_be_loaded_is_said_and_the_old_one_comes_back(serve: Serve, stream: bool) -> None:
    server = serve(ScriptedService(broken=("org/broken",)), installed=("org/broken",))
    answer = server.http.post(CHAT, json=hello("org/broken", stream=stream))
    if stream:  # its headers were out: one error event, no end mark
        assert answer.status_code == 200 and "mlx-lm cannot load org/broken" in answer.text
        assert answer.text.startswith('data: {"error":') and "[DONE]" not in answer.text
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "model_not_supported")
    assert server.http.post(CHAT, json=hello("scripted")).status_code == 200


def test_many_clients_of_three_models_are_all_answered_by_the_one_they_named(serve: Serve) -> None:
    names = ["scripted", "org/b", "org/c"]
    server = serve(ScriptedService(lambda *_: says(*"abc")), installed=tuple(names))

    def ask(number: int) -> tuple[str, str]:
        name = names[number % 3]
        return name, server.http.post(CHAT, json=hello(name)).json()["model"]

    with ThreadPoolExecutor(24) as pool:
        assert all(asked == told for asked, told in pool.map(ask, range(60)))


def test_a_client_that_gives_up_waiting_leaves_the_load_to_the_next(serve: Serve) -> None:
    service = ScriptedService(hold_loads=True)
    server = serve(service, installed=("org/other",))
    with server.http.stream("POST", CHAT, json=hello("org/other", stream=True)):
        service.wait_until(lambda _: len(service.loads) == 1)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.http.post, CHAT, json=hello("org/other"))
        service.finish_loads()
        assert asked.result(20).json()["model"] == "org/other"
    assert len(service.loads) == 1 and len(service.submitted) == 1


def test_load_and_unload_by_hand(serve: Serve) -> None:
    server = serve(installed=("org/other",))
    loaded = server.http.post("/models/load", json={"model": "org/other"}).json()
    assert (loaded["success"], loaded["id"], loaded["state"]) == (True, "org/other", "ready")
    unloaded = server.http.post("/models/unload", json={"model": "org/other"}).json()
    assert unloaded["state"] == "unloaded" and set(states(server).values()) == {"unloaded"}
    assert server.http.get("/health").json()["model"] == "scripted"
    assert server.http.post("/v1/tokenize", json={"content": "a"}).status_code == 503
    assert server.http.post(CHAT, json=hello("default")).json()["model"] == "scripted"


def test_the_first_load_is_a_503_with_its_progress_in_health(serve: Serve) -> None:
    server = serve(ScriptedService(loading=True), installed=("org/other",))
    health = server.http.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "loading")
    assert health.json()["loading"] == {"model": "scripted", "label": "", "done_bytes": 0, "total_bytes": None}
    for name in ("scripted", "org/other"):
        answer = server.http.post(CHAT, json=hello(name))
        assert (answer.status_code, "still loading" in answer.text) == (503, True)


def test_a_dead_engine_is_unhealthy(serve: Serve) -> None:
    server = serve()
    server.service.alive = False
    health = server.http.get("/health")
    assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_dead")


def one_long_reply() -> ScriptedService:
    """The first reply has eight words, every other one; nothing moves by itself."""
    service = ScriptedService(lambda *_: says(*("abcdefgh" if len(service.submitted) == 1 else "x")), manual=True)
    return service


def finished(service: ScriptedService, reply: httpx.Response) -> None:
    """Lets the long reply say all it has."""
    for _ in range(9):
        service.step()
    assert reply.read().endswith(b"data: [DONE]\n\n")


def wait_for(server: Running, state: str) -> None:
    """Until org/other is in this state; asking is what passes the time."""
    for _ in range(10_000):
        if states(server)["org/other"] == state:
            return
    raise AssertionError(states(server))


@pytest.mark.parametrize(("path", "on_switch"), [(CHAT, "wait"), (CHAT, "retry"), ("/models/load", "wait")])
def test_the_model_in_memory_answers_while_a_switch_waits_for_its_running_reply(
    serve: Serve, path: str, on_switch: OnSwitch
) -> None:
    service = one_long_reply()
    server = serve(service, installed=("org/other",), options=ServerOptions(on_switch=on_switch))
    with ThreadPoolExecutor(2) as pool, server.http.stream("POST", CHAT, json=hello("scripted", stream=True)) as first:
        service.wait_until(lambda stats: stats.num_running == 1)
        switched = pool.submit(server.http.post, path, json=hello("org/other"))
        wait_for(server, "waiting")
        health = server.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "ok")
        assert health.json()["waits"] == {"model": "org/other", "resident": "scripted", "replies": 1}
        assert states(server) == {"scripted": "ready", "org/other": "waiting"}
        third = pool.submit(server.http.post, CHAT, json=hello("scripted"))
        service.wait_until(lambda stats: stats.num_running == 2)
        for _ in range(2):
            service.step()
        assert third.result(20).json()["model"] == "scripted" and service.loads == []
        finished(service, first)
        wait_for(server, "ready")
        assert service.loads == [("org/other", False)] and "waits" not in server.http.get("/health").json()
        if path == CHAT and on_switch == "wait":
            service.wait_until(lambda stats: stats.num_running == 1)
            for _ in range(2):
                service.step()
        assert switched.result(20).status_code == (503 if path == CHAT and on_switch == "retry" else 200)


def test_a_switch_that_has_waited_for_long_enough_comes_before_whoever_asks_now(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "PATIENCE_S", 0.0)
    service = one_long_reply()
    server = serve(service, installed=("org/other",), options=ServerOptions(keep_alive_s=0.02))
    with ThreadPoolExecutor(2) as pool, server.http.stream("POST", CHAT, json=hello("scripted", stream=True)) as first:
        service.wait_until(lambda stats: stats.num_running == 1)
        switched = pool.submit(server.http.post, "/models/load", json=hello("org/other"))
        wait_for(server, "waiting")
        with server.http.stream("POST", CHAT, json=hello("scripted", stream=True)) as third:
            pieces = third.iter_raw()
            assert next(pieces).startswith(b": ka\n") and len(service.submitted) == 1
            assert server.http.get("/health").status_code == 200
            finished(service, first)
            assert switched.result(20).status_code == 200
            service.wait_until(lambda stats: stats.num_running == 1)
            for _ in range(2):
                service.step()
            assert b"".join(pieces).endswith(b"data: [DONE]\n\n")
    assert service.loads == [("org/other", False), ("scripted", False)]


@pytest.mark.parametrize(
    ("path", "stream", "undone"),
    [
        (CHAT, False, "org/other was not loaded"),
        (CHAT, True, "org/other was not loaded"),
        ("/v1/messages", True, "org/other was not loaded"),
        ("/models/load", False, "org/other was not loaded"),
        ("/models/unload", False, "nothing was unloaded"),
    ],
)
def test_a_reply_that_does_not_end_holds_a_switch_up_for_a_time_only_and_is_not_cut_off(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool, undone: str
) -> None:
    service = one_long_reply()
    server = serve(service, installed=("org/other",))
    with ThreadPoolExecutor(1) as pool, server.http.stream("POST", CHAT, json=hello("scripted", stream=True)) as first:
        service.wait_until(lambda stats: stats.num_running == 1)
        named = "scripted" if path == "/models/unload" else "org/other"
        with monkeypatch.context() as patched:
            patched.setattr(residency, "GIVE_UP_S", 0.0)
            answer = server.http.post(path, json=hello(named, stream=stream, max_tokens=9))
        told = f"{undone}: 1 running reply did not end within 0 s; try again later"
        assert told in answer.text and "[DONE]" not in answer.text
        if stream:  # its headers were out: one error event, no end mark
            assert answer.status_code == 200 and "overloaded" in answer.text
        else:
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert service.loads == [] and "waits" not in server.http.get("/health").json()
        again = pool.submit(server.http.post, "/models/load", json=hello("org/other"))
        wait_for(server, "waiting")
        finished(service, first)
        assert again.result(20).status_code == 200
    assert service.loads == [("org/other", False)]


@pytest.mark.parametrize("stays", [False, True])
def test_a_client_that_leaves_before_the_load_began_takes_its_wish_back_unless_another_has_it_too(
    serve: Serve, stays: bool
) -> None:
    service = one_long_reply()
    server = serve(service, installed=("org/other",))
    with ThreadPoolExecutor(1) as pool, server.http.stream("POST", CHAT, json=hello("scripted", stream=True)) as first:
        service.wait_until(lambda stats: stats.num_running == 1)
        with server.http.stream("POST", CHAT, json=hello("org/other", stream=True)):
            wait_for(server, "waiting")
            other = pool.submit(server.http.post, "/models/load", json=hello("org/other")) if stays else None
        wait_for(server, "waiting" if stays else "unloaded")
        finished(service, first)
        if other:
            assert other.result(20).status_code == 200
    assert service.loads == ([("org/other", False)] if stays else [])
    assert len(service.submitted) == 1


def test_an_unload_waits_for_running_replies_and_lets_newcomers_in(serve: Serve) -> None:
    service = one_long_reply()
    server = serve(service)
    with ThreadPoolExecutor(2) as pool, server.http.stream("POST", CHAT, json=hello("scripted", stream=True)) as first:
        service.wait_until(lambda stats: stats.num_running == 1)
        unloaded = pool.submit(server.http.post, "/models/unload", json=hello("scripted"))
        while "waits" not in (health := server.http.get("/health")).json():
            assert health.status_code == 200
        assert health.json()["waits"] == {"model": None, "resident": "scripted", "replies": 1}
        third = pool.submit(server.http.post, CHAT, json=hello("scripted"))
        service.wait_until(lambda stats: stats.num_running == 2)
        finished(service, first)
        assert third.result(20).status_code == 200
        assert unloaded.result(20).json()["state"] == "unloaded" and service.model is None
