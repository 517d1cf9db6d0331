"""The truth about transactions: every change of a header, as the metadata service makes it."""

from collections.abc import Iterable

from storage.metadata.group import Change, Group
from storage.metadata.memory import MemoryMetadataStore
from tests.simulation.history import History
from txn import records


def watch_headers(store: MemoryMetadataStore, history: History) -> None:
    """Write down what commits to the headers of transactions."""
    tables = store._tables
    save = tables.save

    def saving(made: Group, changes: Iterable[Change]) -> None:
        changes = list(changes)
        save(made, changes)
        for change in changes:
            if change.key.startswith(records.HEADERS):
                txn = records.txn_of_header(change.key)
                state = None
                if change.after is not None:
                    state = records.decode_header(change.key, change.value).state.value
                history.header_changed((txn.most, txn.least), state)

    tables.save = saving  # type: ignore[method-assign]
