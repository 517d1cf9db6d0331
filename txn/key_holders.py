"""Connections that opened a transaction key or attached to it, as its coordinator remembers them.

Rules:

- A connection is remembered under the epoch that it presented; those of older epochs are closed
  when a newer one opens (K5).  One may hold many keys, and a key be held by many.
- Bounded: above TXN_KEY_CONNECTIONS an ATTACH or OPEN of another connection is refused.
- Nothing rests on this memory but that old holders hear soon that they are: it ends with the lead.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from config.bounds import TXN_KEY_CONNECTIONS
from txn.errors import TooManyTransactionKeys
from txn.transaction_key import KeyName


class KeyHolder(Protocol):
    """A connection."""

    def close(self, why: str) -> None:
        """End it."""
        ...

    def on_close(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call it when the connection ends; returns what takes it off the list."""
        ...


@dataclass(slots=True)
class _Holder:
    epoch: int
    forget: Callable[[], None]


class KeyHolders:
    """The connections that hold keys of one coordinator, each with the epoch it presented."""

    def __init__(self) -> None:
        self._held: dict[KeyName, dict[KeyHolder, _Holder]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def is_held(self, name: KeyName) -> bool:
        """Whether a connection holds it."""
        return name in self._held

    def count_of(self, name: KeyName) -> int:
        """How many connections hold it."""
        return len(self._held.get(name, {}))

    def epoch_of(self, name: KeyName, holder: KeyHolder) -> int | None:
        """Under which epoch that connection holds it."""
        held = self._held.get(name, {}).get(holder)
        return None if held is None else held.epoch

    def require_capacity(self, name: KeyName, holder: KeyHolder) -> None:
        """Raise `TooManyTransactionKeys` if one more connection cannot be remembered."""
        if self._count >= TXN_KEY_CONNECTIONS and self.epoch_of(name, holder) is None:
            raise TooManyTransactionKeys(
                f"{self._count} connections hold transaction keys of this coordinator, as many as "
                "may: close some."
            )

    def remember(self, name: KeyName, epoch: int, holder: KeyHolder) -> None:
        """A connection that does not hold the key yet does, under that epoch."""
        of_key = self._held.setdefault(name, {})
        assert holder not in of_key, f"it holds {name} already"
        of_key[holder] = _Holder(epoch, holder.on_close(lambda: self.forget(name, holder)))
        self._count += 1

    def renew(self, name: KeyName, epoch: int, holder: KeyHolder) -> None:
        """It holds that epoch, unless it was closed meanwhile, or holds a later one."""
        held = self._held.get(name, {}).get(holder)
        if held is not None:
            held.epoch = max(held.epoch, epoch)

    def forget(self, name: KeyName, holder: KeyHolder) -> None:
        """It does not hold it (any more)."""
        of_key = self._held.get(name, {})
        held = of_key.pop(holder, None)
        if held is None:
            return
        self._count -= 1
        held.forget()
        if not of_key:
            del self._held[name]

    def close_older(self, name: KeyName, epoch: int | None, but: KeyHolder | None = None) -> None:
        """End the connections that hold an older epoch, or any (None); not the one named (K5)."""
        for holder, held in list(self._held.get(name, {}).items()):
            if holder is not but and (epoch is None or held.epoch < epoch):
                self.forget(name, holder)
                holder.close(f"transaction key {name.key!r} has a newer epoch, or is deleted")

    def clear(self) -> None:
        """Remember nobody."""
        for name, of_key in list(self._held.items()):
            for holder in list(of_key):
                self.forget(name, holder)
