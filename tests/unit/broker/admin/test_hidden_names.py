"""No answer says whether a name exists to a role without rights there, and nothing is made of it.

Each command and each path is asked twice: with names that exist, and with one of them replaced by
an absent name of the same length.  The answers are the same bytes, but for the name.
"""

import asyncio
import itertools
import re
import sqlite3
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Final

import aiohttp
import pytest
from google.protobuf.message import Message
from yarl import URL

from broker.admin.access import rules
from broker.app.service import Broker
from broker.wire.handlers.access import RULES
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.commands import FIELD_OF_TYPE, encode_command
from magnetar.protocol.names import parse_topic_name
from security.access import Need
from storage.data_directory import metadata_path
from tests.support.embedded_broker import running
from tests.support.example_commands import complete_command
from tests.support.raw_client import BrokerError, RawClient
from tests.support.raw_handles import basecommand
from tests.support.roles import TOKENS, bearer, connect_as, token_of
from tests.unit.broker.admin.conftest import Rest, asking_broker

Kind = pb.BaseCommand
PARTS: Final[Mapping[str, tuple[str, str]]] = {
    "tenant": ("tnt-a", "tnt-b"),
    "namespace": ("nsp-a", "nsp-b"),
    "topic": ("top-a", "top-b"),
    "subscription": ("sub-a", "sub-b"),
    "role": ("granted-a", "granted-b"),
    "descriptor": ("0000-ffff-0", "0000-ffff-7"),
    "segment": ("0", "7"),
    "first": ("0", "7"),
    "version": ("0", "7"),
    "domain": ("persistent", "persistent"),
    "cluster": ("standalone", "standalonf"),
}
"""For parts of paths a name that exists, and one that does not."""
TOPICS: Final = (
    "persistent://tnt-a/nsp-a/top-a",
    "persistent://tnt-a/nsp-a/par-a",
    "persistent://tnt-a/nsp-a/par-a-partition-1",
    "topic://tnt-a/nsp-a/big-a",
    "segment://tnt-a/nsp-a/big-a/0000-ffff-0",
    "persistent://tnt-a/nsp-a/__change_events-a",
    "persistent://pulsar/system/sys-a",
    "non-persistent://tnt-a/nsp-a/top-a",
)
"""Topics that exist: ordinary and partitioned ones, scalable ones, the system's, and a twin."""
OTHER_TOPICS: Final = (
    ("par-a", "par-b"),
    ("par-a-partition-1", "par-b-partition-1"),
    ("par-a-partition-1", "par-a-partition-7"),
    ("__change_events-a", "__change_events-b"),
)
"""Pairs of topics that are partitioned, or the system's."""
NAMES: Final = re.compile(r"(tnt|nsp|top|sub|par|big|sys|granted|events)-[ab]")
"""Names of this test, in answers."""
_PING: Final = basecommand(Kind.PING, pb.CommandPing())
_PONG: Final = basecommand(Kind.PONG, pb.CommandPong())
STRANGERS: Final[Mapping[str, str]] = {"other": "", "neighbour": "topic", "rival-admin": "tenant"}
"""A role without grants, one with grants on another topic, and an admin of another tenant.

The latter two with the names that may be another thing to them: the others would take long.
"""


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    settings = {**TOKENS, "authorization": "on", "superuser_roles": ("root",)}
    async with running(tmp_path, **settings) as broker:
        yield broker


@pytest.fixture
async def rest(broker: Broker) -> AsyncIterator[Rest]:
    """A broker with the first name of each pair, and no topic loaded."""
    async with asking_broker(broker) as rest:
        rest.role = "root"
        for tenant in ("tnt-a", "rival"):
            admins = {"adminRoles": [f"{tenant}-admin"], "allowedClusters": ["standalone"]}
            await rest.done("PUT", f"/admin/v2/tenants/{tenant}", admins)
        await rest.done("PUT", "/admin/v2/namespaces/tnt-a/nsp-a")
        await rest.done(
            "POST", "/admin/v2/namespaces/tnt-a/nsp-a/permissions/granted-a", ["consume"]
        )
        topics = "/admin/v2/persistent/tnt-a/nsp-a"
        await rest.done("PUT", f"{topics}/mine")
        await rest.done("POST", f"{topics}/mine/permissions/neighbour", ["produce", "consume"])
        await rest.done("PUT", f"{topics}/par-a/partitions", 2)
        await rest.done("PUT", "/admin/v2/scalable/tnt-a/nsp-a/big-a")
        await rest.call("PUT", "/admin/v2/tenants/pulsar", {"allowedClusters": ["standalone"]})
        await rest.call("PUT", "/admin/v2/namespaces/pulsar/system")
        root = await RawClient.open("127.0.0.1", broker.port, connect_as("root"))
        schema = pb.Schema(name="s", schema_data=b"", type=pb.Schema.String)
        for name in TOPICS[0], TOPICS[2], TOPICS[5], TOPICS[6]:
            producer = await root.create_producer(name, pb.CommandProducer(schema=schema))
            await producer.send(b"x")
            await root.subscribe(name, "sub-a")
        await root.close()
        for name in list(broker.topics.loaded()):
            await broker.topics.unload(parse_topic_name(name))
        yield rest


