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
ECHO_WAIT_S = 2
"""How long a closing producer of a sealing segment has to answer a PING."""
CONNECTION_WRITE_LIMIT = 64 * 1024 * 1024
"""Bytes queued towards one peer at which it is given up: it reads nothing and gets too much."""
BROKER_INFLIGHT_BYTES = 256 * 1024 * 1024
"""Published bytes of all connections not yet durable; above it publishers are not read."""
CLOSE_FLUSH_S = 5
"""How long a closing connection may take to deliver what is queued."""
LIVENESS_CHECK_S = 5
"""How long the holder of a producer name has to prove that it lives when another one asks."""
LISTEN_BACKLOG = 1024
"""Sockets that wait to be accepted."""
DRAIN_REQUESTS_S = 1
"""How long a stopping broker waits for requests in progress after its topics are closed."""
SESSION_TIMEOUT_MS = 30_000
"""After this long without a sign of life a broker's ephemeral records go."""
VIOLATIONS_LOGGED_PER_S = 10
"""Lines about connections that broke the protocol; the others are counted."""
HEALTH_LEDGER_ENTRIES = 1000
"""Health checks whose entries are in one ledger; then it is deleted for the next one."""

# Topics
RECENTLY_CLOSED_PRODUCERS = 1000
"""Producer ids of a connection remembered after close, so that late SENDs are dropped quietly."""
SEAL_WAIT_S = 5
"""How long a sealing segment waits for attached producers to move."""
EXCLUSIVE_HANDOVER_WAIT_S = 20
"""How long a SUBSCRIBE on a segment waits for the former exclusive consumer to go."""
WAITING_PRODUCERS = 1000
"""WaitForExclusive producers queued on one topic."""
TRACKED_PRODUCERS = 1000
"""Producers without connection whose last sequence id a topic remembers; the oldest go first."""
TRACKED_PRODUCER_MS = 6 * 3600 * 1000
"""How long it does (Pulsar's brokerDeduplicationProducerInactivityTimeoutMinutes)."""
SEQUENCE_SNAPSHOT_ENTRIES = 10_000
"""Entries after which the sequence ids are stored; a load replays at most about so many."""
SEQUENCE_SNAPSHOT_BYTES = 64 * 1024 * 1024
"""The same in bytes."""
SEQUENCE_SNAPSHOT_S = 60
"""The same in time, so that quiet topics give space back too."""
MAX_PARTITIONS = 10_000
"""Partitions of one topic."""
MAX_PATTERN_CHARACTERS = 100
"""Longest topic pattern that is evaluated here."""
MAX_PATTERN_STATES = 500
"""Largest automaton that a pattern may become."""
TOPIC_LIST_PAUSE_S = 0.05
"""Changes of a topic list within this time are told together."""
TOPIC_LIST_WATCHERS = 100
"""WATCH_TOPIC_LIST watchers of one connection."""
IDLE_LOOK_S = 30
"""Longest time between two looks for topics that nobody uses."""
IDLE_TOPICS_TO_TRIM = 100_000
"""Unloaded topics that are loaded again when retention ends; others wait for their next user."""

# Dispatch
READ_BATCH_ENTRIES = 200
READ_BATCH_BYTES = 4 * 1024 * 1024
MAX_UNACKED_PER_CONSUMER = 50_000
MAX_UNACKED_PER_SUBSCRIPTION = 200_000
READ_RETRY_MIN_S = 0.1
READ_RETRY_MAX_S = 10.0
"""Pause before a read for dispatch that failed is tried again: doubles from one to the other."""
ROUND_ROBIN_RUN_ENTRIES = 20
"""Entries that one Shared consumer gets in a row before it is the next one's turn."""
KEY_SHARED_LOOK_AHEAD_ENTRIES = 10_000
"""Entries a Key_Shared subscription reads past consumers that have no room."""
SEEK_REATTACH_S = 60
"""How long a reader's position outlives the disconnection that a seek causes."""

