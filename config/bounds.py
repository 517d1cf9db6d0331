"""The bounds of all queues, caches, retries and timeouts that users do not set.

Sizes are in bytes unless the name says otherwise; times end in `_S` or `_MS`.
"""

# Wire
MAX_MESSAGE_SIZE = 5 * 1024 * 1024
"""Largest payload of an entry that a producer may send; announced in CONNECTED, unless the ledger
store takes less."""
ENTRY_HEADROOM = 9 * 1024
"""Bytes of an entry beside its payload: metadata, and ten bytes before that.  Less than the
headroom of frames, as a command is around the entry too when it is sent to consumers."""
MAX_FRAME_SIZE = MAX_MESSAGE_SIZE + 10 * 1024
"""Largest frame, with Pulsar's headroom around a payload."""
MAX_PENDING_REQUESTS = 1000
"""Requests of one connection in progress; above it the connection is not read."""
CONNECTION_INFLIGHT_BYTES = 32 * 1024 * 1024
"""Published bytes of one connection that are not durable; above it the connection is not read."""
THROTTLED_CONNECTION_BYTES = 1024 * 1024
"""SENDs of one connection that wait for a publish rate; above it the connection is not read."""
THROTTLED_BYTES = 64 * 1024 * 1024
"""The same of all connections; above it no connection is read that has any waiting."""
THROTTLED_SEND_BYTES = 512
"""Bytes that a SEND which waits counts for beside its entry."""
UNTHROTTLED_AT_ONCE = 500
"""SENDs that waited and are published in one turn of the loop."""
CONNECTION_WRITE_HIGH_WATER = 4 * 1024 * 1024
"""Bytes queued towards one peer before its dispatchers pause."""
TURN_S = 0.005
"""How long the handlers of one connection may run in one turn of the loop; then other connections
are served."""
TURN_FRAMES = 4
"""Frames of one connection between two measurements of that time."""
SHORT_READ_S = 0.001
"""Reads that are served within it do not count towards that time."""
DECODED_COMMANDS = 128
"""Commands of one connection, SENDs aside, that are decoded in one turn of the loop."""
COSTLY_REQUESTS_AT_ONCE = 4
"""Costly requests (listings of topics, large schemas, many partitions) of all connections in
progress; each connection has one."""
COSTLY_REQUEST_S = 1.0
"""A costly request that takes longer counts no more among those: it mostly waits for a store ..."""
COSTLY_REQUESTS_LATE = 60
"""... as far as no more than this are such; then others wait for them again."""
COSTLY_REQUESTS_WAITING = 100
"""Costly requests of one connection that wait for their turn; above it the connection is not
read."""
PEER_MEMORY_BYTES = 512 * 1024 * 1024
"""Bytes held for all peers: incomplete frames, frames that wait, queued output.  Above it the
connections end that hold the most for the longest.  A hundred peers that send the largest message
at once take less than this, and so do a hundred that have CONNECTION_WRITE_HIGH_WATER queued."""
BEFORE_LOGIN_BYTES_OF_ADDRESS = 4 * 1024 * 1024
"""Bytes held for the connections of one address that have not logged in; above it those end that
hold the most for the longest.  A CONNECT arrives whole, as a rule, and holds nothing."""
PEER_PROGRESS_BYTES = 64 * 1024
"""A peer makes progress when it has sent or read so much."""
GONE_PEER_CHECK_S = 0.75
"""How often connections that are not read are checked; one ends when two find its peer gone."""
HANDSHAKE_FRAME_BYTES = 64 * 1024
"""Largest frame until CONNECT is answered."""
HANDSHAKE_TIMEOUT_S = 10
TLS_HANDSHAKE_S = 10
"""How long a TLS handshake may take, from the connection's beginning on; before CONNECT."""
TLS_HANDSHAKES = 1_000
"""TLS handshakes of one port in progress whose peers have sent something.  Above it the one that
has waited longest for its peer is ended, and one that comes while none waits for its peer.  Each
takes some 50 KB of OpenSSL."""
TLS_HANDSHAKES_OF_ADDRESS = 200
"""The same of one address, so that one cannot end the handshakes of all others."""
TLS_RELOAD_FILE_BYTES = 4 * 1024 * 1024
"""Largest file with certificates or a key."""
RELAY_KEEP_ALIVE_S = 30
"""How often the relay of an ordered consumer asks whether the leader still answers."""
FORWARD_CONNECT_TIMEOUT_S = 5
"""How long the broker that a client names may take to accept a forwarded connection."""
FORWARD_HIGH_WATER = 1024 * 1024
"""Bytes queued towards that broker; above it the client's connection is not read."""
ECHO_WAIT_S = 2
"""How long the client of a producer that closes on a sealing segment may take to answer a PING."""
CONNECTION_WRITE_LIMIT = 64 * 1024 * 1024
"""Bytes queued towards one peer at which its connection is closed, as it does not read."""
BROKER_INFLIGHT_BYTES = 256 * 1024 * 1024
"""Published bytes of all connections that are not durable; above it publishers are not read."""
CLOSE_FLUSH_S = 5
"""How long a closing connection may take to send the queued bytes."""
LIVENESS_CHECK_S = 5
"""How long the owner of a producer name may take to answer a PING when another one claims it."""
LISTEN_BACKLOG = 1024
"""Connections that wait to be accepted."""
DRAIN_REQUESTS_S = 1
"""How long a stopping broker waits for requests in progress after its topics are closed."""
BROKER_STOP_S = 10
"""How long a process waits for its stores to close, after it has drained."""
LOG_LINES_PER_S = 10
"""Log lines of one event, or of one library's logger, within a second; more are only counted."""
AUDIT_LINES_OF_CALLER_PER_S = 10
"""Audit lines of one event, role and address within a second; more are only counted."""
AUDIT_LINES_PER_S = 500
"""Audit lines of all roles within a second; the first one of an event, role and address is written
all the same."""
AUDIT_LINES_WITHOUT_ROLE_PER_S = 10
"""Audit lines of those that could not log in, within a second."""
AUDIT_CALLERS = 10_000
"""Events, roles and addresses whose audit lines are counted apart."""
LOG_EVENTS_COUNTED = 1000
"""Events that are counted apart; the lines of all others share one count."""
LOG_VALUE_CHARACTERS = 2_000
"""Longest value in a log line."""
LOG_TRACEBACK_CHARACTERS = 8_000
"""Longest traceback in a log line: its middle is left out."""
HTTP_HEAD_S = 10.0
"""How long an HTTP connection may take to send the head of its first request, and of each later one
from its first byte on."""
HTTP_BODY_S = 30.0
"""How long the body of a request may take."""
HTTP_WRITE_S = 30.0
"""How long a peer may leave its answer unread while more of it waits to be sent."""
HTTP_IDLE_S = 75.0
"""How long an HTTP connection stays open between two requests."""
HTTP_LINGER_S = 2.0
"""How long the rest of a refused body is read, so that its sender gets the answer."""
HTTP_CHECK_S = 1.0
"""How often these times are checked."""
HTTP_BACKLOG = 64
"""HTTP connections that wait to be accepted."""
DESCRIPTORS_FOR_FILES = 256
"""File descriptors left for files, stores, other brokers and connections about to be closed."""
METRICS_PART_SAMPLES = 1_000
"""Samples of metrics that are collected, or written, in one turn of the loop: some 3 ms."""
METRICS_KEPT_FACTOR = 20
"""A page of metrics is kept for this many times as long as making it took the event loop."""
METRICS_WRITE_BYTES = 128 * 1024
"""Bytes of the page of metrics that are written to a peer at once."""
UNLOADED_BACKLOGS = 10_000
"""Unloaded topics with a backlog whose backlog stays in the metrics; the oldest go first."""
STORED_BACKLOGS_PER_S = 100
"""Topics each second whose stored backlog is read, of those that no broker has loaded."""
STORED_BACKLOGS_PAGE = 200
"""Records of topics that are read at once for that."""
STORED_BACKLOGS_PAUSE_S = 1.0
"""Pause between two checks of a cluster's broker whether it leads, and for topics given up."""
STORED_BACKLOGS_RETRY_S = 10.0
"""Pause before a topic that other clusters may lack is loaded again after a failure."""
HEALTH_LEDGER_ENTRIES = 1000
"""Health checks that write to one ledger; then it is deleted and another one is used."""

