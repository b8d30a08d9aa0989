"""The bytes of a stream, exactly: what clients parse is what is compared here."""

from __future__ import annotations

import re
import socket
from urllib.parse import urlsplit

import msgspec

from mlxpaged.engine.events import Delta, Progress
from mlxpaged.sched.requests import FinishReason
from mlxpaged.server.generation import FINGERPRINT
from mlxpaged.server.options import ServerOptions
from tests.scripted import ScriptedService, says, with_logprobs
from tests.server.conftest import Running, Serve

HELLO = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
"""21 tokens in the scripted model's template."""
USAGE = (
    '"usage":{"prompt_tokens":21,"completion_tokens":5,"total_tokens":26,"prompt_tokens_details":{"cached_tokens":0}}'
)


def streamed(server: Running, path: str, body: dict[str, object]) -> str:
    """A stream's bytes with its id and time, which must be the same in every chunk, written as ID and TIME."""
    answer = server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    text = answer.content.decode()
    ids = set(re.findall(r'"id":"((?:chatcmpl|cmpl)-[0-9a-f]{24})"', text))
    times = set(re.findall(r'"created":(\d+)', text))
    assert len(ids) == len(times) == 1
    return text.replace(ids.pop(), "ID").replace(times.pop(), "TIME")


def chunk(rest: str, kind: str = "chat.completion.chunk") -> str:
    head = f'"id":"ID","object":"{kind}","created":TIME,"model":"scripted","system_fingerprint":"{FINGERPRINT}"'
    return f"data: {{{head},{rest}}}\n\n"


def choice(fields: str, index: int = 0) -> str:
    return f'"choices":[{{"index":{index},{fields}}}]'


def chat_choice(delta: str, finish: str = "null", index: int = 0) -> str:
    return choice(f'"delta":{delta},"logprobs":null,"finish_reason":{finish}', index)


def test_a_chat_stream_is_role_then_texts_then_finish_then_done(serve: Serve) -> None:
    assert streamed(serve(), "/v1/chat/completions", HELLO) == "".join(
        [
            chunk(chat_choice('{"role":"assistant","content":""}')),
            chunk(chat_choice('{"content":"Hel"}')),
            chunk(chat_choice('{"content":"lo"}')),
            chunk(chat_choice("{}", '"stop"')),
            "data: [DONE]\n\n",
        ]
    )


def test_usage_comes_in_a_chunk_of_its_own_when_asked_for(serve: Serve) -> None:
    text = streamed(serve(), "/v1/chat/completions", {**HELLO, "stream_options": {"include_usage": True}})
    assert text.endswith(chunk(chat_choice("{}", '"stop"')) + chunk(f'"choices":[],{USAGE}') + "data: [DONE]\n\n")
    assert text.count('"usage"') == 1


def test_a_completion_stream_has_no_role_and_begins_with_the_echo(serve: Serve) -> None:
    body = {"prompt": "Say: ", "stream": True, "echo": True}
    kind = "text_completion"
    assert streamed(serve(), "/v1/completions", body) == "".join(
        chunk(choice(f'"text":"{text}","logprobs":null,"finish_reason":{finish}'), kind)
        for text, finish in [("Say: ", "null"), ("Hel", "null"), ("lo", "null"), ("", '"stop"')]
    ) + ("data: [DONE]\n\n")


def test_a_last_delta_with_text_becomes_a_text_chunk_and_an_empty_finish_chunk(serve: Serve) -> None:
    service = ScriptedService(lambda *_: [Delta(text="all", token_ids=(1, 2), finish=FinishReason.LENGTH)])
    text = streamed(serve(service), "/v1/chat/completions", HELLO)
    assert text.endswith(
        chunk(chat_choice('{"content":"all"}')) + chunk(chat_choice("{}", '"length"')) + "data: [DONE]\n\n"
    )


def test_ids_whose_text_is_held_back_make_no_chunk(serve: Serve) -> None:
    held = [Delta(token_ids=(226,)), Delta(token_ids=(150,)), Delta(text="\N{LIGHT SHADE}", token_ids=(145,))]
    service = ScriptedService(lambda *_: [*held, *says()])
    text = streamed(serve(service), "/v1/chat/completions", HELLO)
    assert text.count("data: ") == 4  # role, one character, finish, DONE
    assert chunk(chat_choice('{"content":"\N{LIGHT SHADE}"}')) in text


def test_the_string_that_stopped_a_reply_is_named_beside_the_finish(serve: Serve) -> None:
    service = ScriptedService(lambda *_: says("a", stop_reason="END"))
    ending = choice('"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":"END"')
    assert chunk(ending) in streamed(serve(service), "/v1/chat/completions", HELLO)


