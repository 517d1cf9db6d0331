"""`make image-test`: the Dockerfile is built and run, used by the stock client, scraped, stopped.

Needs root and Debian (it installs buildah, debootstrap and prometheus when they are missing), so it
is not part of `make test`.
"""

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.image.builder import ROOT, ImageContainer, build_base, build_image, install_tools
from tests.image.prometheus import Prometheus, free_port
from tests.stock import stock_driver

pytestmark = [pytest.mark.image, pytest.mark.timeout(1800)]
WORK = ROOT / "build" / "image"
START_TIMEOUT_S = 60


@pytest.fixture(scope="module")
def image() -> None:
    install_tools()
    build_base(WORK)
    build_image()


@pytest.fixture
def broker(image: None, tmp_path: Path) -> Iterator[tuple[ImageContainer, int, int]]:
    port, http_port = free_port(), free_port()
    container = ImageContainer(
        {
            "MAGNETAR_PORT": str(port),
            "MAGNETAR_HTTP_PORT": str(http_port),
            "MAGNETAR_BIND_HOST": "127.0.0.1",
            "MAGNETAR_ADMIN_URL": f"http://127.0.0.1:{http_port}",
        },
    )
    try:
        start(container, tmp_path / "broker.log")
        yield container, port, http_port
    finally:
        container.close()


def start(container: ImageContainer, log: Path) -> None:
    container.start(log)
    deadline = time.monotonic() + START_TIMEOUT_S
    while not container.healthy():
        assert time.monotonic() < deadline, log.read_text()


def test_the_image_serves_is_scraped_and_drains(
    broker: tuple[ImageContainer, int, int], tmp_path: Path
) -> None:
    container, port, http_port = broker
    assert container.uid != 0
    assert list(container.config["Volumes"]) == ["/data"]  # type: ignore[call-overload]
    admin = f"http://127.0.0.1:{http_port}"
    stock_driver.build()
    driver = stock_driver.StockDriver()
    try:
        case = driver.start("queue", f"pulsar://127.0.0.1:{port}", admin, topic="image")
        assert case.result()["left_after_acks"] == 0
    finally:
        driver.close()
    with Prometheus(tmp_path / "prometheus", f"127.0.0.1:{http_port}") as prometheus:
        found = prometheus.wait_for("sum(pulsar_in_messages_total) > 0")
    assert found
    with urllib.request.urlopen(f"{admin}/admin/v2/brokers/health", timeout=5) as answer:
        assert answer.read() == b"ok"
    assert container.terminate() == 0
    # What it stored is in the volume: a new process finds it.
    start(container, tmp_path / "again.log")
    with urllib.request.urlopen(f"{admin}/admin/v2/scalable/public/default", timeout=5) as answer:
        assert json.load(answer) == ["topic://public/default/image"]
    assert container.terminate() == 0
