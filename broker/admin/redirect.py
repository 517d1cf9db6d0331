"""307: requests about one topic go to the broker that has it.

Rules: the answer names the same path and query there, and `authoritative=true`, so that a topic
that nobody owns is taken where it was chosen to be and the request is not sent on again.  A broker
without a session can take nothing: a request waits ADMIN_SESSION_WAIT_S for the next one.
"""

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


def go_to(request: web.Request, address: BrokerAddress) -> web.HTTPTemporaryRedirect:
    """The answer that sends a request on; to be raised."""
    there = URL(address.web_url)
    url = request.url.with_scheme(there.scheme).with_host(there.host or "").with_port(there.port)
    return web.HTTPTemporaryRedirect(url.update_query({AUTHORITATIVE: "true"}))


async def require_here(request: web.Request, name: TopicName) -> None:
    """Go on if this broker has the topic, or may take it; else the request is sent on.

    Raises `HTTPTemporaryRedirect`, `PlacementNotReady`.
    """
    placement = request.app[BROKER].placement
    if placement.shared:
        with suppress(TimeoutError):
            async with asyncio.timeout(ADMIN_SESSION_WAIT_S):
                await placement.live_session()
    placed = placement.place(name, authoritative=flag(request, AUTHORITATIVE))
    if not placed.here:
        raise go_to(request, placed.address)


def destination_of(request: web.Request) -> str | None:
    """The broker id in `?destinationBroker=`, which must be live and take topics."""
    wanted = request.query.get("destinationBroker")
    candidates = request.app[BROKER].placement.candidates
    if wanted is not None and wanted not in candidates:
        raise refused(f"{wanted!r} takes no topics: name one of {', '.join(candidates)}.")
    return wanted
