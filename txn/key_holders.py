"""The connections that opened a transaction key or attached to it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from config.bounds import TXN_KEY_CONNECTIONS
from txn.errors import TooManyTransactionKeys
from txn.owner_shares import OwnerShares
from txn.transaction_key import KeyName


class KeyHolder(Protocol):
    """A connection that holds a key."""

    def close(self, why: str) -> None:
        """Close the connection."""
        ...

    def on_close(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` when the connection closes; returns its removal."""
        ...


@dataclass(slots=True)
class _Holder:
    epoch: int
    forget: Callable[[], None]


class KeyHolders:
    """The connections that hold keys of one coordinator, each with the epoch that it presented.

    Connections of older epochs are closed when a newer one opens the key (K5), so that their
    clients soon know that they are fenced.  Nothing else depends on this memory, which ends with
    the lead.
    """

    def __init__(self) -> None:
        self._held: dict[KeyName, dict[KeyHolder, _Holder]] = {}
        self._count = 0
        self._shares = OwnerShares()

    def __len__(self) -> int:
        return self._count

    def is_held(self, name: KeyName) -> bool:
        """Whether a connection holds the key."""
        return name in self._held

    def count_of(self, name: KeyName) -> int:
        """The number of connections that hold the key."""
        return len(self._held.get(name, {}))

    def epoch_of(self, name: KeyName, holder: KeyHolder) -> int | None:
        """The epoch under which a connection holds the key; None if it does not."""
        held = self._held.get(name, {}).get(holder)
        return None if held is None else held.epoch

    def require_capacity(self, name: KeyName, holder: KeyHolder) -> None:
        """Raise `TooManyTransactionKeys` if one more connection cannot be remembered."""
        if self.epoch_of(name, holder) is not None:
            return
        if self._count >= TXN_KEY_CONNECTIONS:
            raise TooManyTransactionKeys(
                f"{self._count} connections hold transaction keys of this coordinator, as many as "
                "may: close some."
            )
        # One connection counts for each key that it holds, so it could have all there may be.
        if self._shares.is_used_up(name.owner, TXN_KEY_CONNECTIONS - self._count):
            own = self._shares.count(name.owner)
            raise TooManyTransactionKeys(
                f"{own} connections hold transaction keys of this role and coordinator, and it "
                "must leave as many to other roles: close some."
            )

    def remember(self, name: KeyName, epoch: int, holder: KeyHolder) -> None:
        """Add a connection that does not hold the key yet, under an epoch."""
        of_key = self._held.setdefault(name, {})
        assert holder not in of_key, f"it holds {name} already"
        of_key[holder] = _Holder(epoch, holder.on_close(lambda: self.forget(name, holder)))
        self._count += 1
        self._shares.add(name.owner)

    def renew(self, name: KeyName, epoch: int, holder: KeyHolder) -> None:
        """Raise the epoch of a connection, if it still holds the key."""
        held = self._held.get(name, {}).get(holder)
        if held is not None:
            held.epoch = max(held.epoch, epoch)

    def forget(self, name: KeyName, holder: KeyHolder) -> None:
        """Remove a connection, if it holds the key."""
        of_key = self._held.get(name, {})
        held = of_key.pop(holder, None)
        if held is None:
            return
        self._count -= 1
        self._shares.remove(name.owner)
        held.forget()
        if not of_key:
            del self._held[name]

    def close_older(self, name: KeyName, epoch: int | None, but: KeyHolder | None = None) -> None:
        """Close connections with an older epoch, or with any (None), except `but` (K5)."""
        # K5: remembered before their epoch was read, so none is missing here.
        for holder, held in list(self._held.get(name, {}).items()):
            if holder is not but and (epoch is None or held.epoch < epoch):
                self.forget(name, holder)
                holder.close(f"transaction key {name.key!r} has a newer epoch, or is deleted")

    def clear(self) -> None:
        """Remove all connections."""
        for name, of_key in list(self._held.items()):
            for holder in list(of_key):
                self.forget(name, holder)
