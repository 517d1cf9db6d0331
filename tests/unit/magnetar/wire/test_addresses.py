"""Service URLs, settings, proofs: what is taken and what is refused."""

from dataclasses import fields

import pytest

from magnetar.consume.settings import (
    CheckpointOptions,
    CheckpointSettings,
    QueueOptions,
    QueueSettings,
    StreamOptions,
    StreamSettings,
)
from magnetar.errors import AuthenticationFailed, InvalidArgument
from magnetar.options import ProducerOptions
from magnetar.produce.producer_settings import ProducerSettings
from magnetar.settings import ClientOptions, ClientSettings
from magnetar.wire.authentication import TokenAuthentication, authentication_of
from magnetar.wire.connection import hello
from magnetar.wire.service_url import BrokerAddress, HostPort, parse_service_url
from magnetar.wire.tls import tls_context


@pytest.mark.parametrize(
    ("text", "hosts", "tls"),
    [
        ("pulsar://h", [("h", 6650)], False),
        ("pulsar://h/", [("h", 6650)], False),
        ("pulsar+ssl://h", [("h", 6651)], True),
        ("pulsar://a:1,b,c:3", [("a", 1), ("b", 6650), ("c", 3)], False),
        ("pulsar://[::1]:7,[fe80::1]", [("::1", 7), ("fe80::1", 6650)], False),
    ],
)
def test_service_urls(text: str, hosts: list[tuple[str, int]], tls: bool) -> None:
    url = parse_service_url(text)
    assert list(url.hosts) == hosts
    assert url.tls is tls


@pytest.mark.parametrize(
    "text",
    [
        *("", "h:6650", "http://h", "pulsar://", "pulsar://h:0", "pulsar://h:65536"),
        *("pulsar://h,", "pulsar://h:x", "pulsar://a b", "pulsar://u@h", "pulsar://::1"),
        *("pulsar://a..b", f"pulsar://{'a' * 64}.b", "pulsar://a\0b"),
    ],
)
def test_invalid_service_url_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_service_url(text)


def test_addresses_are_written_as_brokers_write_them() -> None:
    logical, physical = HostPort("::1", 1), HostPort("proxy", 2)
    assert str(BrokerAddress(logical, logical)) == "pulsar://[::1]:1"
    through = BrokerAddress(logical, physical, tls=True)
    assert through.proxied
    assert hello(through, "none", b"").proxy_to_broker_url == "[::1]:1"
    assert not hello(BrokerAddress(logical, logical), "none", b"").HasField("proxy_to_broker_url")


def test_connect_command_has_the_description_behind_the_version() -> None:
    here = BrokerAddress(HostPort("h", 1), HostPort("h", 1))
    plain = hello(here, "none", b"").client_version
    assert hello(here, "none", b"", "night shift").client_version == f"{plain}-night shift"


@pytest.mark.parametrize("text", ["x" * 65, "two\nlines"])
def test_a_description_is_short_and_of_one_line(text: str) -> None:
    with pytest.raises(InvalidArgument, match="64 printable"):
        ClientSettings(description=text)
    assert ClientSettings(description="x" * 64).description


@pytest.mark.parametrize(
    "options",
    [
        {"operation_timeout_s": 0},
        {"connect_timeout_s": -1},
        {"keep_alive_s": float("nan")},
        {"close_timeout_s": float("inf")},
        {"tls_certificate_file": "x"},
        {"token": ""},
    ],
)
def test_settings_that_cannot_be(options: ClientOptions) -> None:
    with pytest.raises(InvalidArgument):
        ClientSettings(**options)


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (ClientOptions, ClientSettings),
        (ProducerOptions, ProducerSettings),
        (QueueOptions, QueueSettings),
        (StreamOptions, StreamSettings),
        (CheckpointOptions, CheckpointSettings),
    ],
)
def test_options_are_the_settings(options: type, settings: type) -> None:
    assert set(options.__annotations__) == {each.name for each in fields(settings)}


@pytest.mark.parametrize(
    "settings",
    [
        ClientSettings(tls_trust_file="/nowhere.pem"),
        ClientSettings(tls_certificate_file="/nowhere.pem", tls_key_file="/nowhere.pem"),
    ],
)
def test_tls_files_that_cannot_be_used(settings: ClientSettings) -> None:
    with pytest.raises(InvalidArgument, match=r"nowhere\.pem"):
        tls_context(settings)


def test_how_one_authenticates() -> None:
    certificate = ClientSettings(tls_certificate_file="c", tls_key_file="k")
    both = ClientSettings(tls_certificate_file="c", tls_key_file="k", token="t")
    assert authentication_of(ClientSettings()).method == "none"
    assert authentication_of(certificate).method == "tls"
    assert authentication_of(both).method == "token"


async def test_a_token_may_be_given_anew_each_time() -> None:
    tokens = iter(["one", "two"])

    async def fetched() -> str:
        return next(tokens)

    assert await TokenAuthentication("fixed").data() == b"fixed"
    assert await TokenAuthentication(lambda: "called").data() == b"called"
    authentication = TokenAuthentication(fetched)
    assert [await authentication.data(), await authentication.data()] == [b"one", b"two"]


async def test_a_token_that_cannot_be_had() -> None:
    def fails() -> str:
        raise OSError("no disk")

    with pytest.raises(AuthenticationFailed, match="no disk"):
        await TokenAuthentication(fails).data()
    with pytest.raises(AuthenticationFailed, match="not text"):
        await TokenAuthentication(lambda: 7).data()  # type: ignore[arg-type]
