"""The bounds of every queue, cache and retry of the client that users do not set.

Sizes are bytes unless the name says otherwise; times end in `_S`.  What users set is in
`magnetar.settings`.
"""

from typing import Final

# Connections
MAX_MESSAGE_SIZE: Final = 5 * 1024 * 1024
"""Of a message, metadata and payload, until CONNECTED says otherwise."""
FRAME_HEADROOM: Final = 10 * 1024
"""How much larger than a message a frame may be (Pulsar's own number)."""
MAX_DESCRIPTION: Final = 64
"""Characters of what a client says of itself (Pulsar's number)."""
MAX_ANNOUNCED_MESSAGE_SIZE: Final = 1024 * 1024 * 1024
"""The most that is believed of CONNECTED."""
WRITE_HIGH_WATER: Final = 1024 * 1024
"""Bytes that wait for a socket above which it is not writable."""
FORGOTTEN_REQUESTS: Final = 1000
"""Requests whose answers are not awaited any more and may still come; the oldest go first."""
LOOKUP_REDIRECTS: Final = 20
"""Brokers that a lookup is sent on to (Pulsar's `maxLookupRedirects`)."""
CLOSE_FLUSH_S: Final = 5.0
"""How long a connection that closes may take to deliver what is queued."""
KNOWN_BROKERS: Final = 1000
"""Brokers whose TLS addresses are kept; the oldest go first."""

# Attachments
RETRY_FIRST_S: Final = 0.1
"""The first pause before something lost is attached again; each next one is twice as long."""
RETRY_LIMIT_S: Final = 30.0
"""The longest pause."""
RETRY_JITTER: Final = 0.2
"""The part of a pause that luck may take away, so that not all come back at once."""
LEAVE_S: Final = 5.0
"""How long the broker has to confirm that something is closed."""

# The synchronous face

SYNC_TURN: Final = 500
"""Messages that a producer takes from threads before it lets the loop work."""
SYNC_NOTICE_S: Final = 0.5
"""After how long a waiting thread notices a Ctrl-C that it missed."""
SYNC_CANCEL_WAIT_S: Final = 5.0
"""How long an interrupted caller waits until what it had waited for has ended."""

SYNC_CLOSE_S: Final = 10.0
"""How long closing waits for the client's thread."""

# Producing

MAX_UNCOMPRESSED_BYTES: Final = 1024 * 1024 * 1024
"""The most that a compressed payload may announce; it is unpacked whole."""
LAYOUT_WAIT_S: Final = RETRY_LIMIT_S + 10.0
"""How long messages of a segment that the broker has ended wait for the layout that says so."""
SEALED_ASKED_AT_ONCE: Final = 16
"""Sealed segments that a producer with a name asks at the same time what they have of it."""
SEAL_PATIENCE_S: Final = 12.0
"""How long what a sealed segment has not answered waits for it, while its broker says that it is
not ready.  More than a broker takes to take over a segment; less than a send may take by default.
"""
SEGMENT_DOUBTS: Final = 3
"""How often in a row a segment of the layout may be unknown to its broker until it is believed."""
DEADLINE_TICK_S: Final = 0.1
"""How much later than its time a message may fail: what is due is looked at together."""
BATCH_PART_PERCENT: Final = 90
"""How much of the largest message that its broker takes a batch may have before its metadata."""
GIVEN_UP_TICK_S: Final = 1.0
"""How often it is looked whether messages were cancelled that still take room."""
ANSWERED_KEPT: Final = 1000
"""Messages with outcome that may wait behind one without, beside twice those without."""
UNREAD_FAILURES: Final = 1000
"""Failed sends that are remembered for `flush`, which raises the first that nobody looked at."""

SEND_TURN: Final = 500
"""Messages that are sent together before the loop does something else."""

# Schemas

MAX_WRITER_SCHEMAS: Final = 1000
"""Versions of a topic's schema that a reader keeps; the oldest go first."""

