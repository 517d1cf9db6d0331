"""Automatic splits, merges and rebuckets: evaluates topics by the rules of `scale_decision`."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import structlog

from broker.policies.namespaces import AUTO_SCALE_POLICY
from broker.scalable import history, layout
from broker.scalable.auto_scale_policy import (
    AutoScalePolicy,
    Rates,
    merged,
    policy_of,
    require_valid,
)
from broker.scalable.consumer_groups import (
    ConsumerGroup,
    largest,
    need_buckets,
    need_segments,
)
from broker.scalable.controllers import Controllers
from broker.scalable.host import ScalableHost
from broker.scalable.key_sample import KeySample
from broker.scalable.last_changes import last_changes
from broker.scalable.layout import Layout, Reshape
from broker.scalable.live_topics import LiveTopic, LiveTopics
from broker.scalable.load_report import Load, LoadBoard, LoadReport, SegmentLoad
from broker.scalable.load_reporter import LoadReporter
from broker.scalable.records import SubscriptionKind, segment_of
from broker.scalable.reshape import Change, Reshaper
from broker.scalable.scale_decision import (
    Action,
    Cause,
    Decision,
    Situation,
    Verdict,
    decide,
)
from broker.scalable.segment_requests import SampleKeys
from broker.scalable.segments import Segments
from broker.scalable.topic_leadership import NotController, TopicLeadership
from broker.scalable.topic_store import ConcurrentChange, TopicStore
from config.bounds import (
    RATE_SAMPLE_TOPICS,
    SCALING_EVALUATIONS_AT_ONCE,
    SCALING_REFUSAL_RECORD_MS,
    SPLIT_RETRY_S,
)
from magnetar.background_tasks import BackgroundTasks, OwnerStopped
from magnetar.protocol.names import TopicName
from magnetar.protocol.server_error import MagnetarError

log = structlog.get_logger(__name__)

_LASTING = frozenset(
    {
        Cause.INVALID_POLICY,
        Cause.HOT_KEY,
        Cause.MAX_SEGMENTS,
        Cause.MAX_BUCKETS,
        Cause.NO_SHARING,
        Cause.DAG_DEPTH,
        Cause.BACKLOG,
    }
)
"""Causes of refusals that no cooldown ends, which the history shows.  Consumers that need their
segments are none: that is the usual state."""


@dataclass(eq=False, slots=True)
class _Scaling:
    """The leader's state of one topic: input of its evaluations, and their last outcomes."""

    live: LiveTopic
    board: LoadBoard = field(default_factory=LoadBoard)
    evaluated_ms: int | None = None
    decided: Decision | None = None
    """The last decision, carried out or not."""
    decided_ms: int = 0
    failure: str = ""
    """The error of the last evaluation, or of the change that it decided; empty without."""
    recorded: tuple[Cause, int] | None = None
    """The last refusal in the history, and its time in milliseconds."""
    unclaimed_since_ms: int | None = None
    """Since when no ordered consumer of the topic has come; None: one has, or it is not known."""
    running: bool = False
    again: bool = False
    """Whether something asked for another evaluation while one ran."""
    retry: asyncio.TimerHandle | None = None

    def copy(self) -> "_Scaling":
        """A copy that can take in newer reports while this one stays as it is."""
        return replace(self, board=self.board.copy())


