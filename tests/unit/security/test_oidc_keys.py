"""Keys of issuers: documents that are refused, keys left out, and when they are fetched."""

import json
from collections.abc import Mapping

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from hypothesis import given
from hypothesis import strategies as st
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from config.bounds import (
    OIDC_EXPIRY_FACTOR,
    OIDC_FETCH_RETRY_S,
    OIDC_KEYS,
    OIDC_REFRESH_RETRY_S,
    OIDC_TEXT_BYTES,
)
from security.oidc_keys import (
    InvalidIssuer,
    IssuerKeys,
    Step,
    discovery_url,
    keys_url,
    parse_keys,
    require_issuer_url,
)
from security.token_keys import RSA_ALGORITHMS, VerificationKey

ISSUER = "https://issuer.example/realm"
RSA_KEY = rsa.generate_private_key(65537, 2048)
RSA_JWK = RSAAlgorithm.to_jwk(RSA_KEY.public_key(), as_dict=True)
EC_JWK = ECAlgorithm.to_jwk(ec.generate_private_key(ec.SECP384R1()).public_key(), as_dict=True)
ED_JWK = OKPAlgorithm.to_jwk(ed25519.Ed25519PrivateKey.generate().public_key(), as_dict=True)
SMALL_JWK = RSAAlgorithm.to_jwk(rsa.generate_private_key(65537, 1024).public_key(), as_dict=True)
CURVE_JWK = ECAlgorithm.to_jwk(ec.generate_private_key(ec.SECP256K1()).public_key(), as_dict=True)


def key_set(*keys: object) -> bytes:
    return json.dumps({"keys": keys}).encode()


def document(**members: object) -> bytes:
    whole = {"issuer": ISSUER, "jwks_uri": "https://keys.example/jwks", **members}
    return json.dumps(whole).encode()


# Documents


@pytest.mark.parametrize("issuer", [ISSUER, ISSUER + "/"])
def test_the_discovery_document_is_below_the_issuer(issuer: str) -> None:
    expected = "https://issuer.example/realm/.well-known/openid-configuration"
    assert discovery_url(issuer) == expected


