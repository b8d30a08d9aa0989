"""What the tracker keeps of sessions, and what reaches the store, without a screen."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from mlxpaged.chat.store import Store
from mlxpaged.engine.events import Delta, Progress
from mlxpaged.errors import BadParameter, SessionBusy
from mlxpaged.sched.requests import FinishReason
from mlxpaged.tui.changes import Change
from mlxpaged.tui.state import Given, Phase, Rate, in_words
from mlxpaged.tui.tracker import Tracker
from tests.scripted import ScriptedService, says
from tests.tui.rig import Doors


class Case:
    """A tracker over a scripted engine that moves when told."""

    def __init__(
        self, service: ScriptedService | None = None, store: Store | None = None, given: Given | None = None
    ) -> None:
        self.service = service or ScriptedService(manual=True)
        self.store = store or Store(None)
        self.doors = Doors(self.service)
        self.changes: list[tuple[str, Change]] = []
        self.tracker = Tracker(self.store, self.doors, lambda *change: self.changes.append(change), given=given)

    async def until(self, holds: Callable[[], object]) -> None:
        for _ in range(500):
            if holds():
                return
            await asyncio.sleep(0.005)
        raise AssertionError("never held")

    async def asked(self, session_id: str, text: str) -> None:
        before = len(self.service.submitted)
        await self.tracker.send(session_id, text)
        await self.until(lambda: len(self.service.submitted) > before)

    async def finished(self, session_id: str) -> None:
        while self.tracker.talks[session_id].phase.is_live:
            self.service.step()
            await asyncio.sleep(0.005)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))  # type: ignore[arg-type]


def test_a_turn_is_saved_before_its_reply_and_the_reply_after_it() -> None:
    async def test() -> None:
        case = Case()
        talk = case.tracker.new()
        await case.asked(talk.id, "Hello")
        assert [message.content for message in case.store.messages(talk.id)] == ["Hello", ""]
        assert talk.phase is Phase.QUEUED and talk.title == "Hello"
        await case.finished(talk.id)
        saved = case.store.messages(talk.id)[-1]
        assert (saved.content, saved.state) == ("Hello", "done")
        assert saved.usage and saved.usage.completion_tokens == 5
        assert talk.phase is Phase.IDLE

    run(test)


def test_a_token_is_told_with_or_without_text_and_the_phase_only_when_it_changes() -> None:
    async def test() -> None:
        script = [Delta("", token_ids=(1,)), Delta("é", token_ids=(2,)), *says("!")]
        case = Case(ScriptedService(lambda *_: script, manual=True))
        talk = case.tracker.new()
        await case.asked(talk.id, "x")
        case.changes.clear()
        for number in (1, 2):
            case.service.step()
            await case.until(lambda number=number: talk.num_tokens == number)
        assert [change for _, change in case.changes] == [Change.PHASE, Change.TEXT, Change.TEXT]
        await case.finished(talk.id)

    run(test)


def test_two_sessions_are_answered_at_once_and_apart() -> None:
    async def test() -> None:
        case = Case(ScriptedService(lambda ids, _: says(str(len(ids)), "."), manual=True))
        first, second = case.tracker.new(), case.tracker.new()
        await case.asked(first.id, "a")
        await case.asked(second.id, "bbbb")
        assert len(case.service._rows) == 2
        await case.finished(first.id)
        await case.finished(second.id)
        assert first.turns and second.turns
        assert int(second.turns[-1].text[:-1]) - int(first.turns[-1].text[:-1]) == 3

    run(test)


def test_phases_follow_the_engine() -> None:
    async def test() -> None:
        waiting = [Delta(progress=Progress(0, 8, 0, place)) for place in (3, 0)]
        script = [*waiting, Delta(progress=Progress(0, 8, 0)), Delta(progress=Progress(4, 8, 2)), *says("Hi")]
        case = Case(ScriptedService(lambda *_: script, manual=True))
        talk = case.tracker.new()
        await case.asked(talk.id, "x")
        seen = []
        while talk.phase.is_live:
            case.service.step()
            await asyncio.sleep(0.01)
            seen.append((talk.phase, in_words(talk)))
        assert [words for phase, words in seen if phase is Phase.QUEUED] == [
            "queued, 3 ahead",
            "queued, next",
            "queued",
        ]
        assert seen[3] == (Phase.READING, "reading 50%")
        assert seen[4][0] is Phase.WRITING
        assert seen[5][0] is Phase.IDLE

    run(test)


def test_stop_keeps_what_came_and_go_on_continues_it() -> None:
    async def test() -> None:
        case = Case(ScriptedService(lambda *_: says("One ", "two"), manual=True))
        talk = case.tracker.new()
        await case.asked(talk.id, "count")
        case.service.step()
        await case.until(lambda: talk.turns and talk.turns[-1].text == "One ")
        case.tracker.stop(talk.id)
        await case.finished(talk.id)
        assert talk.phase is Phase.STOPPED
        assert case.store.messages(talk.id)[-1].state == "stopped"
        await case.tracker.go_on(talk.id)
        await case.until(lambda: len(case.service.submitted) == 2)
        prompt = bytes(one for one in case.service.submitted[1][0] if one < 256).decode()
        assert prompt.endswith("One ") or prompt.endswith("One")
        await case.finished(talk.id)
        assert talk.turns and talk.turns[-1].text == "One One two"
        assert len(talk.turns) == 2

    run(test)


def test_fork_shares_the_turns_and_leaves_the_first_alone() -> None:
    async def test() -> None:
        case = Case()
        talk = case.tracker.new()
        for text in ("one", "two"):
            await case.asked(talk.id, text)
            await case.finished(talk.id)
        assert talk.turns
        fork = await case.tracker.fork(talk.id, talk.turns[1].id)
        assert fork.turns and [turn.text for turn in fork.turns] == ["one", "Hello"]
        assert fork.parent == talk.id and next(iter(case.tracker.talks)) == fork.id
        await case.asked(fork.id, "other")
        ids, _ = case.service.submitted[-1]
        earlier, _ = case.service.submitted[1]
        shared = next(i for i, (a, b) in enumerate(zip(ids, earlier, strict=False)) if a != b)
        assert shared > len(case.service.submitted[0][0])  # the whole first exchange is one prefix
        await case.finished(fork.id)
        assert len(talk.turns) == 4 and len(fork.turns) == 4

    run(test)


def test_retry_asks_the_same_again_and_edit_asks_anew() -> None:
    async def test() -> None:
        case = Case()
        talk = case.tracker.new()
        await case.asked(talk.id, "one")
        await case.finished(talk.id)
        await case.tracker.retry(talk.id)
        await case.until(lambda: len(case.service.submitted) == 2)
        assert case.service.submitted[0][0] == case.service.submitted[1][0]
        await case.finished(talk.id)
        assert talk.turns and len(talk.turns) == 2
        await case.tracker.edit(talk.id, talk.turns[0].id, "uno")
        await case.until(lambda: len(case.service.submitted) == 3)
        await case.finished(talk.id)
        assert [turn.text for turn in talk.turns] == ["uno", "Hello"]
        assert [message.content for message in case.store.messages(talk.id)] == ["uno", "Hello"]

    run(test)


def test_take_back_while_it_writes_stops_it_first() -> None:
    async def test() -> None:
        case = Case()
        talk = case.tracker.new()
        await case.asked(talk.id, "oops")
        taking = asyncio.create_task(case.tracker.take_back(talk.id))
        await case.until(lambda: case.service.num_cancelled)
        case.service.step()
        assert await taking == "oops"
        assert talk.turns == [] and case.store.messages(talk.id) == []

    run(test)


def test_a_reply_that_breaks_off_says_why() -> None:
    async def test() -> None:
        broken = says("half", finish=FinishReason.ERROR, error="the device is gone")
        case = Case(ScriptedService(lambda *_: broken, manual=True))
        talk = case.tracker.new()
        await case.asked(talk.id, "x")
        await case.finished(talk.id)
        assert talk.turns and talk.turns[-1].error == "the device is gone" and talk.turns[-1].text == "half"
        assert talk.phase is Phase.ERROR

    run(test)


def test_an_unreachable_server_keeps_the_turn_and_a_retry_connects_again() -> None:
    async def test() -> None:
        case = Case()
        case.doors.shut = True
        talk = case.tracker.new()
        await case.tracker.send(talk.id, "hello?")
        await case.until(lambda: talk.phase is Phase.ERROR)
        assert talk.turns and "no server answers" in str(talk.turns[-1].error)
        assert case.tracker.connections.first.failed
        assert case.store.messages(talk.id)[0].content == "hello?"
        case.doors.shut = False
        await case.tracker.retry(talk.id)
        await case.until(lambda: case.service.submitted)
        await case.finished(talk.id)
        assert talk.turns[-1].text == "Hello" and not case.tracker.connections.first.note

    run(test)


def test_a_session_that_another_process_has_open_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        elsewhere = Store(tmp_path / "s.db")
        session = elsewhere.create()
        elsewhere.ask(session.id, "mine")
        case = Case(store=Store(tmp_path / "s.db"))
        await case.tracker.load()
        assert case.tracker.talks[session.id].busy
        with pytest.raises(SessionBusy):
            await case.tracker.send(session.id, "no, mine")
        fork = await case.tracker.fork(session.id)
        assert fork.turns and fork.turns[0].text == "mine"
        await case.tracker.close()
        elsewhere.close()

    run(test)


def test_closing_saves_what_was_being_written(tmp_path: Path) -> None:
    async def test() -> None:
        case = Case(store=Store(tmp_path / "s.db"))
        talk = case.tracker.new()
        await case.asked(talk.id, "x")
        case.service.step()
        await case.until(lambda: talk.turns and talk.turns[-1].text)
        closing = asyncio.create_task(case.tracker.close())
        await case.until(lambda: case.service.num_cancelled)
        case.service.step()
        assert await closing is None
        again = Store(tmp_path / "s.db")
        assert [(m.content, m.state) for m in again.messages(talk.id)] == [("x", "done"), ("Hel", "stopped")]
        again.close()

    run(test)


def test_sampling_is_the_sessions_own_over_the_models() -> None:
    async def test() -> None:
        service = ScriptedService(manual=True, defaults={"temperature": 0.6, "top_k": 20.0})
        case = Case(service)
        talk = case.tracker.new()
        await case.tracker.set_params(talk.id, {"temperature": 0.1, "enable_thinking": 0.0})
        await case.asked(talk.id, "x")
        sampling = service.submitted[0][1]
        assert (sampling.temperature, sampling.top_k) == (0.1, 20)
        with pytest.raises(BadParameter):
            await case.tracker.set_params(talk.id, {"top_p": 2.0})

    run(test)


def test_what_the_app_was_started_with_holds_while_it_runs_and_is_kept_in_no_session() -> None:
    async def test() -> None:
        case = Case(given=Given("Be brief.", {"max_tokens": 5, "temperature": 0.2}))
        talk = case.tracker.new()
        await case.tracker.set_params(talk.id, {"temperature": 0.1})
        other = case.tracker.new()
        for one in (talk, other):
            await case.asked(one.id, "x")
        asked = [(sampling.temperature, sampling.max_tokens) for _, sampling in case.service.submitted]
        assert asked == [(0.1, 5), (0.2, 5)]
        kept = [case.store.session(one.id) for one in (talk, other)]
        assert [(one.system, one.params) for one in kept] == [("Be brief.", {"temperature": 0.1}), ("Be brief.", {})]

    run(test)


def test_the_rate_is_that_of_the_last_moments() -> None:
    rate = Rate()
    assert rate.per_s == 0.0
    for tick in range(41):
        rate.add(tick / 10, 1 if tick < 20 else 4)
    assert rate.per_s == pytest.approx(40)


def test_a_session_that_is_put_away_twice_at_once_is_gone_once() -> None:
    async def test() -> None:
        case = Case()
        kept, gone = case.tracker.new(), case.tracker.new()
        await asyncio.gather(case.tracker.put_away(gone.id), case.tracker.put_away(gone.id))
        assert list(case.tracker.talks) == [kept.id]

    run(test)
