"""A GGUF header is believed only as far as the file goes: whatever its bytes, the answer is a model or one line."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxpaged.errors import ModelNotFound, UnsupportedModel
from mlxpaged.model.gguf_config import gguf_config
from mlxpaged.model.gguf_file import GgufFile
from mlxpaged.model.gguf_tokenizer import gguf_tokenizer

from .tiny_gguf import MERGES, TOKENS, TinyModel


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return TinyModel().write(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


@pytest.fixture(scope="module")
def header_size(whole: bytes) -> int:
    return whole.index(b"blk.1.ffn_down.weight") + 64


def refusal(data: bytes, folder: Path) -> str:
    path = folder / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises((ModelNotFound, UnsupportedModel)) as refused:
        read(path)
    message = str(refused.value)
    assert "\n" not in message and "bad.gguf" in message
    return message


def read(path: Path) -> None:
    """Everything that is read before weights are."""
    file = GgufFile(path)
    gguf_config(file)
    gguf_tokenizer(file)


def header(version: int = 3, tensors: int = 0, keys: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def key(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


def test_a_whole_file_is_read(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(whole)
    file = GgufFile(path)
    assert file.value("tokenizer.ggml.tokens") == TOKENS
    assert file.value("tokenizer.ggml.merges") == MERGES
    assert file.value("tokenizer.ggml.token_type") == [3, 3, 3] + [1] * (len(TOKENS) - 3)
    assert file.number("llama.attention.head_count") == 8
    assert file.value("no.such.key", 7) == 7
    assert file.tensors["blk.1.ffn_down.weight"].shape == (256, 512)
    assert len(file.tensors) == 21


def test_a_missing_file_and_a_folder_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"cannot read .*none.gguf: No such file"):
        GgufFile(tmp_path / "none.gguf")
    with pytest.raises(ModelNotFound, match="Is a directory"):
        GgufFile(tmp_path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "bad.gguf"),
        (b"GGUF", "ends at byte 4"),
        (b"PK\x03\x04" + bytes(64), "magic"),
        (header(version=1), "version 1"),
        (header(version=4), "version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(keys=1 << 60), f"claims {1 << 60} metadata keys"),
        (header(tensors=1 << 60), f"claims {1 << 60} tensors"),
        (header(keys=1, rest=key("a", 8, struct.pack("<Q", 1 << 62))), "its header points to byte"),
        (header(keys=1, rest=key("a", 9, struct.pack("<IQ", 0, 1 << 62))), "its header points to byte"),
        (header(keys=1, rest=key("a", 9, struct.pack("<IQ", 8, 1 << 62))), f"claims {1 << 62} strings"),
        (header(keys=1, rest=key("a", 9, struct.pack("<IQ", 8, 1000))), "its header points to byte"),
        (header(keys=1, rest=key("a", 9, struct.pack("<IQ", 9, 1))), "list of ARRAY"),
        (header(keys=1, rest=key("a", 99, bytes(8))), "not a valid GGUFValueType"),
    ],
)
def test_a_header_that_lies_is_one_line(data: bytes, words: str, tmp_path: Path) -> None:
    assert words in refusal(data, tmp_path)


def tensor(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    described = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(dims))
    return described + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("described", "words"),
    [
        (tensor("x", [64], 0, 1 << 40), "its header points to byte"),
        (tensor("x", [1 << 40], 0, 0), "its header points to byte"),
        (tensor("x", [1 << 32, 1 << 32], 0, 0), "4294967296"),  # the product wraps to zero in 64 bits
        (tensor("x", [0], 0, 0), "has the shape"),
        (tensor("x", [1] * 9, 0, 0), "has the shape"),
        (tensor("x", [33], 2, 0), "not a multiple of Q4_0 block size"),
        (tensor("x", [32], 4711, 0), "kind 4711"),
        (tensor("x", [64], 0, (1 << 64) - 64), "bad.gguf"),
    ],
)
def test_a_tensor_that_lies_is_one_line(described: bytes, words: str, tmp_path: Path) -> None:
    assert words in refusal(header(tensors=1, rest=described + bytes(512)), tmp_path)


def test_tensors_that_overlap_cannot_claim_more_than_the_file(tmp_path: Path) -> None:
    described = b"".join(tensor(f"t{i:04d}", [64, 16], 0, 0) for i in range(500))
    assert "its tensors claim 2048000 bytes" in refusal(header(tensors=500, rest=described + bytes(8192)), tmp_path)


def test_a_part_of_a_split_model_says_how_to_join_it(tmp_path: Path) -> None:
    path = TinyModel(metadata={"split.count": 3}).write(tmp_path / "part.gguf")
    with pytest.raises(UnsupportedModel, match="one of 3 parts; join them"):
        read(path)


def test_an_absurd_count_allocates_nothing(whole: bytes, tmp_path: Path) -> None:
    """The list of tokens claims 2^32 entries: refused from the claim, not by running out of memory."""
    at = whole.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    tracemalloc.start()
    refusal(whole[:at] + struct.pack("<Q", 1 << 32) + whole[at + 8 :], tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20_000_000


@pytest.mark.parametrize("part", [0.001, 0.01, 0.3, 0.7, 0.999])
def test_a_file_cut_short_is_one_line(part: float, whole: bytes, tmp_path: Path) -> None:
    assert "not a whole GGUF file" in refusal(whole[: int(len(whole) * part)], tmp_path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), edits=st.integers(1, 6))
def test_random_damage_to_the_header_is_a_model_or_one_line(
    seed: int, edits: int, whole: bytes, header_size: int, tmp_path: Path
) -> None:
    choose = random.Random(seed)
    data = bytearray(whole)
    for _ in range(edits):
        at, size = choose.randrange(header_size), choose.choice([1, 1, 4, 8])
        data[at : at + size] = choose.choice([choose.randbytes(size), b"\xff" * size, bytes(size), b"\x7f" * size])
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    try:
        read(path)
    except (ModelNotFound, UnsupportedModel) as error:
        assert "\n" not in str(error) and len(str(error)) < 400
