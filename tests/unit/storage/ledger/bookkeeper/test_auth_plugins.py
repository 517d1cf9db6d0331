"""Authentication with bookies as settings name it, and SASL by the example of its RFC."""

import secrets
import traceback
from pathlib import Path
from typing import cast

import pytest

from broker.app.shared_stores import bookie_options
from config.settings import Settings
from storage.ledger.bookkeeper.auth import (
    AuthProvider,
    BookieAuthenticationFailed,
    NewAuthProvider,
)
from storage.ledger.bookkeeper.auth_plugins import UnusableAuthPlugin, open_auth_plugin
from storage.ledger.bookkeeper.sasl_digest import DigestMd5

CHALLENGE = (
    b'realm="elwood.innosoft.com",nonce="OA6MG9tEQGm2hh",qop="auth",'
    b"algorithm=md5-sess,charset=utf-8"
)
"""RFC 2831, section 4."""
RESPONSE = b"response=d388dad90d4bbd760a152321f2143af7"
PROOF = b"rspauth=ea40f60335c427b5527b84dbabcdfffd"
HERE = "tests.unit.storage.ledger.bookkeeper.test_auth_plugins"


def chris(password: str = "secret") -> DigestMd5:
    return DigestMd5(
        "chris", password, lambda: "OA6MHXh6VqTrRk", service="imap/elwood.innosoft.com"
    )


def test_the_example_of_the_rfc() -> None:
    client = chris()
    assert client.first() == b""
    said = client.answer(CHALLENGE)
    assert said is not None
    assert said.endswith(RESPONSE)
    for field in (b'username="chris"', b'digest-uri="imap/elwood.innosoft.com"', b"nc=00000001"):
        assert field in said.split(b",")
    assert client.answer(PROOF) is None


def test_another_password_has_another_response() -> None:
    said = chris("other").answer(CHALLENGE)
    assert said is not None
    assert RESPONSE not in said


@pytest.mark.parametrize("said", [b"", b"rspauth=00000000000000000000000000000000", CHALLENGE])
def test_a_bookie_that_does_not_know_the_password_is_not_trusted(said: bytes) -> None:
    client = chris()
    client.answer(CHALLENGE)
    with pytest.raises(BookieAuthenticationFailed, match="did not prove"):
        client.answer(said)


@pytest.mark.parametrize(
    "said",
    [b"", b"\xff\x00", CHALLENGE.replace(b"md5-sess", b"md5"), CHALLENGE.replace(b"auth", b"x")],
)
def test_another_mechanism_is_refused(said: bytes) -> None:
    with pytest.raises(BookieAuthenticationFailed, match="none of DIGEST-MD5"):
        chris().answer(said)


def test_names_may_have_any_characters() -> None:
    said = DigestMd5('a"\\\u20ac', "p", lambda: "n").answer(CHALLENGE)
    assert said is not None
    assert 'username="a\\"\\\\\u20ac"'.encode() in said


# Settings


class Own:
    """A plugin of an operator."""

    def __init__(self, parameters: str) -> None:
        self.plugin_name = "own"
        self._parameters = parameters

    def first(self) -> bytes:
        return self._parameters.encode()

    def answer(self, payload: bytes) -> bytes | None:
        return None


def own(parameters: str) -> NewAuthProvider:
    return lambda: Own(parameters)


def fails(parameters: str) -> NewAuthProvider:
    raise ValueError(f"no use for {parameters}")


def forgets(parameters: str) -> None:
    """It makes a provider, and does not return what makes them."""
    Own(parameters)


def new_provider(plugin: str, parameters: str) -> AuthProvider:
    made = open_auth_plugin(plugin, parameters)
    assert made is not None
    return made()


def test_without_a_plugin_there_is_none() -> None:
    assert open_auth_plugin("", "") is None


@pytest.mark.parametrize("name", ["sasl", "org.apache.bookkeeper.sasl.SASLClientProviderFactory"])
def test_sasl_by_both_names(name: str) -> None:
    first, second = new_provider(name, "user:pass:word"), new_provider(name, "user:pass:word")
    assert isinstance(first, DigestMd5)
    assert (first._user, first._password) == ("user", "pass:word")
    assert isinstance(second, DigestMd5)
    assert first._nonce != second._nonce


def test_a_file_is_read_again_for_each_connection(tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    path.write_text("user:old\n")
    made = open_auth_plugin("sasl", f"file:{path}")
    assert made is not None
    assert cast(DigestMd5, made())._password == "old"
    path.write_text("user:new\n")
    assert cast(DigestMd5, made())._password == "new"
    path.unlink()
    with pytest.raises(UnusableAuthPlugin, match="cannot be read"):
        made()


def test_a_plugin_of_the_operator() -> None:
    provider = new_provider(f"{HERE}:own", "what it needs")
    assert (provider.plugin_name, provider.first()) == ("own", b"what it needs")


@pytest.mark.parametrize(
    ("plugin", "parameters", "why"),
    [
        ("", "user:password", "no plugin"),
        ("sasl", "", "no user and password"),
        ("sasl", "user", "no user and password"),
        ("sasl", ":password", "no user and password"),
        ("sasl", "file:/nowhere/at/all", "cannot be read"),
        ("kerberos", "", "is no plugin"),
        ("nowhere.at.all:name", "", "ModuleNotFoundError"),
        (f"{HERE}:nothing", "", "AttributeError"),
        (f"{HERE}:fails", "", "ValueError"),
        (f"{HERE}:forgets", "", "NoneType"),
    ],
)
def test_unusable_plugin_is_refused_at_start(plugin: str, parameters: str, why: str) -> None:
    with pytest.raises(UnusableAuthPlugin, match=why):
        open_auth_plugin(plugin, parameters)


def test_error_of_a_plugin_does_not_contain_the_password() -> None:
    password = secrets.token_hex(8)
    with pytest.raises(UnusableAuthPlugin) as caught:
        open_auth_plugin(f"{HERE}:fails", f"user:{password}")
    assert password not in "".join(traceback.format_exception(caught.value))


def test_the_settings_of_a_broker() -> None:
    assert bookie_options(Settings()).auth is None
    settings = Settings(
        bookkeeper_client_authentication_plugin="sasl",
        bookkeeper_client_authentication_parameters="user:hidden",  # type: ignore[arg-type]
    )
    assert "hidden" not in repr(settings)
    auth = bookie_options(settings).auth
    assert auth is not None
    assert auth().plugin_name == "sasl"
