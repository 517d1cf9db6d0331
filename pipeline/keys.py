"""Transaction keys of queries, opened by the script that starts them.

    key = pipeline.open_key("pulsar://host:6650", "orders-to-bills")
    query = df.writeStream.format("pulsar5").options(**key.options)...start()

Rules: it is called before every start of the query.  Whoever had the key before is shut out when it
returns: what an earlier driver has open is aborted, and nothing that it still asks for counts.  The
processes of this run present the epoch that was given here; none of them opens the key again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Unpack

import magnetar.sync
from magnetar import GroupRecord
from magnetar.settings import ClientOptions

__all__ = ["OpenedKey", "open_key"]


@dataclass(frozen=True, slots=True)
class OpenedKey:
    """What a query is started with."""

    name: str
    epoch: int
    last: GroupRecord | None
    """The last batch that was committed under the key: of which query, and its positions."""

    @property
    def options(self) -> Mapping[str, str]:
        """For the sink."""
        return {"txnKey": self.name, "txnEpoch": str(self.epoch)}

    @property
    def source_options(self) -> Mapping[str, str]:
        """For sources of a query without checkpoint: to go on where the last batch ended.

        Empty if no batch has kept its positions (`trackPositions`).
        """
        positions = None if self.last is None else self.last.positions
        return {} if positions is None else {"start": positions}


def open_key(
    service_url: str, name: str, *, epoch: int = -1, **settings: Unpack[ClientOptions]
) -> OpenedKey:
    """Open the key `name`; `settings` are those of `magnetar.connect`.

    `epoch` is the last one known, if the key must not have been opened by anybody since; -1 takes
    it over from whoever has it.  Raises `TransactionKeyFenced` where somebody has, `NotSupported`
    where there are no keys, and what `magnetar.connect` raises.
    """
    with (
        magnetar.sync.connect(service_url, **settings) as client,
        client.transaction_key(name, epoch=epoch) as key,
    ):
        return OpenedKey(key.name, key.epoch, key.last_group)
