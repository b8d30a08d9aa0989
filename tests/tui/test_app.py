"""The app as a person uses it, over a scripted engine: keys in, screen out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mlxpaged.chat.store import Store
from mlxpaged.engine.events import Delta, Progress
from mlxpaged.sched.requests import FinishReason, SamplingParams
from mlxpaged.tui import frames, pace
from mlxpaged.tui.changes import Change
from mlxpaged.tui.code_block import CodeBlock, CodeLines
from mlxpaged.tui.details import Details
from mlxpaged.tui.sidebar import Sidebar
from mlxpaged.tui.state import Given, Phase
from mlxpaged.tui.transcript import Transcript
from tests.scripted import ByteTokenizer, ScriptedService, says
from tests.tui.rig import Doors, Rig, run, running


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXPAGED_STATE", str(tmp_path))
    monkeypatch.setattr(pace, "DRAW_S", 0.01)
    monkeypatch.setattr(frames, "COUNT_S", 0.01)


def echo(prompt_ids: Sequence[int], sampling: SamplingParams) -> list[Delta]:
    """Says the last user message again, word by word."""
    prompt = ByteTokenizer().decode(prompt_ids, skip_special=False)
    last = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    return says("Re: ", *(f"{word} " for word in last.split()))


def scripted(*texts: str) -> ScriptedService:
    return ScriptedService(lambda *_: says(*texts), manual=True)


async def finish(rig: Rig) -> None:
    while rig.service._rows:
        rig.service.step()
    await rig.until(lambda: not rig.talk.phase.is_live)
    await rig.drawn()


def test_a_question_and_its_answer() -> None:
    async def test() -> None:
        async with running(ScriptedService(echo, manual=True)) as rig:
            assert "A new session" in rig.text()
            await rig.send("Hello there")
            await rig.step(2)
            assert "Re: Hello" in rig.text() and "Esc stops" in rig.text()
            await finish(rig)
            text = rig.text()
            assert "Re: Hello there" in text and "ttft 0.25 s" in text
            assert rig.chat.prompt.text == ""

    run(test)


def test_eight_sessions_write_at_once_and_only_one_is_drawn() -> None:
    async def test() -> None:
        async with running(ScriptedService(echo, manual=True), size=(120, 40)) as rig:
            for number in range(8):
                if number:
                    await rig.press("ctrl+n")
                await rig.send(f"session{number} " + "word " * 5)
            assert len(rig.service._rows) == 8
            await rig.step(4)
            live = [talk for talk in rig.chat.talks if talk.phase is Phase.WRITING]
            assert len(live) == 8
            assert all(talk.turns and talk.turns[-1].text.startswith("Re: session") for talk in live)
            assert "SESSIONS  8 live" in rig.text()
            visible = [one for one in rig.chat.query(Transcript) if one.display]
            assert len(visible) == 1
            await rig.press("alt+8")  # the first of them
            assert "Re: session0 word" in rig.text()
            await finish(rig)
            assert rig.text().count("done, unread") == 7

    run(test)


def test_a_session_that_waits_for_others_says_how_many_go_before_it() -> None:
    async def test() -> None:
        places = [Delta(progress=Progress(0, 9, 0, queue_position=place)) for place in (3, 1)]
        async with running(ScriptedService(lambda *_: [*places, *says("ok")], manual=True)) as rig:
            await rig.send("x")
            await rig.step()
            assert rig.text().count("○ queued, 3 ahead") == 2  # in the list and under the turn
            await rig.step()
            assert rig.text().count("○ queued, 1 ahead") == 2
            assert "1 waiting  │  scripted" in rig.text().splitlines()[0]
            await finish(rig)
            assert "ahead" not in rig.text()

    run(test)


def test_the_pane_of_the_engine_tells_the_place_of_a_request_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        service = ScriptedService(echo, manual=True)
        stats = service.stats
        queued = {"state": "queued", "queue_position": 3}
        monkeypatch.setattr(
            service, "stats", lambda: replace(stats(), rows=tuple(replace(row, **queued) for row in stats().rows))
        )
        async with running(service, size=(160, 45)) as rig:
            await rig.send("x")
            await rig.until(lambda: "queued, 3 ahead" in rig.text())
            await finish(rig)

    run(test)


def test_what_was_being_written_stays_with_its_session() -> None:
    async def test() -> None:
        async with running(ScriptedService(echo, manual=True)) as rig:
            await rig.send("one")
            await rig.type("half a thou")
            await rig.press("ctrl+n")
            assert rig.chat.prompt.text == ""
            await rig.press("ctrl+pagedown")
            assert rig.chat.prompt.text == "half a thou"

    run(test)


def test_escape_stops_and_keeps_what_came() -> None:
    async def test() -> None:
        async with running(scripted("One ", "two ", "three")) as rig:
            await rig.send("count")
            await rig.step(2)
            await rig.press("escape")
            await finish(rig)
            assert "One two" in rig.text() and "■ stopped" in rig.text()
            await rig.press("ctrl+up", "o")
            await rig.until(lambda: len(rig.service.submitted) == 2)
            await finish(rig)
            assert "One two One two three" in " ".join(rig.text().split())

    run(test)


def test_ctrl_c_stops_then_clears_then_tells_how_to_leave() -> None:
    async def test() -> None:
        async with running(scripted("One ", "two ")) as rig:
            await rig.send("count")
            await rig.type("typed ahead")
            await rig.press("ctrl+c")
            await finish(rig)
            assert rig.talk.phase is Phase.STOPPED and rig.chat.prompt.text == "typed ahead"
            await rig.press("ctrl+c")
            assert rig.chat.prompt.text == ""
            await rig.press("ctrl+c")
            await rig.until(lambda: "Ctrl+Q or Ctrl+D leaves" in rig.text())

    run(test)


def test_a_paste_of_500_lines_is_a_chip_that_is_sent_whole() -> None:
    async def test() -> None:
        service = ScriptedService(lambda *_: says("ok"), manual=True, context_len=20_000)
        async with running(service) as rig:
            pasted = "\n".join(f"line {number}" for number in range(500))
            rig.chat.prompt.insert_pasted(pasted + "\n")
            await rig.drawn()
            assert rig.chat.prompt.text == "[pasted #1: 501 lines]"
            assert not rig.service.submitted
            await rig.type(" what is this?")
            await rig.press("enter")
            await rig.until(lambda: rig.service.submitted)
            sent = ByteTokenizer().decode(rig.service.submitted[0][0])
            assert "line 0\n" in sent and "line 499\n" in sent and "what is this?" in sent
            await finish(rig)
            assert "… 485 more lines" in rig.text()

    run(test)


def test_a_chip_opens_and_goes_as_one() -> None:
    async def test() -> None:
        async with running(scripted("ok")) as rig:
            rig.chat.prompt.insert_pasted("x\n" * 30)
            rig.chat.prompt.insert_pasted("short \x1b[31mred")
            assert rig.chat.prompt.text == "[pasted #1: 31 lines]short ␛[31mred"
            await rig.press(*["backspace"] * len("short ␛[31mred"), "backspace")
            assert rig.chat.prompt.text == ""
            rig.chat.prompt.insert_pasted("y\n" * 30)
            await rig.press("ctrl+o")
            assert rig.chat.prompt.text == "y\n" * 30

    run(test)


def test_new_lines_by_every_key_and_the_prompt_grows_to_ten() -> None:
    async def test() -> None:
        async with running(scripted("ok")) as rig:
            heights = []
            for key in ("alt+enter", "ctrl+j", "shift+enter", *["ctrl+j"] * 10):
                await rig.type("x")
                await rig.press(key)
                heights.append(rig.chat.prompt.size.height)
            assert heights[:3] == [2, 3, 4] and heights[-1] == 10
            assert rig.chat.prompt.text == "x\n" * 13
            await rig.press("ctrl+c")
            await rig.type("a\\")
            await rig.press("enter")
            assert rig.chat.prompt.text == "a\n" and not rig.service.submitted

    run(test)


def test_up_in_an_empty_prompt_brings_back_what_was_sent() -> None:
    async def test() -> None:
        async with running(scripted("ok")) as rig:
            for text in ("first", "second"):
                await rig.send(text)
                await finish(rig)
            await rig.press("up")
            assert rig.chat.prompt.text == "second"
            await rig.press("up")
            assert rig.chat.prompt.text == "first"
            await rig.press("down", "down")
            assert rig.chat.prompt.text == ""

    run(test)


def test_a_turn_is_edited_retried_and_forked_by_key() -> None:
    async def test() -> None:
        async with running(ScriptedService(echo, manual=True)) as rig:
            await rig.send("alpha")
            await finish(rig)
            await rig.send("beta")
            await finish(rig)
            await rig.press("ctrl+up", "ctrl+up", "e")  # the last question
            assert rig.chat.prompt.text == "beta" and "writing an earlier turn anew" in rig.text()
            rig.chat.prompt.put("gamma")
            await rig.press("enter")
            await rig.until(lambda: len(rig.service.submitted) == 3)
            await finish(rig)
            assert [turn.text for turn in rig.talk.turns or []] == ["alpha", "Re: alpha ", "gamma", "Re: gamma "]
            await rig.press("ctrl+r")
            await rig.until(lambda: len(rig.service.submitted) == 4)
            await finish(rig)
            first = rig.talk
            await rig.press("ctrl+up", "up", "up", "f")  # up to the first reply
            await rig.until(lambda: rig.talk is not first)
            await rig.drawn()
            assert [turn.text for turn in rig.talk.turns or []] == ["alpha", "Re: alpha "]
            assert "alpha (fork)" in rig.text() and "✓ idle · fork" in rig.text()
            assert rig.chat.prompt.has_focus

    run(test)


def test_a_click_picks_a_session_and_ctrl_w_takes_one_off_the_list() -> None:
    async def test() -> None:
        async with running(scripted("ok")) as rig:
            await rig.send("the first")
            await finish(rig)
            await rig.press("ctrl+n")
            await rig.pilot.click(Sidebar, offset=(8, 5))
            await rig.until(lambda: rig.talk.name == "the first")
            await rig.press("escape", "ctrl+w")
            await rig.until(lambda: len(rig.chat.talks) == 1)
            await rig.drawn()
            assert rig.talk.name == "New session"
            assert [one.title for one in rig.store.sessions()] == ["the first"]

    run(test)


def test_commands_are_hinted_completed_and_run() -> None:
    async def test() -> None:
        async with running(scripted("ok")) as rig:
            await rig.type("/re")
            await rig.drawn()
            assert "/retry" in rig.text() and "/rename [TITLE]" in rig.text()
            await rig.press("ctrl+c")
            await rig.type("/ren")
            await rig.press("tab")
            assert rig.chat.prompt.text == "/rename "
            await rig.type("A better name")
            await rig.press("enter")
            await rig.until(lambda: rig.talk.title == "A better name")
            await rig.type("/nonsense")
            await rig.press("enter")
            await rig.until(lambda: "there is no /nonsense" in rig.text())
            assert rig.chat.prompt.text == "/nonsense"
            rig.chat.prompt.put("/params temperature 0.5 top_k 9")
            await rig.press("enter")
            await rig.until(lambda: rig.talk.params)
            assert rig.talk.params == {"temperature": 0.5, "top_k": 9}
            rig.chat.prompt.put("/params temperature hot")
            await rig.press("enter")
            await rig.until(lambda: "write a number" in rig.text())
            rig.chat.prompt.put("//etc is a path")
            await rig.press("enter")
            await rig.until(lambda: rig.service.submitted)
            assert "/etc is a path" in ByteTokenizer().decode(rig.service.submitted[0][0])

    run(test)


def test_a_session_whose_first_message_was_taken_back_is_named_by_the_next() -> None:
    async def test() -> None:
        async with running(ScriptedService(echo, manual=True)) as rig:
            await rig.send("walruses")
            await finish(rig)
            rig.chat.do_undo("")
            await rig.until(lambda: rig.talk.name == "New session")
            assert rig.chat.prompt.text == "walruses"
            rig.chat.prompt.put("")
            await rig.send("seals")
            assert rig.talk.name == "seals"

    run(test)


def test_values_set_in_a_session_are_shown_and_stay_in_it() -> None:
    async def test() -> None:
        given = Given(params={"temperature": 0.2, "seed": 123456789})
        async with running(ScriptedService(manual=True), size=(160, 45), given=given) as rig:
            assert "temperature 0.2 · seed 123456789" in rig.text() and "set in this session" not in rig.text()
            rig.chat.prompt.put("/params max_tokens 5")
            await rig.press("enter")
            await rig.until(lambda: "In this session: max tokens 5. As mlxpaged was started: temp" in rig.toasts())
            await rig.until(lambda: "set in this session: max tokens" in rig.text())
            await rig.press("ctrl+n")
            assert rig.talk.params == {} and "set in this session" not in rig.text()

    run(test)


def test_search_finds_a_session_by_what_was_said() -> None:
    async def test() -> None:
        async with running(ScriptedService(echo, manual=True)) as rig:
            await rig.send("tell me of walruses")
            await finish(rig)
            wanted = rig.talk.id
            await rig.press("ctrl+n", "ctrl+f")
            await rig.pilot.press(*"walrus")
            await rig.until(lambda: "tell me of" in rig.text())
            await rig.pilot.press("enter")
            await rig.until(lambda: rig.talk.id == wanted)

    run(test)


def test_the_pane_of_the_engine_shows_context_turns_and_pool() -> None:
    async def test() -> None:
        service = ScriptedService(echo, manual=True)
        service.cached_tokens = 20
        async with running(service, size=(160, 45)) as rig:
            await rig.send("hello")
            await finish(rig)
            await rig.until(lambda: "KV POOL  0 of 64 blocks" in rig.text())
            text = rig.text()
            assert "CONTEXT" in text and "of 4.1k" in text
            assert "PROMPT TOKENS BY TURN" in text and "20+" in text
            assert "free       64" in text and "REQUESTS  none" in text
            await rig.press("f2")
            assert not rig.chat.query_one(Details).display

    run(test)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("qwen", ["qwen  4 bits, groups of 64"]),
        ("maker/a-name-of-some-length", ["maker/a-name-of-some-length", "4 bits, groups of 64"]),
    ],
)
def test_the_pane_of_the_engine_tells_how_the_weights_are_stored(name: str, lines: list[str]) -> None:
    async def test() -> None:
        service = ScriptedService(manual=True, name=name, quantisation="4 bits, groups of 64", family="qwen3\x1b[31m")
        async with running(service, size=(160, 45)) as rig:
            shown = [line[122:].strip() for line in rig.text().splitlines()]
            at = shown.index("MODEL") + 1
            assert shown[at : at + len(lines) + 1] == [*lines, "qwen3\u241b[31m · 4.1k context"]

    run(test)


@pytest.mark.parametrize(
    ("size", "sidebar", "title"), [((200, 60), True, True), ((80, 24), False, True), ((40, 10), False, False)]
)
def test_small_terminals_lose_the_panes_first(size: tuple[int, int], sidebar: bool, title: bool) -> None:
    async def test() -> None:
        async with running(scripted("ok"), size=size) as rig:
            assert rig.chat.query_one(Sidebar).display is sidebar
            assert ("mlxpaged" in rig.text()) is title
            assert "Ask anything" in rig.text()

    run(test)


def test_help_is_readable_in_a_small_terminal() -> None:
    async def test() -> None:
        async with running(scripted("ok"), size=(80, 24)) as rig:
            await rig.press("f1")
            lines = [line.strip(" │").split() for line in rig.text().splitlines()]
            assert ["Ctrl+C", "copy", "what", "is", "selected,", "stop", "or", "clear"] in lines
            assert "Esc closes · // sends a slash · [keys] in config.toml changes keys" in rig.text()
            await rig.pilot.resize_terminal(40, 10)
            await rig.drawn()
            assert "Keys and commands" in rig.text() and "Ctrl+J" in rig.text() and "Esc closes" not in rig.text()

    run(test)


def test_resizing_while_it_writes_loses_nothing() -> None:
    async def test() -> None:
        words = [f"word{number} " for number in range(120)]
        async with running(scripted(*words), size=(40, 10)) as rig:
            await rig.send("go")
            for size in ((200, 60), (40, 10), (90, 30), (60, 15), (200, 60)):
                await rig.step(20)
                await rig.pilot.resize_terminal(*size)
            await finish(rig)
            assert "word0 word1" in rig.text() and "word119" in rig.text()

    run(test)


def test_a_code_block_of_2000_lines_is_plain_until_closed_and_stays_quick() -> None:
    async def test() -> None:
        lines = [f"x{number} = {number}  # line\n" for number in range(2000)]
        chunks = ["".join(lines[start : start + 50]) for start in range(0, 2000, 50)]
        async with running(scripted("```python\n", *chunks, "```\n", "Done."), size=(100, 30)) as rig:
            await rig.send("much code")
            await rig.step(5)
            block = rig.chat.query_one(CodeLines)
            assert len(block._coloured) <= 150
            await rig.step(36)
            assert block.virtual_size.height == 2000
            await finish(rig)
            assert len(block._coloured) == 2000
            assert "x1999 = 1999" in rig.text() and "Done." in rig.text()
            await rig.press("ctrl+y")
            assert rig.app.clipboard == "".join(lines).removesuffix("\n")

    run(test)


def test_control_sequences_of_the_model_are_shown_not_obeyed() -> None:
    async def test() -> None:
        evil = "red \x1b[31mtext\x1b]0;owned\x07 `\x9b2J`\n\n```\n\x1b[2Jcode\u2028line\n```\n"
        async with running(scripted(evil)) as rig:
            await rig.send("escape \x1b[0m")
            await finish(rig)
            text = rig.text()
            assert "␛[31mtext␛]0;owned␇" in text and "␛[2Jcode" in text
            assert not {"\x1b", "\x07", "\x9b"} & set(text)

    run(test)


def test_emoji_and_cjk_keep_their_columns() -> None:
    async def test() -> None:
        async with running(scripted("日本語 🎉 한국어\n\n```\n漢字 = 1\n```")) as rig:
            await rig.send("漢字 👩‍👩‍👧 ok")
            await finish(rig)
            assert "日本語 🎉 한국어" in rig.text() and "漢字 = 1" in rig.text()
            assert {strip.cell_length for strip in rig.app.screen._compositor.render_strips()} == {120}

    run(test)


def test_thinking_is_one_line_that_opens() -> None:
    async def test() -> None:
        async with running(scripted("<think>", "why not", "</think>", "Yes.")) as rig:
            await rig.send("?")
            await finish(rig)
            assert "▸ thinking · 2 words" in rig.text() and "why not" not in rig.text()
            await rig.press("ctrl+t")
            assert "why not" in rig.text()

    run(test)


def test_an_unreachable_server_is_one_clear_line_and_nothing_typed_is_lost() -> None:
    async def test() -> None:
        async with running(scripted("hi")) as rig:
            rig.doors.shut = True
            rig.app.tracker.connections.first.engine = None
            await rig.type("are you there?")
            await rig.press("enter")
            await rig.until(lambda: rig.talk.phase is Phase.ERROR)
            await rig.drawn()
            assert "no server answers at http://127.0.0.1:8642" in rig.text() and "are you there?" in rig.text()
            await rig.type("typed meanwhile")
            rig.doors.shut = False
            await rig.press("ctrl+r")
            await rig.until(lambda: rig.service.submitted)
            await finish(rig)
            assert rig.talk.turns and rig.talk.turns[-1].text == "hi"
            assert rig.chat.prompt.text == "typed meanwhile"

    run(test)


def test_an_error_in_mid_reply_keeps_the_text_and_says_why() -> None:
    async def test() -> None:
        broken = says("half an ans", finish=FinishReason.ERROR, error="the device is gone")
        async with running(ScriptedService(lambda *_: broken, manual=True)) as rig:
            await rig.send("x")
            await finish(rig)
            assert "half an ans" in rig.text() and "! the device is gone" in rig.text()

    run(test)


def test_a_reply_cut_at_its_longest_says_so_and_is_continued() -> None:
    async def test() -> None:
        def answer(prompt_ids: Sequence[int], sampling: SamplingParams) -> list[Delta]:
            cut = not ByteTokenizer().decode(prompt_ids, skip_special=False).endswith("Once upon")
            return says("Once upon", finish=FinishReason.LENGTH) if cut else says(" a time")

        async with running(ScriptedService(answer, manual=True)) as rig:
            await rig.send("tell")
            await finish(rig)
            assert "■ cut at its longest · /continue goes on" in rig.text()
            assert rig.store.messages(rig.talk.id)[-1].state == "cut"
            await rig.send("/continue")
            await finish(rig)
            assert "Once upon a time" in rig.text() and "cut at its longest" not in rig.text()
            assert rig.store.messages(rig.talk.id)[-1].state == "done"

    run(test)


def test_a_reply_that_broke_off_before_the_app_began_is_marked_in_the_list(tmp_path: Path) -> None:
    async def test() -> None:
        before = Store(tmp_path / "s.db")
        for state in ("error", "stopped", "done"):
            session = before.create()
            before.ask(session.id, f"ended {state}")
            before.reply(session.id).finish(state)
        before.close()
        async with running(scripted(), store=Store(tmp_path / "s.db"), session="ended done") as rig:
            phases = {talk.name: str(talk.phase) for talk in rig.chat.tracker.talks.values()}
            assert phases == {"ended error": "error", "ended stopped": "stopped", "ended done": "idle"}
            assert "! error" in rig.text() and "■ stopped" in rig.text()

    run(test)


def test_a_reply_cut_by_a_crash_is_shown_and_continued(tmp_path: Path) -> None:
    async def test() -> None:
        dead = Store(tmp_path / "s.db")
        session = dead.create()
        dead.ask(session.id, "tell")
        draft = dead.reply(session.id)
        draft.feed("Once upon")
        dead.save(draft._now())
        assert dead._tables.file
        dead._tables.file.execute("UPDATE session SET owner = '999999999:1:x'")  # its process is no more
        async with running(scripted(" a time"), store=Store(tmp_path / "s.db"), session="tell") as rig:
            assert "‖ interrupted" in rig.text() and "Once upon" in rig.text()
            rig.chat.prompt.put("/continue")
            await rig.press("enter")
            await rig.until(lambda: rig.service.submitted)
            await finish(rig)
            assert "Once upon a time" in rig.text()

    run(test)


def test_a_long_session_opens_at_its_end_and_shows_earlier_turns_on_demand() -> None:
    async def test() -> None:
        store = Store(None)
        session = store.create()
        for number in range(40):
            store.ask(session.id, f"question {number}")
            store.reply(session.id).finish("done")
        store.rename(session.id, "long")
        async with running(scripted("ok"), store=store, session="long") as rig:
            assert "question 39" in rig.text()
            assert len(rig.chat.transcript._views) == 24
            await rig.chat.transcript.show_earlier()
            assert len(rig.chat.transcript._views) == 48

    run(test)


def test_nothing_is_drawn_and_no_timer_runs_while_nothing_happens() -> None:
    async def test() -> None:
        async with running(scripted("ok")) as rig:
            await rig.send("x")
            await finish(rig)
            drawn = []
            rig.chat._draw_bars = lambda: drawn.append(1)  # type: ignore[method-assign]
            await rig.pilot.pause(0.6)
            assert drawn == [] and rig.chat.frames.idle and rig.chat._looks.idle

    run(test)


def test_text_that_grows_is_drawn_at_once_and_figures_only_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with running(scripted(*"abcdefghi"), size=(160, 45)) as rig:
            await rig.send("x")
            await rig.step(2)
            monkeypatch.setattr(frames, "COUNT_S", 1000.0)
            await rig.press("ctrl+b", "ctrl+b")  # a drawing with everything: the next is far off now
            await rig.step(2)
            drawn = []
            bars, details = rig.chat._draw_bars, rig.chat._draw_details
            monkeypatch.setattr(rig.chat, "_draw_bars", lambda: (drawn.append("bars"), bars()))
            monkeypatch.setattr(rig.chat, "_draw_details", lambda: (drawn.append("details"), details()))
            monkeypatch.setattr(rig.chat._looks, "_look_in_background", lambda: None)
            await rig.step(3)
            assert "abcdefg" in rig.text() and drawn == []
            assert "2 tokens" not in rig.text()
            await finish(rig)
            assert "bars" in drawn and "details" in drawn and "9 tokens" in rig.text()

    run(test)


def test_sessions_that_are_not_on_the_screen_ask_for_no_drawing_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with running(scripted(*"abcdefghi")) as rig:
            await rig.send("x")
            await rig.step(2)
            hidden = rig.talk
            await rig.press("ctrl+n")
            monkeypatch.setattr(frames, "COUNT_S", 1000.0)
            rig.chat.frames._next_count = time.monotonic() + 1000.0
            drawn = []
            draw = rig.chat.frames._draw_in_background
            monkeypatch.setattr(rig.chat.frames, "_draw_in_background", lambda: (drawn.append(1), draw()))
            for number in range(3, 6):
                rig.service.step()
                await rig.until(lambda number=number: hidden.num_tokens == number)
            assert drawn == [] and rig.chat.frames._timer
            rig.chat.frames.changed(hidden.id, Change.PHASE)
            await rig.drawn()
            assert drawn == [1]

    run(test)


def test_a_context_that_is_nearly_full_is_said() -> None:
    async def test() -> None:
        async with running(ScriptedService(lambda *_: says("word " * 60), manual=True, context_len=350)) as rig:
            await rig.send("x")
            await finish(rig)
            assert "the context is" in rig.text() and "% full · /clear, or fork" in rig.text()

    run(test)


def test_themes_are_remembered() -> None:
    async def test() -> None:
        async with running(scripted("ok")) as rig:
            rig.app.theme = "mlxpaged-day"
            await rig.pilot.pause()
        async with running(scripted("ok")) as rig:
            assert rig.app.theme == "mlxpaged-day"
        async with running(scripted("ok"), theme="nord") as rig:
            assert rig.app.theme == "nord"

    run(test)


def test_code_blocks_copy_by_click() -> None:
    async def test() -> None:
        async with running(scripted("```sh\nls -l\n```\n")) as rig:
            await rig.send("x")
            await finish(rig)
            await rig.pilot.click("CopyButton")
            await rig.drawn()
            assert rig.app.clipboard == "ls -l" and len(rig.chat.query(CodeBlock)) == 1

    run(test)


def test_leaving_closes_the_link_and_saves() -> None:
    async def test() -> None:
        async with running(scripted("One ", "two")) as rig:
            await rig.send("x")
            rig.service.step()
            engine = rig.app.tracker.connections.first.engine
            await rig.pilot.press("ctrl+q")
            await rig.until(lambda: rig.service.num_cancelled)
            rig.service.step()
            await rig.until(lambda: engine and engine.link.closed)
            assert rig.app.return_code == 0

    run(test)


def test_a_server_that_takes_a_dead_ones_place_is_told_of_like_the_first() -> None:
    async def test() -> None:
        service = scripted("ok")
        async with running(service, doors=Doors(service, "Started a server at http://127.0.0.1:1.")) as rig:
            await rig.until(lambda: rig.toasts().count("Started a server") == 1)
            await rig.send("one")
            await finish(rig)
            assert rig.toasts().count("Started a server") == 1
            rig.app.clear_notifications()
            await rig.app.tracker.connections.first.lost(in_use=False)
            await rig.send("two")
            await rig.until(lambda: rig.toasts().count("Started a server") == 1)
            await finish(rig)

    run(test)


def test_a_value_out_of_range_is_refused_when_it_is_set_and_not_at_the_next_message() -> None:
    async def test() -> None:
        async with running(scripted("ok")) as rig:
            rig.chat.prompt.put("/params temperature 99")
            await rig.press("enter")
            await rig.until(lambda: "temperature is 99; it must be from 0 (greedy) to 2" in rig.toasts())
            assert rig.chat.talk.params == {}
            rig.chat.prompt.put("/params temperature 0.5")
            await rig.press("enter")
            await rig.until(lambda: rig.chat.talk.params == {"temperature": 0.5})

    run(test)


def test_continue_says_so_while_the_reply_is_still_written() -> None:
    async def test() -> None:
        async with running(scripted("One ", "two ", "three")) as rig:
            await rig.send("count")
            await rig.step(2)
            rig.chat.prompt.put("/continue")
            await rig.press("enter")
            await rig.until(lambda: "This session is still answering." in rig.toasts())
            await finish(rig)

    run(test)


def test_enter_does_not_delete_a_session() -> None:
    async def test() -> None:
        async with running(scripted("ok")) as rig:
            await rig.send("keep me")
            await finish(rig)
            rig.chat.prompt.put("/delete")
            await rig.press("enter")
            await rig.until(lambda: "for good?" in rig.text())
            await rig.press("enter")
            await rig.pilot.pause()
            assert "for good?" in rig.text() and len(rig.chat.talks) == 1
            await rig.press("y")
            await rig.until(lambda: "keep me" not in rig.text())

    run(test)
