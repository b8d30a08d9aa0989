"""Which panes are shown at which size, and what a person may change of that."""

from __future__ import annotations

from textual.geometry import Size
from textual.widget import Widget

from mlxpaged.tui.panes import Panes

WIDE, NORMAL, NARROW, TINY = Size(150, 40), Size(90, 24), Size(89, 24), Size(150, 14)


def test_panes_go_by_size_until_a_person_wants_otherwise() -> None:
    sidebar, details = Widget(), Widget()
    panes = Panes({"sidebar": sidebar, "details": details})

    def shown(size: Size) -> tuple[bool, bool, bool]:
        tiny = panes.arrange(size)
        return sidebar.display, details.display, tiny

    assert [shown(size) for size in (WIDE, NORMAL, NARROW, TINY)] == [
        (True, True, False),
        (True, False, False),
        (False, False, False),
        (False, False, True),
    ]
    panes.toggle("sidebar")
    assert shown(TINY) == (True, False, True)
    assert shown(Size(55, 20)) == (False, False, True) and panes.lacks_room("sidebar", Size(55, 20))
    assert shown(Size(56, 20)) == (True, False, True)
    assert shown(NARROW) == (True, False, False)
    panes.toggle("sidebar")
    assert shown(WIDE) == (False, True, False)


def test_where_two_panes_leave_no_room_for_the_conversation_the_last_one_stays() -> None:
    sidebar, details = Widget(), Widget()
    panes = Panes({"sidebar": sidebar, "details": details})

    def shown(size: Size, toggled: str = "") -> tuple[bool, bool]:
        if toggled:
            panes.toggle(toggled)
        panes.arrange(size)
        return sidebar.display, details.display

    assert shown(NORMAL) == (True, False)
    assert shown(NORMAL, "details") == (False, True)
    assert shown(NORMAL, "sidebar") == (True, False)
    assert shown(Size(120, 40)) == (True, True)
    assert shown(NARROW) == (True, False)
    assert shown(NARROW, "sidebar") == (False, True)
    assert shown(NARROW, "details") == (False, False)
