"""Reasons why a SEND was not stored, and their consequences for its producer and its topic."""

from typing import ClassVar, Final

from magnetar.protocol.pulsar_pb2 import MessageMetadata
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


class ReplicaRefused(PeerError):
    """A message of a replicator cannot be taken, and nothing behind it: it has to come again."""

    code: ClassVar[ServerError] = ServerError.PERSISTENCE_ERROR


class EncryptionRequired(PeerError):
    """A producer or message is not encrypted, and the policy of its namespace requires that."""

    code: ClassVar[ServerError] = ServerError.METADATA_ERROR


class OwnReplicator(PeerError):
    """A replicator of this cluster came to this cluster: its messages would be stored twice."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class DamagedMessage(PeerError):
    """The checksum is wrong: check the copy that was kept, and send it again."""

    code: ClassVar[ServerError] = ServerError.CHECKSUM_ERROR


def require_encrypted(metadata: MessageMetadata) -> None:
    """Raise `EncryptionRequired` for a message without the keys of an encryption."""
    if not metadata.encryption_keys:
        raise EncryptionRequired(
            "The message is not encrypted, and the policy encryptionRequired of the namespace "
            "demands that: send it encrypted."
        )


def refusal_of_replica(refusal: MagnetarError) -> MagnetarError:
    """The answer to a refused message of a replicator, in place of the one to other producers.

    Apache Pulsar's replicator goes on behind a message with a code that keeps the producer, and
    sends that message again later: its position would then be below the last stored one.
    """
    keeps = refusal.code in KEEPS_PRODUCER and not isinstance(refusal, DamagedMessage)
    return ReplicaRefused(str(refusal)) if keeps else refusal


def closes_producer(refusal: MagnetarError) -> bool:
    """Whether the producer is closed with this answer."""
    return not isinstance(refusal, DuplicateMessage) and refusal.code not in KEEPS_PRODUCER
