"""Tokens of an issuer: the requests, TLS, bounds in size and time, and errors without secrets."""

import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from magnetar.bounds import OAUTH2_ANSWER_BYTES, OAUTH2_FETCH_S
from magnetar.credentials.kinds import OAuth2Credentials
from magnetar.credentials.token_fetch import fetch_token
from magnetar.errors import AuthenticationFailed
from tests.support.certificates import Certificate, make_certificate
from tests.support.child_process import HOST, free_port
from tests.support.oauth2_issuer import CLIENT_ID, DISCOVERY, SECRET, Issuer, issuing, key_file


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with issuing() as made:
        yield made


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"), HOST)


def credentials(issuer: Issuer, **more: object) -> OAuth2Credentials:
    given = {
        "issuer_url": issuer.url,
        "client_id": CLIENT_ID,
        "client_secret": SECRET,
        "require_https": False,
    }
    return OAuth2Credentials(**{**given, **more})  # type: ignore[arg-type]


def refusal(given: OAuth2Credentials, limit_s: float = 30) -> str:
    """The error of a fetch, with its traceback; there is no secret in it."""
    with pytest.raises(AuthenticationFailed) as caught:
        fetch_token(given, limit_s=limit_s)
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    assert SECRET not in shown
    assert "token-" not in shown
    return str(caught.value)


def test_token_is_asked_for_by_id_and_secret(issuer: Issuer) -> None:
    issued = fetch_token(credentials(issuer, audience="urn:brokers", scope="read write"))
    assert (issued.text, issued.lifetime_s) == ("token-1", 3600)
    assert issuer.forms == [
        {
            "grant_type": "client_credentials",
            "client_id": CLIENT_ID,
            "client_secret": SECRET,
            "audience": "urn:brokers",
            "scope": "read write",
        }
    ]


def test_issuer_that_wants_the_secret_in_a_header_gets_it_there(issuer: Issuer) -> None:
    issuer.methods = ["client_secret_basic", "private_key_jwt"]
    assert fetch_token(credentials(issuer)).text == "token-1"
    assert issuer.forms == [{"grant_type": "client_credentials"}]


def test_issuer_without_methods_gets_the_secret_in_the_form(issuer: Issuer) -> None:
    issuer.methods = None
    assert fetch_token(credentials(issuer)).text == "token-1"
    assert issuer.forms[0]["client_secret"] == SECRET


@pytest.mark.parametrize("as_url", [False, True])
def test_key_file_has_the_id_the_secret_and_the_issuer(
    issuer: Issuer, tmp_path: Path, as_url: bool
) -> None:
    file = key_file(tmp_path, issuer_url=issuer.url)
    given = file.as_uri() if as_url else file
    assert fetch_token(OAuth2Credentials(key_file=given, require_https=False)).text == "token-1"


def test_issuer_url_of_the_settings_counts_more_than_that_of_the_key_file(
    issuer: Issuer, tmp_path: Path
) -> None:
    file = key_file(tmp_path, issuer_url="http://127.0.0.1:1")
    given = OAuth2Credentials(issuer_url=issuer.url, key_file=file, require_https=False)
    assert fetch_token(given).text == "token-1"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"type": "service_account"}, "not JSON of the type"),
        ({"client_id": None}, "no client_id"),
        ({"client_secret": 7}, "no client_secret"),
        ({"issuer_url": None}, "no issuer_url"),
        ({"issuer_url": "ftp://host"}, "issuer_url is not"),
        ({"issuer_url": "http://host"}, "issuer_url is not"),
    ],
)
def test_invalid_key_file_is_named(tmp_path: Path, change: dict[str, object], said: str) -> None:
    file = key_file(tmp_path, **{"issuer_url": "https://host", **change})
    message = refusal(OAuth2Credentials(key_file=file))
    assert said in message
    assert str(file) in message


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]", b'{"type": ' + SECRET.encode()])
def test_key_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "key.json"
    file.write_bytes(content)
    assert str(file) in refusal(OAuth2Credentials(key_file=file))
    assert "/missing.json" in refusal(OAuth2Credentials(key_file=tmp_path / "missing.json"))


def test_wrong_secret_is_refused_with_the_reason_of_the_issuer(issuer: Issuer) -> None:
    message = refusal(credentials(issuer, client_secret="wrong"))
    assert "refused (401, invalid_client: no such client)" in message


def test_reason_that_repeats_the_secret_is_left_out(issuer: Issuer) -> None:
    body = b'{"error": "invalid_client", "error_description": "not %s"}' % SECRET.encode()
    issuer.raw["/token"] = (400, body)
    assert "refused (400, invalid_client)" in refusal(credentials(issuer))


