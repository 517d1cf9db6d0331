"""Tokens: which are taken, and that anything else is `CredentialsRefused`."""

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from config.bounds import TOKEN_BYTES
from security.errors import CredentialsRefused, Refusal
from security.identity import Identity, Method, Role
from security.new_keys import new_key_pair, new_secret
from security.token_keys import (
    ALGORITHMS,
    PAIR_ALGORITHMS,
    SECRET_BYTES,
    SigningKey,
    TokenKeys,
    VerificationKey,
    private_key,
    public_key,
    secret_key,
    signing_secret,
)
from security.tokens import TokenChecker, TokenRules, create_token, parse_token, verified_claims
from tests.support.effort import by_effort
from tests.support.pulsar_tokens import (
    ES256_PRIVATE_KEY,
    EXPIRING_WITH_HEADERS,
    PUBLIC_KEYS,
    SECRETS,
)

NOW_S = 1_800_000_000.0
SECRET = bytes(range(64))
KEYS = TokenKeys([secret_key(SECRET, "the key")])


def part(value: object) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def hmac_token(
    header: object, claims: object, secret: bytes = SECRET, digest: str = "sha256"
) -> bytes:
    """A token that is signed by hand, with any header and claims."""
    signed = f"{part(header)}.{part(claims)}"
    return f"{signed}.{part(hmac.digest(secret, signed.encode(), digest))}".encode()


def check(data: bytes, rules: TokenRules | None = None, keys: TokenKeys = KEYS) -> Identity:
    return TokenChecker(keys, rules or TokenRules()).check(data, NOW_S)


def of_claims(claims: object, rules: TokenRules | None = None) -> Identity:
    return check(hmac_token({"alg": "HS256"}, claims), rules)


def refusal(
    data: bytes, rules: TokenRules | None = None, keys: TokenKeys = KEYS
) -> CredentialsRefused:
    with pytest.raises(CredentialsRefused) as refused:
        check(data, rules, keys)
    return refused.value


def refusal_of_claims(claims: object, rules: TokenRules | None = None) -> CredentialsRefused:
    return refusal(hmac_token({"alg": "HS256"}, claims), rules)


@pytest.fixture(scope="module")
def pairs() -> Mapping[str, tuple[SigningKey, VerificationKey, bytes]]:
    """A key pair for each algorithm, and its public key in DER; RSA keys are shared."""
    rsa = new_key_pair("RS256")
    made = {
        name: rsa if name[:2] in ("RS", "PS") else new_key_pair(name) for name in PAIR_ALGORITHMS
    }
    return {
        name: (private_key(pair.private, name), public_key(pair.public, name), pair.public)
        for name, pair in made.items()
    }


# Tokens that are taken


@pytest.mark.parametrize("algorithm", SECRET_BYTES)
def test_token_of_a_secret_is_taken(algorithm: str) -> None:
    secret = new_secret(algorithm)
    token = create_token(signing_secret(secret, "key"), {"sub": "joe"})
    assert parse_token(token.encode()).algorithm == algorithm
    keys = TokenKeys([secret_key(secret, "key")])
    assert check(token.encode(), keys=keys) == Identity(Role("joe"), Method.TOKEN)


@pytest.mark.parametrize("algorithm", PAIR_ALGORITHMS)
def test_token_of_a_key_pair_is_taken(
    algorithm: str, pairs: Mapping[str, tuple[SigningKey, VerificationKey, bytes]]
) -> None:
    private, public, _ = pairs[algorithm]
    token = create_token(private, {"sub": "joe", "exp": NOW_S + 5}, algorithm=algorithm)
    assert parse_token(token.encode()).algorithm == algorithm
    expected = Identity(Role("joe"), Method.TOKEN, NOW_S + 5)
    assert check(token.encode(), keys=TokenKeys([public])) == expected


@pytest.mark.parametrize("algorithm", SECRETS)
def test_token_of_pulsars_tool_for_a_secret_is_taken_and_made_alike(algorithm: str) -> None:
    key, token = SECRETS[algorithm]
    secret = base64.b64decode(key)
    assert check(token.encode(), keys=TokenKeys([secret_key(secret, "key")])).role == "joe"
    assert create_token(signing_secret(secret, "key"), {"sub": "joe"}) == token


