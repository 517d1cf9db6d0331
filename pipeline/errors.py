"""What can go wrong between Spark and the brokers.

Rules: as in `magnetar.errors`, whose errors go through as they are.  Messages are sentences that
end with the next step; Spark shows them in the failure of the query.
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
    """An option of a source or a sink cannot be; nothing was read or written."""


class InvalidCut(PipelineError, ValueError):
    """An offset is none of this source, or not of this topic."""


class DataLost(PipelineError):
    """What was to be read is not retained any more; nothing of the batch was read."""


class InvalidRows(PipelineError, ValueError):
    """Rows that cannot be written: a column is missing or of a wrong type, or a value cannot be."""


class CommitRefused(PipelineError):
    """The reports of the tasks do not make up a batch; nothing was committed."""


class PositionsUnreadable(PipelineError):
    """What a batch has read cannot be learned from the checkpoint; nothing was committed."""


class StateUnreadable(PipelineError):
    """The state topic of a transaction key cannot be used, or be read; nothing was committed."""
