"""Keys of tokens, and the algorithms that fit each.  Pure.

The algorithm of a token is bound to the kind of the key, not to what the token says: a
secret is for HMAC alone, and a public key is never taken for a secret.
"""

import base64
import contextlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    SECP384R1,
    SECP521R1,
    EllipticCurve,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PrivateKey, Ed448PublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.serialization import (
    load_der_private_key,
    load_der_public_key,
    load_pem_private_key,
    load_pem_public_key,
)
from cryptography.x509 import load_der_x509_certificate

from config.bounds import RSA_KEY_BITS_MAX, RSA_KEY_BITS_MIN, TOKEN_KEYS
from security.errors import InvalidSecret

PublicKey = RSAPublicKey | EllipticCurvePublicKey | Ed25519PublicKey | Ed448PublicKey
PrivateKey = RSAPrivateKey | EllipticCurvePrivateKey | Ed25519PrivateKey | Ed448PrivateKey

SECRET_BYTES: Final = {"HS256": 32, "HS384": 48, "HS512": 64}
"""The algorithms of secrets, and the shortest secret of each (RFC 7518, section 3.2)."""
RSA_ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
EC_CURVES: Final[dict[str, type[EllipticCurve]]] = {
    "ES256": SECP256R1,
    "ES384": SECP384R1,
    "ES512": SECP521R1,
}
ED_ALGORITHMS: Final = ("EdDSA",)
PAIR_ALGORITHMS: Final = (*RSA_ALGORITHMS, *EC_CURVES, *ED_ALGORITHMS)
ALGORITHMS: Final = (*SECRET_BYTES, *PAIR_ALGORITHMS)
"""Every algorithm that is taken, by the names of token headers."""

_PEM: Final = re.compile(rb"\s*-----BEGIN ([A-Z0-9 ]+)-----")


