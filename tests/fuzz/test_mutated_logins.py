"""Mutated AUTH frames: CONNECT and AUTH_RESPONSE at a login, AUTH_CHALLENGE at the client.

A login succeeds with a role, or is refused; nothing else is raised.  The frames are those of one
seed; at night, and by `make fuzz`, others are drawn.
"""

import random
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import bcrypt
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from structlog.testing import capture_logs

from broker.wire.login import AuthenticationFailed, Login, LoginState
from broker.wire.protocol_violation import ProtocolViolation
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import Frame, FrameDecoder
from magnetar.wire.connection_core import ConnectionState
from security.authenticator import Authenticator
from security.basic import BasicProvider
from security.certificates import TlsProvider
from security.failed_logins import FailedLogins
from security.identity import Principal, Role
from security.password_file import parse_password_file
from security.token_keys import TokenKeys, secret_key
from security.token_provider import TokenProvider
from security.tokens import TokenRules
from tests.fuzz.mutations import Effect, Fuzzer
from tests.fuzz.test_mutated_tokens import SECRET, mutated_bytes, mutated_token
from tests.support.authority import Authority
from tests.support.effort import by_effort, chosen_seed, show_seed
from tests.support.pulsar_tokens import SECRETS
from tests.support.raw_client import basecommand
from tests.unit.magnetar.wire.shells import RecordingShell, core, ready_core

SEED: Final = 3_300_816_014
FRAMES: Final = by_effort(quick=4_000, whole=4_000, nightly=1_000_000)
BREAKING: Final = 10
MAX_FRAME: Final = 64 * 1024
NOW_S: Final = 1_800_000_000.0
Kind = pb.BaseCommand
TOKEN: Final = SECRETS["HS512"].token.encode()
PASSWORD: Final = b"bob:hello"
PROXY_PASSWORD: Final = b"gate:hello"
SECRETS_IN_LOGS: Final = re.compile(r"hello|eyJ|:h")
METHODS: Final = ("token", "basic", "tls", "none", "", "Token", "sasl")


@dataclass
class Host:
    """The connection of a login."""

    certificate: bytes | None = None
    principal: Principal | None = None
    challenges: int = 0
    closed: bool = False
    address: str = "192.0.2.1"
    server_version: str = "fuzz"

    def peer_certificate(self) -> bytes | None:
        return self.certificate

    def send(self, command: pb.BaseCommand) -> None:
        self.challenges += command.type == Kind.AUTH_CHALLENGE

    def close(self, why: str) -> None:
        self.closed = True


def authenticator() -> Authenticator:
    """Tokens, passwords and certificates; failures are neither held back nor remembered."""
    clock = iter(range(0, 10**12, 1000))
    failed = FailedLogins(lambda: float(next(clock)))
    hashed = bcrypt.hashpw(b"hello", bcrypt.gensalt(4)).decode()
    users = parse_password_file(f"bob:{hashed}\ngate:{hashed}".encode(), "users")
    keys = TokenKeys([secret_key(SECRET, "secret", "k1")])
    basic = BasicProvider(users, failed_logins=failed, now_s=lambda: float(next(clock)))

    async def sleep(_: float) -> None:
        pass

    return Authenticator(
        [
            TokenProvider(keys, TokenRules(), lambda: NOW_S),
            basic,
            TlsProvider("cn", now_s=lambda: NOW_S),
        ],
        failed_logins=failed,
        now_s=lambda: NOW_S,
        proxy_roles=frozenset({Role("gate")}),
        authenticate_original_client=True,
        closers=[basic.close],
        sleep=sleep,
    )


