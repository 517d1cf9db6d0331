"""Tokens by OpenID Connect: an issuer on this machine, and fetches within bounds."""

import asyncio
import base64
import hmac
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import jwt
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from config.bounds import OIDC_FETCH_RETRY_S, OIDC_FETCH_S, OIDC_KEYS_BYTES
from security.errors import CredentialsRefused, Refusal
from security.identity import Identity, Method, Role
from security.oidc import OidcProvider, OidcRules
from security.providers import Credentials
from tests.unit.security.authority import Authority
from tests.unit.security.issuer import AUDIENCE, NOW_S, Issuer, serving

SYSTEM_TLS = ssl.create_default_context()


class Clocks:
    """A wall clock and a monotonic one, which go on when the test says so."""

    def __init__(self) -> None:
        self.passed_s = 0.0

    def now_s(self) -> float:
        return NOW_S + self.passed_s

    def monotonic_s(self) -> float:
        return 50 + self.passed_s


def provider_of(
    *issuers: str,
    clocks: Clocks | None = None,
    tls: ssl.SSLContext | None = None,
    require_https: bool = False,
    role_claim: str = "sub",
    clock_skew_s: float = 0.0,
    fetch_s: float = OIDC_FETCH_S,
) -> OidcProvider:
    clocks = clocks or Clocks()
    rules = OidcRules(
        frozenset(issuers),
        frozenset({"other", AUDIENCE}),
        role_claim=role_claim,
        require_https=require_https,
        clock_skew_s=clock_skew_s,
        key_cache_s=1000,
        unknown_key_refresh_s=300,
    )
    return OidcProvider(
        rules,
        tls or SYSTEM_TLS,
        now_s=clocks.now_s,
        monotonic_s=clocks.monotonic_s,
        fetch_s=fetch_s,
    )


async def login(provider: OidcProvider, token: bytes) -> Identity:
    return await provider.authenticate(Credentials("token", token))


async def refusal_of(provider: OidcProvider, token: bytes) -> Refusal:
    with pytest.raises(CredentialsRefused) as refused:
        await login(provider, token)
    return refused.value.reason


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
async def issuer(tmp_path: Path) -> AsyncIterator[Issuer]:
    async with serving(tmp_path) as served:
        yield served


@pytest.fixture
async def provider(issuer: Issuer, clocks: Clocks) -> AsyncIterator[OidcProvider]:
    made = provider_of(issuer.url, clocks=clocks)
    yield made
    await made.close()


# Tokens


async def test_a_token_of_the_issuer_proves_its_role(
    provider: OidcProvider, issuer: Issuer
) -> None:
    identity = await login(provider, issuer.token(aud=["x", AUDIENCE]))
    assert identity == Identity(Role("alice"), Method.TOKEN, NOW_S + 3600)
    assert (await login(provider, issuer.token(None) + b"\n")).role == "alice"
    assert issuer.fetches == 1


async def test_the_role_is_in_the_claim_of_the_settings(issuer: Issuer) -> None:
    provider = provider_of(issuer.url, role_claim="roles")
    assert (await login(provider, issuer.token(roles=["bob", "carol"]))).role == "bob"
    for roles in (None, [], [7], {"a": 1}, "", " bob", "b*"):
        assert await refusal_of(provider, issuer.token(roles=roles)) is Refusal.INVALID_ROLE
    await provider.close()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"iss": None}, Refusal.UNSUPPORTED_ISSUER),
        ({"iss": "https://elsewhere.example"}, Refusal.UNSUPPORTED_ISSUER),
        ({"aud": None}, Refusal.INVALID_AUDIENCES),
        ({"aud": "elsewhere"}, Refusal.INVALID_AUDIENCES),
        ({"aud": [["magnetar"], 7]}, Refusal.INVALID_AUDIENCES),
        ({"sub": None}, Refusal.INVALID_JWT_CLAIM),
        ({"sub": ""}, Refusal.INVALID_JWT_CLAIM),
        ({"iat": None}, Refusal.INVALID_JWT_CLAIM),
        ({"iat": True}, Refusal.INVALID_JWT_CLAIM),
        ({"iat": NOW_S + 1}, Refusal.INVALID_JWT_CLAIM),
        ({"iat": "now"}, Refusal.INVALID_JWT_CLAIM),
        ({"exp": None}, Refusal.INVALID_JWT_CLAIM),
        ({"exp": NOW_S}, Refusal.EXPIRED_JWT),
        ({"nbf": NOW_S + 1}, Refusal.INVALID_JWT_CLAIM),
    ],
)
async def test_a_token_with_other_claims_is_refused_before_a_fetch(
    provider: OidcProvider, issuer: Issuer, changed: dict[str, object], reason: Refusal
) -> None:
    assert await refusal_of(provider, issuer.token(**changed)) is reason
    assert issuer.fetches == 0


