"""The reason of an HTTP error as one line."""

import json

import pytest

from magnetar.protocol.rest_reason import REASON_MAX, rest_reason

TRACE = (
    "java.util.concurrent.CompletionException: org.example.NotFound: No such segment: 7\n"
    "\tat java.base/java.util.concurrent.CompletableFuture.encode(CompletableFuture.java:332)\n"
    "\tat org.example.Topics.lambda$split$3(Topics.java:12)\n"
    "Caused by: org.example.NotFound: No such segment: 7\n\t... 9 more\n"
)
UNEXPECTED = (
    "\n --- An unexpected error occurred in the server ---\n\n"
    f"Message: No such segment: 7\n\nStacktrace:\n\n{TRACE}"
)
JETTY = (
    "<html><head><title>Error 404 Not Found</title></head><body><h2>HTTP ERROR 404 Not Found</h2>"
    "<table><tr><th>URI:</th><td>/x</td></tr><tr><th>MESSAGE:</th><td>No &lt;such&gt; page</td>"
    "</tr></table><pre>\tat org.example.A.b(A.java:1)</pre></body></html>"
)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (json.dumps({"reason": "Namespace is missing"}), "Namespace is missing"),
        (json.dumps({"reason": UNEXPECTED}), "No such segment: 7"),
        (UNEXPECTED, "No such segment: 7"),
        (TRACE, "No such segment: 7"),
        (json.dumps({"reason": TRACE}), "No such segment: 7"),
        (JETTY, "No <such> page"),
        ("<html><body><h1>502 Bad\nGateway</h1><hr>nginx</body></html>", ""),
        ("HTTP 404 Not Found", "HTTP 404 Not Found"),
        ("two\nlines\x1b[31m", "two lines [31m"),
        (json.dumps({"reason": None}), ""),
        ("[]", ""),
        ("null", ""),
        ("java.lang.NullPointerException\n\tat a.B.c(B.java:1)\n", ""),
        ("", ""),
    ],
)
def test_reason_is_one_line_without_markup_or_stack_trace(body: str, reason: str) -> None:
    assert rest_reason(body.encode()) == reason


def test_long_reason_is_shortened() -> None:
    reason = rest_reason(b"word " * 1000)
    assert len(reason) <= REASON_MAX
    assert reason.endswith("...")


@pytest.mark.parametrize("body", [b"\xff\xfe\x00", b"[" * 100_000, b"<" * 10_000, b"-" * 10_000])
def test_no_body_raises(body: bytes) -> None:
    assert rest_reason(body).isprintable()
