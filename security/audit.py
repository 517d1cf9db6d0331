"""Audit events: who asked for what, from where, and whether it was allowed.

They are lines of the logger `audit`, which can be routed apart from the others.
"""

from collections.abc import Sequence

import structlog

_log = structlog.get_logger("audit")


def permitted(event: str, roles: Sequence[str], remote: str | None, **fields: object) -> None:
    """Log that something was allowed.  Behind a proxy its role is the second one."""
    _log.info(event, **_common(roles, remote), **fields, allowed=True)


def denied(
    event: str,
    roles: Sequence[str],
    remote: str | None,
    *,
    dry_run: bool = False,
    **fields: object,
) -> None:
    """Log that something was refused, or with a dry run that it would have been."""
    _log.warning(event, **_common(roles, remote), **fields, allowed=dry_run)


def _common(roles: Sequence[str], remote: str | None) -> dict[str, object]:
    return {"role": " for ".join(roles) or None, "remote": remote}