class AuthFrames:
    """An endless, seeded source of commands with credentials, as a broker's decoder gives them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._fuzzer = Fuzzer(rng, BREAKING)

    def connect(self) -> pb.CommandConnect | None:
        """CONNECT; None if the bytes are none."""
        method, data = self._credentials()
        connect = pb.CommandConnect(
            client_version="x", protocol_version=21, auth_method_name=method, auth_data=data
        )
        connect.feature_flags.supports_auth_refresh = True
        if self._rng.randrange(3) == 0:
            connect.auth_method_name, connect.auth_data = "basic", PROXY_PASSWORD
            connect.original_auth_method = method
            connect.original_auth_data = data.decode("utf-8", "replace")
            connect.original_principal = self._rng.choice(("joe", "bob", "gate", "", "*", "\0"))
        command = self._mutated(basecommand(Kind.CONNECT, connect))
        return None if command is None else command.connect

    def response(self) -> pb.CommandAuthResponse | None:
        """AUTH_RESPONSE; None if the bytes are none."""
        method, data = self._credentials()
        response = pb.AuthData(auth_method_name=method, auth_data=data)
        command = basecommand(Kind.AUTH_RESPONSE, pb.CommandAuthResponse(response=response))
        mutated = self._mutated(command)
        return None if mutated is None else mutated.auth_response

    def _credentials(self) -> tuple[str, bytes]:
        """Often of a valid kind: else all that is refused at once hides what comes later."""
        rng = self._rng
        method = rng.choice(("token", "basic", "tls"))
        data = {"token": TOKEN, "basic": PASSWORD, "tls": b""}[method]
        match rng.randrange(4):
            case 0:
                data = mutated_bytes(rng, data, 3)
            case 1 if method == "token":
                data = mutated_token(rng).data
            case 2:
                method = rng.choice(METHODS)
        return method, data

    def _mutated(self, command: pb.BaseCommand) -> pb.BaseCommand | None:
        if self._rng.randrange(2):
            return command
        frame = self._fuzzer.mutate(command)
        if frame.effect is not Effect.WHOLE:
            return None
        first = FrameDecoder(MAX_FRAME, MAX_FRAME).feed(frame.data)[0]
        if not isinstance(first, Frame) or first.command.type != command.type:
            return None
        return first.command


@pytest.mark.timeout(120 + FRAMES // 200)
async def test_mutated_logins(tmp_path: Path) -> None:
    seed = chosen_seed(SEED)
    show_seed(seed)
    rng = random.Random(seed)
    frames = AuthFrames(rng)
    checks = authenticator()
    pem = Authority(tmp_path).issue("carol", valid_s=10**9).chain.read_bytes()
    certificate = x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)
    ends: Counter[str] = Counter()
    for number in range(FRAMES):
        connect = frames.connect()
        if connect is None:
            continue
        host = Host(certificate if rng.randrange(2) else None)
        login = Login(host, checks, check_interval_s=60, now_s=lambda: NOW_S)
        try:
            with capture_logs() as logged:
                ends[await end_of(login, host, connect, frames)] += 1
            assert not SECRETS_IN_LOGS.search(str(logged)), logged
        except BaseException:
            print(f"login {number} of seed {seed}: {connect!r}")
            raise
        finally:
            login.stop()
    await checks.close()
    print(dict(ends))
    assert min(ends[each] for each in ("refused", "refreshed", "refresh refused")) > FRAMES // 100


async def end_of(login: Login, host: Host, connect: pb.CommandConnect, frames: AuthFrames) -> str:
    """Log in, then answer a challenge; how it ended."""
    try:
        await login.log_in(connect)
    except AuthenticationFailed:
        assert host.principal is None
        return "refused"
    assert host.principal is not None
    before = host.principal.roles
    assert set(before) <= {"joe", "bob", "carol", "gate"} or connect.auth_data != TOKEN
    assert all(each.isprintable() and each == each.strip() and each for each in before)
    response = frames.response()
    if response is None:
        return "logged in"
    with pytest.raises(ProtocolViolation):  # Nobody has asked.
        await login.refresh(response)
    login._challenge()  # noqa: SLF001 - no fuzzer waits until credentials expire
    assert host.challenges == 1
    try:
        await login.refresh(response)
    except AuthenticationFailed:
        return "refresh refused"
    assert login.state is LoginState.LOGGED_IN
    assert host.principal.roles == before
    return "refreshed"


def test_mutated_challenges_at_the_client() -> None:
    """The client answers each challenge once, or ends the connection; it raises nothing."""
    seed = chosen_seed(SEED)
    show_seed(seed)
    rng = random.Random(seed)
    fuzzer = Fuzzer(rng, BREAKING)
    challenge = pb.AuthData(auth_method_name="token", auth_data=b"PulsarAuthRefresh")
    sent = [
        basecommand(Kind.AUTH_CHALLENGE, pb.CommandAuthChallenge(challenge=challenge)),
        basecommand(Kind.AUTH_CHALLENGE, pb.CommandAuthChallenge()),
        basecommand(Kind.CONNECTED, pb.CommandConnected(server_version="x", protocol_version=21)),
        basecommand(
            Kind.ERROR, pb.CommandError(request_id=1, error=pb.MetadataError, message="no")
        ),
    ]
    ended = 0
    for number in range(FRAMES):
        shell = RecordingShell()
        client = ready_core(shell) if rng.randrange(2) else core(shell)
        if client.state is ConnectionState.UNSENT:
            client.begin(0.0)
        data = b""
        for _ in range(rng.choice((1, 2, 5))):
            command = pb.BaseCommand()
            command.CopyFrom(rng.choice(sent))
            data += fuzzer.mutate(command).data
        try:
            client.received(data, 1.0)
            for _ in shell.challenges:
                client.prove(b"secret")
        except BaseException:
            print(f"frames {number} of seed {seed}: {data.hex()}")
            raise
        ended += len(shell.ends)
        assert len(shell.ends) == (client.state is ConnectionState.ENDED)
        answers = shell.kinds.count(Kind.AUTH_RESPONSE)
        assert answers == (0 if shell.ends else len(shell.challenges))
    assert FRAMES // 50 < ended < FRAMES
