"""What is refused as a duplicate, and what is remembered for it."""

from hypothesis import given
from hypothesis import strategies as st

from broker.topics.deduplication import (
    NO_POSITION,
    Chunk,
    Deduplication,
    ProducerSequence,
    ResendGuard,
    SequenceGuard,
    chunk_of,
    last_sequence,
)
from magnetar.protocol.ids import Position, to_wire
from magnetar.protocol.pulsar_pb2 import MessageMetadata


def durable(last: int, *, publish_time_ms: int | None = None) -> ProducerSequence:
    sequence = ProducerSequence(last)
    sequence.publish_time_ms = publish_time_ms
    return sequence


def metadata(name: str, sequence: int, **fields: object) -> MessageMetadata:
    return MessageMetadata(
        producer_name=name,
        sequence_id=sequence,
        publish_time=100 + min(sequence, 1000),
        **fields,  # type: ignore[arg-type]
    )


def remembering(limit: int = 10, keep_ms: int = 1000) -> Deduplication:
    return Deduplication(limit=limit, keep_ms=keep_ms)


def takes(guard: SequenceGuard, sequence: int, chunk: Chunk | None = None) -> bool:
    """Whether it is no duplicate; then it is accepted."""
    if guard.is_duplicate(sequence, chunk):
        return False
    guard.accept(sequence, chunk)
    return True


def test_a_guard_takes_only_what_is_above_all_it_took() -> None:
    guard = SequenceGuard(durable(4))
    assert [number for number in (4, 5, 5, 9, 7, 10) if takes(guard, number)] == [5, 9, 10]


def test_message_not_accepted_yet_is_no_duplicate() -> None:
    guard = SequenceGuard(durable(4))
    chunk = Chunk("p-5", 0, last=False)
    assert [guard.is_duplicate(5, each) for each in (None, None, chunk, chunk)] == [False] * 4


@given(st.lists(st.integers(0, 20)), st.integers(-1, 20))
def test_accepted_sequence_ids_rise(numbers: list[int], last: int) -> None:
    guard = SequenceGuard(durable(last))
    taken = [number for number in numbers if takes(guard, number)]
    assert taken == sorted(set(taken))
    assert all(number > last for number in taken)


def test_chunks_of_one_message_have_one_sequence_id() -> None:
    guard = SequenceGuard(durable(1))
    chunks = [Chunk("p-2", index, index == 2) for index in range(3)]
    assert [takes(guard, 2, chunk) for chunk in chunks] == [True, True, True]
    assert [takes(guard, 2, chunk) for chunk in chunks] == [False, False, False]
    assert takes(guard, 3)


def test_a_resend_goes_on_at_the_first_chunk_that_is_missing() -> None:
    sequence = durable(1, publish_time_ms=50)
    sequence.stored(2, Position(1, 5), Chunk("p-2", 0, last=False))
    sequence.stored(2, Position(1, 6), Chunk("p-2", 1, last=False))
    assert sequence.last == 1
    guard = ResendGuard(sequence)
    answers = [guard.is_resend(2, Chunk("p-2", index, index == 3), 40) for index in range(4)]
    assert answers == [True, True, False, False]
    assert guard.over


def test_the_first_message_that_is_not_durable_ends_the_resending() -> None:
    guard = ResendGuard(durable(7, publish_time_ms=100))
    assert guard.is_resend(6, None, 90)
    assert guard.is_resend(7, None, 100)
    assert not guard.over
    assert not guard.is_resend(8, None, 101)
    assert guard.over


def test_a_younger_message_is_not_a_resend_whatever_its_number() -> None:
    guard = ResendGuard(durable(1000, publish_time_ms=100))
    assert not guard.is_resend(0, None, 101)
    assert guard.over


def test_metadata_says_which_chunk_it_is() -> None:
    assert chunk_of(metadata("p", 1)) is None
    assert chunk_of(metadata("p", 1, num_chunks_from_msg=1, chunk_id=0)) is None
    middle = metadata("p", 1, num_chunks_from_msg=3, chunk_id=1, uuid="u")
    assert chunk_of(middle) == Chunk("u", 1, last=False)
    assert chunk_of(metadata("p", 1, num_chunks_from_msg=3, chunk_id=2, uuid="u")) == Chunk(
        "u", 2, last=True
    )


def test_a_load_is_the_snapshot_and_what_follows_it() -> None:
    before = remembering()
    before.replay(metadata("a", 5), Position(1, 0), 10)
    before.replay(metadata("b", 1, num_chunks_from_msg=2, chunk_id=0, uuid="u"), Position(1, 1), 11)
    text = before.snapshot(Position(1, 1), 12)
    after = remembering()
    assert after.load(text) == Position(1, 1)
    after.replay(metadata("a", 6, highest_sequence_id=9), Position(2, 0), 20)
    after.replay(metadata("x", 3, marker_type=21), Position(2, 1), 20)
    a, b = after.get("a"), after.get("b")
    assert a is not None
    assert (a.last, a.position, a.publish_time_ms) == (9, Position(2, 0), 106)
    assert b is not None
    assert (b.last, b.chunk, b.chunk_sequence) == (-1, Chunk("u", 0, last=False), 1)
    assert after.get("x") is None


def test_the_longest_unused_are_forgotten_first() -> None:
    known = remembering(limit=2)
    for number, name in enumerate("abc"):
        known.attach(name).stored(number, Position(1, number), None)
    for now_ms, name in enumerate("bac"):
        known.detach(name, now_ms)
    assert [known.get(name) is not None for name in "abc"] == [True, False, True]


def test_attached_producer_is_never_forgotten() -> None:
    known = remembering(limit=0, keep_ms=0)
    held = known.attach("a")
    held.stored(3, Position(1, 1), None)
    known.attach("b")
    known.detach("b", 10**9)
    assert known.get("a") is held
    known.snapshot(Position(1, 1), 10**9)
    assert known.get("a") is held


def test_old_names_go_with_the_snapshot() -> None:
    known = remembering(keep_ms=100)
    known.replay(metadata("a", 1), Position(1, 0), 0)
    known.replay(metadata("b", 1), Position(1, 1), 90)
    known.snapshot(Position(1, 1), 150)
    assert known.get("a") is None
    assert known.get("b") is not None


def test_a_name_that_stored_nothing_leaves_no_trace() -> None:
    known = remembering()
    known.attach("a")
    known.detach("a", 1)
    assert len(known) == 0


def test_a_snapshot_has_a_bound() -> None:
    known = remembering(limit=10**6, keep_ms=10**6)
    for number in range(3000):
        known.replay(metadata(f"{number:0200d}", number), Position(1, number), number)
    text = known.snapshot(Position(1, 3000), 3000)
    assert len(text) < 300 * 1024
    after = remembering(limit=10**6, keep_ms=10**6)
    after.load(text)
    assert after.get(f"{2999:0200d}") is not None
    assert after.get(f"{0:0200d}") is None
    newest = after.get(f"{2999:0200d}")
    assert newest is not None
    assert newest.position != NO_POSITION


def test_sequence_ids_below_zero_travel_as_huge_numbers() -> None:
    assert last_sequence(to_wire(-1), 0) == -1
    assert last_sequence(to_wire(-5), 0) == -5
    assert last_sequence(3, 0) == 3
    assert last_sequence(3, 9) == 9
    known = remembering()
    known.replay(metadata("a", to_wire(-1)), Position(1, 0), 0)
    found = known.get("a")
    assert found is not None
    assert not SequenceGuard(found).is_duplicate(0, None)
