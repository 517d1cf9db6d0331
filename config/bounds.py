"""The bounds of every queue, cache and retry that users do not set, named in one place.

Sizes are bytes unless the name says otherwise; times end in `_S` or `_MS`.
"""

# Wire
MAX_MESSAGE_SIZE = 5 * 1024 * 1024
"""Largest payload of an entry that a producer may send; announced in CONNECTED, unless the ledger
store takes less."""
ENTRY_HEADROOM = 9 * 1024
"""What an entry may have besides: metadata, and the ten bytes before it.  Less than the headroom of
frames, as there is a command around an entry too when it goes to consumers."""
MAX_FRAME_SIZE = MAX_MESSAGE_SIZE + 10 * 1024
"""Largest frame; Pulsar's own headroom for what is around a payload."""
MAX_PENDING_REQUESTS = 1000
"""Requests of one connection that may be in progress; reading pauses above it."""
CONNECTION_INFLIGHT_BYTES = 32 * 1024 * 1024
"""Published bytes of one connection not yet durable; reading pauses above it."""
CONNECTION_WRITE_HIGH_WATER = 4 * 1024 * 1024
"""Bytes queued towards one peer before its dispatchers pause."""
HANDSHAKE_TIMEOUT_S = 10
KEEP_ALIVE_S = 30
FORWARD_CONNECT_TIMEOUT_S = 5
"""How long another broker, which a client named, has to take the connection."""
FORWARD_HIGH_WATER = 1024 * 1024
"""Bytes queued towards that broker before the client is not read any more."""
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
BROKER_STOP_S = 10
"""How long a process waits for its stores to close, after it has drained."""
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
SEQUENCE_READS_AT_ONCE = 32
"""Publish times of last messages that a seal reads at the same time."""
MAX_PARTITIONS = 10_000
"""Partitions of one topic."""
MAX_TOPIC_PROPERTIES_BYTES = 16 * 1024
"""Properties that one request gives to a regular topic, as JSON."""
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
REPLAY_NEAR_ENTRIES = 16
"""An entry that goes out again is read with what is behind it if the next one is as near."""
MAX_DELAYED_PER_SUBSCRIPTION = 200_000
"""Entries kept back until their time, 0.3 KB each; above it a subscription reads on when one of
them is due."""
DELAYED_LOOK_S = 10.0
"""Longest pause of the timer of delayed entries, so that changes of the wall clock are noticed."""
KEY_SHARED_LOOK_AHEAD_ENTRIES = 10_000
"""Entries a Key_Shared subscription reads past consumers that have no room."""
SEEK_REATTACH_S = 60
"""How long a reader's position outlives the disconnection that a seek causes."""

# Segment reads
SEGMENT_READ_BYTES = 4 * 1024 * 1024
"""Most that one READ_ENTRIES answers, unless one entry has more; what frames the entries counts."""
SEGMENT_READ_ENTRIES = 500
"""Entries that one turn of the loop judges and encodes."""
SEGMENT_READS_AT_ONCE = 32
"""READ_ENTRIES of all connections that are being read at the same time; others wait."""
SEGMENT_READS_AHEAD = 32
"""Answers in memory that wait for peers; above it a peer has to read before there is another."""
PLAN_RANGE_TRIES = 5
"""How often a plan is made anew because what it was about was trimmed meanwhile."""
PLAN_BACKLOG_WAIT_S = 1.0
"""How long a plan waits for entry indexes of the backlog; then it is told without its counts."""

# Metadata records
RECORD_CHANGE_TRIES = 20
"""Compare-and-set rounds before a change of a record gives up."""
MAX_SCHEMA_VERSIONS = 1000
"""Versions in the schema history of one topic."""

