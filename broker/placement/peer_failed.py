"""What a call to another broker came to.

Rule: apart from the calls themselves, so that a single broker never loads what makes them.
"""

from http import HTTPStatus
from typing import ClassVar

from magnetar.protocol.server_error import PeerError, ServerError


class PeerFailed(PeerError):
    """Another broker could not be asked, or refused; `http_status` is what it answered.

    `error_code` is that of the error there, if the answer told it.
    """

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY

    def __init__(self, message: str, http_status: HTTPStatus, error_code: object = None) -> None:
        super().__init__(message)
        self.http_status = http_status
        self.error_code = error_code
