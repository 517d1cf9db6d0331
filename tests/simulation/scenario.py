"""Plain-text stories, run in the machinery of the simulation.

A story is a text file: comments (`#`), and blocks of one directive, a line `----`, and what comes
of it.  `python -m tests.simulation.scenario FILE --rewrite` writes what really came.  Directives:

    topic [segments=N] [auto=1] make topic `t` with subscriptions `q` (queue) and `s` (stream);
                                with auto the policy may change its layout
    topic plain=1               make an ordinary topic with these subscriptions instead
    ordinary [partitions=N]     make the topic an ordinary one instead, with the same subscriptions
    migrate [force=1]           make it scalable; "migrated"
    policy MEMBER=VALUE ...     set the topic's policy of automatic changes
    load C SECONDS RATE KEY ... so many messages per second in all, under these keys in turn
    layout                      the numbers of the ACTIVE segments
    changes                     the changes of the layout since the topic was made
    client NAME ...             connect clients
    v4 NAME ...                 connect clients of a version before 5
    later NAME ...              connect clients that can share segments
    begin C T [timeout=MS]      a transaction, called T from then on; under C's epoch, if it has one
    open C                      the transaction key `task`: its epoch, and its last transaction
    connect C                   TC_CLIENT_CONNECT_REQUEST
    find C                      the same, after a LOOKUP of the coordinator
    join C T [seg=N] [topic=NAME]  ADD_PARTITION_TO_TXN
    send C NAME [seg=N] [txn=T] [bucket=N] [bare=1]  one message, of that one of four entry
                                buckets; "receipt", or the error; `bare`: only the SEND names the
                                transaction, not the message
    batch C NAME:BUCKET ...     one batch of messages of several entry buckets, without their hashes
    consume C q|s [failover=1]  attach to all segments, where that is possible
    follow C                    as an ordered consumer of `s` attach to the segments that it is
                                given now: their numbers
    share C                     follow what it is given, as a client that can share: the numbers of
                                its segments; it leaves those that it is not given any more
    receive C                   names that came within a second of virtual time, in order
    ack C NAME [txn=T] [upto=1] of a message that C received, answered; of all up to it
    redeliver C                 C drops what it has, and asks for all that is not acknowledged
    seek C                      its consumers go back to the start, and attach again
    end C T commit|abort        END_TXN
    attempt C N T               BEGIN_ATTEMPT of nonce N under C's epoch: attempt T
    commit C N BATCH T ...      COMMIT_GROUP of these attempts, and of no other
    program C NAME              connect a process of a program, which names its producers
    publish C ID M [seg=N] [key=K]  message M under the program's own sequence id: "stored",
                                "duplicate", or the error
    leave C [seg=N]             it closes its producer on a segment
    disconnect C                its connection breaks
    split N / merge N M / rebucket N COUNT  change the layout
    crash / restart             the broker dies here and now / a new one starts and serves
    brokers many                (first) brokers that may have others beside them
    stale                       a new broker takes the disk; the old one goes on, and can write to
                                the metadata only; its clients stay with it
    expire                      the sessions of this broker with the metadata service are lost
    bury                        the broker that was replaced dies; its requests on hold still arrive
    hold KIND PART              requests of this broker of KIND (put, get, delete, scan) whose key
                                has PART wait, until they are released; so do events (watch)
    release [PART]              those with that PART in their key, or all, arrive now
    slow SECONDS                every sync of the disk takes so long (0: as usual)
    start X: DIRECTIVE          begin it and go on; `finish X` waits and says what came of it
    wait SECONDS                virtual time passes
    keys PART                   keys of records with PART in them
    backlog                     of each subscription of each loaded segment

`{T}` in PART is the id of a transaction.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from broker.scalable.history import ChangeKind
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import to_wire
from magnetar.protocol.managed_clients import MANAGED_PROPERTY
from magnetar.protocol.names import TopicDomain, parse_topic_name
from magnetar.protocol.server_error import MagnetarError
from tests.simulation.actors import QUEUE, STREAM, Layout, Sender, segment_topic
from tests.simulation.bucket_producers import UnstampedProducer
from tests.simulation.client import GONE, JAVA_V4, SimulatedClient, payload_for
from tests.simulation.history import KeyOpened, Message, Transaction, Txn
from tests.simulation.injection import ASSERTING, Parts
from tests.simulation.key_worker import COORDINATOR, KEY
from tests.simulation.plan import Plan
from tests.simulation.programs import LATER_CLIENT, Program
from tests.simulation.world import World
from tests.support.raw_client import BrokerError, Delivery, RawConsumer, Session

T = TypeVar("T")

STORIES = Path(__file__).parent / "scenarios"
ANSWER_S = 60.0
PATIENCE_S = 3600.0
CHECKER = "(the checker)"
WRITTEN_SEED = 1
"""With which stories are written."""
_BUCKET = "bucket-"
"""The beginning of the keys of messages of a bucket."""
_HASHES_OF_A_BUCKET = 0x10000 // 4
_UNFINISHED = ("lost", "stuck")
"""What a story need not bring to its end."""


@dataclass
class Block:
    """One directive of a story."""

    comment: str
    directive: str
    expected: str


class NotBegun(Exception):
    """A story speaks of a transaction whose beginning failed, as with a broken rule it may."""


class _Begun(dict[str, Txn]):
    def __missing__(self, called: str) -> Txn:
        raise NotBegun(called)


def parse(text: str) -> list[Block]:
    blocks = []
    for piece in text.strip().split("\n\n"):
        lines = piece.strip().splitlines()
        comment = [line for line in lines if line.startswith("#")]
        rest = [line for line in lines if not line.startswith("#")]
        directive, _, expected = "\n".join(rest).partition("\n----")
        blocks.append(Block("\n".join(comment), directive.strip(), expected.strip()))
    return blocks


class _StorySender(UnstampedProducer):
    """Stamps a single message with the first hash of its entry bucket, if its key names one.

    A `managed` one tells ordinary topics that it is of a v5 client, which would follow them.
    """

    managed = False

    def options(self) -> pb.CommandProducer:
        options = super().options()
        if self.managed:
            options.metadata.add(key=MANAGED_PROPERTY, value="true")
        return options

    def _content(
        self, messages: Sequence[Message]
    ) -> tuple[pb.MessageMetadata, pb.CommandSend, bytes]:
        metadata, send, payload = super()._content(messages)
        bucket = messages[0].key.removeprefix(_BUCKET)
        if len(messages) == 1 and bucket.isdigit():
            metadata.entry_hash_min = metadata.entry_hash_max = int(bucket) * _HASHES_OF_A_BUCKET
        return metadata, send, payload


class Story(World):
    """A world in which nothing happens but what the story says."""

    def __init__(self, blocks: list[Block], parts: Parts, seed: int, *, shared: bool) -> None:
        programs = sum(block.directive.startswith("program ") for block in blocks)
        plain = int(any("plain=1" in block.directive.split() for block in blocks))
        auto = any("auto=1" in block.directive.split() for block in blocks)
        migrated = any(block.directive.startswith("ordinary") for block in blocks)
        plan = Plan(
            topics=1 - plain,
            plain_topics=plain,
            restarted_programs=programs,
            auto_scale=auto,
            migrated=migrated,
        )
        super().__init__(seed, plan, parts, shared=shared)
        (self.topic,) = self.topics + self.plain_topics
        self.blocks = blocks
        self.found: list[str] = []
        self.clients: dict[str, SimulatedClient] = {}
        self.senders: dict[str, Sender] = {}
        self.consumers: dict[str, list[RawConsumer]] = {}
        self.received: dict[tuple[str, str], tuple[RawConsumer, Delivery]] = {}
        self.txns: dict[str, Txn] = _Begun()
        self.epochs: dict[str, int] = {}
        self._groups: dict[str, Txn] = {}
        self._begun: dict[str, asyncio.Task[str]] = {}
        self._redeliveries: dict[str, int] = {}
        self._given: dict[str, tuple[Session, pb.ScalableConsumerAssignment]] = {}
        self._later_clients: set[str] = set()
        self._modes: dict[tuple[str, str], list[pb.IntRange]] = {}
        """By client and segment: the entry buckets of a shared segment, none of another one."""

    async def _main(self) -> None:
        self.start_broker()
        await self._until_up()
        for block in self.blocks:
            self.history.note("story", block.directive)
            self.found.append(await self._do(block.directive) if block.directive else "")

    async def _do(self, directive: str, limit: float | None = ANSWER_S) -> str:
        if directive.startswith("start "):
            name, _, rest = directive.removeprefix("start ").partition(": ")
            self._begun[name] = asyncio.create_task(self._do(rest, None))
            await asyncio.sleep(0.5)
            return ""
        words = directive.split()
        plain = [word for word in words[1:] if "=" not in word]
        given = dict(word.split("=", 1) for word in words[1:] if "=" in word)
        work: Callable[..., Awaitable[str]] = getattr(self, f"_{words[0]}")
        try:
            limit = None if words[0] in ("wait", "finish") else limit
            return await asyncio.wait_for(work(*plain, **given), limit)
        except BrokerError as error:
            return pb.ServerError.Name(error.code)
        except (MagnetarError, NotBegun) as error:
            return type(error).__name__
        except TimeoutError:
            return "no answer"
        except GONE:
            return "connection lost"

    # Directives

    async def _topic(self, segments: str = "1", auto: str = "", plain: str = "") -> str:
        if plain:
            await self._plain(self.topic, [QUEUE, STREAM])
            return ""
        scalable, host = self.running.broker.scalable, self.running.host
        name = parse_topic_name(self.topic)
        await self.loop.spawn(host, scalable.create(name, segments=int(segments), properties={}))
        await self._subscriptions(name)
        return ""

    async def _ordinary(self, partitions: str = "0") -> str:  # type: ignore[override]
        name = parse_topic_name(self.topic).in_domain(TopicDomain.PERSISTENT)
        await self._partitioned(name, int(partitions))
        return ""

    async def _migrate(self, force: str = "") -> str:  # type: ignore[override]
        work = self.running.broker.scalable.migrate(parse_topic_name(self.topic), force=bool(force))
        await self.loop.spawn(self.running.host, work)
        return "migrated"

    async def _policy(self, **members: str) -> str:
        override = {name: json.loads(value) for name, value in members.items()}
        work = self.running.broker.scalable.set_auto_scale_policy(
            parse_topic_name(self.topic), override
        )
        await self.loop.spawn(self.running.host, work)
        return ""

    async def _load(self, client: str, seconds: str, rate: str, *keys: str) -> str:
        work = self._send_evenly(client, float(seconds), float(rate), keys)
        refusals = await self._on(client, work)
        return ", ".join(sorted(set(refusals))) or "receipts"

    async def _send_evenly(
        self, client: str, seconds: float, rate: float, keys: Sequence[str]
    ) -> list[str]:
        sender, raw = self.senders[client], self.clients[client]
        outcomes = []
        for number in range(round(seconds * rate)):
            count = self._next_number(client)
            name, key = f"{client}-{count}", keys[number % len(keys)]
            message = Message(name, self.topic, key, client, count, awaited=False)
            producer = await sender.producer_for(raw, message)
            outcomes.append(sender.begin_send(producer, message))
            await asyncio.sleep(1 / rate)
        return [refusal for each in outcomes if (refusal := await raw.wait(each))]

    async def _layout(self) -> str:
        work = self.running.broker.scalable.get(parse_topic_name(self.topic))
        record = await self.loop.spawn(self.running.host, work)
        return " ".join(str(each.segment_id) for each in record.layout.active)

    async def _changes(self) -> str:
        work = self.running.broker.scalable.history(parse_topic_name(self.topic))
        entries = await self.loop.spawn(self.running.host, work)
        return "\n".join(
            f"{each.kind.value} {_numbers(each.parents)} -> {_numbers(each.children)}"
            for each in entries
            if each.kind not in (ChangeKind.CREATE, ChangeKind.PRUNE, ChangeKind.REFUSAL)
        )

    async def _client(self, *names: str) -> str:
        return await self._connect_all(names, "")

    async def _later(self, *names: str) -> str:
        self._later_clients.update(names)
        return await self._connect_all(names, LATER_CLIENT)

    async def _v4(self, *names: str) -> str:
        return await self._connect_all(names, JAVA_V4)

    async def _connect(self, client: str) -> str:
        await self._on(client, self.clients[client].connect_coordinator())
        return "connected"

    async def _find(self, client: str) -> str:
        await self._on(client, self.clients[client].find_coordinator())
        return "connected"

    async def _connect_all(self, names: Iterable[str], version: str) -> str:
        for name in names:
            sender = _StorySender(self, name, self.loop.new_host(name), self.rng, [self.topic])
            sender.managed = name in self._later_clients
            work = SimulatedClient.of(self.history, name, self.port, PATIENCE_S, version)
            self._given.pop(name, None)
            self.consumers.pop(name, None)
            self.received = {key: of for key, of in self.received.items() if key[0] != name}
            before = self.clients.get(name)
            self.clients[name] = await self.loop.spawn(sender.host, work)
            if before is not None:
                self.clients[name].keys = before.keys
            await self.loop.spawn(sender.host, sender.open(self.clients[name]))
            self.senders[name] = sender
        return ""

    async def _begin(self, client: str, called: str, timeout: str = "60000") -> str:
        key = (KEY, self.epochs[client]) if client in self.epochs else None
        coordinator = 0 if key is None else COORDINATOR
        work = self.clients[client].begin(int(timeout), coordinator, key, called)
        txn = await self._on(client, work)
        self.txns[called] = txn
        self.history.transactions[txn] = Transaction(txn, self.loop.time(), int(timeout), key)
        return f"{txn[0]}_{txn[1]}"

    async def _open(self, client: str) -> str:
        work = self.clients[client].open_key(COORDINATOR, KEY, -1, client)
        answer = await self._on(client, work)
        self.epochs[client] = answer.epoch
        last, ended = None, None
        if answer.HasField("last_txnid_least_bits"):
            last = (answer.last_txnid_most_bits, answer.last_txnid_least_bits)
            ended = answer.last_committed if answer.HasField("last_committed") else None
        now = self.loop.time()
        self.history.key_opened(KeyOpened(KEY, answer.epoch, client, now, last, ended))
        if last is None:
            return f"epoch {answer.epoch}, nothing before it"
        called = next((name for name, txn in self.txns.items() if txn == last), str(last))
        told = {True: "committed", False: "aborted", None: "unknown"}[ended]
        return f"epoch {answer.epoch}, {called} {told}"

    async def _join(self, client: str, called: str, seg: str = "0", topic: str = "") -> str:
        segment = topic or await self._segment(client, int(seg))
        await self._on(client, self.clients[client].add_partition(self.txns[called], [segment]))
        return "joined"

    async def _send(
        self,
        client: str,
        name: str,
        seg: str = "0",
        txn: str = "",
        bucket: str = "",
        bare: str = "",
    ) -> str:
        self.senders[client].names_transactions = not bare
        key = f"{_BUCKET}{bucket}" if bucket else "k"
        known = self.txns[txn] if txn else None
        message = Message(name, self.topic, key, client, self._next_number(client), True, known)
        return await self._on(client, self._send_all(client, [message], int(seg)))

    async def _batch(self, client: str, *names: str, seg: str = "0") -> str:
        messages = []
        for each in names:
            name, _, bucket = each.partition(":")
            key, number = f"{_BUCKET}{bucket}", self._next_number(client)
            messages.append(Message(name, self.topic, key, client, number, True))
        return await self._on(client, self._send_all(client, messages, int(seg)))

    def _next_number(self, client: str) -> int:
        self.senders[client].sent += 1
        return self.senders[client].sent

    async def _send_all(self, client: str, messages: list[Message], seg: int) -> str:
        sender, raw = self.senders[client], self.clients[client]
        producer = await sender.producer_on(raw, await self._segment(client, seg))
        refusal = await raw.wait(sender.begin_send(producer, *messages))
        return refusal.partition(":")[0] if refusal else "receipt"

    async def _program(self, client: str, name: str) -> str:
        program = Program(self, name, self.loop.new_host(client), self.rng, [self.topic])
        work = SimulatedClient.of(
            self.history, client, self.port, PATIENCE_S, version=program.client_version
        )
        raw = self.clients[client] = await self.loop.spawn(program.host, work)
        raw.count_from(len(self.clients) * 2**50)
        await self.loop.spawn(program.host, program.open(raw))
        self.senders[client] = program
        return ""

    async def _publish(
        self, client: str, number: str, name: str, seg: str = "0", key: str = "k"
    ) -> str:
        return await self._on(client, self._publish_one(client, int(number), name, int(seg), key))

    async def _publish_one(self, client: str, number: int, name: str, seg: int, key: str) -> str:
        program, raw = self.senders[client], self.clients[client]
        assert isinstance(program, Program)
        producer = await program.attach(raw, await self._segment(client, seg))
        message = self.history.messages.get(name)
        if message is None:
            message = Message(name, self.topic, key, program.name, number, True, once=True)
        frame = producer.frame(
            payload_for(name, 0), metadata=pb.MessageMetadata(partition_key=key), sequence_id=number
        )
        self.history.sending(message)
        answered: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        producer.send_frame(*frame, answered.set_result)
        receipt = await raw.wait(answered)
        if not isinstance(receipt, pb.CommandSendReceipt):
            return str(receipt).partition(":")[0]
        place = (receipt.message_id.ledger_id, receipt.message_id.entry_id)
        self.history.receipt(message, producer.segment, place)  # type: ignore[attr-defined]
        return "duplicate" if place[0] == to_wire(-1) else "stored"

    async def _leave(self, client: str, seg: str = "0") -> str:
        segment = await self._segment(client, int(seg))
        producer = self.senders[client].producers.pop(segment, None)
        if producer is None:
            return "no producer"
        await self._on(client, producer.close())
        return ""

    async def _consume(self, client: str, subscription: str, failover: str = "") -> str:
        kind = pb.CommandSubscribe.Failover if failover else pb.CommandSubscribe.Exclusive
        if subscription == QUEUE:
            kind = pb.CommandSubscribe.Shared
        raw = self.clients[client]
        attached = self.consumers.setdefault(client, [])
        layout = await self._layout_of(client)
        count = 1 if layout.session is None else len(layout.dag.segments)
        for number in range(count):
            segment = await self._segment(client, number)
            work = raw.attach(segment, subscription, kind, f"{client}-seg-{number}", 100)
            attached.append(await self._on(client, work))
        return ""

    async def _follow(self, client: str) -> str:
        given = await self._newest_assignment(client)
        attached = self.consumers.setdefault(client, [])
        of = {self._segment_of(client, each) for each in attached}
        for each in given.segments:
            if each.segment_topic not in of:
                attached.append(await self._attach_to(client, each))
        return _listed(given)

    async def _share(self, client: str) -> str:
        attached = self.consumers.setdefault(client, [])
        while True:
            given = await self._newest_assignment(client)
            modes = {each.segment_topic: list(each.bucket_ranges) for each in given.segments}
            for each in list(attached):
                segment = self._segment_of(client, each)
                if modes.get(segment) != self._modes[client, segment]:
                    attached.remove(each)
                    await self._on(client, each.close())
            of = {self._segment_of(client, each) for each in attached}
            for assigned in given.segments:
                if assigned.segment_topic not in of:
                    self._modes[client, assigned.segment_topic] = list(assigned.bucket_ranges)
                    attached.append(await self._attach_to(client, assigned))
            await asyncio.sleep(0.5)
            if self._given[client][0].updates.empty():
                return _listed(given)

    async def _newest_assignment(self, client: str) -> pb.ScalableConsumerAssignment:
        if client not in self._given:
            work = self.clients[client].subscribe_scalable(self.topic, STREAM, client)
            self._given[client] = await self._on(client, work)
        session, given = self._given[client]
        while not session.updates.empty():
            given = session.updates.get_nowait().scalable_topic_assignment_update.assignment
        self._given[client] = session, given
        return given

    def _segment_of(self, client: str, consumer: RawConsumer) -> str:
        return self.clients[client].subscriptions[consumer.consumer_id][1]

    async def _attach_to(self, client: str, assigned: pb.ScalableAssignedSegment) -> RawConsumer:
        name, kind = f"{client}-seg-{assigned.segment_id}", pb.CommandSubscribe.Exclusive
        buckets = assigned.bucket_ranges if client in self._later_clients else ()
        if buckets:
            kind = pb.CommandSubscribe.Key_Shared
        attach = self.clients[client].attach(
            assigned.segment_topic, STREAM, kind, name, 100, buckets=buckets
        )
        return await self._on(client, attach)

    async def _receive(self, client: str) -> str:
        await asyncio.sleep(1)
        names = []
        for consumer in self.consumers[client]:
            while not consumer.messages.empty():
                delivery = consumer.messages.get_nowait()
                if delivery.command.consumer_epoch < self._redeliveries.get(client, 0):
                    continue  # sent before the broker heard of it
                for seen in self.clients[client].seen(consumer, delivery):
                    self.received[client, seen.message] = (consumer, delivery)
                    names.append(seen.message)
        return " ".join(names) or "nothing"

    async def _ack(self, client: str, name: str, txn: str = "", upto: str = "") -> str:
        if (client, name) not in self.received:
            return "not received"
        return await self._on(client, self._ack_one(client, name, txn, cumulative=bool(upto)))

    async def _ack_one(self, client: str, name: str, txn: str, *, cumulative: bool) -> str:
        raw = self.clients[client]
        consumer, delivery = self.received[client, name]
        named = raw.seen(consumer, delivery)
        seen = named[-1]
        if cumulative:
            of_client = [found for (whose, _), found in self.received.items() if whose == client]
            had = [each for found in of_client for each in raw.seen(*found)]
            named = [
                each
                for each in had
                if each.segment == seen.segment and each.position <= seen.position
            ]
        acks = [self.history.acking(each, self.txns[txn] if txn else None) for each in named]
        if txn:
            await raw.add_subscription(self.txns[txn], seen.segment, seen.subscription)
            await raw.transactional_ack(
                consumer, [delivery.message_id], self.txns[txn], cumulative=cumulative
            )
        else:
            await consumer.ack_answered(delivery.message_id, cumulative=cumulative)
        for ack in acks:
            self.history.ack_answered(ack, None)
        return "durable"

    async def _redeliver(self, client: str) -> str:
        self._redeliveries[client] = epoch = self._redeliveries.get(client, 0) + 1
        self.received = {of: found for of, found in self.received.items() if of[0] != client}
        for consumer in self.consumers[client]:
            consumer.redeliver(epoch=epoch)
        return ""

    async def _seek(self, client: str) -> str:
        start = pb.MessageIdData(ledger_id=to_wire(-1), entry_id=to_wire(-1))
        raw = self.clients[client]
        of = ""
        for consumer in self.consumers.pop(client):
            of, segment = raw.subscriptions[consumer.consumer_id]
            sought = self.history.seeking(client, of, segment, (-1, -1))
            await self._on(client, consumer.seek(start))
            self.history.seek_answered(client, sought)
        return await self._consume(client, of)

    async def _end(self, client: str, called: str, action: str) -> str:
        record = self.history.transactions[self.txns[called]]
        which = pb.COMMIT if action == "commit" else pb.ABORT
        await self._on(client, self.clients[client].end(record.txn, which))
        record.answers.append(("COMMITTED" if action == "commit" else "ABORTED", ""))
        return "committed" if action == "commit" else "aborted"

    async def _attempt(self, client: str, nonce: str, called: str) -> str:
        key = (KEY, self.epochs[client])
        work = self.clients[client].begin_attempt(COORDINATOR, key, nonce, 60_000)
        begun = await self._on(client, work)
        if begun is None:
            return "done"
        self.txns[called], group = begun
        self._groups[called] = group
        now_s = self.loop.time()
        record = Transaction(group, now_s, 60_000, key)
        self.history.transactions.setdefault(group, record)
        return f"{self.txns[called][0]}_{self.txns[called][1]}"

    async def _commit(self, client: str, nonce: str, batch: str, *called: str) -> str:
        key, number = (KEY, self.epochs[client]), ("query", int(batch))
        winners = [self.txns[each] for each in called]
        group = self._groups[called[0]]
        work = self.clients[client].commit_group(key, nonce, group, number, winners)
        answer = await self._on(client, work)
        self.history.batch_done(client, number)
        return "done" if answer.done else "committed"

    async def _disconnect(self, client: str) -> str:
        self.clients[client].drop()
        return ""

    async def _split(self, number: str) -> str:
        work = self.running.broker.scalable.split(parse_topic_name(self.topic), int(number))
        await self.loop.spawn(self.running.host, work)
        return ""

    async def _merge(self, first: str, second: str) -> str:
        name = parse_topic_name(self.topic)
        work = self.running.broker.scalable.merge(name, (int(first), int(second)))
        await self.loop.spawn(self.running.host, work)
        return ""

    async def _rebucket(self, number: str, count: str) -> str:
        name = parse_topic_name(self.topic)
        work = self.running.broker.scalable.rebucket(name, [int(number)], int(count))
        await self.loop.spawn(self.running.host, work)
        return ""

    async def _crash(self) -> str:
        self.restarts = False
        self.crash(self.running)
        return ""

    async def _brokers(self, many: str) -> str:
        return ""

    async def _stale(self) -> str:
        self.take_over()
        await self._until_up()
        return ""

    async def _bury(self) -> str:
        self.metadata.faults.late = True
        self.crash(self.replaced[-1])
        return ""

    async def _restart(self) -> str:
        self.start_broker()
        await self._until_up()
        return ""

    async def _expire(self) -> str:
        self.running.metadata.expire_sessions()
        return ""

    async def _hold(self, kind: str, part: str) -> str:
        self.metadata.holds.append((self.running.metadata, kind, self._named(part)))
        return ""

    async def _release(self, part: str = "") -> str:
        self.metadata.release(self._named(part))
        await asyncio.sleep(0.5)
        return ""

    async def _slow(self, seconds: str) -> str:
        longest = float(seconds)
        self.disk_faults.sync = (longest, longest) if longest else (0.0003, 0.004)
        return ""

    async def _finish(self, name: str) -> str:
        return await self._begun.pop(name)

    async def _wait(self, seconds: str) -> str:
        await asyncio.sleep(float(seconds))
        return ""

    async def _keys(self, part: str) -> str:
        wanted = self._named(part)
        keys = sorted(self.metadata.store._tables._records)
        return "\n".join(key for key in keys if wanted in key) or "none"

    async def _backlog(self) -> str:
        return "\n".join(self._backlogs()) or "none"

    # Within

    async def _on(self, client: str, work: Coroutine[Any, Any, T]) -> T:
        """On the host of a client."""
        return await self.loop.spawn(self.senders[client].host, work)

    async def _layout_of(self, client: str) -> Layout:
        layout = self.senders[client].layouts[self.topic]
        layout.refresh()
        return layout

    async def _segment(self, client: str, number: int) -> str:
        layout = await self._layout_of(client)
        if layout.session is None:
            return self.topic
        for segment in layout.dag.segments:
            if segment.segment_id == number:
                return segment_topic(self.topic, segment)
        raise ConnectionError(f"no segment {number}")

    def _named(self, part: str) -> str:
        for called, (most, least) in self.txns.items():
            part = part.replace("{" + called + "}", f"{most}_{least}")
        return part


def _numbers(segment_ids: Iterable[int]) -> str:
    return ",".join(str(each) for each in segment_ids)


def _listed(given: pb.ScalableConsumerAssignment) -> str:
    """The segments that a consumer is given, in words."""
    shared = {True: " shared", False: ""}
    found = [f"{each.segment_id}{shared[bool(each.bucket_ranges)]}" for each in given.segments]
    return ", ".join(found) if any(" " in each for each in found) else " ".join(found) or "none"


def run(
    path: Path, parts: Parts = ASSERTING, seed: int = WRITTEN_SEED
) -> Iterator[tuple[Block, str]]:
    """Each block with what came of it; the last one is what the checker says.

    `seed`: of delays and of who goes first, which the story leaves open.
    """
    blocks = parse(path.read_text("utf-8"))
    shared = any(block.directive == "brokers many" for block in blocks)
    story = Story(blocks, parts, seed, shared=shared)
    outcome = story.run()
    yield from zip(blocks, story.found, strict=False)
    wrong = [each for each in outcome.violations if not each.startswith(_UNFINISHED)]
    yield Block("", CHECKER, ""), "\n".join(wrong)


def rewrite(path: Path) -> None:
    """Put what really comes into the story."""
    pieces = []
    for block, found in run(path):
        if block.directive == CHECKER:
            if found:
                sys.stderr.write(f"{found}\n")
            continue
        lines = [line for line in (block.comment, block.directive) if line]
        if block.directive:
            lines.append("----")
        lines += [found] if found else []
        pieces.append("\n".join(lines))
    path.write_text("\n\n".join(pieces) + "\n", "utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        if name != "--rewrite":
            rewrite(Path(name))
