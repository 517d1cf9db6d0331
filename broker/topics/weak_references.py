"""References of a part to its topic or subscription, which do not keep that in memory."""

from http import HTTPStatus
from typing import ClassVar, TypeVar
from weakref import ref

from magnetar.protocol.server_error import PeerError, ServerError

T = TypeVar("T")


class TopicGone(PeerError):
    """The topic was closed: try again at once."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY
    http_status: ClassVar[HTTPStatus] = HTTPStatus.SERVICE_UNAVAILABLE


def require_present(reference: "ref[T]") -> T:
    """The topic or subscription.  Raises `TopicGone` if it was closed and nobody uses it.

    It has its parts, so these refer to it weakly: a circle would stay in memory until a garbage
    collection.
    """
    found = reference()
    if found is None:
        raise TopicGone("The topic was closed here: try again at once.")
    return found