# Layouts, ordered consumers, namespaces
REFUSALS_IN_A_ROW: Final = 8
"""How often a broker may refuse what it had granted before that is believed (some 25 s)."""
MISSING_SEGMENT_TRIES: Final = 4
"""How often an assigned segment may be missing before its controller is asked again."""
LEFT_SEGMENTS: Final = 1000
"""Segments that an ordered consumer has left of which it remembers what was acknowledged."""
NAMESPACE_TOPICS: Final = 10_000
"""Topics that one consumer of a namespace takes."""
NAMESPACE_READY: Final = 1000
"""Messages of all topics of a namespace that wait to be handed out, beside their own inboxes."""
NAMESPACE_BATCH: Final = 100
"""Messages of one topic that are put there at once."""
NAMESPACE_OPENINGS: Final = 32
"""Topics of a namespace that are subscribed to at the same time."""
NAMESPACE_QUIET_S: Final = 2.0
"""Silence by which a broker says that a watched namespace is as it was."""
NAMESPACE_RETRY_LIMIT_S: Final = 1800.0
"""The longest pause before a topic that came later is tried again (Pulsar's own number)."""

# The command line

CLI_BATCH: Final = 500
"""Messages that are printed, flushed and acknowledged together."""
PERF_TURN: Final = 500
"""Messages that `perf produce` sends before it lets the loop work."""
PERF_QUIET_S: Final = 5.0
"""After how long without any message `perf` says what may be lacking."""
PERF_SHOWN_EVERY_S: Final = 0.25
"""How often `perf` draws its progress."""

DEMO_STEP_S: Final = 20.0
"""How long anything that the demo waits for may take before the demo fails."""
DEMO_POLL_S: Final = 0.02
"""How often it looks whether its broker serves."""
DEMO_TRANSACTION_S: Final = 60.0
"""How long the demo's transactions may stay open."""
DEMO_KEYLESS_TRANSACTION_S: Final = 3.0
"""The same without transaction keys, when a dead worker's transaction must time out."""
DEMO_AGAIN_S: Final = 0.1
"""How long the demo's worker waits before it begins anew what has failed."""
DEMO_DISK_BYTES: Final = 64 * 1024 * 1024
"""Free disk that the demo needs where it keeps its data."""
DEMO_SILENCE_S: Final = 0.5
"""How long nothing more may come before the demo believes that nothing more comes."""

# Consuming

MAX_ACK_GROUP: Final = 1000
"""Acknowledgements that wait together before they are sent, and in one ACK (Pulsar's number)."""
MAX_KNOWN_IN_HAND: Final = 50_000
"""Batches and messages of a shared segment known from before a new attachment (Pulsar's number of
unacknowledged messages that a consumer may have)."""
MAX_UNANSWERED_ACKS: Final = 10_000
"""Groups of acknowledgements that a broker has not answered; of the oldest it is not known then."""
CHUNKED_BYTES: Final = 256 * 1024 * 1024
"""Of the incomplete messages in pieces of a segment, unless a consumer is told otherwise."""
ORDERED_CHUNKED_MESSAGES: Final = 1000
"""Messages in pieces of a segment that may be incomplete at least where it is read in order."""
MAX_REDELIVERY_GROUP: Final = 1000
"""Entries in one REDELIVER_UNACKNOWLEDGED_MESSAGES (Pulsar's number)."""
INBOX_SEGMENTS: Final = 64
"""A queue consumer's inbox is full when it has the messages of so many segments' queues."""
DEAD_LETTERS_IN_FLIGHT: Final = 1000
"""Dead letters that are being sent; further ones are left for a later delivery."""

# Reading segments

READ_BYTES: Final = 4 * 1024 * 1024
"""Of the entries that are read at once, unless told otherwise."""
READ_OWNERS: Final = 1000
"""Segments of which it is kept at which broker they were read last; the oldest go first."""
RAW_READER_MESSAGES: Final = 1000
"""Messages that a reader of stored entries asks for at a time, where it reads as consumers do."""
PROBE_S: Final = 0.5
"""After how long without a message such a reader has come to where nothing may be read."""
PROBE_POLL_S: Final = 0.02
"""How often it asks meanwhile where it stands."""
PROBE_STEP: Final = 8
"""How many times further back the next one begins, if the last one got nothing."""

# Transactions

MAX_TRANSACTION_KEY_BYTES: Final = 256
"""Of the name of a transaction key, in UTF-8."""
MAX_COMMIT_BYTES: Final = 1020 * 1024
"""Of the commit of a group without its key: brokers take no command of more than 1 MiB."""
TXN_CLOSE_S: Final = 5.0
"""How long an open transaction that is left or closed may take to be aborted."""