def test_a_discovery_document_names_the_keys() -> None:
    assert keys_url(document(), ISSUER, require_https=True) == "https://keys.example/jwks"
    plain = document(jwks_uri="http://keys.example:8080/jwks")
    assert keys_url(plain, ISSUER, require_https=False) == "http://keys.example:8080/jwks"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (document(issuer="https://issuer.example"), "another issuer"),
        (document(issuer=ISSUER + "/"), "another issuer"),
        (document(issuer=None), "another issuer"),
        (document(jwks_uri=None), "no jwks_uri"),
        (document(jwks_uri=["https://keys.example"]), "no jwks_uri"),
        (document(jwks_uri="http://keys.example/jwks"), "https"),
        (document(jwks_uri="file:///etc/passwd"), "https"),
        (document(jwks_uri="https:///jwks"), "a host"),
        (document(jwks_uri="https://user@keys.example/jwks"), "neither a user"),
        (document(jwks_uri="https://keys.example:99999/jwks"), "no URL"),
        (document(jwks_uri="https://[::1/jwks"), "no URL"),
        (document(jwks_uri="https://keys.example/\r\nHost: x"), "characters"),
        (document(jwks_uri="https://keys.example/" + "x" * OIDC_TEXT_BYTES), "too long"),
        (b"[]", "no JSON object"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_another_discovery_document_is_refused(changed: bytes, why: str) -> None:
    with pytest.raises(InvalidIssuer, match=why):
        keys_url(changed, ISSUER, require_https=True)


@given(data=st.binary(max_size=100), url=st.text(max_size=50))
def test_broken_documents_raise_nothing_else(data: bytes, url: str) -> None:
    for content in (data, document(jwks_uri="https://" + url), document(jwks_uri=url)):
        try:
            require_issuer_url(keys_url(content, ISSUER, require_https=True), require_https=True)
        except InvalidIssuer:
            pass


# Key sets


def test_keys_are_bound_to_their_algorithm() -> None:
    keys = parse_keys(
        key_set(
            {**RSA_JWK, "kid": "a"},
            {**RSA_JWK, "kid": "b", "alg": "PS384", "use": "sig"},
            {**EC_JWK, "kid": "c", "key_ops": ["verify"]},
            {**ED_JWK, "alg": "EdDSA", "x5c": ["..."]},
        )
    )
    found = [(key.key_id, key.algorithms) for key in keys]
    assert found == [
        ("a", frozenset(RSA_ALGORITHMS)),
        ("b", {"PS384"}),
        ("c", {"ES384"}),
        (None, {"EdDSA"}),
    ]


@pytest.mark.parametrize(
    "jwk",
    [
        {**RSA_JWK, "use": "enc"},
        {**RSA_JWK, "key_ops": ["encrypt"]},
        {**RSA_JWK, "key_ops": "verify"},
        {**RSA_JWK, "alg": "HS256"},
        {**RSA_JWK, "alg": "none"},
        {**RSA_JWK, "alg": "ES384"},
        {**RSA_JWK, "alg": ["RS256"]},
        {**RSA_JWK, "kid": 7},
        {**RSA_JWK, "kid": None},
        {**RSA_JWK, "kid": "x" * (OIDC_TEXT_BYTES + 1)},
        {**RSA_JWK, "n": 7},
        {**RSA_JWK, "n": "é"},
        {**RSA_JWK, "e": ""},
        {**RSA_JWK, "kty": "EC"},
        {**RSA_JWK, "kty": ["RSA"]},
        {**EC_JWK, "x": EC_JWK["y"]},
        {**EC_JWK, "crv": "P-256"},
        {**ED_JWK, "crv": "X25519"},
        RSAAlgorithm.to_jwk(RSA_KEY, as_dict=True),
        SMALL_JWK,
        CURVE_JWK,
        {"kty": "oct", "k": "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0"},
        {},
        "key",
        None,
    ],
)
def test_a_key_that_may_not_sign_tokens_is_left_out(jwk: object) -> None:
    with pytest.raises(InvalidIssuer, match="no public key"):
        parse_keys(key_set(jwk))
    assert [key.key_id for key in parse_keys(key_set(jwk, {**EC_JWK, "kid": "good"}))] == ["good"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{}", "no list"),
        (b'{"keys": {}}', "no list"),
        (b'{"keys": []}', "no public key"),
        (key_set(*[EC_JWK] * (OIDC_KEYS + 1)), "more than"),
    ],
)
def test_another_key_set_is_refused(content: bytes, why: str) -> None:
    with pytest.raises(InvalidIssuer, match=why):
        parse_keys(content)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(
    changed=st.dictionaries(
        st.sampled_from(["kty", "alg", "kid", "use", "key_ops", "n", "e", "crv", "x", "y"]), JSON
    ),
    jwk=st.sampled_from([RSA_JWK, EC_JWK, ED_JWK]),
)
def test_broken_keys_raise_nothing_else(
    changed: dict[str, object], jwk: Mapping[str, object]
) -> None:
    try:
        parse_keys(key_set({**jwk, **changed}))
    except InvalidIssuer:
        pass


# When keys are fetched

A, B = (VerificationKey(b"", frozenset({"RS256"}), name) for name in "ab")
REFRESH_S, UNKNOWN_S = 1000.0, 300.0


@pytest.fixture
def issuer() -> IssuerKeys:
    return IssuerKeys(refresh_s=REFRESH_S, unknown_key_refresh_s=UNKNOWN_S)


def test_keys_are_fetched_for_the_first_token(issuer: IssuerKeys) -> None:
    assert issuer.lookup("a", 5).step is Step.FETCH
    issuer.fetched((A, B), 5)
    assert issuer.lookup("a", 5) == (found := issuer.lookup("a", 5 + REFRESH_S - 1))
    assert (found.step, found.keys) == (Step.USE, (A,))


