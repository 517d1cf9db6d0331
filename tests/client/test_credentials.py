"""The client on a Magnetar with TLS alone: every kind of credentials, fresh ones, lost grants."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Final
from uuid import uuid4

import pytest
from typer.testing import CliRunner, Result

import magnetar
import magnetar.sync
from magnetar.cli.main import build_app
from magnetar.errors import (
    AuthenticationFailed,
    AuthorizationFailed,
    MagnetarError,
)
from magnetar.settings import ClientOptions
from tests.support.everything_on import (
    AUDIENCE,
    Kind,
    SecuredBroker,
    serving_secured,
)
from tests.support.oauth2_issuer import key_file
from tests.support.roles import token_of
from tests.support.security import PASSWORD, ROOT_ROLE
from tests.support.waiting import until

pytestmark = [
    pytest.mark.timeout(60, func_only=True),
    pytest.mark.magnetar_only("the settings are Magnetar's; test_security.py has what both do"),
]
WAIT_S: Final = 30
WITHDRAWN_S: Final = 4
"""Within it everything that a withdrawn grant allowed must have ended."""
WRONG: Final = "wrong p4ssword"
LIFE_S: Final = 2
"""Of tokens that expire in mid-stream; the broker checks every second."""
KEYS: Final = tuple(f"k{number}" for number in range(16))


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    with serving_secured(tmp_path_factory.mktemp("secured")) as broker:
        yield broker


@pytest.fixture
async def topic(secured: SecuredBroker) -> str:
    """A scalable topic of two segments."""
    return await secured.create_topic(f"secured-{uuid4().hex[:8]}", 2)


@pytest.mark.parametrize("kind", Kind)
async def test_kind_of_credentials_serves_messages_transactions_and_keys(
    secured: SecuredBroker, topic: str, kind: Kind
) -> None:
    start = magnetar.InitialPosition.EARLIEST
    async with (
        magnetar.connect(secured.url, **secured.options(kind)) as client,
        client.producer(topic, schema=str) as producer,
        client.queue_consumer(topic, "queue", schema=str, initial_position=start) as queue,
        client.stream_consumer(topic, "stream", schema=str, initial_position=start) as stream,
        client.transaction_key(f"key-{topic[-8:]}") as key,
    ):
        for name in KEYS:
            await producer.send(f"plain-{name}", key=name)
        async with client.transaction() as transaction:
            for name in KEYS:
                await producer.send(f"txn-{name}", key=name, transaction=transaction)
        attempt = await key.begin_attempt("nonce", timeout_s=WAIT_S)
        assert attempt is not None
        for name in KEYS:
            producer.send_nowait(f"group-{name}", key=name, transaction=attempt)
        await attempt.settled()
        winner = magnetar.Winner(attempt.id, {})
        await key.commit_group("nonce", attempt.group, [winner], query="q", batch=0)
        expected = {f"{way}-{name}" for way in ("plain", "txn", "group") for name in KEYS}
        for consumer in (queue, stream):
            assert {(await consumer.receive(WAIT_S)).value for _ in expected} == expected


@pytest.mark.parametrize("kind", Kind)
async def test_kind_of_credentials_serves_threads(
    secured: SecuredBroker, topic: str, kind: Kind
) -> None:
    def program() -> list[str]:
        with (
            magnetar.sync.connect(secured.url, **secured.options(kind)) as client,
            client.producer(topic, schema=str) as producer,
            client.queue_consumer(
                topic, "threads", schema=str, initial_position="earliest"
            ) as consumer,
        ):
            with client.transaction() as transaction:
                for name in KEYS:
                    producer.send(name, key=name, transaction=transaction)
            return [consumer.receive(WAIT_S).value for _ in KEYS]

    assert sorted(await asyncio.to_thread(program)) == sorted(KEYS)


class Traffic:
    """A sender that goes through the keys, and readers, until they are stopped."""

    def __init__(self, secured: SecuredBroker) -> None:
        self.sent = Counter[str]()
        self.sending, self.reading = True, True
        self._secured = secured

    async def send(self, client: magnetar.Client, producer: magnetar.Producer[str]) -> None:
        """Send the numbers of each key, every tenth message in a transaction."""
        for key in itertools.cycle(KEYS):
            if not self.sending:
                break
            in_transaction = client.transaction() if self.sent.total() % 10 == 0 else None
            async with in_transaction or nullcontext() as transaction:
                await producer.send(f"{key}:{self.sent[key]}", key=key, transaction=transaction)
            self.sent[key] += 1
            await asyncio.sleep(0.002)

    async def read(
        self, consumer: magnetar.StreamConsumer[str] | magnetar.QueueConsumer[str], into: list[str]
    ) -> None:
        """Receive and acknowledge."""
        while self.reading:
            for message in await consumer.receive_batch(max_messages=100, timeout_s=0.2):
                into.append(message.value)
                await consumer.ack(message)

    async def renew(self) -> None:
        """Write the file of the token again before the token expires."""
        while self.reading:
            self._secured.token_file(ROOT_ROLE, life_s=LIFE_S, name="short")
            await asyncio.sleep(LIFE_S / 4)


async def test_refresh_during_splits_and_merges_loses_and_doubles_nothing(
    secured: SecuredBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The producer has tokens of the issuer, the consumers a file that is written again."""
    monkeypatch.setattr(secured.issuer, "lifetime_s", LIFE_S)
    issued = secured.issuer.issued
    file = secured.token_file(ROOT_ROLE, life_s=LIFE_S, name="short")
    short = ClientOptions(token=file.as_uri(), tls_trust_file=secured.authority.chain)
    traffic = Traffic(secured)
    ordered: list[str] = []
    shared: list[str] = []
    async with (
        magnetar.connect(secured.url, **secured.options(Kind.OAUTH2)) as sender,
        magnetar.connect(secured.url, **short) as reader,
        sender.producer(topic, schema=str) as producer,
        reader.stream_consumer(topic, "stream", schema=str, initial_position="earliest") as stream,
        reader.queue_consumer(topic, "queue", schema=str, initial_position="earliest") as queue,
        asyncio.TaskGroup() as tasks,
    ):
        connections = [*sender.context.pool.connections, *reader.context.pool.connections]
        sending = tasks.create_task(traffic.send(sender, producer))
        for use in (traffic.renew(), traffic.read(stream, ordered), traffic.read(queue, shared)):
            tasks.create_task(use)
        for parent, child in ((0, 2), (4, 5), (7, 8)):
            await secured.split(topic, parent)
            await asyncio.sleep(LIFE_S / 2)
            await secured.merge(topic, child, child + 1)
            await asyncio.sleep(LIFE_S / 2)
        traffic.sending = False
        await sending
        await until(lambda: min(len(ordered), len(shared)) >= traffic.sent.total())
        await asyncio.sleep(0.1)  # Is there one too many?
        present = {*sender.context.pool.connections, *reader.context.pool.connections}
        assert present.issuperset(connections), "a connection was lost for a refresh"
        traffic.reading = False
    expected = {key: [f"{key}:{n}" for n in range(traffic.sent[key])] for key in KEYS}
    for key in KEYS:
        assert [value for value in ordered if value.startswith(f"{key}:")] == expected[key]
    assert sorted(shared) == sorted(itertools.chain.from_iterable(expected.values()))
    assert secured.issuer.issued - issued >= 3


