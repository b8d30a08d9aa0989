"""Command buffers by MLX's rule: our limits by memory, and how many commits a decode step takes under them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mlxpaged.kernels.commits import ModelShape, Operation, count_commits, paged_step, stock_step
from mlxpaged.kernels.encoder import MLX_LIMITS, EncoderLimits, encoder_limits, set_encoder_limits

GB = 1 << 30
LLAMA_8B = ModelShape(layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, width=128, vocab=128256, bits=4)
TOKEN_BYTES = LLAMA_8B.layers * LLAMA_8B.kv_heads * LLAMA_8B.width * 2 * 2  # K and V at two bytes


def limit_ends(operations, limits: EncoderLimits) -> int:
    """Buffers that a limit ended, without the one that the evaluation itself ends."""
    return count_commits(operations, limits) - 1


def test_a_buffer_ends_with_the_kernel_that_goes_over_the_limit() -> None:
    kernels = [Operation(())] * 10
    assert [limit_ends(kernels, EncoderLimits(most, 40)) for most in (10, 9, 4, 1)] == [0, 1, 2, 5]
    assert limit_ends([Operation((), kernels=3)] * 4, EncoderLimits(4, 40)) == 2


def test_arrays_count_whole_in_elements_and_once_a_buffer() -> None:
    pool = Operation((("pool", 30 << 20),))
    other = Operation((("other", 11 << 20),))
    limits = EncoderLimits(1000, 40)
    assert limit_ends([pool] * 50, limits) == 0
    assert limit_ends([pool, other], limits) == 1
    assert limit_ends([pool, other, pool, other], limits) == 2
    assert limit_ends([Operation((("exactly", 40 << 20),))], limits) == 0


def test_with_mlx_limits_a_large_pool_ends_two_buffers_a_layer() -> None:
    limits = MLX_LIMITS["Max and Ultra"]
    ends = {tokens: limit_ends(paged_step(LLAMA_8B, 1, 512, tokens), limits) for tokens in (2048, 20_000, 32_000)}
    assert ends == {2048: 22, 20_000: 64, 32_000: 65}
    assert limit_ends(paged_step(LLAMA_8B, 1, 512, 20_000), MLX_LIMITS["base and Pro"]) == 65


@pytest.mark.parametrize("memory", [8 * GB, 16 * GB, 24 * GB, 36 * GB, 64 * GB, 128 * GB, 512 * GB])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_with_our_limits_no_pool_takes_more_commits_than_stock_mlx_lm(memory: int, bits: int) -> None:
    shape = ModelShape(32, 4096, 14336, 32, 8, 128, 128256, bits)
    largest = memory // 2 // TOKEN_BYTES
    for stock_limits in MLX_LIMITS.values():
        for rows, context in ((1, 512), (1, 4096), (8, 1024)):
            stock = count_commits(stock_step(shape, rows, context), stock_limits)
            for tokens in (2048, 8192, 20_000, 65_536, largest):
                ours = count_commits(paged_step(shape, rows, context, tokens), encoder_limits(memory))
                assert ours <= 1.2 * stock, f"{ours} commits against {stock} with {tokens} tokens in {memory >> 30} GB"


def test_more_memory_never_means_lower_limits() -> None:
    limits = [encoder_limits(size * GB) for size in (4, 8, 16, 31, 32, 64, 192, 512)]
    assert limits[0] == EncoderLimits(50, 1024) and limits[4] == EncoderLimits(100, 4096)
    assert limits == sorted(limits, key=lambda limit: (limit.max_ops, limit.max_mb))


def test_the_setter_acts_on_macos_only_and_keeps_what_a_person_set() -> None:
    untouched: dict[str, str] = {}
    assert set_encoder_limits(untouched, "linux", 64 * GB) is None and untouched == {}

    fresh: dict[str, str] = {}
    assert set_encoder_limits(fresh, "darwin", 64 * GB) == EncoderLimits(100, 8192)
    assert fresh == {"MLX_MAX_OPS_PER_BUFFER": "100", "MLX_MAX_MB_PER_BUFFER": "8192"}
    assert set_encoder_limits(fresh, "darwin", 8 * GB) == EncoderLimits(100, 8192)

    own = {"MLX_MAX_OPS_PER_BUFFER": "7", "MLX_MAX_MB_PER_BUFFER": "many"}
    assert set_encoder_limits(own, "darwin", 16 * GB) == EncoderLimits(7, 2048)
    assert own == {"MLX_MAX_OPS_PER_BUFFER": "7", "MLX_MAX_MB_PER_BUFFER": "2048"}


def test_what_comes_before_mlx_does_not_import_it() -> None:
    code = "import sys; from mlxpaged.model.startup import before_mlx; before_mlx(); print('mlx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
