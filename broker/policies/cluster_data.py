"""What is registered of another cluster: Pulsar's ClusterData.  Pure.

Members that are not served are refused by their names, unless they ask for nothing.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import ClassVar, Final
from urllib.parse import urlsplit

from broker.policies.cluster_credentials import credentials_in
from config.bounds import MAX_CLUSTERS
from magnetar.errors import InvalidArgument
from magnetar.protocol.names import MAX_NAME_LENGTH
from magnetar.protocol.server_error import PeerError, ServerError
from magnetar.wire.service_url import parse_service_url

_NAME: Final = re.compile(r"(?!\.\.?\Z)[-=:.A-Za-z0-9_]+")
_RESERVED: Final = "global"
"""Pulsar's name for a namespace without a cluster, in names of old clients."""
_PEM: Final = "certificates and keys are PEM files: give brokerClientTrustCertsFilePath and so on"
_NO_PROXY: Final = "brokers connect to other clusters themselves, without such a proxy"
_UNSERVED: Final[Mapping[str, str]] = {
    "proxyServiceUrl": _NO_PROXY,
    "proxyProtocol": _NO_PROXY,
    "brokerClientTlsEnabledWithKeyStore": _PEM,
    "brokerClientTlsTrustStoreType": _PEM,
    "brokerClientTlsTrustStore": _PEM,
    "brokerClientTlsTrustStorePassword": _PEM,
    "brokerClientTlsKeyStoreType": _PEM,
    "brokerClientTlsKeyStore": _PEM,
    "brokerClientTlsKeyStorePassword": _PEM,
    "brokerClientSslFactoryPlugin": _PEM,
    "brokerClientSslFactoryPluginParams": _PEM,
    "brokerClientTlsFactoryClassName": _PEM,
    "brokerClientTlsFactoryConfig": _PEM,
}
"""Members of Pulsar's that are not served, and why."""
_ASKING_FOR_NOTHING: Final = (
    *(None, "", False, "JKS"),
    "org.apache.pulsar.common.util.DefaultPulsarSslFactory",
)
"""Values of such members that Pulsar's tools send by default."""


class InvalidClusterName(PeerError):
    """The text is not a valid name of a cluster."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.PRECONDITION_FAILED


class InvalidClusterData(PeerError):
    """The description of a cluster cannot be used.  No secret is in the message."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.BAD_REQUEST


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterData:
    """Where another cluster is, and how this one logs in there."""

    service_url: str | None = None
    """REST, `http://host:port`."""
    service_url_tls: str | None = None
    broker_service_url: str | None = None
    """`pulsar://host:port,...`"""
    broker_service_url_tls: str | None = None
    listener_name: str | None = None
    """The listener whose addresses the other cluster's brokers are to answer."""
    authentication_plugin: str | None = None
    """One of those that `credentials_in` reads; None: the credentials of this broker's settings."""
    authentication_parameters: str | None = field(default=None, repr=False)
    """A secret, or where one is."""
    peer_cluster_names: tuple[str, ...] = ()
    """Clusters that are never in one list of clusters with this one."""
    broker_client_tls_enabled: bool = False
    """Whether the URLs with TLS are used."""
    tls_allow_insecure_connection: bool = False
    """Whether the other cluster's certificates are trusted unseen."""
    broker_client_trust_certs_file_path: str | None = None
    broker_client_key_file_path: str | None = None
    broker_client_certificate_file_path: str | None = None

    @property
    def url(self) -> str:
        """The URL that brokers connect to, by `broker_client_tls_enabled`."""
        url = self.broker_service_url_tls
        return (url if self.broker_client_tls_enabled else self.broker_service_url) or ""

    @property
    def web_url(self) -> str | None:
        """The URL for REST requests, by `broker_client_tls_enabled`; None if it has none."""
        return self.service_url_tls if self.broker_client_tls_enabled else self.service_url

    def json(self) -> Mapping[str, object]:
        """As Pulsar writes it, without what is not set.  It has the secret."""
        members: Mapping[str, object] = {
            "serviceUrl": self.service_url,
            "serviceUrlTls": self.service_url_tls,
            "brokerServiceUrl": self.broker_service_url,
            "brokerServiceUrlTls": self.broker_service_url_tls,
            "listenerName": self.listener_name,
            "authenticationPlugin": self.authentication_plugin,
            "authenticationParameters": self.authentication_parameters,
            "peerClusterNames": list(self.peer_cluster_names) or None,
            "brokerClientTlsEnabled": self.broker_client_tls_enabled,
            "tlsAllowInsecureConnection": self.tls_allow_insecure_connection,
            "brokerClientTrustCertsFilePath": self.broker_client_trust_certs_file_path,
            "brokerClientKeyFilePath": self.broker_client_key_file_path,
            "brokerClientCertificateFilePath": self.broker_client_certificate_file_path,
        }
        return {member: value for member, value in members.items() if value is not None}


def is_cluster_name(name: str) -> bool:
    """Whether Pulsar takes this as the name of a cluster."""
    return len(name) <= MAX_NAME_LENGTH and bool(_NAME.fullmatch(name)) and name != _RESERVED


def require_cluster_name(name: str) -> None:
    """Raise `InvalidClusterName` for what is not the name of a cluster."""
    if not is_cluster_name(name):
        raise InvalidClusterName(
            f"{name!r:.100} is not the name of a cluster; use letters, digits and any of "
            f"- = : . _ only, and not . or .. or {_RESERVED} alone."
        )


