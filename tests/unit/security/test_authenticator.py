"""The authenticator: providers in order, the anonymous role, proxies, failures, counters."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import pytest
import structlog

from config.bounds import EXPIRING_TOKEN_MINUTES, FAILED_LOGIN_DELAY_MIN_S
from security.authenticator import ANONYMOUS, PROXY, Authenticator, OriginalClient
from security.errors import CredentialsRefused, Refusal
from security.failed_logins import FailedLogins
from security.identity import Identity, Method, Principal, Role
from security.providers import Credentials

ADDRESS: Final = "192.0.2.1"
NOW_S: Final = 1_000_000.0
WEBSOCKET_DUMMY: Final = "__websocket_dummy_original_principle"


@dataclass
class FakeProvider:
    """Takes the bytes of the credentials that are listed, each for a role."""

    name: str
    method: Method
    roles: dict[bytes, str] = field(default_factory=dict)
    expires_at_s: float | None = None
    refusal: CredentialsRefused = field(
        default_factory=lambda: CredentialsRefused(Refusal.INVALID_TOKEN, "It is none of ours.")
    )
    seen: list[Credentials] = field(default_factory=list)

    async def authenticate(self, credentials: Credentials) -> Identity:
        self.seen.append(credentials)
        role = self.roles.get(credentials.data)
        if role is None:
            raise self.refusal
        return Identity(Role(role), self.method, self.expires_at_s)


@dataclass
class Made:
    """An authenticator, and the times for which it held answers back."""

    authenticator: Authenticator
    delays_s: list[float]

    async def login(self, method: str, data: bytes = b"", address: str = ADDRESS) -> Identity:
        return await self.authenticator.authenticate(Credentials(method, data), address=address)

    async def refusal_of(self, method: str, data: bytes = b"") -> CredentialsRefused:
        with pytest.raises(CredentialsRefused) as refused:
            await self.login(method, data)
        return refused.value


def make(
    *providers: FakeProvider,
    anonymous_role: str | None = None,
    proxy_roles: Sequence[str] = ("proxy", "proxy2"),
    authenticate_original_client: bool = False,
) -> Made:
    delays_s: list[float] = []

    async def sleep(delay_s: float) -> None:
        delays_s.append(delay_s)

    made = Authenticator(
        providers,
        failed_logins=FailedLogins(lambda: 0.0),
        now_s=lambda: NOW_S,
        anonymous_role=None if anonymous_role is None else Role(anonymous_role),
        proxy_roles=frozenset(map(Role, proxy_roles)),
        authenticate_original_client=authenticate_original_client,
        sleep=sleep,
    )
    return Made(made, delays_s)


def tokens(**more: str) -> FakeProvider:
    roles = {b"alice's": "alice", b"proxy's": "proxy"}
    return FakeProvider(
        "token", Method.TOKEN, roles | {name.encode(): role for name, role in more.items()}
    )


# Providers


async def test_providers_of_a_method_are_asked_in_order() -> None:
    first = FakeProvider("token", Method.TOKEN, {b"1": "alice", b"both": "alice"})
    second = FakeProvider("oidc", Method.TOKEN, {b"2": "bob", b"both": "bob"})
    other = FakeProvider("basic", Method.BASIC, {b"2": "carol"})
    made = make(first, other, second)
    assert [(await made.login("token", data)).role for data in (b"1", b"2", b"both")] == [
        "alice",
        "bob",
        "alice",
    ]
    assert not other.seen
    assert made.authenticator.enabled
    assert made.authenticator.counters.successes == {
        ("token", Method.TOKEN): 2,
        ("oidc", Method.TOKEN): 1,
    }
    assert not made.authenticator.counters.failures


async def test_refusals_of_several_providers_are_one() -> None:
    first, second = FakeProvider("token", Method.TOKEN), FakeProvider("oidc", Method.TOKEN)
    second.refusal = CredentialsRefused(Refusal.UNSUPPORTED_ISSUER, "Another issuer.")
    made = make(first, second)
    error = await made.refusal_of("token", b"x")
    assert error.reason is Refusal.UNSUPPORTED_ISSUER
    assert str(error) == "token: It is none of ours.; oidc: Another issuer."
    first.refusal = CredentialsRefused(Refusal.INVALID_TOKEN, "It expired.", expired=True)
    error = await made.refusal_of("token", b"x")
    assert (error.reason, error.expired) == (Refusal.INVALID_TOKEN, True)
    counters = made.authenticator.counters
    assert counters.expired == 1
    assert counters.failures == {
        ("token", Method.TOKEN, Refusal.INVALID_TOKEN): 2,
        ("oidc", Method.TOKEN, Refusal.UNSUPPORTED_ISSUER): 2,
    }


async def test_a_provider_gets_the_address_and_the_certificate() -> None:
    provider = FakeProvider("tls", Method.TLS, {b"": "alice"})
    made = make(provider)
    credentials = Credentials("tls", certificate=b"DER")
    await made.authenticator.authenticate(credentials, address=ADDRESS)
    assert provider.seen == [Credentials("tls", certificate=b"DER", address=ADDRESS)]


@pytest.mark.parametrize("method", ["basic", "sasl", "TOKEN", "token ", "none", ""])
async def test_a_method_without_a_provider_is_refused(method: str) -> None:
    provider = tokens()
    made = make(provider)
    assert (await made.refusal_of(method, b"alice's")).reason is Refusal.UNSUPPORTED_METHOD
    assert not provider.seen


# The anonymous role


@pytest.mark.parametrize("method", ["none", ""])
async def test_the_anonymous_role_is_for_peers_without_credentials(method: str) -> None:
    made = make(tokens(), anonymous_role="guest")
    assert await made.login(method) == made.authenticator.anonymous
    assert made.authenticator.anonymous == Identity(Role("guest"), Method.NONE)
    assert made.authenticator.counters.successes == {(ANONYMOUS, Method.NONE): 1}


@pytest.mark.parametrize(
    ("method", "data", "reason"),
    [
        ("none", b"x", Refusal.UNSUPPORTED_METHOD),
        ("", b"x", Refusal.UNSUPPORTED_METHOD),
        ("sasl", b"", Refusal.UNSUPPORTED_METHOD),
        ("basic", b"", Refusal.UNSUPPORTED_METHOD),
        ("token", b"", Refusal.INVALID_TOKEN),
        ("token", b"wrong", Refusal.INVALID_TOKEN),
    ],
)
async def test_credentials_that_are_refused_do_not_get_the_anonymous_role(
    method: str, data: bytes, reason: Refusal
) -> None:
    made = make(tokens(), anonymous_role="guest")
    assert (await made.refusal_of(method, data)).reason is reason


async def test_no_credentials_are_refused_without_an_anonymous_role() -> None:
    made = make(tokens())
    assert made.authenticator.anonymous is None
    assert (await made.refusal_of("none")).reason is Refusal.AUTH_REQUIRED


async def test_a_peer_without_credentials_is_refused_at_once_and_does_not_count() -> None:
    """Probes and scrapes of open paths must not stop the passwords of their address."""
    made = make(tokens())
    with structlog.testing.capture_logs() as lines:
        for _ in range(100):
            assert (await made.refusal_of("none")).reason is Refusal.AUTH_REQUIRED
    authenticator = made.authenticator
    assert not lines
    assert not made.delays_s
    assert authenticator.failed_logins.count == 0
    assert authenticator.counters.failures[ANONYMOUS, Method.NONE, Refusal.AUTH_REQUIRED] == 100


async def test_nobody_gets_in_while_authentication_is_off() -> None:
    made = make(anonymous_role="guest")
    assert not made.authenticator.enabled
    for method in ("none", "token"):
        await made.refusal_of(method)


# Failures


async def test_the_answer_to_a_failed_login_is_held_back() -> None:
    made = make(tokens())
    await made.login("token", b"alice's")
    assert not made.delays_s
    for _ in range(3):
        await made.refusal_of("token", b"wrong")
    assert made.delays_s[0] == FAILED_LOGIN_DELAY_MIN_S
    assert made.delays_s == sorted(made.delays_s)
    assert made.authenticator.failed_logins.count == 3


async def test_failed_logins_are_logged_without_what_the_peer_sent() -> None:
    made = make(tokens())
    with structlog.testing.capture_logs() as lines:
        for _ in range(5):
            await made.refusal_of("token", b"secret")
        with pytest.raises(CredentialsRefused):
            await made.login("secret", b"secret", address="192.0.2.2")
    assert [(line["event"], line["address"], line["method"]) for line in lines] == [
        ("login_failed", ADDRESS, "token"),
        ("login_failed", "192.0.2.2", "other"),
    ]
    assert "secret" not in str(lines)


async def test_the_time_left_of_credentials_is_counted() -> None:
    provider = tokens()
    made = make(provider)
    for minutes in (None, 4, 5, 30, 10**9):
        provider.expires_at_s = None if minutes is None else NOW_S + 60 * minutes
        await made.login("token", b"alice's")
    counters = made.authenticator.counters
    assert counters.minutes_left[:3] == [2, 0, 1]
    assert counters.minutes_left[-1] == 1
    assert len(counters.minutes_left) == len(EXPIRING_TOKEN_MINUTES) + 1
    assert counters.minutes_left_sum == 39 + 10**9


def test_challenges_name_the_schemes_of_http() -> None:
    certificates = FakeProvider("tls", Method.TLS)
    passwords = FakeProvider("basic", Method.BASIC)
    oidc = FakeProvider("oidc", Method.TOKEN)
    challenges = make(certificates, oidc, passwords, tokens()).authenticator.challenges
    assert [each.split()[0] for each in challenges] == ["Bearer", "Basic"]


async def test_closing_closes_the_providers() -> None:
    closed = []

    async def close() -> None:
        closed.append(1)

    authenticator = Authenticator(
        [], failed_logins=FailedLogins(lambda: 0.0), now_s=lambda: NOW_S, closers=[close, close]
    )
    await authenticator.close()
    assert closed == [1, 1]


# Proxies

ALICE = Identity(Role("alice"), Method.TOKEN, NOW_S + 60)
OF_PROXY = Identity(Role("proxy"), Method.TLS, NOW_S + 30)


async def principal_of(made: Made, own: Identity, original: OriginalClient | None) -> Principal:
    return await made.authenticator.principal_of(own, original, address=ADDRESS)


async def is_refused(made: Made, own: Identity, original: OriginalClient | None) -> bool:
    with pytest.raises(CredentialsRefused) as refused:
        await principal_of(made, own, original)
    counted = (PROXY, own.method, Refusal.INVALID_ROLES) in made.authenticator.counters.failures
    return refused.value.reason is Refusal.INVALID_ROLES and counted


@pytest.mark.parametrize(
    "original", [None, OriginalClient(), OriginalClient(""), OriginalClient("alice")]
)
async def test_a_client_of_its_own_is_its_principal(original: OriginalClient | None) -> None:
    assert await principal_of(make(tokens()), ALICE, original) == Principal(ALICE)


@pytest.mark.parametrize(
    "original",
    [
        OriginalClient("bob"),
        OriginalClient(" alice"),
        OriginalClient(WEBSOCKET_DUMMY),
        OriginalClient(None, Credentials("token", b"alice's")),
        OriginalClient("alice", Credentials("token", b"alice's")),
    ],
)
async def test_a_role_that_is_no_proxy_s_may_name_no_client(original: OriginalClient) -> None:
    assert await is_refused(make(tokens()), ALICE, original)


@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("name", [None, "", " ", "a*", "proxy", "proxy2", "a\x00b", "x" * 1000])
async def test_a_proxy_must_name_the_role_of_a_client(name: str | None, checks: bool) -> None:
    made = make(tokens(), authenticate_original_client=checks)
    assert await is_refused(made, OF_PROXY, OriginalClient(name))
    assert await is_refused(made, OF_PROXY, None)


@pytest.mark.parametrize("name", ["alice", WEBSOCKET_DUMMY])
async def test_the_word_of_a_proxy_is_believed(name: str) -> None:
    principal = await principal_of(make(tokens()), OF_PROXY, OriginalClient(name))
    assert (principal.role, principal.proxy) == (name, OF_PROXY)
    assert principal.expires_at_s == OF_PROXY.expires_at_s
    assert [each.role for each in principal.identities] == [name, "proxy"]


async def test_credentials_that_are_not_checked_prove_nothing() -> None:
    original = OriginalClient(None, Credentials("token", b"alice's"))
    assert await is_refused(make(tokens()), OF_PROXY, original)


async def test_the_credentials_of_the_client_are_checked_too() -> None:
    provider = tokens()
    provider.expires_at_s = NOW_S + 10
    made = make(provider, authenticate_original_client=True)
    for name in (None, "", "alice"):
        original = OriginalClient(name, Credentials("token", b"alice's", b"the proxy's own"))
        principal = await principal_of(made, OF_PROXY, original)
        assert principal == Principal(Identity(Role("alice"), Method.TOKEN, NOW_S + 10), OF_PROXY)
    assert all(each.certificate is None for each in provider.seen)


@pytest.mark.parametrize(
    "original",
    [
        OriginalClient("alice"),
        OriginalClient("bob", Credentials("token", b"alice's")),
        OriginalClient(None, Credentials("token", b"proxy's")),
        OriginalClient("proxy", Credentials("token", b"proxy's")),
    ],
)
async def test_a_pair_that_does_not_fit_is_refused(original: OriginalClient) -> None:
    made = make(tokens(), authenticate_original_client=True)
    assert await is_refused(made, OF_PROXY, original)


async def test_failures_behind_a_proxy_count_for_the_client_that_is_named() -> None:
    basic = FakeProvider("basic", Method.BASIC)
    made = make(tokens(), basic, authenticate_original_client=True)
    for _ in range(20):
        with pytest.raises(CredentialsRefused) as refused:
            await principal_of(
                made, OF_PROXY, OriginalClient("mallory", Credentials("basic", b"wrong"))
            )
        assert refused.value.reason is Refusal.INVALID_TOKEN
    failed = made.authenticator.failed_logins
    assert not failed.may_check(f"{ADDRESS} mallory")
    assert failed.may_check(f"{ADDRESS} alice")
    assert failed.may_check(ADDRESS)


async def test_client_with_an_expired_token_does_not_stop_passwords_of_its_address() -> None:
    made = make(tokens())
    for _ in range(20):
        await made.refusal_of("token", b"expired")
    assert made.authenticator.failed_logins.may_check(ADDRESS)


async def test_logins_at_the_same_time_do_not_wait_for_one_that_is_held_back() -> None:
    released = asyncio.Event()

    async def sleep(_: float) -> None:
        await released.wait()

    authenticator = Authenticator(
        [tokens()], failed_logins=FailedLogins(lambda: 0.0), now_s=lambda: NOW_S, sleep=sleep
    )
    wrong = asyncio.create_task(
        authenticator.authenticate(Credentials("token", b"wrong"), address=ADDRESS)
    )
    await asyncio.sleep(0)
    right = Credentials("token", b"alice's")
    assert (await authenticator.authenticate(right, address=ADDRESS)).role == "alice"
    assert not wrong.done()
    released.set()
    with pytest.raises(CredentialsRefused):
        await wrong
