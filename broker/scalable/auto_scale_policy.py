"""The policy of automatic splits and merges: Pulsar's members, and how levels override.  Pure.

The broker's settings are the defaults.  A namespace and a topic may each override single members;
null, or no member, inherits (sources: `scalableTopicAutoScalePolicy` and `autoScalePolicy` of
Apache Pulsar 5).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from http import HTTPStatus
from types import MappingProxyType
from typing import ClassVar, Final, Protocol, TypeGuard

from config.settings import Settings
from magnetar.protocol.server_error import PeerError, ServerError

LARGEST: Final = 2**31 - 1
"""The largest whole number of a member: an `int` of Apache Pulsar."""
LARGEST_RATE: Final = 2**53
"""The largest limit of a rate: up to here floats are exact."""


class InvalidAutoScalePolicy(PeerError):
    """An override has unknown members or wrong values, or does not fit the levels above it."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.PRECONDITION_FAILED


@dataclass(frozen=True, slots=True)
class Rates:
    """Traffic of a segment per second, or a limit of each of its four rates."""

    msg_in: float = 0.0
    bytes_in: float = 0.0
    msg_out: float = 0.0
    bytes_out: float = 0.0

    def __add__(self, other: "Rates") -> "Rates":
        return Rates(*(mine + its for mine, its in zip(self, other, strict=True)))

    def __iter__(self) -> Iterator[float]:
        yield from (self.msg_in, self.bytes_in, self.msg_out, self.bytes_out)

    @property
    def total(self) -> float:
        """Messages per second, in and out: merges prefer the segments with the lowest total."""
        return self.msg_in + self.msg_out

    def share_of(self, limits: "Rates") -> float:
        """The largest of the four rates, as a share of its limit."""
        return max(rate / limit for rate, limit in zip(self, limits, strict=True))

    def below(self, limits: "Rates") -> bool:
        """Whether each rate is below its limit.  A rate of 0 is below a limit of 0."""
        pairs = zip(self, limits, strict=True)
        return all(rate < limit or rate == limit == 0 for rate, limit in pairs)

    def to_json(self) -> dict[str, float]:
        """The rates under the names of Pulsar's load record."""
        return {name: round(rate, 3) for name, rate in zip(RATE_NAMES, self, strict=True)}


RATE_NAMES: Final = ("msgRateIn", "bytesRateIn", "msgRateOut", "bytesRateOut")


@dataclass(frozen=True, slots=True)
class AutoScalePolicy:
    """All values that automatic splits, merges and rebuckets of a topic go by.

    `split` and `merge` are the limits of a segment's rates: above one of the former it is split,
    below all of the latter it may be merged.  Durations are seconds.
    """

    enabled: bool = True
    max_segments: int = 64
    min_segments: int = 1
    max_dag_depth: int = 10
    split_cooldown_s: int = 60
    merge_cooldown_s: int = 300
    merge_window_s: int = 300
    rebucket_cooldown_s: int = 60
    split: Rates = Rates(10_000, 50_000_000, 50_000, 250_000_000)
    merge: Rates = Rates(1_000, 5_000_000, 5_000, 25_000_000)
    split_vs_rebucket_msg_in: float = 1_000

    @property
    def keep_split_s(self) -> int:
        """Seconds for which a split stands before a merge may undo it."""
        return self.split_cooldown_s + self.merge_window_s

    def to_json(self) -> dict[str, object]:
        """All members, under Pulsar's names."""
        return {name: read(self) for name, read in _READ.items()}

    def problem(self) -> str | None:
        """The first contradiction among the values; None if they fit together."""
        return next(_problems(self), None)


def _problems(policy: AutoScalePolicy) -> Iterator[str]:
    lowest, highest = policy.min_segments, policy.max_segments
    if lowest < 1:
        yield f"minSegments = {lowest} is below 1"
    if highest < lowest:
        yield f"maxSegments = {highest} is below minSegments = {lowest}"
    for name in _NOT_NEGATIVE:
        if (value := _READ[name](policy)) < 0:
            yield f"{name} = {value} is below 0"
    for rate, split, merge in zip(RATE_NAMES, policy.split, policy.merge, strict=True):
        kind = _capitalized(rate)
        if split <= 0:
            yield f"split{kind}Threshold = {split:g} is not above 0"
        if merge < 0:
            yield f"merge{kind}Threshold = {merge:g} is below 0"
        if split <= merge:
            yield f"split{kind}Threshold = {split:g} is not above merge{kind}Threshold = {merge:g}"


def _capitalized(name: str) -> str:
    return name[0].upper() + name[1:]


def policy_of(settings: Settings) -> AutoScalePolicy:
    """The policy of a broker: the default of its namespaces and topics."""
    return AutoScalePolicy(
        enabled=settings.scalable_topic_auto_scale_enabled,
        max_segments=settings.scalable_topic_max_segments,
        min_segments=settings.scalable_topic_min_segments,
        max_dag_depth=settings.scalable_topic_max_dag_depth,
        split_cooldown_s=settings.scalable_topic_split_cooldown_s,
        merge_cooldown_s=settings.scalable_topic_merge_cooldown_s,
        merge_window_s=settings.scalable_topic_merge_window_s,
        rebucket_cooldown_s=settings.scalable_topic_rebucket_cooldown_s,
        split=Rates(
            settings.scalable_topic_split_msg_rate_in_threshold,
            settings.scalable_topic_split_bytes_rate_in_threshold,
            settings.scalable_topic_split_msg_rate_out_threshold,
            settings.scalable_topic_split_bytes_rate_out_threshold,
        ),
        merge=Rates(
            settings.scalable_topic_merge_msg_rate_in_threshold,
            settings.scalable_topic_merge_bytes_rate_in_threshold,
            settings.scalable_topic_merge_msg_rate_out_threshold,
            settings.scalable_topic_merge_bytes_rate_out_threshold,
        ),
        split_vs_rebucket_msg_in=(
            settings.scalable_topic_split_vs_rebucket_min_msg_rate_in_threshold
        ),
    )