# Metadata records
RECORD_CHANGE_TRIES = 20
"""Compare-and-set rounds before a change of a record gives up."""
MAX_SCHEMA_VERSIONS = 1000
"""Versions in the schema history of one topic."""

# Storage
ROLL_OVER_BUFFER_ENTRIES = 20_000
"""Appends held while a managed ledger opens its next ledger."""
ROLL_OVER_ATTEMPTS = 3
"""Ledgers in a row that may fail without storing anything before callers get the error."""
OPEN_LEDGER_HANDLES = 64
"""Closed ledgers of one stream that stay open for reading."""
CURSOR_INLINE_BYTES = 8 * 1024
"""Largest position kept in a cursor's own record; above it goes to the cursor's ledger."""
CURSOR_INLINE_WRITES = 20
"""Positions written to the record before a busy cursor gets a ledger."""
CURSOR_LEDGER_ENTRIES = 50_000
"""Positions in one cursor ledger before the next one (Pulsar's number)."""
CURSOR_LEDGER_AGE_S = 4 * 3600
CURSOR_RETRY_MAX_S = 10
"""Longest pause between attempts to write a position when the store fails."""
CURSOR_LEDGER_LOOKBACK = 16
"""Entries from the end of a cursor ledger that are tried when the last one is damaged."""
WATCH_QUEUE_EVENTS = 10_000
"""Events waiting for one watcher; above it they collapse into one resync."""

# Ledger log (embedded)
LEDGER_LOG_FILE_BYTES = 64 * 1024 * 1024
"""A log file takes no further group at this size.  The newest file is read at every start."""
LEDGER_LOG_FILE_RECORDS = 32_768
"""The same in records: bounds the index in memory, and the time to read the newest file."""
LEDGER_GROUP_BYTES = 16 * 1024 * 1024
"""Most that one write and one sync cover; what is above it waits for the next group."""
LEDGER_ENTRY_BYTES = 64 * 1024 * 1024
"""Largest entry a ledger takes."""
LEDGER_READER_THREADS = 4
LEDGER_READ_ATTEMPTS = 5
"""How often a read looks again when compaction has just moved what it was about to read."""
LEDGER_SEAL_RETRY_S = 5
"""Pause before an index file that could not be written is tried again."""
LEDGER_RECLAIM_PAUSE_S = 30
"""Least time between two looks for space to give back."""
LEDGER_COMPACT_BYTES_PER_S = 16 * 1024 * 1024
"""Bytes each second that compaction may write."""
LEDGER_COMPACT_STEP_BYTES = 1024 * 1024
LEDGER_COMPACT_SOURCES = 64
"""Most files that one compaction merges."""

# Metadata
METADATA_VALUE_BYTES = 1024 * 1024
"""Largest value of a record (ZooKeeper's limit for a node, and ours for every backend)."""
METADATA_KEY_BYTES = 4096
"""Longest key, partition key or secondary key, in UTF-8."""
METADATA_INDEX_ENTRIES = 1000
"""Index entries of one record."""
METADATA_REQUEST_BYTES = 4 * 1024 * 1024
"""Most that one write may carry: key, value, index entries."""
METADATA_BATCH_OPERATIONS = 512
"""Operations of one commit, and reads of one snapshot."""
METADATA_BATCH_BYTES = 4 * 1024 * 1024
"""Bytes of one commit; the operation that crosses it is the last one in."""
METADATA_QUEUE_OPERATIONS = 100_000
"""Operations that wait for a commit or a read; above it new ones are refused."""
METADATA_QUEUE_BYTES = 64 * 1024 * 1024
METADATA_RECENT_KEYS = 10_000
METADATA_RECENT_BYTES = 8 * 1024 * 1024
"""Of records that changed last, kept in memory to be read."""
METADATA_PAGE_CACHE_BYTES = 2 * 1024 * 1024
"""Page cache of each SQLite connection (one writes, two read)."""
METADATA_WAL_KEEP_BYTES = 16 * 1024 * 1024
"""The write-ahead log is cut back to this after a checkpoint."""
METADATA_SESSION_TIMEOUT_MAX_MS = 5 * 60 * 1000
WATCH_QUEUE_BYTES = 32 * 1024 * 1024
"""Value bytes waiting for one watcher; above it they collapse into one resync."""

