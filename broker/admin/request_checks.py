"""Checks that every request passes before its handler: its body, its kind, and where it is from.

A browser sends requests of any page it shows to any address that it reaches, this broker's too.
It lets a page of another site send only bodies that HTML forms can make, and it says in `Origin`
and `Sec-Fetch-Site` where a request is from (Fetch standard, CORS protocol; Fetch Metadata).
So a request that changes something may not be from another site, and its body must be named JSON,
as Apache Pulsar wants it too.
"""

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from aiohttp import hdrs, web
from yarl import URL

from broker.admin.access import PRINCIPAL
from broker.admin.http_connections import connection_of
from broker.admin.keys import BROKER
from broker.admin.not_served import is_served
from broker.admin.rest import RestError
from config.bounds import HTTP_BODY_S

_READING = frozenset({hdrs.METH_GET, hdrs.METH_HEAD, hdrs.METH_OPTIONS})
_OWN_SITE = frozenset({"same-origin", "none"})

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def count_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tell the request's connection that a request is in progress."""
    connection = connection_of(request)
    if connection is None:
        return await handler(request)
    connection.begin_request()
    try:
        return await handler(request)
    finally:
        connection.end_request()


@web.middleware
async def check_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse changes by other sites (403) or without JSON (415); read the body in time (408)."""
    served = is_served(request.match_info.route)
    if request.method not in _READING:
        _require_own_site(request)
        if served:
            _require_json(request)
    elif hdrs.UPGRADE in request.headers:
        # Browsers let a page of another site open a WebSocket, with the user's credentials.
        _require_own_site(request)
    if request.can_read_body:
        try:
            async with asyncio.timeout(HTTP_BODY_S):
                await request.read()
        except web.HTTPRequestEntityTooLarge:
            # What is not served is refused for that, however large it is.
            if served:
                raise
        except TimeoutError as error:
            raise RestError(
                HTTPStatus.REQUEST_TIMEOUT,
                f"The body has not come within {HTTP_BODY_S:g} s: send it faster.",
            ) from error
    _keep_connection(request)
    return await handler(request)


def _keep_connection(request: web.Request) -> None:
    """Let no newcomer replace the connection of a request that is complete, and of a role."""
    # Not before: else wrong credentials, whose refusal is held back, half a body, or a page that
    # nobody reads could take all connections.
    connection = connection_of(request)
    if connection is not None and (
        request.app[BROKER].authenticator is None or PRINCIPAL in request
    ):
        connection.keep_for_request()


async def add_safe_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Have browsers guess no content type, show no answer in a frame, and keep none.

    They are for the case that somebody opens an answer in one: nothing here is a page.
    """
    headers = response.headers
    headers.setdefault("X-Content-Type-Options", "nosniff")
    headers.setdefault("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")
    headers.setdefault(hdrs.CACHE_CONTROL, "no-store")


def _require_own_site(request: web.Request) -> None:
    site = request.headers.get("Sec-Fetch-Site")
    origin = request.headers.get(hdrs.ORIGIN)
    own = site is None or site in _OWN_SITE
    if own and origin is not None:
        # Behind a proxy that ends TLS the schemes differ, so the hosts are compared.
        own = _authority(origin) == request.host.lower()
    if not own:
        raise RestError(
            HTTPStatus.FORBIDDEN,
            f"A page of another site ({origin or site}) may not change anything here: use "
            "`magnetar`, pulsar-admin or curl.",
        )


def _authority(origin: str) -> str | None:
    """`host` or `host:port` of an Origin, as a Host header has it; None if it has none."""
    try:
        url = URL(origin)
    except ValueError:
        return None
    if not url.host:
        return None
    return origin.partition("://")[2].lower()


def _require_json(request: web.Request) -> None:
    if not request.can_read_body:
        # Libraries name a type for an empty body too, and it says nothing about that.
        return
    kind = request.headers.get(hdrs.CONTENT_TYPE, "").partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return
    raise RestError(
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        f"{kind or 'A body without content type'} is not taken: send JSON with the header "
        "Content-Type: application/json (curl: -H 'Content-Type: application/json').",
    )
