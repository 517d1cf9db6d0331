"""Password files: lines `user:hash`, as Apache's `htpasswd` writes them.  Pure.

Hashes are bcrypt (`$2a$`, `$2b$`, `$2y$`) or `$apr1$`, which is Apache's MD5; all others are
refused when the file is read, because they are weak or, as with DES, regard eight characters alone.

The time that a check takes does not tell whether a user exists: a password for an unknown user is
checked against the hash of a known one, always the same for the same name, and the result is not
used.  So with hashes of several kinds, too, unknown users behave as known ones do.
"""

import hashlib
import hmac
import re
from typing import Final

import bcrypt

from config.bounds import (
    BCRYPT_COST_MAX,
    PASSWORD_BYTES,
    PASSWORD_FILE_BYTES,
    PASSWORD_FILE_USERS,
)
from security.errors import CredentialsRefused, InvalidSecret, Refusal
from security.identity import InvalidRole, Role, role_of

BCRYPT_PASSWORD_BYTES: Final = 72
"""bcrypt regards no more of a password than this."""
# The last characters of a salt and of a hash hold two and four bits; the others of them are 0.
_BCRYPT: Final = re.compile(
    r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{21}[.Oeu][./A-Za-z0-9]{30}[.CGKOSWaeimquy26]"
)
_APR1: Final = re.compile(r"\$apr1\$([./0-9A-Za-z]{1,8})\$([./0-9A-Za-z]{21}[./01])")
_APR1_ROUNDS: Final = 1000
_APR1_ALPHABET: Final = b"./0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_APR1_GROUPS: Final = ((0, 6, 12), (1, 7, 13), (2, 8, 14), (3, 9, 15), (4, 10, 5))
"""The bytes of the digest that each four characters of the hash stand for, the highest one first;
two more characters are for byte 11."""


class PasswordFile:
    """The users of a password file and the hashes of their passwords."""

    __slots__ = ("_hashes", "_key", "_stand_ins")

    def __init__(self, hashes: dict[Role, bytes]) -> None:
        """`hashes` has a user at least; each hash has one of the two forms above."""
        self._hashes = hashes
        self._stand_ins = tuple(hashes[user] for user in sorted(hashes))
        # Which hash stands in for an unknown user must not be known outside; the hashes are not.
        self._key = hashlib.sha256(b"\n".join(self._stand_ins)).digest()

    def __len__(self) -> int:
        return len(self._hashes)

    def __repr__(self) -> str:
        return f"PasswordFile({len(self)} users)"

    def check(self, user: str, password: bytes) -> Role:
        """Return the role of the user if this is its password.

        A check takes milliseconds with apr1, and up to seconds with bcrypt, without the GIL: call
        it on a thread.  Raises `CredentialsRefused`.
        """
        if not password or len(password) > PASSWORD_BYTES or b"\0" in password:
            raise CredentialsRefused(
                Refusal.INVALID_AUTH_DATA,
                f"The password is empty, longer than {PASSWORD_BYTES} bytes or has a zero byte.",
            )
        stored = self._hashes.get(Role(user))
        matches = _matches(password, self._stand_in(user) if stored is None else stored)
        if stored is None:
            raise CredentialsRefused(Refusal.INVALID_AUTH_DATA, "There is no such user.")
        if not matches:
            raise CredentialsRefused(Refusal.INVALID_TOKEN, "The password is wrong.")
        return Role(user)

    def _stand_in(self, user: str) -> bytes:
        digest = hmac.digest(self._key, user.encode("utf-8", "surrogatepass"), "sha256")
        return self._stand_ins[int.from_bytes(digest[:8]) % len(self._stand_ins)]


