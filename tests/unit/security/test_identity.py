"""Roles, identities and principals."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.bounds import ROLE_BYTES, TXN_KEY_BYTES
from security.identity import Identity, InvalidRole, Method, Principal, Role, role_of
from txn.header import OPERATOR


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "admin",
        "a b",
        "CN=x,O=y",
        "system:serviceaccount:default:app",
        "日本",
        "r" * ROLE_BYTES,
    ],
)
def test_role_is_kept_byte_for_byte(text: str) -> None:
    assert role_of(text) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", " a", "a ", "\ta", "a\n", "a\x00b", "a\x7f", "*", "a*"),
        *("a\u00a0", "a\u200bb", "\ud800", "r" * (ROLE_BYTES + 1), "日" * ROLE_BYTES),
    ],
)
def test_text_that_could_pass_for_another_role_is_refused(text: str) -> None:
    with pytest.raises(InvalidRole):
        role_of(text)


def test_no_role_is_the_operator_of_transactions() -> None:
    with pytest.raises(InvalidRole):
        role_of(OPERATOR)


def test_every_role_can_own_transaction_keys() -> None:
    assert ROLE_BYTES <= TXN_KEY_BYTES


@given(st.text())
def test_any_text_is_a_role_or_refused(text: str) -> None:
    try:
        role = role_of(text)
    except InvalidRole:
        return
    assert role == text == text.strip()
    assert not any(unicodedata.category(each).startswith("C") for each in role)


def test_identity_expires_at_its_time() -> None:
    assert Identity(Role("a"), Method.TOKEN, 10.0).expired(10.0)
    assert not Identity(Role("a"), Method.TOKEN, 10.0).expired(9.9)
    assert not Identity(Role("a"), Method.TLS).expired(1e18)


def test_principal_behind_a_proxy_expires_with_the_first_of_both() -> None:
    client = Identity(Role("client"), Method.TOKEN, 20.0)
    proxy = Identity(Role("proxy"), Method.TLS, 10.0)
    assert Principal(client).expires_at_s == 20.0
    assert Principal(client).identities == (client,)
    assert Principal(client, proxy).expires_at_s == 10.0
    assert Principal(client, proxy).identities == (client, proxy)
    assert Principal(client, proxy).role == "client"
    assert Principal(Identity(Role("a"), Method.TLS), None).expires_at_s is None
