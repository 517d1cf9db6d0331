"""The provider of names and passwords: the method `basic`.

Checks of passwords are slow on purpose.  So they run on threads, BASIC_CHECKS_AT_ONCE of them, for
which the addresses of clients take turns.  A login that was valid is remembered for a while, by a
keyed hash: after a restart of the broker all connections of one user cost one check, and so do the
requests of a tool over REST.
"""

import asyncio
import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from config.bounds import (
    BASIC_CHECKS_AT_ONCE,
    BASIC_CHECKS_WAITING,
    BASIC_REMEMBERED_LOGINS,
    BASIC_REMEMBERED_S,
)
from security.addresses import address_key
from security.errors import CredentialsRefused, Refusal
from security.failed_logins import FailedLogins
from security.identity import Identity, Method, Role
from security.password_file import PasswordFile
from security.providers import Credentials
from security.turns import TooManyWait, Turns


class BasicProvider:
    """Checks `user:password` against a password file.

    `failed_logins` has the wrong passwords of each address: they decide whether a password is
    checked, and which address is next.
    `now_s` is a monotonic clock in seconds.  Close it in the end.
    """

    name: Final = "basic"
    method: Final = Method.BASIC

    def __init__(
        self,
        passwords: PasswordFile,
        *,
        failed_logins: FailedLogins,
        now_s: Callable[[], float],
        most_waiting: int = BASIC_CHECKS_WAITING,
        most_remembered: int = BASIC_REMEMBERED_LOGINS,
    ) -> None:
        self._failed_logins = failed_logins
        self._now_s = now_s
        self._most_remembered = most_remembered
        # One value: another thread replaces both at once.
        self._current = passwords, _RememberedLogins(now_s, most_remembered)
        self._turns = Turns(BASIC_CHECKS_AT_ONCE, most_waiting, failed_logins.wrong_passwords)
        self._threads = ThreadPoolExecutor(BASIC_CHECKS_AT_ONCE, "password-check")

    def use(self, passwords: PasswordFile) -> None:
        """Check against another file from now on, and forget the logins of the one before.

        May be called in any thread.
        """
        self._current = passwords, _RememberedLogins(self._now_s, self._most_remembered)

    async def authenticate(self, credentials: Credentials) -> Identity:
        """Return the identity of the user whose password this is.

        A login that is remembered needs no check.  Raises `CredentialsRefused`.
        """
        user, password = _split(credentials.data)
        _, remembered = self._current
        if (role := remembered.role_of(credentials.data)) is not None:
            return Identity(role, self.method)
        self._refuse_after_failures(credentials.address)
        try:
            await self._turns.take(address_key(credentials.address))
        except TooManyWait as error:
            raise CredentialsRefused(
                Refusal.TIMED_OUT, "Too many passwords wait to be checked."
            ) from error
        return Identity(await self._check(credentials, user, password), self.method)

    async def close(self) -> None:
        """Drop the checks that wait; those that run end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _check(self, credentials: Credentials, user: str, password: bytes) -> Role:
        """Check a password, and end the turn of its login."""
        passwords, remembered = self._current
        address = credentials.address
        try:
            # While this login waited for its turn, others of its user may have been valid, and
            # others of its address may have failed.
            if (role := remembered.role_of(credentials.data)) is not None:
                self._turns.give_back()
                return role
            self._refuse_after_failures(address)
            loop = asyncio.get_running_loop()
            check = loop.run_in_executor(self._threads, passwords.check, user, password)
        except BaseException:
            self._turns.give_back()
            raise

        def end(done: "asyncio.Future[Role]") -> None:
            if _succeeded(done):
                remembered.add(credentials.data, done.result())
            self._turns.give_back()

        # The check goes on to its end even if its client has left, and holds its thread until then.
        check.add_done_callback(end)
        try:
            return await asyncio.shield(check)
        except asyncio.CancelledError:
            # It counts if it fails: else a client could leave before each answer and guess forever.
            check.add_done_callback(
                lambda done: _succeeded(done) or self._failed_logins.failed(address)
            )
            raise
        finally:
            # The error of a check refers to this frame.  If the frame referred to the check, both
            # would stay in memory until a garbage collection.
            del check

    def _refuse_after_failures(self, address: str) -> None:
        if not self._failed_logins.may_check(address):
            raise CredentialsRefused(
                Refusal.TOO_MANY_FAILURES, "Too many logins from this address failed before."
            )


def _succeeded(check: "asyncio.Future[Role]") -> bool:
    return not check.cancelled() and check.exception() is None


def _split(data: bytes) -> tuple[str, bytes]:
    """Split `user:password` at the first colon: a user has none, a password may have some."""
    if not data:
        raise CredentialsRefused(Refusal.EMPTY_AUTH_DATA, "The user and password are missing.")
    user, colon, password = data.partition(b":")
    try:
        name = user.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CredentialsRefused(Refusal.INVALID_AUTH_DATA, "The user is not UTF-8.") from error
    if not name or not colon:
        raise CredentialsRefused(
            Refusal.INVALID_AUTH_DATA, "The credentials do not have the form user:password."
        )
    return name, password


class _RememberedLogins:
    """Valid logins of the last BASIC_REMEMBERED_S, the newest ones up to a number.

    They are kept as keyed hashes; the key is random and never leaves the process.
    """

    def __init__(self, now_s: Callable[[], float], most: int) -> None:
        self._now_s = now_s
        self._most = most
        self._key = os.urandom(32)
        self._roles: OrderedDict[bytes, tuple[Role, float]] = OrderedDict()

    def role_of(self, data: bytes) -> Role | None:
        """The role of a login that was valid."""
        fingerprint = self._fingerprint(data)
        role, until_s = self._roles.get(fingerprint, (None, 0.0))
        if role is not None and self._now_s() >= until_s:
            del self._roles[fingerprint]
            return None
        return role

    def add(self, data: bytes, role: Role) -> None:
        """Remember a valid login."""
        fingerprint = self._fingerprint(data)
        self._roles[fingerprint] = role, self._now_s() + BASIC_REMEMBERED_S
        self._roles.move_to_end(fingerprint)
        if len(self._roles) > self._most:
            self._roles.popitem(last=False)

    def _fingerprint(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, key=self._key, digest_size=32).digest()
