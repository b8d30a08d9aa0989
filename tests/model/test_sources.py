"""A name finds its model, or one line says why not. The hub is a fake: huggingface_hub's function, replaced."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from mlxpaged.errors import ConfigError, MlxpagedError, ModelNotFound, Unreachable, UnsupportedModel
from mlxpaged.model.hub import is_whole
from mlxpaged.model.sources import Progress, resolve


def model_folder(folder: Path, shards: int = 1) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    names = [f"model-{i:05d}-of-{shards:05d}.safetensors" for i in range(1, shards + 1)]
    for name in names:
        (folder / name).write_bytes(b"")
    index = {"weight_map": {f"w{i}": name for i, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_folder_and_a_gguf_file_are_taken_as_they_are(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "Qwen3-4B")
    file = tmp_path / "tiny.Q4_0.gguf"
    file.write_bytes(b"GGUF")
    assert resolve(str(folder)) == resolve(f"{folder}/")
    assert (resolve(str(folder)).name, resolve(str(folder)).kind) == ("Qwen3-4B", "folder")
    assert (resolve(str(file)).name, resolve(str(file)).kind) == ("tiny.Q4_0", "gguf")


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "one.gguf").write_bytes(b"GGUF")
    assert resolve(str(tmp_path)).path == tmp_path / "one.gguf"
    (tmp_path / "two.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match=r"holds 2 \.gguf files; give one of them, such as .*one\.gguf"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    "name", ["", "  ", "llama", "./none", "~/none/model", "/none/model.gguf", "a/b/c", "org/x.gguf"]
)
def test_a_name_that_is_nothing_says_what_names_there_are(name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"no model at .*; give a Hugging Face id such as org/name, .* or smollm2"):
        resolve(name)


def test_an_empty_folder_and_another_file_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json and no \.gguf file"):
        resolve(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match=r"give the folder that holds config\.json"):
        resolve(str(tmp_path / "model.safetensors"))


class FakeHub:
    """snapshot_download: what is on disk is found offline; online either fetches or fails as told."""

    def __init__(self, on_disk: Path | None = None, online: Callable[..., Path] | None = None) -> None:
        self.on_disk, self.online, self.calls = on_disk, online, []

    def snapshot_download(self, repo: str, **options: Any) -> str:
        self.calls.append("offline" if options.get("local_files_only") else "online")
        self.options = options
        if options.get("local_files_only"):
            if self.on_disk is None:
                raise hub_errors.LocalEntryNotFoundError("not cached")
            return str(self.on_disk)
        assert self.online is not None, "the network was asked"
        return str(self.online(repo, **options))


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeHub], FakeHub]:
    def put(fake: FakeHub) -> FakeHub:
        monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
        return fake

    return put


Install = Callable[[FakeHub], FakeHub]


def test_a_hub_model_on_disk_needs_no_network(install: Install, tmp_path: Path) -> None:
    fake = install(FakeHub(on_disk=model_folder(tmp_path / "snapshot", shards=2)))
    source = resolve("org/Some-Model")
    assert (source.name, source.path, source.kind) == ("org/Some-Model", tmp_path / "snapshot", "folder")
    assert fake.calls == ["offline"]


def test_a_half_fetched_hub_model_is_resumed(install: Install, tmp_path: Path) -> None:
    half = model_folder(tmp_path / "half", shards=3)
    (half / "model-00002-of-00003.safetensors").unlink()
    assert not is_whole(half)
    fake = install(FakeHub(on_disk=half, online=lambda repo, **_: model_folder(tmp_path / "whole", shards=3)))
    assert resolve("org/model").path == tmp_path / "whole"
    assert fake.calls == ["offline", "online"]


def test_a_revision_is_passed_on(install: Install, tmp_path: Path) -> None:
    fake = install(FakeHub(on_disk=model_folder(tmp_path / "snapshot")))
    assert resolve("org/model@v1.0").name == "org/model@v1.0"
    assert fake.options["revision"] == "v1.0"


def test_progress_is_the_bytes_on_disk_or_received_whichever_is_more(install: Install, tmp_path: Path) -> None:
    def fetch(repo: str, tqdm_class: type, **_: Any) -> Path:
        files = tqdm_class(total=3, desc="Fetching 3 files", unit="it")
        received, on_disk = (tqdm_class(total=0, initial=0, unit="B", unit_scale=True) for _ in range(2))
        received.total = on_disk.total = 1000
        on_disk.update(300)  # left by an earlier try
        received.update(200)
        received.update(200)
        on_disk.update(700)
        files.update(3)
        return model_folder(tmp_path / "fetched")

    install(FakeHub(online=fetch))
    seen: list[Progress] = []
    resolve("org/model", seen.append)
    assert seen == [Progress("org/model", done, 1000) for done in (300, 400, 1000)]


class _Response:
    def __init__(self, status: int) -> None:
        self.status_code, self.headers, self.request = status, {}, None


def failing(kind: type, status: int | None = None, *arguments: Any) -> Callable[..., Path]:
    def online(repo: str, **options: Any) -> Path:
        error = kind.__new__(kind)
        Exception.__init__(error, *(arguments or ("long\ntext\nof a library",)))
        if status is not None:
            error.response = _Response(status)  # type: ignore[attr-defined]
        raise error

    return online


def disk_full(repo: str, **options: Any) -> Path:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("online", "kind", "words"),
    [
        (failing(hub_errors.GatedRepoError, 403), ModelNotFound, "is gated: accept its terms at https://hugg"),
        (failing(hub_errors.RepositoryNotFoundError, 401), ModelNotFound, "no model org/model on the Hugging Face Hub"),
        (failing(hub_errors.RevisionNotFoundError, 404), ModelNotFound, "has no revision 'v9'"),
        (failing(hub_errors.HFValidationError), ModelNotFound, "is no Hugging Face id"),
        (failing(hub_errors.OfflineModeIsEnabled), Unreachable, "HF_HUB_OFFLINE is set"),
        (failing(hub_errors.LocalEntryNotFoundError), Unreachable, "does not answer; what"),
        (failing(ConnectionError), Unreachable, "does not answer; what was fetched is kept"),
        (failing(TimeoutError), Unreachable, "does not answer; what was fetched is kept"),
        (failing(hub_errors.HfHubHTTPError, 502), Unreachable, "does not answer"),
        (disk_full, ConfigError, "No space left on device; HF_HOME"),
    ],
)
def test_every_failure_of_the_hub_is_one_line(
    online: Callable[..., Path], kind: type[MlxpagedError], words: str, install: Install
) -> None:
    install(FakeHub(online=online))
    with pytest.raises(kind) as error:
        resolve("org/model@v9")
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_repository_of_gguf_files_says_what_to_do(install: Install, tmp_path: Path) -> None:
    def only_config(repo: str, **_: Any) -> Path:
        (tmp_path / "fetched").mkdir()
        (tmp_path / "fetched" / "config.json").write_text("{}")
        return tmp_path / "fetched"

    install(FakeHub(online=only_config))
    with pytest.raises(UnsupportedModel, match="download one file and give its path"):
        resolve("org/model-GGUF")