# Storage
ROLL_OVER_BUFFER_ENTRIES = 20_000
"""Appends held while a managed ledger opens its next ledger."""
LEDGER_BUSY_PAUSE_S = 0.05
"""Pause before appends that were held back are tried again on a ledger that takes none for now."""
ROLL_OVER_ATTEMPTS = 3
"""Ledgers in a row that may fail without storing anything before callers get the error."""
OPEN_LEDGER_HANDLES = 64
"""Closed ledgers of one stream that stay open for reading."""
OFFLOAD_BLOCK_BYTES = 1024 * 1024
"""Entries of one block of an offloaded ledger: what is read, checked and cached at once."""
OFFLOAD_PART_BYTES = 8 * 1024 * 1024
OFFLOAD_PARTS_AT_ONCE = 2
"""Parts of an upload that are under way."""
OFFLOAD_PARTS_MAX = 5000
"""Parts of one upload; S3 takes twice as many."""
OFFLOAD_REQUEST_S = 30
"""How long one request to an object store may take, and how long it is tried again."""
OFFLOAD_RETRIES = 5
OFFLOAD_CACHE_BYTES = 32 * 1024 * 1024
"""Blocks of offloaded ledgers that are kept after a read, of all streams."""
OFFLOAD_READ_AHEAD_BLOCKS = 4
"""Blocks that are fetched before they are asked for, of one ledger that is read in order."""
OFFLOAD_KNOWN_PLACES = 4096
"""Places inside of large blocks, of one ledger, where a later read may begin."""
OFFLOADS_AT_ONCE = 2
"""Streams that a broker offloads at once."""
OFFLOAD_LOOK_S = 60
"""How often loaded topics are looked at for what is to be offloaded."""
OFFLOAD_BACKOFF_MAX_S = 3600
"""Longest pause before an offload that failed is tried again; it doubles from OFFLOAD_LOOK_S on."""
OFFLOAD_OUTCOMES = 10_000
"""Topics of which a broker remembers how their last offload went."""
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
LEDGER_NAMING_MS = 3600 * 1000
"""Within this time of its making a ledger is named in a record, or it never is."""
ORPHANED_LEDGER_AGE_MS = 24 * 3600 * 1000
"""Age from which a ledger that no record names is taken for left over by a crash."""
ENTRY_INDEX_BLOCKS = 512
"""Blocks in which the entries of a ledger are counted, 32 bytes each; then their length doubles."""
ENTRY_INDEXES_KEPT = 1000
"""Entry indexes of ended ledgers in memory, of all streams."""
ENTRY_INDEX_READ_ENTRIES = 1000
"""Entries that are read at once (and READ_BATCH_BYTES) while an index is made anew."""
ENTRY_INDEX_BUILDS = 2
"""Ledgers that are read for that at the same time, of all streams."""
COUNTED_BLOCKS_KEPT = 8
"""Blocks of one stream whose entries were read to be counted one by one, in memory."""
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
RESTART_PAUSE_MIN_S = 0.05
RESTART_PAUSE_MAX_S = 2.0
"""Pause before a watcher that broke begins anew, with another watch: doubles from one to the other.
Until then it knows nothing new, so this is also how stale it can be."""

