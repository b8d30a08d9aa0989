"""The embedded default model, float32: replies equal stock mlx-lm's token for token."""

from __future__ import annotations

import pytest

from .rig import Rig, Stock, assert_equal_to_stock

NEW = 32
PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):\n",
    "1, 1, 2, 3, 5, 8,",
    "<|im_start|>user\nWrite one sentence about the sea.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nAnswer in one word.<|im_end|>\n<|im_start|>user\nWhat colour is grass?<|im_end|>\n",
    "A",
    "Liebe Grüße aus",
    "🙂 means",
    "Water boils at",
    "The following is a list of the planets of the solar system, in order from the sun: " * 4,
    "import numpy as np\n\n# The mean of each row, then of each column.\n" * 3,
]

pytestmark = pytest.mark.smollm2


@pytest.fixture(scope="module")
def expected(smollm2):
    stock = Stock(smollm2.model)
    return [stock.reply(smollm2.tokenizer.encode(prompt, add_special=True), NEW) for prompt in PROMPTS]


@pytest.mark.parametrize("group", [PROMPTS[:6], PROMPTS[6:]], ids=["first six", "last six"])
@pytest.mark.parametrize("budget", [64, 16])
def test_batched_replies_equal_stock(smollm2, expected, group, budget) -> None:
    rig = Rig(smollm2.model, smollm2.config, step_budget=budget)
    for index, prompt in enumerate(group):
        rig.add(index, smollm2.tokenizer.encode(prompt, add_special=True), NEW)
    replies = rig.run()
    for index, prompt in enumerate(group):
        assert_equal_to_stock(replies[index], expected[PROMPTS.index(prompt)], repr(prompt[:40]))


def test_alone_and_on_a_prefix_hit_equals_stock(smollm2, expected) -> None:
    rig = Rig(smollm2.model, smollm2.config)
    ids = smollm2.tokenizer.encode(PROMPTS[10], add_special=True)
    for request_id in (1, 2):
        rig.add(request_id, ids, NEW)
        assert_equal_to_stock(rig.run()[request_id], expected[10], f"run {request_id}")
    assert rig.cached == {1: 0, 2: len(ids) - 1}


def test_a_second_request_with_the_same_300_tokens_recomputes_at_most_17(smollm2) -> None:
    rig = Rig(smollm2.model, smollm2.config)
    shared = (smollm2.tokenizer.encode("The rain in Spain stays mainly in the plain. ") * 40)[:300]
    rig.add(1, [*shared, 5, 6, 7], 4)
    rig.run()
    rig.add(2, [*shared, 8, 9, 10, 11], 4)
    rig.run()
    assert rig.cached[2] >= 300 - 17


def test_the_second_turn_of_a_chat_finds_the_first(smollm2) -> None:
    tokenizer = smollm2.tokenizer
    rig = Rig(smollm2.model, smollm2.config)
    first = tokenizer.encode("<|im_start|>user\nName a fruit.<|im_end|>\n<|im_start|>assistant\n")
    rig.add(1, first, 24)
    history = first + rig.run()[1]
    rig.add(
        2,
        history + tokenizer.encode("<|im_end|>\n<|im_start|>user\nAnother one.<|im_end|>\n<|im_start|>assistant\n"),
        4,
    )
    rig.run()
    assert rig.cached[2] >= len(history) - 17
