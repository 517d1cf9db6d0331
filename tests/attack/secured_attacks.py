"""Attacks on logins, certificates and grants of a broker that has everything on.

All clients are on this machine, so those of other addresses use others of 127.0.0.0/8.
"""

import asyncio
import base64
import os
import random
import signal
import ssl
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import aiohttp
from cryptography import x509

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import encode_command
from tests.attack.target import REFUSALS, Attack, Target
from tests.support.child_process import HOST
from tests.support.raw_client import BrokerError, RawClient, basecommand
from tests.support.raw_handles import RawProducer
from tests.support.roles import bearer, connect_as, token_of
from tests.support.security import PASSWORD, ROOT_ROLE, USERS, Security, user

Kind = pb.BaseCommand
MIB: Final = 1024 * 1024
TENANTS: Final = "/admin/v2/tenants"
LARGE: Final = 600
LARGE_SIZES: Final = (16 * 1024, 60 * 1024, MIB)
AT_ONCE: Final = 20
FAILED_LOGINS: Final = 10_000
FAILING_AT_ONCE: Final = 200
ATTACKERS: Final = 20
"""Addresses from which logins fail."""
VALID_EVERY_S: Final = 0.1
VALID_WITHIN_S: Final = 5.0
"""How long a valid login of another address may take; clients give up after 10 s."""
REVOKED: Final = "revoked"
REVOKED_CONNECTIONS: Final = 20
REVOKED_PAIRS: Final = 5
"""Producers and consumers of each of these connections."""
REVOKED_LOAD_S: Final = 3.0
REVOKED_LOAD_MIN_S: Final = 0.5
REVOKED_WITHIN_S: Final = 5.0
READ_BACK_S: Final = 30.0
ROTATIONS: Final = 6
ROTATED_CLIENTS: Final = 20
ROTATED_WITHIN_S: Final = 5.0
ROTATED_PAUSE_S: Final = 0.5
EXPIRED: Final = 500
STORM: Final = 2_000
RESPONSES: Final = 500
"""AUTH_RESPONSE frames of one connection."""
ASKED: Final = 20
"""Connections that the broker has asked for new credentials."""
ODD_BYTES: Final = (b"", b"\0" * 100, b"\xff" * 1000, b"a.b.c", b"." * 5000, b"x" * 20_000)
ODD_METHODS: Final = ("token", "basic", "tls", "none", "", "sasl", "\u0000", "x" * 5000)


def issue_certificates(security: Security) -> None:
    """Make the certificates that attacks use, in the files that they expect."""
    authority = security.authority
    for number in range(ROTATIONS):
        authority.issue(f"rotated-{number}", hosts=("localhost",))
    authority.issue("rotated-expired", valid_s=-60)
    authority.issue("client-expired", valid_s=-60)
    security.expired_authority.issue("client-of-expired")


async def grant(target: Target, role: str, *, withdraw: bool = False) -> None:
    """Grant or withdraw the right of a role to produce and consume in `public/default`."""
    path = f"/admin/v2/namespaces/public/default/permissions/{role}"
    async with rest_session(target) as session:
        method, body = ("DELETE", None) if withdraw else ("POST", ["produce", "consume"])
        async with session.request(method, target.url(path), json=body) as answer:
            assert answer.status == 204, await answer.text()


@asynccontextmanager
async def rest_session(
    target: Target, *, token: str | None = None, local: str | None = None
) -> AsyncIterator[aiohttp.ClientSession]:
    """A REST client over TLS: of `root`, or with these bytes as its token."""
    headers = bearer(token_of(ROOT_ROLE) if token is None else token)
    connector = aiohttp.TCPConnector(
        ssl=target.tls or True, local_addr=None if local is None else (local, 0)
    )
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        yield session


async def open_tls(target: Target, local: str | None = None) -> RawClient:
    """A connection over TLS that has sent nothing."""
    return await RawClient.open_socket(HOST, target.port, tls=target.tls, local=local)


async def log_in(target: Target, connect: pb.CommandConnect, local: str | None = None) -> None:
    """Log in and leave.  Raises `BrokerError` or an OSError where the broker refuses it."""
    client = await RawClient.open(HOST, target.port, connect, tls=target.tls, local=local)
    await client.close()


# Large tokens