# Topics
SHOWN_ACK_RUNS = 1000
"""Runs of acknowledged entries of one cursor that internal statistics show."""
RECENTLY_CLOSED_PRODUCERS = 1000
"""Producer ids of a connection remembered after close, so that late SENDs are dropped quietly."""
CLOSED_CONSUMERS_KEPT = 1000
"""Consumers of a connection that are remembered after their close, for late acknowledgements."""
LATE_ACK_S = 5.0
"""Time after CLOSE_CONSUMER within which an acknowledgement of the consumer is still taken."""
SEAL_WAIT_S = 5
"""How long a sealing segment waits for attached producers to move to its children."""
EXCLUSIVE_HANDOVER_WAIT_S = 20
"""How long a SUBSCRIBE on a segment waits for the former exclusive consumer to detach."""
WAITING_PRODUCERS = 1000
"""WaitForExclusive producers queued on one topic."""
TRACKED_PRODUCERS = 1000
"""Producers without connection whose last sequence id a topic remembers; the oldest go first."""
TRACKED_PRODUCER_MS = 6 * 3600 * 1000
"""How long it remembers them (Pulsar's brokerDeduplicationProducerInactivityTimeoutMinutes)."""
SOURCE_CLUSTERS = 100
"""Clusters whose position of replication a topic remembers; those away for longest go first."""
SEQUENCE_SNAPSHOT_ENTRIES = 10_000
"""Entries after which the sequence ids are stored; a load replays about as many at most."""
SEQUENCE_SNAPSHOT_BYTES = 64 * 1024 * 1024
"""The same in bytes."""
SEQUENCE_SNAPSHOT_S = 60
"""The same in time, so that space of quiet topics is freed too."""
SEQUENCE_WRITERS_S = 1.0
"""Least time between two snapshots for the clients that producer names belonged to."""
SEQUENCE_ATTACH_S = 0.05
"""The same for a client that attaches under a name; it waits for its snapshot."""
CARRIED_RANGES = 16
"""Ranges of keys for which a segment has another sequence id of one name from its parents."""
CARRIED_WAIT_S = 15
"""How long a PRODUCER waits for the sequence ids of the parents; longer than SEAL_WAIT_S."""
SEQUENCE_READS_AT_ONCE = 32
"""Reads of last messages that a seal makes at the same time, for their publish times."""
MAX_PARTITIONS = 10_000
"""Partitions of one topic."""
TOPIC_COUNT_REREAD_S = 1.0
"""Least time between two reads of all topic names to confirm that a namespace is full."""
PARTITIONS_AT_ONCE = 32
"""Partitions that all requests together create, delete or ask for at the same time."""
TOPIC_LISTING_PART = 200
"""Topic names that are handled in one turn of the loop while the listing of a namespace is made."""
TOPIC_LISTINGS_KEPT = 8
"""Listings of namespaces in memory, for the next request."""
TOPIC_LISTING_PATTERNS = 32
"""Patterns of which the matching names are kept with a listing."""
CONSUMER_METADATA_BYTES = 1024
"""Metadata of one consumer, keys and values, as Apache Pulsar's maxConsumerMetadataSize."""
PRODUCER_METADATA_BYTES = 64 * 1024
"""The same of one producer: they are kept, and shown in statistics."""
DAMAGED_POSITIONS_LOGGED = 10
"""Positions in one line of the log about messages that a client could not read."""
MAX_FLOW_PERMITS = 2**31 - 1
"""Permits of one FLOW, as in Apache Pulsar."""
MAX_PROPERTIES_BYTES = 16 * 1024
"""Properties of a namespace, and what one request gives to a topic or a subscription, as JSON."""
MAX_PATTERN_CHARACTERS = 100
"""Longest topic pattern that is evaluated here."""
MAX_PATTERN_STATES = 500
"""Largest automaton that a pattern may become."""
TOPIC_LIST_PAUSE_S = 0.05
"""Changes of a topic list within this time are sent together."""
TOPIC_CHANGES_KEPT = 10_000
"""Changes of topic names of a followed namespace in memory; who misses some lists all anew."""
TOPIC_CHANGES_WAKES = 100
"""Watches of topic names that are woken in one turn of the loop after a change."""
COMPILED_PATTERNS = 200
"""Topic patterns of which the automata are kept for the next use, 150 KiB each at most."""
PATTERN_CACHED_STATES = 2_000
"""States in the sets that one automaton keeps of the names that it was given last."""
PATTERN_PART_CHARACTERS = 256
"""Characters of a name that a pattern takes at once: 20 ms for the costliest pattern."""
TOPIC_LIST_WATCHERS = 100
"""WATCH_TOPIC_LIST watchers of one connection."""
RATE_SAMPLE_S = 10
"""How often the counters of topics are read for their rates."""
RATE_WINDOW_S = 60
"""Time over which rates in statistics are taken: that of Pulsar's statsUpdateFrequencyInSecs."""
RATE_SHORTEST_S = 1.0
"""Shortest time over which a rate is taken: else the first message of a topic would be a burst."""
RELATIVE_RATE_S = 1.0
"""How often a dispatch rate that is relative to the publish rate is worked out anew."""
BROKER_RATE_DEBT_S = 10.0
"""Longest time for which messages of one entry keep all others from the rate of the broker."""
SUBSCRIBE_RATE_CONSUMERS = 10_000
"""Consumers of one topic whose SUBSCRIBEs are counted for its subscribe rate."""
RATE_SAMPLE_TOPICS = 500
"""Topics, with their subscriptions and producers, whose counters are read in one turn of the loop:
each of these counts as one."""
BACKLOGS_READ_AT_ONCE = 1_000
"""Subscriptions of a topic whose backlogs are compared with a quota in one turn of the loop."""
LOADS_PER_COLLECTION = 1_000
"""Loads of topics after which the garbage collector goes through what they have made: in 50 ms."""
IDLE_LOOK_S = 30
"""Longest time between two checks for idle topics."""
NON_PERSISTENT_TOPIC_IDLE_S = 60
"""A non-persistent topic without producers and subscriptions is deleted after this time."""
NON_PERSISTENT_CHECK_S = 15
"""Time between two checks for such topics."""
IDLE_TOPICS_TO_TRIM = 100_000
"""Unloaded topics that are loaded again when retention ends; others wait for their next user."""
TRIM_RETRY_MS = 60_000
"""How long after a failure such a topic is loaded again."""

QUOTA_CHECK_TOPICS = 100
"""Topics whose backlog quotas are checked in one turn of the loop."""
EXPIRED_AT_ONCE = 1_000
"""Entries that expire in one turn of the loop."""
ANALYZED_ENTRIES = 10_000
ANALYSIS_S = 30.0
"""Entries of a backlog that one request of REST counts, and how long it counts."""

