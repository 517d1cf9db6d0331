"""Pure: the JSON of groups, in their headers and in the records of keys.

    "group": {"nonce", "reserved"}, and once it is committed
             {..., "query", "batch", "positions", "segments": [name, ...],
              "winners": [[index, segment, messages, hash sum, segment, ...], ...],
              "totals": [[segment, messages, hash sum], ...]}

`segments` has the name of each segment once; elsewhere a segment is its place in this list, from 0.
`totals` replaces the counts of winners where these are too many; `positions` is optional.
"""

from collections.abc import Mapping, Sequence
from typing import cast

from magnetar.protocol.txn_id import TxnId
from txn.group import Batch, Counts, Group, GroupCommit, GroupRecord, SegmentCount
from txn.record_json import integer, text


def encode_group(group: Group) -> Mapping[str, object]:
    """Encode the part of a group in its header."""
    members: dict[str, object] = {"nonce": group.nonce, "reserved": group.reserved}
    commit = group.commit
    if commit is None:
        return members
    members |= {"query": commit.batch.query, "batch": commit.batch.number}
    if commit.positions is not None:
        members["positions"] = commit.positions
    places: dict[str, int] = {}
    for counts in (*commit.winners.values(), commit.totals or {}):
        for segment in counts:
            places.setdefault(segment, len(places))
    members["segments"] = list(places)
    members["winners"] = [
        [index, *(number for each in _placed(counts, places) for number in each)]
        for index, counts in commit.winners.items()
    ]
    if commit.totals is not None:
        members["totals"] = _placed(commit.totals, places)
    return members


def _placed(counts: Counts, places: Mapping[str, int]) -> list[tuple[int, int, int]]:
    return [(places[name], count.messages, count.hash_sum) for name, count in counts.items()]


def decode_group(value: object) -> Group:
    """Decode the part of a group in its header.  Raises ValueError, LookupError or TypeError."""
    members = cast("Mapping[str, object]", value)
    nonce, reserved = text(members["nonce"]), integer(members["reserved"])
    if "winners" not in members:
        return Group(nonce, reserved)
    segments = [text(each) for each in _list(members["segments"])]
    winners = [_list(each) for each in _list(members["winners"])]
    totals = members.get("totals")
    return Group(
        nonce,
        reserved,
        GroupCommit(
            _batch(members),
            _positions(members),
            {integer(winner[0]): _counts(winner[1:], segments) for winner in winners},
            None
            if totals is None
            else _counts([number for each in _list(totals) for number in _list(each)], segments),
        ),
    )


def _counts(numbers: Sequence[object], segments: Sequence[str]) -> Counts:
    whole = [integer(number) for number in numbers]
    if len(whole) % 3 or any(place < 0 for place in whole[::3]):
        raise ValueError("counts are not whole")
    return {
        segments[place]: SegmentCount(messages, hash_sum)
        for place, messages, hash_sum in zip(whole[::3], whole[1::3], whole[2::3], strict=True)
    }


def encode_group_record(record: GroupRecord) -> Mapping[str, object]:
    """Encode the last committed group, for the record of its key."""
    members: dict[str, object] = {
        "query": record.batch.query,
        "batch": record.batch.number,
        "group": str(record.group),
    }
    if record.positions is not None:
        members["positions"] = record.positions
    return members


def decode_group_record(value: object) -> GroupRecord:
    """Decode the last committed group.  Raises ValueError, LookupError or TypeError."""
    members = cast("Mapping[str, object]", value)
    return GroupRecord(_batch(members), _positions(members), TxnId.parse(text(members["group"])))


def encode_batches(batches: Sequence[Batch]) -> list[tuple[str, int]]:
    """Encode the last batches of earlier queries."""
    return [(batch.query, batch.number) for batch in batches]


def decode_batches(value: object) -> tuple[Batch, ...]:
    """Decode the last batches of earlier queries.  Raises ValueError, LookupError or TypeError."""
    pairs = [_list(each) for each in _list(value)]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError("a batch is no pair")
    return tuple(Batch(text(query), integer(number)) for query, number in pairs)


def _batch(members: Mapping[str, object]) -> Batch:
    return Batch(text(members["query"]), integer(members["batch"]))


def _positions(members: Mapping[str, object]) -> str | None:
    return text(members["positions"]) if "positions" in members else None


def _list(value: object) -> Sequence[object]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is no list")
    return value
