"""Batches: hazards begin a new request, bounds, answers in the order of issue."""

from collections import deque
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.metadata.oxia import oxia_pb2 as pb
from storage.metadata.oxia.batches import Batch, take_batch
from storage.metadata.oxia.writes import ExclusiveCall, Write
from tests.unit.storage.metadata.oxia.writes_of import delete, put, sequence_put


def take_all(*writes: Write | ExclusiveCall, max_operations: int = 512) -> list[list[Write]]:
    queue: deque[Write | ExclusiveCall] = deque(writes)
    batches = []
    while queue:
        batches.append(take_batch(queue, max_operations=max_operations).writes)
        if queue and isinstance(queue[0], ExclusiveCall):
            queue.popleft()
    return batches


def test_a_put_after_a_delete_of_its_key_begins_a_request() -> None:
    first, second, third = put(), delete(), put()
    assert take_all(first, second, third) == [[first, second], [third]]


def test_other_keys_stay_together() -> None:
    writes = [delete("/a"), put("/b"), delete("/b"), delete("/c"), put("/d")]
    assert take_all(*writes) == [writes]


def test_a_sequence_put_after_a_delete_under_it_begins_a_request() -> None:
    beside, under = delete("/other/x"), delete("/s/-00000000000000000001")
    first, second = sequence_put(), sequence_put()
    assert take_all(beside, first, under, second) == [[beside, first, under], [second]]


def test_operations_and_bytes_are_bounded() -> None:
    writes = [put(f"/{n}") for n in range(7)]
    assert [len(batch) for batch in take_all(*writes, max_operations=3)] == [3, 3, 1]
    queue: deque[Write | ExclusiveCall] = deque(
        [put(size=60), put(size=60), put(size=500), put(size=1)]
    )
    sizes = []
    while queue:
        sizes.append([write.size for write in take_batch(queue, max_bytes=100).writes])
    assert sizes == [[60], [60], [500], [1]]


def test_a_batch_ends_before_a_turn() -> None:
    first, second = put("/a"), put("/b")
    turn = ExclusiveCall(Mock(), Mock(), 0.0)
    assert take_all(first, turn, second) == [[first], [second]]


def test_a_request_names_its_shard() -> None:
    """Servers of release 0.14.0 end on a request that names none."""
    request = Batch([put(), delete()]).request(0)
    assert request.HasField("shard")
    assert (request.shard, len(request.puts), len(request.deletes)) == (0, 1, 1)


def test_batch_answers_writes_in_the_order_of_issue() -> None:
    writes = [delete("/a"), put("/b"), delete("/c"), put("/d")]
    response = pb.WriteResponse(
        puts=[
            pb.PutResponse(status=pb.UNEXPECTED_VERSION_ID),
            pb.PutResponse(status=pb.SESSION_DOES_NOT_EXIST),
        ],
        deletes=[pb.DeleteResponse(), pb.DeleteResponse(status=pb.KEY_NOT_FOUND)],
    )
    answers = list(Batch(writes).answers(response))
    assert [write for write, _ in answers] == writes
    assert [answer.status for _, answer in answers] == [
        pb.OK,
        pb.UNEXPECTED_VERSION_ID,
        pb.KEY_NOT_FOUND,
        pb.SESSION_DOES_NOT_EXIST,
    ]


def test_a_response_of_another_request_is_noticed() -> None:
    with pytest.raises(ValueError, match="2 operations"):
        list(Batch([put(), delete()]).answers(pb.WriteResponse(puts=[pb.PutResponse()])))


KEYS = st.sampled_from(["/a", "/b", "/s/-1"])


@given(
    st.lists(
        st.one_of(KEYS.map(put), KEYS.map(delete), st.just("/s/").map(sequence_put)), max_size=30
    )
)
def test_a_server_that_puts_first_sees_the_order_of_issue(writes: list[Write]) -> None:
    """Applying each request as servers do, puts then deletes, is applying one after the other."""

    def apply(state: dict[str, Write], batch: list[Write]) -> None:
        for write in batch:
            if isinstance(write.request, pb.DeleteRequest):
                state.pop(write.key, None)
            else:
                state[write.key] = write

    wanted: dict[str, Write] = {}
    apply(wanted, writes)
    state: dict[str, Write] = {}
    batches = take_all(*writes)
    assert [write for batch in batches for write in batch] == writes
    for batch in batches:
        request = Batch(batch).request(0)
        assert len(request.puts) + len(request.deletes) == len(batch)
        apply(state, sorted(batch, key=lambda each: isinstance(each.request, pb.DeleteRequest)))
    assert state == wanted
