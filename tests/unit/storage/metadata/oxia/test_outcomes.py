"""Lost answers: what is known, what is sent again, what stays unknown."""

from storage.metadata.oxia.outcomes import (
    Doubt,
    Resend,
    Verdict,
    recheck,
    result_of,
    settle_key,
    settle_sequence,
)
from storage.metadata.oxia.writes import Write
from tests.unit.storage.metadata.oxia.writes_of import delete, found, put, sequence_put

HIGHEST = 10
UNKNOWN = Doubt.UNKNOWN
OLD, NEW = found(HIGHEST), found(HIGHEST + 1)


def settled(*writes: Write, record: object = None) -> list[Verdict]:
    return settle_key(writes, record, HIGHEST)  # type: ignore[arg-type]


def test_a_record_with_our_id_is_ours() -> None:
    ours = found(HIGHEST + 5, "me-1")
    for expected in (None, -1, 7):
        assert settled(put(expected=expected), record=ours) == [result_of(ours)]


def test_an_older_record_shows_that_nothing_took_effect() -> None:
    assert settled(put(), record=OLD) == [Resend(HIGHEST)]
    assert settled(delete(), record=OLD) == [Resend(HIGHEST)]
    assert settled(put(expected=7), record=OLD) == [Resend(7)]
    assert settled(put(expected=-1), record=OLD) == [Resend(-1)]


def test_somebody_elses_newer_record_leaves_it_unknown() -> None:
    for write in (put(), put(expected=7), put(expected=-1), delete(), delete(expected=7)):
        assert settled(write, record=NEW) == [UNKNOWN]


def test_a_newer_record_without_note_is_somebody_elses() -> None:
    assert settled(put(), record=found(HIGHEST + 1, None)) == [UNKNOWN]


def test_an_absent_record() -> None:
    assert settled(put()) == [Resend(-1)]
    assert settled(put(expected=-1)) == [Resend(-1)]
    assert settled(put(expected=7)) == [UNKNOWN]
    assert settled(delete()) == [True]
    assert settled(delete(expected=7)) == [True]


def test_writes_before_the_one_that_is_there_have_no_result() -> None:
    ours = found(HIGHEST + 2, "me-2")
    writes = put(put_id="me-1"), put(put_id="me-2"), put(put_id="me-3"), delete()
    assert settled(*writes, record=ours) == [
        UNKNOWN,
        result_of(ours),
        Resend(HIGHEST + 2),
        Resend(None),
    ]


def test_only_the_first_write_of_a_key_is_guarded() -> None:
    """The others follow it in the log; a condition of their caller's stays."""
    writes = put(), put(put_id="me-2"), put(put_id="me-3", expected=4)
    assert settled(*writes, record=OLD) == [Resend(HIGHEST), Resend(None), Resend(4)]


def test_a_delete_among_lost_writes_of_an_absent_record() -> None:
    assert settled(put(), delete(), put(put_id="me-2")) == [UNKNOWN, True, Resend(-1)]


def test_a_sequence_put_is_found_by_its_id_and_never_sent_again() -> None:
    there = found(HIGHEST + 1, "me-2", key="/s/-00000000000000000004")
    writes = [sequence_put(put_id="me-1"), sequence_put(put_id="me-2")]
    assert settle_sequence(writes, {"me-2": there}) == [UNKNOWN, result_of(there)]


def test_a_failed_condition_of_what_was_sent_again() -> None:
    ours = found(20, "me-1")
    assert recheck(put(), ours) == result_of(ours)
    assert recheck(put(expected=7), ours) == result_of(ours)
    assert recheck(put(expected=7), NEW) is Doubt.CONFLICT
    assert recheck(put(expected=-1), NEW) is Doubt.CONFLICT
    assert recheck(delete(), None) is True
    assert recheck(delete(expected=7), NEW) is Doubt.CONFLICT


def test_recheck_of_a_record_written_since_is_an_unknown_outcome() -> None:
    """It may be a later write of this process."""
    assert recheck(put(), NEW) is UNKNOWN
    assert recheck(put(), None) is UNKNOWN
    assert recheck(delete(), NEW) is UNKNOWN
