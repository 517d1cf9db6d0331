"""Pure: the URLs and credentials with which this broker reaches another cluster, by its record."""

from dataclasses import dataclass
from typing import Final

from broker.policies.cluster_credentials import ClusterCredentials, credentials_in
from broker.policies.cluster_data import ClusterData
from config.settings import Settings
from magnetar.credentials.rest import RestCredentials
from magnetar.settings import ClientSettings

DESCRIPTION: Final = "replicator"


@dataclass(frozen=True, slots=True)
class Access:
    """The URLs of another cluster, and the settings of the connections to it."""

    url: str
    web_url: str | None
    """None if the record has none: then what needs REST is refused."""
    settings: ClientSettings

    def rest_credentials(self) -> RestCredentials:
        """The credentials of `settings`, for REST."""
        settings = self.settings
        token = settings.token
        assert token is None or isinstance(token, str), "made from text below"
        return RestCredentials(token, settings.basic, settings.oauth2)


def access_of(data: ClusterData, settings: Settings) -> Access:
    """The access to a cluster, with this broker's own credentials where its record has none.

    Raises `InvalidArgument` for credentials that cannot be used, without showing them.
    """
    plugin, parameters = data.authentication_plugin, data.authentication_parameters
    shown = credentials_in(plugin, parameters or "") if plugin else _own_token(settings)
    certificate = data.broker_client_certificate_file_path
    key = data.broker_client_key_file_path
    if shown.certificate is not None:
        certificate, key = shown.certificate
    elif certificate is None and settings.broker_client_certificate_file is not None:
        certificate = str(settings.broker_client_certificate_file)
        key = str(settings.broker_client_key_file)
    # As between the brokers of one cluster.
    trust = (
        data.broker_client_trust_certs_file_path
        or settings.broker_client_trust_certs_file
        or settings.tls_trust_certs_file
    )
    trusting = data.tls_allow_insecure_connection
    return Access(
        data.url,
        data.web_url,
        ClientSettings(
            token=shown.token,
            basic=shown.basic,
            oauth2=shown.oauth2,
            tls_trust_file=trust,
            tls_certificate_file=certificate,
            tls_key_file=key,
            tls_check_certificate=not trusting,
            tls_check_hostname=not trusting,
            listener_name=data.listener_name,
            description=DESCRIPTION,
        ),
    )


def _own_token(settings: Settings) -> ClusterCredentials:
    file = settings.broker_client_token_file
    return ClusterCredentials(token=None if file is None else file.absolute().as_uri())
