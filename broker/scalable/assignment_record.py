"""Pure: the assignment of one subscription, as it is stored.

It is the member `assignment` of the subscription's record, which Pulsar's records do not have:

    {"consumers": {"a": [0, 2], "b": []}, "releasing": {"a": [1]},
     "planned": {"a": [0, 2], "b": [1]}, "shared": [], "canShare": true}

Members that would be empty are left out, and `planned` if it is what the consumers have.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StoredAssignment:
    """The segments of each consumer of a subscription, by name."""

    granted: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """The segments in each consumer's assignment; a consumer without any has an empty set."""
    releasing: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """The segments that were taken from a consumer which has not detached from them yet."""
    planned: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """The segments that each consumer is to have."""
    shared: frozenset[int] = frozenset()
    """The segments that several consumers share by entry buckets, or have yet to release."""
    can_share: bool = False
    """Whether the clients of all consumers can share segments."""

    def to_json(self) -> dict[str, object]:
        """The member of the record."""
        members: dict[str, object] = {"consumers": _lists(self.granted)}
        if self.releasing:
            members["releasing"] = _lists(self.releasing)
        if self.planned != self.granted:
            members["planned"] = _lists(self.planned)
        if self.shared:
            members["shared"] = sorted(self.shared)
        if self.can_share:
            members["canShare"] = True
        return members


def assignment_from_json(members: object) -> StoredAssignment:
    """Decode the member of the record.  Raises `ValueError`."""
    if not isinstance(members, dict):
        raise ValueError("the assignment is not an object")
    granted = _sets(members.get("consumers"))
    planned = members.get("planned")
    return StoredAssignment(
        granted=granted,
        releasing=_sets(members.get("releasing") or {}),
        planned=granted if planned is None else _sets(planned),
        shared=_ids("shared", members.get("shared") or []),
        can_share=members.get("canShare") is True,
    )


def _lists(segments: Mapping[str, frozenset[int]]) -> dict[str, list[int]]:
    return {name: sorted(segments[name]) for name in sorted(segments)}


def _sets(members: object) -> dict[str, frozenset[int]]:
    if not isinstance(members, dict):
        raise ValueError("the consumers of an assignment are not an object")
    return {name: _ids(name, ids) for name, ids in members.items()}


def _ids(name: str, ids: object) -> frozenset[int]:
    if not isinstance(ids, list) or not all(type(each) is int for each in ids):
        raise ValueError(f"the segments of {name!r} are not numbers")
    return frozenset(ids)