# Oxia
OXIA_REQUEST_TIMEOUT_S = 30
"""How long a caller waits for any answer, reconnects and resends included."""
OXIA_ATTEMPT_TIMEOUT_S = 10
"""How long one call to a server may take before it is given up and tried again."""
OXIA_BACKOFF_MIN_S = 0.1
OXIA_BACKOFF_MAX_S = 30
"""Pauses between attempts double from the first to the last."""
OXIA_REQUESTS_IN_FLIGHT = 2
"""Write requests of one shard on their way; more brought nothing."""
OXIA_BATCH_OPERATIONS = 512
"""Writes of one request, and keys of one read."""
OXIA_BATCH_BYTES = 128 * 1024
"""Bytes of one write request; a larger operation goes alone."""
OXIA_MESSAGE_BYTES = 256 * 1024 * 1024
"""Largest message of a server (its chunks are of about 2 MiB)."""
OXIA_KEEPALIVE_S = 10
OXIA_KEEPALIVE_TIMEOUT_S = 3
"""A silent connection is tried this often, and given up after this time without answer."""
OXIA_NOTIFICATIONS_KEPT_S = 3600
"""How long servers keep notifications; after an outage of half of it everything is listed anew."""
OXIA_CHANGED_KEYS = 10_000
"""Keys of one shard that were notified and not read yet; above it watchers are told to list."""
OXIA_KNOWN_RECORDS = 10_000
"""Records whose newest version, indexes and partition are remembered."""
OXIA_LISTED_LEVELS = 64
"""Levels of ledger records that are listed at once."""
OXIA_COUNTER_TRIES = 3
"""How often an id is asked for before its caller is told of lost answers."""
OXIA_SESSION_TIMEOUT_MIN_MS = 2_000
"""Servers refuse shorter ones."""

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
LETTING_GO_CHECK_S = 5
"""How often the connection of who has yet to let go of a segment has to show that it lives."""
TAKE_UP_WAIT_S = 30
"""How long a consumer may leave all its segments unread before others get them."""
RECORD_LOOK_RETRY_S = 1.0
"""Pause before a topic's record, which could not be read after it changed, is read again."""
DAG_COALESCE_S = 0.05
"""Moves of a topic's segments and lead within this time are told together."""
SEGMENT_OWNER_TRIES = 6
"""How often the owner of a segment or partition is looked up again for one call, while it
changes."""
SEGMENT_OWNER_RETRY_PAUSE_S = 0.1
"""Pause after the first of those tries; the n-th is n times as long."""
SEGMENT_OWNER_HOPS = 4
"""Brokers that one of those tries asks, when each names another one as the owner."""
SEGMENT_CALL_S = 30.0
"""How long another broker may take for one call about a segment; sealing waits for producers."""
FEED_RETRY_S = 0.1
"""Pause before a lost feed is connected to again ..."""
FEED_RETRY_MAX_S = 2.0
"""... doubles up to this."""
FEED_SNAPSHOT_WAIT_S = 5.0
"""How long a new controller waits for the first snapshots of other brokers."""
REGISTRATION_TRIES_S = 20.0
"""How long an ordered consumer that comes is tried to be registered while its leader changes ..."""
REGISTRATION_RETRY_S = 0.05
"""... with a pause that begins at this, ends when an owner or broker changes ..."""
REGISTRATION_RETRY_MAX_S = 1.0
"""... and doubles up to this."""
RELAY_ANSWER_S = 5.0
"""How long the leader may take for the first assignment, connecting to it included: with the time
above, less than a client waits for an answer (30 s)."""
RELAY_CONNECT_S = 2.0
"""How long connecting may take of that: packets to a machine that is gone are lost."""
RELAYED_CONSUMERS = 2_000
"""Ordered consumers that one broker stands before: each has a socket, and one at its leader."""
RELAY_LEAVE_S = 5.0
"""How long the leader may take to let a relayed consumer go; then its connection is closed."""
CONTROLLER_CLOSE_S = 1.0
"""How long a broker that stops waits for registrations that are being stored."""

# Transactions
TXN_ID_BLOCK = 1000
"""Transaction numbers that a coordinator reserves with one write."""
TXN_ENDED_KEPT = 1_000
"""Ended transactions that each segment, and each subscription, remembers, to refuse what comes late
without a read: 0.1 MB and 0.2 MB, which thousands of them may have."""
TXN_PAGE = 1000
"""Records that one page of an index scan brings."""
TXN_PAGE_BYTES = 16 * 1024 * 1024
"""Bytes with which a page of headers, or of transaction keys, ends before that: a header may have
TXN_GROUP_HEADER_BYTES, a key TXN_GROUP_POSITIONS_BYTES and more."""
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
CLOCK_SKEW_MAX_MS = 5_000
"""By how much the clock of a broker may differ from the metadata store's; more and it does not
start.  Deadlines that another broker set wait twice as long."""
CLOCK_CHECK_S = 60
"""How often the two are compared."""
TXN_SWEEP_S = 60
"""How often open transactions past their deadline are looked for that nobody here knows of."""
TXN_CONCURRENT_ENDS = 256
"""Aborts of timed-out transactions, and reads of headers after a resync, that run at once."""
TXN_SLICE_ENDS = 256
"""Attempts of one group that are gone through in one turn of the loop: told of their end, decoded,
or begun to be cleaned up."""
TXN_CLEANING_AT_ONCE = 64
"""Claims and records of ended transactions that one broker deletes or puts at once, so that what
clients wait for does not queue up behind a large commit."""
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
TXN_KEY_BYTES = 256
"""Length of a transaction key, of what names a request about it, and of its owner: part of a path,
where a byte may take three."""
TXN_KEYS_OF_COORDINATOR = 100_000
"""Transaction keys of one coordinator; a new one is refused above it."""
TXN_KEY_CONNECTIONS = 10_000
"""Connections that one coordinator remembers to hold keys; another ATTACH is refused above it."""
TXN_KEYS_LISTED = 1_000
"""Most transaction keys that one REST answer lists; it tells where the next page begins."""
TXN_KEY_DELETIONS = 100
"""Attempts of an operator's deletion against a client that goes on beginning transactions."""
TXN_ATTEMPT_BLOCK = 64
"""Indexes of attempts that are reserved with one write; the first ones with the group itself."""
TXN_GROUP_NAME_BYTES = 256
"""Length of a group's nonce, and of the name of a query."""
TXN_GROUP_POSITIONS_BYTES = 256 * 1024
"""Length of the positions that a group commits with: they are in its header and in its key."""
TXN_GROUP_WINNERS = 32_768
"""Winners of one group."""
TXN_GROUP_SEGMENTS = 8_192
"""Segments that the winners of one group tell counts of."""
TXN_GROUP_COUNTS = 16_384
"""Counts, one for each winner and segment, that a header keeps; of more it keeps each segment's
total."""
TXN_GROUP_HEADER_BYTES = 960 * 1024
"""Largest header of a group: it must fit METADATA_VALUE_BYTES."""
TXN_EXTENSION_SLACK = 4
"""A group's deadline is set later than asked for by one part in this many."""
TXN_KEY_QUERIES = 8
"""Earlier queries of a transaction key whose last batch is remembered."""
TXN_COMMITS_REMEMBERED = 64
"""Last groups of transaction keys of which a coordinator remembers what they committed, without
their winners, so that tasks of a batch that comes again do not each read a header that has them."""
TXN_KEY_NONCES = 16
"""Earlier groups of a transaction key whose nonces are remembered, so that they begin no other."""

