"""Runs the parts of a check of schemas."""

from collections.abc import Iterable

from broker.policies.schema_compatibility import CheckPart


def run_parts(parts: Iterable[CheckPart]) -> None:
    """Run each part before the next one is taken.  Raises `IncompatibleSchema`."""
    for part in parts:
        part.run()