def _path_pairs(path: str, only: str) -> Iterator[tuple[str, str]]:
    """The path with names that exist, and with one of them replaced by an absent one.

    `only` is the part that is replaced; empty: each of them.
    """
    parts = re.findall(r"\{(\w+)\}", path)
    existing = {part: PARTS.get(part, ("1", "7"))[0] for part in parts}
    scalable = "/scalable/" in path or "/segments/" in path
    if scalable and "topic" in existing:
        existing["topic"] = "big-a"
    for part in filter(lambda each: only in ("", each), parts):
        absent = existing[part][:-1] + PARTS.get(part, ("1", "7"))[1][-1]
        yield path.format(**existing), path.format(**{**existing, part: absent})
    for names in () if scalable or only or "topic" not in parts else OTHER_TOPICS:
        one, other = (path.format(**{**existing, "topic": name}) for name in names)
        yield one, other


def _stored(broker: Broker) -> set[tuple[object, ...]]:
    """Keys and versions of all records of the metadata store."""
    path = metadata_path(broker.settings.data_dir)
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        return set(connection.execute("SELECT key, modifications FROM record"))


async def _answer(
    session: aiohttp.ClientSession, method: str, url: str, role: str, body: object = None
) -> tuple[object, ...]:
    """The answer to a request, without what differs between any two: the time, and the names."""
    headers = bearer(token_of(role))
    given = {} if body is None else {"json": body}
    whole = URL(url, encoded=True)
    async with session.request(method, whole, headers=headers, **given) as answer:  # type: ignore[arg-type]
        kept = {**answer.headers, "Date": ""}
        return answer.status, kept, NAMES.sub("NAME", await answer.text())


async def test_paths_answer_alike_for_names_that_exist_and_that_do_not(
    broker: Broker, rest: Rest
) -> None:
    before = _stored(broker)
    hidden = [
        (method, path)
        for (method, path), need in rules().items()
        if need is not Need.AUTHENTICATED and "{" in path and "/v3/transactions" not in path
    ]
    async with aiohttp.ClientSession() as session:
        for role, (method, path) in itertools.product(STRANGERS, hidden):
            answers: dict[str, tuple[object, ...]] = {}
            for pair in _path_pairs(path, STRANGERS[role]):
                for each in pair:
                    if each not in answers:
                        answers[each] = await _answer(session, method, rest.base + each, role)
                one, other = (answers[each] for each in pair)
                assert one == other, (role, method, pair)
                assert one[0] == 403, (role, method, pair, one)
    assert _stored(broker) == before
    assert not broker.topics.loaded()


@pytest.mark.parametrize("path", ["grantPermissionsOnTopics", "revokePermissionsOnTopics"])
async def test_names_in_a_body_are_hidden_too(broker: Broker, rest: Rest, path: str) -> None:
    before = _stored(broker)
    url = f"{rest.base}/admin/v2/namespaces/{path}"
    actions = {"actions": ["produce"]} if path.startswith("grant") else {}
    async with aiohttp.ClientSession() as session:
        for role, (one, other) in itertools.product(STRANGERS, _topic_pairs(TOPICS)):
            answers = [
                await _answer(
                    session,
                    "POST",
                    url,
                    role,
                    [{"topic": topic, "role": "granted-a", **actions}],
                )
                for topic in (one, other)
            ]
            assert answers[0] == answers[1], (role, one, other)
            assert answers[0][0] == 403, (role, one, answers)
    assert _stored(broker) == before


