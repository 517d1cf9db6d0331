"""The plugins for authentication with bookies that settings may name.

- "": none.
- `sasl`, or Java's name for it: user and password (`sasl_digest`).  The parameters are
  `USER:PASSWORD`, or `file:PATH` of a file with one such line, which every new connection reads
  again.
- `package.module:name`: a callable of the operator's own that Python can import.  It is called
  once, with the parameters, and returns a `NewAuthProvider`.
"""

import importlib
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, cast

from storage.ledger.bookkeeper.auth import NewAuthProvider
from storage.ledger.bookkeeper.sasl_digest import PLUGIN_NAME, DigestMd5
from storage.ledger.store import LedgerError

SASL_NAMES: Final = frozenset({PLUGIN_NAME, "org.apache.bookkeeper.sasl.SASLClientProviderFactory"})
_FILE: Final = "file:"


class UnusableAuthPlugin(LedgerError):
    """The plugin in the settings cannot be loaded, or its parameters are missing or refused."""


def open_auth_plugin(plugin: str, parameters: str) -> NewAuthProvider | None:
    """Load the plugin of that name; None for "", which is no authentication.

    The result makes the provider of each connection.  Raises `UnusableAuthPlugin`.
    """
    if not plugin:
        if parameters:
            raise UnusableAuthPlugin(
                "There are parameters for authentication with bookies, but no plugin: set "
                "bookkeeper_client_authentication_plugin."
            )
        return None
    if plugin in SASL_NAMES:
        _credentials(parameters)
        return partial(_new_sasl, parameters)
    module, colon, name = plugin.partition(":")
    if not colon:
        raise UnusableAuthPlugin(
            f"{plugin!r} is no plugin for authentication with bookies: set "
            "bookkeeper_client_authentication_plugin to sasl, or to package.module:name of one in "
            "Python."
        )
    try:
        factory = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise UnusableAuthPlugin(
            f"The plugin {plugin!r} for authentication with bookies cannot be loaded "
            f"({type(error).__name__}: {error}): check that Python finds it."
        ) from error
    try:
        made = cast("Callable[[str], NewAuthProvider]", factory)(parameters)
    except Exception as error:  # noqa: BLE001 - raised without its text: it may have a password
        raise UnusableAuthPlugin(
            f"The plugin {plugin!r} for authentication with bookies refused its parameters "
            f"({type(error).__name__}): check bookkeeper_client_authentication_parameters."
        ) from None
    if not callable(made):
        raise UnusableAuthPlugin(
            f"The plugin {plugin!r} for authentication with bookies returned a "
            f"{type(made).__name__}, which makes no providers: have it return a callable."
        )
    return made


def _new_sasl(parameters: str) -> DigestMd5:
    user, password = _credentials(parameters)
    return DigestMd5(user, password, partial(secrets.token_hex, 16))


def _credentials(parameters: str) -> tuple[str, str]:
    """User and password.  Raises `UnusableAuthPlugin`."""
    line = parameters
    if parameters.startswith(_FILE):
        path = Path(parameters.removeprefix(_FILE))
        try:
            line = path.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UnusableAuthPlugin(
                f"User and password for bookies cannot be read ({error}): check the file that "
                "bookkeeper_client_authentication_parameters names."
            ) from error
    user, colon, password = line.partition(":")
    if not (user and colon and password):
        raise UnusableAuthPlugin(
            "There is no user and password for bookies: set "
            "bookkeeper_client_authentication_parameters to USER:PASSWORD, or to file:PATH of a "
            "file with that."
        )
    return user, password
