"""`Refusals`, which decides whether to retry when a broker refuses an attachment.  Pure."""

from magnetar.bounds import REFUSALS_IN_A_ROW
from magnetar.errors import AuthorizationFailed, BrokerError, ServiceNotReady

__all__ = ["Refusals"]


class Refusals:
    """The refusals of one attachment, in a row.

    Before the first success every error stands as it is.  After it, an error that is not retriable
    may come from a broker that does not know the latest state yet, so it is retried up to
    REFUSALS_IN_A_ROW times; the next one stands.  A missing permission stands at once: a broker
    ends what a withdrawn grant allowed, and only its administrator can change that.
    """

    __slots__ = ("_granted", "_in_a_row")

    def __init__(self) -> None:
        self._granted = False
        self._in_a_row = 0

    @property
    def granted_before(self) -> bool:
        """Whether an attempt has succeeded."""
        return self._granted

    def granted(self) -> None:
        """Note a success."""
        self._granted = True
        self._in_a_row = 0

    def judge(self, error: BrokerError) -> BrokerError:
        """The error to raise for a refusal: itself, or a retriable one in its place."""
        if error.retriable or not self._granted or isinstance(error, AuthorizationFailed):
            return error
        self._in_a_row += 1
        return error if self._in_a_row > REFUSALS_IN_A_ROW else ServiceNotReady(str(error))
