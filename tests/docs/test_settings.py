"""Settings: precedence of the sources, and refusals that say what to mend."""

from pathlib import Path

import pytest

from config.settings import ConfigurationError, load_settings


def test_command_line_beats_environment_beats_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "broker.toml"
    file.write_text("port = 1\nhttp_port = 2\ncluster_name = 'c'\n")
    monkeypatch.setenv("MAGNETAR_PORT", "3")
    monkeypatch.setenv("MAGNETAR_HTTP_PORT", "4")
    settings = load_settings(file, {"port": 5, "http_port": None})
    assert (settings.port, settings.http_port, settings.cluster_name) == (5, 4, "c")


def test_an_unknown_name_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "broker.toml"
    file.write_text("prot = 1\n")
    with pytest.raises(ConfigurationError, match=r"'prot'.*magnetar config"):
        load_settings(file)


def test_a_wrong_value_is_refused_with_the_value() -> None:
    with pytest.raises(ConfigurationError, match=r"http_port = 70000"):
        load_settings(None, {"http_port": 70000})


@pytest.mark.parametrize("text", ["port = = 1", "\xff"])
def test_a_broken_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "broker.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigurationError, match="correct that line"):
        load_settings(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_settings(tmp_path / "none.toml")


SHARED = {
    "metadata_store_url": "zk:a:2181",
    "bookkeeper_metadata_service_uri": "zk+hierarchical://a:2181/ledgers",
}


def test_a_cluster_needs_both_stores_and_a_known_rest_port() -> None:
    assert load_settings(None, SHARED).in_cluster
    assert not load_settings(None, {}).in_cluster
    for name, value in SHARED.items():
        with pytest.raises(ConfigurationError, match="set both"):
            load_settings(None, {name: value})
    with pytest.raises(ConfigurationError, match="REST port"):
        load_settings(None, {**SHARED, "http_port": 0})


def test_both_ports_may_not_be_the_same() -> None:
    assert load_settings(None, {"port": 0, "http_port": 0}).port == 0
    with pytest.raises(ConfigurationError, match="port and http_port are both 7000"):
        load_settings(None, {"port": 7000, "http_port": 7000})


@pytest.mark.parametrize(("ensemble", "write", "ack"), [(2, 3, 2), (3, 2, 3), (1, 2, 2)])
def test_quorums_that_do_not_fit_are_refused(ensemble: int, write: int, ack: int) -> None:
    sizes = {
        "ledger_ensemble_size": ensemble,
        "ledger_write_quorum": write,
        "ledger_ack_quorum": ack,
    }
    with pytest.raises(ConfigurationError, match="ledger_ack_quorum may not be above"):
        load_settings(None, sizes)


def test_the_password_of_ledgers_is_not_shown() -> None:
    settings = load_settings(None, {"ledger_password": "hush"})
    assert "hush" not in repr(settings)
    assert settings.ledger_password.get_secret_value() == "hush"


CERTIFICATE = {"tls_certificate_file": "broker.pem", "tls_key_file": "broker.key"}
TLS = {**CERTIFICATE, "port_tls": 6651, "http_port_tls": 8443}


def test_tls_is_off_by_default() -> None:
    settings = load_settings(None, {})
    assert (settings.port_tls, settings.http_port_tls, settings.uses_tls) == (None, None, False)
    assert settings.plaintext_ports


def test_ports_with_tls_are_beside_the_plain_ones_or_alone() -> None:
    assert load_settings(None, TLS).uses_tls
    assert load_settings(None, {**CERTIFICATE, "http_port_tls": 8443}).uses_tls
    alone = load_settings(None, {**TLS, "plaintext_ports": False, "port_tls": 6650})
    assert not alone.plaintext_ports


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"port_tls": 6651}, "no certificate: set tls_certificate_file and tls_key_file"),
        ({**TLS, "tls_key_file": None}, "tls_certificate_file and tls_key_file go together"),
        ({"plaintext_ports": False}, "set both, 6651 and 8443"),
        ({**TLS, "plaintext_ports": False, "port_tls": None}, "set both, 6651 and 8443"),
        ({**TLS, "port_tls": 8080}, "http_port and port_tls are both 8080"),
        ({**TLS, "port_tls": 8443}, "port_tls and http_port_tls are both 8443"),
        ({**TLS, "tls_client_certificates": "wanted"}, "wanted, but .*set tls_trust_certs_file"),
        ({**TLS, "tls_minimum_version": "1.1"}, "tls_minimum_version = '1.1' is wrong"),
        ({"broker_client_key_file": "a"}, "broker_client_key_file go together"),
        ({**SHARED, **TLS, "plaintext_ports": False, "http_port_tls": 0}, "http_port_tls is 0"),
    ],
)
def test_settings_of_tls_that_do_not_fit_are_refused(
    given: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_settings(None, given)
