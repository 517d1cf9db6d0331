"""`/lookup/v2/topic/{domain}/...`: which broker serves a topic."""

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.rest import topic_of

TOPIC = "/lookup/v2/topic/{domain}/{tenant}/{namespace}/{topic}"


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [web.get(TOPIC, lookup)]


async def lookup(request: web.Request) -> web.Response:
    """GET: LookupData."""
    placement = request.app[BROKER].placement
    owner = placement.owner_of(topic_of(request, request.match_info["domain"]))
    return web.json_response(
        {
            "brokerId": placement.broker_id,
            "brokerUrl": owner.url,
            "brokerUrlSsl": owner.url_tls,
            "httpUrl": placement.web_url,
            "nativeUrl": owner.url,
        }
    )
