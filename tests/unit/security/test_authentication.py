"""The authenticator of the settings: sentences for what does not fit, and files loaded again."""

import subprocess
import sys
import time
from pathlib import Path

import bcrypt
import pytest
from cryptography import x509

from config.settings import ConfigurationError, Settings, load_settings
from security.authentication import make_authenticator
from security.authenticator import Authenticator
from security.errors import CredentialsRefused, InvalidSecret
from security.identity import Identity, Method, Role
from security.providers import Credentials
from security.token_keys import signing_secret
from security.tokens import create_token
from tests.unit.security.authority import Authority, der, subject
from tests.unit.security.issuer import serving

SECRET = bytes(range(32))
ISSUER = "https://issuer.example"
OIDC = {"authentication_providers": "oidc", "oidc_issuers": ISSUER, "oidc_audiences": "magnetar"}


def settings_of(**values: object) -> Settings:
    return load_settings(None, values)


def secret_file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    path.chmod(0o600)
    return path


def users(*names: str) -> bytes:
    stored = bcrypt.hashpw(b"hello", bcrypt.gensalt(4)).decode()
    return "".join(f"{name}:{stored}\n" for name in names).encode()


def token(secret: bytes = SECRET) -> bytes:
    claims = {"sub": "alice", "exp": int(time.time()) + 60}
    return create_token(signing_secret(secret, "the key"), claims).encode()


async def login(authenticator: Authenticator, method: str, data: bytes) -> str:
    identity = await authenticator.authenticate(Credentials(method, data), address="192.0.2.1")
    return identity.role


@pytest.fixture
def passwords(tmp_path: Path) -> Path:
    return secret_file(tmp_path / "users.htpasswd", users("alice", "bob"))


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return secret_file(tmp_path / "secret.key", SECRET)


def test_authentication_is_off_without_providers() -> None:
    authenticator = make_authenticator(settings_of())
    assert not authenticator.enabled
    assert not authenticator.files


def test_lists_have_commas_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGNETAR_AUTHENTICATION_PROVIDERS", "token, basic,")
    monkeypatch.setenv("MAGNETAR_PROXY_ROLES", "a proxy,proxy2")
    settings = settings_of(oidc_issuers=["https://a.example", "https://b.example"])
    assert settings.authentication_providers == ("token", "basic")
    assert settings.proxy_roles == ("a proxy", "proxy2")
    assert settings.oidc_issuers == ("https://a.example", "https://b.example")
    with pytest.raises(ConfigurationError, match="authentication_providers"):
        settings_of(authentication_providers="token,kerberos")


async def test_providers_stand_side_by_side(passwords: Path, key: Path) -> None:
    authenticator = make_authenticator(
        settings_of(
            authentication_providers="token,basic",
            token_secret_keys=str(key),
            basic_auth_file=passwords,
            anonymous_role="guest",
        )
    )
    assert authenticator.enabled
    assert await login(authenticator, "token", token()) == "alice"
    assert await login(authenticator, "basic", b"bob:hello") == "bob"
    assert await login(authenticator, "none", b"") == "guest"
    assert [file.part for file in authenticator.files] == ["token_keys", "basic_auth_file"]
    await authenticator.close()


async def test_proxies_are_those_of_the_settings(key: Path) -> None:
    authenticator = make_authenticator(
        settings_of(
            authentication_providers="token", token_secret_keys=str(key), proxy_roles="proxy"
        )
    )
    own = Identity(Role("proxy"), Method.TOKEN)
    with pytest.raises(CredentialsRefused):
        await authenticator.principal_of(own, None, address="192.0.2.1")


async def test_certificates_prove_the_name_of_the_settings() -> None:
    name = x509.DNSName("orders.example")
    authenticator = make_authenticator(
        settings_of(
            authentication_providers="tls",
            port_tls=0,
            tls_certificate_file="c.pem",
            tls_key_file="k.pem",
            tls_trust_certs_file="t.pem",
            tls_client_certificates="wanted",
            tls_principal="san",
        )
    )
    certificate = der(Authority().sign(subject("orders"), [name])[0])
    credentials = Credentials("tls", certificate=certificate)
    identity = await authenticator.authenticate(credentials, address="192.0.2.1")
    assert identity.role == "orders.example"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"authentication_providers": "basic,basic"}, "more than once"),
        ({"authentication_providers": "basic"}, r"set basic_auth_file .*htpasswd"),
        ({"authentication_providers": "token"}, "token_secret_keys or token_public_keys"),
        ({"authentication_providers": "tls"}, "tls_client_certificates to 'wanted'"),
        ({"authentication_providers": "oidc"}, "oidc_issuers is empty"),
        ({**OIDC, "oidc_audiences": ""}, "oidc_audiences is empty"),
        ({**OIDC, "oidc_issuers": "http://issuer.example"}, "must begin with https"),
        ({**OIDC, "oidc_issuers": "https://issuer.example/?a"}, "a query"),
        ({**OIDC, "oidc_trust_certs_file": "/nowhere.pem"}, r"/nowhere\.pem cannot be read"),
        ({**OIDC, "anonymous_role": " x"}, "anonymous_role has ' x'"),
        ({**OIDC, "proxy_roles": ["a*"]}, r"proxy_roles has 'a\*'"),
        ({**OIDC, "proxy_roles": "a", "anonymous_role": "a"}, "anybody could act for everybody"),
        ({**OIDC, "superuser_roles": "a", "anonymous_role": "a"}, "anybody could do everything"),
        ({**OIDC, "authenticate_original_client": True}, "proxy_roles"),
        ({"anonymous_role": "a"}, "anonymous_role is set, but authentication is off"),
        ({"proxy_roles": "a"}, "proxy_roles is set, but authentication is off"),
        ({"token_secret_keys": "x"}, "token_secret_keys is set, but 'token' is not in"),
        ({"token_public_keys": "x"}, "token_public_keys is set, but 'token' is not in"),
        ({"basic_auth_file": "x"}, "basic_auth_file is set, but 'basic' is not in"),
        ({"oidc_issuers": "x"}, "oidc_issuers is set, but 'oidc' is not in"),
    ],
)
def test_settings_that_do_not_fit_are_refused(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        make_authenticator(settings_of(**values))


def test_a_password_file_that_others_may_read_is_refused(passwords: Path) -> None:
    passwords.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        make_authenticator(settings_of(authentication_providers="basic", basic_auth_file=passwords))


def test_a_password_file_with_other_hashes_is_refused(passwords: Path) -> None:
    passwords.write_bytes(b"alice:{SHA}qvTGHdzF6KLavt4PO0gs2a6pQ00=\n")
    with pytest.raises(ConfigurationError, match=r"Line 1 of basic_auth_file .*'alice'") as error:
        make_authenticator(settings_of(authentication_providers="basic", basic_auth_file=passwords))
    assert "qvTG" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"no certificates"])
