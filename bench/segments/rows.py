"""The rows of the tables: what grows with the segments of a topic, and many topics at rest."""

from typing import Final

from bench.growth_figures import Row

BY_SEGMENTS: Final = (
    Row("create_ms", "creation over REST, ms"),
    Row("lookup_ms", "lookup: the first layout of a session, ms"),
    Row("push_bytes", "push of a layout, bytes", 0),
    Row("split_ms", "split, until it is answered, ms"),
    Row("split_pushed_ms", "split, until a connected client has the layout, ms"),
    Row("merge_ms", "merge of two, until it is answered, ms"),
    Row("merge_pushed_ms", "merge of two, until a connected client has the layout, ms"),
    Row("push_100_ms", "split, until 100 sessions of one client have it, ms"),
    Row("loaded_ms", "first lookup after a restart, ms"),
    Row("registered_ms", "ordered consumer: its assignment, ms"),
    Row("attached_ms", "ordered consumer: attached to every segment, ms"),
    Row("attached_again_ms", "ordered consumer: attached again after a lost connection, ms"),
    Row("lost_ms", "longest PING of another client while that connection is closed, ms"),
    Row("memory_kib", "one topic in memory, watched and with an ordered consumer, KiB"),
    Row("evaluation_ms", "one evaluation of the scaling policy, ms", 2),
    Row("idle_cpu_ms", "processor time per minute at rest, attached, ms", 0),
)
AT_REST: Final = (
    Row("topics", "scalable topics of one segment, each watched by a session", 0),
    Row("topic_kib", "resident memory of one topic, KiB", 2),
    Row("resident_mib", "resident memory of the broker, MiB", 0),
    Row("idle_cpu_ms", "processor time per minute at rest, ms", 0),
    Row("empty_cpu_ms", "the same of a broker without topics, ms", 0),
    Row("start_ms", "start with these topics stored, ms", 0),
    Row("empty_start_ms", "start without topics, ms", 0),
    Row("first_lookup_ms", "first lookup after that start, ms"),
    Row("restart_resident_mib", "resident memory after that start, MiB", 0),
)