async def test_clocks_may_differ_by_the_skew_of_the_settings(issuer: Issuer) -> None:
    provider = provider_of(issuer.url, clock_skew_s=30)
    identity = await login(provider, issuer.token(exp=NOW_S - 29, iat=NOW_S + 29))
    assert identity.expires_at_s == NOW_S + 1
    assert await refusal_of(provider, issuer.token(exp=NOW_S - 30)) is Refusal.EXPIRED_JWT
    await provider.close()


async def test_a_token_that_expires_during_the_fetch_is_refused(
    provider: OidcProvider, issuer: Issuer, clocks: Clocks
) -> None:
    issuer.go_on.clear()
    pending = asyncio.create_task(refusal_of(provider, issuer.token(exp=NOW_S + 1)))
    while not issuer.fetches:
        await asyncio.sleep(0.01)
    clocks.passed_s += 1
    issuer.go_on.set()
    assert await pending is Refusal.EXPIRED_JWT


async def test_a_token_without_a_signature_is_refused(
    provider: OidcProvider, issuer: Issuer
) -> None:
    head, payload, _ = issuer.token().split(b".")
    none = base64.urlsafe_b64encode(b'{"alg":"none","kid":"first"}').rstrip(b"=")
    for unsigned in (none + b"." + payload + b".", head + b"." + payload + b".", head):
        assert await refusal_of(provider, unsigned) is Refusal.ERROR_DECODING_JWT


async def test_a_token_that_is_signed_with_the_public_key_as_a_secret_is_refused(
    provider: OidcProvider, issuer: Issuer
) -> None:
    public = issuer.keys["first"].public_key()
    secret = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    head = base64.urlsafe_b64encode(b'{"alg":"HS256","kid":"first"}').rstrip(b"=")
    signed = head + b"." + issuer.token().split(b".")[1]
    signature = base64.urlsafe_b64encode(hmac.digest(secret, signed, "sha256")).rstrip(b"=")
    token = signed + b"." + signature
    assert await refusal_of(provider, token) is Refusal.UNSUPPORTED_ALGORITHM


async def test_a_token_of_an_algorithm_that_is_not_the_key_s_is_refused(
    provider: OidcProvider, issuer: Issuer
) -> None:
    key = rsa.generate_private_key(65537, 2048)
    token = jwt.encode(issuer.claims(), key, "PS256", {"kid": "first"}).encode()
    assert await refusal_of(provider, token) is Refusal.ALGORITHM_MISMATCH


async def test_a_token_that_another_key_has_signed_is_refused(
    provider: OidcProvider, issuer: Issuer
) -> None:
    await login(provider, issuer.token())
    issuer.keys["first"] = ec.generate_private_key(ec.SECP256R1())
    assert await refusal_of(provider, issuer.token()) is Refusal.ERROR_VERIFYING_JWT_SIGNATURE


@given(data=st.binary(max_size=60))
def test_broken_tokens_raise_nothing_else(data: bytes) -> None:
    async def main() -> None:
        provider = provider_of("https://issuer.example")
        assert await refusal_of(provider, data) is Refusal.ERROR_DECODING_JWT

    asyncio.run(main())


# Keys


async def test_logins_share_one_fetch(provider: OidcProvider, issuer: Issuer) -> None:
    issuer.go_on.clear()
    logins = [asyncio.create_task(login(provider, issuer.token())) for _ in range(20)]
    while not issuer.fetches:
        await asyncio.sleep(0.01)
    logins[0].cancel()  # The others still wait for it.
    issuer.go_on.set()
    identities = await asyncio.gather(*logins[1:])
    assert {each.role for each in identities} == {"alice"}
    assert issuer.fetches == 1


async def test_a_key_that_was_added_is_found_after_the_pause(
    provider: OidcProvider, issuer: Issuer, clocks: Clocks
) -> None:
    await login(provider, issuer.token())
    issuer.keys["second"] = ec.generate_private_key(ec.SECP256R1())
    for _ in range(3):
        assert await refusal_of(provider, issuer.token("second")) is Refusal.INVALID_PUBLIC_KEY
    assert issuer.fetches == 1
    clocks.passed_s += 300
    assert (await login(provider, issuer.token("second"))).role == "alice"
    issuer.keys["third"] = ec.generate_private_key(ec.SECP256R1())
    assert await refusal_of(provider, issuer.token("third")) is Refusal.INVALID_PUBLIC_KEY
    assert issuer.fetches == 2


