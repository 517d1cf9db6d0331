"""New keys of tokens: random secrets and key pairs."""

import secrets
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from security.token_keys import EC_CURVES, ED_ALGORITHMS, SECRET_BYTES, PrivateKey

_RSA_EXPONENT = 65537


class KeyPair(NamedTuple):
    """A key pair in DER: PKCS#8, and SubjectPublicKeyInfo."""

    private: bytes
    public: bytes

    def __repr__(self) -> str:
        return "KeyPair(...)"


def new_secret(algorithm: str = "HS256") -> bytes:
    """A random secret of an algorithm's length; `algorithm` is one of `SECRET_BYTES`."""
    return secrets.token_bytes(SECRET_BYTES[algorithm])


def new_key_pair(algorithm: str = "RS256") -> KeyPair:
    """A key pair for an algorithm of `PAIR_ALGORITHMS`.

    RSA keys have 2048, 3072 or 4096 bits, by the length of the algorithm's hash, as those of
    Pulsar's tools.
    """
    private = _new_private_key(algorithm)
    return KeyPair(
        private.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption()),
        private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
    )


def _new_private_key(algorithm: str) -> PrivateKey:
    if algorithm in ED_ALGORITHMS:
        return ed25519.Ed25519PrivateKey.generate()
    if algorithm in EC_CURVES:
        return ec.generate_private_key(EC_CURVES[algorithm]())
    bits = {"256": 2048, "384": 3072, "512": 4096}[algorithm[2:]]
    return rsa.generate_private_key(public_exponent=_RSA_EXPONENT, key_size=bits)
