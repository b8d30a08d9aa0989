"""Warnings of the library are lines a person can read, wherever they arise."""

from __future__ import annotations

import logging

import pytest

from mlxpaged.cli.logs import logged_to


def test_a_warning_is_a_line_and_its_traceback_is_for_debugging(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    log = logging.getLogger("mlxpaged.somewhere")
    for debug in (False, True):
        with logged_to(lines.append, debug):
            log.info("not for a person")
            try:
                raise KeyError("x")
            except KeyError:
                log.exception("a step %s", "failed")
    assert lines == ["a step failed", "a step failed"]
    assert capsys.readouterr().err.count("Traceback") == 1


def test_the_outer_destination_is_back_afterwards() -> None:
    outer: list[str] = []
    inner: list[str] = []
    log = logging.getLogger("mlxpaged.somewhere")
    with logged_to(outer.append):
        with logged_to(inner.append):
            log.warning("one")
        log.warning("two")
    assert (outer, inner) == (["two"], ["one"])
