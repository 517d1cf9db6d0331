"""What tests with Spark stand on: a broker, a client of it, topics, a session, drivers to kill.

Rules: all tests of a run share one broker and one session; drivers are processes of their own, none
is left behind, and each rule of their hooks must have acted.  When a test fails, the ends of the
logs of the session and of its drivers are shown.
"""

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import magnetar
from tests.client.conftest import NAMESPACE, Service, Topic, rest
from tests.java.broker_under_test import BrokerUnderTest, MagnetarProcess
from tests.java.fixtures import serving
from tests.pipeline import quick_spark, spark_session
from tests.pipeline.driver_process import DriverProcess, Hooks
from tests.support.tools import missing_java, require

TEST_TIMEOUT_S = 900
"""Some tests start Spark three times, on a machine that has much else to do."""
LOG_TAIL = 8000
LOGS = pytest.StashKey[dict[str, Callable[[], str]]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S, func_only=True))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for name, text in item.stash.get(LOGS, {}).items():
            report.sections.append((name, text()))
    return report


def _shown_on_failure(request: pytest.FixtureRequest, name: str, text: Callable[[], str]) -> None:
    request.node.stash.setdefault(LOGS, {})[name] = text


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerUnderTest]:
    """The broker of all tests: has `url`, `admin_url`."""
    yield from serving(MagnetarProcess(tmp_path_factory.mktemp("magnetar")))


@pytest.fixture
async def client(service: BrokerUnderTest) -> AsyncIterator[magnetar.Client]:
    """A client of the broker; what the test leaves open is closed with it."""
    async with magnetar.connect(service.url) as client:
        yield client


MakeTopic = Callable[..., Awaitable[Topic]]


async def create_topic(
    service: Service, prefix: str, segments: int = 1, *, name: str | None = None
) -> Topic:
    """A new scalable topic, whose name begins so, or is `name`."""
    made = Topic(service, name or f"{prefix}-{uuid.uuid4().hex[:8]}")
    path = f"/scalable/{NAMESPACE}/{made.local_name}"
    status, answer = await rest(service, "PUT", path, body={}, numInitialSegments=segments)
    assert status == 204, answer
    return made


@pytest.fixture
def topic(service: BrokerUnderTest, request: pytest.FixtureRequest) -> MakeTopic:
    """Makes a scalable topic that can be split and merged: `await topic(segments=1)`."""

    async def make(segments: int = 1) -> Topic:
        prefix = request.node.originalname.removeprefix("test_").replace("_", "-")[:40]
        return await create_topic(service, prefix, segments)

    return make


@pytest.fixture(scope="session")
def _spark_is_ready() -> None:
    require(missing_java(), "pipeline", "JDK 17")
    quick_spark.ready()


@pytest.fixture(scope="session")
def _shared_spark(
    tmp_path_factory: pytest.TempPathFactory, _spark_is_ready: None
) -> Iterator[tuple[SparkSession, Path]]:
    directory = tmp_path_factory.mktemp("spark")
    with spark_session.running(directory) as session:
        yield session, directory / spark_session.LOG


@pytest.fixture
def spark(
    _shared_spark: tuple[SparkSession, Path], request: pytest.FixtureRequest
) -> Iterator[SparkSession]:
    """The session of all tests; what the test leaves running is stopped."""
    session, log = _shared_spark
    begin = log.stat().st_size

    def text() -> str:
        with log.open("rb") as file:
            file.seek(max(begin, log.stat().st_size - LOG_TAIL))
            return file.read().decode("utf-8", "replace")

    _shown_on_failure(request, "Spark's log", text)
    yield session
    for query in session.streams.active:
        query.stop()


MakeDriver = Callable[..., DriverProcess]


@pytest.fixture
def driver(
    request: pytest.FixtureRequest, tmp_path: Path, _spark_is_ready: None
) -> Iterator[MakeDriver]:
    """Makes a driver: `driver("name", "tests.pipeline.toy_driver", rows=10, ...)`.

    `checkpoint` is the same for all drivers of a test unless it is given.
    """
    made: list[DriverProcess] = []

    def make(name: str, module: str, **given: object) -> DriverProcess:
        directory = tmp_path / name
        directory.mkdir()
        given = {"checkpoint": str(tmp_path / "checkpoint")} | given
        made.append(DriverProcess(name, directory, module, given, Hooks(directory / "hooks")))
        _shown_on_failure(request, f"driver {name}", made[-1].logs)
        return made[-1]

    try:
        yield make
    finally:
        for each in made:
            each.kill()
    for each in made:
        assert not each.hooks.silent(), f"{each.name}: never acted: {each.hooks.silent()}"
