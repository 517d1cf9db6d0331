"""Bounds of the client's queues, caches and retries that users cannot set.

Sizes are in bytes unless the name says otherwise.  Names of times end in `_S` (seconds).
"""

from typing import Final

# Connections
MAX_MESSAGE_SIZE: Final = 5 * 1024 * 1024
"""The largest message, metadata and payload together, until CONNECTED says otherwise."""
FRAME_HEADROOM: Final = 10 * 1024
"""How much larger than a message a frame may be (Pulsar's own number)."""
MAX_DESCRIPTION: Final = 64
"""Characters in the description of a client (Pulsar's number)."""
MAX_ANNOUNCED_MESSAGE_SIZE: Final = 1024 * 1024 * 1024
"""The largest maximum message size that is accepted from CONNECTED."""
WRITE_HIGH_WATER: Final = 1024 * 1024
"""Buffered bytes above which a socket counts as not writable."""
FORGOTTEN_REQUESTS: Final = 1000
"""Requests that were given up and may still be answered; the oldest are forgotten first."""
LOOKUP_REDIRECTS: Final = 20
"""Redirects that a lookup follows (Pulsar's `maxLookupRedirects`)."""
CLOSE_FLUSH_S: Final = 5.0
"""How long a closing connection may take to write its buffer."""
KNOWN_BROKERS: Final = 1000
"""Brokers to which a client keeps connections, and whose TLS addresses it keeps; the oldest go
first."""

# Credentials

MAX_SECRET_FILE_BYTES: Final = 1024 * 1024
"""The largest file that is read for a secret."""
OAUTH2_FETCH_S: Final = 8.0
"""How long a fetch of a token may take, both requests together.  Below the default
`connect_timeout_s`, so that the issuer is named and not the broker."""
OAUTH2_ANSWER_BYTES: Final = 256 * 1024
"""The largest answer of an issuer."""
OAUTH2_EARLY_S: Final = 60.0
"""How long before its end a token is replaced, at most; a tenth of its life if that is shorter."""
OAUTH2_UNKNOWN_LIFETIME_S: Final = 60.0
"""How long a token is kept if the issuer does not say for how long it is valid."""
OAUTH2_FRESH_S: Final = 10.0
"""A token younger than this is not replaced because a broker refuses it or asks for another: so
many connections share one fetch, and a broker that refuses all of them causes no storm."""

# Attachments
RETRY_FIRST_S: Final = 0.1
"""The first pause before a lost attachment is tried again; each next one is twice as long."""
RETRY_LIMIT_S: Final = 30.0
"""The longest pause."""
RETRY_JITTER: Final = 0.2
"""The random part of a pause that is left out, so that not all clients come back at once."""
LEAVE_S: Final = 5.0
"""How long a broker may take to confirm a close."""

# The client for threads

SYNC_TURN: Final = 500
"""Messages that a producer takes from threads before it lets the loop work."""
SYNC_NOTICE_S: Final = 0.5
"""How often a waiting thread checks for a Ctrl-C that it missed."""
SYNC_CANCEL_WAIT_S: Final = 5.0
"""How long an interrupted caller waits until the cancelled call has ended."""

SYNC_CLOSE_S: Final = 10.0
"""How long closing waits for the client's thread."""

# Producing

MAX_UNCOMPRESSED_BYTES: Final = 1024 * 1024 * 1024
"""The largest uncompressed size that a payload may announce; it is unpacked whole."""
LAYOUT_WAIT_S: Final = RETRY_LIMIT_S + 10.0
"""How long messages of a segment that its broker has ended wait for a layout without it."""
SEALED_ASKED_AT_ONCE: Final = 16
"""Sealed segments that a named producer asks at the same time for its last sequence id."""
SEAL_PATIENCE_S: Final = 12.0
"""How long messages without receipt wait for a sealed segment whose broker is not ready.  Longer
than a broker needs to take over a segment; shorter than the default `send_timeout_s`."""
SEGMENT_DOUBTS: Final = 3
"""How often in a row a segment of the layout may be unknown to its broker before that stands."""
DEADLINE_TICK_S: Final = 0.1
"""How much later than its deadline a message may fail: one timer serves all messages."""
BATCH_PART_PERCENT: Final = 90
"""The share of the broker's largest message that a batch may take, without its metadata."""
GIVEN_UP_TICK_S: Final = 1.0
"""How often cancelled messages that still count as pending are collected."""
ANSWERED_KEPT: Final = 1000
"""Messages with an outcome that may be kept behind one without, beside twice those without."""
UNREAD_FAILURES: Final = 1000
"""Failed sends that are kept for `flush`, which raises the first that was not retrieved."""

SEND_TURN: Final = 500
"""Messages that are sent together before other tasks of the loop run."""

# Schemas

