"""LOOKUP: which broker serves a topic.

Rules: the question goes to any broker first; a redirect is followed to the broker that it names,
for a bounded number of times, with the `authoritative` flag that came with it; with TLS only TLS
addresses are taken.  Errors are raised as they are: whoever wants the topic tries again.
"""

from typing import TYPE_CHECKING, NamedTuple

from magnetar.bounds import LOOKUP_REDIRECTS
from magnetar.errors import BrokerFailed, NotSupported
from protocol.pulsar_pb2 import BaseCommand, CommandLookupTopic, CommandLookupTopicResponse

if TYPE_CHECKING:
    from magnetar.wire.connection import Connection
    from magnetar.wire.pool import ConnectionPool

__all__ = ["Owner", "look_up"]


class Owner(NamedTuple):
    """Of a topic."""

    url: str
    proxied: bool
    """Whether it is reached through the service URL."""


async def look_up(pool: "ConnectionPool", topic: str) -> Owner:
    """The broker that serves a topic, of any domain.  Raises what the broker answers."""
    connection = await pool.any()
    authoritative = False
    for _ in range(LOOKUP_REDIRECTS + 1):
        answer = await _ask(connection, topic, authoritative, pool.listener_name)
        pool.learn_of(answer.broker_service_url, answer.broker_service_url_tls)
        if answer.response == CommandLookupTopicResponse.Failed:
            raise BrokerFailed(
                f"The broker could not look up {topic!r} and gave no reason; look into its log."
            )
        owner = _owner(answer, topic, tls=pool.tls)
        if answer.response == CommandLookupTopicResponse.Connect:
            return owner
        authoritative = answer.authoritative
        connection = await pool.connect_to_owner(owner)
    raise BrokerFailed(
        f"The brokers sent the lookup of {topic!r} on {LOOKUP_REDIRECTS} times; "
        "look whether they agree on who owns what."
    )


async def _ask(
    connection: "Connection", topic: str, authoritative: bool, listener_name: str | None
) -> CommandLookupTopicResponse:
    command = CommandLookupTopic(topic=topic, request_id=0, authoritative=authoritative)
    if listener_name is not None:
        command.advertised_listener_name = listener_name
    answer = await connection.request(BaseCommand(type=BaseCommand.LOOKUP, lookup=command))
    return answer.lookup_response


def _owner(answer: CommandLookupTopicResponse, topic: str, *, tls: bool) -> Owner:
    url = answer.broker_service_url_tls if tls else answer.broker_service_url
    proxied = answer.proxy_through_service_url
    if not url and proxied:
        url = answer.broker_service_url  # names the broker; TLS is the proxy's
    if not url:
        kind = "TLS " if tls else ""
        raise NotSupported(
            f"The broker of {topic!r} tells no {kind}address; let it announce one, "
            "or connect to it by the scheme that it serves."
        )
    return Owner(url, proxied)
