"""The KV pool on our own kernels: written in place, read where it lies. Owns its arrays and the token that orders every
kernel on them; serves only while nothing but these kernels touches the arrays.

MLX sees a kernel's inputs as constants, so it knows of no write here. Each kernel therefore takes the token of the one
before it and gives the next: reads of a layer follow its write, writes of a step follow all reads of the step before,
also when that step is still in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from ..config import BLOCK_SIZE
from ..kernels.block_copy import block_copy
from ..kernels.kv_gather import kv_gather
from ..kernels.kv_write import kv_write
from ..kernels.launch import Launcher, new_token, padded
from ..kernels.paged_decode import paged_decode
from ..kernels.rope_write import rope_write
from ..sched.requests import BlockCopy
from .inputs import ChunkInputs
from .kvpool import Asked, chunk_attention, finite, fused_attention, resized
from .kvspec import KVSpec
from .rotation import Unrotated

if TYPE_CHECKING:
    from .attention import AttentionStep

SHORT_CHUNK = 16
"""A chunk of at most so many tokens attends through paged_decode, several query positions a row: its K and V are then
read where they lie instead of being gathered first."""

UseKernel = Callable[[int, int], bool]
"""(rows, context) -> whether paged_decode is the faster way; else gather + fused attention."""


class KernelPool:
    """The pool's arrays are replaced only by `resize`, with nothing in flight; else only their contents change.

    `round_chunks`: the unit in which prefill attention's lengths are rounded; see chunkbatch.py.
    """

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: Sequence[int],
        launch: Launcher,
        use_kernel: UseKernel = lambda rows, context: True,
        round_chunks: int | None = None,
    ) -> None:
        self.spec = spec
        self.num_blocks = tuple(num_blocks)
        self._launch = launch
        self.use_kernel = use_kernel
        self._round_chunks = round_chunks
        self.token: mx.array
        self._pools: list[tuple[mx.array, mx.array]] = []
        self.renew()

    def renew(self) -> None:
        self.token = new_token()
        self._pools.clear()
        for layer, group in zip(self.spec.layers, self.spec.group_of, strict=True):
            shape = (self.num_blocks[group], BLOCK_SIZE, layer.heads)
            keys, values = (
                mx.zeros((*shape, layer.k_width), layer.dtype),
                mx.zeros((*shape, layer.v_width), layer.dtype),
            )
            mx.eval(keys, values)  # a lazy zero would be made anew, over what was written
            self._pools.append((keys, values))

    @property
    def nbytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self._pools)

    def pending(self) -> list[mx.array]:
        return [self.token]

    def resize(self, num_blocks: Sequence[int]) -> None:
        wanted = tuple(num_blocks)
        self.num_blocks = tuple(map(min, self.num_blocks, wanted))
        mx.eval(self.token)  # plain MLX operations follow, which take no token
        for layer, group in enumerate(self.spec.group_of):
            keys, values = self._pools[layer]
            if len(keys) != wanted[group]:
                self._pools[layer] = (resized(keys, wanted[group]), resized(values, wanted[group]))
                del keys, values
                mx.clear_cache()  # the old arrays, which nothing else will ever fit
        self.num_blocks = wanted

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        for group in {copy.group for copy in copies}:
            triples = np.array([(c.source, c.destination, c.slots) for c in copies if c.group == group], np.int32)
            device = padded(triples)
            for layer, index in enumerate(self.spec.group_of):
                if index == group:
                    self.token = block_copy(self._launch, *self._pools[layer], device, self.token)

    def write(self, layer: int, slots: mx.array, keys: mx.array, values: mx.array) -> None:
        self.token = kv_write(self._launch, *self._pools[layer], keys, values, slots, self.token)

    def decode(self, layer: int, step: AttentionStep, queries: mx.array, asked: Asked) -> mx.array:
        group = self.spec.group_of[layer]
        rows = step.decode[group]
        if not self.use_kernel(len(queries), rows.max_context):
            return self._gather_decode(layer, step, queries, asked)
        return self._attend_once(layer, step, queries.transpose(0, 2, 1, 3), asked)

    def decode_unrotated(
        self, layer: int, step: AttentionStep, queries: Unrotated, keys: Unrotated, values: mx.array, asked: Asked
    ) -> mx.array:
        """write() and decode() of a step that only decodes, whose queries and keys are due the same rotation: two
        kernels in all. Only where use_kernel() says so."""
        rotation = keys.rotation
        rotated, self.token = rope_write(
            self._launch,
            *self._pools[layer],
            queries.array,
            keys.array,
            values,
            keys.table(),
            step.slots[self.spec.group_of[layer]],
            self.token,
            dims=rotation.dims,
            traditional=rotation.traditional,
            scale=rotation.scale,
        )
        return self._attend_once(layer, step, rotated, asked)

    def _attend_once(self, layer: int, step: AttentionStep, queries: mx.array, asked: Asked) -> mx.array:
        """queries [rows, 1, heads, k_width], one for each decode entry -> [rows, heads, 1, v_width]."""
        rows = step.decode[self.spec.group_of[layer]]
        tables = rows.full_tables, rows.context_lens, rows.max_context
        return self._attend(layer, queries, *tables, asked, heads_first=True)

    def prefill(
        self, layer: int, step: AttentionStep, queries: mx.array, new: tuple[mx.array, mx.array], asked: Asked
    ) -> list[mx.array]:
        group = self.spec.group_of[layer]
        chunks = step.chunks[group]
        long = [chunk for chunk in chunks if chunk.length > SHORT_CHUNK]
        outputs = iter(self._long_chunks(layer, step, long, queries, new, asked) if long else ())
        return [
            self._short_chunk(layer, chunk, queries[chunk.entry : chunk.entry + chunk.length], asked)
            if chunk.length <= SHORT_CHUNK
            else next(outputs)
            for chunk in chunks
        ]

    def _long_chunks(
        self,
        layer: int,
        step: AttentionStep,
        chunks: Sequence[ChunkInputs],
        queries: mx.array,
        new: tuple[mx.array, mx.array],
        asked: Asked,
    ) -> list[mx.array]:
        """K and V of the chunks that go on with a row are gathered at once, then each chunk attends to its own."""
        batch = step.chunk_batch(self.spec.group_of[layer], chunks, self._round_chunks)
        gathered: list[mx.array] = []
        if batch.num_slots:
            *gathered, self.token = kv_gather(
                self._launch, *self._pools[layer], batch.slots, batch.num_slots, self.token
            )
        fresh: list[mx.array] = []
        if any(run.kv_begin is None for run in batch.runs):
            fresh = [batch.widened(array[:, :, 0]) for array in new]
            if self._round_chunks:  # then a chunk's made-up keys are other rows' tokens
                fresh[1] = finite(fresh[1])
        queries, outputs = batch.widened(queries), []
        if self._round_chunks:  # other strides would be planned anew, too: all have those of gathered keys
            queries, fresh = mx.contiguous(queries), [mx.contiguous(array) for array in fresh]
        for run in batch.runs:
            mine = slice(run.begin, run.begin + run.inputs.length)
            if run.kv_begin is None:
                kv = [array[mine] for array in fresh]
            else:
                kv = [array[run.kv_begin : run.kv_begin + run.inputs.kv_len] for array in gathered]
            keys, values = (array.transpose(1, 0, 2)[None] for array in kv)
            mask = step.chunk_mask(run.inputs, asked.window)
            out = chunk_attention(queries[mine], keys, values, mask, asked)
            outputs.append(out[run.front : run.front + run.length])
        return outputs

    def _short_chunk(self, layer: int, chunk: ChunkInputs, queries: mx.array, asked: Asked) -> mx.array:
        # A power of two of positions, so that few variants are compiled; those added in front are dropped again.
        positions = 1 << (chunk.length - 1).bit_length()
        queries = mx.pad(queries[:, :, 0][None], [(0, 0), (positions - chunk.length, 0), (0, 0), (0, 0)])
        end = chunk.start + chunk.length
        out = self._attend(layer, queries, chunk.full_table, chunk.context_len, end, asked)
        return out[0, positions - chunk.length :][:, :, None]

    def _attend(
        self,
        layer: int,
        queries: mx.array,
        tables: mx.array,
        context_lens: mx.array,
        max_context: int,
        asked: Asked,
        heads_first: bool = False,
    ) -> mx.array:
        """queries [rows, positions, heads, k_width] -> [rows, positions, heads, v_width], or as paged_decode says."""
        out, self.token = paged_decode(
            self._launch,
            queries,
            *self._pools[layer],
            tables,
            context_lens,
            self.token,
            max_context=max_context,
            scale=asked.scale,
            window=asked.window,
            sinks=asked.sinks,
            heads_first=heads_first,
        )
        return out

    def _gather_decode(self, layer: int, step: AttentionStep, queries: mx.array, asked: Asked) -> mx.array:
        group = self.spec.group_of[layer]
        rows = step.decode[group]
        keys, values, self.token = kv_gather(
            self._launch, *self._pools[layer], rows.device_slots, rows.num_slots, self.token
        )
        batch = (len(queries), -1)
        keys, values = (run.reshape(*batch, *run.shape[1:]).transpose(0, 2, 1, 3) for run in (keys, values))
        mask = step.decode_mask(group, asked.window)
        return fused_attention(queries, mx.contiguous(keys), mx.contiguous(finite(values)), mask, asked)
