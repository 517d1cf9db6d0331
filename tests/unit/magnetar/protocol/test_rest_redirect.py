"""Redirects of REST: which are followed, and that no text breaks the decision."""

from contextlib import suppress
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.protocol.rest_redirect import RedirectRefused, redirect_target


@pytest.mark.parametrize(
    ("url", "location", "target"),
    [
        ("http://a:1/x", "http://b:2/y?z", "http://b:2/y?z"),
        ("https://a:1/x", "https://b:2/y", "https://b:2/y"),
        ("https://a:1/x/y", "/z", "https://a:1/z"),
        ("https://a:1/x", "//b/y", "https://b/y"),
    ],
)
@pytest.mark.parametrize("with_credentials", [False, True])
def test_redirect_of_the_same_scheme_is_followed(
    url: str, location: str, target: str, with_credentials: bool
) -> None:
    assert redirect_target(url, location, with_credentials=with_credentials) == target


def test_redirect_to_https_is_followed_without_credentials_alone() -> None:
    target = redirect_target("http://a/x", "https://b/y", with_credentials=False)
    assert target == "https://b/y"
    with pytest.raises(RedirectRefused, match="as it has credentials: name a broker"):
        redirect_target("http://a/x", "https://b/y", with_credentials=True)


@pytest.mark.parametrize("location", ["http://b/y", "ftp://b/y", "file:///y", "http://[/"])
@pytest.mark.parametrize("with_credentials", [False, True])
def test_redirect_from_https_to_less_is_not_followed(location: str, with_credentials: bool) -> None:
    with pytest.raises(RedirectRefused):
        redirect_target("https://a/x", location, with_credentials=with_credentials)


@given(st.text() | st.text().map("https://{}".format) | st.text().map("http://{}".format))
def test_no_text_leads_from_https_to_anything_else(location: str) -> None:
    with suppress(RedirectRefused):
        target = urlsplit(redirect_target("https://a/x", location, with_credentials=True))
        assert target.scheme == "https"
        assert target.hostname