@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        b"[]",
        b"{}",
        b'{"access_token": 7}',
        b'{"access_token": ""}',
        b'{"access_token": "two words"}',
        b'{"access_token": "line\\r\\nX-Injected: 1"}',
        b'{"access_token": "\xc3\xbcmlaut"}',
        b"[" * 100_000,
    ],
)
def test_answer_without_a_token_is_refused(issuer: Issuer, body: bytes) -> None:
    issuer.raw["/token"] = (200, body)
    assert issuer.origin in refusal(credentials(issuer))


@pytest.mark.parametrize(
    ("lifetime", "read"),
    [(60, 60.0), ("300", 300.0), (None, None), ("soon", None), (True, None), ("inf", None)],
)
def test_lifetime_is_read_as_number_or_text(
    issuer: Issuer, lifetime: object, read: float | None
) -> None:
    issuer.lifetime_s = lifetime
    assert fetch_token(credentials(issuer)).lifetime_s == read


@pytest.mark.parametrize(
    "endpoint", [None, 7, "", "/token", "ftp://host/token", "http://a:b@host/"]
)
def test_discovery_without_a_token_endpoint_is_refused(issuer: Issuer, endpoint: object) -> None:
    issuer.token_endpoint = endpoint
    assert "token_endpoint" in refusal(credentials(issuer))


def test_wrong_issuer_url_is_refused(issuer: Issuer) -> None:
    assert "refused (404)" in refusal(credentials(issuer, issuer_url=f"{issuer.origin}/other"))
    closed = f"http://{HOST}:{free_port()}"
    assert "did not answer" in refusal(credentials(issuer, issuer_url=closed))


@pytest.mark.parametrize(("path", "said"), [(DISCOVERY, "302"), ("/token", "302")])
def test_redirect_is_not_followed(issuer: Issuer, path: str, said: str) -> None:
    issuer.raw[path] = (302, b"{}")
    assert said in refusal(credentials(issuer))
    assert issuer.discoveries == 1


def test_large_answer_is_not_read(issuer: Issuer) -> None:
    issuer.raw[DISCOVERY] = (200, b" " * (OAUTH2_ANSWER_BYTES + 1))
    assert "more than" in refusal(credentials(issuer))


def drip(issuer: Issuer) -> None:
    issuer.drip_s = 0.05
    issuer.raw[DISCOVERY] = (200, b" " * 1000)


@pytest.mark.parametrize("slow", [drip, lambda issuer: issuer.held.clear()])
def test_slow_issuer_is_given_up(issuer: Issuer, slow: Callable[[Issuer], None]) -> None:
    slow(issuer)
    began = time.monotonic()
    assert "did not answer within" in refusal(credentials(issuer), limit_s=0.4)
    assert time.monotonic() - began < OAUTH2_FETCH_S


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([DISCOVERY, "/token"]),
    st.sampled_from([200, 302, 400, 500]),
    st.binary(max_size=200)
    | st.dictionaries(
        st.sampled_from(["token_endpoint", "access_token", "expires_in", "error"]),
        st.recursive(st.none() | st.text() | st.integers() | st.floats(), st.lists),
    ).map(lambda found: json.dumps(found).encode()),
)
def test_any_answer_is_a_token_or_a_refusal(
    issuer: Issuer, path: str, status: int, body: bytes
) -> None:
    issuer.raw = {path: (status, body)}
    with suppress(AuthenticationFailed):
        assert fetch_token(credentials(issuer)).text.isprintable()


# TLS


def test_issuer_is_checked_by_the_trust_file(certificate: Certificate) -> None:
    with issuing(certificate) as issuer:
        given = credentials(issuer, trust_file=certificate.chain, require_https=True)
        assert fetch_token(given).text == "token-1"


def test_issuer_of_an_unknown_authority_gets_nothing(certificate: Certificate) -> None:
    with issuing(certificate) as issuer:
        assert "not trusted" in refusal(credentials(issuer, require_https=True))
        assert (issuer.discoveries, issuer.forms) == (0, [])


def test_issuer_of_another_name_gets_nothing(tmp_path: Path) -> None:
    other = make_certificate(tmp_path, "127.0.0.2")
    with issuing(other) as issuer:
        assert "not trusted" in refusal(credentials(issuer, trust_file=other.chain))
        assert (issuer.discoveries, issuer.forms) == (0, [])


def test_token_endpoint_without_https_gets_nothing(certificate: Certificate) -> None:
    with issuing(certificate) as issuer, issuing() as plain:
        issuer.token_endpoint = f"{plain.origin}/token"
        given = credentials(issuer, trust_file=certificate.chain, require_https=True)
        assert "token_endpoint is not the https address" in refusal(given)
        assert plain.forms == []


def test_unusable_trust_file_is_named(issuer: Issuer, tmp_path: Path) -> None:
    assert "/none.pem" in refusal(credentials(issuer, trust_file=tmp_path / "none.pem"))
