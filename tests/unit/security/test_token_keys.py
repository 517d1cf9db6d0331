"""Keys of tokens: the forms that are read, and the algorithms that each is bound to."""

import base64
import datetime
from collections.abc import Mapping
from typing import Final

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed448, ed25519, rsa, x25519
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from hypothesis import given
from hypothesis import strategies as st

from config.bounds import TOKEN_KEYS
from security.errors import InvalidSecret
from security.new_keys import KeyPair, new_key_pair, new_secret
from security.token_keys import (
    EC_CURVES,
    RSA_ALGORITHMS,
    SECRET_BYTES,
    TokenKeys,
    is_key_file,
    private_key,
    public_key,
    secret_key,
    signing_secret,
)
from tests.support.pulsar_tokens import PUBLIC_KEYS

Private = (
    rsa.RSAPrivateKey
    | ec.EllipticCurvePrivateKey
    | ed25519.Ed25519PrivateKey
    | ed448.Ed448PrivateKey
    | x25519.X25519PrivateKey
    | dsa.DSAPrivateKey
)
EC: Final = ec.generate_private_key(ec.SECP256R1())
RSA: Final = rsa.generate_private_key(public_exponent=65537, key_size=2048)
ED25519: Final = ed25519.Ed25519PrivateKey.generate()
KEYS: Final[Mapping[str, tuple[Private, tuple[str, ...]]]] = {
    "RSA": (RSA, RSA_ALGORITHMS),
    "P-256": (EC, ("ES256",)),
    "P-384": (ec.generate_private_key(ec.SECP384R1()), ("ES384",)),
    "P-521": (ec.generate_private_key(ec.SECP521R1()), ("ES512",)),
    "Ed25519": (ED25519, ("EdDSA",)),
    "Ed448": (ed448.Ed448PrivateKey.generate(), ("EdDSA",)),
}
OTHERS: Final[Mapping[str, Private]] = {
    "RSA of 1024 bits": rsa.generate_private_key(public_exponent=65537, key_size=1024),
    "secp256k1": ec.generate_private_key(ec.SECP256K1()),
    "X25519": x25519.X25519PrivateKey.generate(),
    "DSA": dsa.generate_private_key(1024),
}


def private_bytes(key: Private, encoding: Encoding = Encoding.DER) -> bytes:
    return key.private_bytes(encoding, PrivateFormat.PKCS8, NoEncryption())


def public_bytes(key: Private, encoding: Encoding = Encoding.DER) -> bytes:
    return key.public_key().public_bytes(encoding, PublicFormat.SubjectPublicKeyInfo)


def certificate(encoding: Encoding) -> bytes:
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a")])
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder(name, name, EC.public_key(), 1, now, now + datetime.timedelta(1))
        .sign(EC, hashes.SHA256())
        .public_bytes(encoding)
    )


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("encoding", [Encoding.DER, Encoding.PEM])
def test_pair_is_bound_to_the_algorithms_of_its_kind(kind: str, encoding: Encoding) -> None:
    key, algorithms = KEYS[kind]
    public = public_key(public_bytes(key, encoding), "key", "id")
    assert (public.algorithms, public.key_id) == (frozenset(algorithms), "id")
    assert private_key(private_bytes(key, encoding), "key").algorithms == algorithms


@pytest.mark.parametrize(
    ("length", "algorithms"),
    [
        (32, ("HS256",)),
        (47, ("HS256",)),
        (48, ("HS384", "HS256")),
        (64, ("HS512", "HS384", "HS256")),
        (1000, ("HS512", "HS384", "HS256")),
    ],
)
def test_secret_is_bound_to_the_algorithms_of_its_length(
    length: int, algorithms: tuple[str, ...]
) -> None:
    assert signing_secret(b"\xf0" * length, "key").algorithms == algorithms
    assert secret_key(b"\xf0" * length, "key").algorithms == set(algorithms)


@pytest.mark.parametrize("length", [0, 1, 31])
def test_short_secret_is_refused(length: int) -> None:
    with pytest.raises(InvalidSecret, match=f"key has {length} bytes.*create-secret-key"):
        secret_key(b"\xf0" * length, "key")


@pytest.mark.parametrize("kind", OTHERS)
def test_key_of_another_kind_is_refused(kind: str) -> None:
    with pytest.raises(InvalidSecret, match=r"make one of|give one of"):
        public_key(public_bytes(OTHERS[kind]), "key")
    with pytest.raises(InvalidSecret, match=r"make one of|give one of"):
        private_key(private_bytes(OTHERS[kind]), "key")


