"""Helpers of all REST resources: names from paths, bodies, answers, and errors as JSON.

An error is `{"reason": sentence}` with the status that Pulsar's own tools expect.  Errors of the
broker map to a status by their class, or else by their `ServerError`.
"""

import json
from collections.abc import Awaitable, Callable, Collection, Mapping
from http import HTTPStatus
from math import isfinite

import structlog
from aiohttp import web

from broker.placement.owner_requests import OwnerFailed
from broker.policies.json_numbers import LARGEST, is_number
from broker.topics.client_metadata import ReservedProperty, require_unreserved
from broker.topics.local_topics import is_own_property
from config.bounds import MAX_PROPERTIES_BYTES
from magnetar.protocol.names import NamespaceName, TopicName, parse_topic_name
from magnetar.protocol.server_error import MagnetarError, ServerError
from storage.metadata.store import RecordTooLarge

log = structlog.get_logger(__name__)

MAX_BODY_BYTES = 1024 * 1024
SHOWN_CHARACTERS = 100
"""Characters of a peer's text that an error repeats."""

BUNDLE = "0x00000000_0xffffffff"
"""The one bundle of each namespace."""

STATUS_OF_CODE: Mapping[ServerError, HTTPStatus] = {
    ServerError.TOPIC_NOT_FOUND: HTTPStatus.NOT_FOUND,
    ServerError.SUBSCRIPTION_NOT_FOUND: HTTPStatus.NOT_FOUND,
    ServerError.CONSUMER_NOT_FOUND: HTTPStatus.NOT_FOUND,
    ServerError.INVALID_TOPIC_NAME: HTTPStatus.PRECONDITION_FAILED,
    ServerError.CONSUMER_BUSY: HTTPStatus.PRECONDITION_FAILED,
    ServerError.PRODUCER_BUSY: HTTPStatus.PRECONDITION_FAILED,
    ServerError.INCOMPATIBLE_SCHEMA: HTTPStatus.CONFLICT,
    ServerError.NOT_ALLOWED_ERROR: HTTPStatus.METHOD_NOT_ALLOWED,
    ServerError.TOPIC_TERMINATED_ERROR: HTTPStatus.METHOD_NOT_ALLOWED,
    ServerError.AUTHORIZATION_ERROR: HTTPStatus.FORBIDDEN,
    ServerError.AUTHENTICATION_ERROR: HTTPStatus.UNAUTHORIZED,
    ServerError.TOO_MANY_REQUESTS: HTTPStatus.TOO_MANY_REQUESTS,
    ServerError.SERVICE_NOT_READY: HTTPStatus.SERVICE_UNAVAILABLE,
}


NOT_FOUND_CODES = (ServerError.TOPIC_NOT_FOUND, ServerError.SUBSCRIPTION_NOT_FOUND)
"""Errors of a topic that is not there, or does not have the subscription."""


class RestError(Exception):
    """An answer other than success, with its status and its reason."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


def not_found(reason: str) -> RestError:
    """An error with status 404."""
    return RestError(HTTPStatus.NOT_FOUND, reason)


def no_topic(name: TopicName) -> RestError:
    """The error for a topic that does not exist."""
    return not_found(f"There is no topic {name}: create it with PUT, or publish to it.")


def conflict(reason: str) -> RestError:
    """An error with status 409: the resource exists already, or was changed meanwhile."""
    return RestError(HTTPStatus.CONFLICT, reason)


def refused(reason: str) -> RestError:
    """An error with status 412: the request cannot be met as it stands."""
    return RestError(HTTPStatus.PRECONDITION_FAILED, reason)


def status_of(error: MagnetarError) -> HTTPStatus:
    """The status that Pulsar's tools expect for an error of the broker."""
    own = getattr(error, "http_status", None)
    if isinstance(own, HTTPStatus):
        return own
    if isinstance(error, RecordTooLarge):
        return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    return STATUS_OF_CODE.get(code_of(error), HTTPStatus.INTERNAL_SERVER_ERROR)


def code_of(error: MagnetarError) -> ServerError:
    """The code of an error, at the owner if another broker carried the request out."""
    if isinstance(error, OwnerFailed) and error.owner_code is not None:
        return error.owner_code
    return error.code


def status_of_failure(error: BaseException) -> HTTPStatus:
    """The status of the answer to a request that failed; see `errors_as_json`."""
    if isinstance(error, RestError):
        return error.status
    if isinstance(error, MagnetarError):
        return status_of(error)
    if isinstance(error, web.HTTPException):
        return HTTPStatus(error.status)
    return HTTPStatus.INTERNAL_SERVER_ERROR


