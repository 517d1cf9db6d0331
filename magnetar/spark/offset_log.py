"""The offset log in Spark's checkpoint: how far our sources were read by the end of a batch.

Pure.  `<checkpoint>/offsets/<N>` is durable before batch N runs, and `<checkpoint>/metadata` names
the query for as long as the checkpoint exists.
"""

import json
from typing import Final

from magnetar.spark.cut_json import FROM
from magnetar.spark.errors import PositionsUnreadable

__all__ = ["positions_of", "query_of"]

_VOID: Final = "-"
"""The offset of a source that has none."""
_TAGS: Final = frozenset({"v", "topic", "name", "pos"})
_VERSIONS: Final = ("v1", "v2")


def positions_of(text: str) -> str:
    """The positions at the end of a batch, from the text of its entry in the offset log.

    They are the offsets of all our sources, as one canonical JSON array in order of topic and name.
    Raises `PositionsUnreadable`, also for no source of ours or two of the same topic and name.
    """
    # Version 1: `v1`, a line of metadata in JSON, then a line for each source.  Version 2: the same
    # with `<id of the source>:` before each offset.
    lines = text.split("\n")
    version = lines[0].strip() if lines else ""
    if version not in _VERSIONS or len(lines) < 2:
        raise PositionsUnreadable(
            f"The offset log of the checkpoint begins with {version[:20]!r}, not with one of "
            f"{', '.join(_VERSIONS)}: it is of another version of Spark. Use PySpark 4.3, or go "
            "without trackPositions."
        )
    found: dict[tuple[str, str], object] = {}
    for line in lines[2:]:
        offset = line if version == "v1" else line.partition(":")[2]
        ours = _ours(offset)
        if ours is None:
            continue
        tags = (str(ours["topic"]), str(ours["name"]))
        if tags in found:
            raise PositionsUnreadable(
                f"Two sources of the query read topic {tags[0]} under the name {tags[1]!r}, so "
                "their positions cannot be told apart. Give each its own option `name`."
            )
        found[tags] = {member: value for member, value in ours.items() if member != FROM}
    if not found:
        raise PositionsUnreadable(
            "The query reads from no source of the format pulsar5, so there are no positions to "
            "be kept. Go without trackPositions."
        )
    cuts = [found[tags] for tags in sorted(found)]
    return json.dumps(cuts, sort_keys=True, separators=(",", ":"))


def query_of(text: str) -> str:
    """The id of the query, from the text of `metadata`.  Raises `PositionsUnreadable`."""
    try:
        query = json.loads(text)["id"]
    except (ValueError, KeyError, TypeError) as error:
        raise PositionsUnreadable(
            f"The metadata of the checkpoint names no query ({text[:80]!r}): look at the option "
            "checkpointLocation."
        ) from error
    return str(query)


def _ours(offset: str) -> dict[str, object] | None:
    """The offset of a source, if it is one of the format pulsar5."""
    if offset == _VOID:
        return None
    try:
        found = json.loads(offset)
    except ValueError:
        return None  # An offset of another kind of source need not be JSON.
    return found if isinstance(found, dict) and found.keys() >= _TAGS else None
