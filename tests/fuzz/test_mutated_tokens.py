"""Mutated tokens: each proves a role that was signed, or is refused, and nothing else is raised.

The tokens are those of one seed, so that a change is judged by itself; at night, and by `make
fuzz`, others are drawn.
"""

import base64
import hmac
import json
import random
from typing import Final, NamedTuple

import pytest

from config.bounds import TOKEN_BYTES
from security.errors import CredentialsRefused
from security.token_keys import ALGORITHMS, TokenKeys, public_key, secret_key
from security.tokens import TokenChecker, TokenRules, parse_token
from tests.support.effort import by_effort, chosen_seed, show_seed
from tests.support.pulsar_tokens import PUBLIC_KEYS, SECRETS

SEED: Final = 1_404_224_517
TOKENS: Final = by_effort(quick=20_000, whole=100_000, nightly=5_000_000)
NOW_S: Final = 1_800_000_000.0
SECRET: Final = base64.b64decode(SECRETS["HS512"].key)
CHECKER: Final = TokenChecker(
    TokenKeys(
        [
            secret_key(SECRET, "secret", "k1"),
            *(public_key(base64.b64decode(made.key), "pair") for made in PUBLIC_KEYS.values()),
        ]
    ),
    TokenRules(clock_skew_s=30.0),
)
WHOLE: Final = [made.token.encode() for made in (*SECRETS.values(), *PUBLIC_KEYS.values())]
HEADERS: Final = [
    *(json.dumps({"alg": name}).encode() for name in (*ALGORITHMS, "none", "None", "")),
    *(b'{"alg":"HS256","kid":"k1"}', b'{"typ":"JWT","alg":"HS256"}', b"{}"),
    b'{"alg":"HS256","crit":["exp"],"exp":1}',
]
CLAIMS: Final = [
    *(b'{"sub":"joe"}', b'{"sub":["joe","x"]}', b'{"sub":"joe","exp":1800000001,"nbf":1}'),
    *(b'{"sub":"joe","exp":1799999990.5}', b'{"sub":"joe","x":[1,{"y":null}]}', b"{}"),
]
PIECES: Final = [
    *(
        b".",
        b"..",
        b"=",
        b"_",
        b"-",
        b"+",
        b" ",
        b"\n",
        b"\x00",
        b"\xff",
        b"\xc3\xa9",
        b"\xed\xa0\x80",
    ),
    *(b"{", b"}", b"[", b"]", b'"', b"\\", b"\\u0000", b"\\ud800", b",", b":", b"null", b"true"),
    *(b"NaN", b"-Infinity", b"1e999", b"-1", b"1e-400", b"9" * 400, b"9" * 5000, b"[" * 3000),
    *(b'"exp":', b'"nbf":', b'"sub":', b'"alg":"none",', b'"crit":[],', b'"kid":{},', b"*"),
]


class Mutated(NamedTuple):
    """A token, and whether it was signed after it was mutated."""

    data: bytes
    signed: bool


def mutated_bytes(random_: random.Random, data: bytes, most: int) -> bytes:
    for _ in range(random_.randint(0, most)):
        at = random_.randint(0, len(data))
        match random_.randrange(6):
            case 0:
                data = data[:at] + random_.choice(PIECES) + data[at:]
            case 1:
                data = data[:at] + data[at + random_.randint(1, 8) :]
            case 2:
                data = data[:at] + bytes([random_.randrange(256)]) + data[at + 1 :]
            case 3:
                data = data[:at]
            case 4:
                other = random_.randint(0, len(data))
                data = data[: max(at, other)] + data[min(at, other) :]
            case 5:
                data = data[:at] + random_.randbytes(random_.randint(1, 16)) + data[at:]
    return data


def part(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def mutated_token(random_: random.Random) -> Mutated:
    if random_.random() < 0.5:
        return Mutated(mutated_bytes(random_, random_.choice(WHOLE), 3), False)
    header = mutated_bytes(random_, random_.choice(HEADERS), 1)
    signed = part(header) + b"." + part(mutated_bytes(random_, random_.choice(CLAIMS), 2))
    digest = random_.choice(["sha256", "sha384", "sha512"])
    return Mutated(signed + b"." + part(hmac.digest(SECRET, signed, digest)), True)


@pytest.mark.timeout(120 + TOKENS // 2_000)
def test_mutated_tokens() -> None:
    seed = chosen_seed(SEED)
    show_seed(seed)
    random_ = random.Random(seed)
    originals = {parse_token(token).signed for token in WHOLE}
    taken = refused = 0
    for number in range(TOKENS):
        token = mutated_token(random_)
        try:
            identity = CHECKER.check(token.data, NOW_S)
        except CredentialsRefused:
            refused += 1
            continue
        except BaseException:
            print(f"token {number} of seed {seed}: {token.data!r}")
            raise
        taken += 1
        assert identity.role
        assert not identity.expired(NOW_S)
        assert len(token.data) <= TOKEN_BYTES
        # What was not signed anew is taken only with the header and claims that were signed.
        assert token.signed or parse_token(token.data).signed in originals
    print(f"{taken} taken, {refused} refused")
    assert min(taken, refused) > TOKENS // 50
