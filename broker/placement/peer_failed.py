"""The error of a call to another broker.

It is not in `peers.py`, so that a single broker never loads the HTTP client.
"""

from http import HTTPStatus
from typing import ClassVar

from magnetar.protocol.server_error import PeerError, ServerError


class PeerFailed(PeerError):
    """Another broker could not be reached, or refused the call with `http_status`.

    `error_code` is the code of its error, if the answer has one.
    """

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY

    def __init__(self, message: str, http_status: HTTPStatus, error_code: object = None) -> None:
        super().__init__(message)
        self.http_status = http_status
        self.error_code = error_code
