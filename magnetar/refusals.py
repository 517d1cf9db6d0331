"""When a broker refuses what it had granted before.  Pure.

Pure.  Rules: before the first success a refusal is what it is.  Afterwards one that would be for
good may still be that of a broker which has yet to hear of something, so it is worth another try,
for so many times in a row; the one after that is believed.
"""

from magnetar.bounds import REFUSALS_IN_A_ROW
from magnetar.errors import BrokerError, ServiceNotReady

__all__ = ["Refusals"]


class Refusals:
    """Of one thing that is attached again and again."""

    __slots__ = ("_granted", "_in_a_row")

    def __init__(self) -> None:
        self._granted = False
        self._in_a_row = 0

    @property
    def granted_before(self) -> bool:
        """Whether there was a success."""
        return self._granted

    def granted(self) -> None:
        """A success."""
        self._granted = True
        self._in_a_row = 0

    def judge(self, error: BrokerError) -> BrokerError:
        """The error to raise for a refusal: one that can be tried again, unless it is for good."""
        if error.retriable or not self._granted:
            return error
        self._in_a_row += 1
        return error if self._in_a_row > REFUSALS_IN_A_ROW else ServiceNotReady(str(error))
