"""The header `Authorization` of each kind of credentials."""

import base64
from pathlib import Path

import pytest

from magnetar.credentials.kinds import BasicCredentials, OAuth2Credentials
from magnetar.credentials.rest import RestCredentials
from magnetar.errors import AuthenticationFailed
from tests.support.oauth2_issuer import CLIENT_ID, SECRET, issuing

URL = "https://broker:8443"


def test_none_is_no_header() -> None:
    assert RestCredentials().authorization(URL) is None


def test_token_is_a_bearer(tmp_path: Path) -> None:
    assert RestCredentials("token:e.y.J").authorization(URL) == "Bearer e.y.J"
    file = tmp_path / "token"
    credentials = RestCredentials(file.as_uri())
    for text in ("first", "second"):
        file.write_text(f"{text}\n")
        assert credentials.authorization(URL) == f"Bearer {text}"


@pytest.mark.parametrize("token", ["two\r\nX-Injected: 1", "ümlaut", "a b"])
def test_token_that_fits_no_header_is_refused_without_showing_it(token: str) -> None:
    with pytest.raises(AuthenticationFailed, match="characters") as caught:
        RestCredentials(token).authorization(URL)
    assert token not in repr(caught.value)


def test_password_comes_from_text_file_or_function(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(" spaces stay \n")
    wanted = base64.b64encode(b"ann: spaces stay ").decode()
    for credentials in (
        BasicCredentials("ann", " spaces stay "),
        BasicCredentials("ann", lambda: " spaces stay "),
        BasicCredentials("ann", password_file=file),
    ):
        assert RestCredentials(basic=credentials).authorization(URL) == f"Basic {wanted}"


def test_async_function_is_no_password_here() -> None:
    async def password() -> str:
        return "x"

    with pytest.raises(AuthenticationFailed, match="coroutine, not text"):
        RestCredentials(basic=BasicCredentials("ann", password)).authorization(URL)


def test_oauth2_token_is_fetched_once() -> None:
    with issuing() as issuer:
        credentials = RestCredentials(
            oauth2=OAuth2Credentials(issuer.url, CLIENT_ID, SECRET, require_https=False)
        )
        assert {credentials.authorization(URL) for _ in range(3)} == {"Bearer token-1"}


@pytest.mark.parametrize(
    ("url", "times"),
    [("http://broker:8080", 1), ("https://broker:8443", 0), ("http://127.0.0.1:8080", 0)],
)
def test_credentials_without_encryption_are_warned_of_once(
    url: str, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    credentials = RestCredentials("marked")
    for _ in range(3):
        assert credentials.authorization(url) == "Bearer marked"
    assert caplog.text.count("credentials_sent_unencrypted") == times
    assert "marked" not in caplog.text


def test_no_credentials_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert RestCredentials().authorization("http://broker:8080") is None
    assert not caplog.text