@pytest.mark.parametrize("algorithm", PUBLIC_KEYS)
def test_token_of_pulsars_tool_for_a_key_pair_is_taken(algorithm: str) -> None:
    key, token = PUBLIC_KEYS[algorithm]
    keys = TokenKeys([public_key(base64.b64decode(key), "key")])
    assert check(token.encode(), keys=keys).role == "joe"


def test_private_key_of_pulsars_tool_signs() -> None:
    token = create_token(private_key(base64.b64decode(ES256_PRIVATE_KEY), "key"), {"sub": "x"})
    keys = TokenKeys([public_key(base64.b64decode(PUBLIC_KEYS["ES256"].key), "key")])
    assert check(token.encode(), keys=keys).role == "x"


def test_token_of_pulsars_tool_with_headers_and_expiry() -> None:
    secret = base64.b64decode(SECRETS["HS256"].key)
    checker = TokenChecker(TokenKeys([secret_key(secret, "key")]), TokenRules())
    token = EXPIRING_WITH_HEADERS.encode()
    assert checker.check(token, 1795724298.9).expires_at_s == 1795724299
    with pytest.raises(CredentialsRefused) as refused:
        checker.check(token, 1795724299)
    assert refused.value.expired
    assert parse_token(token).key_id == "k1"


@pytest.mark.parametrize("around", [b"%s\n", b"  %s", b"\t%s\r\n"])
def test_blanks_around_a_token_do_not_count(around: bytes) -> None:
    assert check(around % hmac_token({"alg": "HS256"}, {"sub": "joe"})).role == "joe"


# Algorithms and signatures


@pytest.mark.parametrize("algorithm", ["none", "None", "NONE", "nOnE", "", "null", None, 0, [], {}])
@pytest.mark.parametrize("signature", ["", ".", ".AAAA", "signed"])
def test_unsigned_token_is_refused(algorithm: object, signature: str) -> None:
    header = {"alg": algorithm} if algorithm != "" else {}
    token = hmac_token(header, {"sub": "joe"})
    if signature != "signed":
        token = token.rpartition(b".")[0] + signature.encode()
    assert refusal(token).reason is Refusal.INVALID_TOKEN


@pytest.mark.parametrize(
    "algorithm", ["hs256", "HS256 ", "HS1", "ES256K", "A128KW", "dir", "HS512256"]
)
def test_unknown_algorithm_is_refused(algorithm: str) -> None:
    assert refusal(hmac_token({"alg": algorithm}, {"sub": "joe"})).reason is Refusal.INVALID_TOKEN


@pytest.mark.parametrize("algorithm", SECRET_BYTES)
@pytest.mark.parametrize("pair", ["RS256", "ES256", "EdDSA"])
def test_token_signed_with_the_bytes_of_the_public_key_is_refused(
    algorithm: str, pair: str, pairs: Mapping[str, tuple[SigningKey, VerificationKey, bytes]]
) -> None:
    _, public, der = pairs[pair]
    pem = b"-----BEGIN PUBLIC KEY-----\n" + base64.encodebytes(der) + b"-----END PUBLIC KEY-----\n"
    digest = f"sha{algorithm[2:]}"
    for secret in (der, base64.b64encode(der), pem, pem.strip()):
        token = hmac_token({"alg": algorithm}, {"sub": "joe"}, secret, digest)
        assert refusal(token, keys=TokenKeys([public])).reason is Refusal.INVALID_TOKEN
        assert refusal(token, keys=TokenKeys([public, secret_key(SECRET, "other")]))


def test_algorithm_that_does_not_fit_the_key_is_refused(
    pairs: Mapping[str, tuple[SigningKey, VerificationKey, bytes]],
) -> None:
    for name, (private, _, _) in pairs.items():
        token = create_token(private, {"sub": "joe"}, algorithm=name)
        for other, (_, public, _) in pairs.items():
            if other[:2] != name[:2] and {other[:2], name[:2]} != {"RS", "PS"}:
                assert refusal(token.encode(), keys=TokenKeys([public]))
    weak = TokenKeys([secret_key(SECRET[:32], "short")])
    token = hmac_token({"alg": "HS512"}, {"sub": "joe"}, SECRET[:32], "sha512").decode()
    assert "No key is for the algorithm HS512" in str(refusal(token.encode(), keys=weak))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_changed_token_is_refused(place: int) -> None:
    parts = hmac_token({"alg": "HS256"}, {"sub": "joe", "exp": NOW_S + 1}).decode().split(".")
    others = [part({"alg": "HS384"}), part({"sub": "admin", "exp": NOW_S + 1}), part(bytes(32))]
    parts[place] = others[place]
    assert refusal(".".join(parts).encode()).reason is Refusal.INVALID_TOKEN


