"""What users can give as credentials, and what is refused; no secret is shown."""

import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.credentials.kinds import (
    BasicCredentials,
    IssuedToken,
    OAuth2Credentials,
    check_issuer_url,
)
from magnetar.credentials.rest import RestCredentials
from magnetar.credentials.secrets import read_secret, token_source
from magnetar.errors import AuthenticationFailed, InvalidArgument
from magnetar.settings import ClientSettings

SECRET = "marked-secret"
BASIC = BasicCredentials("ann", SECRET)
OAUTH2 = OAuth2Credentials("https://issuer/realm", "id", SECRET)


@pytest.mark.parametrize(
    "made",
    [
        BASIC,
        OAUTH2,
        IssuedToken(SECRET, 60),
        ClientSettings(token=SECRET),
        ClientSettings(basic=BASIC),
        ClientSettings(oauth2=OAUTH2),
        RestCredentials(token=SECRET),
        RestCredentials(basic=BASIC),
    ],
)
def test_repr_hides_secrets(made: object) -> None:
    assert SECRET not in repr(made)
    assert SECRET not in str(made)


def test_credentials_are_pickled() -> None:
    assert pickle.loads(pickle.dumps((BASIC, OAUTH2))) == (BASIC, OAUTH2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: BasicCredentials("", SECRET),
        lambda: BasicCredentials("a:b", SECRET),
        lambda: BasicCredentials("ann"),
        lambda: BasicCredentials("ann", ""),
        lambda: BasicCredentials("ann", SECRET, "/file"),
        OAuth2Credentials,
        lambda: OAuth2Credentials("https://issuer", "id"),
        lambda: OAuth2Credentials(client_id="id", client_secret=SECRET),
        lambda: OAuth2Credentials("https://issuer", client_id="id", key_file="/k"),
        lambda: OAuth2Credentials("http://issuer", "id", SECRET),
        lambda: OAuth2Credentials(f"https://me:{SECRET}@issuer", "id", SECRET),
        lambda: OAuth2Credentials("https://", "id", SECRET),
        lambda: OAuth2Credentials("https://issuer:x", "id", SECRET),
        lambda: OAuth2Credentials("https://issuer/ HTTP/1.1", "id", SECRET),
        lambda: OAuth2Credentials("https://issuer/\r\nX: 1", "id", SECRET),
        lambda: ClientSettings(token=SECRET, basic=BASIC),
        lambda: ClientSettings(oauth2=OAUTH2, basic=BASIC),
        lambda: ClientSettings(token="token:"),
        lambda: ClientSettings(token="file:token"),
        lambda: RestCredentials(SECRET, BASIC),
        lambda: BasicCredentials("\udcff", SECRET),
        lambda: OAuth2Credentials("https://issuer", "id", f"{SECRET}\udcff"),
        lambda: OAuth2Credentials("https://issuer", "id", SECRET, scope=""),
        lambda: ClientSettings(token=f"{SECRET}\udcff"),
        lambda: ClientSettings(basic=("ann", SECRET)),  # type: ignore[arg-type]
        lambda: ClientSettings(oauth2=BASIC),  # type: ignore[arg-type]
    ],
)
def test_invalid_credentials_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        make()
    assert SECRET not in repr(caught.value)


def test_issuer_may_be_reached_without_https_where_that_is_asked_for() -> None:
    assert OAuth2Credentials("http://issuer", "id", SECRET, require_https=False)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("e.y.J", "e.y.J"),
        (" e.y.J\n", "e.y.J"),
        ("token:e.y.J", "e.y.J"),
        ("file:///a%20b/token", Path("/a b/token")),
        ("file:/token", Path("/token")),
    ],
)
def test_token_is_given_in_the_forms_of_pulsar(text: str, source: str | Path) -> None:
    assert token_source(text) == source


@pytest.mark.parametrize(
    "text", ["", " ", "token:", "file:", "file:///", "file://host/x", "file:x"]
)
def test_token_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        token_source(text)


@given(st.text() | st.text().map("file:{}".format) | st.text().map("file:///{}".format))
def test_any_text_is_a_token_a_file_or_an_invalid_argument(text: str) -> None:
    with suppress(InvalidArgument):
        source = token_source(text)
        if isinstance(source, str):
            assert source.encode()
        else:
            assert source.is_absolute()
            with suppress(AuthenticationFailed):
                read_secret(source, "token")


@given(st.text() | st.text().map("https://{}".format), st.booleans())
def test_any_text_is_an_issuer_or_an_invalid_argument(text: str, require_https: bool) -> None:
    with suppress(InvalidArgument):
        check_issuer_url(text, require_https=require_https)
        assert text.startswith("https://") or not require_https
        assert not set(text) & set(" \r\n")


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff" + SECRET.encode(), b"x" * 1_048_577])
def test_file_without_a_secret_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "secret"
    file.write_bytes(content)
    with pytest.raises(AuthenticationFailed, match="/secret") as caught:
        read_secret(file, "token")
    assert SECRET not in repr(caught.value)
    assert caught.value.__cause__ is None