# Compaction of topics
COMPACTION_LOOP_SHARE = 0.3
"""Share of the event loop that one compaction takes."""
COMPACTION_SLICE_S = 0.002
"""Longest time that a compaction works in one turn of the loop, except for one large batch."""
COMPACTION_BYTES_PER_S = 32 * 1024 * 1024
"""Bytes each second that one compaction reads and writes."""
COMPACTION_READ_ENTRIES = 500
"""Entries that a compaction reads at once, of READ_BATCH_BYTES at most."""
COMPACTION_WRITE_BYTES = 1024 * 1024
"""Bytes of the compacted ledger that are written and not yet durable."""
COMPACTION_THREAD_BYTES = 128 * 1024
"""Size of entries that are unpacked on a thread."""
COMPACTION_THREAD_MESSAGES = 2_000
"""Messages of a batch above which it is unpacked on a thread: some 10 ms."""
COMPACTION_PARTS = 256
"""Parts that the digests of keys are divided into."""
COMPACTION_BUFFER_BYTES = 4 * 1024 * 1024
"""Bytes of digests in memory before they are written to the file."""
COMPACTION_PART_KEYS = 262_144
"""Digests that are compared at once: about 50 MB."""
COMPACTION_CHUNKED_MESSAGES = 10_000
"""Chunked messages whose last chunk is awaited while a topic is read; others are kept."""
COMPACTIONS_AT_ONCE = 2
"""Topics of this broker that are compacted at the same time."""
COMPACTION_CHECKED_TOPICS = 500
"""Topics that are compared with their thresholds in one turn of the loop."""
COMPACTION_BACKOFF_MAX_S = 3600
"""Longest pause before a failed compaction is tried again; it doubles from the usual pause."""

# Dispatch
READ_BATCH_ENTRIES = 200
READ_BATCH_BYTES = 4 * 1024 * 1024
ACKED_AT_ONCE = 1_000
"""Message ids of one ACK, or one REDELIVER_UNACKNOWLEDGED_MESSAGES, that are served in one turn of
the loop: some 4 ms."""
RING_DISTANCES = 10_000
"""Distances of Failover consumers from topics on the ring that are kept: each is found by a hundred
hashes."""
RETURNED_AT_ONCE = 2_000
"""Unacknowledged entries of one consumer that wait again in one turn of the loop, and waiting
entries of a Key_Shared subscription that are queued for new owners of their keys."""
DELIVERED_BATCHES = 10_000
"""Batches of one subscription that were delivered, and whose sizes are kept until acknowledged."""
READ_RETRY_MIN_S = 0.1
READ_RETRY_MAX_S = 10.0
"""Pause before a failed read for dispatch is tried again; it doubles from the first to the last."""
ROUND_ROBIN_RUN_ENTRIES = 20
"""Entries that one Shared consumer gets in a row before the next consumer's turn."""
REPLAY_NEAR_ENTRIES = 16
"""Entries to be redelivered are read together if they are at most this far apart."""
MAX_DELAYED_PER_SUBSCRIPTION = 200_000
"""Delayed entries in memory, 0.3 KB each; above it a subscription reads on when one of them is
due."""
DELAYED_LOOK_S = 10.0
"""Longest pause of the timer of delayed entries, so that changes of the wall clock are noticed."""
KEY_SHARED_LOOK_AHEAD_ENTRIES = 10_000
"""Entries that a Key_Shared subscription reads past consumers without permits, and chunks that a
Shared one does."""
CHUNKED_MESSAGES_BEGUN = 1_000
"""Chunked messages of a Shared or Key_Shared subscription whose first chunks, but not the last one,
were sent: each goes to one consumer."""
UNSTAMPED_BATCHES_KEPT = 10_000
"""Unacknowledged batches without entry hashes whose positions a subscription with sharing consumers
keeps one by one, 0.2 KB each; of those behind them it keeps the first and the last."""
SEEK_REATTACH_S = 60
"""How long a reader's position outlives the disconnection that a seek causes."""

# Segment reads
SEGMENT_READ_BYTES = 4 * 1024 * 1024
"""Largest answer to one READ_ENTRIES, framing included, unless a single entry is larger."""
SEGMENT_READ_ENTRIES = 500
"""Entries that are filtered and encoded in one turn of the loop."""
LEDGER_RECORDS_AT_ONCE = 64
"""Records of a topic's ledgers that are read at once to be shown."""
SEGMENT_READS_AT_ONCE = 32
"""READ_ENTRIES of all connections that are being read at the same time; others wait."""
SEGMENT_READS_AHEAD = 32
"""Answers in memory that wait for peers; above it the next one waits until a peer has read."""
PLAN_RANGE_TRIES = 5
"""How often a plan is made anew because its range was trimmed meanwhile."""
SUBSCRIPTIONS_SHOWN_AT_ONCE = 100
"""Subscriptions of a topic that statistics show in one turn of the loop."""
PLAN_BACKLOG_WAIT_S = 1.0
"""How long a plan waits for entry indexes of the backlog; then it is sent without counts."""

# Metadata records
RECORD_CHANGE_TRIES = 20
"""Compare-and-set rounds before a change of a record gives up."""
RECORDS_PER_TURN = 100
"""Policies of topics that are read in one turn of the loop where one of them is searched."""
MAX_CLUSTERS = 100
"""Other clusters that are registered: each is kept in memory."""
MAX_SCHEMA_VERSIONS = 1000
"""Versions in the schema history of one topic."""
MAX_SCHEMA_HISTORY_BYTES = 8 * 1024 * 1024
"""Definitions in the schema history of one topic, all of which are read for each new schema."""
SCHEMA_DECODE_BYTES = 256 * 1024
"""Bytes of records of a history that are decoded in one turn of the loop."""
MAX_AVRO_SCHEMA_BYTES = 128 * 1024
"""Largest AVRO, JSON or PROTOBUF schema that is parsed."""
MAX_SCHEMA_DEPTH = 100
"""Deepest nesting of types in an AVRO, JSON or PROTOBUF schema."""
MAX_SCHEMA_COMPARISONS = 20_000
"""Pairs of types that one comparison of two AVRO or JSON schemas may need: some 100 ms."""
SMALL_SCHEMA_BYTES = 4 * 1024
"""Schemas up to this size are checked on the loop, larger ones in a thread."""

# Storage
ROLL_OVER_BUFFER_ENTRIES = 20_000
"""Appends that wait while a managed ledger opens its next ledger."""
LEDGER_BUSY_PAUSE_S = 0.05
"""Pause before waiting appends are tried again on a ledger that takes none for now."""
ROLL_OVER_ATTEMPTS = 3
"""Ledgers in a row that may fail without storing anything before callers get the error."""
LISTENERS_CALLED_AT_ONCE = 100
"""Listeners of one stream that are called in one turn of the loop: some 4 ms.

They are told of new entries, or that the end of a transaction lets them read on."""
CURSORS_AT_ONCE = 100
"""Cursors of one stream that are loaded or closed at a time, and subscriptions of one topic that
are closed in one turn of the loop."""
OPEN_LEDGER_HANDLES = 64
"""Closed ledgers of one stream that stay open for reading."""
OFFLOAD_BLOCK_BYTES = 1024 * 1024
"""Entries of one block of an offloaded ledger: the unit of reads, checks and caching."""
OFFLOAD_PART_BYTES = 8 * 1024 * 1024
OFFLOAD_PARTS_AT_ONCE = 2
"""Parts of an upload that are sent at the same time."""
OFFLOAD_PARTS_MAX = 5000
"""Parts of one upload; S3 takes twice as many."""
OFFLOAD_REQUEST_S = 30
"""How long one request to an object store may take, and how long it is retried."""
OFFLOAD_RETRIES = 5
OFFLOAD_CACHE_BYTES = 32 * 1024 * 1024
"""Cached blocks of offloaded ledgers, of all streams."""
OFFLOAD_READ_AHEAD_BLOCKS = 4
"""Blocks that are read ahead of one ledger that is read in order."""
OFFLOAD_KNOWN_PLACES = 4096
"""Offsets within large blocks of one ledger that are remembered, for later reads to begin at."""
OFFLOADS_AT_ONCE = 2
"""Streams that a broker offloads at once."""
OFFLOAD_LOOK_S = 60
"""How often loaded topics are checked for ledgers to offload."""
OFFLOAD_BACKOFF_MAX_S = 3600
"""Longest pause before a failed offload is tried again; it doubles from OFFLOAD_LOOK_S on."""
OFFLOAD_OUTCOMES = 10_000
"""Topics of which a broker remembers the outcome of the last offload."""
CURSOR_INLINE_BYTES = 8 * 1024
"""Largest position in a cursor's own record; larger ones go to the cursor's ledger."""
CURSOR_INLINE_WRITES = 20
"""Positions written to the record before a busy cursor gets a ledger."""
CURSOR_LEDGER_ENTRIES = 50_000
"""Positions in one cursor ledger before the next one (Pulsar's number)."""
CURSOR_LEDGER_BYTES = 256 * 1024 * 1024
"""Bytes of positions in one cursor ledger: each write has all that the position acknowledged."""
CURSOR_LEDGER_AGE_S = 4 * 3600
CURSOR_PAUSE_MAX_S = 60
"""Longest time for which a policy keeps a changed position from being written (Pulsar's number)."""
CURSOR_RETRY_MAX_S = 10
"""Longest pause between attempts to write a position when the store fails."""
CURSOR_LEDGER_LOOKBACK = 16
"""Entries from the end of a cursor ledger that are tried when the last one is damaged."""
LEDGER_NAMING_MS = 3600 * 1000
"""A ledger is named in a record within this time of its creation, or never."""
ORPHANED_LEDGER_AGE_MS = 24 * 3600 * 1000
"""Age from which a ledger that no record names counts as left over by a crash."""
ENTRY_INDEX_BLOCKS = 512
"""Blocks in which the entries of a ledger are counted, 32 bytes each; then their length doubles."""
ENTRY_INDEXES_KEPT = 1000
"""Entry indexes of ended ledgers in memory, of all streams."""
ENTRY_INDEX_READ_ENTRIES = 1000
"""Entries that are read at once (at most READ_BATCH_BYTES) while an index is built."""
ENTRY_INDEX_BUILDS = 2
"""Ledgers of all streams that are read for that at the same time."""
COUNTED_BLOCKS_KEPT = 8
"""Blocks of one stream whose entries were counted one by one, in memory."""
WATCH_QUEUE_EVENTS = 10_000
"""Events waiting for one watcher; above it they collapse into one resync."""

