"""From Spark's account of a failure to the sentence that is in it.

Pure.  Spark puts the traces of several processes around an error of ours.  Ours are told by their
module; the last one that is named is the cause nearest to the work.
"""

import re
from typing import Final

from pipeline.errors import PipelineError

__all__ = ["JobFailed", "query_failed", "sentence_in"]

_OURS: Final = re.compile(r"^\s*(?:pipeline|magnetar|protocol)(?:\.\w+)*\.\w+: (.+)$", re.MULTILINE)
LONGEST: Final = 1000


class JobFailed(PipelineError):
    """Spark gave a job up; what was not committed is not seen."""


def sentence_in(text: str) -> str:
    """What our own error said; else what Spark did, without its plans."""
    found: list[str] = _OURS.findall(text)
    return found[-1].strip() if found else text.strip().partition("\n")[0][:LONGEST]


def query_failed(error: Exception) -> JobFailed:
    """The same as an error of this package."""
    return JobFailed(
        f"The job has failed: {sentence_in(str(error))} What was committed stays; run the same "
        "command again to go on."
    )
