"""The app as a program in a terminal, over a scripted engine that speaks at a steady pace: `python -m
tests.tui.program [TOKENS_PER_S]`. The last user message decides the reply."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from mlxpaged.chat.store import Store
from mlxpaged.engine.events import Delta, Progress
from mlxpaged.sched.requests import SamplingParams
from mlxpaged.tui.app import TuiApp
from tests.scripted import ByteTokenizer, ScriptedService, says
from tests.tui.rig import Doors

WORDS = 2000


def answer(prompt_ids: Sequence[int], sampling: SamplingParams) -> list[Delta]:
    prompt = ByteTokenizer().decode(prompt_ids, skip_special=False)
    last = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    begun = [Delta(progress=Progress(0, len(prompt_ids), 0)), Delta(progress=Progress(len(prompt_ids) // 2, 64, 8))]
    match last.split()[0]:
        case "fence":
            lines = [f"line{number} = {number}\n" for number in range(2000)]
            chunks = ["".join(lines[start : start + 10]) for start in range(0, 2000, 10)]
            return [*begun, *says("```python\n", *chunks, "```\n", "The end.")]
        case "mixed":
            return [
                *begun,
                *says("日本語 🎉 ", "\x1b[31mred\x1b]0;owned\x07 ", "\n\n| a | b |\n|---|---|\n| 漢 | 👩‍👩‍👧 |\n"),
            ]
    return [*begun, *says(*(f"{last}-{number} " + "\n\n" * (number % 60 == 59) for number in range(WORDS)))]


class PacedService(ScriptedService):
    """Takes a step every so often."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        super().__init__(answer, context_len=100_000)

    def _turn(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._rows or self._closed)
                if self._closed:
                    return
                self._changed.wait(self._step_s)
            self.step()


def main() -> int:
    rate = float(sys.argv[1]) if len(sys.argv) > 1 else 50.0
    app = TuiApp(Store(None), Doors(PacedService(1 / rate)), theme=os.environ.get("THEME"))
    app.run()
    return app.return_code or 0


if __name__ == "__main__":
    sys.exit(main())