# Scalable topics
MAX_INITIAL_SEGMENTS = 1024
"""Segments a topic may be created with."""
MAX_SEGMENTS = 2048
"""Segments of one topic, sealed ones included: their record must fit METADATA_VALUE_BYTES."""
MAX_TOPIC_PROPERTIES = METADATA_INDEX_ENTRIES - 1
"""Properties of one topic: each has an index entry, and there is one more when it was split."""
MAX_TOPIC_PROPERTIES_BYTES = 256 * 1024
"""The same in bytes of JSON; beside them the largest layout fits into METADATA_VALUE_BYTES."""
RESHAPE_TRIES = 8
"""How often sealing after a split or merge is tried in a row; later it is one try at a time."""
RESHAPE_RETRY_PAUSE_S = 0.25
"""Pause after the first of those tries; the n-th is n times as long."""
SESSIONS_PER_CONNECTION = 10_000
"""Layouts, namespaces or ordered consumers (of each) that one connection may have open."""
NAMESPACE_WATCH_COALESCE_S = 0.05
"""Changes of a watched namespace within this time are told together, as Apache Pulsar does."""
RELEASE_WAIT_S = 5
"""How long a segment waits for a former owner that was told of it and never seen there."""
TAKE_UP_WAIT_S = 30
"""How long a consumer may leave all its segments unread before others get them."""

# Transactions
TXN_ID_BLOCK = 1000
"""Transaction numbers that a coordinator reserves with one write."""
TXN_ENDED_KEPT = 1_000
"""Ended transactions that each segment, and each subscription, remembers, to refuse what comes late
without a read: 0.1 MB and 0.2 MB, which thousands of them may have."""
TXN_PAGE = 1000
"""Records that one page of an index scan brings."""
TXN_SLICE_POSITIONS = 256
"""Acknowledged positions that are applied or released in one turn of the loop."""
TXN_ACKS_OF_RECORD = TXN_SLICE_POSITIONS
"""Positions in one acknowledgement record; a longer ACK command makes several."""
TXN_CLEANING_RETRY_MAX_S = 10
"""Longest pause between attempts to clean up after a transaction when the store fails."""
TXN_TIMEOUT_DEFAULT_MS = 60_000
"""Timeout of a transaction whose client asks for none (the default of Pulsar's clients)."""
TXN_TIMEOUT_MAX_MS = 24 * 3600 * 1000
"""Longest timeout of a transaction: as long as that it may hold readers back."""
TXN_DEADLINE_LOOK_S = 10
"""Longest pause of the timer of deadlines, so that changes of the wall clock are noticed."""
TXN_SWEEP_S = 60
"""How often open transactions past their deadline are looked for that nobody here knows of."""
TXN_CONCURRENT_ENDS = 256
"""Aborts of timed-out transactions, and reads of headers after a resync, that run at once."""
TXN_LISTED = 1_000
"""Most transactions that one REST answer lists; it tells how many there are."""
TXN_WATCHES = 100
"""Watches of coordinators on one connection."""
TXN_ASSIGNMENTS_RETRY_S = 1
"""While coordinators have no leader, those who watch are told again after this time."""
TXN_TOPIC_LOADS = 8
"""Topics that the collector loads at once to have them look at their records."""
TXN_PENDING_POSITIONS = 1_000_000
"""Positions that open transactions may hold on one subscription."""
TXN_HELD_SENDS = 1000
"""SENDs of one producer that wait for a transaction to be joined; its connection pauses above."""
TXN_PRUNE_S = 300
"""Pause between looks for aborted transactions whose ledgers are gone."""
TXN_PINS_SHOWN = 100
"""Transactions that are shown for one segment when an operator asks what pins it."""
TXN_CLAIMS_READ = 500
"""Claims that are read of one segment that is not loaded when an operator asks so."""
