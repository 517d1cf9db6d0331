"""The backends of the metadata store, and on each of them what keeps transaction keys."""

import pytest

from storage.metadata.store import MetadataStore
from tests.contract.metadata.conftest import backend, store
from txn.key_store import TransactionKeyStore
from txn.txn_id import CoordinatorId

__all__ = ["backend", "store"]

COORDINATOR = CoordinatorId(3)


@pytest.fixture
def keys(store: MetadataStore) -> TransactionKeyStore:
    """The keys of one coordinator."""
    return TransactionKeyStore(store, COORDINATOR)
