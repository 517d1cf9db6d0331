"""What tasks can do, threads can do: the same names, with the same parameters."""

import inspect

import pytest

import magnetar
import magnetar.sync

FOR_USERS = {
    magnetar.sync.Client: {each for each in dir(magnetar.Client) if each[0] != "_"} - {"open"},
    magnetar.sync.TransactionKey: {
        "name",
        "epoch",
        "is_fenced",
        "last_transaction",
        "last_group",
        "begin_attempt",
        "commit_group",
        "abort_group",
        "extend_group",
        "close",
    },
    magnetar.sync.Producer: {"topic", "name", "last_sequence_id", "send_many", "flush", "close"},
    magnetar.sync.Receipts: {"segment_ids", "stored", "ids"},
    magnetar.sync.Attempt: {"id", "group", "settled", "close"},
}
CASES = [(face, name) for face, names in FOR_USERS.items() for name in sorted(names)]


@pytest.mark.parametrize(("face", "name"), CASES)
def test_threads_have_the_same(face: type, name: str) -> None:
    here = getattr(face, name)
    there = getattr(getattr(magnetar, face.__name__), name, None)
    if inspect.isfunction(there):
        assert parameters(here) == parameters(there)


def parameters(function: object) -> list[tuple[str, object]]:
    """Names and kinds."""
    assert callable(function)
    return [(each.name, each.kind) for each in inspect.signature(function).parameters.values()]
