"""Cuts as JSON: the offsets that Spark keeps, and the positions that a transaction key keeps.

    {"name":"...","pos":{"0":"END","3":[17,5,0]},"topic":"topic://...","v":1}

Pure.  Equal cuts have equal bytes.  Positions are an array of cuts, of all sources of a query.
"""

import json
from collections.abc import Mapping
from typing import Final, TypeAlias

from magnetar.protocol.ids import LONG_MAX
from magnetar.spark.cut import END, Cut, Place
from magnetar.spark.errors import InvalidCut

__all__ = ["FROM", "Json", "begun_of", "cut_of", "cut_of_text", "object_of", "text_of"]

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

VERSION: Final = 1
_END: Final = "END"
_KEYS: Final = frozenset({"name", "pos", "topic", "v"})
_THROUGH: Final = "through"
FROM: Final = "from"
"""The member with the places at which the first batch of a query began.

Spark records only the end of that batch, and asks anew for its begin when it repeats the batch; so
the end carries it.  A cut has no such member, nor have positions.
"""


def object_of(cut: Cut, begun: Cut | None = None) -> dict[str, Json]:
    """The offset that Spark gets; `begun` is the begin of the first batch, if it ends here."""
    # Spark compares texts: keys are in sorted order, and an empty `through` is left out.
    first: dict[str, Json] = {} if begun is None else {FROM: _places_of(begun)}
    through: dict[str, Json] = {_THROUGH: list(cut.through)} if cut.through else {}
    places = _places_of(cut)
    return {**first, "name": cut.name, "pos": places, **through, "topic": cut.topic, "v": VERSION}


def _places_of(cut: Cut) -> dict[str, Json]:
    places: dict[str, Json] = {}
    for key, place in sorted((str(i), place) for i, place in cut.pos.items()):
        places[key] = _END if place == END else list(place)
    return places


def text_of(cut: Cut) -> str:
    """The one text of a cut."""
    return json.dumps(object_of(cut), sort_keys=True, separators=(",", ":"))


def cut_of(found: object, topic: str, name: str) -> Cut:
    """The cut that Spark or a user hands back.

    Raises `InvalidCut` for anything that is no cut of this topic, name and version.
    """
    if not isinstance(found, Mapping) or not found.keys() >= _KEYS:
        raise _refused(f"it lacks one of the members {', '.join(sorted(_KEYS))}")
    if found["v"] != VERSION:
        raise _refused(
            f"it is of version {found['v']!r}, this is version {VERSION}; use the release that "
            "wrote it"
        )
    if extra := sorted(found.keys() - _KEYS - {FROM, _THROUGH}):
        raise _refused(f"it has the unknown members {extra}")
    if (found["topic"], found["name"]) != (topic, name):
        raise _refused(
            f"it is of topic {found['topic']!r} and name {found['name']!r}, this source reads "
            f"{topic!r} as {name!r}; another topic, or another name, needs another checkpoint"
        )
    through = found.get(_THROUGH, [])
    if not isinstance(through, list) or not all(_is_number(each) for each in through):
        raise _refused(f"its member {_THROUGH} is {through!r}")
    return Cut(topic, name, _pos(found["pos"]), tuple(through))


def begun_of(found: Mapping[str, Json], cut: Cut) -> Cut | None:
    """The begin of the first batch, if the offset `found` of `cut` has it.  Raises `InvalidCut`."""
    return Cut(cut.topic, cut.name, _pos(found[FROM])) if FROM in found else None


def cut_of_text(text: str, topic: str, name: str) -> Cut:
    """See `cut_of`; from a text, which is a cut, or positions with one of this topic and name."""
    try:
        found: Json = json.loads(text)
    except ValueError as error:
        raise _refused(f"it is no JSON ({error})") from error
    if isinstance(found, list):
        mine = [
            each
            for each in found
            if isinstance(each, dict) and (each.get("topic"), each.get("name")) == (topic, name)
        ]
        if len(mine) != 1:
            raise _refused(f"it has {len(mine)} cuts of topic {topic!r} and name {name!r}")
        return cut_of(mine[0], topic, name)
    return cut_of(found, topic, name)


def _pos(places: object) -> dict[int, Place]:
    if not isinstance(places, Mapping) or not places:
        raise _refused("it has no positions")
    return {_number(key): _place(key, place) for key, place in places.items()}


def _number(key: object) -> int:
    if not isinstance(key, str) or not key.isascii() or not key.isdecimal():
        raise _refused(f"{key!r} is no segment")
    if key != str(int(key)):
        raise _refused(f"{key!r} is no segment as it is written here")
    return int(key)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -1 <= value <= LONG_MAX


def _place(key: object, place: object) -> Place:
    if place == _END:
        return END
    if not isinstance(place, list) or len(place) != 3 or not all(map(_is_number, place)):
        raise _refused(f"the position of segment {key} is {place!r}")
    return Place(*place)


def _refused(why: str) -> InvalidCut:
    return InvalidCut(f"This offset cannot be used: {why}. Give one unchanged as it was written.")
