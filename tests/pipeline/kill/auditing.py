"""What must hold of the copies of a topic, whatever was killed on the way.

Rules: readers of the sink see the copy of each row at most once, those of a key in the order of the
source and without a gap, and nothing else; when the query has come to its end, they see all.
"""

from collections.abc import Sequence

import magnetar
from tests.pipeline import rows
from tests.pipeline.rows import Pair


def copy_of(value: bytes) -> bytes:
    """What the query makes of a value."""
    return b"copy of " + value


async def audit(
    client: magnetar.Client, published: Sequence[Pair], sink: str, *, whole: bool
) -> int:
    """How many rows readers of the sink see.  Raises `AssertionError` for what must not be."""
    expected: dict[str, list[bytes]] = {}
    for key, value in published:
        expected.setdefault(key, []).append(copy_of(value))
    found = rows.of_key(await rows.committed(client, sink))
    for key, values in found.items():
        wanted = expected.get(key, [])
        assert values == wanted[: len(values)], f"of {key}: {values} are seen, not {wanted}"
    if whole:
        assert found == expected
    return sum(map(len, found.values()))
