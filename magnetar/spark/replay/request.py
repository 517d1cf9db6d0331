"""The request of a replay, and the form in which its checkpoint keeps it.  Pure."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from magnetar.spark.errors import InvalidOption

__all__ = ["COLUMNS", "Job", "Replay", "chosen_columns", "job_of_text", "text_of_job"]

VERSION: Final = 1
COLUMNS: Final = ("key", "value", "properties", "event_time")
"""The columns of the sink."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The request of a replay, as the user wrote it."""

    source: str
    target: str
    start: str = "earliest"
    end: str = "latest"
    where: str | None = None
    select: tuple[str, ...] = ()
    """Expressions of SQL with names: `upper(key) AS key`."""
    decode: str = "none"


@dataclass(frozen=True, slots=True)
class Job:
    """A replay, as its checkpoint stores it."""

    asked: Replay
    start: str
    end: str
    """Cuts, as text: the first run resolves the range, and later runs read the same."""
    key: str
    """The name of its own transaction key, so that it fences no other replay."""

    def check(self, asked: Replay) -> None:
        """Check that a later run asks for the same replay.  Raises `InvalidOption`."""
        mine, other = asdict(self.asked), asdict(asked)
        different = [name for name in mine if mine[name] != other[name]]
        if different:
            name = different[0]
            raise InvalidOption(
                f"The checkpoint is of another replay, whose {name} is {mine[name]!r}, not "
                f"{other[name]!r}. Go on with that one by the same options, or give this one a "
                "checkpoint of its own."
            )


def text_of_job(job: Job) -> str:
    """The text of a job, for its checkpoint."""
    document = {"v": VERSION, **asdict(job)}
    return json.dumps(document, sort_keys=True, indent=1) + "\n"


def job_of_text(text: str) -> Job:
    """Read a job from its text.  Raises `InvalidOption`."""
    try:
        document = json.loads(text)
        if document.pop("v") != VERSION:
            raise InvalidOption(
                "The checkpoint is of a replay by another version of this command; go on with that "
                "version, or give this replay a checkpoint of its own."
            )
        asked = document.pop("asked")
        select = tuple(asked.pop("select"))
        return Job(Replay(select=select, **asked), **document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InvalidOption):
            raise
        raise InvalidOption(
            f"The checkpoint has a file of a replay that cannot be read ({error}); give a "
            "directory of its own."
        ) from error


def chosen_columns(made: Iterable[tuple[str, Sequence[str]]]) -> Mapping[str, str | None]:
    """The expression for each of COLUMNS; None: the column is copied.

    `made` are expressions with the names of the columns that they make.  Raises `InvalidOption`.
    """
    found: dict[str, str | None] = dict.fromkeys(COLUMNS)
    for text, names in made:
        if len(names) != 1 or names[0].lower() not in COLUMNS:
            raise InvalidOption(
                f"{text!r} makes {', '.join(names)}; name what it makes, one of "
                f"{', '.join(COLUMNS)}: for example 'upper(key) AS key'."
            )
        name = names[0].lower()
        if found[name] is not None:
            raise InvalidOption(f"{found[name]!r} and {text!r} both make {name}; leave one out.")
        found[name] = text
    return found
