"""The Python client for Pulsar v5 brokers.

    async with magnetar.connect("pulsar://localhost:6650") as client:
        async with client.producer("topic://public/default/orders", schema=str) as producer:
            await producer.send("first", key="customer-1")

Rules: what the client makes is awaited, or entered by `async with`; times are given in the unit
that ends their name; every error is a `MagnetarError` (`magnetar.errors` has them all).  Schemas of
other types are in `magnetar.schema`, the same client for threads in `magnetar.sync`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from magnetar import errors as errors
    from magnetar import schema as schema
    from magnetar.api import *
else:

    def __getattr__(name: str) -> object:
        # The broker imports `magnetar.protocol` and `magnetar.background_tasks` alone: the client
        # must not come with them.
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        public = import_module("magnetar.api")
        if name not in globals():  # Submodules that came with it are.
            try:
                globals()[name] = getattr(public, name)
            except AttributeError:
                raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *import_module("magnetar.api").__all__})
