"""Secrets as text: as given, from functions, from files.

A file is read anew each time, and the newline that editors leave at its end is left out.
"""

import inspect
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from magnetar.bounds import MAX_SECRET_FILE_BYTES
from magnetar.credentials.kinds import Secret, is_text
from magnetar.errors import AuthenticationFailed, InvalidArgument

__all__ = ["call_secret", "check_secret", "file_of", "read_secret", "secret_now", "token_source"]

_FILE: Final = "file:"
_TOKEN: Final = "token:"


def token_source(text: str) -> str | Path:
    """The token in a text, or the file that has it.

    As Pulsar's parameters, a text may be `token:TOKEN` or `file:///PATH`; any other is the token.
    Raises `InvalidArgument`.
    """
    if text.startswith(_FILE):
        return file_of(text, "token")
    token = text.removeprefix(_TOKEN).strip()
    if not is_text(token):
        raise InvalidArgument("The token is empty, or no valid Unicode; give one, or leave it out.")
    return token


def file_of(given: str | Path, name: str) -> Path:
    """The file that is given as a path or as `file:///PATH`; `name` is that of the setting.

    Raises `InvalidArgument`.
    """
    if isinstance(given, Path) or not given.startswith(_FILE):
        return Path(given)
    try:
        where = urlsplit(given)
        path = unquote(where.path, errors="strict")
        well = not where.netloc and path.startswith("/") and path != "/" and "\0" not in path
    except ValueError:
        well = False
    if not well:
        raise InvalidArgument(f"{name} is {given!r}; give a file of this machine as file:///PATH.")
    return Path(path)


def read_secret(file: Path, name: str) -> str:
    """The secret in a file; `name` says which one in the error.  Raises `AuthenticationFailed`."""
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_SECRET_FILE_BYTES + 1)
    except OSError as error:
        raise AuthenticationFailed(
            f"The file of the {name}, {str(file)!r}, cannot be read "
            f"({error.strerror or type(error).__name__}); correct it, or name another."
        ) from None
    try:
        text = data.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError:
        text = ""
    if not text or len(data) > MAX_SECRET_FILE_BYTES:
        # The decoding error has the bytes, so it is not the cause.
        raise AuthenticationFailed(
            f"The file of the {name}, {str(file)!r}, has no text, or too much of it; write the "
            f"{name} into it, and nothing else."
        )
    return text


async def call_secret(secret: Secret, name: str) -> str:
    """The secret, of the function if it is one.  Raises `AuthenticationFailed`."""
    found: object = secret
    if callable(secret):
        try:
            found = secret()
            if inspect.isawaitable(found):
                found = await found
        except Exception as error:
            raise _function_failed(name, error) from error
    return check_secret(found, name)


def secret_now(secret: Secret, name: str) -> str:
    """See `call_secret`; for callers without an event loop, so the function may not be `async`."""
    found: object = secret
    if callable(secret):
        try:
            found = secret()
        except Exception as error:
            raise _function_failed(name, error) from error
    if inspect.iscoroutine(found):
        found.close()
    return check_secret(found, name)


def check_secret(found: object, name: str) -> str:
    """The secret, if it is text.  Raises `AuthenticationFailed`."""
    if not isinstance(found, str):
        kind = f"{type(found).__name__}, not text"
    elif not is_text(found):
        kind = "empty, or no valid Unicode"
    else:
        return found
    raise AuthenticationFailed(f"The {name} is {kind}; give a str that is not empty.")


def _function_failed(name: str, error: Exception) -> AuthenticationFailed:
    # Not `repr`: that of an error of decoding has the decoded bytes.
    return AuthenticationFailed(
        f"The {name} function failed ({type(error).__name__}: {error}); correct the function given "
        f"as {name}."
    )
