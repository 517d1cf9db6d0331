"""The commands of a client that has a transaction key, on one bare connection."""

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.key_hash import coordinator_of_key
from tests.support.raw_client import RawClient

Kind = pb.BaseCommand
Txn = tuple[int, int]
COORDINATORS = 16


class KeyClient:
    """One that opens a key, or attaches to it, and works under the epoch that it got."""

    def __init__(self, raw: RawClient, key: str, epoch: int = -1) -> None:
        self.raw = raw
        self.key = key
        self.epoch = epoch
        self.coordinator = coordinator_of_key(key, COORDINATORS)

    async def open(
        self, presented: int = -1, opener: str = "", tc: int | None = None
    ) -> pb.CommandOpenTransactionKeyResponse:
        """OPEN_TRANSACTION_KEY; `tc`: of another coordinator than the key's."""
        answer = await self.raw.request(
            Kind.OPEN_TRANSACTION_KEY,
            pb.CommandOpenTransactionKey(
                tc_id=self.coordinator if tc is None else tc,
                key=self.key,
                epoch=presented,
                opener=opener,
            ),
        )
        self.epoch = answer.open_transaction_key_response.epoch
        return answer.open_transaction_key_response

    async def attach(self, epoch: int) -> None:
        """ATTACH_TRANSACTION_KEY."""
        await self.raw.request(
            Kind.ATTACH_TRANSACTION_KEY,
            pb.CommandAttachTransactionKey(tc_id=self.coordinator, key=self.key, epoch=epoch),
        )
        self.epoch = epoch

    async def begin(self, beginner: str = "", ttl_ms: int = 60_000) -> Txn:
        """NEW_TXN under the key."""
        answer = await self.raw.request(
            Kind.NEW_TXN,
            pb.CommandNewTxn(
                tc_id=self.coordinator,
                txn_ttl_millis=ttl_ms,
                scalable=True,
                transaction_key=self.key,
                transaction_key_epoch=self.epoch,
                transaction_key_beginner=beginner,
            ),
        )
        return answer.new_txn_response.txnid_most_bits, answer.new_txn_response.txnid_least_bits

    async def add(self, txn: Txn, topic: str) -> None:
        """ADD_PARTITION_TO_TXN under the key."""
        await self.raw.request(
            Kind.ADD_PARTITION_TO_TXN,
            pb.CommandAddPartitionToTxn(
                txnid_most_bits=txn[0],
                txnid_least_bits=txn[1],
                partitions=[topic],
                scalable=True,
                transaction_key=self.key,
                transaction_key_epoch=self.epoch,
            ),
        )

    async def add_subscription(self, txn: Txn, topic: str, subscription: str) -> None:
        """ADD_SUBSCRIPTION_TO_TXN under the key."""
        await self.raw.request(
            Kind.ADD_SUBSCRIPTION_TO_TXN,
            pb.CommandAddSubscriptionToTxn(
                txnid_most_bits=txn[0],
                txnid_least_bits=txn[1],
                subscription=[pb.Subscription(topic=topic, subscription=subscription)],
                scalable=True,
                transaction_key=self.key,
                transaction_key_epoch=self.epoch,
            ),
        )

    async def send(self, txn: Txn, topic: str, payload: bytes) -> None:
        """One message in the transaction, receipted."""
        producer = await self.raw.create_producer(topic)
        await producer.send(
            payload,
            send=pb.CommandSend(txnid_most_bits=txn[0], txnid_least_bits=txn[1]),
            metadata=pb.MessageMetadata(txnid_most_bits=txn[0], txnid_least_bits=txn[1]),
        )

    async def end(self, txn: Txn, action: "pb.TxnAction" = pb.COMMIT) -> None:
        """END_TXN under the key."""
        await self.raw.request(
            Kind.END_TXN,
            pb.CommandEndTxn(
                txnid_most_bits=txn[0],
                txnid_least_bits=txn[1],
                txn_action=action,
                scalable=True,
                transaction_key=self.key,
                transaction_key_epoch=self.epoch,
            ),
        )
