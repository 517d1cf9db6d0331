"""What replicators hold while they wait for another cluster."""

import pytest

from broker.replication.read_ahead import ReadAhead
from broker.topics.dispatch.entry_reader import EntryReader
from magnetar.protocol.ids import EARLIEST
from storage.callbacks import ignore
from tests.support.bounds import set_bound
from tests.unit.broker.replication.conftest import Cluster

Pair = tuple[Cluster, Cluster]


async def test_what_was_dropped_is_read_again_when_half_of_what_is_in_flight_is_answered(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    east, _ = pair
    await east.publish(b"0")
    ledger = next(iter(east.broker.topics.loaded().values())).ledger
    reader = EntryReader(ledger, EARLIEST, skip=lambda position: position, ready=ignore)
    share = ReadAhead().share(reader)
    reader.fill(ledger.last_confirmed, 1)
    share.wait()
    assert [share.may_send_more(each, 10) for each in (5, 6, 9, 10)] == [True, True, True, False]
    share.release()
    set_bound(monkeypatch, "REPLICATION_READ_AHEAD_BYTES", 0)
    share.wait()
    assert not reader.buffer
    assert [share.may_send_more(each, 10) for each in (5, 6, 9, 10)] == [True, False, False, False]
    reader.close()
