"""Models that come and go on the engine thread: replies finish first, nothing is lost in between, memory comes back."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from mlxpaged.engine import host as host_module
from mlxpaged.errors import ModelNotFound, Overloaded
from mlxpaged.model.sources import resolve
from mlxpaged.sched.requests import FinishReason

from .conftest import TIMEOUT_S


def test_a_running_reply_finishes_before_another_model_is_loaded(make_service) -> None:
    tiny = make_service()
    asked = tiny.ask("hello", max_tokens=60, ignore_eos=True)
    assert asked.first.wait(TIMEOUT_S)
    loading = tiny.service.load("other")
    assert loading.result(TIMEOUT_S).name == "other"
    assert asked.ended.is_set() and len(asked.ids) == 60
    assert asked.deltas[-1].finish is FinishReason.LENGTH


def test_a_request_posted_before_a_load_is_answered_by_the_old_model(make_service, monkeypatch) -> None:
    tiny = make_service()
    held = threading.Event()
    tiny.service._post(lambda: held.wait(TIMEOUT_S))  # so that both lie in the inbox when it is read
    asked = tiny.ask("hello", max_tokens=5, ignore_eos=True)
    loading = tiny.service.load("other")
    held.set()
    assert asked.wait().finish is FinishReason.LENGTH and len(asked.ids) == 5
    assert loading.result(TIMEOUT_S).name == "other"


def test_a_request_made_for_a_model_that_is_gone_ends_with_an_error(make_service) -> None:
    tiny = make_service()
    held = threading.Event()
    tiny.service._post(lambda: held.wait(TIMEOUT_S))
    tiny.service._post(tiny.service._unload)
    asked = tiny.ask("hello", max_tokens=5)
    held.set()
    last = asked.wait()
    assert last.finish is FinishReason.ERROR and last.error == "tiny was unloaded; send it again"
    with pytest.raises(Overloaded):
        tiny.ask("hello", max_tokens=5)


def test_an_unloaded_model_is_garbage_and_can_be_loaded_again(make_service) -> None:
    tiny = make_service()
    tiny.ask("hello", max_tokens=3).wait()
    model = weakref.ref(tiny.service._host.core.runner._model)
    tiny.service.unload().result(TIMEOUT_S)
    gc.collect()
    assert model() is None and tiny.service.model is None
    assert tiny.service.stats().blocks_total == 0
    tiny.service.load("tiny").result(TIMEOUT_S)
    assert tiny.ask("hello", max_tokens=3).wait().finish is not FinishReason.ERROR


def test_the_old_model_is_gone_before_the_next_one_is_read(make_service, monkeypatch) -> None:
    tiny = make_service()
    model = weakref.ref(tiny.service._host.core.runner._model)
    seen = []
    read = host_module.load
    monkeypatch.setattr(host_module, "load", lambda *given: (seen.append(model()), read(*given))[1])
    tiny.service.load("other").result(TIMEOUT_S)
    assert seen == [None]


def test_an_idle_model_gives_its_memory_back(make_service) -> None:
    tiny = make_service(idle_unload_s=1)
    tiny.ask("hello", max_tokens=3).wait()
    unloaded = threading.Event()
    unload = tiny.service._host.unload
    tiny.service._host.unload = lambda: (unload(), unloaded.set())
    assert unloaded.wait(TIMEOUT_S)
    assert tiny.service._host.core is None


def test_a_failed_load_leaves_no_model_and_a_working_thread(make_service, monkeypatch) -> None:
    tiny = make_service()

    def broken(*_):
        raise ModelNotFound("no weights")

    read = host_module.load
    monkeypatch.setattr(host_module, "load", broken)
    with pytest.raises(ModelNotFound):
        tiny.service.load("other").result(TIMEOUT_S)
    assert tiny.service.model is None and tiny.service.loading is None and tiny.service.alive
    monkeypatch.setattr(host_module, "load", read)
    assert tiny.service.load("tiny").result(TIMEOUT_S).name == "tiny"


def test_what_is_not_on_disk_is_not_fetched_unless_wanted(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("MLXPAGED_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    for name in ("smollm2", "org/absent-model"):
        with pytest.raises(ModelNotFound, match="on this disk"):
            resolve(name, fetch=False)
