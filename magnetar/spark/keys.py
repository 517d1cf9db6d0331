"""Transaction keys of queries, opened by the script that starts them.

    key = magnetar.spark.open_key("pulsar://host:6650", "orders-to-bills")
    query = df.writeStream.format("pulsar5").options(**key.options)...start()

Open the key before every start of the query.  That fences an earlier driver: its open groups are
aborted, and its later requests are refused.  The processes of this run use the epoch that was given
here; none of them opens the key again.

Brokers that have no transaction keys (Apache Pulsar 5) keep them in a topic, `state_topic`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Unpack

import magnetar.sync
from magnetar import GroupRecord
from magnetar.errors import NotSupported
from magnetar.settings import ClientOptions
from magnetar.spark.plain_groups import open_state
from magnetar.spark.sink_options import StateOption
from magnetar.spark.state_topic import DEFAULT_STATE_TOPIC
from magnetar.sync.bridge import Bridge

__all__ = ["OpenedKey", "open_key"]


@dataclass(frozen=True, slots=True)
class OpenedKey:
    """An opened transaction key, with the options for the query that is started next."""

    name: str
    epoch: int
    last: GroupRecord | None
    """The last batch that was committed under the key, with its query and positions."""
    state: StateOption | None = None
    """The state topic of the key, if brokers do not have keys."""

    @property
    def options(self) -> Mapping[str, str]:
        """The options for the sink."""
        kept = {} if self.state is None else self.state.options
        return {"txnKey": self.name, "txnEpoch": str(self.epoch), **kept}

    @property
    def source_options(self) -> Mapping[str, str]:
        """The options for a source without checkpoint, to go on where the last batch ended.

        Empty if no batch has kept its positions (`trackPositions`).
        """
        positions = None if self.last is None else self.last.positions
        return {} if positions is None else {"start": positions}


def open_key(
    service_url: str,
    name: str,
    *,
    epoch: int = -1,
    state_topic: str | None = None,
    **settings: Unpack[ClientOptions],
) -> OpenedKey:
    """Open the key `name`; `settings` are those of `magnetar.connect`.

    `epoch` is the epoch that the key must still have; -1 opens it whatever epoch it has.  The key
    is kept in `state_topic` if that is given, else by brokers that have keys, else in
    `DEFAULT_STATE_TOPIC`.

    Raises `TransactionKeyFenced` if the key was opened since `epoch`, `NotSupported` where brokers
    have no transactions, `StateUnreadable` for a state topic that cannot be used, and what
    `magnetar.connect` raises.
    """
    if state_topic is None:
        try:
            return _open_at_brokers(service_url, name, epoch, settings)
        except NotSupported:
            state_topic = DEFAULT_STATE_TOPIC
    return _open_in_topic(service_url, name, epoch, state_topic, settings)


def _open_at_brokers(url: str, name: str, epoch: int, settings: ClientOptions) -> OpenedKey:
    with (
        magnetar.sync.connect(url, **settings) as client,
        client.transaction_key(name, epoch=epoch) as key,
    ):
        return OpenedKey(key.name, key.epoch, key.last_group)


def _open_in_topic(
    url: str, name: str, epoch: int, topic: str, settings: ClientOptions
) -> OpenedKey:
    async def opened() -> OpenedKey:
        async with magnetar.connect(url, **settings) as client:
            nonce = os.urandom(16).hex()
            state, where = await open_state(client, topic, name, epoch, nonce)
            return OpenedKey(name, state.epoch, state.last, where)

    bridge = Bridge("magnetar pipeline")
    try:
        return bridge.run(opened)
    finally:
        bridge.close()