# Placement: brokers that share their stores
PLACEMENT_OWNER_LEVELS = 32
"""Levels that records of owners are spread over, so that no list of one level is too long."""
PLACEMENT_RETRY_MAX_S = 1
"""Longest pause between attempts at the metadata store; what waits for them cannot be served."""
PLACEMENT_PROMISES = 10_000
"""Choices that are remembered until an owner is known, so that they count and are repeated."""
PLACEMENT_PROMISE_S = 10
"""How long each of them is."""
LOAD_REPORT_S = 10
"""Pause between looks at this broker's load."""
LOAD_REPORT_MAX_S = 60
"""A load that hardly changes is written after this time at the latest."""
SHEDDING_ROUND_S = 30
"""Pause between rounds of the leader that looks after balance."""
SHEDDING_MOVES = 8
"""Topics that one round moves."""
SHEDDING_REST_S = 600
"""For so long a topic that was moved stays where it is."""
PEER_TIMEOUT_S = 10
"""How long another broker may take to answer; unloading a topic is the longest."""
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
"""Topics that a draining broker closes side by side."""
COORDINATOR_LEFT_ALONE_S = 1
"""A coordinator that the chosen broker does not take is taken by whoever sees it after this."""
COORDINATOR_KEPT_S = 60
"""For so long it is not offered to that broker again: a dead one's session is mostly over."""
COORDINATOR_KEPT_MAX_S = 3600
"""For so long at most, where a broker goes on leaving alone what it is offered."""
COORDINATOR_NO_CANDIDATE_S = 5
"""The same where all brokers start or stop: one that starts is mostly a candidate by then."""

# ZooKeeper
ZOOKEEPER_WINDOW = 128
"""Requests of one session that are with the client library at once."""
ZOOKEEPER_CONNECT_S = 10
"""How long the first connection may take."""
ZOOKEEPER_REQUEST_S = 15
"""How long one request may take, reconnections included, before its caller is told so."""
ZOOKEEPER_VISIBLE_S = 15
"""How long an ephemeral record, once stored, may take until reads here see it; then its caller is
told so."""
ZOOKEEPER_CLOSE_S = 15
"""How long the end of a connection may take; then its thread is left alone."""
ZOOKEEPER_RECONNECT_MIN_S = 0.05
ZOOKEEPER_RECONNECT_MAX_S = 1.0
"""Pauses between attempts to connect."""
ZOOKEEPER_REQUEST_BYTES = 1024 * 1024 - 32 * 1024
"""Longest request: above 1 MiB a server (jute.maxbuffer) drops the connection."""