class AutoScaler:
    """Evaluates the topics that this broker leads, and carries out what is decided.

    A topic is evaluated every `scalable_topic_auto_scale_interval_s`, when an ordered consumer
    registers, and once the split cooldown after a split.  One evaluation of a topic runs at a time;
    requests that come meanwhile cause one more.  At most SCALING_EVALUATIONS_AT_ONCE topics are
    evaluated at the same time, so that a slow change of one topic does not delay the others.

    Among several brokers, a topic that could be split or merged and has no leader is led by the
    broker that runs its first segment.
    """

    def __init__(
        self,
        broker: ScalableHost,
        topics: LiveTopics,
        store: TopicStore,
        segments: Segments,
        leads: TopicLeadership,
        controllers: Controllers,
        reporter: LoadReporter,
        reshaper: Reshaper,
    ) -> None:
        self._broker = broker
        self._topics = topics
        self._store = store
        self._segments = segments
        self._leads = leads
        self._controllers = controllers
        self._reporter = reporter
        self._reshaper = reshaper
        self._defaults = policy_of(broker.settings)
        self._interval_s = broker.settings.scalable_topic_auto_scale_interval_s
        self._max_buckets = broker.settings.scalable_topic_entry_bucket_max_per_segment
        self._scaling: dict[TopicName, _Scaling] = {}
        self._tasks = BackgroundTasks(log)
        self._evaluations = asyncio.Semaphore(SCALING_EVALUATIONS_AT_ONCE)
        self.evaluations_total = 0
        self.decisions: Counter[tuple[str, str]] = Counter()
        """Changes that were made, by action and rule."""
        self.refusals: Counter[tuple[str, str]] = Counter()
        """Changes that were wanted and refused, by rule and cause."""
        self.failures_total = 0
        """Evaluations that failed, or whose change did."""
        controllers.on_registration(self._registered)

    def start(self) -> None:
        """Evaluate all topics every `scalable_topic_auto_scale_interval_s`, until `stop`."""
        problem = self._defaults.problem()
        if problem is not None:
            log.warning("auto_scale_policy_invalid", problem=problem, effect="switched off")
        self._tasks.keep_every(self._interval_s, "auto_scale", self.evaluate_all)

    async def stop(self) -> None:
        """Evaluate no more.  May be called again."""
        for name in list(self._scaling):
            self.forget(name)
        await self._tasks.stop()

    def forget(self, name: TopicName) -> None:
        """Forget a topic that this broker no longer leads, or that is gone."""
        scaling = self._scaling.pop(name, None)
        if scaling is not None and scaling.retry is not None:
            scaling.retry.cancel()

    # When topics are evaluated

    async def evaluate_all(self) -> None:
        """Evaluate each topic in memory that is led here and not at rest."""
        for name in list(self._scaling):
            if self._topics.known(name) is not self._scaling[name].live:
                self.forget(name)
        left = iter(enumerate(self._topics.all(), start=1))

        async def evaluate_some() -> None:
            for number, live in left:
                if not self._is_at_rest(live):
                    await self._evaluate_if_led(live)
                elif number % RATE_SAMPLE_TOPICS == 0:
                    # Topics at rest wait for nothing: let the loop serve others meanwhile.
                    await asyncio.sleep(0)

        await asyncio.gather(*(evaluate_some() for _ in range(SCALING_EVALUATIONS_AT_ONCE)))

    async def _evaluate_if_led(self, live: LiveTopic) -> None:
        try:
            if await self._leads_or_takes(live):
                await self.evaluate(live)
        except MagnetarError as error:
            log.warning("lead_not_taken", topic=str(live.name), error=str(error))
        except Exception as error:  # noqa: BLE001 - logged; the other topics are evaluated
            log.error("auto_scale_failed", topic=str(live.name), error=repr(error))

    def _is_at_rest(self, live: LiveTopic) -> bool:
        """Whether a topic has one segment, no traffic here, and no consumer that lacks a segment.

        Among several brokers the traffic of a segment may be at another one, whose report the
        leader reads.
        """
        if len(live.layout.active) > 1 or self._largest_group(live.name) > 1:
            return False
        if self._broker.placement.shared and self._leads.leads(live.name):
            return False
        reports = self._reporter.reports_of(live.name).values()
        return all(report.load.idle for report in reports)

    async def _leads_or_takes(self, live: LiveTopic) -> bool:
        if self._leads.leads(live.name):
            return True
        if self._broker.placement.known_owner(live.name) is not None:
            return False
        first = segment_of(live.name, live.layout.active[0])
        if self._segments.running(first) is None:
            return False
        return await self._leads.try_to_take(live.name)

    def _registered(self, live: LiveTopic) -> None:
        self.consider(live)

    def consider(self, live: LiveTopic) -> None:
        """Evaluate a topic soon, unless this has been stopped."""
        # What has happened to the topic is done: it must not fail, nor be tried again.
        with contextlib.suppress(OwnerStopped):
            self._tasks.start(self.evaluate(live))

    async def evaluate(self, live: LiveTopic) -> None:
        """Evaluate a topic, and carry out what is decided; errors are logged."""
        scaling = self._of(live)
        if scaling.running:
            scaling.again = True
            return
        scaling.running = True
        try:
            scaling.again = True
            while scaling.again:
                scaling.again = False
                async with self._evaluations:
                    await self._evaluate_logged(scaling)
        finally:
            scaling.running = False

    def _of(self, live: LiveTopic) -> _Scaling:
        scaling = self._scaling.get(live.name)
        if scaling is None or scaling.live is not live:
            self.forget(live.name)
            scaling = self._scaling[live.name] = _Scaling(live)
        return scaling

    # An evaluation

    async def _evaluate_logged(self, scaling: _Scaling) -> None:
        name = str(scaling.live.name)
        self.evaluations_total += 1
        scaling.failure = ""
        scaling.evaluated_ms = self._broker.clock.now_ms()
        wanted: dict[str, object] = {}
        try:
            situation, verdict = await self._decide(scaling, store_idle=True)
            if verdict.decision is not None:
                wanted = _log_fields(verdict.decision)
                await self._carry_out(scaling, situation, verdict.decision)
                log.info("topic_scaled", topic=name, **wanted)
            await self._note_refusals(scaling, verdict)
        except (ConcurrentChange, NotController) as error:
            # Somebody else changed the topic, or leads it now: nothing is wrong.
            scaling.failure = str(error)
            log.info("topic_scaling_postponed", topic=name, because=str(error), **wanted)
        except MagnetarError as error:
            self.failures_total += 1
            scaling.failure = str(error)
            log.warning("topic_scaling_failed", topic=name, error=str(error), **wanted)

    async def _decide(self, scaling: _Scaling, *, store_idle: bool) -> tuple[Situation, Verdict]:
        """Read the input of a decision, and decide; segments to be split are sampled.

        `store_idle`: whether a report without traffic is stored for a segment that no broker has
        loaded.
        """
        live = scaling.live
        situation = await self._situation(scaling)
        loads = dict(situation.loads)
        samples: dict[int, KeySample | None] = {}
        while True:
            situation = replace(situation, loads=loads, samples=samples)
            verdict = decide(situation)
            if verdict.sample_wanted is None:
                return situation, verdict
            segment_id = verdict.sample_wanted.segment_id
            samples[segment_id], is_loaded = await self._sample(live, situation.layout, segment_id)
            if not is_loaded and loads.get(segment_id, SegmentLoad(Rates())).rates != Rates():
                # Its broker ended without a last report.  Nobody has used the segment since.
                idle, now_ms = Load(Rates()), self._broker.clock.now_ms()
                if store_idle:
                    report = await self._store.put_load(live.name, segment_id, idle, now_ms)
                else:
                    report = LoadReport(idle, now_ms, scaling.board.known()[segment_id].number + 1)
                scaling.board.take(segment_id, report)
                loads[segment_id] = scaling.board.loads()[segment_id]

    async def _sample(
        self, live: LiveTopic, before: Layout, segment_id: int
    ) -> tuple[KeySample | None, bool]:
        """The sample of a segment's keys, None without one; and whether a broker has it loaded."""
        segment = segment_of(live.name, before.segments[segment_id])
        try:
            sample = await self._segments.ask(SampleKeys(segment))
        except MagnetarError as error:
            log.debug("keys_not_sampled", segment=str(segment), error=str(error))
            return None, True
        return sample, sample is not None

    async def _situation(self, scaling: _Scaling) -> Situation:
        live = scaling.live
        now, policy = live.layout, await self.effective_policy(live)
        now_ms = self._broker.clock.now_ms()
        if not policy.enabled or policy.problem() is not None:
            return Situation(now, policy, now_ms, kept_changes=live.stored.record.kept_changes)
        scaling.board.use_limits(policy.merge)
        await self._take_reports(scaling, now)
        reserved = await self._count_reserved(scaling)
        return Situation(
            now,
            policy,
            now_ms,
            loads=scaling.board.loads(),
            groups=self._groups(live, now),
            reserved=reserved,
            max_buckets=self._max_buckets,
            kept_changes=live.stored.record.kept_changes,
        )

    async def _take_reports(self, scaling: _Scaling, now: Layout) -> None:
        """Take in the reports of all ACTIVE segments: those of this broker, and stored ones."""
        live, board = scaling.live, scaling.board
        active = {segment.segment_id: segment for segment in now.active}
        board.keep(active)
        reports = {**self._reporter.reports_of(live.name)}
        others = [each for each in active if each not in reports]
        if not self._broker.placement.shared:
            # Nobody else writes any.
            others = [each for each in others if each not in board.known()]
        reports.update(await self._store.loads(live.name, others))
        for segment_id, report in reports.items():
            # An older one is of a deleted topic of this name.
            if segment_id in active and report.since_ms >= active[segment_id].created_at_ms:
                board.take(segment_id, report)

    def _groups(self, live: LiveTopic, now: Layout) -> tuple[ConsumerGroup, ...]:
        """The registered ordered consumers of each subscription."""
        controller = self._controllers.of(live.name)
        groups = () if controller is None else controller.groups.values()
        shareable = self._are_shareable(live, now)
        return tuple(
            ConsumerGroup(
                len(each.group.registered()),
                is_stream=each.kind is SubscriptionKind.STREAM,
                can_share=each.kind is SubscriptionKind.STREAM
                and each.group.can_share
                and shareable,
            )
            for each in groups
        )

    def _largest_group(self, name: TopicName) -> int:
        """The registered ordered consumers of the subscription that has most."""
        controller = self._controllers.of(name)
        groups = () if controller is None else controller.groups.values()
        return max((len(each.group.registered()) for each in groups), default=0)

    def _are_shareable(self, live: LiveTopic, now: Layout) -> bool:
        """Whether no ACTIVE segment holds a batch that forbids sharing it.

        A segment that is not loaded holds none that is known to.
        """
        states = [self._segments.state(segment_of(live.name, each)) for each in now.active]
        return all(state is None or state.shareable for state in states)

    async def _count_reserved(self, scaling: _Scaling) -> int:
        """The stored registrations of a topic whose consumers have not come back yet.

        They come within their grace period.  Where none comes, no controller removes them.
        """
        live, now_ms = scaling.live, self._broker.clock.now_ms()
        if self._controllers.of(live.name) is not None:
            scaling.unclaimed_since_ms = None
            return 0
        if scaling.unclaimed_since_ms is None:
            scaling.unclaimed_since_ms = now_ms
        if now_ms - scaling.unclaimed_since_ms > self._controllers.grace_s(live) * 1000:
            return 0
        names = list(await self._store.subscriptions(live.name))
        return max([len(await self._store.consumers(live.name, each)) for each in names], default=0)

    # What comes of it

    async def _carry_out(self, scaling: _Scaling, situation: Situation, decision: Decision) -> None:
        live = scaling.live
        scaling.decided, scaling.decided_ms = decision, self._broker.clock.now_ms()
        await self._leads.take_to_change(live.name)
        cause = f"{decision.rule.value}: {decision.why}"
        change = _at_epoch(_change_of(decision, self._max_buckets), situation.layout.epoch)
        await self._reshaper.reshape(live.name, change, cause=cause)
        self.decisions[decision.action.value, decision.rule.value] += 1
        if decision.action is Action.SPLIT:
            self._consider_later(scaling, situation.policy.split_cooldown_s + SPLIT_RETRY_S)

    def _consider_later(self, scaling: _Scaling, pause_s: float) -> None:
        if scaling.retry is not None:
            scaling.retry.cancel()
        if self._scaling.get(scaling.live.name) is scaling:
            loop = asyncio.get_running_loop()
            scaling.retry = loop.call_later(pause_s, self.consider, scaling.live)

    async def _note_refusals(self, scaling: _Scaling, verdict: Verdict) -> None:
        """Count the changes that were wanted; the history gets the first with a lasting cause."""
        wanted = [each for each in verdict.refusals if each.wanted]
        for refusal in wanted:
            self.refusals[refusal.rule.value, refusal.cause.value] += 1
        if verdict.decision is not None:
            # The history has that, and what is refused from now on is refused anew.
            scaling.recorded = None
            return
        lasting = next((each for each in wanted if each.cause in _LASTING), None)
        if lasting is None:
            return
        now_ms, recorded = self._broker.clock.now_ms(), scaling.recorded
        if recorded is not None and (
            recorded[0] is lasting.cause or now_ms - recorded[1] < SCALING_REFUSAL_RECORD_MS
        ):
            return
        live = scaling.live
        log.info(
            "topic_not_scaled",
            topic=str(live.name),
            rule=lasting.rule.value,
            cause=lasting.cause.value,
            reason=lasting.why,
        )
        cause = f"{lasting.rule.value}: {lasting.why}"
        entry = history.of_refusal(live.layout, cause, now_ms=now_ms)
        await self._store.append_history(live.name, entry)
        scaling.recorded = (lasting.cause, now_ms)

    # Policies

    async def effective_policy(self, live: LiveTopic) -> AutoScalePolicy:
        """The policy of a topic: the broker's, overridden by its namespace's and its own."""
        return merged(
            self._defaults,
            await self._namespace_override(live.name),
            live.stored.record.auto_scale_policy,
        )

    async def _namespace_override(self, name: TopicName) -> Mapping[str, object] | None:
        policies = await self._broker.namespaces.require(name.namespace_name)
        value = policies.raw.get(AUTO_SCALE_POLICY)
        return value if isinstance(value, Mapping) else None

    def require_fitting(self, *overrides: Mapping[str, object] | None) -> None:
        """Raise `InvalidAutoScalePolicy` if these do not fit the broker's policy."""
        require_valid(merged(self._defaults, *overrides))

    async def require_fitting_topic(self, name: TopicName, override: Mapping[str, object]) -> None:
        """Raise `InvalidAutoScalePolicy` if a topic's policy does not fit the levels above."""
        self.require_fitting(await self._namespace_override(name), override)

    # Why

    async def explain(self, live: LiveTopic) -> dict[str, object]:
        """Return the decision of now with its reasons and input, and the last decision.

        It only reads: neither stored records nor the state of the next evaluation change.
        """
        known = self._scaling.get(live.name)
        scaling = _Scaling(live) if known is None or known.live is not live else known.copy()
        situation, verdict = await self._decide(scaling, store_idle=False)
        changes = last_changes(situation.layout, situation.kept_changes)
        decided = scaling.decided
        return {
            "policy": situation.policy.to_json(),
            "namespacePolicy": await self._namespace_override(live.name),
            "topicPolicy": live.stored.record.auto_scale_policy,
            "activeSegments": len(situation.layout.active),
            "consumers": largest(situation.groups),
            "streamConsumers": largest([each for each in situation.groups if each.is_stream]),
            "consumersThatNeedSegments": need_segments(situation.groups),
            "consumersThatCanShare": need_buckets(situation.groups),
            "segments": _loads_json(situation),
            "lastSplitMs": changes.split_ms,
            "lastMergeMs": changes.merge_ms,
            "lastRebucketMs": changes.rebucket_ms,
            "decision": None if verdict.decision is None else verdict.decision.to_json(),
            "refusals": [refusal.to_json() for refusal in verdict.refusals],
            "lastEvaluationMs": scaling.evaluated_ms,
            "lastDecision": None if decided is None else decided.to_json(),
            "lastDecisionMs": None if decided is None else scaling.decided_ms,
            "failure": scaling.failure or None,
        }


