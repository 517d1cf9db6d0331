"""Errors of sources, sinks and jobs.

Errors of `magnetar.errors` pass unchanged beside them.  Messages are sentences that end with the
next step; Spark shows them in the failure of the query.
"""

from magnetar.errors import ClientError

__all__ = [
    "CommitRefused",
    "DataLost",
    "InvalidCut",
    "InvalidOption",
    "InvalidRows",
    "PipelineError",
    "PositionsUnreadable",
    "StateUnreadable",
]


class PipelineError(ClientError):
    """Root of the errors of this package."""


class InvalidOption(PipelineError, ValueError):
    """An option of a source or a sink is wrong; nothing was read or written."""


class InvalidCut(PipelineError, ValueError):
    """An offset is not one of this source, or not of this topic."""


class DataLost(PipelineError):
    """Entries that were to be read are not retained any more; nothing of the batch was read."""


class InvalidRows(PipelineError, ValueError):
    """Rows cannot be written: a column is missing or of a wrong type, or a value is not valid."""


class CommitRefused(PipelineError):
    """The reports of the tasks do not make up a batch; nothing was committed."""


class PositionsUnreadable(PipelineError):
    """The positions of a batch cannot be read from the checkpoint; nothing was committed."""


class StateUnreadable(PipelineError):
    """The state topic of a transaction key cannot be used, or be read; nothing was committed."""
