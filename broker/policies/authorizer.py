"""Whether the roles of a peer may do what it asks for, by the policies in the metadata store."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import ClassVar, Final

from broker.policies.namespaces import NamespaceNotFound, Namespaces
from magnetar.protocol.server_error import PeerError, ServerError
from security.access import Access, Grants, Need, Rights, Roles, is_allowed

DENIED: Final = "access_denied"
DENIED_IN_DRY_RUN: Final = "access_would_be_denied"
"""Audit events."""
DENIALS_SHOWN: Final = 3
"""Accesses that an error names: one request may ask for a thousand."""


class AccessDenied(PeerError):
    """The role of the client may not do this: ask an administrator for a grant.

    It has the same words whether or not the resource exists.
    """

    code: ClassVar[ServerError] = ServerError.AUTHORIZATION_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.FORBIDDEN


class Authorizer:
    """Decides by the settings, the admins of tenants and the grants of namespaces.

    Records that were asked for once are followed, so that later decisions need no read, and a grant
    that is withdrawn counts as soon as the store reports it.
    """

    def __init__(self, namespaces: Namespaces, superusers: Roles, *, wildcards: bool) -> None:
        self._namespaces = namespaces
        self._superusers = superusers
        self._wildcards = wildcards

    def is_superuser(self, roles: Sequence[str]) -> bool:
        """Whether every one of the roles is a superuser's; False without roles."""
        return bool(roles) and self._superusers.issuperset(roles)

    def decide_now(self, roles: Sequence[str], questions: Sequence[Access]) -> bool | None:
        """Whether the roles have all these accesses; None if records have to be read first."""
        if self.is_superuser(roles):
            return True
        for access in questions:
            rights = self._known_rights(access)
            if rights is None:
                return None
            if not is_allowed(roles, access, rights):
                return False
        return True

    async def decide(self, roles: Sequence[str], questions: Sequence[Access]) -> bool:
        """Whether the roles have all these accesses.  Raises `MetadataError`."""
        if self.is_superuser(roles):
            return True
        for access in questions:
            if not is_allowed(roles, access, await self._read_rights(access)):
                return False
        return True

    async def require(self, roles: Sequence[str], questions: Sequence[Access]) -> None:
        """Raise `AccessDenied` unless the roles have all these accesses."""
        if not await self.decide(roles, questions):
            raise access_denied(questions)

    def _known_rights(self, access: Access) -> Rights | None:
        if not access.asks_policies:
            return self._rights(frozenset(), Grants())
        admins = self._namespaces.known_tenant_admins(access.tenant)
        grants = Grants()
        if access.namespace is not None:
            known = self._namespaces.known_grants(access.namespace)
            if known is None:
                return None
            grants = known
        return None if admins is None else self._rights(admins, grants)

    async def _read_rights(self, access: Access) -> Rights:
        if not access.asks_policies:
            return self._rights(frozenset(), Grants())
        admins = await self._namespaces.require_tenant_admins(access.tenant)
        grants = Grants()
        if access.namespace is not None:
            try:
                grants = (await self._namespaces.require(access.namespace)).grants
            except NamespaceNotFound:
                # Nobody but admins may know whether it exists.
                pass
        return self._rights(admins, grants)

    def _rights(self, admins: Roles, grants: Grants) -> Rights:
        return Rights(self._superusers, admins, grants, self._wildcards)


def access_denied(questions: Sequence[Access]) -> AccessDenied:
    """The error for a peer that may not have all of these accesses."""
    asked = "; ".join(map(described, questions[:DENIALS_SHOWN]))
    return AccessDenied(
        f"The role of this client lacks a permission: {asked}. {_next_step(questions)}"
    )


def _next_step(questions: Sequence[Access]) -> str:
    needs = {each.need for each in questions[:DENIALS_SHOWN]}
    if Need.SUPERUSER in needs:
        return "No grant gives it: brokers name these roles in superuser_roles."
    if Need.TENANT_ADMIN in needs:
        return "Ask a superuser to name the role in the tenant's adminRoles."
    return "Ask an administrator for a grant."


def described(access: Access) -> str:
    """An access in words, for errors and audit events."""
    if access.need is Need.TENANT_ADMIN:
        return f"to be an admin of the tenant {access.tenant}"
    where = access.topic or access.namespace
    if where is None:
        return f"to be {access.need.value}"
    subscription = "" if access.subscription is None else f" with {access.subscription}"
    return f"{access.need.value} on {where}{subscription}"
