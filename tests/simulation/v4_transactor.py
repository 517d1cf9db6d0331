"""A client of a version before 5, whose transactions are those of PIP-31.

It looks its coordinator up, and adds each topic and subscription before it uses it.  Some are like
Pulsar's Go client, whose messages name no transaction: only their SENDs do.
"""

import asyncio
import random
from collections import deque
from typing import TYPE_CHECKING

from config.bounds import TXN_END_CARRIED_OUT_S
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.txn_id import TxnId
from tests.simulation.client import GO, JAVA_V4, SimulatedClient
from tests.simulation.history import Transaction
from tests.simulation.loop import Host
from tests.simulation.network import SimulatedTransport
from tests.simulation.transactor import LANES, Transactor, Work
from tests.support.raw_client import Delivery, RawConsumer
from txn.membership import Membership

if TYPE_CHECKING:
    from tests.simulation.world import World

SOON_S = TXN_END_CARRIED_OUT_S - 0.5
"""An END that is answered within this time did not give up waiting for the owners of topics."""


CONFLICTS = 0.2
"""Of acknowledgements, how many are followed by one that another transaction may have."""
Taken = tuple[RawConsumer, Delivery]


class V4Transactor(Transactor):
    """See the module's docstring."""

    adds = 1.0

    def __init__(
        self, world: "World", name: str, host: Host, rng: random.Random, topics: list[str]
    ) -> None:
        super().__init__(world, name, host, rng, topics)
        self.client_version = rng.choice((JAVA_V4, JAVA_V4, GO))
        self.names_transactions = self.client_version != GO
        self._acknowledged: deque[Taken] = deque(maxlen=LANES)

    async def connect(self, client: SimulatedClient) -> None:
        """To its coordinator, at the broker that a lookup names."""
        await client.find_coordinator(self.coordinator)

    async def _ack(
        self, client: SimulatedClient, work: Work, what: Taken, subscribed: dict[str, None]
    ) -> None:
        """Now and then also what another transaction has acknowledged (L5)."""
        await super()._ack(client, work, what, subscribed)
        again = [each for each in self._acknowledged if each[0] in self.consumers.values()]
        if again and self.rng.random() < CONFLICTS:
            work.asked += 1
            await super()._ack(client, work, self.rng.choice(again), subscribed)
        # Of a batch, an acknowledgement of the whole entry is one of what is left of it.
        if not what[1].metadata.HasField("num_messages_in_batch"):
            self._acknowledged.append(what)

    async def end_at(
        self, client: SimulatedClient, record: Transaction, action: "pb.TxnAction"
    ) -> None:
        """END_TXN; once it is answered, readers must see the end (L3)."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await super().end_at(client, record, action)
        faults = self.world.plan.metadata
        unsure = faults.refused or faults.lost_answer or faults.session_expiry
        assert isinstance(client.transport, SimulatedTransport)
        here = client.transport.peer.host is self.world.running.host
        if here and not unsure and loop.time() - began_s < SOON_S:
            self._require_carried_out(record)

    def _require_carried_out(self, record: Transaction) -> None:
        """No loaded topic may have the transaction as an open one."""
        txn = TxnId(*record.txn)
        for name, topic in self.world.running.broker.topics.loaded().items():
            holders = [
                called
                for called, each in topic.subscriptions.items()
                if each.transactional is not None and each.transactional.pending.core.is_open(txn)
            ]
            members = topic.buffer.open_transactions()
            if any(each.txn == txn and each.state is Membership.JOINED for each in members):
                holders.append("its messages")
            if holders:
                self.world.history.violated(
                    f"not carried out: {record.txn} was answered, and is open on {name}: {holders}"
                )
