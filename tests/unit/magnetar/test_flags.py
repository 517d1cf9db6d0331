"""Options that are true or false take nothing else: a text such as "no" would count as true."""

from dataclasses import dataclass, fields
from typing import Any, cast

import pytest

import magnetar
from magnetar.credentials.kinds import OAuth2Credentials
from magnetar.errors import InvalidArgument
from tests.unit.magnetar.test_option_texts import TAKERS

NEEDED: dict[type[Any], dict[str, object]] = {OAuth2Credentials: {"key_file": "key.json"}}
"""What has to be given besides."""
FLAGS = [
    (settings, each.name)
    for settings in (*dict.fromkeys(TAKERS.values()), OAuth2Credentials)
    for each in fields(settings)
    if each.type is bool
]


@dataclass
class Order:
    """A value of a schema."""

    count: int


def test_there_are_flags() -> None:
    names = {name for _, name in FLAGS}
    assert names >= {"batching", "replicate_subscription_state", "tls_check_certificate"}


@pytest.mark.parametrize(("settings", "name"), FLAGS)
@pytest.mark.parametrize("value", ["yes", "no", 0, 1, None])
def test_option_that_is_true_or_false_refuses_anything_else(
    settings: type[Any], name: str, value: object
) -> None:
    needed = NEEDED.get(settings, {})
    for flag in (True, False):
        settings(**needed, **{name: flag})
    with pytest.raises(InvalidArgument, match=f"{name} is {value!r}; give it True or False"):
        settings(**needed, **{name: value})


def test_schema_refuses_a_flag_that_is_a_text() -> None:
    with pytest.raises(InvalidArgument, match="always_allow_null is 'no'; give it True or False"):
        magnetar.json_of(Order, always_allow_null=cast("bool", "no"))
