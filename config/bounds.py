"""The bounds of every queue, cache and retry that users do not set, named in one place.

Sizes are bytes unless the name says otherwise; times end in `_S` or `_MS`.
"""

# Wire
MAX_MESSAGE_SIZE = 5 * 1024 * 1024
"""Largest message (metadata and payload) a producer may send; announced in CONNECTED."""
MAX_FRAME_SIZE = MAX_MESSAGE_SIZE + 10 * 1024
"""Largest frame; Pulsar's own headroom for the command around a message."""
MAX_PENDING_REQUESTS = 1000
"""Requests of one connection that may be in progress; reading pauses above it."""
CONNECTION_INFLIGHT_BYTES = 32 * 1024 * 1024
"""Published bytes of one connection not yet durable; reading pauses above it."""
CONNECTION_WRITE_HIGH_WATER = 4 * 1024 * 1024
"""Bytes queued towards one peer before its dispatchers pause."""
HANDSHAKE_TIMEOUT_S = 10
KEEP_ALIVE_S = 30

# Topics
RECENTLY_CLOSED_PRODUCERS = 1000
"""Producer ids of a connection remembered after close, so that late SENDs are dropped quietly."""
SEAL_WAIT_S = 5
"""How long a sealing segment waits for attached producers to move."""
EXCLUSIVE_HANDOVER_WAIT_S = 20
"""How long a SUBSCRIBE on a segment waits for the former exclusive consumer to go."""

# Dispatch
READ_BATCH_ENTRIES = 200
READ_BATCH_BYTES = 4 * 1024 * 1024
MAX_UNACKED_PER_CONSUMER = 50_000
MAX_UNACKED_PER_SUBSCRIPTION = 200_000

# Storage
ROLL_OVER_BUFFER_ENTRIES = 20_000
"""Appends held while a managed ledger opens its next ledger."""
WATCH_QUEUE_EVENTS = 10_000
"""Events waiting for one watcher; above it they collapse into one resync."""
