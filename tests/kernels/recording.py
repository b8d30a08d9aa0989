"""A launcher that holds every call on a pool to the chain of tokens, which an eager emulator cannot see broken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlxpaged.kernels.launch import KernelSpec, Launcher


class BrokenChain(AssertionError):
    """A call touches a pool without the token of the call before it."""


class RecordingLauncher:
    """Passes calls on to `launch`. Every call that takes a pool must take, as the very same array, the token that the
    call before it on any pool gave: across kernels, layers and steps. Only the first call's token is free."""

    def __init__(self, launch: Launcher) -> None:
        self._launch = launch
        self._last: tuple[str, mx.array] | None = None
        self.calls: list[str] = []

    def __call__(self, spec: KernelSpec, inputs: Sequence[mx.array], **options: Any) -> list[mx.array]:
        on_pool = any(name.endswith("_pool") for name in spec.input_names)
        if on_pool:
            self._require_token(spec, inputs)
        outputs = self._launch(spec, inputs, **options)
        self.calls.append(spec.name)
        if on_pool:
            self._last = spec.name, outputs[spec.output_names.index("token_out")]
        return outputs

    def _require_token(self, spec: KernelSpec, inputs: Sequence[mx.array]) -> None:
        if "token" not in spec.input_names or "token_out" not in spec.output_names:
            raise BrokenChain(f"{spec.name} touches a pool but takes or gives no token")
        token = inputs[spec.input_names.index("token")]
        if self._last is not None and token is not self._last[1]:
            raise BrokenChain(f"{spec.name} does not take the token that {self._last[0]} gave just before it")
