"""The provider of passwords: few checks at once, on threads, and valid logins remembered."""

import asyncio
import threading
from collections.abc import AsyncIterator

import bcrypt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.bounds import BASIC_CHECKS_AT_ONCE, BASIC_REMEMBERED_S, FAILED_LOGIN_BURST
from security.basic import BasicProvider
from security.errors import CredentialsRefused, Refusal
from security.failed_logins import FailedLogins
from security.identity import Identity, Method, Role
from security.password_file import PasswordFile, parse_password_file
from security.providers import Credentials

BLOCKED = "192.0.2.1"
"""Passwords of this address may not be checked."""
HASH = bcrypt.hashpw(b"hello", bcrypt.gensalt(4)).decode()


class Monotonic:
    """A clock that goes on when the test says so."""

    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


class SlowFile(PasswordFile):
    """Counts its checks, and lets them go on when the test says so."""

    def __init__(self) -> None:
        super().__init__({Role("alice"): HASH.encode()})
        self.go_on = threading.Event()
        self.running = 0
        self.most = 0
        self.checks = 0
        self._lock = threading.Lock()

    def check(self, user: str, password: bytes) -> Role:
        with self._lock:
            self.checks += 1
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            assert self.go_on.wait(30)
            return super().check(user, password)
        finally:
            with self._lock:
                self.running -= 1


def blocking() -> FailedLogins:
    """The failed logins of BLOCKED."""
    failed = FailedLogins(lambda: 0.0)
    for _ in range(FAILED_LOGIN_BURST):
        failed.failed(BLOCKED)
    return failed


def basic(data: str, address: str = "") -> Credentials:
    return Credentials("basic", data.encode(), address=address)


async def refusal_of(provider: BasicProvider, data: bytes) -> Refusal:
    with pytest.raises(CredentialsRefused) as refused:
        await provider.authenticate(Credentials("basic", data))
    return refused.value.reason


@pytest.fixture
def clock() -> Monotonic:
    return Monotonic()


@pytest.fixture
async def file() -> AsyncIterator[SlowFile]:
    slow = SlowFile()
    yield slow
    slow.go_on.set()


@pytest.fixture
async def provider(file: SlowFile, clock: Monotonic) -> AsyncIterator[BasicProvider]:
    made = BasicProvider(file, failed_logins=blocking(), now_s=clock)
    yield made
    await made.close()


async def test_a_login_is_checked(provider: BasicProvider, file: SlowFile) -> None:
    file.go_on.set()
    identity = await provider.authenticate(basic("alice:hello"))
    assert identity == Identity(Role("alice"), Method.BASIC)
    assert await refusal_of(provider, b"alice:wrong") is Refusal.INVALID_TOKEN
    assert await refusal_of(provider, b"bob:hello") is Refusal.INVALID_AUTH_DATA


async def test_a_password_may_have_a_colon() -> None:
    stored = bcrypt.hashpw(b"a:b", bcrypt.gensalt(4)).decode()
    file = parse_password_file(f"alice:{stored}".encode(), "users.htpasswd")
    provider = BasicProvider(file, failed_logins=blocking(), now_s=Monotonic())
    assert (await provider.authenticate(basic("alice:a:b"))).role == "alice"
    await provider.close()


@given(data=st.binary(max_size=40))
def test_broken_credentials_raise_nothing_else(data: bytes) -> None:
    async def main() -> None:
        file = parse_password_file(f"alice:{HASH}".encode(), "users.htpasswd")
        provider = BasicProvider(file, failed_logins=blocking(), now_s=Monotonic())
        await refusal_of(provider, data)
        await provider.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", Refusal.EMPTY_AUTH_DATA),
        (b"alice", Refusal.INVALID_AUTH_DATA),
        (b":hello", Refusal.INVALID_AUTH_DATA),
        (b"\xff:hello", Refusal.INVALID_AUTH_DATA),
    ],
)
async def test_credentials_of_another_form_are_refused_unchecked(
    provider: BasicProvider, file: SlowFile, data: bytes, reason: Refusal
) -> None:
    assert await refusal_of(provider, data) is reason
    assert file.checks == 0


async def test_few_passwords_are_checked_at_once(provider: BasicProvider, file: SlowFile) -> None:
    logins = [asyncio.create_task(refusal_of(provider, b"alice:%d" % each)) for each in range(8)]
    while file.running < BASIC_CHECKS_AT_ONCE:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    logins[0].cancel()  # Its check goes on and holds its thread.
    await asyncio.sleep(0.05)
    assert file.running == BASIC_CHECKS_AT_ONCE
    file.go_on.set()
    await asyncio.gather(*logins, return_exceptions=True)
    assert file.most == BASIC_CHECKS_AT_ONCE


async def test_a_login_above_the_bound_of_those_that_wait_is_refused(file: SlowFile) -> None:
    provider = BasicProvider(file, failed_logins=blocking(), now_s=Monotonic(), most_waiting=2)
    count = BASIC_CHECKS_AT_ONCE + 2
    logins = [
        asyncio.create_task(refusal_of(provider, b"alice:%d" % each)) for each in range(count)
    ]
    await asyncio.sleep(0)
    assert await refusal_of(provider, b"alice:x") is Refusal.TIMED_OUT
    file.go_on.set()
    assert await asyncio.gather(*logins) == [Refusal.INVALID_TOKEN] * count
    await provider.close()


