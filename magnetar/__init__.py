"""The Python client for Pulsar v5 brokers.

    async with magnetar.connect("pulsar://localhost:6650") as client:
        async with client.producer("topic://public/default/orders", schema=str) as producer:
            await producer.send("first", key="customer-1")

Clients, producers, consumers and transactions are awaited, or entered by `async with`.  The name of
a time ends with its unit.  Every error is a `MagnetarError` (`magnetar.errors` lists them).
`magnetar.schema` has schemas of further types, `magnetar.sync` the same client for threads.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from magnetar import errors as errors
    from magnetar import schema as schema
    from magnetar.api import *
else:

    def __getattr__(name: str) -> object:
        # The broker imports only `magnetar.protocol` and `magnetar.background_tasks`: these must
        # not load the client.
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        public = import_module("magnetar.api")
        if name not in globals():  # A submodule is there once it has been imported.
            try:
                globals()[name] = getattr(public, name)
            except AttributeError:
                raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *import_module("magnetar.api").__all__})
