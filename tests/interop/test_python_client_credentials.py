"""Programs of `pulsar-client` (Python over the C++ client) with each kind of credentials."""

import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final
from uuid import uuid4

import pulsar
import pytest

from tests.support.authority import Authority
from tests.support.everything_on import (
    AUDIENCE,
    Kind,
    SecuredBroker,
    serving_secured,
)
from tests.support.oauth2_issuer import key_file
from tests.support.roles import token_of
from tests.support.security import PASSWORD, ROOT_ROLE

PATIENCE_MS: Final = 30_000
COUNT: Final = 10
LIFE_S: Final = 2
"""Of tokens that expire in mid-stream; the broker checks every second."""


@pytest.fixture(scope="module", autouse=True)
def _only_on_magnetar(on_peer: bool) -> None:
    if on_peer:
        pytest.skip("the settings are Magnetar's")


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    with serving_secured(tmp_path_factory.mktemp("secured")) as broker:
        yield broker


@pytest.fixture
def topic() -> str:
    return f"persistent://public/default/python-{uuid4().hex[:8]}"


def authentication(
    secured: SecuredBroker, kind: Kind, role: str = ROOT_ROLE
) -> pulsar.Authentication:
    match kind:
        case Kind.TOKEN:
            return pulsar.AuthenticationToken(token_of(role))
        case Kind.TOKEN_FILE:
            # The client takes no file, but a function that reads one.
            return pulsar.AuthenticationToken(lambda: secured.token_file(role).read_text().strip())
        case Kind.BASIC:
            return pulsar.AuthenticationBasic(role, PASSWORD)
        case Kind.OAUTH2:
            key = key_file(secured.directory)
            where = {"issuer_url": secured.issuer.url, "private_key": f"file://{key}"}
            return pulsar.AuthenticationOauth2(json.dumps({**where, "audience": AUDIENCE}))
        case Kind.CERTIFICATE:
            own = secured.authority.issue(role)
            return pulsar.AuthenticationTLS(str(own.chain), str(own.key))


def open_client(
    secured: SecuredBroker,
    shown: pulsar.Authentication | None,
    *,
    trust: Path | None = None,
    by_http: bool = False,
    timeout_s: int = 10,
) -> pulsar.Client:
    return pulsar.Client(
        secured.admin_url if by_http else secured.url,
        operation_timeout_seconds=timeout_s,
        authentication=shown,
        tls_trust_certs_file_path=str(trust or secured.authority.chain),
        tls_validate_hostname=True,
    )


@pytest.mark.parametrize("by_http", [False, True], ids=["pulsar+ssl", "https"])
@pytest.mark.parametrize("kind", Kind)
def test_kind_of_credentials_serves_messages(
    secured: SecuredBroker, topic: str, kind: Kind, by_http: bool
) -> None:
    shown = authentication(secured, kind)
    with closing(open_client(secured, shown, by_http=by_http)) as client:
        consumer = client.subscribe(topic, "first", consumer_type=pulsar.ConsumerType.Shared)
        producer = client.create_producer(topic)
        for number in range(COUNT):
            producer.send(b"%d" % number)
        received = [consumer.receive(PATIENCE_MS) for _ in range(COUNT)]
        assert {each.data() for each in received} == {b"%d" % number for number in range(COUNT)}
        for each in received:
            consumer.acknowledge(each)


def test_token_is_fetched_again_when_it_expires(secured: SecuredBroker, topic: str) -> None:
    calls = 0

    def token() -> str:
        nonlocal calls
        calls += 1
        return token_of(ROOT_ROLE, life_s=LIFE_S)

    with closing(open_client(secured, pulsar.AuthenticationToken(token))) as client:
        consumer = client.subscribe(topic, "first")
        producer = client.create_producer(topic)
        deadline_s, sent = time.monotonic() + 10 * LIFE_S, 0
        while calls < 3:
            assert time.monotonic() < deadline_s
            producer.send(b"%d" % sent)
            sent += 1
            time.sleep(0.02)
        received = [consumer.receive(PATIENCE_MS).data() for _ in range(sent)]
        assert received == [b"%d" % number for number in range(sent)]
        with pytest.raises(pulsar.Timeout):
            consumer.receive(100)


def test_role_without_grants_is_refused(secured: SecuredBroker, topic: str) -> None:
    shown = authentication(secured, Kind.BASIC, "stranger")
    with closing(open_client(secured, shown)) as client:
        for use in (client.create_producer, lambda name: client.subscribe(name, "first")):
            with pytest.raises(pulsar.AuthorizationError):
                use(topic)


@pytest.mark.parametrize(
    "wrong",
    [
        pulsar.AuthenticationBasic(ROOT_ROLE, f"not {PASSWORD}"),
        pulsar.AuthenticationToken(token_of(ROOT_ROLE, life_s=-60)),
        None,
    ],
    ids=["another password", "an expired token", "nothing"],
)
def test_wrong_credentials_are_refused(
    secured: SecuredBroker, topic: str, wrong: pulsar.Authentication | None
) -> None:
    client = open_client(secured, wrong, by_http=True)
    with closing(client), pytest.raises(pulsar.ConnectError):
        client.create_producer(topic)


def test_refusal_before_connected_is_a_timeout_to_the_client(
    secured: SecuredBroker, topic: str
) -> None:
    """It regards it as a lost connection, and tries again until its time is up."""
    client = open_client(secured, None, timeout_s=1)
    with closing(client), pytest.raises(pulsar.Timeout):
        client.create_producer(topic)


def test_broker_of_an_unknown_authority_is_refused(
    secured: SecuredBroker, topic: str, tmp_path: Path
) -> None:
    shown, other = authentication(secured, Kind.TOKEN), Authority(tmp_path / "other")
    client = open_client(secured, shown, trust=other.chain, timeout_s=1)
    with closing(client), pytest.raises(pulsar.PulsarException):
        client.create_producer(topic)