def test_two_choices_have_each_their_role_and_finish_and_share_one_usage(serve: Serve) -> None:
    service = ScriptedService(lambda _, sampling: says(*"abc"[: sampling.choice + 1]), manual=True)
    server = serve(service)
    body = {**HELLO, "n": 2, "stream_options": {"include_usage": True}}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        for _ in range(4):
            service.step()
        text = answer.read().decode()
    chunks = [msgspec.json.decode(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    for index in (0, 1):
        own = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["finish_reason"] for c in own].count("stop") == 1
        assert own[-1]["finish_reason"] == "stop"
        assert "".join(c["delta"].get("content", "") for c in own) == "ab"[: index + 1]
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 21,
        "completion_tokens": 3,
        "total_tokens": 24,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_silent_stream_is_kept_alive_by_comments_of_one_newline(serve: Serve) -> None:
    service = ScriptedService(manual=True)
    server = serve(service, options=ServerOptions(keep_alive_s=0.02))
    with server.http.stream("POST", "/v1/chat/completions", json=HELLO) as answer:
        seen, pieces = b"", answer.iter_raw()
        while seen.count(b": ka\n") < 3:
            seen += next(pieces)
        for _ in range(3):
            service.step()
        seen += b"".join(pieces)
    assert seen.index(b'"role"') < seen.index(b": ka\n") < seen.index(b"Hel")
    assert b": ka\n: ka\n: ka\n" in seen
    assert b": ka\n\n" not in seen
    assert seen.endswith(b"data: [DONE]\n\n")


def test_a_failure_after_the_headers_is_one_error_event_and_the_end(serve: Serve) -> None:
    service = ScriptedService(lambda *_: says("Hel", finish=FinishReason.ERROR, error="step 7 failed: out of memory"))
    text = streamed(serve(service), "/v1/chat/completions", HELLO)
    error = '{"error":{"message":"step 7 failed: out of memory","type":"server_error","param":null,"code":null}}'
    assert text.endswith(chunk(chat_choice('{"content":"Hel"}')) + f"data: {error}\n\n")


def test_logprobs_travel_with_the_chunk_that_shows_their_text(serve: Serve) -> None:
    service = ScriptedService(lambda *_: with_logprobs(says("Hi"), top=1))
    body = {**HELLO, "logprobs": True, "top_logprobs": 1}
    entries = ",".join(
        f'{{"token":"{letter}","logprob":-0.5,"bytes":[{ord(letter)}],'
        '"top_logprobs":[{"token":"a","logprob":-1.0,"bytes":[97]}]}'
        for letter in "Hi"
    )
    fields = f'"delta":{{"content":"Hi"}},"logprobs":{{"content":[{entries}],"refusal":null}},"finish_reason":null'
    assert chunk(choice(fields)) in streamed(serve(service), "/v1/chat/completions", body)


def test_progress_ids_and_timings_are_sent_only_to_those_who_ask(serve: Serve) -> None:
    waiting = Delta(progress=Progress(0, 2000, 0, queue_position=1))
    deltas = [waiting, Delta(progress=Progress(512, 2000, 256)), *says("Hi")]
    server = serve(ScriptedService(lambda *_: deltas))
    plain = streamed(server, "/v1/chat/completions", HELLO)
    assert not any(word in plain for word in ("progress", "token_ids", "timings"))
    asking = {**HELLO, "return_progress": True, "return_token_ids": True, "timings_per_token": True}
    text = streamed(server, "/v1/chat/completions", asking)
    assert chunk('"choices":[],"prompt_progress":{"total":2000,"cache":256,"processed":512}') in text
    assert chunk('"choices":[],"prompt_progress":{"total":2000,"cache":0,"processed":0,"queue_position":1}') in text
    assert '"finish_reason":null,"token_ids":[72,105]}' in text
    assert '"timings":{"queued_ms":0.0,"ttft_ms":250.0,"total_ms":1250.0,"predicted_n":2,' in text


def test_running_usage_is_on_every_chunk_when_asked_for(serve: Serve) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    text = streamed(serve(), "/v1/chat/completions", {**HELLO, "stream_options": options})
    counts = re.findall(r'"usage":{"prompt_tokens":21,"completion_tokens":(\d)', text)
    assert counts == ["0", "3", "5", "5", "5"]


def test_each_event_is_a_transfer_chunk_of_its_own(serve: Serve) -> None:
    """Read from the bare socket: nothing is held back to be sent together."""
    address = urlsplit(serve().url)
    body = msgspec.json.encode(HELLO)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=20) as wire:
        wire.sendall(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        raw = b"".join(iter(lambda: wire.recv(65536), b""))
    _, _, rest = raw.partition(b"\r\n\r\n")
    frames = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        frames.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    assert len(frames) == 6 and frames[-1] == b""
    assert all(frame.startswith(b"data: ") and frame.count(b"\n\n") == 1 for frame in frames[:-1])
