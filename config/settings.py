"""The settings of a broker, in one validated model.

Sources, strongest first: command line, environment (`MAGNETAR_` and the upper-case name), TOML
file, the defaults below.  Unknown names in the file and values out of range are errors that name
the setting and the values allowed.  `magnetar config` prints the result.
"""

import os
import tomllib
from collections.abc import Mapping
from ipaddress import ip_address
from itertools import chain
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    SecretStr,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from config.bounds import MAX_ENTRY_BUCKETS, MAX_PARTITIONS, TOKEN_CLOCK_SKEW_MAX_S

MIB = 1024 * 1024
Port = Annotated[int, Field(ge=0, le=65535)]
Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]


def _words(value: object) -> object:
    """Split the text of the environment at its blanks; a list of the file stays as it is."""
    return tuple(value.split()) if isinstance(value, str) else value


# pydantic-settings would decode a list in the environment as JSON.
Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_words)]
SecretWords = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_words)]
"""Lists; in the environment their parts have blanks between them."""


def _names(value: object) -> object:
    """Split the text of the environment at its commas; a list of the file stays as it is."""
    if not isinstance(value, str):
        return value
    return tuple(name for part in value.split(",") if (name := part.strip()))


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_names)]
"""Lists; in the environment their parts have commas between them."""
ProviderName = Literal["token", "oidc", "basic", "tls"]
"""The names of providers of authentication."""


SETTINGS_OF_PROVIDERS: Mapping[str, tuple[str, ...]] = {
    "token": ("token_secret_keys", "token_public_keys"),
    "oidc": ("oidc_issuers", "oidc_audiences"),
    "basic": ("basic_auth_file",),
}
"""Settings that have no use without a provider of authentication."""


class ConfigurationError(ValueError):
    """A setting is wrong; the message for the operator names it."""


