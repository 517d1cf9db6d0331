"""`RemoteCluster`: how this broker reaches another cluster."""

import asyncio
import json
import random
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Final
from urllib.parse import quote

import aiohttp
from aiohttp import hdrs

from broker.replication.access import Access
from broker.replication.errors import RemoteRefused, at_cluster, refusal
from broker.replication.read_ahead import ReadAhead
from broker.replication.remote_pool import RemotePool
from broker.replication.renewed_tls import RenewedTls
from broker.topics.subscription_positions import (
    PositionsTold,
    SubscriptionsLeft,
    positions_in,
    to_wire,
)
from config.bounds import (
    REMOTE_ANSWER_BYTES,
    REMOTE_REDIRECTS,
    REMOTE_REQUEST_S,
    REMOTE_REQUESTS_AT_ONCE,
)
from magnetar.context import ClientContext
from magnetar.errors import BrokerError, TopicNotFound, error_of
from magnetar.identity import Identities
from magnetar.protocol.names import NamespaceName, TopicDomain, TopicName
from magnetar.protocol.pulsar_pb2 import (
    BaseCommand,
    CommandPartitionedTopicMetadata,
    CommandSubscriptionPositions,
)
from magnetar.protocol.pulsar_pb2 import CommandPartitionedTopicMetadataResponse as Found
from magnetar.protocol.rest_reason import BODY_MAX, rest_reason
from magnetar.protocol.rest_redirect import RedirectRefused, redirect_target

_REDIRECTS: Final = (HTTPStatus.TEMPORARY_REDIRECT, HTTPStatus.PERMANENT_REDIRECT)


