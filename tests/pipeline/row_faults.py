"""What happens to the rows of a query on their way to the sink, so that tasks wait there.

Rules: these are functions for `mapInArrow`; they are told by files, which workers share with the
test.  Rows go through as they are.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyspark import TaskContext

POLL_S: Final = 0.01
Batches = Iterator[pa.RecordBatch]
Through = Callable[[Batches], Batches]


def _halves(batches: Batches) -> Iterator[tuple[pa.RecordBatch, bool]]:
    """Each batch in two, and whether it is the first half of the first one."""
    first = True
    for batch in batches:
        half = batch.num_rows // 2
        if half:
            yield batch.slice(0, half), first
            first = False
        yield batch.slice(half), False


def waiting(directory: Path) -> Through:
    """Each task says when half of its first rows are written, and waits for the file `go`."""
    place = str(directory)

    def through(batches: Batches) -> Batches:
        task = TaskContext.get()
        assert task is not None
        for batch, is_first in _halves(batches):
            yield batch
            if is_first:
                (Path(place) / f"waits-{task.partitionId()}").touch()
                while not (Path(place) / "go").exists():
                    time.sleep(POLL_S)

    return through
