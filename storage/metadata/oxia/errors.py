"""The meaning of a failed call, and errors for callers.  Pure."""

import enum
from dataclasses import dataclass

from storage.metadata.store import MetadataError


class Action(enum.Enum):
    """The reaction to a failed call."""

    RETRY = "try again"
    FIND_LEADER = "look the leader up, then try again"
    SESSION_GONE = "the session has ended"
    TELL_OPERATOR = "trying again does not help"


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed call.  `code` is gRPC's name of the status, such as UNAVAILABLE."""

    action: Action
    code: str
    text: str

    @property
    def shard_is_down(self) -> bool:
        """Whether the shard cannot write any more, or not start again: an operator must act."""
        return any(sign in self.text.lower() for sign in _ALARMS)


# Release 0.14 answers with codes of its own, which arrive as UNKNOWN: only the text has the reason.
# Later releases use standard codes, and name a reason in the details.
_TEXTS = (
    ("not leader", Action.FIND_LEADER),
    ("wrong state", Action.FIND_LEADER),
    ("session not found", Action.SESSION_GONE),
    ("invalid session timeout", Action.TELL_OPERATOR),
    ("namespace not found", Action.TELL_OPERATOR),
    ("notifications not enabled", Action.TELL_OPERATOR),
)
_REASONS = (
    (b"NODE_IS_NOT_LEADER", Action.FIND_LEADER),
    (b"SESSION_NOT_FOUND", Action.SESSION_GONE),
)
_CODES = {
    "ABORTED": Action.FIND_LEADER,
    "FAILED_PRECONDITION": Action.TELL_OPERATOR,
    "INVALID_ARGUMENT": Action.TELL_OPERATOR,
    "NOT_FOUND": Action.TELL_OPERATOR,
    "PERMISSION_DENIED": Action.TELL_OPERATOR,
    "UNAUTHENTICATED": Action.TELL_OPERATOR,
    "UNIMPLEMENTED": Action.TELL_OPERATOR,
}
_AUTHORITY = " authority"
"""Part of the answer of a server that does not know the name by which it was called."""
_ALARMS = ("failed to append to wal", "failed to apply batch")


def classify(code: str, text: str, details: bytes = b"") -> Failure:
    """The meaning of a status; `details` are the binary ones, which newer servers send.

    An unknown status is tried again until the caller's time is up.
    """
    lowered = text.lower()
    for sign, action in _TEXTS:
        if sign in lowered:
            return Failure(action, code, text)
    for reason, action in _REASONS:
        if reason in details:
            return Failure(action, code, text)
    return Failure(_CODES.get(code, Action.RETRY), code, text)


def refused(failure: Failure, what: str) -> MetadataError:
    """The error of a call that is not tried again."""
    hint = "check the namespace, the access that was configured, and the servers' log"
    if _AUTHORITY in failure.text.lower():
        hint = (
            "call its servers by host and port as its cluster configuration names them, or list "
            "this name there in allowExtraAuthorities"
        )
    return MetadataError(f"Oxia refused {what} ({failure.code}: {failure.text}): {hint}.")


class ShardGone(MetadataError):
    """The map has no such shard any more: its keys are in other shards."""


class ClientDefect(MetadataError):
    """A bug of this client ended the call: trying again does not help.

    It is no `InternalError`, because callers take that for a write that surely had no effect.
    """


def shard_gone(shard_id: int) -> ShardGone:
    """The error of a call to a shard that is gone."""
    return ShardGone(
        f"Oxia's shard {shard_id} is gone: try again, its keys are in another one now."
    )


def closed() -> MetadataError:
    """The error of a request that was not sent before its shard, or the store, was closed."""
    return MetadataError(
        "The metadata store is closed, or this shard of it is gone: open the store again if it "
        "is, or else try again."
    )


def not_checked_in_time(what: str) -> MetadataError:
    """The error of a write whose deadline passed before it could be sent; it had no effect."""
    return MetadataError(
        f"Oxia did not answer the reads before {what} in time, so it was not sent and nothing of "
        "it took effect: check that its servers run and can be reached, then try again."
    )


def defect(what: str, error: BaseException, *, sent: bool = False) -> ClientDefect:
    """The error of a call ended by a bug of this client; with `sent` it may have taken effect."""
    outcome = (
        "its outcome is unknown, read the record before you decide anew"
        if sent
        else "nothing of it was written"
    )
    return ClientDefect(
        f"A defect of the Oxia client ended {what} ({type(error).__name__}: {error}), and "
        f"{outcome}: report it with the broker's log."
    )


def out_of_time(what: str, failure: Failure | None) -> MetadataError:
    """The error of a call whose deadline has passed; it had no effect."""
    last = "no answer" if failure is None else f"{failure.code}: {failure.text}"
    hint = (
        "the shard is broken, restart its server and read its log"
        if failure is not None and failure.shard_is_down
        else "check that its servers run and can be reached, then try again"
    )
    return MetadataError(f"Oxia did not do {what} in time (last: {last}): {hint}.")


def outcome_unknown(what: str) -> MetadataError:
    """The error of a write that may or may not have taken effect."""
    return MetadataError(
        f"The connection to Oxia broke during {what}, and its outcome is unknown: it may or may "
        "not have taken effect, read the record before you decide anew."
    )