# Ledgers on bookies: who writes and reads them
BOOKIE_SHUFFLES = 10
"""Random orders of the bookies of which the one with most racks in its write sets is taken."""
BOOKIE_ERRORS = 3
"""Failures of a bookie that put it into quarantine ..."""
BOOKIE_ERROR_WINDOW_S = 60.0
"""... when they are within this time ..."""
BOOKIE_ERROR_SPACING_S = 1.0
"""... and not within this time of each other, which counts as one."""
BOOKIE_QUARANTINE_S = 300.0
"""How long such a bookie is left out of new ensembles."""
ENSEMBLE_CHANGES = 100
"""Ensemble changes of one writer; a ledger that needs more is given up for the next one."""
LEDGER_PENDING_ADDS = 400_000
"""Appends of all ledgers that wait for bookies; above it appends are refused."""
LEDGER_PENDING_BYTES = 512 * 1024 * 1024
"""The same in bytes.  Callers stop before (BROKER_INFLIGHT_BYTES): this is for what they miss."""
WRITER_DRAIN_S = 5.0
"""How long opening a ledger, or closing the store, waits for what writers have in flight."""
RECOVERY_WINDOW_ENTRIES = 256
"""Entries that a recovery reads, and writes back, at once ..."""
RECOVERY_WINDOW_BYTES = 16 * 1024 * 1024
"""... if the largest entry of the window before says that they are not above this."""
RECOVERY_FIRST_WINDOW_ENTRIES = 8
RECOVERY_ROUNDS = 10
"""How often a recovery starts again because another one changed the record."""
LEDGER_READS_IN_FLIGHT = 64
"""Entries that one read asks bookies for at once, where they cannot come as a batch."""
LEDGER_BATCH_READ_BYTES = 4 * 1024 * 1024
"""Most that one batch of entries brings."""
LEDGER_BATCH_READ_ENTRIES = 10_000
LEDGER_ID_TRIES = 10
"""Ledger ids that a creation tries when others have taken them."""
ZOOKEEPER_SESSION_MS = 10_000
"""Timeout of the sessions in which records are read and written (the server has its own bounds)."""
ZOOKEEPER_READ_NODES = 500
"""Nodes that one request reads, as of one moment."""
ZOOKEEPER_SIZED_NODES = 32
"""Nodes that are read at once to learn how many of them have the bytes that were asked for."""
ZOOKEEPER_TRIES = 20
"""How often a write is tried in a row that others come in between of."""

# Connections to bookies
BOOKIE_FRAME_BYTES = 5 * 1024 * 1024
"""Largest frame that bookies take unless they are told otherwise (nettyMaxFrameSizeBytes)."""
BOOKIE_INFLIGHT_REQUESTS = 2_000
"""Requests of one connection that are sent and not answered; more wait for them.  Less than what a
bookie holds for one of its threads before it refuses (2500 reads, 10 000 adds by default)."""
BOOKIE_INFLIGHT_BYTES = 32 * 1024 * 1024
"""The same in bytes of requests; a larger one goes alone."""
BOOKIE_WAITING_REQUESTS = 500_000
"""Requests that wait behind those; above it they are refused.  More than LEDGER_PENDING_ADDS: a
refused add would pass for a failure of the bookie."""
BOOKIE_WAITING_BYTES = LEDGER_PENDING_BYTES + 64 * 1024 * 1024
"""The same in bytes."""
BOOKIE_LATE_TIMEOUTS = 4
"""Timeouts after which a connection whose answer is still not there is given up."""
BOOKIE_CONNECT_TIMEOUT_S = 10
"""How long a connection may take until it is ready, TLS and authentication included."""
BOOKIE_BACKOFF_MIN_S = 0.1
BOOKIE_BACKOFF_MAX_S = 5.0
"""How long nobody connects after a failure: doubles from one to the other."""
BOOKIE_AUTH_ROUNDS = 16
"""Messages of one authentication."""
ZOOKEEPER_DEFLATE_BYTES = 64 * 1024
"""A longer value is deflated."""
ZOOKEEPER_KNOWN = 20_000
"""Records, and directories, of which a process remembers versions to write without a read."""
ZOOKEEPER_PRUNE_S = 1.0
"""Pause after a record was removed before its directory is, if it is empty."""
ZOOKEEPER_LOOK_S = 1.0
"""How often writes are looked for that wait for longer than ZOOKEEPER_REQUEST_S."""
ZOOKEEPER_BATCHES_IN_FLIGHT = 4
"""Batches of writes that are sent before the first of them is answered."""
ZOOKEEPER_BATCH_WRITES = 64
ZOOKEEPER_BATCH_BYTES = 128 * 1024
"""Writes that are sent together; a longer one goes alone."""
ZOOKEEPER_SCAN_TRIES = 8
"""How often a range is read again because it changed meanwhile."""
