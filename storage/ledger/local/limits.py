"""Limits of the embedded ledger log."""

from dataclasses import dataclass

from config import bounds
from storage.ledger.local.codec import MAX_LOG_BYTES
from storage.ledger.store import LedgerError


@dataclass(frozen=True, slots=True)
class LedgerLimits:
    """Limits of the embedded ledger log: bytes, bytes each second, seconds.

    Raises `LedgerError` if offsets in a log file would not fit into 32 bits.
    """

    file_bytes: int = bounds.LEDGER_LOG_FILE_BYTES
    file_records: int = bounds.LEDGER_LOG_FILE_RECORDS
    group_bytes: int = bounds.LEDGER_GROUP_BYTES
    seal_retry_s: float = bounds.LEDGER_SEAL_RETRY_S
    reclaim_pause_s: float = bounds.LEDGER_RECLAIM_PAUSE_S
    compact_bytes_per_s: int = bounds.LEDGER_COMPACT_BYTES_PER_S
    compact_step_bytes: int = bounds.LEDGER_COMPACT_STEP_BYTES
    verify_bytes_per_s: int = bounds.LEDGER_VERIFY_BYTES_PER_S
    verify_step_bytes: int = bounds.LEDGER_VERIFY_STEP_BYTES
    verify_log_s: float = bounds.LEDGER_VERIFY_LOG_S
    compact_sources: int = bounds.LEDGER_COMPACT_SOURCES

    def __post_init__(self) -> None:
        """Check the sizes."""
        if self.file_bytes + self.group_bytes + 2 * bounds.LEDGER_ENTRY_BYTES > MAX_LOG_BYTES:
            raise LedgerError(
                f"A ledger log file of {self.file_bytes} bytes with groups of {self.group_bytes} "
                "does not fit into 32-bit offsets: set a smaller file size."
            )