class Settings(BaseSettings):
    """All settings.  Sizes are bytes; times have their unit in the name."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        env_prefix="MAGNETAR_",
        extra="forbid",
        frozen=True,
        env_ignore_empty=True,
        hide_input_in_errors=True,  # It may be a secret.
    )

    # Data and addresses
    data_dir: Path = Field(Path("data"), description="Directory of everything that must last")
    bind_host: str = Field(
        "127.0.0.1",
        description="Address that all ports listen on; one that other machines reach wants "
        "authentication, or insecure",
    )
    insecure: bool = Field(
        False, description="Serve everybody who reaches the ports, without authentication"
    )
    port: Port = Field(6650, description="Binary protocol port; 0 picks a free one")
    http_port: Port = Field(8080, description="REST and metrics port; 0 picks a free one")
    advertised_host: str = Field("127.0.0.1", description="Host that clients connect to")
    port_tls: Port | None = Field(
        None, description="Binary protocol port with TLS (6651 by custom); none: there is none"
    )
    http_port_tls: Port | None = Field(
        None, description="REST and metrics port with TLS (8443 by custom); none: there is none"
    )
    plaintext_ports: bool = Field(
        True, description="Listen on port and http_port too; false: only on the ports with TLS"
    )
    cluster_name: str = Field("standalone", min_length=1, description="Name of the cluster")
    keep_alive_interval_s: Annotated[float, Field(gt=0, le=3600)] = Field(
        30,
        description="Silence of a client after which it is sent PING; twice as long ends it",
    )

    # Replication to other clusters
    replication_start_at: Literal["latest", "earliest"] = Field(
        "latest",
        description="Whether a cluster that is added to the list of a topic gets what is stored "
        "already (earliest)",
    )

    # TLS on the ports, and towards other brokers
    tls_certificate_file: Path | None = Field(
        None, description="The broker's certificate, then those that lead to its authority (PEM)"
    )
    tls_key_file: Path | None = Field(None, description="... and its key (PEM, without password)")
    tls_trust_certs_file: Path | None = Field(
        None, description="Authorities of the certificates that clients show (PEM)"
    )
    tls_client_certificates: Literal["ignored", "wanted", "required"] = Field(
        "ignored",
        description="wanted: a client may show a certificate, which must be trusted; required: it "
        "must",
    )
    tls_minimum_version: Literal["1.2", "1.3"] = Field(
        "1.2", description="Version of TLS that clients must speak at least: 1.2 or 1.3"
    )
    tls_ciphers: str = Field(
        "ECDHE+AESGCM:ECDHE+CHACHA20", description="Ciphers of TLS 1.2, as OpenSSL writes them"
    )
    broker_client_token_file: Path | None = Field(
        None,
        description="Token by which other brokers know this one, of a role in superuser_roles; "
        "read anew at each use",
    )
    broker_client_trust_certs_file: Path | None = Field(
        None,
        description="Authorities of other brokers' certificates (PEM); none: those of "
        "tls_trust_certs_file",
    )
    broker_client_certificate_file: Path | None = Field(
        None, description="The certificate that this broker shows to other brokers (PEM)"
    )
    broker_client_key_file: Path | None = Field(
        None, description="... and its key (PEM, without password)"
    )
    security_reload_interval_s: Annotated[float, Field(gt=0, le=86_400)] = Field(
        60,
        description="How often files with certificates, keys and passwords are checked for "
        "changes; SIGHUP has them checked at once",
    )

    # Stores that several brokers share (`magnetar broker`); none: everything is in data_dir
    metadata_store_url: str = Field(
        "", description="oxia://HOST:PORT,HOST:PORT/NAMESPACE or zk:HOST:PORT,HOST:PORT/CHROOT"
    )
    bookkeeper_metadata_service_uri: str = Field(
        "",
        description="Where bookies register: metadata-store:oxia://HOST:PORT/NAMESPACE, "
        "metadata-store:zk:HOST:PORT/CHROOT or zk+hierarchical://HOST:PORT/ledgers",
    )
    metadata_store_session_timeout_ms: Annotated[int, Field(ge=2000, le=300_000)] = Field(
        30_000, description="A broker without a heartbeat for this long loses its topics"
    )
    metadata_store_token_file: Path | None = Field(
        None, description="File with the bearer token that Oxia asks for"
    )
    metadata_store_tls_trust_certs_file: Path | None = Field(
        None, description="Certificates to trust (PEM); makes connections to the store use TLS"
    )
    metadata_store_tls_certificate_file: Path | None = Field(
        None, description="Our own certificate (PEM), where the store asks for one"
    )
    metadata_store_tls_key_file: Path | None = Field(None, description="... and its key (PEM)")
    ledger_ensemble_size: Positive = Field(2, description="Bookies that a ledger is spread over")
    ledger_write_quorum: Positive = Field(2, description="Copies of each entry")
    ledger_ack_quorum: Positive = Field(2, description="Copies that make an entry durable")
    ledger_digest_type: Literal["CRC32C", "CRC32", "MAC", "DUMMY"] = Field(
        "CRC32C", description="Checksum of entries on bookies"
    )
    ledger_password: SecretStr = Field(SecretStr(""), description="Password of ledgers on bookies")
    bookkeeper_max_frame_bytes: Annotated[int, Field(ge=64 * 1024)] = Field(
        5 * MIB + 10_240,
        description="nettyMaxFrameSizeBytes of the bookies; it bounds the largest message",
    )
    bookkeeper_tls_trust_certs_file: Path | None = Field(
        None, description="Certificates to trust (PEM); makes connections to bookies use TLS"
    )
    bookkeeper_tls_certificate_file: Path | None = Field(
        None, description="Our own certificate (PEM), where bookies ask for one"
    )
    bookkeeper_tls_key_file: Path | None = Field(None, description="... and its key (PEM)")
    bookkeeper_client_authentication_plugin: str = Field(
        "", description="How bookies know this broker: sasl, or package.module:name of your own"
    )
    bookkeeper_client_authentication_parameters: SecretStr = Field(
        SecretStr(""), description="Its parameters; for sasl: USER:PASSWORD, or file:PATH"
    )

    # Damage of the data directory
    damaged_data: Literal["refuse_topic", "refuse_start", "serve_what_is_left"] = Field(
        "refuse_topic",
        description="What to do if data was lost: refuse the topics that lost messages, refuse to "
        "start, or serve what is left of them",
    )

    # Topics
    scalable_topics_enabled: bool = Field(True, description="Serve topic:// names")
    scalable_topic_auto_create: bool = Field(
        True, description="Create a missing topic:// with one segment when a client looks it up"
    )
    scalable_topic_entry_bucket_budget: Positive = Field(
        4, description="Entry buckets of a new scalable topic, shared among its segments"
    )
    scalable_topic_entry_bucket_max_per_segment: Annotated[
        int, Field(gt=0, le=MAX_ENTRY_BUCKETS)
    ] = Field(MAX_ENTRY_BUCKETS, description="Entry buckets that a segment has at most")
    auto_topic_creation: bool = Field(
        True, description="Create a missing persistent:// topic on first use"
    )
    auto_topic_creation_type: Literal["non-partitioned", "partitioned"] = Field(
        "non-partitioned", description="... as this type of topic (namespaces may override)"
    )
    default_num_partitions: Annotated[int, Field(gt=0, le=MAX_PARTITIONS)] = Field(
        1, description="... with so many partitions, if it is partitioned"
    )
    deduplication: bool = Field(
        False,
        description="Enforce producer sequence ids for all sends (namespaces and topics may "
        "override)",
    )
    encryption_required: bool = Field(
        False,
        description="Refuse producers and messages that are not encrypted by their clients "
        "(namespaces may require it too)",
    )
    auto_subscription_creation: bool = Field(
        True,
        description="Create a missing durable subscription when a consumer names it (namespaces "
        "and topics may override)",
    )
    max_concurrent_non_persistent_messages_per_connection: Positive = Field(
        1000,
        description="Messages for non-persistent topics that a connection may have in flight; the "
        "broker drops the others",
    )
    idle_topic_unload_s: NotNegative = Field(
        300, description="Unload unused topics and segments after this time; 0: never"
    )
    scalable_consumer_grace_period_s: NotNegative = Field(
        60,
        description="How long a disconnected ordered consumer keeps its segments (namespaces and "
        "topics may override)",
    )
    sealed_segment_prune_interval_s: Positive = Field(
        60, description="How often drained sealed segments are pruned"
    )

    # Schemas (namespaces may override, topics too but for schema_auto_update)
    schema_compatibility_strategy: Literal[
        "ALWAYS_INCOMPATIBLE",
        "ALWAYS_COMPATIBLE",
        "BACKWARD",
        "FORWARD",
        "FULL",
        "BACKWARD_TRANSITIVE",
        "FORWARD_TRANSITIVE",
        "FULL_TRANSITIVE",
    ] = Field("FULL", description="How a new schema is compared with those of its topic")
    schema_auto_update: bool = Field(
        True, description="Let producers and consumers add schemas; false: only over REST"
    )
    schema_validation_enforced: bool = Field(
        False,
        description="Refuse producers without schema on topics with one; no policy "
        "switches true off",
    )

    # Rates of all topics of this broker together
    broker_publisher_throttling_max_message_rate: NotNegative = Field(
        0, description="Most messages/s that are published; 0: no limit"
    )
    broker_publisher_throttling_max_byte_rate: NotNegative = Field(
        0, description="Most bytes/s that are published; 0: no limit"
    )
    dispatch_throttling_rate_in_msg: NotNegative = Field(
        0, description="Most messages/s to consumers; 0: no limit"
    )
    dispatch_throttling_rate_in_byte: NotNegative = Field(
        0, description="Most bytes/s to consumers; 0: no limit"
    )

    # Limits of topics (namespaces and topics may override)
    max_producers_per_topic: NotNegative = Field(
        0, description="Most producers of a topic; 0: no limit"
    )
    max_consumers_per_topic: NotNegative = Field(
        0, description="Most consumers of a topic; 0: no limit"
    )
    max_consumers_per_subscription: NotNegative = Field(
        0, description="Most consumers of a subscription; 0: no limit"
    )
    max_subscriptions_per_topic: NotNegative = Field(
        0, description="Most subscriptions of a topic; 0: no limit"
    )
    max_same_address_producers_per_topic: NotNegative = Field(
        0, description="Most producers of a topic from one IP address; 0: no limit"
    )
    max_same_address_consumers_per_topic: NotNegative = Field(
        0, description="Most consumers of a topic from one IP address; 0: no limit"
    )
    max_num_partitions_per_partitioned_topic: Annotated[int, Field(gt=0, le=MAX_PARTITIONS)] = (
        Field(MAX_PARTITIONS, description="Most partitions of a topic")
    )
    max_topics_per_namespace: NotNegative = Field(
        0,
        description="Most persistent topics of a namespace; a partition is one, a scalable topic "
        "too; 0: no limit",
    )
    max_namespaces_per_tenant: NotNegative = Field(
        0, description="Most namespaces of a tenant; 0: no limit"
    )
    max_tenants: NotNegative = Field(0, description="Most tenants; 0: no limit")
    max_unacked_messages_per_consumer: NotNegative = Field(
        50_000,
        description="Most unacknowledged messages of a shared consumer; 0: no limit",
    )
    max_unacked_messages_per_subscription: NotNegative = Field(
        200_000,
        description="Most unacknowledged messages of all shared consumers of a subscription; "
        "0: no limit",
    )
    max_publish_rate_per_topic_in_messages: NotNegative = Field(
        0, description="Most messages/s that are published to a topic; 0: no limit"
    )
    max_publish_rate_per_topic_in_bytes: NotNegative = Field(
        0, description="Most bytes/s that are published to a topic; 0: no limit"
    )
    dispatch_throttling_rate_per_topic_in_msg: NotNegative = Field(
        0, description="Most messages/s to all consumers of a topic; 0: no limit"
    )
    dispatch_throttling_rate_per_topic_in_byte: NotNegative = Field(
        0, description="Most bytes/s to all consumers of a topic; 0: no limit"
    )
    dispatch_throttling_rate_per_subscription_in_msg: NotNegative = Field(
        0, description="Most messages/s to the consumers of a subscription; 0: no limit"
    )
    dispatch_throttling_rate_per_subscription_in_byte: NotNegative = Field(
        0, description="Most bytes/s to the consumers of a subscription; 0: no limit"
    )
    dispatch_throttling_rate_per_replicator_in_msg: NotNegative = Field(
        0, description="Most messages/s of a topic to each other cluster; 0: no limit"
    )
    dispatch_throttling_rate_per_replicator_in_byte: NotNegative = Field(
        0, description="Most bytes/s of a topic to each other cluster; 0: no limit"
    )
    dispatch_throttling_rate_relative_to_publish_rate: bool = Field(
        False, description="Add the rate at which the topic is published to, to its dispatch rates"
    )
    subscribe_throttling_rate_per_consumer: NotNegative = Field(
        0, description="How often a consumer may subscribe; 0: no limit"
    )
    subscribe_rate_period_per_consumer_s: Positive = Field(
        30, description="Period of subscribe_throttling_rate_per_consumer"
    )
    ttl_duration_default_s: NotNegative = Field(
        0, description="Age at which messages count as acknowledged; 0: they never do"
    )
    message_expiry_check_interval_s: Positive = Field(
        300, description="How often messages are checked for that age"
    )

    # Backlog quotas (namespaces and topics may override)
    backlog_quota_default_limit_bytes: int = Field(
        -1, ge=-1, description="Most bytes behind the slowest subscription of a topic; -1: no limit"
    )
    backlog_quota_default_limit_s: int = Field(
        -1, ge=-1, description="Largest age of an unacknowledged message; -1 or 0: no limit"
    )
    backlog_quota_default_retention_policy: Literal[
        "producer_request_hold", "producer_exception", "consumer_backlog_eviction"
    ] = Field(
        "producer_request_hold",
        description="What a backlog over its quota does: producers wait, or fail, or subscriptions "
        "lose messages",
    )
    backlog_quota_check_interval_s: Positive = Field(
        60, description="How often backlog quotas are checked"
    )

    # Deletion of what is not used (namespaces and topics may override)
    subscription_expiration_time_minutes: NotNegative = Field(
        0, description="Delete subscriptions of ordinary topics not used for so long; 0: never"
    )
    subscription_expiry_check_interval_s: Positive = Field(
        300, description="How often that is checked"
    )
    broker_delete_inactive_topics_enabled: bool = Field(
        False, description="Delete ordinary topics that nobody uses, with their data"
    )
    broker_delete_inactive_topics_mode: Literal[
        "delete_when_no_subscriptions", "delete_when_subscriptions_caught_up"
    ] = Field(
        "delete_when_no_subscriptions",
        description="... if they have no subscriptions, or none with a backlog",
    )
    broker_delete_inactive_topics_max_inactive_s: Positive = Field(
        60, description="... and had no clients for this time, and for the time of retention"
    )
    broker_delete_inactive_topics_frequency_s: Positive = Field(
        60, description="How often that is checked"
    )

    # Automatic splits and merges of scalable topics (namespaces and topics may override)
    scalable_topic_auto_scale_enabled: bool = Field(
        True, description="Split, merge and rebucket segments by their load and their consumers"
    )
    scalable_topic_auto_scale_interval_s: Positive = Field(
        60, description="How often the leader of a topic considers that"
    )
    scalable_topic_max_segments: Positive = Field(64, description="Split up to this many")
    scalable_topic_min_segments: Positive = Field(1, description="Merge down to this many")
    scalable_topic_max_dag_depth: NotNegative = Field(
        10, description="Merges in one line of segments that are not pruned yet"
    )
    scalable_topic_split_cooldown_s: NotNegative = Field(
        60, description="Time between a split and the next"
    )
    scalable_topic_merge_cooldown_s: NotNegative = Field(
        300, description="Time between a merge and the next"
    )
    scalable_topic_merge_window_s: NotNegative = Field(
        300, description="Merge segments that were below all merge thresholds for this long"
    )
    scalable_topic_rebucket_cooldown_s: NotNegative = Field(
        60, description="Time between a rebucket and the next"
    )
    scalable_topic_split_msg_rate_in_threshold: Positive = Field(
        10_000, description="Split a segment with more messages/s in"
    )
    scalable_topic_split_bytes_rate_in_threshold: Positive = Field(
        50_000_000, description="... or more bytes/s in"
    )
    scalable_topic_split_msg_rate_out_threshold: Positive = Field(
        50_000, description="... or more messages/s out, over all subscriptions"
    )
    scalable_topic_split_bytes_rate_out_threshold: Positive = Field(
        250_000_000, description="... or more bytes/s out"
    )
    scalable_topic_merge_msg_rate_in_threshold: NotNegative = Field(
        1_000, description="Merge segments with fewer messages/s in"
    )
    scalable_topic_merge_bytes_rate_in_threshold: NotNegative = Field(
        5_000_000, description="... and fewer bytes/s in"
    )
    scalable_topic_merge_msg_rate_out_threshold: NotNegative = Field(
        5_000, description="... and fewer messages/s out"
    )
    scalable_topic_merge_bytes_rate_out_threshold: NotNegative = Field(
        25_000_000, description="... and fewer bytes/s out"
    )
    scalable_topic_split_vs_rebucket_min_msg_rate_in_threshold: NotNegative = Field(
        1_000,
        description="Where consumers can share segments, split for them from this many messages/s "
        "in, else give segments more entry buckets",
    )
    scalable_topic_load_report_interval_s: Positive = Field(
        10, description="How often the loads of segments are sampled"
    )
    scalable_topic_load_report_rate_change_threshold: Annotated[float, Field(gt=0, le=100)] = Field(
        0.25, description="... and written, if a rate has changed by this share"
    )

    # Transactions
    transactions_enabled: bool = Field(True, description="Let clients use transactions")
    transaction_coordinator_enabled: bool = Field(
        True, description="... v4 clients too, on persistent:// topics"
    )
    transaction_coordinators: Annotated[int, Field(ge=1, le=1024)] = Field(
        16, description="Number of coordinators; fixed when the data directory is first used"
    )
    transaction_max_open_per_coordinator: NotNegative = Field(
        10_000, description="Open transactions of one coordinator; 0 without limit"
    )
    transaction_gc_interval_s: Positive = Field(
        300, description="How often records of ended transactions are collected"
    )
    transaction_gc_retention_s: NotNegative = Field(
        900, description="... that ended longer ago than this; longer than clients retry"
    )
    transaction_key_retention_s: NotNegative = Field(
        7 * 24 * 3600, description="Delete unused transaction keys after this"
    )

    # Retention and ledgers
    retention_time_minutes: int = Field(
        0, ge=-1, description="Keep acknowledged data this long; -1 for ever (namespaces override)"
    )
    retention_size_mb: int = Field(
        0, ge=-1, description="Keep this much acknowledged data; -1 without limit"
    )
    unsubscribed_retention_minutes: NotNegative = Field(
        24 * 60, description="Keep data of topics without any subscription this long"
    )
    ledger_max_entries: Positive = Field(50_000, description="Roll a ledger over at this many")
    ledger_max_size_bytes: Positive = Field(2048 * MIB, description="... or at this size")
    ledger_min_age_s: NotNegative = Field(600, description="... but not younger than this")
    ledger_max_age_s: Positive = Field(4 * 3600, description="Roll a ledger over at this age")
    offload_url: str = Field(
        "",
        description="Where ended ledgers are copied: s3://BUCKET/PREFIX, gs://..., az://... or "
        "file:///PATH; none: nowhere",
    )
    offload_region: str = Field(
        "", description="Region of the bucket; none: as the environment says"
    )
    offload_endpoint: str = Field(
        "", description="URL of another server that speaks S3; none: as the environment says"
    )
    offload_threshold_bytes: int = Field(
        -1,
        ge=-1,
        description="Copy the oldest ended ledgers of topics with more than this that is not "
        "copied; -1: only on request (namespaces may override)",
    )
    offload_deletion_lag_s: int = Field(
        4 * 3600, ge=-1, description="Delete a ledger this long after it was copied; -1: never"
    )
    log_file_size_bytes: Annotated[int, Field(ge=MIB)] = Field(
        64 * MIB, description="Size at which the shared ledger log starts its next file"
    )
    entry_cache_bytes: NotNegative = Field(
        64 * MIB, description="Newest entries held in memory for tailing consumers"
    )
    cursor_flush_ms: Positive = Field(
        100, description="Acknowledgements are durable within this time"
    )
    delayed_delivery_enabled: bool = Field(
        True, description="Keep messages with a delivery time back until then, for queue consumers"
    )
    delayed_delivery_tick_time_ms: Positive = Field(
        100, description="... and check for due messages at most this often"
    )
    delayed_delivery_max_delay_ms: NotNegative = Field(
        0, description="Refuse messages with a longer delay; 0: none (topics may override)"
    )
    broker_service_compaction_threshold_bytes: NotNegative = Field(
        0,
        description="Compact ordinary topics with more than this after the last compaction; 0: "
        "only on request (namespaces may override)",
    )
    broker_service_compaction_monitor_interval_s: Positive = Field(
        60, description="... and check this often whether a topic has"
    )
    enable_replicated_subscriptions: bool = Field(
        True,
        description="Move replicated subscriptions in all clusters of a topic's list together",
    )
    replicated_subscriptions_snapshot_frequency_ms: Positive = Field(
        1_000,
        description="... by snapshots of each topic, this far apart at least, if it was written to",
    )
    replicated_subscriptions_snapshot_timeout_s: Positive = Field(
        30, description="... which the other clusters answer within this time"
    )
    replicated_subscriptions_snapshot_max_cached_per_subscription: Positive = Field(
        30, description="... of which a subscription remembers so many until it has passed them"
    )
    max_connections: Positive = Field(10_000, description="Binary protocol connections at once")
    max_connections_per_address: Positive | None = Field(
        None,
        description="... and of one address, which clients behind a proxy share; None: no bound",
    )
    max_http_connections: Positive = Field(
        1_000, description="REST and metrics connections at once; a new one replaces a waiting one"
    )

    # Authentication
    authentication_providers: Annotated[
        tuple[ProviderName, ...], NoDecode, BeforeValidator(_names)
    ] = Field(
        (),
        description="How clients prove their roles: token, oidc, basic, tls; those of one method "
        "are asked in this order; none: authentication is off",
    )
    anonymous_role: str = Field(
        "", description="Role of clients that send no credentials; none: they are refused"
    )
    authentication_refresh_check_s: Annotated[float, Field(gt=0, le=3600)] = Field(
        60, description="How often connections are checked for credentials that have expired"
    )
    authorization: Literal["off", "dry_run", "on"] = Field(
        "off",
        description="Whether roles may do only what they are granted; dry_run: log what would be "
        "refused",
    )
    metrics_access: Literal["anybody", "any-role", "superuser"] = Field(
        "anybody",
        description="Who may read /metrics, which names topics and subscriptions, where "
        "authentication is on",
    )
    superuser_roles: Names = Field((), description="Roles that may do everything")
    authorization_wildcards: bool = Field(
        False, description="Let a granted role abc* or *abc stand for all that begin or end so"
    )
    proxy_roles: Names = Field(
        (), description="Roles of proxies, which connect for clients and name the roles of those"
    )
    authenticate_original_client: bool = Field(
        False,
        description="Check the credentials of clients that proxies forward too; false: believe "
        "the role that a proxy names",
    )
    basic_auth_file: Path | None = Field(
        None, description="Users and hashes of their passwords, bcrypt or apr1 (htpasswd)"
    )
    tls_principal: Literal["cn", "san"] = Field(
        "cn",
        description="The role in a client certificate: the common name of its subject, or the "
        "first DNS name, URI or email address of its alternative names",
    )

    # Tokens by OpenID Connect
    oidc_issuers: Names = Field((), description="URLs of the issuers whose tokens are taken")
    oidc_audiences: Names = Field((), description="Audiences; a token must be for one of them")
    oidc_role_claim: str = Field("sub", min_length=1, description="Claim that has the role")
    oidc_require_https: bool = Field(True, description="Fetch keys of issuers by https alone")
    oidc_trust_certs_file: Path | None = Field(
        None, description="Authorities of issuers' certificates (PEM); none: those of the system"
    )
    oidc_clock_skew_s: Annotated[float, Field(ge=0, le=TOKEN_CLOCK_SKEW_MAX_S)] = Field(
        0, description="How far the clocks of issuers may be off"
    )
    oidc_key_cache_s: Annotated[float, Field(ge=60, le=7 * 86_400)] = Field(
        64_800,
        description="Fetch the keys of an issuer again after this time; a third later they expire",
    )
    oidc_unknown_key_refresh_s: Annotated[float, Field(ge=1, le=86_400)] = Field(
        300, description="... or when a token has an unknown key, but not more often than this"
    )

    # Tokens
    token_secret_keys: SecretWords = Field(
        (),
        description="Secrets that sign tokens: file:///PATH, PATH, data:;base64,KEY or base64; "
        "URLs may end in #kid=ID",
    )
    token_public_keys: Words = Field(
        (),
        description="Public keys of those that sign tokens (DER or PEM), written in the same way",
    )
    token_auth_claim: str = Field("sub", min_length=1, description="Claim that has the role")
    token_audience_claim: str = Field(
        "", description="Claim that has the audience; none: tokens are for any audience"
    )
    token_audience: str = Field("", description="... and the audience that it must have")
    token_clock_skew_s: Annotated[float, Field(ge=0, le=TOKEN_CLOCK_SKEW_MAX_S)] = Field(
        0, description="How far the clocks of those that make tokens may be off"
    )

    # Operations
    topic_level_metrics: bool = Field(
        True, description="Metrics of each topic and subscription; false: sums of each namespace"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="The least severe events that are logged: debug, info, warning, error"
    )
    log_format: Literal["auto", "console", "json"] = Field(
        "auto", description="auto: for people on a terminal, JSON elsewhere"
    )
    drain_timeout_s: Positive = Field(
        15, description="How long SIGTERM waits for clients and data before stopping anyway"
    )

    @property
    def uses_tls(self) -> bool:
        """Whether one of the ports speaks TLS."""
        return self.port_tls is not None or self.http_port_tls is not None

    @property
    def in_cluster(self) -> bool:
        """Whether the stores are shared with other brokers."""
        return bool(self.metadata_store_url)

    @property
    def coordinators_of_v4_clients(self) -> int:
        """How many coordinators clients before version 5 find; 0 if they may use none."""
        enabled = self.transactions_enabled and self.transaction_coordinator_enabled
        return self.transaction_coordinators if enabled else 0

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if not self.ledger_ack_quorum <= self.ledger_write_quorum <= self.ledger_ensemble_size:
            raise ValueError(
                "ledger_ack_quorum may not be above ledger_write_quorum, nor that above "
                f"ledger_ensemble_size, but they are {self.ledger_ack_quorum}, "
                f"{self.ledger_write_quorum} and {self.ledger_ensemble_size}: correct them."
            )
        if bool(self.metadata_store_url) != bool(self.bookkeeper_metadata_service_uri):
            raise ValueError(
                "metadata_store_url and bookkeeper_metadata_service_uri go together: set both "
                "for a cluster, or neither to keep everything in data_dir."
            )
        most = self.scalable_topic_entry_bucket_max_per_segment
        if self.scalable_topic_entry_bucket_budget > most:
            raise ValueError(
                "scalable_topic_entry_bucket_budget may not be above "
                f"scalable_topic_entry_bucket_max_per_segment, which is {most}: a topic of one "
                "segment has all of them there."
            )
        if self.default_num_partitions > self.max_num_partitions_per_partitioned_topic:
            raise ValueError(
                "default_num_partitions may not be above max_num_partitions_per_partitioned_topic, "
                f"which is {self.max_num_partitions_per_partitioned_topic}: correct one of them."
            )
        self._check_tls()
        self._check_ports()
        named = "http_port" if self.plaintext_ports else "http_port_tls"
        if self.in_cluster and not getattr(self, named):
            raise ValueError(
                f"{named} is 0, but the brokers of a cluster know each other by host and REST "
                "port: give it a number."
            )
        if not self.authentication_providers and not self.insecure and not self._is_on_loopback:
            raise ValueError(
                f"bind_host is {self.bind_host}, so other machines could read and delete "
                "everything: set authentication_providers; or insecure (--insecure), if nobody "
                "else reaches this network; or bind_host to 127.0.0.1."
            )
        if self.authorization != "off" and not self.authentication_providers:
            raise ValueError(
                f"authorization is {self.authorization}, but nobody has a role without "
                "authentication: name a provider in authentication_providers, or set authorization "
                "to off."
            )
        if bool(self.token_audience_claim) != bool(self.token_audience):
            raise ValueError(
                "token_audience_claim and token_audience go together: set both, or neither to take "
                "tokens for any audience."
            )
        return self

    @property
    def names_authentication(self) -> bool:
        """Whether a setting of authentication is set, even one that does not switch it on."""
        names = {"authentication_providers", "anonymous_role", "proxy_roles"}
        names |= {"authenticate_original_client", *chain(*SETTINGS_OF_PROVIDERS.values())}
        return any(getattr(self, name) for name in names)

    @property
    def _is_on_loopback(self) -> bool:
        """Whether only this machine reaches the ports."""
        if self.bind_host == "localhost":
            return True
        try:
            return ip_address(self.bind_host).is_loopback
        except ValueError:
            return False

    def _check_ports(self) -> None:
        names = ["port_tls", "http_port_tls"]
        if self.plaintext_ports:
            names[:0] = ["port", "http_port"]
        by_port: dict[int, str] = {}
        for name in names:
            port = getattr(self, name)
            if port and (other := by_port.setdefault(port, name)) != name:
                raise ValueError(
                    f"{other} and {name} are both {port}: give each a port of its own."
                )

    def _check_tls(self) -> None:
        ports = (self.port_tls, self.http_port_tls)
        if not self.plaintext_ports and None in ports:
            raise ValueError(
                "plaintext_ports is false, so port_tls and http_port_tls are the only ports: set "
                "both, 6651 and 8443 by custom."
            )
        if (self.tls_certificate_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_certificate_file and tls_key_file go together: set both.")
        if ports != (None, None) and self.tls_certificate_file is None:
            raise ValueError(
                "port_tls or http_port_tls is set, but no certificate: set tls_certificate_file "
                "and tls_key_file."
            )
        if self.tls_client_certificates != "ignored" and self.tls_trust_certs_file is None:
            raise ValueError(
                f"tls_client_certificates is {self.tls_client_certificates}, but nobody is trusted "
                "to sign them: set tls_trust_certs_file."
            )
        if (self.broker_client_certificate_file is None) != (self.broker_client_key_file is None):
            raise ValueError(
                "broker_client_certificate_file and broker_client_key_file go together: set both."
            )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order the sources: command line, environment, file.

        The values of the file are in the argument `_file`.
        """
        assert isinstance(init_settings, InitSettingsSource)
        given = dict(init_settings.init_kwargs)
        from_file = given.pop("_file", {})
        return (
            InitSettingsSource(settings_cls, given),
            env_settings,
            InitSettingsSource(settings_cls, from_file),
        )


