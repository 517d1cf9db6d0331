"""Pure: whether clusters that replicate a topic to each other have what was sent, each once."""

import enum
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

SHOWN: Final = 5
"""Messages that a problem names at most."""


class Outcome(enum.Enum):
    """What the producer of a message knows of it."""

    STORED = "it has a receipt, and its transaction, if any, is committed"
    ABORTED = "its transaction is aborted"
    UNKNOWN = "its producer was not told"


class Sent(NamedTuple):
    """A message: the cluster in which it was produced, and its number in its stream.

    The messages of a stream have one key, or none, and were sent in the order of their numbers.
    """

    origin: str
    stream: str
    number: int


class Held(NamedTuple):
    """A message that a cluster has; `origin` is where it says that it comes from, "" for here."""

    message: Sent
    origin: str


NOTHING_ABSENT: Final[Mapping[str, Container[Sent]]] = MappingProxyType({})


def problems(
    sent: Mapping[Sent, Outcome],
    held: Mapping[str, Sequence[Held]],
    unordered: Container[str],
    absent: Mapping[str, Container[Sent]] = NOTHING_ABSENT,
) -> list[str]:
    """Sentences on what is wrong, none if all is well.

    `held` has all messages of each cluster in the order in which it has them.  Streams in
    `unordered` have no key, and no order.  `absent` has the messages that a cluster is not to have.
    """
    found: list[str] = []
    counts = {name: Counter(each.message for each in had) for name, had in held.items()}
    for name, had in held.items():
        count, foreign = counts[name], absent.get(name, ())
        for what, chosen in (
            ("has messages that nobody sent", [m for m in count if m not in sent]),
            ("has aborted messages", [m for m in count if sent.get(m) is Outcome.ABORTED]),
            ("has messages that were not for it", [m for m in count if m in foreign]),
            ("has messages more than once", [m for m, times in count.items() if times > 1]),
            (
                "lacks messages",
                [
                    m
                    for m, told in sent.items()
                    if told is Outcome.STORED and m not in count and m not in foreign
                ],
            ),
            (
                "does not say where messages come from",
                [
                    each.message
                    for each in had
                    if each.origin != ("" if each.message.origin == name else each.message.origin)
                ],
            ),
            ("has messages of a key in another order", _disordered(had, unordered)),
        ):
            if chosen:
                found.append(f"{name} {what}: {_shown(chosen)}")
    for message, told in sent.items():
        having = [name for name, count in counts.items() if message in count]
        meant = [name for name in held if message not in absent.get(name, ())]
        if told is Outcome.UNKNOWN and having not in ([], meant):
            found.append(f"{message} is in {', '.join(having)} only")
    return found


def _disordered(had: Sequence[Held], unordered: Container[str]) -> list[Sent]:
    """The messages that come after a later one of their stream."""
    last: dict[tuple[str, str], int] = {}
    late: list[Sent] = []
    for message, _ in had:
        stream = message.origin, message.stream
        if message.stream not in unordered and message.number < last.get(stream, -1):
            late.append(message)
        last[stream] = max(message.number, last.get(stream, -1))
    return late


def _shown(messages: Sequence[Sent]) -> str:
    names = [f"{each.origin}:{each.stream}:{each.number}" for each in sorted(messages)]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
