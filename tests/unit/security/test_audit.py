"""The audit log: its lines, and their bound by event, role and address."""

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from config.bounds import (
    AUDIT_LINES_OF_CALLER_PER_S,
    AUDIT_LINES_PER_S,
    AUDIT_LINES_WITHOUT_ROLE_PER_S,
)
from config.logging import configure_logging
from security.audit import AuditBound, AuditLog

OTHER = ("access_denied", "bob", "10.0.0.2")
FLOODER = ("access_denied", "eve", "10.0.0.1")


class Seconds:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 5.0

    def __call__(self) -> float:
        return self.now_s


def test_flood_of_one_caller_hides_no_line_of_another() -> None:
    clock = Seconds()
    bound = AuditBound(clock)
    written = [bound.take(FLOODER) for _ in range(1000)]
    assert written == [0] * AUDIT_LINES_OF_CALLER_PER_S + [None] * (
        1000 - AUDIT_LINES_OF_CALLER_PER_S
    )
    # Another role, the same role elsewhere, and another event of the same role.
    for caller in (OTHER, (*FLOODER[:2], OTHER[2]), ("changed_by_request", *FLOODER[1:])):
        assert bound.take(caller) == 0
    assert bound.dropped == 1000 - AUDIT_LINES_OF_CALLER_PER_S
    clock.now_s += 1
    assert bound.take(FLOODER) == 1000 - AUDIT_LINES_OF_CALLER_PER_S
    assert bound.take(FLOODER) == 0


def many(role: str | None, count: int) -> list[tuple[str, str | None, str]]:
    """The same event of so many addresses."""
    return [("login", role, f"10.1.{at // 250}.{at % 250}") for at in range(count)]


def test_flood_of_many_addresses_leaves_each_its_first_line() -> None:
    bound = AuditBound(Seconds())
    callers = many("eve", 2 * AUDIT_LINES_PER_S)
    assert [bound.take(each) for each in callers] == [0] * len(callers)
    assert bound.take(callers[0]) is None
    assert bound.take(OTHER) == 0


def test_flood_of_those_without_a_role_is_bounded_and_hides_no_role() -> None:
    clock = Seconds()
    bound = AuditBound(clock)
    strangers = many(None, 10 * AUDIT_LINES_WITHOUT_ROLE_PER_S)
    written = [bound.take(each) for each in strangers]
    assert written.count(0) == AUDIT_LINES_WITHOUT_ROLE_PER_S
    assert bound.dropped == 9 * AUDIT_LINES_WITHOUT_ROLE_PER_S
    assert [bound.take(OTHER) for _ in range(AUDIT_LINES_OF_CALLER_PER_S)] == [
        0 for _ in range(AUDIT_LINES_OF_CALLER_PER_S)
    ]
    clock.now_s += 1
    assert bound.take(strangers[-1]) == 1


def test_table_of_callers_is_bounded() -> None:
    bound = AuditBound(Seconds(), callers=2)
    for _ in range(AUDIT_LINES_OF_CALLER_PER_S + 1):
        bound.take(FLOODER)
    assert bound.take(FLOODER) is None
    for address in ("10.0.0.3", "10.0.0.4"):
        assert bound.take(("login", "ann", address)) == 0
    assert bound.take(FLOODER) == 0


@pytest.fixture
def unbound_logging() -> Iterator[None]:
    before, root = structlog.get_config(), logging.getLogger()
    handlers, root.handlers = root.handlers, []
    yield
    root.handlers = handlers
    structlog.configure(**before)


@pytest.mark.usefixtures("unbound_logging")
def test_lines_of_many_roles_are_not_held_to_the_bound_of_one_event(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging(style="json")
    audit = AuditLog(Seconds())
    for number in range(100):
        audit.denied("access_denied", (f"role-{number}",), "10.0.0.1:4711", address="10.0.0.1")
    for port in range(100):
        audit.permitted("login", ("app", "proxy"), f"[::1]:{port}", address="::1", method="token")
    audit.failed_login("10.0.0.9", reason="INVALID_TOKEN")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    denied = [line for line in lines if line["event"] == "access_denied"]
    logins = [line for line in lines if line["event"] == "login"]
    assert len(denied) == 100
    assert denied[0]["role"] == "role-0"
    assert (denied[0]["remote"], denied[0]["allowed"]) == ("10.0.0.1:4711", False)
    assert len(logins) == AUDIT_LINES_OF_CALLER_PER_S
    assert (logins[0]["role"], logins[0]["method"]) == ("app for proxy", "token")
    assert lines[-1]["event"] == "login_failed"
    assert audit.dropped == 100 - AUDIT_LINES_OF_CALLER_PER_S
