"""Backlog quotas: their JSON, when a backlog exceeds one, and how they agree with retention.  Pure.

The value of the policy is a map of quota types to quotas, each `{limitSize, limitTime, policy}`.
Bytes count for the type `destination_storage` and seconds for `message_age`, as in Pulsar; the
other limit of a quota means nothing.  A negative limit is none.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import ClassVar, Final

from broker.policies.json_numbers import INT32_MAX, is_number
from magnetar.protocol.server_error import PeerError, ServerError
from storage.managed_ledger.types import MIB

NO_LIMIT: Final = -1
KEPT_PERCENT: Final = 90
"""Share of a size limit that eviction leaves, as in Pulsar: the next messages are not over it."""
_MEMBERS: Final = frozenset({"limit", "limitSize", "limitTime", "policy"})
_MINUTE_S: Final = 60


class RetentionTooSmall(PeerError):
    """Retention is not more than a backlog quota: raise retention, or lower the quota."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.PRECONDITION_FAILED


class QuotaType(enum.StrEnum):
    """The quantity that a quota limits, by Pulsar's name."""

    SIZE = "destination_storage"
    """Bytes behind the slowest subscription."""
    AGE = "message_age"
    """Age of the oldest unacknowledged message."""


class QuotaPolicy(enum.StrEnum):
    """The consequence of an exceeded quota, by Pulsar's name."""

    HOLD = "producer_request_hold"
    """Producers wait until the backlog is below the limit."""
    EXCEPTION = "producer_exception"
    """Producers fail."""
    EVICTION = "consumer_backlog_eviction"
    """The slowest subscriptions lose their oldest messages."""


@dataclass(frozen=True, slots=True)
class BacklogQuota:
    """One quota.  `limit` is in bytes or seconds, by the type."""

    type: QuotaType
    limit: int
    policy: QuotaPolicy

    @property
    def limit_ms(self) -> int:
        """The limit of an age, in milliseconds."""
        return self.limit * 1000

    @property
    def evicts(self) -> bool:
        """Whether subscriptions lose messages; else producers are refused."""
        return self.policy is QuotaPolicy.EVICTION

    @property
    def fails_producers(self) -> bool:
        """Whether refused producers fail; else they wait."""
        return self.policy is QuotaPolicy.EXCEPTION

    def is_exceeded_by_size(self, size_bytes: int) -> bool:
        """Whether so many bytes of backlog reach the limit."""
        return size_bytes >= self.limit

    def is_exceeded_by_age(self, published_ms: int | None, now_ms: int) -> bool:
        """Whether a message published then reaches the limit; None: there is no message."""
        return published_ms is not None and now_ms - published_ms >= self.limit_ms

    @property
    def kept_bytes(self) -> int:
        """The bytes of backlog that eviction leaves."""
        return self.limit * KEPT_PERCENT // 100

    def kept_since_ms(self, now_ms: int) -> int:
        """The publish time of the oldest messages that eviction leaves: younger than the limit."""
        return now_ms - self.limit_ms + 1


def is_quota(value: object) -> bool:
    """Whether a value is the JSON of a quota; its limits may be missing or null."""
    if not isinstance(value, dict) or not value.keys() <= _MEMBERS:
        return False
    sizes = (value.get("limitSize"), value.get("limit"))
    return (
        value.get("policy") in list(QuotaPolicy)
        and all(size is None or is_number(size) for size in sizes)
        and (value.get("limitTime") is None or is_number(value["limitTime"], -INT32_MAX, INT32_MAX))
    )


def are_quotas(value: object) -> bool:
    """Whether a value is the JSON of quotas by type."""
    return isinstance(value, dict) and all(
        name in list(QuotaType) and is_quota(quota) for name, quota in value.items()
    )


def quota_json(limit_bytes: int, limit_s: int, policy: str) -> dict[str, object]:
    """The JSON of a quota; `limit` is for clients before Pulsar 2.8, and means `limitSize`."""
    limits = {"limit": limit_bytes, "limitSize": limit_bytes, "limitTime": limit_s}
    return {**limits, "policy": policy}


def normalized(value: Mapping[str, object]) -> dict[str, object]:
    """The JSON of a valid quota with all members."""
    size = value.get("limitSize")
    if size is None:
        size = value.get("limit")
    time = value.get("limitTime")
    return quota_json(
        size if isinstance(size, int) else NO_LIMIT,
        time if isinstance(time, int) else NO_LIMIT,
        str(value["policy"]),
    )


def quota_in(quotas: object, kind: QuotaType) -> BacklogQuota | None:
    """The quota of a type among valid ones; None if it has no limit."""
    found = quotas.get(kind.value) if isinstance(quotas, dict) else None
    if not isinstance(found, dict):
        return None
    whole = normalized(found)
    limit = whole["limitSize" if kind is QuotaType.SIZE else "limitTime"]
    # Pulsar takes a size of 0 as a limit, and an age of 0 as none.
    least = 0 if kind is QuotaType.SIZE else 1
    if not isinstance(limit, int) or limit < least:
        return None
    return BacklogQuota(kind, limit, QuotaPolicy(str(whole["policy"])))


def require_retention_above_quotas(retention: object, quotas: object) -> None:
    """Raise `RetentionTooSmall` unless retention is more than the quotas.

    Retention that is 0 or without limit agrees with all quotas.  `retention` and `quotas` are the
    valid values of both policies, as REST shows them.
    """
    section = retention if isinstance(retention, dict) else {}
    megabytes, minutes = section.get("retentionSizeInMB"), section.get("retentionTimeInMinutes")
    size, age = quota_in(quotas, QuotaType.SIZE), quota_in(quotas, QuotaType.AGE)
    if size and is_number(megabytes, 1) and size.limit >= megabytes * MIB:
        raise RetentionTooSmall(
            f"retentionSizeInMB of {megabytes} is not more than the backlog quota of {size.limit} "
            "bytes: raise retention, or lower the quota."
        )
    if age and is_number(minutes, 1) and age.limit >= minutes * _MINUTE_S:
        raise RetentionTooSmall(
            f"retentionTimeInMinutes of {minutes} is not more than the backlog quota of "
            f"{age.limit} s: raise retention, or lower the quota."
        )