# Ledger log (embedded)
LEDGER_LOG_FILE_BYTES = 64 * 1024 * 1024
"""A log file takes no further group at this size.  The newest file is read at every start."""
LEDGER_LOG_FILE_RECORDS = 32_768
"""The same in records: bounds the index in memory, and the time to read the newest file."""
LEDGER_GROUP_BYTES = 16 * 1024 * 1024
"""Most bytes of one write and one sync; further entries wait for the next group."""
LEDGER_ENTRY_BYTES = 64 * 1024 * 1024
"""Largest entry a ledger takes."""
LEDGER_READER_THREADS = 4
LEDGER_READ_ATTEMPTS = 5
"""How often a read is repeated because compaction has just moved its entries."""
LEDGER_SEAL_RETRY_S = 5
"""Pause before an index file that could not be written is tried again."""
LEDGER_RECLAIM_PAUSE_S = 30
"""Least time between two checks for space to free."""
LEDGER_COMPACT_BYTES_PER_S = 16 * 1024 * 1024
"""Bytes each second that compaction may write."""
LEDGER_COMPACT_STEP_BYTES = 1024 * 1024
LEDGER_IDS_LEFT_OUT = 1_000_000
"""A restored copy of a data directory leaves out at least so many ids of ledgers,"""
LEDGER_IDS_LEFT_OUT_PER_S = 100
"""and so many more for each second since it was made: more than another broker can have given."""
LEDGER_VERIFY_BYTES_PER_S = 32 * 1024 * 1024
"""Bytes each second that are verified in the background after a start."""
LEDGER_VERIFY_STEP_BYTES = 256 * 1024
LEDGER_VERIFY_LOG_S = 10
"""Time between two log lines of a start that verifies everything before it serves."""
LEDGER_COMPACT_SOURCES = 64
"""Most files that one compaction merges."""

# Metadata
METADATA_CHECK_BYTES = 16 * 1024 * 1024
"""A start after a crash checks the structure of a metadata file up to this size before it serves;
of larger ones afterwards, in the background."""
METADATA_SUMS_BYTES = 256 * 1024 * 1024
"""A larger metadata file gets no checksums at the end of the process."""
METADATA_VALUE_BYTES = 1024 * 1024
"""Largest value of a record: ZooKeeper's limit for a node, used for every backend."""
METADATA_KEY_BYTES = 4096
"""Longest key, partition key or secondary key, in UTF-8."""
METADATA_INDEX_ENTRIES = 1000
"""Index entries of one record."""
METADATA_REQUEST_BYTES = 4 * 1024 * 1024
"""Largest write: key, value and index entries."""
METADATA_BATCH_OPERATIONS = 512
"""Operations of one commit, and reads of one snapshot."""
METADATA_BATCH_BYTES = 4 * 1024 * 1024
"""Bytes of one commit; the operation that crosses it is the last one in."""
METADATA_QUEUE_OPERATIONS = 100_000
"""Operations that wait for a commit or a read; above it new ones are refused."""
METADATA_QUEUE_BYTES = 64 * 1024 * 1024
METADATA_RECENT_KEYS = 10_000
METADATA_RECENT_BYTES = 8 * 1024 * 1024
"""Records that changed last, in memory for reads."""
METADATA_PAGE_CACHE_BYTES = 2 * 1024 * 1024
"""Page cache of each SQLite connection (one writes, two read)."""
METADATA_WAL_KEEP_BYTES = 16 * 1024 * 1024
"""The write-ahead log is truncated to this after a checkpoint."""
METADATA_SESSION_TIMEOUT_MAX_MS = 5 * 60 * 1000
WATCH_QUEUE_BYTES = 32 * 1024 * 1024
"""Value bytes waiting for one watcher; above it they collapse into one resync."""

# Oxia
OXIA_REQUEST_TIMEOUT_S = 30
"""How long a caller waits for any answer, reconnects and resends included."""
OXIA_ATTEMPT_TIMEOUT_S = 10
"""How long one call to a server may take before it is given up and tried again."""
OXIA_BACKOFF_MIN_S = 0.1
OXIA_BACKOFF_MAX_S = 30
"""Pauses between attempts double from the first to the last."""
OXIA_REQUESTS_IN_FLIGHT = 2
"""Write requests of one shard in flight; more did not make it faster."""
OXIA_BATCH_OPERATIONS = 512
"""Writes of one request, and keys of one read."""
OXIA_BATCH_BYTES = 128 * 1024
"""Bytes of one write request; a larger operation is sent alone."""
OXIA_MESSAGE_BYTES = 256 * 1024 * 1024
"""Largest message of a server (its chunks are of about 2 MiB)."""
OXIA_KEEPALIVE_S = 10
OXIA_KEEPALIVE_TIMEOUT_S = 3
"""Interval of pings on a silent connection; and how long one may take until it is closed."""
OXIA_NOTIFICATIONS_KEPT_S = 3600
"""How long servers keep notifications; after an outage of half of it all keys are listed anew."""
OXIA_CHANGED_KEYS = 10_000
"""Keys of one shard that were notified and not read yet; above it watchers get a resync."""
OXIA_KNOWN_RECORDS = 10_000
"""Records whose newest version, indexes and partition are remembered."""
OXIA_LISTED_LEVELS = 64
"""Levels of ledger records that are listed at once."""
OXIA_COUNTER_TRIES = 3
"""How often an id is requested before lost answers become an error of the caller."""
OXIA_SESSION_TIMEOUT_MIN_MS = 2_000
"""Servers refuse shorter ones."""

