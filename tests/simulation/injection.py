"""Other classes in the places where the broker takes its parts from: for the time of a run.

`ASSERTING` are the parts of every run: they look at what no client can see.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import ClassVar

from broker.topics.registry import TopicRegistry
from magnetar.protocol.ids import Position
from tests.simulation.loop import current_host
from txn.buffer import SegmentBuffer
from txn.buffer_core import SegmentBufferCore

Parts = Mapping[tuple[object, str], object]
"""(class or module, its attribute) to what is put there."""


class HorizonMovedBack(Exception):
    """What could be read no longer can."""


class AssertingCore(SegmentBufferCore):
    """The max read position never falls within one owner."""

    _highest: Position | None = None

    @property
    def max_read_position(self) -> Position:
        now = super().max_read_position
        if self._highest is not None and now < self._highest:
            raise HorizonMovedBack(f"{self.segment}: {self._highest} to {now} ({current_host()})")
        self._highest = now
        return now


class AssertingBuffer(SegmentBuffer):
    core_class: ClassVar[type[SegmentBufferCore]] = AssertingCore


ASSERTING: Parts = {(TopicRegistry, "buffer_class"): AssertingBuffer}


@contextlib.contextmanager
def injected(parts: Parts) -> Iterator[None]:
    """Put them there, and take them away again."""
    saved = {(holder, name): getattr(holder, name) for holder, name in parts}
    for (holder, name), part in parts.items():
        setattr(holder, name, part)
    try:
        yield
    finally:
        for (holder, name), part in saved.items():
            setattr(holder, name, part)