class _Read(Protocol):
    def __call__(self, policy: AutoScalePolicy, /) -> float: ...


def _reads() -> Iterator[tuple[str, _Read]]:
    yield "enabled", lambda policy: policy.enabled
    yield "maxSegments", lambda policy: policy.max_segments
    yield "minSegments", lambda policy: policy.min_segments
    yield "maxDagDepth", lambda policy: policy.max_dag_depth
    yield "splitCooldownSeconds", lambda policy: policy.split_cooldown_s
    yield "mergeCooldownSeconds", lambda policy: policy.merge_cooldown_s
    yield "mergeWindowSeconds", lambda policy: policy.merge_window_s
    yield "rebucketCooldownSeconds", lambda policy: policy.rebucket_cooldown_s
    yield "splitMsgRateInThreshold", lambda policy: policy.split.msg_in
    yield "splitBytesRateInThreshold", lambda policy: policy.split.bytes_in
    yield "splitMsgRateOutThreshold", lambda policy: policy.split.msg_out
    yield "splitBytesRateOutThreshold", lambda policy: policy.split.bytes_out
    yield "mergeMsgRateInThreshold", lambda policy: policy.merge.msg_in
    yield "mergeBytesRateInThreshold", lambda policy: policy.merge.bytes_in
    yield "mergeMsgRateOutThreshold", lambda policy: policy.merge.msg_out
    yield "mergeBytesRateOutThreshold", lambda policy: policy.merge.bytes_out
    yield "splitVsRebucketMinMsgRateInThreshold", lambda policy: policy.split_vs_rebucket_msg_in


_READ: Final[Mapping[str, _Read]] = MappingProxyType(dict(_reads()))
MEMBERS: Final = tuple(_READ)
"""The members of the JSON, in the order in which they are shown."""
_NOT_NEGATIVE: Final = (
    "maxDagDepth",
    "splitCooldownSeconds",
    "mergeCooldownSeconds",
    "mergeWindowSeconds",
    "rebucketCooldownSeconds",
    "splitVsRebucketMinMsgRateInThreshold",
)
_WHOLE: Final = {
    "maxSegments": "max_segments",
    "minSegments": "min_segments",
    "maxDagDepth": "max_dag_depth",
    "splitCooldownSeconds": "split_cooldown_s",
    "mergeCooldownSeconds": "merge_cooldown_s",
    "mergeWindowSeconds": "merge_window_s",
    "rebucketCooldownSeconds": "rebucket_cooldown_s",
}
_LIMITS: Final = {
    f"{kind}{_capitalized(name)}Threshold": (kind, each.name)
    for kind in ("split", "merge")
    for name, each in zip(RATE_NAMES, fields(Rates), strict=True)
}


def checked_override(value: object) -> dict[str, object]:
    """The members of an override that are set, or raise `InvalidAutoScalePolicy`.

    Whether they fit together is only known with the levels above: see `AutoScalePolicy.problem`.
    """
    if not isinstance(value, Mapping):
        raise InvalidAutoScalePolicy("A policy of automatic splits must be a JSON object.")
    found = {str(name): member for name, member in value.items() if member is not None}
    for name, member in found.items():
        if name not in _READ:
            raise InvalidAutoScalePolicy(
                f"A policy of automatic splits has no {name[:100]!r}: give some of "
                f"{', '.join(MEMBERS)}."
            )
        if not _fits(name, member):
            wanted = "true or false" if name == "enabled" else "a number"
            if name in _WHOLE:
                wanted = f"a whole number of at most {LARGEST}"
            raise InvalidAutoScalePolicy(f"{name} = {str(member)[:100]!r} is wrong: give {wanted}.")
    return found


def merged(defaults: AutoScalePolicy, *overrides: Mapping[str, object] | None) -> AutoScalePolicy:
    """The policy after each override, the strongest last.

    Members that are unknown, null, or of a wrong type inherit: a broker of a later version may have
    stored them.
    """
    policy = defaults
    for override in overrides:
        for name, value in (override or {}).items():
            if name in _READ and _fits(name, value):
                policy = _with(policy, name, value)
    return policy


def require_valid(policy: AutoScalePolicy) -> None:
    """Raise `InvalidAutoScalePolicy` for values that do not fit together."""
    problem = policy.problem()
    if problem is not None:
        raise InvalidAutoScalePolicy(
            f"Together with the levels above, {problem}: change one of them."
        )


def _fits(name: str, value: object) -> bool:
    if name == "enabled":
        return isinstance(value, bool)
    if not _is_number(value):
        return False
    return name not in _WHOLE or (isinstance(value, int) and abs(value) <= LARGEST)


def _is_number(value: object) -> TypeGuard[float]:
    # False for NaN too.  Larger numbers are no floats, or no exact ones.
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= LARGEST_RATE
    )


def _with(policy: AutoScalePolicy, name: str, value: object) -> AutoScalePolicy:
    if isinstance(value, bool):
        return replace(policy, enabled=value)
    if name in _WHOLE and isinstance(value, int):
        changed: dict[str, int] = {_WHOLE[name]: value}
        return replace(policy, **changed)  # type: ignore[arg-type]
    if not _is_number(value):
        return policy
    if name not in _LIMITS:
        return replace(policy, split_vs_rebucket_msg_in=float(value))
    kind, rate = _LIMITS[name]
    limit: dict[str, float] = {rate: float(value)}
    if kind == "split":
        return replace(policy, split=replace(policy.split, **limit))
    return replace(policy, merge=replace(policy.merge, **limit))