# Scalable topics
MAX_INITIAL_SEGMENTS = 1024
"""Segments a topic may be created with."""
MAX_MIGRATED_PARTITIONS = 128
"""Partitions of an ordinary topic that is made scalable: each is a parent of each new segment."""
MAX_SEGMENTS = 2048
"""Segments of one topic, sealed ones included: the record must fit METADATA_VALUE_BYTES."""
MAX_ENTRY_BUCKETS = 1024
"""Entry buckets of one segment."""
SPLIT_PARTS_MAX = 8
"""Parts into which the policy splits a segment at once."""
SPLIT_CANDIDATES = 4
"""Segments whose keys are sampled in one evaluation, to find one that a split helps."""
MERGE_PARENTS_MAX = 16
"""Neighbours that the policy merges at once."""
MERGE_BACKLOG_MAX = 10_000
"""Entries that consumers still have to read in a segment that the policy merges: they read a merged
segment only after all of its parents."""
SPLIT_RETRY_S = 0.001
"""How long after the cooldown of a split a topic is evaluated again."""
SCALING_EVALUATIONS_AT_ONCE = 8
"""Topics that the policy evaluates, and changes, at the same time."""
SCALING_REFUSAL_RECORD_MS = 10 * 60 * 1000
"""Shortest time between two refusals of the policy in a topic's history."""
KEY_SAMPLE_READS = 32
"""Reads of neighbouring entries that a sample of keys is made of ..."""
KEY_SAMPLE_ENTRIES = 8
"""... and the entries of each."""
KEY_SAMPLE_BYTES = 4 * 1024 * 1024
"""Bytes of entries that a sample of keys reads."""
KEY_SAMPLE_SPAN = 50_000
"""Newest entries of a segment that its sample of keys is spread over."""
KEY_SAMPLE_LEAST = 16
"""Entries without which a sample of keys tells nothing."""
KEY_SAMPLE_AGE_MS = 5 * 60 * 1000
"""Entries of a sample of keys that were published longer ago count only if there are few others."""
LOAD_REPORT_WRITES = 100
"""Load reports that are written at the same time."""
LOAD_REPORTS_REPEATED = 64
"""Earlier reports that a load report repeats, for a leader that has not read them."""
LOAD_RATE_FLOOR_MESSAGES = 1.0
"""Messages per second below which changes of a rate are compared with this: else the load of an
almost idle segment would be written at each sample."""
LOAD_RATE_FLOOR_BYTES = 1_000.0
"""The same in bytes per second."""
LOAD_BACKLOG_FLOOR = 1_000
"""The same for entries of a backlog."""
MAX_TOPIC_PROPERTIES = METADATA_INDEX_ENTRIES - 1
"""Properties of one topic: each has an index entry, and a topic that was split has one more."""
MAX_TOPIC_PROPERTIES_BYTES = 256 * 1024
"""The same in bytes of JSON; beside them the largest layout fits into METADATA_VALUE_BYTES."""
RESHAPE_TRIES = 8
"""How often sealing after a split or merge is tried in a row; later tries are single ones."""
RESHAPE_RETRY_PAUSE_S = 0.25
"""Pause after the first of those tries; the n-th is n times as long."""
SESSIONS_PER_CONNECTION = 10_000
"""Sessions of one connection for layouts; as many watches of namespaces and ordered consumers."""
NAMESPACE_WATCH_COALESCE_S = 0.05
"""Changes of a watched namespace within this time are sent together, as in Apache Pulsar."""
RELEASE_WAIT_S = 5
"""How long a segment that changes hands waits for a former consumer that was never attached."""
RELEASE_COALESCE_S = 0.02
"""Segments that ordered consumers release within this time after others are granted together."""
LETTING_GO_CHECK_S = 5
"""How often the connection of a consumer that has to release a segment must answer a PING."""
TAKE_UP_WAIT_S = 30
"""How long a consumer may leave all its segments unread before others get them."""
FIRST_TAKE_UP_WAIT_S = 10
"""The same for a consumer that has never been seen at a segment."""
ASSIGNMENT_REPEAT_S = 2
"""How long an ordered consumer may differ from its assignment before it is told again."""
ASSIGNMENT_RECORD_BYTES = 512 * 1024
"""Largest record of a subscription with the assignment of its ordered consumers; if it would be
larger, it is stored without the assignment.  It must fit METADATA_VALUE_BYTES."""
ASSIGNMENT_WRITE_RETRY_S = 0.1
"""Pause before an assignment that could not be stored is written again; it doubles ..."""
ASSIGNMENT_WRITE_RETRY_MAX_S = 10.0
"""... up to this."""
RECORD_LOOK_RETRY_S = 1.0
"""Pause before the record of a topic is read again after a failed read."""
SEND_PAUSE_S = 0.02
"""A client that has sent nothing for this long gets a new layout: no batch of it is open."""
LAYOUT_PUSH_WAIT_S = 0.15
"""How long a new layout waits for such a pause."""
SEGMENT_SETTLES_S = 0.3
"""Among several brokers, how long after a segment was made it may be split or merged."""
RECEIPTS_HELD_S = 0.5
"""How long an owner of segments holds receipts back for a broker that pushes the layout."""
OWNERS_WAIT_S = 1.0
"""How long a new layout waits until each of its segments has an owner."""
PAUSE_ELSEWHERE_S = 1.0
"""How long a new layout waits for the answers of the owners of the segments that it seals."""
NEW_BATCH_S = 0.001
"""A client that sent a batch this short a time ago has hardly begun the next one."""
DAG_COALESCE_S = 0.05
"""Moves of a topic's segments and lead within this time are pushed together."""
OWNER_TRIES = 6
"""How often the owner of a topic or segment is looked up for one request, while owners change."""
OWNER_RETRY_PAUSE_S = 0.1
"""Pause after the first of those tries; the n-th is n times as long."""
OWNER_HOPS = 4
"""Brokers that one of those tries asks, when each names another one as the owner."""
OWNER_REQUEST_S = 30.0
"""How long the owner may take for one request; sealing a segment waits for its producers."""
FEED_RETRY_S = 0.1
"""First pause before a lost feed is connected again ..."""
FEED_RETRY_MAX_S = 2.0
"""... and the longest one; it doubles."""
FEED_SNAPSHOT_WAIT_S = 5.0
"""How long a new controller waits for the first snapshots of other brokers."""
REGISTRATION_TRIES_S = 20.0
"""How long the first registration of an ordered consumer is retried while its leader changes ..."""
REGISTRATION_RETRY_S = 0.05
"""... with this pause at first; a pause ends early when an owner or broker changes ..."""
REGISTRATION_RETRY_MAX_S = 1.0
"""... and doubles up to this."""
RELAY_ANSWER_S = 5.0
"""How long the leader may take for the first assignment, connecting included.  Together with
REGISTRATION_TRIES_S it is less than a client waits for an answer (30 s)."""
RELAY_CONNECT_S = 2.0
"""How long connecting may take of that, as a machine that is gone does not answer."""
RELAYED_CONSUMERS = 2_000
"""Ordered consumers that one broker relays: each has a socket here, and one at its leader."""
RELAY_LEAVE_S = 5.0
"""How long the leader may take to unregister a relayed consumer; then the connection is closed."""
CONTROLLER_CLOSE_S = 1.0
"""How long a broker that stops waits for registrations that are being stored."""

