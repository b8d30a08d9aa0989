"""A report loses no section to another's failure, and its rates count what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxpaged.engine import report
from mlxpaged.engine.report import Section, Subject, make_report, rate
from mlxpaged.model.measure import model_shape, tiny_model
from mlxpaged.model.startup import Startup


def with_sections(monkeypatch: pytest.MonkeyPatch, budget_s: float = 60, **sections) -> list[Section]:
    monkeypatch.setattr(report, "_sections", lambda subject: sections)
    said: list[str] = []
    done = make_report(Subject(None, Startup(None, None), budget_s), said.append)  # type: ignore[arg-type]
    assert said == [one.title for one in done if "out of time" not in one.note]
    return done


def test_a_section_that_raises_is_one_failed_section(monkeypatch: pytest.MonkeyPatch) -> None:
    def skips() -> dict[str, int]:
        raise report.Skipped("CPU")

    done = with_sections(monkeypatch, first=lambda: {"n": 1}, second=lambda: {}["hidden_size"], third=skips)
    assert [(one.title, one.status, one.note) for one in done] == [
        ("first", "ok", ""),
        ("second", "failed", "KeyError: 'hidden_size'"),
        ("third", "skipped", "CPU"),
    ]


def test_sections_left_when_the_time_is_up_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: clock[0])

    def slow() -> dict[str, int]:
        clock[0] += 100.0
        return {}

    done = with_sections(monkeypatch, budget_s=60, first=slow, second=lambda: {"n": 1})
    assert [(one.status, one.note) for one in done] == [("ok", ""), ("skipped", "out of time after 100 s")]
    assert done[0].seconds == 100.0


def test_a_rate_counts_the_tokens_while_all_requests_decode() -> None:
    together = [(0.0, 0), (1.0, 1), (1.5, 0), (2.0, 1), (2.5, 0), (3.0, 1), (4.0, 1)]
    assert rate(together) == pytest.approx(3 / 1.5)
    assert rate([(0.0, 0), (0.1, 0), (0.2, 0)]) == pytest.approx(10)
    with pytest.raises(ValueError, match="4 tokens of 2 requests are too few"):
        rate([(0.0, 0), (1.0, 0), (2.0, 1), (3.0, 1)])


def test_our_engine_gives_every_token_of_every_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXPAGED_CACHE", str(tmp_path))
    subject = Subject(tiny_model(), Startup(None, None), budget_s=1)
    found = report.arrivals(report._core(subject, 2, ahead=None), report._prompts(subject, 2), 5)
    assert [number for _, number in found].count(0) == [number for _, number in found].count(1) == 5
    assert found == sorted(found)


def test_a_shape_is_read_from_a_config_and_from_its_text_part() -> None:
    config = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 100,
    }
    shape = model_shape(config)
    assert (shape.kv_heads, shape.width, shape.bits) == (4, 16, 16)
    nested = model_shape({"text_config": {**config, "head_dim": 32}, "quantization": {"bits": 4}})
    assert (nested.width, nested.bits) == (32, 4)
    with pytest.raises(KeyError):
        model_shape({"d_model": 64})