@pytest.mark.parametrize("critical", [[], ["exp"], "exp", None])
def test_header_with_crit_is_refused(critical: object) -> None:
    token = hmac_token({"alg": "HS256", "crit": critical}, {"sub": "joe"})
    assert "crit" in str(refusal(token))


# Several keys


def test_tokens_of_each_of_several_keys_are_taken() -> None:
    secrets = [bytes([number]) * 32 for number in range(5)]
    keys = TokenKeys([secret_key(secret, "key", f"k{n}") for n, secret in enumerate(secrets)])
    for number, secret in enumerate(secrets):
        for key_id in (None, f"k{number}", "k0", "unknown", 7):
            header = {"alg": "HS256"} if key_id is None else {"alg": "HS256", "kid": key_id}
            assert check(hmac_token(header, {"sub": "joe"}, secret), keys=keys).role == "joe"
    assert refusal(hmac_token({"alg": "HS256", "kid": "k1"}, {"sub": "joe"}), keys=keys)


def test_keys_with_the_id_of_the_token_are_tried_first() -> None:
    made = [secret_key(bytes([number]) * 32, "key", f"k{number}") for number in range(5)]
    keys = TokenKeys(made)
    assert keys.candidates("HS256", "k3")[0] is made[3]
    assert keys.candidates("HS256", None) == made
    assert sorted(map(id, keys.candidates("HS256", "k3"))) == sorted(map(id, made))
    assert keys.candidates("RS256", "k3") == []


# Claims


@pytest.mark.parametrize(
    ("claims", "rules", "role"),
    [
        ({"sub": "joe"}, TokenRules(), "joe"),
        ({"sub": "joe", "role": "app"}, TokenRules("role"), "app"),
        ({"roles": ["first", "second"]}, TokenRules("roles"), "first"),
    ],
)
def test_role_is_that_of_its_claim(claims: object, rules: TokenRules, role: str) -> None:
    assert of_claims(claims, rules).role == role


@pytest.mark.parametrize(
    "value",
    [None, "", " ", "*", " joe", "joe\n", 7, True, [], [[]], [7], {}, ["", "joe"], "x" * 257],
)
def test_claim_that_is_no_role_is_refused(value: object) -> None:
    assert refusal_of_claims({"sub": value}).reason is Refusal.INVALID_ROLE


def test_token_without_the_claim_of_the_role_is_refused() -> None:
    assert refusal_of_claims({"role": "joe"}).reason is Refusal.INVALID_ROLE
    assert refusal_of_claims({"sub": "joe"}, TokenRules("role")).reason is Refusal.INVALID_ROLE


FOR_US = TokenRules(audience_claim="aud", audience="magnetar")


@pytest.mark.parametrize("audience", ["magnetar", ["magnetar"], ["other", "magnetar"]])
def test_token_for_the_audience_is_taken(audience: object) -> None:
    assert of_claims({"sub": "joe", "aud": audience}, FOR_US).role == "joe"


@pytest.mark.parametrize(
    "audience", ["other", "magnetar2", "", [], ["other"], [["magnetar"]], 7, None]
)
def test_token_for_another_audience_is_refused(audience: object) -> None:
    refused = refusal_of_claims({"sub": "joe", "aud": audience}, FOR_US)
    assert refused.reason is Refusal.INVALID_AUDIENCES
    assert refusal_of_claims({"sub": "joe"}, FOR_US).reason is Refusal.INVALID_AUDIENCES


# Times


@pytest.mark.parametrize("expiry", [NOW_S + 1, NOW_S + 0.5, int(NOW_S) + 1, 2**53])
def test_token_is_taken_until_it_expires(expiry: float) -> None:
    assert of_claims({"sub": "joe", "exp": expiry}).expires_at_s == expiry


@pytest.mark.parametrize("expiry", [NOW_S, NOW_S - 0.5, int(NOW_S) - 10**9, 0, 0.0])
def test_expired_token_is_refused_and_counts_as_expired(expiry: float) -> None:
    refused = refusal_of_claims({"sub": "joe", "exp": expiry})
    assert (refused.reason, refused.expired) == (Refusal.INVALID_TOKEN, True)


