"""The truth about transactions: every change of a header, as the metadata service makes it."""

import asyncio
from collections.abc import Iterable

from storage.metadata.group import Change, Group
from storage.metadata.memory import MemoryMetadataStore
from tests.simulation.history import GroupCommitted, History, Txn
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
                    header = records.decode_header(change.key, change.value)
                    state = header.state.value
                    _group_changed(history, (txn.most, txn.least), header)
                history.header_changed((txn.most, txn.least), state)

    tables.save = saving  # type: ignore[method-assign]


def _group_changed(history: History, txn: Txn, header: records.Header) -> None:
    if header.state is not records.TxnState.COMMITTED or header.group is None:
        return
    commit, key_epoch = header.group.commit, header.key_epoch
    assert commit is not None, "a group commits for a batch"
    assert key_epoch is not None, "a group is of a key"
    now_s = asyncio.get_running_loop().time()
    winners = frozenset(commit.winners)
    history.group_committed(
        GroupCommitted(
            now_s,
            key_epoch.key,
            key_epoch.epoch,
            txn,
            (commit.batch.query, commit.batch.number),
            winners,
        )
    )