class RemoteCluster:
    """The connections to one other cluster, which all replicators to it share."""

    def __init__(self, name: str, access: Access, rng: random.Random) -> None:
        """Connect when that is needed.

        Raises `InvalidArgument` for a URL, credentials or TLS files that cannot be used.
        """
        self.name = name
        self.access = access
        self._credentials = access.rest_credentials()
        settings, ids = access.settings, Identities()
        self._tls = RenewedTls(settings)
        self._requests = asyncio.Semaphore(REMOTE_REQUESTS_AT_ONCE)
        pool = RemotePool(access.url, settings, ids, rng, self._tls.context)
        self.context = ClientContext(pool, settings, ids, rng)
        self.read_ahead = ReadAhead()

    async def close(self) -> None:
        """Close all connections; bounded in time."""
        await self.context.pool.close()

    async def require_partitions(self, topic: TopicName, partitions: int) -> None:
        """Have so many partitions there, 0 for a topic without; those that are missing are made.

        Raises `RemoteRefused` if it has more of them, and errors of the connection.
        """
        there = await self.partitions(topic)
        if there is None and not partitions:
            # Where topics are made by their producers, its producer is the first one.
            with suppress(RemoteRefused):
                await self._make(topic, 0, hdrs.METH_PUT)
            return
        there = there or 0
        if there < partitions:
            # As Apache Pulsar does when a topic is made, or gets more partitions.
            await self._make(topic, partitions, hdrs.METH_POST if there else hdrs.METH_PUT)
            there = await self.partitions(topic) or 0
        if there != partitions:
            raise RemoteRefused(
                f"{topic} has {partitions} partitions here and {there} in cluster {self.name!r}: "
                "give both the same number."
            )

    async def partitions(self, topic: TopicName) -> int | None:
        """The number of partitions of a topic there, 0 for one without; None if it is missing.

        Raises `RemoteRefused`, and errors of the connection.
        """
        connection = await self.context.pool.any()
        question = CommandPartitionedTopicMetadata(
            topic=str(topic), metadata_auto_creation_enabled=False
        )
        try:
            answer = await connection.request(
                BaseCommand(type=BaseCommand.PARTITIONED_METADATA, partitioned_metadata=question)
            )
        except TopicNotFound:
            return None
        found = answer.partitioned_metadata_response
        if found.response == Found.Failed:
            error = error_of(found.error, found.message)
            if isinstance(error, TopicNotFound):
                return None
            raise RemoteRefused(at_cluster(self.name, error))
        return found.partitions

    async def make_scalable_topic(self, topic: TopicName, segments: int) -> None:
        """Create a scalable topic there, with so many segments, unless there is one.

        Raises `RemoteRefused`.
        """
        path = f"{_topic_path(topic)}?numInitialSegments={segments}"
        await self._create(path, "{}", hdrs.METH_PUT, str(topic))

    async def _make(self, topic: TopicName, partitions: int, method: str) -> None:
        """Create a topic there, with partitions or with 0, (PUT), or add partitions (POST).

        Raises `RemoteRefused`.
        """
        name = _topic_path(topic)
        # The clusters that are to have them are asked by this one.
        alone = "createLocalTopicOnly" if method == hdrs.METH_PUT else "updateLocalTopicOnly"
        path, body = (
            (f"{name}/partitions?{alone}=true", str(partitions)) if partitions else (name, "{}")
        )
        await self._create(path, body, method, f"the {partitions} partitions of {topic}")

    async def _create(self, path: str, body_sent: str, method: str, what: str) -> None:
        """Have something created there; it may be there already.  Raises `RemoteRefused`."""
        if self.access.web_url is None:
            raise RemoteRefused(
                f"Cluster {self.name!r} is registered without serviceUrl, by which {what} would be "
                f"made there: add it with POST /admin/v2/clusters/{self.name}, or create the "
                "topic there."
            )
        status, body = await self._request(method, self.access.web_url, path, body_sent)
        # CONFLICT: another partition or segment of this topic was first.
        if status >= HTTPStatus.MULTIPLE_CHOICES and status != HTTPStatus.CONFLICT:
            raise RemoteRefused(
                f"Cluster {self.name!r} does not make {what}: "
                f"{rest_reason(body) or f'HTTP {status}.'}"
            )

    async def replication_list(self, holder: NamespaceName | TopicName) -> frozenset[str] | None:
        """The list of clusters of a namespace there, or the one in force for a topic.

        None if the other cluster does not say.  Raises `RemoteRefused`, and errors of credentials.
        """
        if self.access.web_url is None:
            return None
        if isinstance(holder, NamespaceName):
            path = f"namespaces/{_path_of(holder.tenant, holder.namespace)}/replication"
        else:
            # That of a scalable topic is under this path too.
            persistent = holder.in_domain(TopicDomain.PERSISTENT)
            path = f"{_topic_path(persistent)}/replication?applied=true"
        status, body = await self._request(hdrs.METH_GET, self.access.web_url, path)
        return _names_in(body) if status == HTTPStatus.OK else None

    async def tell_positions(self, topic: TopicName, told: PositionsTold) -> SubscriptionsLeft:
        """Tell the cluster how far subscriptions have come here, and return what is left there.

        Raises `RemoteRefused`, and errors of the connection.
        """
        connection = await self.context.pool.of_topic(str(topic))
        if not connection.replicated_segment_subscriptions:
            raise RemoteRefused(
                f"Cluster {self.name!r} has no replicated subscriptions of scalable topics (the "
                f"broker at {connection.address} has no replicated_segment_subscriptions): update "
                "its brokers."
            )
        question = CommandSubscriptionPositions(
            topic=str(topic),
            cluster=told.cluster,
            incarnation=told.incarnation,
            layout_epoch=told.layout_epoch,
            segments=sorted(told.segments),
            subscriptions=to_wire(told.below),
            made_for=sorted(told.made_for),
        )
        try:
            answer = await connection.request(
                BaseCommand(
                    type=BaseCommand.SUBSCRIPTION_POSITIONS, subscription_positions=question
                )
            )
        except BrokerError as error:
            raise refusal(self.name, error) from error
        found = answer.subscription_positions_response
        return SubscriptionsLeft(
            found.incarnation,
            positions_in(found.subscriptions),
            frozenset(found.not_replicated),
            frozenset(found.late),
        )

    async def namespace_policies(self, namespace: NamespaceName) -> Mapping[str, object] | None:
        """The policies of a namespace there; None if it is missing.  Raises as `settings`."""
        return await self._show(f"namespaces/{_path_of(namespace.tenant, namespace.namespace)}")

    async def settings(self) -> Mapping[str, object]:
        """The settings of a broker there, which are for superusers.

        Raises `RemoteRefused` if it does not show them, and errors of credentials.
        """
        return await self._show("brokers/configuration/runtime") or {}

    async def _show(self, path: str) -> Mapping[str, object] | None:
        """A JSON object; None for 404."""
        if self.access.web_url is None:
            raise RemoteRefused(
                f"Cluster {self.name!r} is registered without serviceUrl, by which it would be "
                f"compared: add it with POST /admin/v2/clusters/{self.name}."
            )
        status, body = await self._request(
            hdrs.METH_GET, self.access.web_url, path, most=REMOTE_ANSWER_BYTES
        )
        if status == HTTPStatus.NOT_FOUND:
            return None
        found = _json_in(body) if status == HTTPStatus.OK else None
        if not isinstance(found, dict):
            raise RemoteRefused(
                f"Cluster {self.name!r} does not show {path}: "
                f"{rest_reason(body) or f'HTTP {status}.'}"
            )
        return found

    async def _request(
        self,
        method: str,
        web_url: str,
        path: str,
        body: str | None = None,
        *,
        most: int = BODY_MAX,
    ) -> tuple[int, bytes]:
        """Ask for a path below /admin/v2; see `_ask`.  Raises `RemoteRefused` if nobody answers."""
        url = f"{web_url.rstrip('/')}/admin/v2/{path}"
        try:
            async with asyncio.timeout(REMOTE_REQUEST_S), self._requests:
                return await self._ask(method, url, body, most)
        # ValueError: a redirect to a host that no name can have.
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise RemoteRefused(
                f"Cluster {self.name!r} does not answer at {web_url}: check its "
                f"serviceUrl ({error or type(error).__name__})."
            ) from error

    async def _ask(self, method: str, url: str, body: str | None, most: int) -> tuple[int, bytes]:
        """The status of the answer, and its first bytes, `most` of them.

        Raises `RemoteRefused` for redirects that are not followed, and errors of the connection.
        """
        headers = {"Content-Type": "application/json"}
        authorization = await asyncio.to_thread(self._credentials.authorization, url)
        if authorization is not None:
            headers["Authorization"] = authorization
        async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
            for _ in range(REMOTE_REDIRECTS + 1):
                tls = self._tls.context() if url.startswith("https:") else False
                # aiohttp would leave the credentials out for another broker.
                async with session.request(
                    method, url, data=body, headers=headers, ssl=tls, allow_redirects=False
                ) as answer:
                    if answer.status not in _REDIRECTS:
                        return answer.status, await _beginning_of(answer, most)
                    location = answer.headers.get(hdrs.LOCATION, "")
                try:
                    url = redirect_target(url, location, with_credentials=authorization is not None)
                except RedirectRefused as error:
                    raise RemoteRefused(str(error)) from None
        raise RemoteRefused(
            f"Cluster {self.name!r} redirects a request too often, last to {url:.200}: its brokers "
            "do not agree who owns a topic."
        )


def _topic_path(topic: TopicName) -> str:
    kind = "scalable" if topic.domain is TopicDomain.TOPIC else topic.domain.value
    return _path_of(kind, topic.tenant, topic.namespace, topic.local_name)


def _path_of(*parts: str) -> str:
    return "/".join(quote(part, safe="") for part in parts)


def _names_in(body: bytes) -> frozenset[str] | None:
    """The names in a JSON list; None for anything else."""
    found = _json_in(body)
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        return None
    return frozenset(found)


def _json_in(body: bytes) -> object:
    """The value in a JSON document; None for anything else."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


async def _beginning_of(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """The first bytes of an answer, of which another cluster may send any number."""
    found = b""
    while part := await answer.content.read(most - len(found)):
        found += part
    return found