async def test_key_of_the_same_name_of_another_role_is_another_key(secured: SecuredBroker) -> None:
    async with (
        magnetar.connect(secured.url, **secured.options(Kind.BASIC, "alice")) as alice,
        magnetar.connect(secured.url, **secured.options(Kind.BASIC, "stranger")) as stranger,
        alice.transaction_key("of-two") as ours,
        stranger.transaction_key("of-two") as other,
    ):
        assert ours.epoch == other.epoch == 0
        attempt = await ours.begin_attempt("nonce", timeout_s=WAIT_S)
        assert attempt is not None, "the other role has fenced nobody"
        await ours.abort_group()


# Commands


def arguments_of(secured: SecuredBroker, kind: Kind) -> dict[str, str]:
    """Credentials and TLS of a command, by the names of its options."""
    trust = {"tls-trust-file": str(secured.authority.chain)}
    match kind:
        case Kind.TOKEN:
            return trust | {"token": token_of(ROOT_ROLE)}
        case Kind.TOKEN_FILE:
            return trust | {"token-file": str(secured.token_file(ROOT_ROLE))}
        case Kind.BASIC:
            file = secured.directory / "password"
            file.write_text(PASSWORD)
            return trust | {"basic-user": ROOT_ROLE, "basic-password-file": str(file)}
        case Kind.OAUTH2:
            file = key_file(secured.directory, issuer_url=secured.issuer.url)
            audience = {"oauth2-key-file": str(file), "oauth2-audience": AUDIENCE}
            return trust | audience | {"oauth2-require-https": "false"}
        case Kind.CERTIFICATE:
            own = secured.authority.issue(ROOT_ROLE)
            return trust | {"tls-certificate-file": str(own.chain), "tls-key-file": str(own.key)}


def as_options(given: dict[str, str]) -> list[str]:
    """The command line."""
    words: list[str] = []
    for name, value in given.items():
        words += [f"--no-{name}"] if value == "false" else [f"--{name}", value]
    return words


