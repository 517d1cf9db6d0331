"""Entries in flight to another cluster."""

from broker.replication.send_window import SendWindow
from magnetar.protocol.ids import Position


def test_a_refused_entry_leaves_the_others_to_be_answered_in_order() -> None:
    window = SendWindow()
    window.begin(by_position=True)
    ids = [window.add(Position(1, entry), 0.0) for entry in range(4)]
    assert window.refused(ids[2]) == Position(1, 2)
    assert window.refused(ids[2]) is None
    assert [window.answered(1, entry) for entry in (0, 1)] == [Position(1, 0), Position(1, 1)]
    assert window.answered(1, 2) is None
    assert window.answered(1, 3) == Position(1, 3)
    assert len(window) == 0
