"""The authenticator that the settings describe.

The modules of a provider, and the libraries that they need, are imported when the settings name it.
"""

import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from config.bounds import PASSWORD_FILE_BYTES, TLS_RELOAD_FILE_BYTES
from config.settings import SETTINGS_OF_PROVIDERS, ConfigurationError, Settings
from security.audit import AuditLog
from security.authenticator import Authenticator
from security.errors import InvalidSecret
from security.failed_logins import FailedLogins
from security.identity import InvalidRole, Role, role_of
from security.loaded_files import LoadedFiles
from security.providers import Provider
from security.secret_files import read_public, read_secret


@dataclass(frozen=True, slots=True)
class _MadeProvider:
    provider: Provider
    files: tuple[LoadedFiles, ...] = ()
    closers: tuple[Callable[[], Awaitable[None]], ...] = ()


def make_authenticator(
    settings: Settings,
    *,
    now_s: Callable[[], float] = time.time,
    monotonic_s: Callable[[], float] = time.monotonic,
    audit: AuditLog | None = None,
) -> Authenticator:
    """Make the authenticator of the settings, and load its files.

    `now_s` is the wall clock in seconds since 1970.  Raises `ConfigurationError` for settings that
    do not fit together and for files that cannot be used.
    """
    _require_consistent(settings)
    failed_logins = FailedLogins(monotonic_s)
    makers = {
        "token": lambda: _make_token(settings, now_s),
        "oidc": lambda: _make_oidc(settings, now_s, monotonic_s),
        "basic": lambda: _make_basic(settings, failed_logins, monotonic_s),
        "tls": lambda: _make_tls(settings, now_s),
    }
    try:
        made = [makers[name]() for name in settings.authentication_providers]
    except InvalidSecret as error:
        raise ConfigurationError(str(error)) from error
    return Authenticator(
        [each.provider for each in made],
        failed_logins=failed_logins,
        now_s=now_s,
        audit=audit,
        anonymous_role=_role("anonymous_role", settings.anonymous_role)
        if settings.anonymous_role
        else None,
        proxy_roles=frozenset(_role("proxy_roles", text) for text in settings.proxy_roles),
        authenticate_original_client=settings.authenticate_original_client,
        files=[file for each in made for file in each.files],
        closers=[close for each in made for close in each.closers],
    )


def _require_consistent(settings: Settings) -> None:
    names = settings.authentication_providers
    if len(set(names)) != len(names):
        raise ConfigurationError(
            "authentication_providers has a name more than once: write each of them once."
        )
    for name, needed_by in SETTINGS_OF_PROVIDERS.items():
        for setting in needed_by:
            if getattr(settings, setting) and name not in names:
                # Without this the operator believes that clients need credentials.
                raise ConfigurationError(
                    f"{setting} is set, but '{name}' is not in authentication_providers: add it "
                    f"there, or remove {setting}."
                )
    for setting in ("anonymous_role", "proxy_roles"):
        if getattr(settings, setting) and not names:
            raise ConfigurationError(
                f"{setting} is set, but authentication is off: name a provider in "
                f"authentication_providers, or remove {setting}."
            )
    if settings.anonymous_role and settings.anonymous_role in settings.proxy_roles:
        raise ConfigurationError(
            "anonymous_role is one of proxy_roles, so anybody could act for everybody: name "
            "another role."
        )
    if settings.anonymous_role and settings.anonymous_role in settings.superuser_roles:
        raise ConfigurationError(
            "anonymous_role is one of superuser_roles, so anybody could do everything: name "
            "another role."
        )
    if settings.authenticate_original_client and not settings.proxy_roles:
        raise ConfigurationError(
            "authenticate_original_client is set, but no role may act for clients: name those of "
            "proxies in proxy_roles."
        )


def _role(setting: str, text: str) -> Role:
    try:
        return role_of(text)
    except InvalidRole as error:
        raise ConfigurationError(f"{setting} has {text!r}. {error} Correct it.") from error