def _log_fields(decision: Decision) -> dict[str, object]:
    return {
        "action": decision.action.value,
        "rule": decision.rule.value,
        "segments": list(decision.segment_ids),
        "reason": decision.why,
    }


def _loads_json(situation: Situation) -> dict[str, object]:
    found: dict[str, object] = {}
    for segment in situation.layout.active:
        load = situation.loads.get(segment.segment_id)
        members: dict[str, object] = {}
        if load is not None:
            members = {
                **load.rates.to_json(),
                "backlog": load.backlog,
                "quietSinceMs": load.quiet_since_ms,
            }
        sample = situation.samples.get(segment.segment_id)
        if sample is not None and sample.tells:
            members["topKeyShare"] = round(sample.top_share, 3)
            if sample.has_bytes:
                members["topKeyBytesShare"] = round(sample.by_bytes.top_share, 3)
        found[str(segment.segment_id)] = members
    return found


def _change_of(decision: Decision, max_buckets: int) -> Change:
    """The change of the layout that a decision asks for."""
    ids = decision.segment_ids
    if decision.action is Action.SPLIT:
        return lambda now, ms: layout.split(now, ids[0], now_ms=ms, parts=decision.parts)
    if decision.action is Action.MERGE:
        return lambda now, ms: layout.merge(now, ids, now_ms=ms, max_buckets=max_buckets)
    return lambda now, ms: layout.rebucket(now, ids, decision.bucket_count, now_ms=ms)


def _at_epoch(change: Change, epoch: int) -> Change:
    """A change of the layout that was decided on, and of no other one."""

    def checked(now: Layout, now_ms: int) -> Reshape:
        if now.epoch != epoch:
            raise ConcurrentChange(
                f"The layout was changed to epoch {now.epoch} while it was decided on: the next "
                "evaluation decides anew."
            )
        return change(now, now_ms)

    return checked