def test_an_empty_trust_file_does_not_mean_the_system_s_authorities(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "trusted.pem"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="has no certificates"):
        make_authenticator(settings_of(**OIDC, oidc_trust_certs_file=path))


# Files that change


async def test_passwords_and_keys_are_loaded_again(passwords: Path, key: Path) -> None:
    authenticator = make_authenticator(
        settings_of(
            authentication_providers="token,basic",
            token_secret_keys=str(key),
            basic_auth_file=passwords,
        )
    )
    assert not any(file.reload() for file in authenticator.files)
    new = bytes(reversed(SECRET))
    key.write_bytes(new)
    passwords.write_bytes(users("carol"))
    assert all(file.reload() for file in authenticator.files)
    assert not any(file.reload() for file in authenticator.files)
    assert await login(authenticator, "token", token(new)) == "alice"
    assert await login(authenticator, "basic", b"carol:hello") == "carol"
    for method, data in (("token", token()), ("basic", b"alice:hello")):
        with pytest.raises(CredentialsRefused):
            await login(authenticator, method, data)
    await authenticator.close()


async def test_a_bad_file_leaves_the_one_before_in_use(passwords: Path) -> None:
    authenticator = make_authenticator(
        settings_of(authentication_providers="basic", basic_auth_file=passwords)
    )
    (file,) = authenticator.files
    good = passwords.read_bytes()
    passwords.write_bytes(b"alice\n")
    for _ in range(2):  # It goes on saying so.
        with pytest.raises(InvalidSecret, match="Line 1"):
            file.reload()
    passwords.unlink()
    with pytest.raises(InvalidSecret, match="put this one back"):
        file.reload()
    assert await login(authenticator, "basic", b"alice:hello") == "alice"
    secret_file(passwords, good + users("carol"))
    assert file.reload()
    assert await login(authenticator, "basic", b"carol:hello") == "carol"
    await authenticator.close()


async def test_a_file_behind_a_link_that_changes_is_loaded(tmp_path: Path) -> None:
    """Kubernetes replaces the directory of a mounted secret by a link to a new one."""
    for name in ("alice", "carol"):
        (tmp_path / name).mkdir()
        secret_file(tmp_path / name / "users", users(name))
    (tmp_path / "current").symlink_to("alice")
    authenticator = make_authenticator(
        settings_of(
            authentication_providers="basic", basic_auth_file=tmp_path / "current" / "users"
        )
    )
    (tmp_path / "next").symlink_to("carol")
    (tmp_path / "next").rename(tmp_path / "current")
    assert [file.reload() for file in authenticator.files] == [True]
    assert await login(authenticator, "basic", b"carol:hello") == "carol"
    await authenticator.close()


async def test_the_authorities_of_issuers_are_loaded_again(tmp_path: Path) -> None:
    async with serving(tmp_path, Authority()) as issuer:
        trusted = tmp_path / "trusted.pem"
        other = Authority().write(tmp_path, subject("other"), "other")[2]
        trusted.write_bytes(other.read_bytes())
        authenticator = make_authenticator(
            settings_of(
                authentication_providers="oidc",
                oidc_issuers=issuer.url,
                oidc_audiences="magnetar",
                oidc_trust_certs_file=trusted,
            ),
            monotonic_s=lambda: tries * 100.0,
        )
        tries = 1
        valid = {"iat": time.time() - 1, "exp": time.time() + 60}
        with pytest.raises(CredentialsRefused, match="could not be fetched"):
            await login(authenticator, "token", issuer.token(**valid))
        trusted.write_bytes(issuer.authority_pem)
        assert [file.reload() for file in authenticator.files] == [True]
        tries = 2
        assert await login(authenticator, "token", issuer.token(**valid)) == "alice"
        await authenticator.close()


# Start


@pytest.mark.parametrize(
    ("providers", "absent"),
    [
        ("", ["jwt", "cryptography", "bcrypt", "aiohttp"]),
        ("basic", ["jwt", "cryptography", "aiohttp"]),
        ("token", ["aiohttp"]),
    ],
)
def test_a_provider_that_is_not_used_loads_no_libraries(
    passwords: Path, key: Path, providers: str, absent: list[str]
) -> None:
    values: dict[str, object] = {"authentication_providers": providers}
    if providers == "basic":
        values["basic_auth_file"] = str(passwords)
    if providers == "token":
        values["token_secret_keys"] = str(key)
    script = (
        "import sys\n"
        "from config.settings import load_settings\n"
        "from security.authentication import make_authenticator\n"
        f"make_authenticator(load_settings(None, {values!r}))\n"
        f"print([name for name in {absent!r} if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
