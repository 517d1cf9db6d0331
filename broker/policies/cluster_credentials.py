"""The credentials in the record of a cluster: Pulsar's authentication plugins.  Pure.

Parameters that are not served are refused by their names.  No secret is in an error.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from magnetar.credentials.kinds import BasicCredentials, OAuth2Credentials, check_issuer_url
from magnetar.credentials.secrets import file_of, token_source
from magnetar.errors import InvalidArgument

_PLUGINS: Final = "org.apache.pulsar.client.impl.auth."
_TOKEN: Final = f"{_PLUGINS}AuthenticationToken"
_BASIC: Final = f"{_PLUGINS}AuthenticationBasic"
_TLS: Final = f"{_PLUGINS}AuthenticationTls"
_OAUTH2: Final = f"{_PLUGINS}oauth2.AuthenticationOAuth2"
AUTHENTICATION_PLUGINS: Final = (_TOKEN, _BASIC, _TLS, _OAUTH2)
"""Pulsar's names of ways to log in at another cluster."""

_OAUTH2_KEYS: Final = ("issuerUrl", "privateKey", "audience", "scope", "trustCertsFilePath")
_OAUTH2_FIXED: Final[Mapping[str, str]] = {
    "type": "client_credentials",
    "tokenEndpointAuthMethod": "client_secret_post",
}
"""Keys with one value that is served, which Pulsar has by default."""


@dataclass(frozen=True, slots=True)
class ClusterCredentials:
    """What a cluster is shown; of a certificate, its file and that of its key."""

    token: str | None = field(default=None, repr=False)
    basic: BasicCredentials | None = None
    oauth2: OAuth2Credentials | None = None
    certificate: tuple[str, str] | None = None


def credentials_in(plugin: str, parameters: str) -> ClusterCredentials:
    """The credentials that a plugin's parameters describe.

    Raises `InvalidArgument` for parameters that cannot be used, and for an unknown plugin.
    """
    if plugin == _TOKEN:
        token_source(parameters)
        return ClusterCredentials(token=parameters)
    if plugin == _BASIC:
        return ClusterCredentials(basic=_basic_in(parameters))
    if plugin == _TLS:
        return ClusterCredentials(certificate=_certificate_in(parameters))
    if plugin == _OAUTH2:
        return ClusterCredentials(oauth2=_oauth2_in(parameters))
    raise InvalidArgument(
        f"authenticationPlugin cannot be {plugin!r:.100}: send one of "
        f"{', '.join(AUTHENTICATION_PLUGINS)}."
    )


def _basic_in(parameters: str) -> BasicCredentials:
    """`{"userId": ..., "password": ...}`, or `user:password`."""
    found = _json_in(parameters)
    if found is None:
        user, _, password = parameters.partition(":")
        return BasicCredentials(user, password)
    texts = _texts_in(found, ("userId", "password"))
    return BasicCredentials(texts.get("userId", ""), texts.get("password", ""))


def _certificate_in(parameters: str) -> tuple[str, str]:
    """`tlsCertFile:FILE,tlsKeyFile:FILE`, or the same as a JSON object."""
    found = _json_in(parameters)
    if found is None:
        pairs = [part.partition(":") for part in parameters.split(",") if part]
        if not all(colon for _, colon, _ in pairs):
            # Without the text: a token is a secret here too.
            raise InvalidArgument(
                "authenticationParameters must be tlsCertFile:FILE,tlsKeyFile:FILE here."
            )
        found = {name.strip(): value.strip() for name, _, value in pairs}
    files = _texts_in(found, ("tlsCertFile", "tlsKeyFile"))
    try:
        return files["tlsCertFile"], files["tlsKeyFile"]
    except KeyError as missing:
        raise InvalidArgument(f"authenticationParameters lack {missing.args[0]}: add it.") from None


def _oauth2_in(parameters: str) -> OAuth2Credentials:
    """Pulsar's JSON object for client credentials, whose id and secret are in a file."""
    texts = _texts_in(_json_in(parameters) or {}, (*_OAUTH2_KEYS, *_OAUTH2_FIXED))
    for name, served in _OAUTH2_FIXED.items():
        if texts.get(name, served) != served:
            raise InvalidArgument(
                f"{name} of authenticationParameters can only be {served}: leave it out."
            )
    key_file, issuer_url = texts.get("privateKey", ""), texts.get("issuerUrl")
    if not key_file or key_file.startswith("data:"):
        raise InvalidArgument(
            "privateKey of authenticationParameters must name a JSON file with the client's id and "
            "secret at each broker: send it as file:///PATH."
        )
    file_of(key_file, "privateKey")
    if issuer_url is not None:
        check_issuer_url(issuer_url, require_https=True, name="issuerUrl")
    return OAuth2Credentials(
        issuer_url=issuer_url,
        key_file=key_file,
        audience=texts.get("audience"),
        scope=texts.get("scope"),
        trust_file=texts.get("trustCertsFilePath"),
    )


def _texts_in(found: Mapping[str, object], served: Collection[str]) -> Mapping[str, str]:
    """The texts, without those that are null.  Raises `InvalidArgument` for any other key."""
    unknown = sorted(found.keys() - set(served))
    if unknown:
        raise InvalidArgument(
            f"{', '.join(unknown):.100} of authenticationParameters is not served: send "
            f"{', '.join(served)} only."
        )
    texts = {name: value for name, value in found.items() if value is not None}
    wrong = [name for name, value in texts.items() if not isinstance(value, str)]
    if wrong:
        raise InvalidArgument(f"{wrong[0]} of authenticationParameters must be a text.")
    return {name: str(value) for name, value in texts.items()}


def _json_in(parameters: str) -> Mapping[str, object] | None:
    """The object in a text that begins as one.  Raises `InvalidArgument`."""
    if not parameters.lstrip().startswith("{"):
        return None
    try:
        found = json.loads(parameters)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        # Without its cause, which has the text, a secret.
        raise InvalidArgument(
            "The authenticationParameters of the cluster are no JSON object: write them anew."
        ) from None
    return found
