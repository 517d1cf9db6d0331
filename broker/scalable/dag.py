"""DAG messages: the layout of a scalable topic, or of a regular topic as if it were one.  Pure."""

from broker.placement import BrokerAddress, Placement
from broker.scalable.layout import Layout, Segment, even_ranges
from broker.scalable.records import segment_of
from magnetar.protocol.names import TopicName
from magnetar.protocol.pulsar_pb2 import ACTIVE, SEALED, ScalableTopicDAG, SegmentInfoProto


def dag_of(name: TopicName, layout: Layout, placement: Placement, *, tls: bool) -> ScalableTopicDAG:
    """The DAG message of a scalable topic.

    It has all segments that are not pruned, SEALED ones included, the brokers of the ACTIVE ones,
    and always the address of the controller, so that a client never has to guess it.  For a client
    that uses TLS the plain fields have the addresses with TLS too: Pulsar's v5 clients read those
    alone, and speak TLS there.
    """
    dag = ScalableTopicDAG(
        epoch=layout.epoch,
        segments=[_segment(segment) for segment in layout.segments.values()],
    )
    for segment in layout.active:
        address = placement.owner_of(segment_of(name, segment).topic_name)
        entry = dag.segment_brokers.add(
            segment_id=segment.segment_id, broker_url=address.url_for(tls)
        )
        if address.url_tls is not None:
            entry.broker_url_tls = address.url_tls
    _set_controller(dag, placement.controller_of(name), tls=tls)
    return dag


def synthetic_dag(
    name: TopicName, partitions: int, placement: Placement, *, now_ms: int, tls: bool
) -> ScalableTopicDAG:
    """The DAG message of a regular topic: one segment for each partition, or one for the topic.

    Each segment names the topic or partition as its legacy topic, and clients attach to that.
    `tls`: see `dag_of`.
    """
    dag = ScalableTopicDAG(epoch=0)
    for number, (start, end) in enumerate(even_ranges(max(partitions, 1))):
        segment = Segment(
            segment_id=number,
            hash_start=start,
            hash_end=end,
            created_at_epoch=0,
            created_at_ms=now_ms,
            legacy_topic_name=str(name.partition(number) if partitions > 0 else name),
        )
        dag.segments.append(_segment(segment))
    _set_controller(dag, placement.controller_of(name), tls=tls)
    return dag


def _segment(segment: Segment) -> SegmentInfoProto:
    info = SegmentInfoProto(
        segment_id=segment.segment_id,
        hash_start=segment.hash_start,
        hash_end=segment.hash_end,
        state=ACTIVE if segment.active else SEALED,
        parent_ids=segment.parent_ids,
        child_ids=segment.child_ids,
        created_at_epoch=segment.created_at_epoch,
        created_at_ms=segment.created_at_ms,
        entry_bucket_splits=segment.entry_bucket_splits,
    )
    if not segment.active:
        info.sealed_at_epoch = segment.sealed_at_epoch
        info.sealed_at_ms = segment.sealed_at_ms
    if segment.legacy_topic_name is not None:
        info.legacy_topic_name = segment.legacy_topic_name
    return info


def _set_controller(dag: ScalableTopicDAG, address: BrokerAddress, *, tls: bool) -> None:
    dag.controller_broker_url = address.url_for(tls)
    if address.url_tls is not None:
        dag.controller_broker_url_tls = address.url_tls
