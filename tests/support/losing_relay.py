"""A relay in front of a broker that loses answers: what was asked is done, and nobody hears of it.

Rules: as of `frame_relay.py`; what happens to an answer is told by who lost its request (`lose`),
before it is sent.  Where a receipt is lost (`lose_receipt`) nobody gets through until `let_in`.
"""

import asyncio
import enum
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from magnetar.protocol import pulsar_pb2 as pb
from tests.support.frame_relay import CutByRelay, FrameRelay, serving

Asks = Callable[[pb.BaseCommand], bool]


class Loss(enum.Enum):
    """What becomes of the connection by which an answer should have gone."""

    CUT = "it is cut"
    SILENCE = "it stays, and nothing is said"


@dataclass
class LosingRelay(FrameRelay):
    """See the module's rules.  Of all connections, in order:"""

    asked: list[pb.BaseCommand] = field(default_factory=list)
    """Requests that were sent on, of those whose answers are to be lost."""
    lost: list[pb.BaseCommand] = field(default_factory=list)
    """Answers to them that were not handed back."""
    told: list[pb.BaseCommand] = field(default_factory=list)
    """Answers to them that were: after as many as were to be lost."""
    lost_receipt: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the receipt that was to be lost has come."""
    _receipts: int | None = None
    """How many pass before one is lost; None: all."""
    _open: asyncio.Event = field(default_factory=asyncio.Event)
    _asks: Asks | None = None
    _loss: Loss = Loss.CUT
    _times: int | None = None

    def lose(self, asks: Asks, *, times: int | None = 1, loss: Loss = Loss.CUT) -> None:
        """From now on, of the answers to requests of which `asks` holds; None: all of them."""
        self._asks, self._times, self._loss = asks, times, loss

    def __post_init__(self) -> None:
        """Whoever comes gets through."""
        self._open.set()

    def lose_receipt(self, *, after: int = 0) -> None:
        """Cut the connection instead of the next receipt but `after`."""
        self._receipts = after
        self.lost_receipt.clear()

    def let_in(self) -> None:
        """Whoever comes back gets through again."""
        self._open.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """As `FrameRelay.serve`."""
        await self._open.wait()
        await super().serve(reader, writer)

    def receipted(self, receipt: pb.CommandSendReceipt) -> bool:
        """As `FrameRelay.receipted`."""
        if self._receipts is None:
            return True
        if self._receipts:
            self._receipts -= 1
            return True
        self._receipts = None
        self._open.clear()
        self.lost_receipt.set()
        raise CutByRelay

    def sent(self, frame: bytes, command: pb.BaseCommand | None) -> bool:
        """As `FrameRelay.sent`."""
        if command is None or self._asks is None or not self._asks(command):
            return False
        self.asked.append(command)
        return True

    def answered(self, answer: pb.BaseCommand) -> bool:
        """As `FrameRelay.answered`."""
        if self._times is not None and len(self.lost) >= self._times:
            self.told.append(answer)
            return True
        self.lost.append(answer)
        if self._loss is Loss.CUT:
            raise CutByRelay
        return False


@asynccontextmanager
async def losing(broker_url: str) -> AsyncIterator[LosingRelay]:
    """A relay to the broker at `pulsar://127.0.0.1:port`."""
    async with serving(LosingRelay(int(broker_url.rpartition(":")[2]))) as relay:
        yield relay