@dataclass(frozen=True, slots=True)
class VerificationKey:
    """A key that verifies tokens: a secret, or a public key."""

    material: bytes | PublicKey = field(repr=False)
    algorithms: frozenset[str]
    key_id: str | None = None


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A key that signs tokens: a secret, or a private key.

    `algorithms` are those that fit it; the first one is used unless another is asked for.
    """

    material: bytes | PrivateKey = field(repr=False)
    algorithms: tuple[str, ...]


class TokenKeys:
    """The keys of which one must have signed a token.  Raises `InvalidSecret` for too many."""

    def __init__(self, keys: Iterable[VerificationKey]) -> None:
        self._keys = tuple(keys)
        if len(self._keys) > TOKEN_KEYS:
            raise InvalidSecret(
                f"There are {len(self._keys)} keys of tokens, and {TOKEN_KEYS} are the most: "
                "remove those that sign no more."
            )

    def __len__(self) -> int:
        return len(self._keys)

    def candidates(self, algorithm: str, key_id: str | None) -> list[VerificationKey]:
        """The keys that an algorithm fits; those with the key id of the token come first."""
        fitting = [key for key in self._keys if algorithm in key.algorithms]
        if key_id is not None:
            fitting.sort(key=lambda key: key.key_id != key_id)
        return fitting


def secret_key(data: bytes, name: str, key_id: str | None = None) -> VerificationKey:
    """A secret that verifies tokens.  Raises `InvalidSecret`; `name` is what it calls the key."""
    return VerificationKey(data, frozenset(_secret_algorithms(data, name)), key_id)


def signing_secret(data: bytes, name: str) -> SigningKey:
    """A secret that signs tokens, by the strongest algorithm that its length allows.

    Raises `InvalidSecret`.
    """
    return SigningKey(data, tuple(reversed(_secret_algorithms(data, name))))


def public_key(data: bytes, name: str, key_id: str | None = None) -> VerificationKey:
    """A public key in DER (SubjectPublicKeyInfo) or PEM.  Raises `InvalidSecret`."""
    try:
        key = load_pem_public_key(data) if _PEM.match(data) else load_der_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        if _is_private(data):
            raise InvalidSecret(
                f"{name} is a private key, which a broker must not have: name the public one."
            ) from error
        raise InvalidSecret(
            f"{name} is no public key: give one in DER (SubjectPublicKeyInfo) or PEM."
        ) from error
    if not isinstance(key, PublicKey):
        raise InvalidSecret(f"{name} is a key of a kind that signs no tokens: {_KINDS}.")
    return verification_key(key, name, key_id)


def verification_key(key: PublicKey, name: str, key_id: str | None = None) -> VerificationKey:
    """Bind a public key to its algorithms.  Raises `InvalidSecret`."""
    return VerificationKey(key, frozenset(_pair_algorithms(key, name)), key_id)


def private_key(data: bytes, name: str) -> SigningKey:
    """A private key in DER (PKCS#8) or PEM, without a password.  Raises `InvalidSecret`."""
    load = load_pem_private_key if _PEM.match(data) else load_der_private_key
    try:
        key = load(data, password=None)
    except TypeError as error:  # It has a password.
        raise InvalidSecret(f"{name} is encrypted: give it without a password.") from error
    except (ValueError, UnsupportedAlgorithm):
        # Not chained: what the parser says could have parts of the key.
        raise InvalidSecret(f"{name} is no private key: give one in DER (PKCS#8) or PEM.") from None
    if not isinstance(key, PrivateKey):
        raise InvalidSecret(f"{name} is a key of a kind that signs no tokens: {_KINDS}.")
    return SigningKey(key, _pair_algorithms(key.public_key(), name))


_KINDS: Final = "give one of RSA, of P-256, P-384 or P-521, or of Ed25519 or Ed448"


def _secret_algorithms(data: bytes, name: str) -> list[str]:
    """The algorithms that the length of a secret allows, the weakest first."""
    if is_key_file(data):
        raise InvalidSecret(
            f"{name} is a public key, a private key or a certificate, and no secret: anybody who "
            "has the public key could sign tokens with it. Name it among the public keys."
        )
    fitting = [algorithm for algorithm, least in SECRET_BYTES.items() if len(data) >= least]
    if not fitting:
        raise InvalidSecret(
            f"{name} has {len(data)} bytes, and a secret has {SECRET_BYTES['HS256']} at least: "
            "make one with `magnetar tokens create-secret-key`."
        )
    return fitting


def is_key_file(data: bytes) -> bool:
    """Whether the bytes are a key pair's, or a certificate: PEM, DER, its base64, JWK or SSH."""
    stripped = data.strip()
    if _PEM.match(data) or stripped.startswith((b"ssh-", b"ecdsa-sha2-")):
        return True
    if stripped.startswith(b"{") and b'"kty"' in data:
        return True
    # Of a secret in plain base64 the text is the secret; of a public key anybody knows the text.
    forms = [data]
    with contextlib.suppress(ValueError):
        forms.append(base64.b64decode(b"".join(stripped.split()), validate=True))
    return any(
        _parses(load_der_public_key, form)
        or _parses(load_der_x509_certificate, form)
        or _is_private(form)
        for form in forms
    )


def _is_private(data: bytes) -> bool:
    load = load_pem_private_key if _PEM.match(data) else load_der_private_key
    try:
        return _parses(lambda der: load(der, password=None), data)
    except TypeError:  # It has a password.
        return True


def _parses(load: Callable[[bytes], object], data: bytes) -> bool:
    try:
        load(data)
    except (ValueError, UnsupportedAlgorithm):
        return False
    return True


def _pair_algorithms(key: PublicKey, name: str) -> tuple[str, ...]:
    """The algorithms of a key pair, the usual one first."""
    if isinstance(key, RSAPublicKey):
        if not RSA_KEY_BITS_MIN <= key.key_size <= RSA_KEY_BITS_MAX:
            raise InvalidSecret(
                f"{name} is an RSA key of {key.key_size} bits: make one of {RSA_KEY_BITS_MIN} to "
                f"{RSA_KEY_BITS_MAX}."
            )
        return RSA_ALGORITHMS
    if isinstance(key, EllipticCurvePublicKey):
        for algorithm, curve in EC_CURVES.items():
            if isinstance(key.curve, curve):
                return (algorithm,)
        raise InvalidSecret(f"{name} is a key of the curve {key.curve.name}: {_KINDS}.")
    return ED_ALGORITHMS