def error_answer(status: HTTPStatus, reason: str) -> web.Response:
    """`{"reason": ...}` with a status."""
    return web.json_response({"reason": reason}, status=status)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every failure into a JSON reason; faults of the broker are logged, not shown."""
    try:
        return await handler(request)
    except RestError as error:
        answer = error_answer(error.status, error.reason)
        if error.status is HTTPStatus.REQUEST_TIMEOUT:
            answer.force_close()
        return answer
    except MagnetarError as error:
        return error_answer(status_of(error), str(error))
    except web.HTTPException as error:
        if error.status < 400:
            raise
        reason = f"{request.method} {request.path}: {error.reason}. See /admin/v2 for what exists."
        return error_answer(HTTPStatus(error.status), reason)
    except ConnectionResetError:
        log.debug("rest_client_gone", method=request.method, path=request.path)
        return error_answer(HTTPStatus.SERVICE_UNAVAILABLE, "The client closed the connection.")
    except Exception:
        log.exception("rest_request_failed", method=request.method, path=request.path)
        return error_answer(
            HTTPStatus.INTERNAL_SERVER_ERROR,
            "The broker failed on this request: its log has the cause. Try again.",
        )


def no_content() -> web.Response:
    """An empty answer with status 204."""
    return web.Response(status=HTTPStatus.NO_CONTENT)


def namespace_of(request: web.Request) -> NamespaceName:
    """The namespace in the path: `{tenant}/{namespace}`."""
    return NamespaceName(request.match_info["tenant"], request.match_info["namespace"])


def topic_of(request: web.Request, domain: str) -> TopicName:
    """The topic in the path, in the given domain.

    Raises `RestError` and `InvalidNamespaceName` where a part has a slash that makes it several.
    """
    # The namespace is parsed alone: in the whole name a slash in it would shift the parts, so that
    # they named a topic of another tenant.
    namespace = namespace_of(request)
    name = parse_topic_name(f"{domain}://{namespace}/{request.match_info['topic']}")
    if name.domain.value != domain:
        raise refused(
            f"{shortened(repr(domain))} is no domain: give topic, persistent or non-persistent."
        )
    return name


def ordinary_topic_of(request: web.Request) -> TopicName:
    """The topic in the path, in the domain that the path names: `/admin/v2/{domain}/...`."""
    return topic_of(request, request.path.split("/", 4)[3])


def flag(request: web.Request, name: str) -> bool:
    """A boolean query parameter, false when absent."""
    return request.query.get(name, "false").lower() == "true"


def require_whole_bundle(request: web.Request) -> None:
    """Raise 412 for a query for the topics of a bundle that there is not."""
    asked = request.query.get("bundle", BUNDLE)
    if asked != BUNDLE:
        raise refused(
            f"There is no bundle {shortened(repr(asked))}: each namespace has one, {BUNDLE}."
        )


def number(request: web.Request, name: str, default: int | None = None) -> int:
    """An integer from the query, or from the path."""
    text = request.match_info.get(name) or request.query.get(name)
    if text is None:
        if default is None:
            raise refused(f"The request lacks {name}: give it as a number.")
        return default
    return number_in(text, name)


def number_in(text: str, name: str) -> int:
    """The integer of a text that the request gives as `name`."""
    try:
        value = int(text)
    except ValueError as error:
        raise refused(f"{name} = {shortened(repr(text))} is not a number: give one.") from error
    if not is_number(value):
        raise refused(f"{name} = {shortened(repr(text))} is too large: give at most {LARGEST}.")
    return value


def shortened(text: str) -> str:
    """A peer's text, or its beginning, for an error."""
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{shortened(repr(text))} is not a finite number")
    return value


async def body_of(request: web.Request) -> object:
    """The JSON body, None when empty.  Numbers are finite, as JSON has no others (RFC 8259)."""
    text = await request.text()
    if not text.strip():
        return None
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_finite)
    except ValueError as error:
        reason = str(error)
    except RecursionError:
        reason = "it is nested too deeply"
    raise RestError(
        HTTPStatus.BAD_REQUEST, f"The body is not JSON ({reason}): send application/json."
    )


async def mapping_of(request: web.Request) -> dict[str, object]:
    """The JSON object in the body, {} when empty."""
    body = await body_of(request)
    if body is None:
        return {}
    if not isinstance(body, dict):
        raise RestError(HTTPStatus.BAD_REQUEST, "The body must be a JSON object.")
    return body


def require_known(
    body: Mapping[str, object], known: Collection[str], what: str, next_step: str
) -> None:
    """Raise 400 for members that a body of `what` does not have; none is taken and ignored."""
    unknown = sorted(body.keys() - known)
    if unknown:
        raise RestError(
            HTTPStatus.BAD_REQUEST, f"{what} has no {shortened(', '.join(unknown))}: {next_step}."
        )


def properties_in(value: object) -> Mapping[str, str]:
    """The properties of a topic or namespace from a body, {} for none."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise RestError(
            HTTPStatus.BAD_REQUEST, "Properties must be a JSON object whose values are strings."
        )
    own = [key for key in value if is_own_property(key)]
    if own:
        raise RestError(
            HTTPStatus.BAD_REQUEST,
            f"The property {shortened(repr(own[0]))} is the broker's: use another name.",
        )
    # They share a record with the broker's own data of the topic.
    if len(json.dumps(value)) > MAX_PROPERTIES_BYTES:
        raise RestError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"Properties may have {MAX_PROPERTIES_BYTES} bytes as JSON: give fewer.",
        )
    return value


def subscription_properties_in(value: object) -> Mapping[str, str]:
    """The properties of a subscription from a body, {} for none."""
    properties = properties_in(value)
    try:
        require_unreserved(properties)
    except ReservedProperty as error:
        raise RestError(HTTPStatus.BAD_REQUEST, str(error)) from error
    return properties