def as_environment(given: dict[str, str]) -> dict[str, str]:
    """The variables."""
    other = {"tls-certificate-file": "client-certificate-file", "tls-key-file": "client-key-file"}
    return {
        f"MAGNETAR_{other.get(name, name).upper().replace('-', '_')}": value
        for name, value in given.items()
    }


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("way", [as_options, as_environment])
def test_commands_take_each_kind_of_credentials(
    secured: SecuredBroker,
    topic: str,
    kind: Kind,
    way: Callable[[dict[str, str]], list[str] | dict[str, str]],
) -> None:
    commands: list[list[str]] = [
        ["produce", topic, "-m", "one", "-k", "k"],
        ["peek", topic, "-n", "1"],
        ["consume", topic, "-s", "s", "-n", "1"],
        ["tail", topic, "--idle-s", "0.05"],
        ["perf", "produce", topic, "-n", "2"],
        ["perf", "consume", topic, "-s", "perf", "-n", "2", "--from", "earliest"],
        ["topics", "get", topic],
        ["txn", "list"],
        ["txn", "keys", "list"],
        ["health"],
    ]
    given = arguments_of(secured, kind)
    named = {"MAGNETAR_URL": secured.url, "MAGNETAR_ADMIN_URL": secured.admin_url}
    shown = way(given)

    def run(command: list[str]) -> Result:
        if isinstance(shown, list):
            return CliRunner().invoke(build_app(), [*command, *shown], env=named)
        return CliRunner().invoke(build_app(), command, env=named | shown)

    for command in commands if way is as_options else (commands[0], commands[1], commands[-1]):
        done = run(command)
        assert done.exit_code == 0, (command, done.output)
        if command[0] in ("peek", "consume"):
            assert "one" in done.output


# Refusals


async def send_until_refused(producer: magnetar.Producer[str]) -> None:
    while True:
        await producer.send("not allowed any more", key="k")
        await asyncio.sleep(0.01)


async def test_withdrawn_grant_ends_what_is_open_in_a_sentence(
    secured: SecuredBroker, topic: str
) -> None:
    """At once, and nothing else of the client."""
    await secured.grant(topic, "alice", "produce", "consume")
    async with (
        magnetar.connect(secured.url, **secured.options(Kind.BASIC, "alice")) as client,
        client.producer(topic, schema=str) as producer,
        client.queue_consumer(topic, "queue", schema=str) as queue,
        client.stream_consumer(topic, "stream", schema=str) as stream,
        client.checkpoint_consumer(topic, schema=str) as checkpoint,
    ):
        await producer.send("allowed", key="k")
        for consumer in (queue, stream, checkpoint):
            assert (await consumer.receive(WAIT_S)).value == "allowed"

        await secured.grant(topic, "alice", "produce")
        for consumer in (queue, stream, checkpoint):
            with pytest.raises(AuthorizationFailed) as refused:
                await consumer.receive(WITHDRAWN_S)
            assert_next_step(refused.value, "consume on topic://", "grant")
        await producer.send("allowed still", key="k")

        await secured.withdraw(topic, "alice")
        with pytest.raises(AuthorizationFailed) as refused:
            await asyncio.wait_for(send_until_refused(producer), WITHDRAWN_S)
        assert_next_step(refused.value, "produce", "grant")
        async with client.transaction():
            pass


@pytest.mark.parametrize("kind", [Kind.TOKEN, Kind.TOKEN_FILE, Kind.BASIC, Kind.CERTIFICATE])
async def test_role_without_grants_is_refused_in_a_sentence(
    secured: SecuredBroker, topic: str, kind: Kind
) -> None:
    async with magnetar.connect(secured.url, **secured.options(kind, "stranger")) as client:
        for use in (
            client.producer(topic),
            client.queue_consumer(topic, "queue"),
            client.stream_consumer(topic, "stream"),
            client.checkpoint_consumer(topic),
        ):
            with pytest.raises(AuthorizationFailed) as refused:
                await use
            assert_next_step(refused.value, "grant")


async def test_wrong_credentials_are_refused_in_a_sentence(
    secured: SecuredBroker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    secret = b"another secret of 32 bytes or so"
    wrong = tmp_path / "wrong"
    wrong.write_text(token_of(ROOT_ROLE, secret=secret))
    cases: dict[str, ClientOptions] = {
        "token credentials": ClientOptions(token=token_of(ROOT_ROLE, secret=secret)),
        "check them": ClientOptions(token=wrong.as_uri()),
        "basic credentials": ClientOptions(basic=magnetar.BasicCredentials(ROOT_ROLE, WRONG)),
        "give it a token": ClientOptions(),
    }
    for words, options in cases.items():
        options["tls_trust_file"] = secured.authority.chain
        with pytest.raises(AuthenticationFailed) as refused:
            await magnetar.connect(secured.url, **options)
        assert_next_step(refused.value, words)
        assert WRONG not in str(refused.value)
    monkeypatch.setattr(secured.issuer, "secret", WRONG)
    with pytest.raises(AuthenticationFailed) as refused:
        await magnetar.connect(secured.url, **secured.options(Kind.OAUTH2))
    assert_next_step(refused.value, "no such client")


def assert_next_step(error: MagnetarError, *words: str) -> None:
    """The error is a sentence that has the words, and says what to do."""
    text = str(error)
    for each in words:
        assert each in text
    assert text[0].isupper()
    assert text.endswith(".")
