"""Records of scalable topics in the metadata store."""

from broker.scalable.steps import STEPS_ROOT
from magnetar.protocol.names import TopicName
from storage.metadata.store import MetadataStore


async def noted_steps(metadata: MetadataStore) -> list[str]:
    """The notes of steps that have begun and not ended, below `STEPS_ROOT`."""
    return await metadata.children(STEPS_ROOT)


async def nothing_is_noted(metadata: MetadataStore) -> bool:
    """Whether no step has begun and not ended."""
    return await noted_steps(metadata) == []


async def stored_segments(metadata: MetadataStore, topic: TopicName) -> list[str]:
    """Descriptors of the segments of a topic that have a ledger."""
    path = f"/managed-ledgers/{topic.namespace_name}/segment/{topic.local_name}"
    return await metadata.children(path)
