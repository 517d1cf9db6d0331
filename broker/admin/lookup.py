"""`/lookup/v2/topic/{domain}/...`: the broker that serves a topic."""

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.redirect import AUTHORITATIVE, redirect_to
from broker.admin.rest import flag, topic_of
from broker.wire.handlers.lookup import placed_for_client, require_listener

LISTENER_HEADER = "X-Pulsar-ListenerName"
TOPIC = "/lookup/v2/topic/{domain}/{tenant}/{namespace}/{topic}"


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [web.get(TOPIC, lookup)]


async def lookup(request: web.Request) -> web.Response:
    """GET `?listenerName=`: LookupData; 307 to the broker that is chosen for an unowned topic.

    404 if there is no such namespace.
    """
    broker = request.app[BROKER]
    name = topic_of(request, request.match_info["domain"])
    await broker.namespaces.require(name.namespace_name)
    in_query = request.query.get("listenerName", "")
    require_listener(in_query or request.headers.get(LISTENER_HEADER, ""))
    placed = placed_for_client(broker, name, authoritative=flag(request, AUTHORITATIVE))
    if not placed.connect:
        raise redirect_to(request, placed.address)
    owner = placed.address
    return web.json_response(
        {
            "brokerId": owner.broker_id,
            "brokerUrl": owner.url or None,
            "brokerUrlTls": owner.url_tls,
            "brokerUrlSsl": owner.url_tls,
            "httpUrl": owner.web_url or None,
            "httpUrlTls": owner.web_url_tls,
            "nativeUrl": owner.url or None,
        }
    )
