"""Connections that answer as a test says, in place of a broker's."""

import asyncio
from typing import cast

from magnetar.context import ClientContext
from magnetar.errors import ConnectionLost, MagnetarError
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import Frame
from magnetar.settings import ClientSettings
from magnetar.wire.connection import Handler, PeerKind
from magnetar.wire.pool import ConnectionPool

K = pb.BaseCommand


class FakeConnection:
    """One that notes what it is asked."""

    def __init__(self, broker: "FakeBroker", url: str) -> None:
        self.broker = broker
        self.address = url
        self.is_lost = False
        self.features = broker.features
        self.transaction_keys = broker.transaction_keys
        self.transaction_groups = broker.transaction_groups
        self.handlers: dict[tuple[PeerKind, int], Handler] = {}

    def attach(self, kind: PeerKind, number: int, handler: Handler) -> None:
        self.handlers[kind, number] = handler

    def detach_all(self, handler: Handler) -> None:
        self.handlers = {key: each for key, each in self.handlers.items() if each is not handler}

    def send(self, command: pb.BaseCommand) -> None:
        if command.type == K.WATCH_TC_ASSIGNMENTS:
            number = command.watch_tc_assignments.watch_id
            self.broker.watches.append((self, number))
            asyncio.get_running_loop().call_soon(self.broker.tell, self, number)

    async def request(self, command: pb.BaseCommand) -> pb.BaseCommand:
        await asyncio.sleep(0)
        if self.is_lost:
            raise ConnectionLost("lost.")
        self.broker.asked.append((self.address, K.Type.Name(command.type), command))
        if (gate := self.broker.gates.get(command.type)) is not None:
            await gate.wait()
        answers = self.broker.answers.get(command.type)
        answer = answers.pop(0) if answers else self.broker.usual(command)
        if isinstance(answer, MagnetarError):
            raise answer
        return answer

    def lose(self) -> None:
        self.is_lost = True
        handlers, self.handlers = self.handlers, {}
        for handler in dict.fromkeys(handlers.values()):
            handler.connection_lost(ConnectionLost("lost."))


class FakeBroker:
    """Where everything is asked; the pool, too."""

    tls = False

    def __init__(self) -> None:
        self.features = pb.FeatureFlags(supports_tc_metadata_discovery=True)
        self.transaction_keys = True
        self.transaction_groups = True
        self.urls = {0: "pulsar://zero", 1: "pulsar://one"}
        self.asked: list[tuple[str, str, pb.BaseCommand]] = []
        self.answers: dict[int, list[pb.BaseCommand | MagnetarError]] = {}
        self.gates: dict[int, asyncio.Event] = {}
        """What is answered only when it is let."""
        self.watches: list[tuple[FakeConnection, int]] = []
        self.connections: dict[str, FakeConnection] = {}
        self.begun = 0
        self.timeout_s = 5.0
        """Of operations."""

    @property
    def context(self) -> ClientContext:
        return ClientContext(
            cast("ConnectionPool", self), ClientSettings(operation_timeout_s=self.timeout_s)
        )

    async def any(self) -> FakeConnection:
        return await self.at("pulsar://any")

    async def at(self, url: str) -> FakeConnection:
        known = self.connections.get(url)
        if known is None or known.is_lost:
            known = self.connections[url] = FakeConnection(self, url)
        return known

    def names(self) -> list[str]:
        return [name for _, name, _ in self.asked]

    def tell(self, connection: FakeConnection, number: int) -> None:
        snapshot = pb.TcAssignmentsSnapshot(parallelism=2)
        for tc_id, url in self.urls.items():
            snapshot.assignments.add(tc_id=tc_id, broker_service_url=url)
        update = pb.CommandWatchTcAssignmentsUpdate(watch_id=number, snapshot=snapshot)
        command = pb.BaseCommand(
            type=K.WATCH_TC_ASSIGNMENTS_UPDATE, watch_tc_assignments_update=update
        )
        connection.handlers[PeerKind.COORDINATORS, number].received(Frame(command))

    def tell_all(self) -> None:
        for connection, number in self.watches:
            if not connection.is_lost:
                self.tell(connection, number)

    def usual(self, command: pb.BaseCommand) -> pb.BaseCommand:
        kind = command.type
        if kind == K.NEW_TXN:
            self.begun += 1
            told = pb.CommandNewTxnResponse(
                request_id=0, txnid_most_bits=command.new_txn.tc_id, txnid_least_bits=self.begun
            )
            return pb.BaseCommand(type=K.NEW_TXN_RESPONSE, new_txn_response=told)
        if kind == K.OPEN_TRANSACTION_KEY:
            opened = pb.CommandOpenTransactionKeyResponse(request_id=0, epoch=4)
            return pb.BaseCommand(
                type=K.OPEN_TRANSACTION_KEY_RESPONSE, open_transaction_key_response=opened
            )
        return pb.BaseCommand(type=K.SUCCESS, success=pb.CommandSuccess(request_id=0))
