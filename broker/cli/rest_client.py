"""The command line's view of the REST interface: one request, one answer, errors as sentences."""

import http.client
import json
import urllib.error
import urllib.request
from http import HTTPStatus

TIMEOUT_S = 30


class RestFailure(Exception):
    """The broker refused or was not there; the message says which and what to do."""


def call(base_url: str, method: str, path: str, body: object | None = None) -> object:
    """Send one request; return the decoded JSON (or text, or None when empty).

    Raises `RestFailure` with the broker's own reason.
    """
    if not base_url.startswith(("http://", "https://")):
        raise RestFailure(f"{base_url} is no REST address: write it as http://host:port.")
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        base_url.rstrip("/") + path,
        data=data,
        method=method,
        headers={"Content-Type": "application/json", "Accept": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return _decode(response.read())
    except urllib.error.HTTPError as error:
        answer = _decode(error.read())
        reason = answer.get("reason") if isinstance(answer, dict) else answer
        status = HTTPStatus(error.code).phrase
        raise RestFailure(f"{error.code} {status}: {reason or 'no reason given'}") from error
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", error)
        raise RestFailure(
            f"No broker answers at {base_url} ({reason}): start one with `magnetar standalone`, "
            "or name another with --admin-url."
        ) from error
    except http.client.HTTPException as error:
        raise RestFailure(
            f"What answers at {base_url} is no REST interface: name the broker's REST port "
            "(8080 unless set otherwise), not its binary port."
        ) from error


def _decode(text: bytes) -> object:
    if not text:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text.decode("utf-8", "replace")
