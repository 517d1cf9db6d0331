"""Why a SEND was not stored, and what follows from it for its producer and for the topic.

Rule: what concerns one message only leaves the producer in place; anything else puts it out, so
that its client comes back and sends again what has no receipt.
"""

from typing import ClassVar, Final

from magnetar.protocol.server_error import MagnetarError, PeerError, ServerError
from storage.ledger.store import LedgerAssertion
from storage.managed_ledger.types import (
    AppendOutcomeUnknown,
    ManagedLedgerClosed,
    ManagedLedgerFenced,
)

LEDGER_LOST: Final = (
    AppendOutcomeUnknown,
    LedgerAssertion,
    ManagedLedgerClosed,
    ManagedLedgerFenced,
)
"""After these the instance is useless, or does not know its own end: it must be opened anew."""
KEEPS_PRODUCER: Final = frozenset({ServerError.NOT_ALLOWED_ERROR, ServerError.CHECKSUM_ERROR})
"""Refusals that concern one message: the client goes on with the next."""


class DuplicateMessage(PeerError):
    """Stored before: answered with a receipt, never with this error."""


class MessageRefused(PeerError):
    """This one message cannot be taken: do not send it again as it is."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class DamagedMessage(PeerError):
    """The checksum is wrong: check the copy that was kept, and send it again."""

    code: ClassVar[ServerError] = ServerError.CHECKSUM_ERROR


def breaks_off(refusal: MagnetarError) -> bool:
    """Whether the producer is put out with this answer."""
    return not isinstance(refusal, DuplicateMessage) and refusal.code not in KEEPS_PRODUCER
