"""Reports the loads of the segments that run here."""

import asyncio
from collections.abc import Mapping

import structlog

from broker.scalable.host import ScalableHost
from broker.scalable.live_topics import LiveTopics
from broker.scalable.load_report import Load, LoadReport, SegmentMeter
from broker.scalable.topic_store import TopicStore
from broker.topics.topic import Topic
from config.bounds import LOAD_REPORT_WRITES, LOAD_REPORTS_REPEATED, RATE_SAMPLE_TOPICS
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.names import SegmentName, TopicDomain, TopicName, segment_name
from magnetar.protocol.server_error import MagnetarError

log = structlog.get_logger(__name__)


class LoadReporter:
    """Samples the counters of all ACTIVE segments that run here, and writes what has changed.

    Producing and consuming pay nothing for it: the counters are those of statistics.  A segment
    whose load does not change costs the reading of its counters every
    `scalable_topic_load_report_interval_s`; the only segment of a topic writes nothing before its
    first traffic.
    """

    def __init__(self, broker: ScalableHost, topics: LiveTopics, store: TopicStore) -> None:
        self._broker = broker
        self._topics = topics
        self._store = store
        self._interval_s = broker.settings.scalable_topic_load_report_interval_s
        self._change = broker.settings.scalable_topic_load_report_rate_change_threshold
        # So many reports may be written between two evaluations of the leader.
        evaluation_s = broker.settings.scalable_topic_auto_scale_interval_s
        self._repeated = min(LOAD_REPORTS_REPEATED, 2 + evaluation_s // self._interval_s)
        self._meters: dict[SegmentName, SegmentMeter] = {}
        self._reports: dict[TopicName, dict[int, LoadReport]] = {}
        self._sampled_s = 0.0
        self._tasks = BackgroundTasks(log)
        self.written_total = 0
        """Reports written since the start."""

    def start(self) -> None:
        """Sample until `stop`."""
        self._sampled_s = asyncio.get_running_loop().time()
        self._tasks.keep("load_reports", self._keep_sampling)

    async def stop(self) -> None:
        """Sample no more.  May be called again."""
        await self._tasks.stop()

    def reports_of(self, topic: TopicName) -> Mapping[int, LoadReport]:
        """The newest reports of a topic's segments that run here, by segment."""
        return self._reports.get(topic, {})

    async def _keep_sampling(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.sample(asyncio.get_running_loop().time())

    async def sample(self, now_s: float) -> None:
        """Sample all segments once, and write the reports that are due.  `now_s` is monotonic."""
        due: list[tuple[SegmentName, SegmentMeter, Load]] = []
        running: set[SegmentName] = set()
        for number, topic in enumerate(list(self._broker.topics.loaded().values()), start=1):
            # Ordinary topics that became segments are sealed.
            is_segment = topic.name.domain is TopicDomain.SEGMENT
            segment = segment_name(topic.name) if is_segment else None
            if segment is not None and not (topic.closing or topic.sealed):
                running.add(segment)
                meter = self._meters.get(segment)
                if meter is None:
                    meter = self._meters[segment] = SegmentMeter(self._sampled_s)
                load = meter.sample(now_s, topic.traffic, _backlog(topic))
                if load.differs(meter.written, self._change):
                    due.append((segment, meter, load))
            if number % RATE_SAMPLE_TOPICS == 0:
                await asyncio.sleep(0)
        self._sampled_s = now_s
        self._forget_others(running)
        for first in range(0, len(due), LOAD_REPORT_WRITES):
            some = due[first : first + LOAD_REPORT_WRITES]
            await asyncio.gather(*(self._report(*each) for each in some))

    def _forget_others(self, running: set[SegmentName]) -> None:
        for gone in self._meters.keys() - running:
            del self._meters[gone]
            reports = self._reports.get(gone.parent, {})
            reports.pop(gone.segment_id, None)
            if not reports:
                self._reports.pop(gone.parent, None)

    async def _report(self, segment: SegmentName, meter: SegmentMeter, load: Load) -> None:
        now_ms = self._broker.clock.now_ms()
        before = self._reports.get(segment.parent, {}).get(segment.segment_id)
        earlier = () if before is None else before.and_earlier(self._repeated)
        if load.idle and meter.written is None and self._is_alone(segment):
            report = LoadReport(load, now_ms, number=-1)
        else:
            try:
                report = await self._store.put_load(
                    segment.parent, segment.segment_id, load, now_ms, earlier
                )
            except MagnetarError as error:
                # The next sample differs from what is stored as well.
                log.debug("load_report_not_written", segment=str(segment), error=str(error))
                return
            self.written_total += 1
        meter.written = load
        if self._meters.get(segment) is meter:
            self._reports.setdefault(segment.parent, {})[segment.segment_id] = report

    def _is_alone(self, segment: SegmentName) -> bool:
        live = self._topics.known(segment.parent)
        return live is None or len(live.layout.active) == 1


def _backlog(topic: Topic) -> int:
    """The entries that the slowest of the subscriptions with consumers still has to read."""
    subscriptions = topic.subscriptions.values()
    return max((each.backlog for each in subscriptions if each.consumers), default=0)
