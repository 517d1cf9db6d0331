"""Audit events: who asked for what, from where, and whether it was allowed.

Their lines have a bound of their own, by event, role and address, so that the lines of one peer
never hide those of another one, or its own of another kind.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

import structlog

from config.bounds import (
    AUDIT_CALLERS,
    AUDIT_LINES_OF_CALLER_PER_S,
    AUDIT_LINES_PER_S,
    AUDIT_LINES_WITHOUT_ROLE_PER_S,
)
from security.addresses import address_key

_Caller = tuple[str, str | None, str]
"""An event, the role that causes it, and its address."""


class AuditBound:
    """Decides for each line whether it is written.  `now_s` is a monotonic clock in seconds.

    In a second a caller has AUDIT_LINES_OF_CALLER_PER_S lines, and all with a role together have
    AUDIT_LINES_PER_S, but for the first line of each, which is always written.  Those without a
    role have AUDIT_LINES_WITHOUT_ROLE_PER_S together, as anybody can be many of them.  The table of
    callers is bounded; the one without a line for the longest time leaves it first.
    """

    def __init__(self, now_s: Callable[[], float], *, callers: int = AUDIT_CALLERS) -> None:
        self.dropped = 0
        """Lines that were left out, since the start."""
        self._now_s = now_s
        self._most_callers = callers
        self._callers: OrderedDict[_Caller, _Lines] = OrderedDict()
        self._second = now_s()
        self._written = 0
        self._written_without_role = 0

    def take(self, caller: _Caller) -> int | None:
        """None if the line is left out, else how many of the caller were left out before it."""
        now_s = self._now_s()
        if now_s - self._second >= 1.0:
            self._second, self._written, self._written_without_role = now_s, 0, 0
        lines = self._lines_of(caller)
        if not self._may_write(caller, lines.written):
            lines.left_out += 1
            self.dropped += 1
            return None
        lines.written += 1
        left_out, lines.left_out = lines.left_out, 0
        return left_out

    def _lines_of(self, caller: _Caller) -> "_Lines":
        lines = self._callers.get(caller)
        if lines is None:
            lines = self._callers[caller] = _Lines()
            if len(self._callers) > self._most_callers:
                self._callers.popitem(last=False)
        self._callers.move_to_end(caller)
        if lines.second != self._second:
            lines.second, lines.written = self._second, 0
        return lines

    def _may_write(self, caller: _Caller, written: int) -> bool:
        """Whether a caller with so many lines in this second may have one more; counts that."""
        if written >= AUDIT_LINES_OF_CALLER_PER_S:
            return False
        _, role, _ = caller
        if role is None:
            self._written_without_role += 1
            return self._written_without_role <= AUDIT_LINES_WITHOUT_ROLE_PER_S
        self._written += 1
        return written == 0 or self._written <= AUDIT_LINES_PER_S


class _Lines:
    """The lines of one caller: written in a second, and left out since the last one."""

    __slots__ = ("left_out", "second", "written")

    def __init__(self) -> None:
        self.second = -1.0
        self.written = 0
        self.left_out = 0


class AuditLog:
    """Writes the audit events of one broker."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        """`now_s` is a monotonic clock in seconds."""
        self._bound = AuditBound(now_s)
        # The bound of each event, for all peers together, is not that of these lines.
        self._log = structlog.get_logger("audit", every_line=True)

    @property
    def dropped(self) -> int:
        """Lines that were left out above the bounds, since the start."""
        return self._bound.dropped

    def permitted(
        self,
        event: str,
        roles: Sequence[str],
        remote: str | None,
        *,
        address: str | None = None,
        **fields: object,
    ) -> None:
        """Log that something was allowed.  Behind a proxy its role is the second one.

        Give `address` where `remote` has a port too.
        """
        line = self._line(event, roles, remote, address)
        if line is not None:
            self._log.info(event, **line, **fields, allowed=True)

    def denied(
        self,
        event: str,
        roles: Sequence[str],
        remote: str | None,
        *,
        address: str | None = None,
        dry_run: bool = False,
        **fields: object,
    ) -> None:
        """Log that something was refused, or with a dry run that it would have been."""
        line = self._line(event, roles, remote, address)
        if line is not None:
            self._log.warning(event, **line, **fields, allowed=dry_run)

    def failed_login(self, address: str, **fields: object) -> None:
        """Log that credentials were wrong."""
        if self._bound.take(("login_failed", None, address_key(address))) is not None:
            self._log.warning("login_failed", address=address, **fields)

    def _line(
        self, event: str, roles: Sequence[str], remote: str | None, address: str | None
    ) -> dict[str, object] | None:
        """The fields that all events have; None if the line is above a bound."""
        role = " for ".join(roles) or None
        left_out = self._bound.take((event, role, address_key(address or remote or "")))
        if left_out is None:
            return None
        counted = {"not_logged_before": left_out} if left_out else {}
        return {"role": role, "remote": remote, **counted}
