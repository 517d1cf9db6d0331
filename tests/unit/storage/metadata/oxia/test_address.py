"""Addresses of clusters."""

import pytest

from storage.metadata.oxia.address import InvalidOxiaAddress, OxiaAddress, parse_address


@pytest.mark.parametrize(
    ("url", "servers", "namespace"),
    [
        ("oxia://oxia:6648/broker", ("oxia:6648",), "broker"),
        ("oxia://oxia:7000", ("oxia:7000",), "default"),
        ("oxia://oxia", ("oxia:6648",), "default"),
        ("oxia://[::1]:6648/a", ("[::1]:6648",), "a"),
        ("oxia:host:1/a", ("host:1",), "a"),
        ("oxia://a,b:7000,[::1]/x", ("a:6648", "b:7000", "[::1]:6648"), "x"),
    ],
)
def test_addresses(url: str, servers: tuple[str, ...], namespace: str) -> None:
    assert parse_address(url) == OxiaAddress(servers, namespace)


@pytest.mark.parametrize(
    "url",
    [
        "oxia://",
        "oxia://a:b",
        "oxia://a:99999",
        "oxia://a/b/c",
        "oxia://a b",
        "oxia://a,",
        "oxia://a,,b/c",
    ],
)
def test_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidOxiaAddress):
        parse_address(url)
