"""The provider for tokens: its keys and rules by the settings."""

import base64
import time
from pathlib import Path

import pytest

from config.settings import ConfigurationError, load_settings
from security.errors import CredentialsRefused, InvalidSecret, Refusal
from security.identity import Identity, Method, Role
from security.new_keys import new_key_pair, new_secret
from security.providers import Credentials, Provider
from security.secret_files import write_secret
from security.token_keys import TokenKeys, private_key, secret_key, signing_secret
from security.token_provider import TokenProvider, load_token_keys, token_key_files, token_rules
from security.tokens import TokenRules, create_token

SECRET = new_secret()


def of_secret(secret: bytes = SECRET, **claims: object) -> Credentials:
    token = create_token(signing_secret(secret, "key"), {"sub": "joe", **claims})
    return Credentials("token", token.encode())


async def test_keys_of_every_source_are_used_at_once(tmp_path: Path) -> None:
    pair, secret = new_key_pair("ES256"), new_secret()
    write_secret(tmp_path / "secret", SECRET)
    (tmp_path / "public").write_bytes(pair.public)
    inline = f"data:;base64,{base64.b64encode(secret).decode()}#kid=inline"
    overrides = {
        "token_secret_keys": [f"file://{tmp_path}/secret", inline],
        "token_public_keys": [str(tmp_path / "public")],
    }
    settings = load_settings(None, overrides)
    provider: Provider = TokenProvider(load_token_keys(settings), token_rules(settings))
    assert (provider.name, provider.method) == ("token", Method.TOKEN)
    token = create_token(private_key(pair.private, "key"), {"sub": "joe"}).encode()
    for credentials in (of_secret(), of_secret(secret), Credentials("token", token)):
        assert await provider.authenticate(credentials) == Identity(Role("joe"), Method.TOKEN)
    assert token_key_files(settings) == (tmp_path / "secret", tmp_path / "public")


async def test_rules_of_the_settings_are_kept() -> None:
    settings = load_settings(
        None,
        {
            "token_secret_keys": [base64.b64encode(SECRET).decode()],
            "token_auth_claim": "roles",
            "token_audience_claim": "aud",
            "token_audience": "here",
            "token_clock_skew_s": 60,
        },
    )
    provider = TokenProvider(load_token_keys(settings), token_rules(settings))
    expired = time.time() - 30
    identity = await provider.authenticate(of_secret(roles=["a", "b"], aud="here", exp=expired))
    assert (identity.role, identity.expires_at_s) == ("a", expired + 60)
    with pytest.raises(CredentialsRefused) as refused:
        await provider.authenticate(of_secret(roles=["a"], aud="there"))
    assert refused.value.reason is Refusal.INVALID_AUDIENCES


async def test_keys_are_replaced_while_the_provider_is_in_use() -> None:
    provider = TokenProvider(TokenKeys([secret_key(SECRET, "key")]), TokenRules(), lambda: 10.0)
    assert (await provider.authenticate(of_secret(exp=11))).expires_at_s == 11
    provider.use_keys(TokenKeys([secret_key(new_secret(), "key")]))
    with pytest.raises(CredentialsRefused):
        await provider.authenticate(of_secret(exp=11))


def test_settings_without_a_key_are_refused() -> None:
    with pytest.raises(InvalidSecret, match=r"No key of tokens is set.*create-secret-key"):
        load_token_keys(load_settings())


def test_key_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "open").write_bytes(SECRET)
    (tmp_path / "open").chmod(0o644)
    cases = {
        f"{tmp_path}/open": r"chmod 600",
        f"file://{tmp_path}/none": r"none cannot be read",
        "c2hvcnQ=": r"Key 2 of token_secret_keys has 5 bytes",
        "hush!": r"Key 2 of token_secret_keys is neither",
    }
    good = base64.b64encode(SECRET).decode()
    for source, expected in cases.items():
        with pytest.raises(InvalidSecret, match=expected):
            load_token_keys(load_settings(None, {"token_secret_keys": [good, source]}))
    with pytest.raises(InvalidSecret, match="Key 1 of token_public_keys is no public key"):
        load_token_keys(load_settings(None, {"token_public_keys": [good]}))


def test_lists_of_the_environment_have_blanks_between_their_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MAGNETAR_TOKEN_SECRET_KEYS", " data:;base64,aHVzaA== file:///b\n")
    monkeypatch.setenv("MAGNETAR_TOKEN_PUBLIC_KEYS", "file:///a file:///b")
    settings = load_settings()
    secrets = tuple(each.get_secret_value() for each in settings.token_secret_keys)
    assert secrets == ("data:;base64,aHVzaA==", "file:///b")
    assert settings.token_public_keys == ("file:///a", "file:///b")
    assert "aHVzaA" not in repr(settings)


def test_lists_of_a_file_are_lists(tmp_path: Path) -> None:
    file = tmp_path / "broker.toml"
    file.write_text("token_secret_keys = ['a b', 'c']\ntoken_public_keys = 'd e'\n")
    settings = load_settings(file)
    assert [each.get_secret_value() for each in settings.token_secret_keys] == ["a b", "c"]
    assert settings.token_public_keys == ("d", "e")


def test_audience_goes_with_its_claim() -> None:
    for name in ("token_audience", "token_audience_claim"):
        with pytest.raises(ConfigurationError, match="set both, or neither"):
            load_settings(None, {name: "aud"})


def test_wrong_secret_is_not_shown() -> None:
    for given in ({"token_secret_keys": {"hush": 1}}, {"token_secret_keys": [["hush"]]}):
        with pytest.raises(ConfigurationError, match="Setting token_secret_keys") as refused:
            load_settings(None, given)
        assert "hush" not in f"{refused.value} {refused.value.__cause__}"
    with pytest.raises(ConfigurationError) as refused:
        load_settings(None, {"token_secret_keys": ["hush"], "token_audience": "x"})
    assert "hush" not in f"{refused.value} {refused.value.__cause__}"
