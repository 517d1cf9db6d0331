"""Why replication to another cluster stands, and what an operator can do."""

from collections.abc import Container, Hashable
from ssl import SSLCertVerificationError
from typing import Final

from magnetar.errors import AuthenticationFailed, AuthorizationFailed, BrokerError, ServiceNotReady
from magnetar.protocol.server_error import MagnetarError

BROKER_FAILED: Final = (
    "The broker failed: its log has the cause (replicator_failed, segment_replicator_failed, "
    "replication_failed or schema_not_replicated). It is tried again. Report this as a bug."
)
"""The reason in statistics for an error that nobody expected."""


class RemoteRefused(ServiceNotReady):
    """The other cluster does not take messages now; it is asked again until it does.

    `final`: what was refused is certainly not stored there.
    """

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class LoggedReasons:
    """The last reason of each subject: it is logged once, until another one comes."""

    def __init__(self) -> None:
        self._last: dict[Hashable, str] = {}

    @property
    def first(self) -> str | None:
        """The reason of the subject that has had one for the longest time; None without any."""
        return next(iter(self._last.values()), None)

    def is_new(self, error: Exception, subject: Hashable = None) -> bool:
        """Whether an error is to be logged; it counts as logged from now on."""
        reason = str(error)
        is_new = self._last.get(subject) != reason
        self._last[subject] = reason
        return is_new

    def forget(self, subject: Hashable = None) -> None:
        """Log the next error, whatever it is."""
        self._last.pop(subject, None)

    def keep(self, subjects: Container[Hashable]) -> None:
        """Forget all other subjects."""
        for subject in [each for each in self._last if each not in subjects]:
            del self._last[subject]


def refusal(cluster: str, error: MagnetarError) -> RemoteRefused:
    """The refusal of a cluster as one that is tried again, with what to change here or there."""
    record = f"of its record (POST /admin/v2/clusters/{cluster})"
    if isinstance(error, AuthenticationFailed):
        return RemoteRefused(
            f"Cluster {cluster!r} does not accept the credentials that are shown to it: change "
            f"authenticationPlugin and authenticationParameters {record}. {error}"
        )
    if isinstance(error, AuthorizationFailed):
        return RemoteRefused(
            f"Cluster {cluster!r} does not let the role of this cluster publish: grant it produce "
            f"there, or change the credentials {record}. {error}"
        )
    if isinstance(error.__cause__, SSLCertVerificationError):
        return RemoteRefused(
            f"The certificate of cluster {cluster!r} is not trusted: name its authorities in "
            f"brokerClientTrustCertsFilePath {record}. {error}"
        )
    if isinstance(error, BrokerError) and not isinstance(error, RemoteRefused):
        return RemoteRefused(at_cluster(cluster, error))
    return RemoteRefused(str(error))


def at_cluster(cluster: str, error: BrokerError) -> str:
    """The words of another cluster, with its name, which they do not have."""
    return f"At cluster {cluster!r}: {error}"
