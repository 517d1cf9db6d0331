"""Other values of bounds that no test can pass (docs/decisions/tests-and-private-state.md)."""

import sys
from importlib import import_module
from types import ModuleType

import pytest

PACKAGES = ("broker", "config", "magnetar", "security", "storage", "txn")


def set_bound(
    monkeypatch: pytest.MonkeyPatch, name: str, value: float, *, in_module: str | None = None
) -> None:
    """Give a bound another value for this test, in every module of the product that has it.

    `in_module` limits that to one module, for names that several modules use.  Raises
    `AttributeError` if no module has the name, and `TypeError` if it is not a number there.
    """
    modules = [import_module(in_module)] if in_module else _loaded()
    having = [module for module in modules if name in vars(module)]
    if not having:
        raise AttributeError(f"no module {in_module or 'that is loaded'} has the bound {name}")
    for module in having:
        if not isinstance(vars(module)[name], int | float):
            raise TypeError(f"{module.__name__}.{name} is not a number")
        monkeypatch.setattr(module, name, value)


def _loaded() -> list[ModuleType]:
    import_module("config.bounds")
    return [
        module
        for module_name, module in list(sys.modules.items())
        if module_name.partition(".")[0] in PACKAGES
    ]