async def send_large_tokens(target: Target) -> Sequence[str]:
    """Send large tokens and passwords: in CONNECT, in AUTH_RESPONSE, and over REST."""
    numbers = iter(range(target.count(LARGE)))
    entered = 0

    async def send() -> None:
        nonlocal entered
        for number in numbers:
            size = LARGE_SIZES[number % len(LARGE_SIZES)]
            way = (_large_connect, _large_response, _large_header)[number // 3 % 3]
            with suppress(*REFUSALS):
                entered += await way(target, size)

    await asyncio.gather(*(send() for _ in range(AT_ONCE)))
    return [f"{entered} large credentials were taken"] if entered else []


async def _large_connect(target: Target, size: int) -> bool:
    method, prefix = random.choice((("token", b"a.b."), ("basic", b"root:")))
    await log_in(target, pb.CommandConnect(auth_method_name=method, auth_data=prefix + b"A" * size))
    return True


async def _large_response(target: Target, size: int) -> bool:
    """After a login, where larger frames are allowed."""
    async with target.client() as client:
        data = pb.AuthData(auth_method_name="token", auth_data=b"A" * size)
        client.send(Kind.AUTH_RESPONSE, pb.CommandAuthResponse(response=data))
        await client.wait_closed()
    return False


async def _large_header(target: Target, size: int) -> bool:
    async with (
        rest_session(target, token="A" * size) as session,
        session.get(target.url(TENANTS)) as answer,
    ):
        return answer.status < 400


# Failed logins


def attacker(number: int) -> str:
    """One of the ATTACKERS addresses."""
    return f"127.0.1.{1 + number}"


@dataclass
class FailedLogins:
    """Logins that fail, of many clients at once."""

    target: Target
    entered: int = 0
    _sessions: Sequence[aiohttp.ClientSession] = ()

    async def run(self) -> Sequence[str]:
        """Fail to log in FAILED_LOGINS times; returns sentences as a `Step` does."""
        left = iter(range(self.target.count(FAILED_LOGINS)))
        async with AsyncExitStack() as stack:
            self._sessions = [
                await stack.enter_async_context(rest_session(self.target, local=attacker(number)))
                for number in range(ATTACKERS)
            ]
            await asyncio.gather(*(self._fail(left) for _ in range(FAILING_AT_ONCE)))
        return [f"{self.entered} wrong credentials were taken"] if self.entered else []

    async def _fail(self, left: Iterator[int]) -> None:
        for number in left:
            way = (self._wrong_token, self._wrong_password, self._wrong_bearer, self._wrong_basic)
            with suppress(*REFUSALS):
                self.entered += await way[number % 4](number // 4 % ATTACKERS)

    async def _wrong_token(self, number: int) -> bool:
        wrong = token_of(ROOT_ROLE, secret=os.urandom(32)).encode()
        connect = pb.CommandConnect(auth_method_name="token", auth_data=wrong)
        await log_in(self.target, connect, attacker(number))
        return True

    async def _wrong_password(self, number: int) -> bool:
        wrong = b"root:" + os.urandom(8).hex().encode()
        connect = pb.CommandConnect(auth_method_name="basic", auth_data=wrong)
        await log_in(self.target, connect, attacker(number))
        return True

    async def _wrong_bearer(self, number: int) -> bool:
        wrong = token_of(ROOT_ROLE, secret=os.urandom(32))
        return await self._rest(f"Bearer {wrong}", number)

    async def _wrong_basic(self, number: int) -> bool:
        wrong = base64.b64encode(b"root:" + os.urandom(8).hex().encode()).decode()
        return await self._rest(f"Basic {wrong}", number)

    async def _rest(self, authorization: str, number: int) -> bool:
        headers = {"Authorization": authorization}
        url = self.target.url(TENANTS)
        async with self._sessions[number].get(url, headers=headers) as answer:
            return answer.status < 400


async def fail_logins(target: Target) -> Sequence[str]:
    """Fail to log in by tokens and passwords, on both ports, from many addresses."""
    return await FailedLogins(target).run()


async def log_in_meanwhile(target: Target, over: asyncio.Event) -> Sequence[str]:
    """Log in with valid credentials again and again; returns sentences as a `Step` does."""
    waits_s: list[float] = []
    number = 0
    while not over.is_set():
        number += 1
        began_s = time.monotonic()
        if number % 2:
            # From an address whose other logins fail.
            await log_in(target, connect_as(ROOT_ROLE), attacker(0))
        else:
            # A user who has not logged in lately, as long as there are some.
            data = user(number % USERS).encode() + b":" + PASSWORD.encode()
            connect = pb.CommandConnect(auth_method_name="basic", auth_data=data)
            await log_in(target, connect, f"127.0.2.{1 + number % 200}")
        waits_s.append(time.monotonic() - began_s)
        await asyncio.sleep(VALID_EVERY_S)
    longest_s = max(waits_s)
    print(f"{len(waits_s)} valid logins meanwhile, the longest took {longest_s:.2f} s")
    return [f"a valid login took {longest_s:.1f} s"] * (longest_s >= VALID_WITHIN_S)


# A role whose grant is withdrawn


class RevokedLoad:
    """Producers and consumers of one connection; `acknowledged` has the payloads with a receipt."""

    def __init__(self, target: Target, number: int) -> None:
        self._target = target
        self._number = number
        self.acknowledged: dict[str, set[bytes]] = {}
        self.ended_s = 0.0

    async def run(self) -> None:
        """Produce and consume until the broker closes the connection."""
        async with self._target.client(REVOKED) as client:
            producers = [await self._pair(client, pair) for pair in range(REVOKED_PAIRS)]
            sending = asyncio.gather(*(self._send(*each) for each in producers))
            with suppress(TimeoutError):
                await client.wait_closed(READ_BACK_S)
                self.ended_s = time.monotonic()
            sending.cancel()
            with suppress(asyncio.CancelledError, *REFUSALS):
                await sending

    async def _pair(self, client: RawClient, pair: int) -> tuple[str, RawProducer]:
        topic = f"persistent://public/default/revoked-{self._number}-{pair}"
        consumer = await client.subscribe(topic, "s", permits=1000)
        consumer.flow(MIB)
        return topic, await client.create_producer(topic)

    async def _send(self, topic: str, producer: RawProducer) -> None:
        acknowledged = self.acknowledged[topic] = set()
        with suppress(*REFUSALS):
            while True:
                payload = b"%d" % len(acknowledged)
                await producer.send(payload)
                acknowledged.add(payload)


async def withdraw_a_grant(target: Target) -> Sequence[str]:
    """Withdraw the grant of a role that produces and consumes on many connections."""
    loads = [RevokedLoad(target, number) for number in range(target.count(REVOKED_CONNECTIONS))]
    running = asyncio.gather(*(each.run() for each in loads))
    await asyncio.sleep(max(REVOKED_LOAD_S * target.share, REVOKED_LOAD_MIN_S))
    withdrawn_s = time.monotonic()
    await grant(target, REVOKED, withdraw=True)
    await running
    ended_s = [each.ended_s - withdrawn_s for each in loads]
    found = []
    if not all(0 < each < REVOKED_WITHIN_S for each in ended_s):
        found.append(f"connections ended {min(ended_s):.1f} to {max(ended_s):.1f} s later")
    with suppress(BrokerError):
        async with target.client(REVOKED) as client:
            await client.create_producer("persistent://public/default/revoked-0-0")
            found.append("the role may still produce")
    acknowledged = {topic: each for load in loads for topic, each in load.acknowledged.items()}
    count = sum(map(len, acknowledged.values()))
    print(f"{count} messages were acknowledged; connections ended within {max(ended_s):.2f} s")
    async with target.client() as client:
        missing = [await missing_of(client, topic, each) for topic, each in acknowledged.items()]
    if sum(missing) or not count:
        found.append(f"{sum(missing)} of {count} acknowledged messages are missing")
    return found


async def missing_of(client: RawClient, topic: str, acknowledged: set[bytes]) -> int:
    """How many of these payloads a reader from the beginning on does not find."""
    options = pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest)
    consumer = await client.subscribe(topic, "read-back", options, permits=MIB)
    missing = set(acknowledged)
    with suppress(TimeoutError):
        async with asyncio.timeout(READ_BACK_S):
            while missing:
                missing.discard(bytes((await consumer.receive()).payload))
    return len(missing)


# Certificates


class RotatedClient:
    """A client that publishes over TLS; `dropped` once its connection has ended."""

    def __init__(self, target: Target, number: int) -> None:
        self._target = target
        self._topic = f"persistent://public/default/rotated-{number}"
        self.acknowledged = 0
        self.dropped = False

    async def run(self, over: asyncio.Event) -> None:
        """Publish one message after the other until that event."""
        async with self._target.client() as client:
            producer = await client.create_producer(self._topic)
            try:
                while not over.is_set():
                    await producer.send(b"x")
                    self.acknowledged += 1
            except REFUSALS:
                self.dropped = True


async def rotate_certificates(target: Target) -> Sequence[str]:
    """Replace the broker's certificate several times while clients publish.

    Between two good ones the key does not fit, or the certificate has expired: the earlier one
    stays in use.
    """
    over = asyncio.Event()
    clients = [RotatedClient(target, number) for number in range(target.count(ROTATED_CLIENTS))]
    running = asyncio.gather(*(each.run(over) for each in clients))
    found: list[str] = []
    for number in range(target.count(ROTATIONS)):
        name = f"rotated-{number}"
        for port in (target.port, target.http_port):
            install(target, name, name)
            if not await shows(target, port, name):
                found.append(f"port {port} did not show {name} within {ROTATED_WITHIN_S} s")
        for chain, key in ((name, "rotated-expired"), ("rotated-expired", "rotated-expired")):
            install(target, chain, key)
            await asyncio.sleep(ROTATED_PAUSE_S)
            if await serial_of(target.port) != serial_in(target, name):
                found.append(f"{chain} with the key of {key} came in use")
    over.set()
    await running
    print(f"{sum(each.acknowledged for each in clients)} messages were acknowledged meanwhile")
    dropped = sum(each.dropped for each in clients)
    return found + ([f"{dropped} connections were dropped"] if dropped else [])


def install(target: Target, chain: str, key: str) -> None:
    """Replace the broker's certificate and key by these files, and have it load them."""
    for name, ending in ((chain, "pem"), (key, "key")):
        new = target.files / f"new.{ending}"
        new.touch(mode=0o600)
        new.write_bytes((target.files / f"{name}.{ending}").read_bytes())
        new.replace(target.files / f"broker.{ending}")
    os.kill(target.pid, signal.SIGHUP)


async def shows(target: Target, port: int, name: str) -> bool:
    """Whether new connections soon see this certificate."""
    deadline_s = time.monotonic() + ROTATED_WITHIN_S
    while time.monotonic() < deadline_s:
        if await serial_of(port) == serial_in(target, name):
            return True
        await asyncio.sleep(0.05)
    return False


def serial_in(target: Target, name: str) -> int:
    """The serial number of a certificate in a file."""
    pem = (target.files / f"{name}.pem").read_bytes()
    return x509.load_pem_x509_certificate(pem).serial_number


async def serial_of(port: int) -> int:
    """The serial number of the certificate that a port shows to a new connection."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection(HOST, port, ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return x509.load_der_x509_certificate(shown).serial_number


async def show_expired_certificates(target: Target) -> Sequence[str]:
    """Connect with certificates that have expired, or whose authority has."""
    numbers = iter(range(target.count(EXPIRED)))
    entered = 0

    async def connect(context: ssl.SSLContext) -> None:
        nonlocal entered
        for _ in numbers:
            with suppress(*REFUSALS):
                tls = pb.CommandConnect(auth_method_name="tls")
                client = await RawClient.open(HOST, target.port, tls, tls=context)
                entered += 1
                await client.close()

    contexts = [context_of(target, name) for name in ("client-expired", "client-of-expired")]
    await asyncio.gather(*(connect(contexts[number % 2]) for number in range(AT_ONCE)))
    return [f"{entered} expired certificates were taken"] if entered else []


def context_of(target: Target, name: str) -> ssl.SSLContext:
    """The context of a client that shows a certificate."""
    context = ssl.create_default_context(cafile=str(target.files / "authority.pem"))
    context.load_cert_chain(target.files / f"{name}.pem", target.files / f"{name}.key")
    return context


# AUTH_RESPONSE and AUTH_CHALLENGE


def auth_response(method: str, data: bytes) -> bytes:
    """A frame."""
    response = pb.AuthData(auth_method_name=method, auth_data=data)
    return encode_command(
        basecommand(Kind.AUTH_RESPONSE, pb.CommandAuthResponse(response=response))
    )


def odd_frames(random_: random.Random) -> bytes:
    """Frames of authentication that no client sends before CONNECT is answered."""
    method, data = random_.choice(ODD_METHODS), random_.choice(ODD_BYTES)
    connect = pb.CommandConnect(client_version="x", auth_method_name=method, auth_data=data)
    if random_.randrange(2):
        connect.original_principal = random_.choice(ODD_METHODS)
        connect.original_auth_data = random_.choice(ODD_METHODS)
        connect.original_auth_method = random_.choice(ODD_METHODS)
    challenge = pb.AuthData(auth_method_name=method, auth_data=data)
    frames = (
        encode_command(basecommand(Kind.CONNECT, connect)),
        encode_command(
            basecommand(Kind.AUTH_CHALLENGE, pb.CommandAuthChallenge(challenge=challenge))
        ),
        auth_response(method, data),
        encode_command(basecommand(Kind.AUTH_RESPONSE, pb.CommandAuthResponse())),
    )
    return b"".join(random_.choices(frames, k=random_.choice((1, 2, 10))))


async def send_auth_frames(target: Target) -> Sequence[str]:
    """Send AUTH frames of all kinds where none is asked for, and too many where one is."""
    random_ = random.Random(0)
    numbers = iter(range(target.count(STORM)))

    async def send() -> None:
        for number in numbers:
            with suppress(*REFUSALS):
                if number % 4:
                    client = await open_tls(target)
                    client.write(odd_frames(random_))
                else:
                    client = await RawClient.open(
                        HOST, target.port, connect_as(ROOT_ROLE), tls=target.tls
                    )
                    client.write(unasked_responses())
                await client.wait_closed()

    asked = asyncio.gather(*(answer_too_often(target) for _ in range(target.count(ASKED))))
    await asyncio.gather(*(send() for _ in range(AT_ONCE)))
    stayed = sum(await asked)
    return [f"{stayed} connections stayed after answers that nobody had asked for"] * bool(stayed)


def unasked_responses() -> bytes:
    """Many valid AUTH_RESPONSE frames, none of which answers a challenge."""
    return auth_response("token", token_of(ROOT_ROLE).encode()) * RESPONSES


async def answer_too_often(target: Target) -> bool:
    """Answer AUTH_CHALLENGE with many frames; whether the connection stays open."""
    connect = connect_as(ROOT_ROLE, life_s=1)
    try:
        client = await RawClient.open(HOST, target.port, connect, tls=target.tls)
    except REFUSALS:
        return False  # The token had expired before it arrived.
    with suppress(*REFUSALS):
        async with asyncio.timeout(30):
            while (await client.events.get()).type != Kind.AUTH_CHALLENGE:
                pass
            client.write(unasked_responses())
            await client.wait_closed()
        return False
    return True


SECURED_ATTACKS: Final[Mapping[str, Attack]] = MappingProxyType(
    {
        "large-tokens": Attack(
            "600 tokens and passwords of up to 1 MiB, in CONNECT, AUTH_RESPONSE and REST",
            LARGE,
            send_large_tokens,
            secured=True,
        ),
        "failed-logins": Attack(
            "10,000 failed logins by token and password, on both ports, from 20 addresses",
            FAILED_LOGINS,
            fail_logins,
            secured=True,
            beside=log_in_meanwhile,
        ),
        "withdrawn-grant": Attack(
            "a role with 100 producers and consumers at work loses its grant",
            1,
            withdraw_a_grant,
            lambda target: grant(target, REVOKED),
            secured=True,
        ),
        "rotated-certificates": Attack(
            "6 new certificates, and 12 that do not fit or have expired, while clients publish",
            3 * ROTATIONS,
            rotate_certificates,
            secured=True,
        ),
        "expired-certificates": Attack(
            "500 clients whose certificate or its authority has expired",
            EXPIRED,
            show_expired_certificates,
            secured=True,
        ),
        "auth-storm": Attack(
            "2,000 connections with odd AUTH frames before CONNECT, or AUTH_RESPONSE unasked",
            STORM,
            send_auth_frames,
            settings={"authentication_refresh_check_s": 1},
            secured=True,
        ),
    }
)
