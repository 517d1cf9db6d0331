"""Entry bodies against values that bookies and the Java client were seen to use."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.ledger.bookkeeper.digest import Digest, DigestMismatch, mac_key, master_key
from storage.ledger.bookkeeper.ledger_metadata import DigestType
from storage.ledger.store import CorruptEntry

SECRET = b"secret"
LONG = st.integers(-(2**63), 2**63 - 1)
PROTECTING = [each for each in DigestType if each is not DigestType.DUMMY]


def body(digest: Digest, ledger: int, entry: int, lac: int, length: int, data: bytes) -> bytes:
    return b"".join(digest.seal(ledger, entry, lac, length, data))


def test_keys() -> None:
    assert master_key(SECRET).hex() == "e793cbc379107648537183605cd361d3bb789a39"
    assert master_key(b"").hex() == "850bf1071c5e3d8c24235676f8816ae0cbe2f14f"
    assert mac_key(SECRET).hex() == "190c685bae851574f5ab47c960a00c0466f96603"


@pytest.mark.parametrize(
    ("digest_type", "expected"),
    [
        (DigestType.CRC32C, "68c84e7f"),
        (DigestType.CRC32, "0000000090470241"),
        (DigestType.MAC, "6eabbe2cee25b371bc3a99e122c7219b04cdd6b3"),
        (DigestType.DUMMY, ""),
    ],
)
def test_digest_of_the_first_entry(digest_type: DigestType, expected: str) -> None:
    digest = Digest(digest_type, SECRET)
    made = body(digest, 3, 0, -1, 7, b"entry-0")
    assert made == struct.pack(">qqqq", 3, 0, -1, 7) + bytes.fromhex(expected) + b"entry-0"
    assert digest.digest_bytes == len(expected) // 2
    assert digest.overhead_bytes == len(made) - 7


def test_digest_of_the_second_entry() -> None:
    made = body(Digest(DigestType.CRC32C, SECRET), 3, 1, 0, 14, b"entry-1")
    assert made[32:36].hex() == "d97ba0b7"


def test_data_is_not_copied() -> None:
    data = bytes(100)
    pieces = Digest(DigestType.CRC32C, b"").seal(1, 2, 1, 300, data)
    assert pieces[-1] is data
    assert len(pieces) == 2


@pytest.mark.parametrize("digest_type", DigestType)
@given(ledger=LONG, entry=LONG, lac=LONG, length=LONG, data=st.binary(max_size=100))
def test_sealed_entry_opens_unchanged(
    digest_type: DigestType, ledger: int, entry: int, lac: int, length: int, data: bytes
) -> None:
    digest = Digest(digest_type, b"pw")
    made = body(digest, ledger, entry, lac, length, data)
    for asked in (entry, None):
        assert digest.open(made, ledger, asked) == (entry, lac, length, data)


@pytest.mark.parametrize("digest_type", PROTECTING)
def test_every_changed_byte_is_found(digest_type: DigestType) -> None:
    digest = Digest(digest_type, SECRET)
    made = body(digest, 3, 0, -1, 7, b"entry-0")
    for place in range(len(made)):
        changed = bytearray(made)
        changed[place] ^= 1
        with pytest.raises(DigestMismatch):
            digest.open(bytes(changed), 3, None if place < 16 else 0)


@pytest.mark.parametrize("digest_type", PROTECTING)
def test_truncated_entry_fails_the_digest(digest_type: DigestType) -> None:
    digest = Digest(digest_type, SECRET)
    made = body(digest, 3, 0, -1, 7, b"entry-0")
    for size in range(len(made)):
        with pytest.raises(DigestMismatch):
            digest.open(made[:size], 3, 0)


@pytest.mark.parametrize("digest_type", DigestType)
def test_another_entry_is_refused(digest_type: DigestType) -> None:
    digest = Digest(digest_type, SECRET)
    made = body(digest, 3, 5, 4, 7, b"x")
    with pytest.raises(DigestMismatch, match="entry 6 of ledger 3"):
        digest.open(made, 3, 6)
    with pytest.raises(DigestMismatch, match="of ledger 4"):
        digest.open(made, 4, None)
    assert issubclass(DigestMismatch, CorruptEntry)


def test_another_password_is_found_by_a_mac_only() -> None:
    made = body(Digest(DigestType.MAC, b"one"), 3, 0, -1, 1, b"x")
    with pytest.raises(DigestMismatch):
        Digest(DigestType.MAC, b"two").open(made, 3, 0)
