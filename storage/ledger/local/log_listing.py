"""The record of the log files that must be there.

It is in the metadata store, so a start notices that a log file is missing.  A file is listed once
it has entries, and taken off the list before it is removed from the disk.  Between the first group
of a new file and the write of the list lie milliseconds: a file that is lost together with the
process in that moment is not missed.
"""

import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from storage.ledger.local.log_files import LogFile
from storage.metadata.store import ABSENT, MetadataStore, Version, VersionConflict

LISTING_KEY = "/magnetar/ledger-log"


class ListedFile(NamedTuple):
    """A log file that must be there.

    `end` is its durable length in bytes and `max_ledger` the highest ledger id in it; both are None
    for a file that was still written.
    """

    number: int
    end: int | None = None
    max_ledger: int | None = None


def listed(files: Iterable[LogFile]) -> list[ListedFile]:
    """The list of these files."""
    return [
        ListedFile(file.number)
        if file.header is None
        else ListedFile(file.number, file.header.covers, file.header.max_ledger)
        for file in sorted(files, key=lambda file: file.number)
    ]


class LogListing:
    """Reads and writes the record."""

    def __init__(self, metadata: MetadataStore) -> None:
        self._metadata = metadata
        self._saved: bytes | None = None
        self._tried: bytes | None = None
        self._version: Version = ABSENT
        self._lost = False
        self.missing: list[ListedFile] = []
        """Files that are missed, and stay on the list so that later starts miss them too."""

    async def load(self) -> Mapping[int, ListedFile]:
        """The files that must be there, by number; none if the record cannot be read."""
        record = await self._metadata.get(LISTING_KEY)
        if record is None:
            return {}
        self._saved, self._version = record.value, record.version
        try:
            files = [ListedFile(*each) for each in json.loads(record.value)["files"]]
        except (ValueError, KeyError, TypeError):
            return {}
        return {file.number: file for file in files}

    async def save(self, files: Iterable[LogFile]) -> None:
        """Make the list of these files durable.  Raises `MetadataError`.

        Does nothing once another process has written the list: it has the files then.
        """
        rows = sorted({each.number: each for each in [*self.missing, *listed(files)]}.values())
        value = json.dumps({"files": rows}, separators=(",", ":")).encode()
        if value == self._saved or self._lost:
            return
        self._saved = None
        tried, self._tried = self._tried, value
        try:
            written = await self._metadata.put(LISTING_KEY, value, expect=self._version)
        except VersionConflict:
            # A write whose outcome was unknown took effect, or the files have another owner.
            found = await self._metadata.get(LISTING_KEY)
            if found is None or found.value != tried:
                self._lost = True
                return
            try:
                written = await self._metadata.put(LISTING_KEY, value, expect=found.version)
            except VersionConflict:
                self._lost = True
                return
        self._saved, self._version = value, written.version