MAX_WRITER_SCHEMAS: Final = 1000
"""Versions of a topic's schema that a reader keeps; the oldest go first."""

# Layouts, ordered consumers, namespaces
REFUSALS_IN_A_ROW: Final = 8
"""How often in a row a broker may refuse an attachment that once succeeded (some 25 s)."""
MISSING_SEGMENT_TRIES: Final = 4
"""How often an assigned segment may be missing before its controller is asked again."""
LEFT_SEGMENTS: Final = 1000
"""Segments that an ordered consumer has left and whose acknowledged positions it keeps."""
NAMESPACE_TOPICS: Final = 10_000
"""Topics that one consumer of a namespace consumes."""
NAMESPACE_READY: Final = 1000
"""Messages of all topics of a namespace that are ready for the application, beside the inboxes of
the topics."""
NAMESPACE_BATCH: Final = 100
"""Messages of one topic that are made ready at once."""
NAMESPACE_OPENINGS: Final = 32
"""Topics of a namespace that are subscribed to at the same time."""
NAMESPACE_QUIET_S: Final = 2.0
"""Silence after which a watched namespace counts as unchanged."""
NAMESPACE_RETRY_LIMIT_S: Final = 1800.0
"""The longest pause before a topic that was added later is tried again (Pulsar's own number)."""

# The command line

CLI_BATCH: Final = 500
"""Messages that are printed, flushed and acknowledged together."""
PERF_TURN: Final = 500
"""Messages that `perf produce` sends before it lets the loop work."""
PERF_QUIET_S: Final = 5.0
"""Silence after which `perf` prints what may be missing."""
PERF_SHOWN_EVERY_S: Final = 0.25
"""How often `perf` draws its progress."""

DEMO_STEP_S: Final = 20.0
"""How long a step of the demo may take before the demo fails."""
DEMO_POLL_S: Final = 0.02
"""How often the demo checks whether its broker serves."""
DEMO_TRANSACTION_S: Final = 60.0
"""How long the demo's transactions may stay open."""
DEMO_KEYLESS_TRANSACTION_S: Final = 3.0
"""The same without transaction keys, when a dead worker's transaction must time out."""
DEMO_AGAIN_S: Final = 0.1
"""How long the demo's worker waits before it starts again after a failure."""
DEMO_DISK_BYTES: Final = 64 * 1024 * 1024
"""Free disk that the demo needs where it keeps its data."""
DEMO_SILENCE_S: Final = 0.5
"""Silence after which the demo takes it that no more bills come."""

# Consuming

MAX_ACK_GROUP: Final = 1000
"""Acknowledgements that are collected before they are sent, and in one ACK (Pulsar's number)."""
MAX_KNOWN_IN_HAND: Final = 50_000
"""Batches and messages of a shared segment known from before a new attachment (Pulsar's number of
unacknowledged messages that a consumer may have)."""
MAX_UNANSWERED_ACKS: Final = 10_000
"""Groups of acknowledgements without an answer; the outcome of the oldest is unknown then."""
CHUNKED_BYTES: Final = 256 * 1024 * 1024
"""Bytes of the incomplete chunked messages of a segment, unless a consumer sets another number."""
ORDERED_CHUNKED_MESSAGES: Final = 1000
"""Incomplete chunked messages that a segment may have at least where it is read in order."""
MAX_REDELIVERY_GROUP: Final = 1000
"""Entries in one REDELIVER_UNACKNOWLEDGED_MESSAGES (Pulsar's number)."""
INBOX_SEGMENTS: Final = 64
"""A queue consumer's inbox is full with the messages of so many segments' queues."""
DEAD_LETTERS_IN_FLIGHT: Final = 1000
"""Dead letters that are being sent; others are left for a later delivery."""

# Reading segments

READ_BYTES: Final = 4 * 1024 * 1024
"""Bytes of the entries that are read at once, by default."""
READ_OWNERS: Final = 1000
"""Segments whose last broker is remembered; the oldest are forgotten first."""
RAW_READER_MESSAGES: Final = 1000
"""Permits that a reader of stored entries gives at a time to a broker without segment reads."""
PROBE_S: Final = 0.5
"""Silence after which such a reader is at the end of what can be read."""
PROBE_POLL_S: Final = 0.02
"""How often it asks for its position meanwhile."""
PROBE_STEP: Final = 8
"""The factor by which the next probe begins further back, if the last one got no message."""

# Transactions

MAX_TRANSACTION_KEY_BYTES: Final = 256
"""Bytes of the name of a transaction key, in UTF-8."""
MAX_COMMIT_BYTES: Final = 1020 * 1024
"""Bytes of the commit of a group, without its key: brokers take commands of up to 1 MiB."""
TXN_CLOSE_S: Final = 5.0
"""How long it may take to abort an open transaction that is left or closed."""