async def test_a_check_whose_client_has_left_holds_its_turn_and_counts(file: SlowFile) -> None:
    """Else one that leaves before each answer could have passwords checked without end."""
    failed = FailedLogins(lambda: 0.0)
    provider = BasicProvider(file, failed_logins=failed, now_s=Monotonic())
    for number in range(4 * FAILED_LOGIN_BURST):
        login = asyncio.create_task(provider.authenticate(basic(f"alice:{number}", "192.0.2.7")))
        await asyncio.sleep(0.001)
        login.cancel()
    assert file.checks <= BASIC_CHECKS_AT_ONCE
    file.go_on.set()
    while failed.count < file.checks:
        await asyncio.sleep(0.01)
    assert failed.count <= BASIC_CHECKS_AT_ONCE
    await provider.close()


async def test_a_user_is_not_kept_waiting_by_guesses_from_other_addresses(file: SlowFile) -> None:
    failed = FailedLogins(lambda: 0.0)
    provider = BasicProvider(file, failed_logins=failed, now_s=Monotonic())
    others = [f"192.0.2.{number}" for number in range(20)]
    for each in others:
        failed.failed(each)
    guesses = [
        asyncio.create_task(refused_from(provider, f"alice:{number}", others[number % 20]))
        for number in range(200)
    ]
    await asyncio.sleep(0)
    login = asyncio.create_task(provider.authenticate(basic("alice:hello", "192.0.2.99")))
    await asyncio.sleep(0)
    file.go_on.set()
    await login
    assert file.checks <= 2 * BASIC_CHECKS_AT_ONCE + 1
    await asyncio.gather(*guesses)
    await provider.close()


async def refused_from(provider: BasicProvider, data: str, address: str) -> None:
    with pytest.raises(CredentialsRefused):
        await provider.authenticate(basic(data, address))


async def test_logins_of_one_user_at_the_same_time_cost_few_checks(
    provider: BasicProvider, file: SlowFile
) -> None:
    file.go_on.set()
    await asyncio.gather(*(provider.authenticate(basic("alice:hello")) for _ in range(50)))
    assert file.checks <= BASIC_CHECKS_AT_ONCE


async def test_a_valid_login_is_remembered_for_a_while(
    provider: BasicProvider, file: SlowFile, clock: Monotonic
) -> None:
    file.go_on.set()
    for _ in range(3):
        await provider.authenticate(basic("alice:hello"))
    assert file.checks == 1
    assert await refusal_of(provider, b"alice:hello2") is Refusal.INVALID_TOKEN
    clock.s += BASIC_REMEMBERED_S
    await provider.authenticate(basic("alice:hello"))
    assert file.checks == 3


async def test_another_file_forgets_remembered_logins(
    provider: BasicProvider, file: SlowFile
) -> None:
    file.go_on.set()
    await provider.authenticate(basic("alice:hello"))
    provider.use(parse_password_file(f"bob:{HASH}".encode(), "users.htpasswd"))
    assert await refusal_of(provider, b"alice:hello") is Refusal.INVALID_AUTH_DATA
    assert (await provider.authenticate(basic("bob:hello"))).role == "bob"


async def test_a_check_of_the_file_before_is_not_remembered_for_the_new_one(
    provider: BasicProvider, file: SlowFile
) -> None:
    login = asyncio.create_task(provider.authenticate(basic("alice:hello")))
    while not file.running:
        await asyncio.sleep(0.01)
    provider.use(parse_password_file(f"bob:{HASH}".encode(), "users.htpasswd"))
    file.go_on.set()
    await login
    assert await refusal_of(provider, b"alice:hello") is Refusal.INVALID_AUTH_DATA


async def test_the_oldest_login_is_forgotten_first() -> None:
    users = parse_password_file(f"alice:{HASH}\nbob:{HASH}".encode(), "users.htpasswd")
    provider = BasicProvider(
        users,
        failed_logins=blocking(),
        now_s=Monotonic(),
        most_remembered=1,
    )
    for user in ("alice", "bob"):
        await provider.authenticate(basic(f"{user}:hello"))
    may_not = [user for user in ("alice", "bob") if not await remembered(provider, user)]
    assert may_not == ["alice"]
    await provider.close()


async def remembered(provider: BasicProvider, user: str) -> bool:
    try:
        data = f"{user}:hello".encode()
        await provider.authenticate(Credentials("basic", data, address=BLOCKED))
    except CredentialsRefused as error:
        return error.reason is not Refusal.TOO_MANY_FAILURES
    return True


async def test_a_login_that_may_not_be_checked_is_refused_unless_remembered(
    provider: BasicProvider, file: SlowFile
) -> None:
    file.go_on.set()
    assert not await remembered(provider, "alice")
    assert file.checks == 0
    await provider.authenticate(basic("alice:hello"))
    assert await remembered(provider, "alice")
