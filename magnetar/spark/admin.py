"""Requests to a broker's REST interface, for data that the binary protocol does not have."""

import http.client
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Final, cast

from magnetar.credentials.rest import RestCredentials
from magnetar.errors import ClientError
from magnetar.protocol.rest_reason import BODY_MAX, rest_reason
from magnetar.protocol.rest_redirect import RedirectRefused, redirect_target

__all__ = ["AdminFailed", "AdminRest", "topic_path"]

TIMEOUT_S: Final = 60
REDIRECTS_MAX: Final = 5
"""Redirects to other brokers (307, 308) that one request follows."""
_NEXT_STEP: Final = "Ask again later; the broker's log may tell more."
_NEXT_STEPS: Final[Mapping[int, str]] = MappingProxyType(
    {
        HTTPStatus.UNAUTHORIZED: "Give a token or other credentials that the broker accepts.",
        HTTPStatus.FORBIDDEN: "Give the credentials of a role that may ask for this.",
        HTTPStatus.NOT_FOUND: "Check the name of the topic, and that the broker is Magnetar's.",
    }
)
_SENT_ON: Final = (HTTPStatus.TEMPORARY_REDIRECT, HTTPStatus.PERMANENT_REDIRECT)
Json = Mapping[str, object]


class AdminFailed(ClientError):
    """The REST interface refused a request, or did not answer."""


class AdminRest:
    """The REST interface of one broker, or of several behind one address."""

    def __init__(
        self,
        url: str,
        credentials: RestCredentials | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`url` as http://host:8080; `credentials` where brokers ask for them; `tls` for https."""
        if not url.startswith(("http://", "https://")):
            raise AdminFailed(f"{url!r} is no REST address; give one as http://host:8080.")
        self._url = url.rstrip("/")
        https = urllib.request.HTTPSHandler(context=tls)
        self._opener = urllib.request.build_opener(_NotFollowed, https)
        self._credentials = credentials or RestCredentials()

    def get(self, path: str) -> object:
        """The decoded JSON of a GET.  Raises as `call`."""
        return self.call("GET", path)

    def call(self, method: str, path: str, body: object | None = None) -> object:
        """Send one request; the decoded JSON, None for an empty answer.

        Raises `AdminFailed`, and `AuthenticationFailed` if there are no credentials to send.
        """
        with self._open(method, path, body) as answer:
            text = answer.read()
        return _decoded(self._url + path, text) if text else None

    def lines(self, path: str) -> Iterator[Json]:
        """Iterate over an answer of JSON lines.

        Raises `AdminFailed`, also when the last line is missing.
        """
        try:
            opened = self._open("GET", path, None)
        except AdminFailed as error:
            if not _is_missing(error):
                raise
            raise AdminFailed(
                f"{self._url}{path} is not there: only brokers of Magnetar have it, and Apache "
                "Pulsar's do not; give the REST address of one of Magnetar's."
            ) from error
        with opened as answer:
            for line in answer:
                # The last line says that the answer is whole.
                found = cast("Json", _decoded(self._url + path, line))
                if found.get("end") is True:
                    return
                yield found
        raise AdminFailed(f"{self._url}{path} broke off in the middle; ask again.")

    def find(self, path: str) -> object | None:
        """See `get`; None for 404."""
        try:
            return self.get(path)
        except AdminFailed as error:
            if _is_missing(error):
                return None
            raise

    def _open(self, method: str, path: str, body: object | None) -> http.client.HTTPResponse:
        url = self._url + path
        data = None if body is None else json.dumps(body).encode()
        headers = {} if data is None else {"Content-Type": "application/json"}
        authorization = self._credentials.authorization(url)
        if authorization is not None:
            headers["Authorization"] = authorization
        for _ in range(REDIRECTS_MAX):
            request = urllib.request.Request(url, data=data, method=method, headers=headers)
            try:
                answer = self._opener.open(request, timeout=TIMEOUT_S)
                return cast("http.client.HTTPResponse", answer)
            except urllib.error.HTTPError as error:
                if error.code in _SENT_ON and error.headers.get("Location"):
                    location = error.headers["Location"]
                    url = _next_url(url, location, with_credentials=authorization is not None)
                    continue
                raise AdminFailed(
                    f"{url} refused ({error.code}): {_reason(error).rstrip('. ')}. "
                    f"{_NEXT_STEPS.get(error.code, _NEXT_STEP)}"
                ) from error
            except (OSError, http.client.HTTPException) as error:
                raise AdminFailed(
                    f"{url} does not answer ({error}); is it the address of the REST interface?"
                ) from error
        raise AdminFailed(
            f"{url} is the end of {REDIRECTS_MAX} redirects: the topic moves; ask again."
        )


class _NotFollowed(urllib.request.HTTPRedirectHandler):
    """Makes redirects errors: `AdminRest` follows them itself, with any method and body."""

    def redirect_request(self, *_args: object, **_kwargs: object) -> None:
        """Follow no redirect."""


def _next_url(url: str, location: str, *, with_credentials: bool) -> str:
    try:
        return redirect_target(url, location, with_credentials=with_credentials)
    except RedirectRefused as error:
        raise AdminFailed(str(error)) from None


def _is_missing(error: AdminFailed) -> bool:
    cause = error.__cause__
    return isinstance(cause, urllib.error.HTTPError) and cause.code == HTTPStatus.NOT_FOUND


def _reason(error: urllib.error.HTTPError) -> str:
    return rest_reason(error.read(BODY_MAX)) or str(error.reason)


def _decoded(url: str, text: bytes) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise AdminFailed(
            f"{url} answers with something else than JSON; give the REST address of a broker."
        ) from error


def topic_path(topic: str) -> str:
    """The escaped path of a topic `domain://tenant/namespace/name` in the REST interface."""
    domain, _, rest = topic.partition("://")
    tenant, namespace, name = rest.split("/", 2)
    names = name.rsplit("/", 1) if domain == "segment" else [name]
    return "/".join(
        urllib.parse.quote(part, safe="") for part in (domain, tenant, namespace, *names)
    )
