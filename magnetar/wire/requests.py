"""`Requests`, which matches answers to requests by `request_id`.  Pure."""

import logging
from collections.abc import Callable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Final, cast

from google.protobuf.descriptor import Descriptor

from magnetar.bounds import FORGOTTEN_REQUESTS
from magnetar.errors import BrokerError, MagnetarError, error_of
from magnetar.protocol.commands import FIELD_OF_TYPE
from magnetar.protocol.pulsar_pb2 import BaseCommand

__all__ = ["ANSWERS", "Answered", "Requests", "error_in"]

_log = logging.getLogger(__name__)
Answered = Callable[[BaseCommand | MagnetarError], None]
"""Called once, with the answer or the error."""

_ERROR_NAMES: Final = (("error", "message"), ("error_code", "error_message"))
_PRODUCER_SUCCESS: Final = BaseCommand.PRODUCER_SUCCESS


def _is_answer(name: str) -> bool:
    return name.endswith(("_RESPONSE", "SUCCESS")) or name == "ERROR"


def _answers() -> Mapping[int, Callable[[BaseCommand], int]]:
    """The function that returns the request id, for each kind of answer."""
    fields = cast("Descriptor", BaseCommand.DESCRIPTOR).fields_by_number
    found: dict[int, Callable[[BaseCommand], int]] = {}
    for name, number in BaseCommand.Type.items():
        if not _is_answer(name) or FIELD_OF_TYPE.get(number) is None:
            continue
        body = fields[number].message_type
        if body is not None and "request_id" in body.fields_by_name:
            found[number] = attrgetter(f"{FIELD_OF_TYPE[number]}.request_id")
    return MappingProxyType(found)


def _errors() -> Mapping[int, tuple[str, str, str]]:
    """The field, and the names of code and message in it, for each kind that can have an error."""
    found: dict[int, tuple[str, str, str]] = {}
    for field in cast("Descriptor", BaseCommand.DESCRIPTOR).fields:
        if field.message_type is None:
            continue
        for code, message in _ERROR_NAMES:
            if code in field.message_type.fields_by_name:
                found[field.number] = (field.name, code, message)
    return MappingProxyType(found)


ANSWERS: Final = _answers()
_ERRORS: Final = _errors()


def error_in(command: BaseCommand) -> BrokerError | None:
    """The error in a command of a broker, or None."""
    names = _ERRORS.get(command.type)
    if names is None:
        return None
    field, code, message = names
    body = getattr(command, field)
    if not body.HasField(code):
        return None
    text = getattr(body, message)
    return error_of(getattr(body, code), text or "The broker gave no reason; read its log.")


class Requests:
    """The requests of one connection that wait for an answer; answers may come in any order."""

    __slots__ = ("_forgotten", "_pending", "strays")

    def __init__(self) -> None:
        self._pending: dict[int, tuple[Answered, Callable[[], None] | None]] = {}
        self._forgotten: dict[int, None] = {}
        self.strays = 0
        """The number of answers without a request."""

    def __len__(self) -> int:
        return len(self._pending)

    def add(
        self, request_id: int, answered: Answered, postponed: Callable[[], None] | None = None
    ) -> None:
        """Add a request; `postponed` is called if its answer may take any time."""
        self._pending[request_id] = (answered, postponed)

    def forget(self, request_id: int) -> None:
        """Stop waiting for an answer, if it has not come."""
        if self._pending.pop(request_id, None) is None:
            return
        self._forgotten[request_id] = None  # A late answer then is no stray.
        if len(self._forgotten) > FORGOTTEN_REQUESTS:
            del self._forgotten[next(iter(self._forgotten))]

    def answer(self, command: BaseCommand) -> None:
        """Pass an answer, of one of the kinds in `ANSWERS`, to its request."""
        kind = command.type
        request_id = ANSWERS[kind](command)
        waiting = self._pending.get(request_id)
        if waiting is None:
            if request_id in self._forgotten:
                del self._forgotten[request_id]
            else:
                self.strays += 1
            return
        answered, postponed = waiting
        if kind == _PRODUCER_SUCCESS and not command.producer_success.producer_ready:
            # The producer waits for exclusive access: another answer follows, at any time.
            if postponed is not None:
                postponed()
            return
        del self._pending[request_id]
        answered(error_in(command) or command)

    def fail(self, error: MagnetarError) -> None:
        """Fail all requests."""
        pending, self._pending = self._pending, {}
        self._forgotten.clear()
        for answered, _ in pending.values():
            try:
                answered(error)
            except Exception:  # noqa: BLE001 - the other requests must get the error
                _log.exception("request_failed what='to be told of the end'")
