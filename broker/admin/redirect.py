"""Redirects (307) of requests about one topic to the broker that owns it."""

import asyncio
from contextlib import suppress

from aiohttp import web
from yarl import URL

from broker.admin.keys import BROKER
from broker.admin.rest import flag, refused
from broker.placement import BrokerAddress
from config.bounds import ADMIN_SESSION_WAIT_S
from magnetar.protocol.names import TopicName

AUTHORITATIVE = "authoritative"


def redirect_to(request: web.Request, address: BrokerAddress) -> web.HTTPTemporaryRedirect:
    """The redirect of a request to the same path at another broker; to be raised.

    It adds `authoritative=true`: the other broker takes an unowned topic, and redirects no further.
    The scheme stays, so that credentials that were sent over TLS do not go on without it.
    """
    there = URL(address.web_url_for(request.secure))
    url = request.url.with_scheme(there.scheme).with_host(there.host or "").with_port(there.port)
    return web.HTTPTemporaryRedirect(url.update_query({AUTHORITATIVE: "true"}))


async def require_here(request: web.Request, name: TopicName) -> None:
    """Redirect the request unless this broker owns the topic, or may take it.

    Raises `HTTPTemporaryRedirect`, `PlacementNotReady`.
    """
    placement = request.app[BROKER].placement
    if placement.shared:
        # A broker without a session can take nothing: wait for the next session.
        with suppress(TimeoutError):
            async with asyncio.timeout(ADMIN_SESSION_WAIT_S):
                await placement.live_session()
    placed = placement.place(name, authoritative=flag(request, AUTHORITATIVE))
    if not placed.here:
        raise redirect_to(request, placed.address)


def destination_of(request: web.Request) -> str | None:
    """The broker id in `?destinationBroker=`; 412 unless that broker is live and takes topics."""
    wanted = request.query.get("destinationBroker")
    candidates = request.app[BROKER].placement.candidates
    if wanted is not None and wanted not in candidates:
        raise refused(f"{wanted!r} takes no topics: name one of {', '.join(candidates)}.")
    return wanted
