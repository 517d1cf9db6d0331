"""A real Prometheus that scrapes one target."""

import json
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from types import TracebackType

from tests.support.child_process import free_port


class Prometheus:
    """Scrapes `target` over TLS every second while the block lasts; it trusts `authority`."""

    def __init__(self, work: Path, target: str, authority: Path) -> None:
        self._work = work
        self._port = free_port()
        work.mkdir(parents=True, exist_ok=True)
        (work / "prometheus.yml").write_text(
            "global: {scrape_interval: 1s}\n"
            "scrape_configs:\n"
            "  - job_name: magnetar\n"
            "    scheme: https\n"
            f"    tls_config: {{ca_file: '{authority}'}}\n"
            f"    static_configs: [{{targets: ['{target}']}}]\n"
        )

    def __enter__(self) -> "Prometheus":
        self._log = (self._work / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={self._work}/prometheus.yml",
                f"--storage.tsdb.path={self._work}/tsdb",
                f"--web.listen-address=127.0.0.1:{self._port}",
            ],
            stdout=self._log,
            stderr=self._log,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)
        self._log.close()

    def query(self, expression: str) -> list[dict[str, object]]:
        """The instant vector of a PromQL expression; [] while Prometheus is not up yet."""
        question = urllib.parse.urlencode({"query": expression})
        url = f"http://127.0.0.1:{self._port}/api/v1/query?{question}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                result = json.load(answer)["data"]["result"]
        except OSError:
            return []
        assert isinstance(result, list)
        return result

    def wait_for(self, expression: str, timeout_s: float = 60) -> list[dict[str, object]]:
        """The first answer that is not empty."""
        deadline = time.monotonic() + timeout_s
        while not (result := self.query(expression)):
            assert time.monotonic() < deadline, f"no answer to {expression}"
            time.sleep(0.2)
        return result
