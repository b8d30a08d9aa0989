"""What Prometheus reads after a few requests, checked with Prometheus' own parser."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.scripted import ScriptedService, says
from tests.server.conftest import Running, Serve

HELLO = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


def samples(server: Running) -> dict[str, float]:
    answer = server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(answer.text)
    return {
        sample.name + "".join(f"/{value}" for value in sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def test_waits_and_ends_are_counted_for_streams_and_whole_answers(serve: Serve) -> None:
    server = serve(ScriptedService(lambda *_: says("a", "b", "c")))
    for stream in (True, False):
        server.http.post(CHAT, json={**HELLO, "n": 2, "stream": stream})
    seen = samples(server)
    assert seen["mlxpaged_time_to_first_token_seconds_count"] == 4
    assert seen["mlxpaged_inter_token_latency_seconds_count"] == 8
    assert seen["mlxpaged_e2e_request_latency_seconds_count"] == 4
    assert seen["mlxpaged_request_success_total/stop"] == 4
    assert seen["mlxpaged_request_aborted_total"] == 0
    assert seen["mlxpaged_kv_blocks/total"] == 64 and seen["mlxpaged_num_requests_running"] == 0
    assert seen["mlxpaged_engine_steps_total"] == server.service.num_steps


def test_a_client_that_leaves_is_an_abort(serve: Serve) -> None:
    service = ScriptedService(lambda *_: says("a", "b"), manual=True)
    server = serve(service)
    with server.http.stream("POST", CHAT, json={**HELLO, "stream": True}) as answer:
        service.step()
        next(answer.iter_raw())
        assert samples(server)["mlxpaged_kv_cache_usage_perc"] == 1 / 64
    service.wait_until(lambda _: service.num_cancelled == 1)
    assert samples(server)["mlxpaged_request_aborted_total"] == 1


def test_the_names_that_dashboards_look_for_are_there(serve: Serve) -> None:
    seen = samples(serve())
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_hits_total",
        "prefix_cache_queries_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "num_preemptions_total",
        "model_load_seconds",
        "memory_bytes/active",
        "memory_bytes/peak",
        "memory_bytes/cache",
    ):
        assert f"mlxpaged_{name}" in seen