# Transactions
TXN_ID_BLOCK = 1000
"""Transaction numbers that a coordinator reserves with one write."""
TXN_ENDED_KEPT = 1_000
"""Ended transactions that each segment, and each subscription, remembers, so that late requests are
refused without a read: 0.1 MB and 0.2 MB each, of which a broker may have thousands."""
EARLIER_CONSUMERS = 8
"""Consumers that each subscription remembers as they may come back with messages which others have
used since: 40 bytes each in its stored position, if it is acknowledged cumulatively in
transactions.  Those that left earliest are forgotten."""
TXN_PAGE = 1000
"""Records of one page of an index scan."""
TXN_PAGE_BYTES = 16 * 1024 * 1024
"""Bytes at which a page of headers, or of transaction keys, ends early: a header may have
TXN_GROUP_HEADER_BYTES, a key TXN_GROUP_POSITIONS_BYTES and more."""
TXN_PARTITIONS_OF_REQUEST = 1_000
"""Partitions that one ADD_PARTITION_TO_TXN may name."""
TXN_JOINS_AT_ONCE = 64
"""Partitions of one ADD_PARTITION_TO_TXN that join the transaction at the same time; a request
with more of them is a costly one."""
TXN_END_CARRIED_OUT_S = 3
"""How long END_TXN of a v4 client waits for the owners of the topics to carry the end out."""
TXN_SLICE_POSITIONS = 256
"""Acknowledged positions that are applied or released in one turn of the loop."""
TXN_ACKS_OF_RECORD = TXN_SLICE_POSITIONS
"""Positions in one acknowledgement record; a longer ACK command makes several."""
TXN_RECORDS_PUT_AT_ONCE = 8
"""Records of one ACK that are encoded and put at once."""
TXN_CLEANING_RETRY_MAX_S = 10
"""Longest pause between attempts to clean up after a transaction when the store fails."""
TXN_TIMEOUT_DEFAULT_MS = 60_000
"""Timeout of a transaction whose client gives none (the default of Pulsar's clients)."""
TXN_TIMEOUT_MAX_MS = 24 * 3600 * 1000
"""Longest timeout of a transaction, and so the longest time for which it holds readers back."""
TXN_DEADLINE_LOOK_S = 10
"""Longest pause of the timer of deadlines, so that changes of the wall clock are noticed."""
CLOCK_SKEW_MAX_MS = 5_000
"""Largest difference of a broker's clock from the metadata store's; above it the broker does not
start.  A deadline that another broker set is acted on later by twice this time."""
CLOCK_CHECK_S = 60
"""How often the two clocks are compared."""
TXN_SWEEP_S = 60
"""How often the store is searched for open transactions past their deadlines."""
TXN_CONCURRENT_ENDS = 256
"""Aborts of timed-out transactions, and reads of headers after a resync, that run at once."""
TXN_SLICE_ENDS = 256
"""Attempts of one group that are handled in one turn of the loop: their ends reported, decoded, or
their cleanup begun."""
TXN_CLEANING_AT_ONCE = 64
"""Claims and records of ended transactions that one broker deletes or puts at once, so that
requests of clients do not wait behind a large commit."""
TXN_LISTED = 1_000
"""Most transactions that one REST answer lists; it has their total number too."""
TXN_WATCHES = 100
"""Watches of coordinators on one connection."""
TXN_ASSIGNMENTS_RETRY_S = 1
"""Interval of snapshots to watches of coordinators while one has no leader."""
TXN_TOPIC_LOADS = 8
"""Topics that the collector loads at once to have their records cleaned up."""
TXN_PENDING_POSITIONS = 1_000_000
"""Positions that open transactions may hold on one subscription."""
TXN_HELD_SENDS = 1000
"""SENDs of one producer that wait for a transaction to join; above it its client is not read."""
TXN_PRUNE_S = 300
"""Pause between checks for aborted transactions whose ledgers are deleted."""
TXN_PINS_SHOWN = 100
"""Transactions that are listed for one segment when an operator asks which ones pin it."""
TXN_CLAIMS_READ = 500
"""Claims that are read for this of a segment that is not loaded."""
TXN_KEY_BYTES = 256
"""Length of a transaction key, of its owner, and of the name of a request about it.  The first two
are parts of a path, where a byte may take three."""
TXN_KEYS_OF_COORDINATOR = 100_000
"""Transaction keys of one coordinator; a new one is refused above it."""
TXN_KEY_CONNECTIONS = 10_000
"""Connections that hold keys of one coordinator; another OPEN or ATTACH is refused above it."""
TXN_KEYS_LISTED = 1_000
"""Most transaction keys that one REST answer lists; it names the beginning of the next page."""
TXN_KEY_DELETIONS = 100
"""Attempts to delete a key for an operator while a client goes on beginning transactions."""
TXN_ATTEMPT_BLOCK = 64
"""Indexes of attempts that are reserved with one write; the first ones with the group itself."""
TXN_GROUP_NAME_BYTES = 256
"""Length of a group's nonce, and of the name of a query."""
TXN_GROUP_POSITIONS_BYTES = 256 * 1024
"""Length of the positions in a group's commit: they are stored in its header and in its key."""
TXN_GROUP_WINNERS = 32_768
"""Winners of one group."""
TXN_GROUP_SEGMENTS = 8_192
"""Segments in the counts of one group's winners."""
TXN_GROUP_COUNTS = 16_384
"""Counts, one for each winner and segment, in one header; above it only the total of each segment
is stored."""
TXN_GROUP_HEADER_BYTES = 960 * 1024
"""Largest header of a group: it must fit METADATA_VALUE_BYTES."""
TXN_EXTENSION_SLACK = 4
"""A group's timeout is made longer than requested by one part in this many."""
TXN_KEY_QUERIES = 8
"""Earlier queries of a transaction key whose last batch is remembered."""
TXN_COMMITS_REMEMBERED = 64
"""Commits of last groups that a coordinator remembers, without their winners, so that the tasks of
a repeated batch do not each read a large header."""
TXN_KEY_NONCES = 16
"""Nonces of earlier groups that a transaction key remembers, so that none begins another group."""

# Placement: brokers that share their stores
PLACEMENT_OWNER_LEVELS = 32
"""Levels over which the records of owners are spread, so that no list of one level is too long."""
PLACEMENT_RETRY_MAX_S = 1
"""Longest pause between attempts at the metadata store; short, as clients wait for the outcome."""
PLACEMENT_PROMISES = 10_000
"""Choices of brokers that are remembered until there is an owner: they count as owned."""
PLACEMENT_PROMISE_S = 10
"""How long each choice is remembered."""
LOAD_REPORT_S = 10
"""Pause between samples of this broker's load."""
LOAD_REPORT_MAX_S = 60
"""A load that hardly changes is written after this time at the latest."""
SHEDDING_ROUND_S = 30
"""Pause between rounds of the leader that balances load."""
SHEDDING_MOVES = 8
"""Topics that one round moves at most."""
SHEDDING_REST_S = 600
"""How long a topic that was moved is not moved again."""
PEER_TIMEOUT_S = 10
"""How long another broker may take for other requests; loading a topic is the longest."""
CHANNEL_REQUESTS_IN_FLIGHT = 256
"""Requests to one other broker that wait for its answer; more wait for those, or are refused."""
CHANNEL_FRAME_BYTES = 64 * 1024 * 1024
"""The largest frame between brokers: all segments of a topic, with their consumers."""
CHANNEL_EVENTS_WAITING = 10_000
"""Events that wait for another broker to read them; above it is disconnected and comes back."""
CHANNEL_CONNECT_S = 5.0
"""How long connecting to another broker may take, its HELLO included."""
CHANNEL_HEARTBEAT_S = 5.0
"""A broker that answers no PING within half of this time is lost: its requests are sent again."""
CHANNEL_RETRY_S = 0.05
"""Pause before another broker that could not be reached is connected to again ..."""
CHANNEL_RETRY_MAX_S = 0.5
"""... doubles up to this."""
CHANNEL_CLOSE_S = 1.0
"""How long a broker that closes a channel waits until the other one has read that."""
ADMIN_SESSION_WAIT_S = 5
"""How long a REST request about one topic waits for this broker's next session."""
DRAIN_TOPICS_AT_ONCE = 4
"""Topics that a draining broker closes at the same time."""
COORDINATOR_LEFT_ALONE_S = 1
"""How long the chosen broker may leave a coordinator alone; then another candidate takes it ..."""
COORDINATOR_KEPT_S = 60
"""... and keeps it for this time at least, by which a dead broker's session is mostly over ..."""
COORDINATOR_KEPT_MAX_S = 3600
"""... and for this time at most, if the chosen broker goes on leaving coordinators alone."""
COORDINATOR_NO_CANDIDATE_S = 5
"""How long a coordinator waits for a candidate while all brokers start or stop; then any broker
takes it.  A broker that starts is mostly a candidate by then."""