@pytest.mark.parametrize("skew_s", [0.0, 30.0])
def test_clock_skew_moves_both_times(skew_s: float) -> None:
    rules = TokenRules(clock_skew_s=skew_s)
    late = {"sub": "joe", "exp": NOW_S - 29}
    early = {"sub": "joe", "nbf": NOW_S + 29}
    if skew_s:
        # So that the connection is not asked for new credentials at once.
        assert of_claims(late, rules).expires_at_s == NOW_S + 1
        assert of_claims(early, rules).role == "joe"
    else:
        assert refusal_of_claims(late, rules).expired
        assert not refusal_of_claims(early, rules).expired


@pytest.mark.parametrize("name", ["exp", "nbf"])
@pytest.mark.parametrize(
    "value",
    [
        *("-1", "-1e400", "1e999", "1e400", "9007199254740993", "NaN", "Infinity", "-Infinity"),
        *(
            "1" + "0" * 400,
            "1" + "0" * 5000,
            "null",
            "true",
            '"1900000000"',
            "[1]",
            "{}",
            "1e",
            "0x1",
        ),
    ],
)
def test_absurd_time_is_refused(name: str, value: str) -> None:
    claims = f'{{"sub":"joe","{name}":{value}}}'.encode()
    assert refusal(hmac_token({"alg": "HS256"}, claims)).reason is Refusal.INVALID_TOKEN


# Form, and bounds


@pytest.mark.parametrize("data", [b"", b" \n", b"a" * (TOKEN_BYTES + 1), b"a." * 500_000])
def test_empty_or_long_token_is_refused_unread(data: bytes) -> None:
    assert refusal(data).reason is Refusal.INVALID_AUTH_DATA


def test_longest_token_is_read() -> None:
    claims = {"sub": "joe", "pad": ""}
    short = len(hmac_token({"alg": "HS256"}, claims))
    claims["pad"] = "x" * ((TOKEN_BYTES - short) * 3 // 4 - 3)
    token = hmac_token({"alg": "HS256"}, claims)
    assert TOKEN_BYTES - 8 < len(token) <= TOKEN_BYTES
    assert check(token).role == "joe"


@pytest.mark.parametrize(
    "data",
    [
        *(b"a", b"a.b", b"a.b.c.d", b"a.b.c.d.e", b"..", b"a..c", b".a.b", b"a.b."),
        *(b"e30=.e30=.AA==", b"e30.e30.A+/A", b"e30 .e30.AAAA", b"\xff.\xff.\xff", b"a.a.a"),
    ],
)
def test_data_of_another_form_is_refused(data: bytes) -> None:
    assert refusal(data).reason is Refusal.INVALID_TOKEN


@pytest.mark.parametrize(
    "text",
    [
        *(b"[]", b"7", b"null", b'"HS256"', b"{", b"", b"\xff", b"\xef\xbb\xbf{}", b'{"sub":NaN}'),
        *(b"[" * 9000, b'{"a":' * 2000, b'{"sub":"joe","sub":"admin"}', b'{"\\ud800":1,"sub":1}'),
    ],
)
def test_broken_json_is_refused(text: bytes) -> None:
    assert refusal(hmac_token({"alg": "HS256"}, text))
    assert refusal(hmac_token(text, {"sub": "joe"}))


def test_json_with_a_constant_of_python_is_refused() -> None:
    for name in ("NaN", "Infinity", "-Infinity"):
        assert refusal(hmac_token({"alg": "HS256"}, b'{"sub":"joe","x":%s}' % name.encode()))


def test_header_that_names_two_algorithms_is_refused() -> None:
    assert refusal(hmac_token(b'{"alg":"HS256","alg":"HS256"}', {"sub": "joe"}))


def test_refusal_and_reprs_have_nothing_of_the_token() -> None:
    marked = "hush-this-is-marked"
    tokens = [
        hmac_token({"alg": marked, "kid": marked}, {"sub": marked}),
        hmac_token({"alg": "HS256", "kid": marked}, {"sub": marked}, SECRET[1:]),
        hmac_token({"alg": "HS256"}, {"sub": f"{marked}*", "exp": NOW_S + 1}),
        hmac_token({"alg": "HS256"}, {"sub": 7, "exp": marked}),
        marked.encode(),
    ]
    for token in tokens:
        refused = refusal(token)
        assert marked not in f"{refused!r} {refused} {refused.peer_message}"
        assert refused.__cause__ is None
    read = parse_token(hmac_token({"alg": "HS256"}, {"sub": marked}))
    assert marked not in repr(read)
    assert part({"sub": marked}) not in repr(read)
    assert repr(SECRET)[:20] not in repr(secret_key(SECRET, "key"))
    assert repr(SECRET)[:20] not in repr(signing_secret(SECRET, "key"))


# Making tokens


def test_header_of_a_new_token_has_the_algorithm_alone() -> None:
    token = create_token(signing_secret(SECRET, "key"), {"sub": "joe"}, algorithm="HS256")
    assert parse_token(token.encode()).header == {"alg": "HS256"}
    token = create_token(signing_secret(SECRET, "key"), {"sub": "joe"}, headers={"kid": "a"})
    assert parse_token(token.encode()).header == {"alg": "HS512", "kid": "a"}


def test_algorithm_of_another_key_and_reserved_headers_are_refused() -> None:
    key = signing_secret(SECRET[:32], "key")
    for algorithm in ("HS384", "RS256", "none", ""):
        if algorithm:
            with pytest.raises(ValueError, match="does not fit the key: use HS256"):
                create_token(key, {"sub": "joe"}, algorithm=algorithm)
    for name in ("alg", "crit", "b64", "zip"):
        with pytest.raises(ValueError, match=name):
            create_token(key, {"sub": "joe"}, headers={name: "none"})


def test_verified_claims_are_all_of_them() -> None:
    claims = {"sub": "joé", "x": [1, {"y": None}]}
    assert verified_claims(hmac_token({"alg": "HS256"}, claims), KEYS, NOW_S) == (claims, None)


# Anything else


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=10,
)
HEADERS = st.fixed_dictionaries(
    {"alg": st.sampled_from(ALGORITHMS) | JSON}, optional={"kid": JSON, "typ": JSON, "crit": JSON}
)
CLAIMS = st.fixed_dictionaries(
    {}, optional={"sub": JSON, "aud": JSON, "exp": JSON, "nbf": JSON, "iat": JSON}
)
VALID = hmac_token({"alg": "HS256"}, {"sub": "joe", "exp": NOW_S + 1})
MIXED_KEYS = TokenKeys(
    [
        secret_key(SECRET, "secret"),
        *(public_key(base64.b64decode(made.key), "pair") for made in PUBLIC_KEYS.values()),
    ]
)