async def test_old_keys_are_used_while_the_issuer_fails(
    provider: OidcProvider, issuer: Issuer, clocks: Clocks
) -> None:
    await login(provider, issuer.token())
    issuer.answer = lambda: web.Response(status=500)
    clocks.passed_s += 1000
    await login(provider, issuer.token())
    while issuer.fetches < 2:
        await asyncio.sleep(0.01)
    clocks.passed_s += 300
    await login(provider, issuer.token())
    clocks.passed_s += 100
    token = issuer.token()
    assert await refusal_of(provider, token) is Refusal.ERROR_RETRIEVING_PUBLIC_KEY


async def test_an_issuer_that_failed_is_fetched_again_after_a_pause(
    provider: OidcProvider, issuer: Issuer, clocks: Clocks
) -> None:
    issuer.answer = lambda: web.Response(body=b"{")
    for _ in range(3):
        refusal = await refusal_of(provider, issuer.token())
        assert refusal is Refusal.ERROR_RETRIEVING_PUBLIC_KEY
    assert issuer.fetches == 1
    issuer.answer = None
    clocks.passed_s += OIDC_FETCH_RETRY_S
    assert (await login(provider, issuer.token())).role == "alice"


# Fetches


async def unavailable(provider: OidcProvider, issuer: Issuer) -> bool:
    refusal = await refusal_of(provider, issuer.token())
    return refusal is Refusal.ERROR_RETRIEVING_PUBLIC_KEY


async def test_a_document_of_another_issuer_is_refused(
    provider: OidcProvider, issuer: Issuer
) -> None:
    issuer.document["issuer"] = issuer.url + "/"
    assert await unavailable(provider, issuer)


async def test_a_redirect_is_not_followed(provider: OidcProvider, issuer: Issuer) -> None:
    issuer.answer = lambda: web.Response(
        status=302, headers={"Location": f"{issuer.url}/keys?again"}
    )
    assert await unavailable(provider, issuer)


async def test_a_large_answer_is_refused(provider: OidcProvider, issuer: Issuer) -> None:
    issuer.answer = lambda: web.Response(body=b" " * (OIDC_KEYS_BYTES + 1))
    assert await unavailable(provider, issuer)


async def test_a_packed_answer_is_refused(provider: OidcProvider, issuer: Issuer) -> None:
    def packed() -> web.Response:
        response = web.Response(body=issuer.key_set())
        response.enable_compression(web.ContentCoding.gzip)
        return response

    issuer.answer = packed
    assert await unavailable(provider, issuer)


async def test_a_slow_answer_is_given_up(issuer: Issuer) -> None:
    provider = provider_of(issuer.url, fetch_s=0.2)
    issuer.go_on.clear()
    assert await unavailable(provider, issuer)
    await provider.close()


async def test_an_issuer_that_is_not_there_is_given_up(
    provider: OidcProvider, issuer: Issuer
) -> None:
    issuer.document["jwks_uri"] = "http://localhost:1/keys"
    assert await unavailable(provider, issuer)


async def test_plain_http_is_refused_where_https_is_asked_for(tmp_path: Path) -> None:
    authority = Authority()
    async with serving(tmp_path, authority) as issuer:
        tls = ssl.create_default_context(cafile=tmp_path / "authority.pem")
        provider = provider_of(issuer.url, tls=tls, require_https=True)
        issuer.document["jwks_uri"] = "http://localhost:1/keys"
        assert await unavailable(provider, issuer)
        await provider.close()


async def test_an_issuer_is_reached_by_https(tmp_path: Path) -> None:
    async with serving(tmp_path, Authority()) as issuer:
        tls = ssl.create_default_context(cafile=tmp_path / "authority.pem")
        provider = provider_of(issuer.url, tls=tls, require_https=True)
        assert (await login(provider, issuer.token())).role == "alice"
        await provider.close()


async def test_an_issuer_with_the_name_of_another_host_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, Authority(), host="elsewhere.example") as issuer:
        tls = ssl.create_default_context(cafile=tmp_path / "authority.pem")
        provider = provider_of(issuer.url, tls=tls)
        assert await unavailable(provider, issuer)
        assert issuer.fetches == 0
        await provider.close()


async def test_an_issuer_of_another_authority_is_refused_until_that_is_trusted(
    tmp_path: Path, clocks: Clocks
) -> None:
    async with serving(tmp_path, Authority()) as issuer:
        provider = provider_of(issuer.url, clocks=clocks)
        assert await unavailable(provider, issuer)
        provider.use(ssl.create_default_context(cafile=tmp_path / "authority.pem"))
        clocks.passed_s += OIDC_FETCH_RETRY_S
        assert (await login(provider, issuer.token())).role == "alice"
        await provider.close()


async def test_closing_ends_a_fetch(provider: OidcProvider, issuer: Issuer) -> None:
    issuer.go_on.clear()
    pending = asyncio.create_task(login(provider, issuer.token()))
    while not issuer.fetches:
        await asyncio.sleep(0.01)
    await provider.close()
    with pytest.raises(asyncio.CancelledError):
        await pending
