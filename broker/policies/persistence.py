"""The persistence policy: copies of a topic's ledgers, and how often cursors are written.  Pure.

The value is `{bookkeeperEnsemble, bookkeeperWriteQuorum, bookkeeperAckQuorum,
managedLedgerMaxMarkDeleteRate, managedLedgerStorageClassName}`, as in Pulsar.  The rate is a number
of writes a second, 0 for no limit.  There is one class of storage, so that member has no value.
"""

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import ClassVar, Final

from broker.policies.json_numbers import is_number
from config.bounds import POLICY_ENSEMBLE_MAX
from config.settings import Settings
from magnetar.protocol.server_error import PeerError, ServerError
from storage.ledger.store import ONE_COPY, Copies
from storage.managed_ledger.types import Persistence

_SIZES: Final = ("bookkeeperEnsemble", "bookkeeperWriteQuorum", "bookkeeperAckQuorum")
_RATE: Final = "managedLedgerMaxMarkDeleteRate"
_STORAGE_CLASS: Final = "managedLedgerStorageClassName"
_MEMBERS: Final = frozenset({*_SIZES, _RATE, _STORAGE_CLASS})
WANTED: Final = (
    f"an object with bookkeeperEnsemble >= bookkeeperWriteQuorum >= bookkeeperAckQuorum of 1 to "
    f"{POLICY_ENSEMBLE_MAX}, {_RATE} of 0 (no limit) or more, and no {_STORAGE_CLASS}"
)
"""The valid values in words."""


class CopiesNotServed(PeerError):
    """This broker keeps one copy of each message: ask for one, or run brokers with bookies."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.PRECONDITION_FAILED


def is_persistence(value: object) -> bool:
    """Whether a value is the JSON of the policy; the rate and the class may be missing or null."""
    if not isinstance(value, dict) or not value.keys() <= _MEMBERS:
        return False
    rate, sizes = value.get(_RATE), [value.get(name) for name in _SIZES]
    numbers = [size for size in sizes if is_number(size, 1, POLICY_ENSEMBLE_MAX)]
    return (
        len(numbers) == len(sizes)
        and numbers == sorted(numbers, reverse=True)
        and (rate is None or _is_rate(rate))
        and value.get(_STORAGE_CLASS) is None
    )


def _is_rate(value: object) -> bool:
    # JSON here may have NaN and Infinity, which are no rates.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value >= 0 and math.isfinite(value)


def persistence_of_broker(settings: Settings) -> Mapping[str, object]:
    """The JSON of what the broker does for topics without the policy."""
    copies = copies_of_broker(settings)
    sizes = (copies.ensemble_size, copies.write_quorum, copies.ack_quorum)
    return {**dict(zip(_SIZES, sizes, strict=True)), _RATE: 1000 / settings.cursor_flush_ms}


def copies_of_broker(settings: Settings) -> Copies:
    """The copies that the broker's own store makes."""
    if not settings.in_cluster:
        return ONE_COPY
    return Copies(
        ensemble_size=settings.ledger_ensemble_size,
        write_quorum=settings.ledger_write_quorum,
        ack_quorum=settings.ledger_ack_quorum,
    )


def persistence_in(value: object) -> Persistence:
    """How streams are stored by a valid value."""
    section = value if isinstance(value, dict) else {}
    copies, rate = Copies(*(section[name] for name in _SIZES)), section.get(_RATE)
    return Persistence(copies, rate or 0)


def require_one_copy(value: object) -> None:
    """Raise `CopiesNotServed` if a valid value asks for more than one copy."""
    if persistence_in(value).copies != ONE_COPY:
        raise CopiesNotServed(
            "This broker keeps its messages in its data directory, which has one copy of each: "
            f"set {', '.join(_SIZES)} to 1, or run brokers with bookies."
        )
