"""The reason in an HTTP error's body, as one line for a person.  Pure."""

import html
import json
import re
from typing import Final

REASON_MAX: Final = 300
"""Characters of a reason; what is longer ends with an ellipsis."""
BODY_MAX: Final = 16 * 1024
"""Bytes of a body that are read."""
_PREAMBLE: Final = re.compile(r"\s*-{2,}.*?-{2,}\s*(?:Message:)?", re.DOTALL)
"""The words before the message of an unexpected error of Apache Pulsar's REST interface."""
_TRACE: Final = re.compile(
    r"^\s*Stack ?trace:|^\s*at [\w.$<>/@]+\(|^\s*Caused by:|^Traceback \(most recent", re.MULTILINE
)
_EXCEPTION: Final = re.compile(r"\s*(?:[a-z_][\w$]*\.)+[A-Z][\w$]*(?::|$)\s*")
_JETTY_MESSAGE: Final = re.compile(r"<th>MESSAGE:</th>\s*<td>(.*?)</td>", re.DOTALL | re.I)
_TAG: Final = re.compile(r"<[^<>]*>")


def rest_reason(body: bytes) -> str:
    """The reason that a server gives in the body of an HTTP error; empty if it gives none.

    Reads the JSON `{"reason": ...}` of Magnetar and Apache Pulsar, error pages of Jetty, and text.
    Stack traces, names of exception classes, tags and control characters are left out.
    """
    text = body[:BODY_MAX].decode("utf-8", "replace")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        pass
    else:
        if isinstance(found, dict):
            found = next((found[name] for name in ("reason", "message") if found.get(name)), "")
        text = found if isinstance(found, str) else ""
    if text.lstrip().startswith("<"):
        text = _text_of_html(text)
    text = _PREAMBLE.sub("", text, count=1) if text.lstrip().startswith("--") else text
    if (trace := _TRACE.search(text)) is not None:
        text = text[: trace.start()]
    while (name := _EXCEPTION.match(text)) is not None and name.end():
        text = text[name.end() :]
    line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return line if len(line) <= REASON_MAX else line[: REASON_MAX - 3].rstrip() + "..."


def _text_of_html(page: str) -> str:
    """The message of an error page of Jetty; empty for other pages, which repeat the status."""
    message = _JETTY_MESSAGE.search(page)
    return "" if message is None else html.unescape(_TAG.sub(" ", message.group(1)))
