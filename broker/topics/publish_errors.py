"""Reasons why a SEND was not stored, and their consequences for its producer and its topic."""

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
"""After these errors the ledger is closed or its end is unknown: it must be opened anew."""
KEEPS_PRODUCER: Final = frozenset({ServerError.NOT_ALLOWED_ERROR, ServerError.CHECKSUM_ERROR})
"""Codes of refusals that concern one message: the client goes on with the next.

Any other closes the producer, so that its client comes back and sends again what has no receipt.
"""


class DuplicateMessage(PeerError):
    """Stored before: answered with a receipt, never with this error."""


class MessageRefused(PeerError):
    """This one message cannot be taken: do not send it again as it is."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class DamagedMessage(PeerError):
    """The checksum is wrong: check the copy that was kept, and send it again."""

    code: ClassVar[ServerError] = ServerError.CHECKSUM_ERROR


def closes_producer(refusal: MagnetarError) -> bool:
    """Whether the producer is closed with this answer."""
    return not isinstance(refusal, DuplicateMessage) and refusal.code not in KEEPS_PRODUCER
