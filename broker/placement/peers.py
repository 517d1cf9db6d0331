"""Calls to the REST interfaces of other brokers."""

import asyncio
import json
from collections.abc import Mapping
from http import HTTPStatus

import aiohttp

from broker.placement.dialing import Dialer
from broker.placement.peer_failed import PeerFailed
from broker.placement.placement import BrokerAddress
from config.bounds import PEER_TIMEOUT_S


class Peers:
    """An HTTP client that keeps its connections to other brokers."""

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer
        self._client: aiohttp.ClientSession | None = None

    async def call(
        self,
        address: BrokerAddress,
        method: str,
        path: str,
        query: Mapping[str, str],
        *,
        body: object = None,
        timeout_s: float = PEER_TIMEOUT_S,
    ) -> object:
        """Return what a broker answers, decoded; None for an empty answer.

        Redirects are followed, because the topic may have moved on.  Raises `PeerFailed` with the
        reason that the other broker gave.
        """
        if self._client is None:
            self._client = aiohttp.ClientSession()
        web, timeout = self._dialer.web_of(address), aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._client.request(
                method,
                web.url + path,
                params=query,
                json=body,
                timeout=timeout,
                ssl=web.tls or True,
            ) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise PeerFailed(
                f"The broker {address.broker_id} does not answer ({error or 'time is up'}): try "
                "again, or look whether it is well.",
                HTTPStatus.SERVICE_UNAVAILABLE,
            ) from error
        answer = _decode(text)
        if response.status < HTTPStatus.BAD_REQUEST:
            return answer
        members = answer if isinstance(answer, dict) else {}
        raise PeerFailed(
            str(
                members.get("reason")
                or f"The broker {address.broker_id} failed: its log has the cause."
            ),
            HTTPStatus(response.status),
            members.get("code"),
        )

    async def close(self) -> None:
        """Close all connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()
            await asyncio.sleep(0)


def _decode(text: str) -> object:
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text
