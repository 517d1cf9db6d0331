"""Which URLs, files and credentials a broker uses for another cluster."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from broker.policies.cluster_data import ClusterData
from broker.replication.access import Access, access_of
from config.settings import Settings
from magnetar.credentials.kinds import BasicCredentials, OAuth2Credentials
from magnetar.errors import InvalidArgument

PLUGIN = "org.apache.pulsar.client.impl.auth."
TOKEN = {
    "authentication_plugin": f"{PLUGIN}AuthenticationToken",
    "authentication_parameters": "token:t",
}


def access(record: Mapping[str, object], **settings: object) -> Access:
    """That of a cluster with both kinds of URLs."""
    urls = {
        "service_url": "http://west:8080",
        "service_url_tls": "https://west:8443",
        "broker_service_url": "pulsar://west:6650",
        "broker_service_url_tls": "pulsar+ssl://west:6651",
    }
    given = {**urls, **record}
    return access_of(ClusterData(**given), Settings(**settings))  # type: ignore[arg-type]


def test_the_urls_with_tls_are_used_where_the_record_says_so() -> None:
    plain, secure = access({}), access({"broker_client_tls_enabled": True})
    assert (plain.url, plain.web_url) == ("pulsar://west:6650", "http://west:8080")
    assert (secure.url, secure.web_url) == ("pulsar+ssl://west:6651", "https://west:8443")


def test_authorities_are_those_of_the_record_then_of_brokers_then_of_clients() -> None:
    clients, brokers = Path("/clients.pem"), Path("/brokers.pem")
    of_clients = {"tls_trust_certs_file": clients}
    of_both = of_clients | {"broker_client_trust_certs_file": brokers}
    record: dict[str, object] = {"broker_client_trust_certs_file_path": "/west.pem"}
    assert access({}).settings.tls_trust_file is None
    assert access({}, **of_clients).settings.tls_trust_file == clients
    assert access({}, **of_both).settings.tls_trust_file == brokers
    assert access(record, **of_both).settings.tls_trust_file == "/west.pem"


def test_the_certificate_of_the_settings_is_shown_beside_a_token_of_the_record() -> None:
    own = {
        "broker_client_certificate_file": Path("/own.pem"),
        "broker_client_key_file": Path("/own.key"),
        "broker_client_token_file": Path("/own.token"),
    }
    used = access(TOKEN, **own).settings
    assert (used.token, used.tls_certificate_file) == ("token:t", "/own.pem")
    used = access({}, **own).settings
    assert (used.token, used.tls_key_file) == ("file:///own.token", "/own.key")


@pytest.mark.parametrize(
    "parameters",
    ["tlsCertFile:/a.pem,tlsKeyFile:/a.key", '{"tlsCertFile":"/a.pem","tlsKeyFile":"/a.key"}'],
)
def test_the_certificate_of_the_plugin_comes_before_others(parameters: str) -> None:
    record: dict[str, object] = {
        "authentication_plugin": f"{PLUGIN}AuthenticationTls",
        "authentication_parameters": parameters,
        "broker_client_certificate_file_path": "/west.pem",
        "broker_client_key_file_path": "/west.key",
    }
    used = access(record, broker_client_token_file=Path("/own.token")).settings
    assert (used.tls_certificate_file, used.tls_key_file) == ("/a.pem", "/a.key")
    assert used.token is None


@pytest.mark.parametrize("parameters", ["u:p", '{"userId":"u","password":"p"}'])
def test_a_password_is_read_in_both_of_its_forms(parameters: str) -> None:
    record: dict[str, object] = {
        "authentication_plugin": f"{PLUGIN}AuthenticationBasic",
        "authentication_parameters": parameters,
    }
    assert access(record).settings.basic == BasicCredentials("u", "p")


def test_the_issuer_of_tokens_is_trusted_by_the_file_of_the_parameters() -> None:
    parameters = {
        "type": "client_credentials",
        "issuerUrl": "https://issuer",
        "privateKey": "file:///key.json",
        "audience": "west",
        "trustCertsFilePath": "/issuer.pem",
    }
    record: dict[str, object] = {
        "authentication_plugin": f"{PLUGIN}oauth2.AuthenticationOAuth2",
        "authentication_parameters": json.dumps(parameters),
    }
    assert access(record).settings.oauth2 == OAuth2Credentials(
        issuer_url="https://issuer",
        key_file="file:///key.json",
        audience="west",
        trust_file="/issuer.pem",
    )


def test_certificates_are_trusted_unseen_where_the_record_says_so() -> None:
    checked, trusting = access({}), access({"tls_allow_insecure_connection": True})
    assert checked.settings.tls_check_certificate
    assert checked.settings.tls_check_hostname
    assert not trusting.settings.tls_check_certificate
    assert not trusting.settings.tls_check_hostname


def test_no_secret_is_in_the_error_for_parameters_that_cannot_be_read() -> None:
    record: dict[str, object] = {
        "authentication_plugin": f"{PLUGIN}AuthenticationBasic",
        "authentication_parameters": '{"password": "secret"',
    }
    with pytest.raises(InvalidArgument) as caught:
        access(record)
    assert "authenticationParameters" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None
