"""Settings that must fit together before a broker starts."""

import pytest

from config.settings import ConfigurationError, Settings, load_settings

TOKENS = {"authentication_providers": "token"}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_nobody_needs_credentials_where_only_this_machine_reaches_the_ports(host: str) -> None:
    assert load_settings(None, {"bind_host": host}).bind_host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "broker.example"])
def test_an_address_that_others_reach_wants_authentication_or_a_word(host: str) -> None:
    with pytest.raises(ConfigurationError, match="read and delete everything"):
        load_settings(None, {"bind_host": host})
    load_settings(None, {"bind_host": host, "insecure": True})
    load_settings(None, {"bind_host": host, **TOKENS})


def test_without_configuration_a_broker_listens_on_loopback() -> None:
    assert Settings().bind_host == "127.0.0.1"


@pytest.mark.parametrize("mode", ["on", "dry_run"])
def test_authorization_wants_authentication(mode: str) -> None:
    with pytest.raises(ConfigurationError, match="nobody has a role"):
        load_settings(None, {"authorization": mode})
    load_settings(None, {"authorization": mode, **TOKENS})


def test_names_are_separated_by_commas_in_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MAGNETAR_SUPERUSER_ROLES", "admin, root ,")
    assert load_settings().superuser_roles == ("admin", "root")
