"""GET, POST, PUT and DELETE of one policy, as namespaces and topics have them."""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.rest import RestError, body_of, no_content, refused, shortened
from broker.policies.policy_kinds import (
    PERSISTENCE,
    UNDEFINED,
    PolicyKind,
)

Name = TypeVar("Name")


def invalid_value(name: str, value: object, wanted: str) -> RestError:
    """The error for a value that a policy cannot have."""
    return refused(f"{name} cannot be {shortened(repr(value))}: give {wanted}.")


class PolicyHandlers(ABC, Generic[Name]):
    """The handlers of one policy; `Name` is that of a namespace, or of a topic."""

    def __init__(self, name: str, kind: PolicyKind) -> None:
        self._name = name
        self._kind = kind

    def routes(self, path: str) -> list[web.RouteDef]:
        """The routes of the policy at a path."""
        return [
            web.get(path, self.get),
            web.post(path, self.set),
            web.put(path, self.set),
            web.delete(path, self.remove),
        ]

    async def get(self, request: web.Request) -> web.Response:
        """GET: the value; 204 when it is not set, or what the policy shows then."""
        value = await self._read(request, await self._holder(request))
        if value is None:
            value = self._kind.shown_unset
        return no_content() if value is None else web.json_response(value)

    async def set(self, request: web.Request) -> web.Response:
        """POST or PUT, the value as body: set the policy."""
        holder = await self._holder(request)
        await self._require_settable(request, holder)
        value = await self._value_in(request)
        if value == UNDEFINED and UNDEFINED in self._kind.unset:
            value = None
        elif not self._kind.valid(value):
            raise invalid_value(self._name, value, self._kind.wanted)
        elif self._kind is PERSISTENCE:
            request.app[BROKER].policies.require_copies(value)
        await self._write(request, holder, value)
        return no_content()

    async def remove(self, request: web.Request) -> web.Response:
        """DELETE: remove the policy; the value of the level below is in force again."""
        await self._write(request, await self._holder(request), None)
        return no_content()

    @abstractmethod
    async def _holder(self, request: web.Request) -> Name:
        """The name of the namespace or topic in the path."""

    @abstractmethod
    async def _read(self, request: web.Request, holder: Name) -> object:
        """The value that GET shows; None if the policy is not set."""

    @abstractmethod
    async def _write(self, request: web.Request, holder: Name, value: object) -> None:
        """Set the policy, or with None remove it."""

    async def _require_settable(self, request: web.Request, holder: Name) -> None:
        """Raise `RestError` if `holder` cannot have this policy."""

    async def _value_in(self, request: web.Request) -> object:
        """The value that the request sets."""
        return await body_of(request)
