"""The log of a transaction key in a state topic: its messages, and what follows from them."""

from dataclasses import replace
from functools import reduce

import pytest

from magnetar import GroupRecord
from magnetar.protocol.txn_id import TxnId
from magnetar.spark.errors import InvalidOption, StateUnreadable
from magnetar.spark.key_log import (
    EARLIER_QUERIES,
    Entry,
    EntryKind,
    KeyState,
    MessageRef,
    Verdict,
    digest_of,
    entry_of,
    text_of,
)
from magnetar.spark.sink_options import SinkOptions, StateOption

T0, T1 = TxnId(0, 0), TxnId(3, 1)


def opened(nonce: str, epoch: int = -1) -> Entry:
    return Entry(EntryKind.OPEN, nonce, epoch)


def intent(epoch: int, txn: TxnId) -> Entry:
    return Entry(EntryKind.INTENT, "n", epoch, txn)


def record(query: str, batch: int, txn: TxnId = T0, positions: str | None = None) -> Entry:
    return Entry(EntryKind.RECORD, "n", 0, txn, GroupRecord(query, batch, positions, txn))


def folded(*entries: Entry) -> KeyState:
    return reduce(KeyState.after, entries, KeyState())


def test_log_entries_survive_serialization() -> None:
    state = folded(opened("a"), record("q", 7, T1, "here"), record("ü", 0))
    for entry in (opened("a", 4), intent(2, T1), record("q", 7, T1, "p"), state.state_entry("x")):
        text = text_of(entry)
        assert entry_of(text.encode()) == entry
        assert text_of(entry_of(text.encode())) == text
    for text in ("", "{}", "[1]", '{"v":2}', '{"v":1,"kind":"x","nonce":"","epoch":0}'):
        with pytest.raises(StateUnreadable, match="stateTopic"):
            entry_of(text.encode())


def test_each_opening_raises_the_epoch_once() -> None:
    assert folded(opened("a")).epoch == 0
    assert folded(opened("a"), opened("b"), opened("a")).epoch == 1
    assert folded(opened("a"), opened("b"), opened("a")).opener == "b"
    assert folded(opened("a"), opened("b", 1)).opener == "a", "it expected another epoch"
    assert folded(opened("a"), opened("b", 0)).opener == "b"


def test_intents_are_pending_until_their_record_or_the_next_state() -> None:
    begun = folded(opened("a"), intent(0, T0), intent(0, T1))
    assert begun.pending == (T0, T1)
    assert begun.after(record("q", 0, T0)).pending == (T1,)
    taken = begun.after(opened("b"))
    assert taken.after(intent(0, TxnId(9, 9))).pending == (T0, T1), "of an older epoch"
    assert taken.pending == (T0, T1)
    assert taken.after(taken.state_entry("b")).pending == ()


def test_intents_are_pending_where_the_beginning_of_the_log_is_lost() -> None:
    assert folded(intent(5, T0), opened("b")).pending == (T0,)


def test_state_stored_twice_keeps_later_intents() -> None:
    base = folded(opened("a"))
    begun = base.after(base.state_entry("a")).after(intent(0, T0))
    assert begun.after(base.state_entry("a")).pending == (T0,)
    whole = KeyState().after(base.state_entry("a")).after(intent(0, T0))
    assert whole.after(base.state_entry("a")).pending == (T0,)


def test_reader_from_a_state_knows_openings_stored_twice() -> None:
    base = folded(opened("a"), opened("b"))
    begun = KeyState().after(base.state_entry("b"))
    assert (begun.after(opened("a")).epoch, begun.after(opened("c")).epoch) == (1, 2)


def test_reader_from_a_state_knows_earlier_entries() -> None:
    whole = folded(opened("a"), record("old", 3), record("q", 7, T1, "here"))
    base = whole.state_entry("a")
    begun = KeyState().after(entry_of(text_of(base).encode()))
    assert (begun.epoch, begun.opener, begun.last) == (0, "a", whole.last)
    assert begun.batches == whole.batches
    assert whole.after(base) == replace(whole, begun=True)


def test_verdict_on_a_batch_follows_from_the_log() -> None:
    state = folded(opened("a"), record("old", 3), record("q", 7, T1, "here"))
    assert state.verdict(0, "q", 8, "there") is Verdict.WRITE
    assert state.verdict(0, "q", 7, "here") is Verdict.DONE
    assert state.verdict(0, "q", 7, None) is Verdict.DONE
    assert state.verdict(0, "q", 7, "there") is Verdict.DIFFERS
    assert state.verdict(0, "q", 6, "there") is Verdict.DONE
    assert state.verdict(0, "old", 3, "any") is Verdict.DONE
    assert state.verdict(0, "new", 0, None) is Verdict.WRITE
    assert state.after(opened("b")).verdict(0, "q", 8, None) is Verdict.FENCED
    assert state.verdict(1, "q", 8, None) is Verdict.UNKNOWN


def test_the_last_batches_of_few_queries_are_kept() -> None:
    state = folded(opened("a"), *(record(f"q{n}", n) for n in range(20)))
    assert list(state.batches) == [f"q{n}" for n in range(20 - EARLIER_QUERIES - 1, 20)]
    assert state.after(record("q19", 5)).batches["q19"] == 19, "it never goes back"


def test_sink_options_locate_the_state_topic() -> None:
    given = {"serviceUrl": "pulsar://a", "topic": "t", "txnKey": "k", "txnEpoch": "0"}
    state = StateOption(
        "topic://public/default/s", MessageRef((4, 17), digest_of(b"what is there"))
    )
    assert SinkOptions.of({**given, **state.options}, streaming=True).state == state
    assert SinkOptions.of(given, streaming=True).state is None
    for broken in (
        {"stateTopic": "s"},
        {"stateFrom": "4:17"},
        {"stateTopic": "s", "stateFrom": "4"},
        {"stateTopic": "s", "stateFrom": "4:17"},
        {"stateTopic": "s", "stateFrom": "4:17:short"},
        {"stateFrom": str(state.start)},
    ):
        with pytest.raises(InvalidOption, match="open_key"):
            SinkOptions.of(given | broken, streaming=True)
