"""`help()` and editors show each setting with its default and its meaning.

The meanings are written at the fields of the settings, and repeated by the functions that take the
settings as keyword arguments, since neither `help()` nor editors follow these to the fields.
"""

import ast
import inspect
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from types import ModuleType
from typing import Any, Final

import pytest

import magnetar
import magnetar.sync

TAKERS: Final = {
    "connect": magnetar.ClientSettings,
    "Client.producer": magnetar.ProducerSettings,
    "Client.queue_consumer": magnetar.QueueSettings,
    "Client.stream_consumer": magnetar.StreamSettings,
    "Client.checkpoint_consumer": magnetar.CheckpointSettings,
}


def meanings(settings: type[Any]) -> dict[str, str]:
    """The text below each field, in the order of the fields."""
    found: dict[str, str] = {}
    for each in reversed(settings.__mro__[:-1]):
        (body,) = ast.parse(inspect.getsource(each)).body
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                name, value = ast.unparse(field.target), ast.literal_eval(text.value)
                found[name] = " ".join(value.split())
    assert list(found) == [each.name for each in fields(settings)]
    return found


def default_of(value: object) -> str:
    if isinstance(value, Enum):
        return repr(value.name.lower())
    if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000:
        return f"{value:_}"
    return repr(dict(value)) if isinstance(value, Mapping) else repr(value)


def entries(settings: type[Any]) -> list[str]:
    """The line of each setting, not yet wrapped."""
    made = settings()
    return [
        f"{name} = {default_of(getattr(made, name))}: {text}"
        for name, text in meanings(settings).items()
    ]


@pytest.mark.parametrize("module", [magnetar, magnetar.sync], ids=lambda each: each.__name__)
@pytest.mark.parametrize(("taker", "settings"), TAKERS.items())
def test_docstring_explains_each_setting(
    module: ModuleType, taker: str, settings: type[Any]
) -> None:
    function: Any = module
    for name in taker.split("."):
        function = getattr(function, name)
    _, found, listed = (inspect.getdoc(function) or "").partition("\n\nSettings:\n")
    assert found
    assert " ".join(listed.split()) == " ".join(entries(settings))
