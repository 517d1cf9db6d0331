"""Groups of options that several commands share: a dataclass whose fields are the options."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps

__all__ = ["with_options"]


def with_options(command: Callable[..., None], parameter: str, group: type) -> Callable[..., None]:
    """Replace a command's `parameter` by the fields of `group`, a dataclass, as options.

    The command gets a `group` that is made of them.  The fields are annotated as parameters of
    Typer are.
    """
    names = [each.name for each in fields(group)]

    @wraps(command)
    def replaced(**given: object) -> None:
        made = group(**{name: given.pop(name) for name in names})
        command(**{parameter: made}, **given)

    own = inspect.signature(command).parameters.values()
    added = inspect.signature(group).parameters.values()
    parameters = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for each in (*(each for each in own if each.name != parameter), *added)
    ]
    replaced.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    replaced.__annotations__ = {each.name: each.annotation for each in parameters}
    return replaced
