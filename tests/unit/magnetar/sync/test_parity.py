"""What tasks can do, threads can do: the same names, with the same parameters."""

import inspect

import pytest

import magnetar
import magnetar.sync
from scripts.generate_sync import FACES, ROOT, Face, generate

FOR_USERS = {
    magnetar.sync.Producer: {"topic", "name", "last_sequence_id", "send_many", "flush", "close"},
    magnetar.sync.Receipts: {"segment_ids", "stored", "ids"},
    magnetar.sync.Attempt: {"id", "group", "settled", "close"},
}


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.target)
def test_a_generated_client_is_what_its_source_gives(face: Face) -> None:
    assert (ROOT / face.target).read_text("utf-8") == generate(face), "Run `make sync`."


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
