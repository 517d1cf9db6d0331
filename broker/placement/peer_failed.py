"""The error of a call to another broker.

It has a module of its own, so that a single broker never loads the modules that make such calls.
"""

from http import HTTPStatus
from typing import ClassVar

from magnetar.protocol.server_error import PeerError, ServerError


class PeerFailed(PeerError):
    """Another broker could not be reached, or refused the call with `http_status`.

    `error_code` is the code of its error, if the answer has one, and `owner_id` the broker that the
    answer names as the owner.
    """

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY

    def __init__(
        self,
        message: str,
        http_status: HTTPStatus,
        error_code: object = None,
        *,
        owner_id: str = "",
    ) -> None:
        super().__init__(message)
        self.owner_id = owner_id
        self.http_status = http_status
        self.error_code = error_code