def _make_token(settings: Settings, now_s: Callable[[], float]) -> _MadeProvider:
    from security.token_provider import (
        TokenProvider,
        load_token_keys,
        token_key_files,
        token_rules,
    )

    def load() -> None:
        provider.use_keys(load_token_keys(settings))

    files = LoadedFiles("token_keys", token_key_files(settings), load)
    provider = TokenProvider(load_token_keys(settings), token_rules(settings), now_s)
    return _MadeProvider(provider, (files,))


def _make_basic(
    settings: Settings, failed_logins: FailedLogins, monotonic_s: Callable[[], float]
) -> _MadeProvider:
    from security.basic import BasicProvider
    from security.password_file import PasswordFile, parse_password_file

    path = settings.basic_auth_file
    if path is None:
        raise ConfigurationError(
            "'basic' is in authentication_providers, but there are no users: set basic_auth_file "
            "to a file that `htpasswd -B -c FILE USER` has made."
        )

    def read() -> PasswordFile:
        content = read_secret(path, limit_bytes=PASSWORD_FILE_BYTES)
        return parse_password_file(content, f"basic_auth_file {path}")

    files = LoadedFiles("basic_auth_file", (path,), lambda: provider.use(read()))
    provider = BasicProvider(read(), failed_logins=failed_logins, now_s=monotonic_s)
    return _MadeProvider(provider, (files,), (provider.close,))


def _make_tls(settings: Settings, now_s: Callable[[], float]) -> _MadeProvider:
    from security.certificates import TlsProvider

    if not settings.uses_tls or settings.tls_client_certificates == "ignored":
        raise ConfigurationError(
            "'tls' is in authentication_providers, but clients are not asked for certificates: set "
            "port_tls and http_port_tls, tls_trust_certs_file, and tls_client_certificates to "
            "'wanted' or 'required'."
        )
    return _MadeProvider(TlsProvider(settings.tls_principal, now_s=now_s))


def _make_oidc(
    settings: Settings, now_s: Callable[[], float], monotonic_s: Callable[[], float]
) -> _MadeProvider:
    from security.oidc import OidcProvider, OidcRules
    from security.oidc_keys import InvalidIssuer, require_issuer_url

    for setting in ("oidc_issuers", "oidc_audiences"):
        if not getattr(settings, setting):
            raise ConfigurationError(
                f"'oidc' is in authentication_providers, but {setting} is empty: name those whose "
                "tokens are taken."
            )
    for issuer in settings.oidc_issuers:
        if "?" in issuer:
            raise ConfigurationError(f"oidc_issuers has {issuer!r} with a query: leave that out.")
        try:
            require_issuer_url(issuer, require_https=settings.oidc_require_https)
        except InvalidIssuer as error:
            raise ConfigurationError(f"oidc_issuers has {issuer!r}. {error} Correct it.") from error
    path = settings.oidc_trust_certs_file
    rules = OidcRules(
        frozenset(settings.oidc_issuers),
        frozenset(settings.oidc_audiences),
        role_claim=settings.oidc_role_claim,
        require_https=settings.oidc_require_https,
        clock_skew_s=settings.oidc_clock_skew_s,
        key_cache_s=settings.oidc_key_cache_s,
        unknown_key_refresh_s=settings.oidc_unknown_key_refresh_s,
    )
    files = (
        ()
        if path is None
        else (LoadedFiles("oidc_trust_certs_file", (path,), lambda: provider.use(_trusting(path))),)
    )
    provider = OidcProvider(rules, _trusting(path), now_s=now_s, monotonic_s=monotonic_s)
    return _MadeProvider(provider, files, (provider.close,))


def _trusting(path: Path | None) -> ssl.SSLContext:
    """A context for connections to issuers.  Raises `InvalidSecret`."""
    if path is None:
        return ssl.create_default_context()
    pem = read_public(path, limit_bytes=TLS_RELOAD_FILE_BYTES)
    # Not by create_default_context, which takes the system's authorities for an empty file.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(cadata=pem.decode("ascii", "ignore"))
    except (ValueError, ssl.SSLError) as error:
        raise InvalidSecret(
            f"oidc_trust_certs_file {path} has no certificates: name a PEM file with those of "
            "authorities."
        ) from error
    return context