def parse_password_file(content: bytes, source: str) -> PasswordFile:
    """Parse the content of a file; `source` names it in errors.

    Each line is `user:hash` with exactly one colon; empty lines, and lines that begin with `#`, are
    left out, as Apache does.  Raises `InvalidSecret`, which names the line and the user.
    """
    if len(content) > PASSWORD_FILE_BYTES:
        raise InvalidSecret(
            f"{source} has more than {PASSWORD_FILE_BYTES} bytes: remove users from it."
        )
    try:
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise InvalidSecret(f"{source} is not UTF-8: save it as that.") from error
    hashes: dict[Role, bytes] = {}
    for number, line in enumerate((each.removesuffix("\r") for each in lines), start=1):
        if line and not line.startswith("#"):
            user, stored = _parse_line(line, f"Line {number} of {source}")
            if user in hashes:
                raise InvalidSecret(
                    f"{source} has more than one line for the user {user!r}: remove all but one."
                )
            hashes[user] = stored
    if not hashes:
        raise InvalidSecret(
            f"{source} has no users: add one with `htpasswd -B FILE USER`, or take 'basic' out of "
            "authentication_providers."
        )
    if len(hashes) > PASSWORD_FILE_USERS:
        raise InvalidSecret(
            f"{source} has more than {PASSWORD_FILE_USERS} users: remove some of them."
        )
    return PasswordFile(hashes)


def _parse_line(line: str, where: str) -> tuple[Role, bytes]:
    name, *rest = line.split(":")
    if len(rest) != 1:
        # Not even the part before the first colon is shown: it may be a password.
        raise InvalidSecret(f"{where} does not have the form user:hash, with one colon: mend it.")
    try:
        user = role_of(name)
    except InvalidRole as error:
        raise InvalidSecret(f"{where} has a user that is no role. {error} Rename it.") from error
    (stored,) = rest
    bcrypt_form = _BCRYPT.fullmatch(stored)
    if bcrypt_form is None and _APR1.fullmatch(stored) is None:
        raise InvalidSecret(
            f"{where}: the hash of the user {user!r} is neither bcrypt nor apr1: make it anew with "
            f"`htpasswd -B FILE {user}`."
        )
    if bcrypt_form is not None and not 4 <= int(bcrypt_form[1]) <= BCRYPT_COST_MAX:
        raise InvalidSecret(
            f"{where}: the bcrypt hash of the user {user!r} has the cost {bcrypt_form[1]}, which "
            f"may be 4 to {BCRYPT_COST_MAX}: make it anew with `htpasswd -B -C 10 FILE {user}`."
        )
    return user, stored.encode("ascii")


def _matches(password: bytes, stored: bytes) -> bool:
    apr1 = _APR1.fullmatch(stored.decode("ascii"))
    if apr1 is not None:
        made = hash_apr1(password, apr1[1].encode("ascii"))
        return hmac.compare_digest(made, apr1[2].encode("ascii"))
    if len(password) > BCRYPT_PASSWORD_BYTES:
        # It is refused and not shortened: any end would do behind the first 72 bytes.
        return False
    return bcrypt.checkpw(password, stored)


def hash_apr1(password: bytes, salt: bytes) -> bytes:
    """Return the 22 characters of the `$apr1$` hash of a password, with a salt of 1 to 8 bytes.

    The algorithm is the MD5 one of FreeBSD's crypt, with the name apr1 in place of 1.
    """
    digest = _apr1_start(password, salt)
    for number in range(_APR1_ROUNDS):
        odd = number & 1
        step = hashlib.md5(password if odd else digest)
        if number % 3:
            step.update(salt)
        if number % 7:
            step.update(password)
        step.update(digest if odd else password)
        digest = step.digest()
    characters = bytearray()
    for high, middle, low in _APR1_GROUPS:
        characters += _apr1_text(digest[high] << 16 | digest[middle] << 8 | digest[low], 4)
    return bytes(characters + _apr1_text(digest[11], 2))


def _apr1_start(password: bytes, salt: bytes) -> bytes:
    """The digest that the rounds begin with."""
    size = len(password)
    inner = hashlib.md5(password + salt + password).digest()
    start = hashlib.md5(password + b"$apr1$" + salt)
    start.update((inner * (size // len(inner) + 1))[:size])
    # One byte for each bit of the length, the lowest one first.
    for shift in range(size.bit_length()):
        start.update(b"\0" if size >> shift & 1 else password[:1])
    return start.digest()


def _apr1_text(number: int, characters: int) -> bytes:
    """The lowest six bits come first."""
    return bytes(_APR1_ALPHABET[number >> 6 * place & 63] for place in range(characters))