def test_private_key_as_a_public_one_is_refused() -> None:
    for encoding in (Encoding.DER, Encoding.PEM):
        with pytest.raises(InvalidSecret, match="is a private key, which a broker must not have"):
            public_key(private_bytes(RSA, encoding), "key")
    with pytest.raises(InvalidSecret, match="no private key"):
        private_key(public_bytes(RSA), "key")


def test_encrypted_private_key_is_refused() -> None:
    for encoding in (Encoding.DER, Encoding.PEM):
        data = EC.private_bytes(encoding, PrivateFormat.PKCS8, BestAvailableEncryption(b"hush"))
        with pytest.raises(InvalidSecret, match="is encrypted: give it without a password"):
            private_key(data, "key")


PUBLIC_MATERIAL = {
    "DER": public_bytes(RSA),
    "PEM": public_bytes(RSA, Encoding.PEM),
    "PEM after a newline": b"\n" + public_bytes(EC, Encoding.PEM),
    "base64 of DER": base64.b64encode(public_bytes(EC)),
    "base64 of DER, in lines": base64.encodebytes(public_bytes(RSA)),
    "SSH": ED25519.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH),
    "JWK": b'{"kty":"RSA","n":"...........................","e":"AQAB"}',
    "certificate": certificate(Encoding.DER),
    "certificate in PEM": certificate(Encoding.PEM),
    "private key": private_bytes(EC),
    "private key in PEM": private_bytes(EC, Encoding.PEM),
    "Pulsar's": base64.b64decode(PUBLIC_KEYS["RS256"].key),
}


@pytest.mark.parametrize("form", PUBLIC_MATERIAL)
def test_key_file_is_no_secret(form: str) -> None:
    assert is_key_file(PUBLIC_MATERIAL[form])
    with pytest.raises(InvalidSecret, match="Name it among the public keys"):
        secret_key(PUBLIC_MATERIAL[form], "key")


@pytest.mark.parametrize(
    "data", [b"", b"\x00" * 40, b"{}", b"-----BEGIN PUBLIC KEY-----\nhush", b"\x30"]
)
def test_other_bytes_are_no_key(data: bytes) -> None:
    for read in (public_key, private_key):
        with pytest.raises(InvalidSecret, match=r"^key is no .* in DER .* or PEM") as refused:
            read(data, "key")
        assert "hush" not in str(refused.value)


@given(st.binary(max_size=100), st.booleans())
def test_any_bytes_are_a_key_or_refused(data: bytes, pem: bool) -> None:
    if pem:
        data = b"-----BEGIN PRIVATE KEY-----\n%s\n-----END PRIVATE KEY-----\n" % data
    for read in (public_key, private_key, secret_key, signing_secret):
        try:
            assert read(data, "key").algorithms
        except InvalidSecret:
            pass


def test_number_of_keys_is_bounded() -> None:
    key = secret_key(new_secret(), "key")
    assert len(TokenKeys([key] * TOKEN_KEYS)) == TOKEN_KEYS
    with pytest.raises(InvalidSecret, match="remove those that sign no more"):
        TokenKeys([key] * (TOKEN_KEYS + 1))


@pytest.mark.parametrize("algorithm", SECRET_BYTES)
def test_new_secret_has_the_length_of_its_algorithm(algorithm: str) -> None:
    assert len(new_secret(algorithm)) == SECRET_BYTES[algorithm]
    assert new_secret(algorithm) != new_secret(algorithm)
    assert signing_secret(new_secret(algorithm), "key").algorithms[0] == algorithm


@pytest.mark.parametrize("algorithm", ["RS256", "PS384", *EC_CURVES, "EdDSA"])
def test_new_pair_fits_its_algorithm(algorithm: str) -> None:
    pair = new_key_pair(algorithm)
    assert algorithm in private_key(pair.private, "key").algorithms
    public = public_key(pair.public, "key")
    assert algorithm in public.algorithms
    if isinstance(public.material, rsa.RSAPublicKey):
        assert public.material.key_size == {"RS256": 2048, "PS384": 3072}[algorithm]


def test_repr_of_a_pair_has_nothing_of_it() -> None:
    assert repr(KeyPair(b"hush", b"x")) == "KeyPair(...)"