# ZooKeeper
ZOOKEEPER_WINDOW = 128
"""Requests of one session that the client library has at once."""
ZOOKEEPER_CONNECT_S = 10
"""How long the first connection may take."""
ZOOKEEPER_REQUEST_S = 15
"""How long one request may take, reconnections included, before its caller gets an error."""
ZOOKEEPER_VISIBLE_S = 15
"""How long it may take until reads here show an ephemeral record that was stored; then its caller
gets an error."""
ZOOKEEPER_CLOSE_S = 15
"""How long closing a connection may take; then its thread is abandoned."""
ZOOKEEPER_RECONNECT_MIN_S = 0.05
ZOOKEEPER_RECONNECT_MAX_S = 1.0
"""Pauses between attempts to connect."""
ZOOKEEPER_REQUEST_BYTES = 1024 * 1024 - 32 * 1024
"""Longest request: above 1 MiB a server (jute.maxbuffer) drops the connection."""

# Ledgers on bookies: writers and readers
BOOKIE_SHUFFLES = 10
"""Random orders of the bookies to try; the one with most racks in its write sets is used."""
BOOKIE_ERRORS = 3
"""Failures of a bookie that put it into quarantine ..."""
BOOKIE_ERROR_WINDOW_S = 60.0
"""... when they are within this time ..."""
BOOKIE_ERROR_SPACING_S = 1.0
"""... and not within this time of each other, which counts as one."""
BOOKIE_QUARANTINE_S = 300.0
"""How long such a bookie is left out of new ensembles."""
POLICY_ENSEMBLE_MAX = 5
"""Largest ensemble that a policy may ask for: Pulsar's default of managedLedgerMaxEnsembleSize."""
ENSEMBLE_CHANGES = 100
"""Ensemble changes of one writer; a ledger that needs more is closed and the next one used."""
LEDGER_PENDING_ADDS = 400_000
"""Appends of all ledgers that wait for bookies; above it appends are refused."""
LEDGER_PENDING_BYTES = 512 * 1024 * 1024
"""The same in bytes.  Callers have a lower bound (BROKER_INFLIGHT_BYTES); this is a safeguard."""
WRITER_DRAIN_S = 5.0
"""How long opening a ledger, or closing the store, waits for appends in flight."""
RECOVERY_WINDOW_ENTRIES = 256
"""Entries that a recovery reads, and writes back, at once ..."""
RECOVERY_WINDOW_BYTES = 16 * 1024 * 1024
"""... or fewer, so that they stay below this, by the largest entry of the window before."""
RECOVERY_FIRST_WINDOW_ENTRIES = 8
RECOVERY_ROUNDS = 10
"""How often a recovery starts again because another one changed the record."""
LEDGER_READS_IN_FLIGHT = 64
"""Entries that one read requests from bookies at once, where batch reads are not possible."""
LEDGER_BATCH_READ_BYTES = 4 * 1024 * 1024
"""Bytes of one batch of entries."""
LEDGER_BATCH_READ_ENTRIES = 10_000
LEDGER_ID_TRIES = 10
"""Ledger ids that a creation tries when others have taken them."""
ZOOKEEPER_SESSION_MS = 10_000
"""Timeout of the sessions in which records are read and written (servers have their own bounds)."""
ZOOKEEPER_READ_NODES = 500
"""Nodes that one request reads in one snapshot."""
ZOOKEEPER_SIZED_NODES = 32
"""Nodes that are read at once while a scan is bounded by bytes."""
ZOOKEEPER_TRIES = 20
"""How often a write is tried in a row that conflicts with others."""

# Connections to bookies
BOOKIE_FRAME_BYTES = 5 * 1024 * 1024
"""Largest frame that bookies take unless they are told otherwise (nettyMaxFrameSizeBytes)."""
BOOKIE_INFLIGHT_REQUESTS = 2_000
"""Requests of one connection that are sent and not answered; more wait for them.  Less than what a
bookie holds for one of its threads before it refuses (2500 reads, 10 000 adds by default)."""
BOOKIE_INFLIGHT_BYTES = 32 * 1024 * 1024
"""The same in bytes of requests; a larger one is sent alone."""
BOOKIE_WAITING_REQUESTS = 500_000
"""Requests that wait behind those; above it they are refused.  More than LEDGER_PENDING_ADDS, as a
refused add would count as a failure of the bookie."""
BOOKIE_WAITING_BYTES = LEDGER_PENDING_BYTES + 64 * 1024 * 1024
"""The same in bytes."""
BOOKIE_LATE_TIMEOUTS = 4
"""Timeouts of a request after which its connection is closed, if there is still no answer."""
BOOKIE_CONNECT_TIMEOUT_S = 10
"""How long a connection may take until it is ready, TLS and authentication included."""
BOOKIE_BACKOFF_MIN_S = 0.1
BOOKIE_BACKOFF_MAX_S = 5.0
"""Pause before the next connection after a failure; it doubles from the first to the last."""
BOOKIE_AUTH_ROUNDS = 16
"""Messages of one authentication."""
ZOOKEEPER_DEFLATE_BYTES = 64 * 1024
"""A longer value is deflated."""
ZOOKEEPER_KNOWN = 20_000
"""Records, and directories, of which a process remembers versions to write without a read."""
ZOOKEEPER_PRUNE_S = 1.0
"""Pause after a record was removed before its directory is, if it is empty."""
ZOOKEEPER_LOOK_S = 1.0
"""How often there is a check for writes that wait for longer than ZOOKEEPER_REQUEST_S."""
ZOOKEEPER_BATCHES_IN_FLIGHT = 4
"""Batches of writes that are sent before the first of them is answered."""
ZOOKEEPER_BATCH_WRITES = 64
ZOOKEEPER_BATCH_BYTES = 128 * 1024
"""Bounds of the writes that are sent together; a larger one is sent alone."""
ZOOKEEPER_SCAN_TRIES = 8
"""How often a range is read again because it changed meanwhile."""

# Logins
PASSWORD_FILE_BYTES = 1024 * 1024
"""Length of the file with users and hashes of their passwords; a longer one is refused."""
PASSWORD_FILE_USERS = 10_000
"""Users in that file."""
PASSWORD_BYTES = 1024
"""Length of a password; a longer one is refused before any hash is made of it."""
BCRYPT_COST_MAX = 14
"""Largest cost of a bcrypt hash: a check takes a second or two, twice that with the next one."""
BASIC_CHECKS_AT_ONCE = 2
"""Passwords that are checked at the same time, each on a thread of its own ..."""
BASIC_CHECKS_WAITING = 1_000
"""... and logins that wait for that; more are refused."""
BASIC_REMEMBERED_LOGINS = 1_000
"""Logins by password that are remembered as valid, so that many connections of one user, and the
requests of one tool, cost one check ..."""
BASIC_REMEMBERED_S = 300
"""... for this time, or until the file changes."""
FAILED_LOGIN_BURST = 10
"""Wrong passwords of one address after which its passwords are not checked any more ..."""
FAILED_LOGINS_PER_S = 0.5
"""... except for this many in a second."""
FAILED_LOGIN_DELAY_MIN_S = 0.1
"""How long the answer to a failed login is held back at first ..."""
FAILED_LOGIN_DELAY_MAX_S = 0.5
"""... and when the burst of its address is used up."""
FAILED_LOGIN_ADDRESSES = 10_000
"""Addresses whose failed logins are counted; above it the one with the oldest failure is forgotten.
Networks of 64 bits count as one address in IPv6."""
FAILED_LOGIN_LOGS_PER_S = 1
"""Lines about failed logins of one address."""
EXPIRING_TOKEN_MINUTES = (
    *(5, 10, 60, 240, 1_440, 10_080, 20_160, 43_200, 129_600, 259_200, 388_800, 525_600),
)
"""Upper bounds of the histogram of the time for which credentials are valid when they are checked;
those of Pulsar's."""
CERTIFICATE_BYTES = 64 * 1024
"""Length of a client certificate (DER)."""
OIDC_DISCOVERY_BYTES = 64 * 1024
"""Length of the discovery document of an issuer of tokens ..."""
OIDC_KEYS_BYTES = 256 * 1024
"""... and of its set of keys."""
OIDC_KEYS = 100
"""Keys of one issuer; a set with more is refused."""
OIDC_TEXT_BYTES = 2_048
"""Length of a URL in a discovery document, and of the id of a key."""
OIDC_CONNECT_S = 2.0
"""How long connecting to an issuer may take ..."""
OIDC_FETCH_S = 6.0
"""... and the fetch of its document and keys in all; less than HANDSHAKE_TIMEOUT_S, as clients wait
for it."""
OIDC_FETCH_RETRY_S = 5.0
"""Pause after a failed fetch without which no token can be checked; they are refused meanwhile."""
OIDC_REFRESH_RETRY_S = 60.0
"""Pause after a failed fetch of an issuer whose older keys are still used."""
OIDC_EXPIRY_FACTOR = 4 / 3
"""Keys that cannot be fetched anew are used until they are this many times as old as
`oidc_key_cache_s`: with the default for a day."""

