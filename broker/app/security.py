"""Makes the parts of authentication and authorization: loaded where they are switched on."""

from dataclasses import replace

import structlog

from broker.policies.authorizer import Authorizer
from broker.policies.namespaces import Namespaces
from broker.wire.handlers.access import RULES
from broker.wire.handlers.guard import AccessGuard
from config.settings import ConfigurationError, Settings
from security.audit import AuditLog
from security.authentication import make_authenticator
from security.authenticator import Authenticator
from security.errors import CredentialsRefused, InvalidSecret
from security.own_credentials import OwnCredentials, own_certificate

log = structlog.get_logger(__name__)

__all__ = ["OwnCredentials", "check_own_credentials", "make_authenticator", "make_guard"]


async def check_own_credentials(
    authenticator: Authenticator, own: OwnCredentials, settings: Settings
) -> None:
    """Log this broker in as another one would; brokers may then name the clients they act for.

    Raises `ConfigurationError` if other brokers would refuse it.
    """
    try:
        credentials = replace(own.read(), certificate=own_certificate(settings))
        identity = await authenticator.authenticate(credentials, address="this broker")
    except (CredentialsRefused, InvalidSecret) as error:
        raise ConfigurationError(
            f"Other brokers would refuse this one: {error}  Set broker_client_token_file to a "
            "file with a token that they take, of a role in superuser_roles."
        ) from error
    if settings.authorization == "on" and identity.role not in settings.superuser_roles:
        raise ConfigurationError(
            f"The role of this broker, {identity.role}, is not in superuser_roles: add it, or "
            "give the broker a token of one that is."
        )
    if identity.role in settings.proxy_roles:
        raise ConfigurationError(
            f"The role of this broker, {identity.role}, is in proxy_roles, so it would have to "
            "name a client in each request: give brokers a role of their own."
        )
    authenticator.trust_broker(identity.role)


def make_guard(namespaces: Namespaces, settings: Settings, audit: AuditLog) -> AccessGuard:
    """Make the check of commands against their access rules; it follows the policies."""
    if not settings.superuser_roles:
        log.warning(
            "no_superuser_roles",
            advice="Nobody may make tenants, name their admins, or do anything else that is for "
            "superusers: name roles in superuser_roles.",
        )
    authorizer = Authorizer(
        namespaces,
        frozenset(settings.superuser_roles),
        wildcards=settings.authorization_wildcards,
    )
    guard = AccessGuard(authorizer, RULES, audit, dry_run=settings.authorization == "dry_run")
    namespaces.on_change(guard.policies_changed)
    return guard