def test_a_failed_first_fetch_is_tried_again_after_a_pause(issuer: IssuerKeys) -> None:
    issuer.failed(5)
    assert issuer.lookup("a", 5 + OIDC_FETCH_RETRY_S - 0.1).step is Step.UNAVAILABLE
    assert issuer.lookup("a", 5 + OIDC_FETCH_RETRY_S).step is Step.FETCH


def test_an_unknown_key_fetches_again_but_seldom(issuer: IssuerKeys) -> None:
    issuer.fetched((A,), 0)
    assert issuer.lookup("b", UNKNOWN_S - 1).step is Step.UNKNOWN_KEY
    assert issuer.lookup("b", UNKNOWN_S).step is Step.FETCH
    issuer.fetched((A,), UNKNOWN_S)
    assert issuer.lookup("b", UNKNOWN_S + 1).step is Step.UNKNOWN_KEY
    issuer.failed(2 * UNKNOWN_S)
    assert issuer.lookup("b", 2 * UNKNOWN_S + OIDC_FETCH_RETRY_S).step is Step.UNKNOWN_KEY
    assert issuer.lookup("a", 2 * UNKNOWN_S).step is Step.USE


def test_old_keys_are_used_while_they_are_fetched_again(issuer: IssuerKeys) -> None:
    issuer.fetched((A,), 0)
    assert issuer.lookup("a", REFRESH_S).step is Step.USE_AND_REFRESH
    issuer.failed(REFRESH_S)
    assert issuer.lookup("a", REFRESH_S + OIDC_REFRESH_RETRY_S - 1).step is Step.USE
    late = issuer.lookup("a", REFRESH_S + OIDC_REFRESH_RETRY_S)
    assert (late.step, late.keys) == (Step.USE_AND_REFRESH, (A,))
    issuer.fetched((B,), REFRESH_S + OIDC_REFRESH_RETRY_S)
    assert issuer.lookup("a", REFRESH_S + OIDC_REFRESH_RETRY_S).step is Step.UNKNOWN_KEY
    assert issuer.lookup("b", REFRESH_S + OIDC_REFRESH_RETRY_S).step is Step.USE


def test_keys_that_cannot_be_fetched_expire(issuer: IssuerKeys) -> None:
    issuer.fetched((A,), 0)
    end_s = REFRESH_S * OIDC_EXPIRY_FACTOR
    issuer.failed(end_s - 1)
    assert issuer.lookup("a", end_s - 0.1).step is Step.USE
    assert issuer.lookup("a", end_s).step is Step.UNAVAILABLE
    assert issuer.lookup("a", end_s + OIDC_FETCH_RETRY_S).step is Step.FETCH


def test_a_token_without_a_key_id_is_for_an_issuer_with_one_key(issuer: IssuerKeys) -> None:
    issuer.fetched((A,), 0)
    assert issuer.lookup(None, 0).keys == (A,)
    issuer.fetched((A, B), 0)
    assert issuer.lookup(None, 0).step is Step.UNKNOWN_KEY


@given(
    steps=st.lists(st.tuples(st.floats(0, 400), st.sampled_from("abc"), st.booleans()), max_size=60)
)
def test_fetches_are_bounded_and_keys_are_never_too_old(
    steps: list[tuple[float, str, bool]],
) -> None:
    issuer = IssuerKeys(refresh_s=REFRESH_S, unknown_key_refresh_s=UNKNOWN_S)
    now_s, fetched_at_s, fetches = 0.0, float("-inf"), [float("-inf")]
    for pause_s, key_id, succeeds in steps:
        now_s += pause_s
        lookup = issuer.lookup(key_id, now_s)
        if lookup.keys:
            assert now_s - fetched_at_s < REFRESH_S * OIDC_EXPIRY_FACTOR
            assert key_id != "c"
        if lookup.step not in (Step.FETCH, Step.USE_AND_REFRESH):
            continue
        if now_s - fetched_at_s < REFRESH_S:
            assert now_s - fetches[-1] >= UNKNOWN_S
        else:
            assert now_s - fetches[-1] >= OIDC_FETCH_RETRY_S
        fetches.append(now_s)
        if succeeds:
            issuer.fetched((A, B), now_s)
            fetched_at_s = now_s
        else:
            issuer.failed(now_s)
