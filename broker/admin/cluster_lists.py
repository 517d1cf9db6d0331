"""Lists of clusters in requests for tenants, namespaces and topics, and what each may name."""

from collections.abc import Collection, Mapping
from http import HTTPStatus

from broker.admin.rest import RestError, refused, shortened
from broker.app.service import Broker
from broker.policies.cluster_data import ClusterData
from config.bounds import MAX_CLUSTERS


def clusters_in(value: object, member: str) -> list[str]:
    """The names in a body, each once and in order.  Raises 412 unless it is a list of names."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise refused(
            f"{member} cannot be {shortened(repr(value))}: send a list of names of clusters."
        )
    return sorted(set(value))


async def require_clusters(
    broker: Broker,
    names: Collection[str],
    member: str,
    *,
    unknown: HTTPStatus = HTTPStatus.FORBIDDEN,
) -> Mapping[str, ClusterData]:
    """The clusters other than the local one.

    Raises `RestError` with the status `unknown` for names of none, and 412 for more than there can
    be.
    """
    own = broker.clusters.local_name
    if len(names) > MAX_CLUSTERS + 1:
        raise refused(
            f"{member} has {len(names)} names, and there are at most {MAX_CLUSTERS + 1} clusters."
        )
    found = {name: await broker.clusters.find(name) for name in names if name != own}
    missing = [name for name, data in found.items() if data is None]
    if missing:
        raise RestError(
            unknown,
            f"{member} names {shortened(', '.join(missing))}, which is no cluster here: register "
            f"it with PUT /admin/v2/clusters/NAME. This cluster is {own!r}.",
        )
    return {name: data for name, data in found.items() if data is not None}


async def require_allowed(
    broker: Broker, names: Collection[str], member: str, *, tenant: str
) -> None:
    """Raise unless topics of a tenant may be in all of these clusters together.

    403 for an unknown cluster and for one that is not allowed to the tenant, 412 for two peers.
    """
    others = await require_clusters(broker, names, member)
    for name, data in others.items():
        peers = sorted(set(data.peer_cluster_names) & set(names))
        if peers:
            raise refused(
                f"{member} names {name} and {peers[0]}, which are peers: leave one of them out."
            )
    allowed = (await broker.namespaces.tenant(tenant)).get("allowedClusters") if others else None
    refused_names = sorted(set(others) - set(allowed if isinstance(allowed, list) else ()))
    if refused_names:
        raise RestError(
            HTTPStatus.FORBIDDEN,
            f"{member} names {shortened(', '.join(refused_names))}, which is not allowed to the "
            f"tenant {tenant}: add it to the tenant's allowedClusters.",
        )


async def require_replicable(
    broker: Broker, names: Collection[str], member: str, *, tenant: str
) -> None:
    """Raise unless topics of a tenant can be replicated among these clusters.

    As `require_allowed`, and 412 for an empty list and for one without the local cluster.
    """
    own = broker.clusters.local_name
    if not names:
        raise refused(f'{member} is empty: send ["{own}"] to replicate to no other cluster.')
    await require_allowed(broker, names, member, tenant=tenant)
    require_own(names, own, member)


def require_own(names: Collection[str], own: str, member: str) -> None:
    """Raise 412 for a list without the local cluster."""
    if own not in names:
        raise refused(
            f"{member} lacks {own!r}, the cluster of this broker: add it. What is to be in other "
            "clusters alone is deleted here first."
        )


def require_within(names: Collection[str], allowed: object, member: str) -> None:
    """Raise 400 for clusters that are not among those that a namespace allows, if it names any."""
    if not isinstance(allowed, list) or not allowed:
        return
    outside = sorted(set(names) - set(allowed))
    if outside:
        raise RestError(
            HTTPStatus.BAD_REQUEST,
            f"{member} names {shortened(', '.join(outside))}, which is not in allowedClusters of "
            "the namespace: change these first.",
        )
