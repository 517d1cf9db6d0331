"""`/lookup/v2/topic/{domain}/...`: which broker serves a topic."""

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.redirect import AUTHORITATIVE, go_to
from broker.admin.rest import flag, topic_of
from broker.handlers.lookup import placed_for_client

TOPIC = "/lookup/v2/topic/{domain}/{tenant}/{namespace}/{topic}"


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [web.get(TOPIC, lookup)]


async def lookup(request: web.Request) -> web.Response:
    """GET: LookupData; 307 to the broker that is chosen for what nobody owns."""
    placement = request.app[BROKER].placement
    name = topic_of(request, request.match_info["domain"])
    placed = placed_for_client(placement, name, authoritative=flag(request, AUTHORITATIVE))
    if not placed.connect:
        raise go_to(request, placed.address)
    owner = placed.address
    return web.json_response(
        {
            "brokerId": owner.broker_id,
            "brokerUrl": owner.url,
            "brokerUrlSsl": owner.url_tls,
            "httpUrl": owner.web_url,
            "nativeUrl": owner.url,
        }
    )
