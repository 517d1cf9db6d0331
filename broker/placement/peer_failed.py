"""The error of a request to another broker.

It has a module of its own, so that a single broker never loads the modules that send requests.
"""

from typing import ClassVar

from magnetar.protocol.server_error import PeerError, ServerError


class PeerFailed(PeerError):
    """Another broker did not answer, or refused a request.

    `error_code` is the code of its error, None without an answer, and `owner_id` the broker that
    the refusal names as the owner.
    """

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY

    def __init__(self, message: str, error_code: object = None, *, owner_id: str = "") -> None:
        super().__init__(message)
        self.owner_id = owner_id
        self.error_code = error_code