# Security
GRANTS_OF_REQUEST = 1_000
"""Grants on topics in one request."""
ACCESSES_OF_CONNECTION = 50_000
"""Ids of one connection whose accesses are remembered, to be checked again when grants change."""
ACCESSES_OF_ID = 16
"""Accesses of one id: a client uses an id for one topic, and for another one after closing it."""
ACCESS_CHECKS_IN_ONE_GO = 500
"""Accesses of connections that are checked again in one turn of the loop after a change."""
OWN_TRANSACTIONS = 256
"""Transactions of its role that a connection remembers; the header of another one is read."""
ROLE_BYTES = 256
"""Length of a role: no longer than the owner of a transaction key (TXN_KEY_BYTES)."""
TOKEN_BYTES = 16 * 1024
"""Length of a token (JWT); a longer one is refused before it is parsed."""
TOKEN_KEYS = 32
"""Keys that tokens may be signed with: a token without the id of its key is tried with each."""
KEY_SOURCE_BYTES = 64 * 1024
"""Length of a file, data URL or setting with a key or token; a longer one is refused."""
RSA_KEY_BITS_MIN = 2048
"""Shortest RSA key of tokens (RFC 7518); a shorter one is refused."""
RSA_KEY_BITS_MAX = 8192
"""Longest RSA key of tokens: a check with it takes some 0.2 ms."""
TOKEN_CLOCK_SKEW_MAX_S = 600
"""Most that the clocks of those that make tokens may be off."""

# Geo-replication
NON_PERSISTENT_QUEUE_ENTRIES = 1_000
NON_PERSISTENT_QUEUE_BYTES = 4 * 1024 * 1024
"""Entries and bytes of a non-persistent topic that wait for one other cluster, or one that is
larger, and entries that were sent and are not answered; more are dropped.  Apache Pulsar drops
above as many entries."""
REPLICATOR_WINDOW_ENTRIES = 1_000
"""Entries of one replicator that were sent to another cluster and are not answered."""
REPLICATED_CHUNKED_MESSAGES = 100
"""Chunked messages of a segment whose last chunk its replicator has not read."""
REPLICATED_BATCH_BYTES = 128 * 1024
"""Largest batch, unpacked, that a replicator of a segment opens on the loop; others in a thread."""
OPENED_BATCHES_BYTES = 64 * 1024 * 1024
"""Bytes of the batches, unpacked, that replicators of segments open in threads at a time; one that
is larger is opened alone."""
REPLICATED_CHUNKS_WAIT_S = 3600.0
"""How long a replicator of a segment waits for the last chunk of a message, since it read the first
one; it gives up at the end of the log only."""
REPLICATED_RANGES = 4096
"""Ranges of hashes, with a position of another cluster each, that a segment here remembers."""
REPLICATED_SUBSCRIPTION_ENTRIES = 10_000
"""Unacknowledged entries of a segment whose origin one replicated subscription knows."""
REPLICATED_SUBSCRIPTION_ENTRIES_OF_BROKER = 500_000
"""Unacknowledged entries whose origin the replicated subscriptions of all segments of a broker
know, some 260 bytes each; above, each one of a segment knows
REPLICATED_SUBSCRIPTION_ENTRIES_ASSURED of them."""
REPLICATED_SUBSCRIPTION_ENTRIES_ASSURED = 500
"""Such entries that each replicated subscription of a segment may know in any case."""
REPLICATED_SUBSCRIPTION_ENTRIES_AT_ONCE = 1_000
"""Entries whose origin the replicated subscriptions of a segment take note of in one turn of the
loop, all subscriptions together."""
SUBSCRIPTION_POSITIONS = 10_000
"""Positions of subscriptions in segments that one question to another cluster tells, some 30 bytes
each; a subscription has one for each of at most MAX_SEGMENTS segments."""
SUBSCRIPTIONS_OF_QUESTION = 1000
"""Subscriptions of one such question; the others are in the next one."""
SUBSCRIPTION_IDLE_PERIODS = 8
"""Periods between two questions about a topic's subscriptions to one cluster, at most, while
nothing moves in either."""
SUBSCRIPTION_QUESTIONS_AT_ONCE = 16
"""Questions of other clusters about subscriptions that a broker answers at the same time."""
RECEIVED_SEGMENTS_NOTED = 200
"""Source segments of which a replicated subscription notes what was received before it."""
SUBSCRIPTION_ANSWER_ROUNDS = 3
"""Times that owners are told the same for one answer, as it makes and completes subscriptions."""
SEGMENTS_ASKED_AT_ONCE = 64
"""Segments of a topic whose owners are asked about its subscriptions at the same time."""
SOURCE_INCARNATIONS = 4
"""Incarnations of one cluster's topic that a segment here remembers, the newest ones."""
REPLICATED_AT_ONCE = 100
"""Entries that one replicator sends or skips in one turn of the loop."""
REPLICATED_BYTES_AT_ONCE = 1024 * 1024
"""Bytes after which a replicator sends no further entry in the same turn of the loop."""
REPLICATOR_IDLE_S = 60.0
"""How long a replicator without anything to send stays attached at the other cluster."""
PENDING_SNAPSHOTS = 10
"""Snapshots of the replicated subscriptions of one topic that wait for answers of other
clusters."""
SUBSCRIPTION_UPDATES_WAITING = 1_000
"""Subscriptions of one topic that other clusters moved, and that are to be moved here; with so many
the topic's replicators wait."""
REFUSAL_DRAIN_S = 5.0
"""How long a replicator waits for the answers to what it sent before and behind an entry that the
other cluster refused, until it attaches again: some clusters do not answer what is behind."""
REPLICATOR_LEAVE_S = 0.1
"""How long a replicator waits until the other cluster has closed its producer."""
REPLICATION_READ_AHEAD_BYTES = 64 * 1024 * 1024
"""Entries that all replicators to one cluster hold while they wait for it; above that they read
again what they send.  One holds up to READ_BATCH_BYTES."""
REACH_RETRY_MAX_S = 5.0
"""Longest pause between two attempts to reach another cluster that is away, of all its topics."""
REMOTE_FRAME_BYTES = 2 * 1024 * 1024
"""Largest frame of another cluster that replicators take, whatever it announces: it sends answers
and layouts, and no messages.  Parsed, a frame may take some forty times its bytes."""
REMOTE_ANSWER_BYTES = 256 * 1024
"""Largest answer over REST that is taken of another cluster: its settings, or the policies of a
namespace."""
REMOTE_REQUEST_S = 30.0
"""How long another cluster may take for a REST request."""
REPLICATION_LISTS_PERIOD_S = 300.0
"""How long a list of clusters goes until other clusters are asked again whether theirs name all."""
REMOTE_REDIRECTS = 5
"""Redirects from one broker of another cluster to the next one that a REST request follows."""
REMOTE_REQUESTS_AT_ONCE = 32
"""REST requests to one other cluster at the same time, each with a socket; others wait, for as
long at the most."""
REPLICATION_RETRY_MIN_S = 0.1
"""Pause before a replicator that could not be made or ended, or an entry that the other cluster
refused, is tried again; it doubles, up to"""
REPLICATION_RETRY_MAX_S = 30.0
