"""The stores of a cluster that the settings name: Oxia or ZooKeeper, and BookKeeper."""

import random
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Final

from config.settings import Settings
from magnetar.protocol.server_error import OperatorError, ServerError
from storage.clock import Clock
from storage.ledger.bookkeeper.auth_plugins import open_auth_plugin
from storage.ledger.bookkeeper.bookie_options import BookieOptions
from storage.ledger.bookkeeper.ledger_metadata import DigestType
from storage.ledger.bookkeeper.open import open_bookkeeper
from storage.ledger.bookkeeper.store import BookKeeperLedgerStore, BookKeeperOptions
from storage.ledger.store import Copies
from storage.metadata.access import StoreAccess, UnusableAccessFile
from storage.metadata.open import open_metadata_store
from storage.metadata.store import MetadataStore

CLUSTER_LIBRARIES: Final = {"grpc": "grpcio", "kazoo": "kazoo", "xxhash": "xxhash"}
"""Modules of the extra `magnetar-broker[cluster]`, and the names that they are installed by."""


class MissingClusterLibrary(OperatorError):
    """The library for a store that brokers share is not installed; the message says what to do."""

    code: ClassVar[ServerError] = ServerError.METADATA_ERROR


async def open_shared_stores(
    settings: Settings, clock: Clock, rng: random.Random
) -> tuple[MetadataStore, BookKeeperLedgerStore]:
    """Open both stores.

    Raises `MetadataError`, `LedgerError`, `UnusableAccessFile`, `MissingClusterLibrary`.
    """
    # The stores import their libraries when a URL names them.
    with _explain_missing_library():
        return await _open(settings, clock, rng)


@contextmanager
def _explain_missing_library() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        missing = CLUSTER_LIBRARIES.get((error.name or "").partition(".")[0])
        if missing is None:
            raise
        raise MissingClusterLibrary(
            f"{missing}, which brokers with shared stores need, is not installed: install "
            "magnetar-broker[cluster] (pip install './magnetar_broker[cluster]' in a checkout of "
            "the project)."
        ) from error


async def _open(
    settings: Settings, clock: Clock, rng: random.Random
) -> tuple[MetadataStore, BookKeeperLedgerStore]:
    access = StoreAccess(
        token_file=settings.metadata_store_token_file,
        trust_certs_file=settings.metadata_store_tls_trust_certs_file,
        cert_file=settings.metadata_store_tls_certificate_file,
        key_file=settings.metadata_store_tls_key_file,
    )
    metadata = await open_metadata_store(settings.metadata_store_url, clock, rng, access)
    try:
        ledgers = await open_bookkeeper(
            settings.bookkeeper_metadata_service_uri,
            clock,
            rng,
            ledgers=ledger_options(settings),
            bookies=bookie_options(settings),
            access=access,
            beside=metadata,
        )
    except BaseException:
        await metadata.close()
        raise
    return metadata, ledgers


def ledger_options(settings: Settings) -> BookKeeperOptions:
    """Options of new ledgers, from the settings."""
    return BookKeeperOptions(
        copies=Copies(
            ensemble_size=settings.ledger_ensemble_size,
            write_quorum=settings.ledger_write_quorum,
            ack_quorum=settings.ledger_ack_quorum,
        ),
        digest_type=DigestType[settings.ledger_digest_type],
        password=settings.ledger_password.get_secret_value().encode(),
        frame_bytes=settings.bookkeeper_max_frame_bytes,
    )


def bookie_options(settings: Settings) -> BookieOptions:
    """Options of connections to bookies.  Raises `UnusableAccessFile`, `UnusableAuthPlugin`."""
    return BookieOptions(
        max_frame_bytes=settings.bookkeeper_max_frame_bytes,
        tls=_tls(
            settings.bookkeeper_tls_trust_certs_file,
            settings.bookkeeper_tls_certificate_file,
            settings.bookkeeper_tls_key_file,
        ),
        auth=open_auth_plugin(
            settings.bookkeeper_client_authentication_plugin,
            settings.bookkeeper_client_authentication_parameters.get_secret_value(),
        ),
    )


def _tls(trusted: Path | None, certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """The TLS context for bookies; None if no file is named."""
    if trusted is None and certificate is None:
        return None
    try:
        context = ssl.create_default_context(cafile=trusted)
        # A bookie is trusted by the authority that signed its certificate, not by its name.
        context.check_hostname = False
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise UnusableAccessFile(
            f"The certificates for bookies cannot be used ({error}): check "
            "bookkeeper_tls_trust_certs_file, _certificate_file and _key_file."
        ) from error
    return context
