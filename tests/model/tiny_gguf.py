"""Tiny random models written as GGUF the way llama.cpp's converter writes them, and the same weights for mlx-lm.

No tests here: the writer is shared by the tests of loading. It is independent of the reader under test: names, row
order and metadata follow the format's own converter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

LAYERS, HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, HEAD_DIM = 2, 256, 512, 8, 2, 32
CONTEXT, EPSILON, ROPE_BASE = 512, 1e-5, 50_000.0
LETTERS = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
"""GPT-2's 256 letters for bytes."""
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w"]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *LETTERS, *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@dataclass
class TinyModel:
    """`hf`: float32 weights by mlx-lm's names and row order. `metadata` is added last, and wins."""

    architecture: str = "llama"
    tied: bool = False
    kind: Kind = Kind.F32
    metadata: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, np.ndarray] = field(default_factory=dict)
    seed: int = 0

    @property
    def config(self) -> dict[str, Any]:
        """What mlx-lm reads for the same model."""
        return {
            "model_type": self.architecture,
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "intermediate_size": FEED_FORWARD,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "rms_norm_eps": EPSILON,
            "vocab_size": len(TOKENS),
            "max_position_embeddings": CONTEXT,
            "rope_theta": ROPE_BASE,
            "tie_word_embeddings": self.tied,
        }

    def weights(self) -> dict[str, np.ndarray]:
        """(GGUF name without .weight) -> float32, in mlx-lm's row order; biases end in .bias."""
        random = np.random.default_rng(self.seed)

        def matrix(rows: int, columns: int) -> np.ndarray:
            return (random.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

        def norm(size: int) -> np.ndarray:
            return random.uniform(0.5, 1.5, size).astype(np.float32)

        found = {"token_embd": matrix(len(TOKENS), HIDDEN), "output_norm": norm(HIDDEN)}
        if not self.tied:
            found["output"] = matrix(len(TOKENS), HIDDEN)
        for layer in range(LAYERS):
            block = f"blk.{layer}."
            found[f"{block}attn_norm"], found[f"{block}ffn_norm"] = norm(HIDDEN), norm(HIDDEN)
            for name, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS), ("attn_v", KV_HEADS)):
                found[block + name] = matrix(heads * HEAD_DIM, HIDDEN)
                if self.architecture == "qwen2":
                    found[f"{block}{name}.bias"] = norm(heads * HEAD_DIM)
            found[f"{block}attn_output"] = matrix(HIDDEN, HEADS * HEAD_DIM)
            if self.architecture == "qwen3":
                found[f"{block}attn_q_norm"], found[f"{block}attn_k_norm"] = norm(HEAD_DIM), norm(HEAD_DIM)
            found[f"{block}ffn_gate"], found[f"{block}ffn_up"] = (
                matrix(FEED_FORWARD, HIDDEN),
                matrix(FEED_FORWARD, HIDDEN),
            )
            found[f"{block}ffn_down"] = matrix(HIDDEN, FEED_FORWARD)
        return found

    def write(self, path: Path) -> Path:
        """The model as a GGUF file; matrices in `kind`, where the gguf package can write it."""
        writer = gguf.GGUFWriter(path, self.architecture)
        self._write_metadata(writer)
        for name, weight in self.weights().items():
            stored = name if name.endswith(".bias") else f"{name}.weight"
            values = self._in_file_order(name, weight)
            kind = self.kind if values.ndim == 2 else Kind.F32
            writer.add_tensor(stored, gguf.quantize(values, kind), raw_dtype=kind)
        for name, values in self.extra.items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _in_file_order(self, name: str, weight: np.ndarray) -> np.ndarray:
        """llama's converter turns halves (i, i + half) of each head of q and k into pairs (2i, 2i + 1)."""
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[2] if name.startswith("blk") else "")
        if self.architecture != "llama" or heads is None:
            return weight
        halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
        return halves.swapaxes(1, 2).reshape(weight.shape)

    def _write_metadata(self, writer: gguf.GGUFWriter) -> None:
        writer.add_name("tiny")
        writer.add_context_length(CONTEXT)
        writer.add_embedding_length(HIDDEN)
        writer.add_block_count(LAYERS)
        writer.add_feed_forward_length(FEED_FORWARD)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_key_length(HEAD_DIM)
        writer.add_layer_norm_rms_eps(EPSILON)
        writer.add_rope_freq_base(ROPE_BASE)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(TOKENS)
        writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template(TEMPLATE)
        for key, value in self.metadata.items():
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            writer.kv_data[0].pop(key, None)
            if isinstance(value, list):
                writer.add_array(key, value)
            else:
                add[type(value)](key, value)