def cluster_data_in(body: Mapping[str, object]) -> ClusterData:
    """The description in a request.  Raises `InvalidClusterData`."""
    for member, reason in _UNSERVED.items():
        # Compared with `==`, 0 is false, which is as little.
        if body.get(member) not in _ASKING_FOR_NOTHING:
            raise InvalidClusterData(f"{member} is not served, as {reason}. Leave it out.")
    data = stored_cluster_data(body)
    unknown = sorted(body.keys() - _UNSERVED.keys() - _KNOWN)
    if unknown:
        raise InvalidClusterData(
            f"A cluster has no {', '.join(unknown):.100}: send {', '.join(sorted(_KNOWN))}."
        )
    _require_broker_url("brokerServiceUrl", data.broker_service_url, tls=False)
    _require_broker_url("brokerServiceUrlTls", data.broker_service_url_tls, tls=True)
    _require_web_url("serviceUrl", data.service_url, "http")
    _require_web_url("serviceUrlTls", data.service_url_tls, "https")
    if not data.url:
        missing, value = ("brokerServiceUrl", "false")
        if data.broker_client_tls_enabled:
            missing, value = ("brokerServiceUrlTls", "true")
        raise InvalidClusterData(
            f"The cluster lacks {missing}, which is what brokers connect to where "
            f"brokerClientTlsEnabled is {value}: add it."
        )
    _require_credentials(data)
    return data


def stored_cluster_data(value: Mapping[str, object]) -> ClusterData:
    """The description in a record.  Raises `InvalidClusterData` for members of a wrong type."""
    return ClusterData(
        service_url=_text(value, "serviceUrl"),
        service_url_tls=_text(value, "serviceUrlTls"),
        broker_service_url=_text(value, "brokerServiceUrl"),
        broker_service_url_tls=_text(value, "brokerServiceUrlTls"),
        listener_name=_text(value, "listenerName"),
        authentication_plugin=_text(value, "authenticationPlugin"),
        authentication_parameters=_text(value, "authenticationParameters"),
        peer_cluster_names=peer_names_in(value.get("peerClusterNames")),
        broker_client_tls_enabled=_flag(value, "brokerClientTlsEnabled"),
        tls_allow_insecure_connection=_flag(value, "tlsAllowInsecureConnection"),
        broker_client_trust_certs_file_path=_text(value, "brokerClientTrustCertsFilePath"),
        broker_client_key_file_path=_text(value, "brokerClientKeyFilePath"),
        broker_client_certificate_file_path=_text(value, "brokerClientCertificateFilePath"),
    )


_KNOWN: Final = frozenset(
    ClusterData(
        service_url="",
        service_url_tls="",
        broker_service_url="",
        broker_service_url_tls="",
        listener_name="",
        authentication_plugin="",
        authentication_parameters="",
        peer_cluster_names=("",),
        broker_client_trust_certs_file_path="",
        broker_client_key_file_path="",
        broker_client_certificate_file_path="",
    ).json()
)
"""The members that are served."""


def peer_names_in(value: object) -> tuple[str, ...]:
    """The names of peers, each once.

    Raises `InvalidClusterData` unless it is a list of names, of no more than there can be.
    """
    names = [] if value is None else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidClusterData("peerClusterNames must be a list of names of clusters.")
    peers = tuple(dict.fromkeys(names))
    if len(peers) > MAX_CLUSTERS:
        raise InvalidClusterData(
            f"peerClusterNames has {len(peers)} names, and there are at most {MAX_CLUSTERS}."
        )
    return peers


def _text(value: Mapping[str, object], member: str) -> str | None:
    text = value.get(member)
    if text is not None and not isinstance(text, str):
        raise InvalidClusterData(f"{member} must be a text: send one, or leave it out.")
    return text or None


def _flag(value: Mapping[str, object], member: str) -> bool:
    flag = value.get(member)
    if flag is not None and not isinstance(flag, bool):
        raise InvalidClusterData(f"{member} must be true or false: send one, or leave it out.")
    return flag is True


def _require_broker_url(member: str, url: str | None, *, tls: bool) -> None:
    if url is None:
        return
    try:
        fits = parse_service_url(url).tls is tls
    except InvalidArgument:
        fits = False
    if not fits:
        example = "pulsar+ssl://host:6651" if tls else "pulsar://host:6650"
        raise InvalidClusterData(
            f"{member} is no URL of brokers: send one such as {example}, with further hosts after "
            "commas."
        )


def _require_web_url(member: str, url: str | None, scheme: str) -> None:
    if url is None:
        return
    try:
        parts = urlsplit(url)
        fits = bool(parts.scheme == scheme and parts.hostname and parts.port != 0)
    except ValueError:
        fits = False
    else:
        # A user's name and password would be a secret in logs.
        fits = fits and "@" not in parts.netloc and "," not in parts.netloc
        fits = fits and parts.path in ("", "/") and not parts.query and not parts.fragment
        fits = fits and url.isascii() and url.isprintable() and " " not in url
    if not fits:
        raise InvalidClusterData(
            f"{member} is no URL for REST requests: send one of a single host, such as "
            f"{scheme}://host:8080, without user, path and query."
        )


def _require_credentials(data: ClusterData) -> None:
    plugin, parameters = data.authentication_plugin, data.authentication_parameters
    if (plugin is None) != (parameters is None):
        raise InvalidClusterData(
            "authenticationPlugin and authenticationParameters go together: send both or neither."
        )
    if plugin is not None and parameters is not None:
        try:
            credentials_in(plugin, parameters)
        except InvalidArgument as error:
            raise InvalidClusterData(str(error)) from None
    files = data.broker_client_certificate_file_path, data.broker_client_key_file_path
    if (files[0] is None) != (files[1] is None):
        raise InvalidClusterData(
            "brokerClientCertificateFilePath and brokerClientKeyFilePath go together: send both or "
            "neither."
        )
