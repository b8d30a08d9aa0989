"""API keys on the command line: flag, variable and file; wrong ones are one line that shows no key."""

from __future__ import annotations

import pytest

from mlxpaged.cli.keys import api_keys
from mlxpaged.errors import ConfigError


def test_keys_come_from_flags_and_a_file_once_each(tmp_path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nfirst-key-1\n\n  second-key-2  \n")
    file.chmod(0o600)
    assert api_keys(["second-key-2", "third-key-3"], file) == ("second-key-2", "third-key-3", "first-key-1")
    assert api_keys((), None) == ()


def test_a_file_that_others_may_read_is_said(tmp_path, capsys) -> None:
    file = tmp_path / "keys"
    file.write_text("first-key-1\n")
    file.chmod(0o644)
    api_keys((), file)
    assert "can be read by others" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["", "short", "with a space", "schlüssel-lang"])
def test_a_weak_or_unsendable_key_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="8 or more ASCII characters") as refused:
        api_keys([key], None)
    assert not key or key not in str(refused.value)


@pytest.mark.parametrize("text", [None, "", "# nothing\n"])
def test_a_file_without_keys_is_refused(tmp_path, text: str | None) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match="--api-key-file"):
        api_keys((), file)