def _topic_pairs(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Names of topics that exist, each with the same one with one absent part."""
    for name in names:
        for match in re.finditer(r"(?<=-)a\b|(?<=partition-)1|(?<=ffff-)0", name):
            absent = "b" if match[0] == "a" else "7"
            yield name, name[: match.start()] + absent + name[match.end() :]


async def test_commands_answer_alike_for_names_that_exist_and_that_do_not(
    broker: Broker, rest: Rest
) -> None:
    before = _stored(broker)

    async def ask(role: str, kind: int) -> None:
        answers: dict[bytes, bytes] = {}
        async with _Wire.open(rest.binary_port, role) as wire:
            for pair in _command_pairs(kind, TOPICS[:1] if STRANGERS[role] else TOPICS):
                asked = [each.SerializeToString() for each in pair]
                for key, command in zip(asked, pair, strict=True):
                    if key not in answers:
                        answers[key] = await wire.ask(command)
                assert answers[asked[0]] == answers[asked[1]] != b"", (role, pair)

    kinds = [kind for kind, rule in RULES.items() if rule.questions is not None]
    # Side by side, as most of the time is spent waiting for the metadata store.
    await asyncio.gather(*itertools.starmap(ask, itertools.product(STRANGERS, kinds)))
    assert _stored(broker) == before
    assert not broker.topics.loaded()


def _command_pairs(
    kind: int, topics: Sequence[str]
) -> Iterator[tuple[pb.BaseCommand, pb.BaseCommand]]:
    """Commands on names that exist, each with the same one with one absent name."""
    fields = complete_command(kind)
    names = getattr(fields, FIELD_OF_TYPE[kind]).DESCRIPTOR.fields_by_name
    if "namespace" in names:
        for absent in ("tnt-b/nsp-a", "tnt-a/nsp-b"):
            yield _renamed(kind, namespace="tnt-a/nsp-a"), _renamed(kind, namespace=absent)
        return
    for one, other in _topic_pairs(topics):
        yield _renamed(kind, topic=one), _renamed(kind, topic=other)
    if "subscription" in names:
        yield (
            _renamed(kind, topic=topics[0], subscription="sub-a"),
            _renamed(kind, topic=topics[0], subscription="sub-b"),
        )


def _renamed(kind: int, **names: str) -> pb.BaseCommand:
    """The example of a command with these names."""
    command = complete_command(kind)
    body = getattr(command, FIELD_OF_TYPE[kind])
    places = [body]
    if kind == Kind.ADD_PARTITION_TO_TXN:
        body.partitions[:] = [names["topic"]]
        return command
    if kind == Kind.ADD_SUBSCRIPTION_TO_TXN:
        places = list(body.subscription)
    elif kind == Kind.END_TXN_ON_SUBSCRIPTION:
        body.subscription.subscription = "sub-a"
        places = [body.subscription]
    for place, (name, text) in itertools.product(places, names.items()):
        setattr(place, name, text)
    return command


class _Wire:
    """A connection whose answers are compared byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    @asynccontextmanager
    async def open(cls, port: int, role: str) -> AsyncIterator["_Wire"]:
        """Log in with that role."""
        wire = cls(*await asyncio.open_connection("127.0.0.1", port))
        connect = connect_as(role)
        connect.client_version = "test"
        await wire.ask(basecommand(Kind.CONNECT, connect))
        try:
            yield wire
        finally:
            wire._writer.close()

    async def ask(self, command: pb.BaseCommand) -> bytes:
        """All bytes of the answer, with the names of this test replaced.

        The answer to a PING behind the command is its end.
        """
        if command.type != Kind.CONNECT:
            self._writer.write(encode_command(command) + encode_command(_PING))
            end = encode_command(_PONG)
        else:
            self._writer.write(encode_command(command))
            end = b""
        read = b""
        while not read.endswith(end) or not read:
            part = await self._reader.read(1 << 16)
            assert part, "the broker closed the connection"
            read += part
            # The broker asks whether the client is there.
            read = read.replace(encode_command(_PING), b"")
        return NAMES.sub("NAME", read.removesuffix(end).decode("latin-1")).encode("latin-1")


async def test_ids_of_another_topics_entries_answer_as_ids_of_none(
    broker: Broker, rest: Rest
) -> None:
    """A role with a topic of its own names the ledgers of other topics in it."""
    mine, path = "persistent://tnt-a/nsp-a/mine", "/admin/v2/persistent/tnt-a/nsp-a/mine"
    root = await RawClient.open("127.0.0.1", broker.port, connect_as("root"))
    stored = [
        (await (await root.create_producer(name)).send(b"x")).message_id.ledger_id
        for name in (mine, TOPICS[0])
    ]
    await root.close()
    existing, absent = stored[1], stored[1] + 5
    assert stored[0] < existing
    rest.role = "neighbour"
    await rest.done("PUT", f"{path}/subscription/seeker")
    client = await RawClient.open("127.0.0.1", broker.port, connect_as("neighbour"))
    texts: dict[int, str] = {}
    for ledger_id in (existing, absent):
        start, end = (pb.MessageIdData(ledger_id=ledger_id, entry_id=each) for each in (0, 1))
        body = {"ledgerId": ledger_id, "entryId": 0}
        answers = [
            await rest.call("POST", f"{path}/subscription/seeker/resetcursor", body),
            await rest.call("PUT", f"{path}/subscription/new-{ledger_id}", body),
            *[
                await _outcome(client, kind, asked)
                for kind, asked in (
                    (
                        Kind.READ_ENTRIES,
                        pb.CommandReadEntries(topic=mine, start=start, end=end, max_bytes=99),
                    ),
                    (Kind.PLAN_RANGE, pb.CommandPlanRange(topic=mine, start=start, end=end)),
                    (
                        Kind.SUBSCRIBE,
                        pb.CommandSubscribe(
                            topic=mine,
                            subscription=f"from-{ledger_id}",
                            sub_type=pb.CommandSubscribe.Exclusive,
                            consumer_id=ledger_id,
                            start_message_id=start,
                            durable=False,
                        ),
                    ),
                    (Kind.SEEK, pb.CommandSeek(consumer_id=ledger_id, message_id=start)),
                )
            ],
        ]
        # It is repeated in answers.
        texts[ledger_id] = str(answers).replace(f"ledger_id: {ledger_id}", "ledger_id: ID")
    assert texts[existing] == texts[absent]
    await client.close()


async def _outcome(client: RawClient, kind: pb.BaseCommand.Type, body: Message) -> str:
    """The answer or the error of a request, without its id."""
    try:
        answer = await client.request(kind, body)
    except BrokerError as error:
        return f"{error.code} {error.message}"
    fields = getattr(answer, FIELD_OF_TYPE[answer.type])
    fields.ClearField("request_id")
    return str(answer)


MIXED: Final = (".%2E", "..%2F..", "x%2Fy", "x%00y")
"""Parts of paths that are, or have, separators, dots or characters that end texts."""
STORED: Final = re.compile(r"\{(topic|subscription|role|key|value)\}")
"""Parts that may have such characters, as they are stored encoded."""


async def test_cve_2026_105930_105936_105945_separators_in_a_path_reach_nothing_else(
    broker: Broker, rest: Rest
) -> None:
    before = _keys(broker)
    routes = [route for route in rules() if "{" in route[1]]
    async with aiohttp.ClientSession() as session:
        for (method, path), mixed in itertools.product(routes, MIXED):
            parts = re.findall(r"\{(\w+)\}", path)
            for part in parts:
                names = {each: PARTS.get(each, ("1", "7"))[0] for each in parts} | {part: mixed}
                url = rest.base + path.format(**names)
                # Of roles without rights the forms of a slash are the interesting ones.
                for role in ("root", "other") if "%2F" in mixed else ("root",):
                    status = (await _answer(session, method, url, role))[0]
                    assert isinstance(status, int)
                    stored = role == "root" and STORED.fullmatch(f"{{{part}}}")
                    assert 400 <= status < 500 or status == 501 or (stored and status < 300), (
                        role,
                        method,
                        url,
                    )
    for path in (
        "/lookup/v2/topic/topic%3A%2F%2Ftnt-a%2Fnsp-a%2Fx/tnt-a/nsp-a/top-a",
        "/lookup/v2/topic/topic/tnt-a%2Fnsp-a/big-a/x",
        "/admin/v3/transactions/records/topic/tnt-a%2Fnsp-a/big-a/x",
        "/admin/v3/transactions/why/topic/tnt-a%2Fnsp-a/big-a/x",
    ):
        await rest.refused(412, "GET", path)
    after = _keys(broker)
    assert before <= after, "records that exist were deleted"
    for key in after - before:
        assert not {"..", ".", ""} & set(key.split("/")[1:]), key
        assert "/tnt-a/nsp-a/" in key, key


def _keys(broker: Broker) -> set[str]:
    """Keys of records, but for those of ledgers: topics that are loaded begin new ones."""
    keys = {str(key) for key, _ in _stored(broker)}
    return {key for key in keys if not key.startswith("/ledgers/")}