def check_is_total(data: bytes) -> None:
    """Either the token proves a role, or it is refused: nothing else is raised."""
    checker = TokenChecker(MIXED_KEYS, TokenRules(audience_claim="aud", audience="magnetar"))
    for each in (checker, TokenChecker(MIXED_KEYS, TokenRules())):
        try:
            identity = each.check(data, NOW_S)
        except CredentialsRefused:
            continue
        assert identity.role
        assert not identity.expired(NOW_S)


effort = settings(max_examples=by_effort(quick=200, whole=500, nightly=100_000), deadline=None)


@effort
@given(
    st.binary(max_size=400)
    | st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace"))
)
def test_any_bytes_are_taken_or_refused(data: bytes) -> None:
    check_is_total(data)
    check_is_total(b".".join(base64.urlsafe_b64encode(data).rstrip(b"=") for _ in range(3)))


@effort
@given(
    st.lists(
        st.tuples(st.integers(0, len(VALID)), st.integers(0, 3), st.binary(max_size=3)), max_size=4
    )
)
def test_mutated_token_is_taken_or_refused(changes: list[tuple[int, int, bytes]]) -> None:
    data = VALID
    for at, removed, added in changes:
        data = data[:at] + added + data[at + removed :]
    check_is_total(data)
    if data.strip() != VALID:
        # A last character may have bits that base64url does not use.
        assert data[:-1] == VALID[:-1] or refusal(data)


@effort
@given(HEADERS, CLAIMS)
@example({"alg": "HS256"}, {"sub": "joe", "exp": float("nan")})
def test_signed_token_of_any_content_is_taken_or_refused(header: object, claims: object) -> None:
    check_is_total(hmac_token(header, claims))
    signed = {"alg": "HS256"}
    check_is_total(hmac_token(signed, claims))
    check_is_total(hmac_token(header, {"sub": "joe"}, digest=hashlib.sha384().name))


@effort
@given(st.sampled_from(PAIR_ALGORITHMS), st.binary(max_size=300))
def test_any_signature_is_refused(algorithm: str, signature: bytes) -> None:
    token = f"{part({'alg': algorithm})}.{part({'sub': 'joe'})}.{part(signature or b'x')}"
    assert refusal(token.encode(), keys=MIXED_KEYS)