def load_settings(
    config_file: Path | None = None,
    overrides: Mapping[str, object] | None = None,
    *,
    defaults: Mapping[str, object] | None = None,
) -> Settings:
    """Load the settings from all sources; `overrides` are those of the command line.

    A None in `overrides` counts as not given.  `defaults` are weaker than every source.  Raises
    `ConfigurationError` with one line for each error.
    """
    from_file = _read_file(config_file) if config_file is not None else {}
    from_file = {**(defaults or {}), **from_file}
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    try:
        return Settings(_file=from_file, **given)  # type: ignore[call-arg, arg-type]
    except ValidationError as error:
        raise ConfigurationError(_sentences(error, config_file)) from error


def one_setting(
    name: str, config_file: Path | None, overrides: Mapping[str, object] | None = None
) -> str:
    """The text of one setting, before all of them are known to fit together.

    Raises `ConfigurationError` if the file cannot be read.
    """
    # An empty variable counts as none (`env_ignore_empty`).
    given = (overrides or {}).get(name) or os.environ.get(f"MAGNETAR_{name.upper()}") or None
    if given is None and config_file is not None:
        given = _read_file(config_file).get(name)
    return str(Settings.model_fields[name].default if given is None else given)


def one_flag(
    name: str, config_file: Path | None, overrides: Mapping[str, object] | None = None
) -> bool:
    """Whether a setting is true, before all of them are known to fit together.

    False for a text that is neither true nor false, which `load_settings` refuses.  Raises
    `ConfigurationError` if the file cannot be read.
    """
    try:
        return TypeAdapter(bool).validate_python(one_setting(name, config_file, overrides))
    except ValidationError:
        return False


def _read_file(config_file: Path) -> dict[str, object]:
    try:
        return tomllib.loads(config_file.read_text("utf-8"))
    except OSError as error:
        raise ConfigurationError(
            f"The configuration file {config_file} cannot be read ({error.strerror}): "
            "give --config a readable TOML file."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"The configuration file {config_file} is not TOML ({error}): correct that line."
        ) from error


def _sentences(error: ValidationError, config_file: Path | None) -> str:
    lines = []
    for problem in error.errors():
        if not problem["loc"]:
            lines.append(problem["msg"].removeprefix("Value error, "))
            continue
        name = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            where = f" in {config_file}" if config_file else ""
            lines.append(
                f"There is no setting named {name!r}{where}: see `magnetar config` for all names."
            )
        elif is_secret(str(problem["loc"][0])):
            lines.append(f"Setting {name} is wrong: {problem['msg']}.")
        else:
            lines.append(f"Setting {name} = {problem['input']!r} is wrong: {problem['msg']}.")
    return "\n".join(lines)


def is_secret(name: str) -> bool:
    """Whether the values of a setting may never be shown."""
    field = Settings.model_fields.get(name)
    return field is not None and "SecretStr" in repr(field.annotation)
