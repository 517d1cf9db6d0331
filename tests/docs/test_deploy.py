"""What is in deploy/ fits the broker: settings, commands, paths, ports and metrics that exist.

Nothing is deployed here.  The metrics and the REST paths are those of a broker that runs; what the
bookies tell is listed as bookies 4.18.0 tell it.  promtool and kubectl are used where they are.
"""

import asyncio
import json
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import typer.main
import yaml
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from broker.admin.access import rules as access_rules
from broker.admin.app import AdminServer
from broker.admin.app import build_app as build_rest
from broker.metrics.stores import bookkeeper_metrics
from broker.policies.cluster_data import ClusterData
from broker.policies.policy_kinds import REPLICATION
from config.settings import Settings, load_settings
from magnetar.cli.main import build_app as build_commands
from magnetar.protocol.ids import EARLIEST
from magnetar.protocol.names import parse_namespace_name, parse_topic_name
from security.access import Need
from security.first_start_files import SecurityFiles
from security.secret_files import write_secret
from storage.ledger.bookkeeper.bookie_client import BookieCounters
from storage.ledger.bookkeeper.ledger_services import LedgerCounters
from tests.support.authority import Authority, server_settings
from tests.support.embedded_broker import running
from tests.support.metrics_text import metrics_text
from tests.support.promql import Query, sample_labels
from tests.support.waiting import until

ROOT: Final = Path(__file__).resolve().parents[2]
DEPLOY: Final = ROOT / "deploy"
OPERATIONS: Final = ROOT / "docs" / "operations.md"
OF_THE_COMMAND_LINE: Final = {"MAGNETAR_CONFIG", "MAGNETAR_ADMIN_URL"}
TOOL_TIMEOUT_S: Final = 60
PROBED: Final = ("/status.html", "/admin/v2/brokers/ready")
APPLIED_BYTES: Final = 262_144
"""The most that `kubectl apply` can note of an object beside it."""

OF_PROMETHEUS: Final[Mapping[str, set[str]]] = {"up": set()}
OF_EVERY_TARGET: Final = {"job", "instance", "__name__"}
OF_BOOKIES: Final[Mapping[str, set[str]]] = {
    "bookie_SERVER_STATUS": set(),
    "bookie_WRITE_BYTES": set(),
    "bookie_journal_JOURNAL_SYNC": {"journalIndex", "success", "quantile"},
    "bookkeeper_server_ADD_ENTRY_REQUEST": {"success", "quantile"},
    "bookie_ledger_dir_data_bookkeeper_ledgers_usage": set(),
}
SAMPLES_ONLY_LATER: Final = {
    "pulsar_compaction_duration_time_in_mills",
    "pulsar_compaction_failed_count",
    "pulsar_compaction_removed_event_count",
    "pulsar_compaction_succeed_count",
    "pulsar_storage_backlog_quota_exceeded_evictions_total",
    "pulsar_storage_backlog_quota_limit",
    "pulsar_storage_backlog_quota_limit_time",
    "pulsar_storage_offloaded_size",
    "pulsar_subscription_dispatch_throttled_bytes_events_total",
    "pulsar_subscription_dispatch_throttled_msg_events_total",
    "pulsar_subscription_msg_drop_rate",
    "pulsar_txn_tp_committed_count_total",
    "pulsar_txn_tp_aborted_count_total",
}

COMPOSE_CPUS: Final = 2
COMPOSE: Final = DEPLOY / "compose" / "compose.yaml"
KUBERNETES: Final = DEPLOY / "kubernetes"
MONITORING: Final = KUBERNETES / "monitoring"
PROMETHEUS: Final = DEPLOY / "prometheus"
SPARK: Final = DEPLOY / "spark"
DASHBOARDS: Final = sorted((DEPLOY / "grafana").glob("*.json"))


def load(path: Path) -> dict[str, Any]:
    """The only document of a YAML file."""
    (document,) = load_all(path)
    return document


def load_all(path: Path) -> list[dict[str, Any]]:
    """All documents of a YAML file."""
    return list(yaml.safe_load_all(path.read_text("utf-8")))


# What there is


@dataclass(frozen=True)
class Exposed:
    """What one broker shows: labels by sample name, and paths that answer GET."""

    metrics: Mapping[str, set[str]]
    paths: set[str]


async def look_at_a_broker(directory: Path) -> Exposed:
    tls = server_settings(Authority(directory / "authority").issue("broker"))
    async with running(directory / "data", **tls) as broker:
        namespace = parse_namespace_name("public/default")
        others = ("south", "west")
        for name in others:
            unreachable = ClusterData(broker_service_url="pulsar://127.0.0.1:1")
            await broker.clusters.create(name, unreachable)
        clusters = [broker.settings.cluster_name, *others]
        await broker.namespaces.change(
            namespace, lambda record: record.update({REPLICATION.member: clusters})
        )
        topic = await broker.topics.create(parse_topic_name("persistent://public/default/t"))
        await until(lambda: topic.replication.outbound_stats(0))
        stored_nowhere = parse_topic_name("non-persistent://public/default/t")
        await broker.topics.create_non_persistent(stored_nowhere)
        await topic.create_subscription("s", EARLIEST)
        orders = parse_topic_name("topic://public/default/orders")
        await broker.scalable.create(orders, segments=1, properties={})
        # Its ledgers are not on bookies: what it would tell of them is added as it would be told.
        on_bookies = bookkeeper_metrics(
            LedgerCounters(), BookieCounters(), broker.settings.cluster_name, ensemble_size=2
        )
        metrics = sample_labels(
            [*text_string_to_metric_families(await metrics_text(broker)), *on_bookies]
        )
        paths = {
            route.resource.canonical
            for route in build_rest(broker).router.routes()
            if route.resource is not None and route.method == "GET"
        }
        return Exposed(metrics, paths)


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> Exposed:
    return asyncio.run(look_at_a_broker(tmp_path_factory.mktemp("broker")))


def commands() -> set[str]:
    group = typer.main.get_command(build_commands())
    return set(getattr(group, "commands", {}))


def settings_of(
    file: Path, environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> Settings:
    """As the broker reads them: the file, and the variables that name settings."""
    known = {f"MAGNETAR_{name.upper()}" for name in Settings.model_fields} | OF_THE_COMMAND_LINE
    given = {name: value for name, value in environment.items() if name.startswith("MAGNETAR_")}
    assert set(given) <= known, f"no setting is named {set(given) - known}"
    for name in known:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return load_settings(file)


def require_version(image: str) -> None:
    _, colon, tag = image.rpartition(":")
    assert colon, f"{image} has no version"
    assert re.match(r"v?\d+\.\d+", tag), f"{image} has no version"


def project_version() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return str(project["version"])


def rules() -> list[dict[str, Any]]:
    return [rule for group in load(PROMETHEUS / "rules.yml")["groups"] for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def recorded() -> dict[str, set[str]]:
    """Names that the recording rules make, with the labels that they keep."""
    return {
        rule["record"]: Query.parse(rule["expr"]).labels - {"le"}
        for rule in rules()
        if "record" in rule
    }


def panels(dashboard: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", [])


def dashboard_queries() -> list[tuple[str, str]]:
    """Where an expression is, and the expression."""
    found = []
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text("utf-8"))
        for panel in panels(dashboard):
            found += [(panel["title"], target["expr"]) for target in panel.get("targets", [])]
        found += [(each["name"], each["expr"]) for each in dashboard["annotations"]["list"]]
        for variable in dashboard["templating"]["list"]:
            values = re.match(r"label_values\((\w+), (\w+)\)", str(variable["query"]))
            if values:
                found.append((variable["name"], f"sum by ({values[2]}) ({values[1]})"))
    return found


QUERIES: Final = [
    *((rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()),
    *dashboard_queries(),
]


@pytest.mark.parametrize(("place", "expression"), QUERIES)
def test_every_metric_and_label_that_is_asked_for_exists(
    exposed: Exposed, place: str, expression: str
) -> None:
    there = {**exposed.metrics, **recorded(), **OF_BOOKIES, **OF_PROMETHEUS}
    query = Query.parse(expression)
    assert query.names or query.patterns, f"{place} asks for nothing"
    assert query.names <= set(there), f"{place}: nobody has {query.names - set(there)}"
    for pattern in query.patterns:
        assert any(re.fullmatch(pattern, name) for name in there), f"{place}: nothing is {pattern}"
    labels = OF_EVERY_TARGET.union(*(there[name] for name in query.names))
    assert query.labels <= labels, f"{place}: no metric of it has {query.labels - labels}"


def test_a_query_is_taken_apart() -> None:
    query = Query.parse(
        'sum by (a, b) (rate(x_total{c=~"y|by (z)", d!="e"}[5m])) > 0.5 * v:w:z and on(f) g == 0'
    )
    assert query == Query({"x_total", "v:w:z", "g"}, set(), {"a", "b", "c", "d", "f"})
    assert Query.parse('{__name__=~"a.+b"} > 1') == Query(set(), {"a.+b"}, {"__name__"})


def test_metrics_of_the_broker_come_with_labels(exposed: Exposed) -> None:
    """Else the check of labels would let everything pass, or nothing."""
    assert exposed.metrics["pulsar_subscription_back_log"] >= {"topic", "subscription"}
    bare = {
        name
        for name, labels in exposed.metrics.items()
        if name.startswith("pulsar_") and not labels
    }
    assert bare == SAMPLES_ONLY_LATER


# Prometheus


def anchors() -> set[str]:
    headings = re.findall(r"^#+ (.+)$", OPERATIONS.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("name", sorted(alerts()))
def test_every_alert_says_what_and_leads_to_its_runbook(name: str) -> None:
    alert = alerts()[name]
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert set(alert["annotations"]) == {"summary", "description", "runbook"}
    document, _, anchor = alert["annotations"]["runbook"].partition("#")
    assert ROOT / document == OPERATIONS
    assert anchor == name.lower()
    assert anchor in anchors(), f"docs/operations.md has no section {name}"


def test_thresholds_follow_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(DEPLOY / "compose" / "broker.toml", {}, monkeypatch)
    # Brokers on bookies tell their own size, so that a broker without bookies has no threshold.
    assert "magnetar_bookkeeper_ensemble_size" in alerts()["BookiesTooFew"]["expr"]
    (open_limit,) = re.findall(r"> (\d+)$", alerts()["MagnetarTransactionsNearLimit"]["expr"])
    assert int(open_limit) < settings.transaction_max_open_per_coordinator


@pytest.mark.parametrize("name", sorted(alerts()))
def test_no_alert_fires_for_ever_where_nothing_is_scraped(name: str) -> None:
    """As one on a series that is absent does, where jobs have other names or bookies are not there.

    What was there a while ago and is not any more can be asked for.
    """
    assert "absent" not in alerts()[name]["expr"]


def test_rules_go_by_jobs_that_are_scraped() -> None:
    jobs = {each["job_name"] for each in load(PROMETHEUS / "prometheus.yml")["scrape_configs"]}
    asked = {
        job
        for _, expression in QUERIES
        for jobs_asked in re.findall(r'job=~?"([^"]+)"', expression)
        for job in jobs_asked.split("|")
    }
    assert jobs == {"magnetar", "bookkeeper", "oxia"}
    assert asked == jobs | {"zookeeper"}


def require_tool(name: str) -> None:
    """Skip the test where a tool is not installed."""
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")


def run_tool(name: str, *arguments: str, cwd: Path) -> None:
    """Run a tool; the test is skipped where it is not installed."""
    require_tool(name)
    done = subprocess.run(
        [name, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=TOOL_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "arguments",
    ["check config prometheus.yml", "check rules rules.yml", "test rules rules_test.yml"],
)
def test_promtool_is_content(arguments: str) -> None:
    run_tool("promtool", *arguments.split(), cwd=PROMETHEUS)


def test_prometheus_understands_the_dashboards(tmp_path: Path) -> None:
    made = [
        {"record": f"panel:{number}", "expr": expression.replace("$", "")}
        for number, (_, expression) in enumerate(dashboard_queries())
    ]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": made}]}))
    run_tool("promtool", "check", "rules", "--lint=none", str(file), cwd=tmp_path)


# Grafana


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_a_dashboard_can_be_read(path: Path) -> None:
    dashboard = json.loads(path.read_text("utf-8"))
    held = list(panels(dashboard))
    assert len({panel["id"] for panel in held}) == len(held)
    variables = {each["name"] for each in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard["panels"])))
    assert used <= variables
    taken: set[tuple[int, int]] = set()
    for panel in held:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken, f"{panel['title']} covers another panel"
        assert place["x"] + place["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["targets"]
            assert panel["description"]


def test_dashboard_of_one_broker_asks_for_nothing_that_it_lacks() -> None:
    """It has no bookies, and no server of a metadata store."""
    single = DEPLOY / "grafana" / "magnetar-single.json"
    dashboard = json.loads(single.read_text("utf-8"))
    queries = [target["expr"] for panel in panels(dashboard) for target in panel.get("targets", [])]
    assert len(queries) > 30
    for query in queries:
        assert "bookie" not in query
        assert "bookkeeper" not in query
        assert "zookeeper" not in query


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_a_dashboard_has_each_metric_of_replication(path: Path, exposed: Exposed) -> None:
    dashboard = json.loads(path.read_text("utf-8"))
    queries = [target["expr"] for panel in panels(dashboard) for target in panel.get("targets", [])]
    shown = {name for query in queries for name in re.findall(r"\w+", query)}
    metrics = {name for name in exposed.metrics if "_replicat" in name}
    assert "magnetar_replication_dropped_messages_total" in metrics
    assert {name for name in metrics if not name.endswith("_created")} <= shown


def test_grafana_finds_dashboard_and_prometheus() -> None:
    compose = load(COMPOSE)["services"]
    mounts = dict(mount.split(":")[:2] for mount in compose["grafana"]["volumes"])
    (source,) = load(DEPLOY / "compose/grafana/datasources.yaml")["datasources"]
    (provider,) = load(DEPLOY / "compose/grafana/dashboards.yaml")["providers"]
    assert mounts["../grafana"] == provider["options"]["path"]
    assert source["url"] == "http://prometheus:9090"
    assert "127.0.0.1:9090:9090" in compose["prometheus"]["ports"]


# Compose


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = load(COMPOSE)["services"]
    return found


def brokers() -> dict[str, dict[str, Any]]:
    return {name: each for name, each in services().items() if name.startswith("broker-")}


@pytest.mark.parametrize("name", sorted(services()))
def test_a_service_is_bounded_checked_and_started_again(name: str) -> None:
    service, held = services()[name], load(COMPOSE)
    require_version(service["image"])
    assert service["mem_limit"]
    assert 0 < float(service["cpus"]) <= COMPOSE_CPUS, "Docker refuses more than there are"
    assert service["restart"] in ("unless-stopped", "on-failure")
    assert set(service.get("depends_on", {})) <= set(held["services"])
    if service["restart"] == "unless-stopped":
        assert service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")
    for port in service.get("ports", ()):
        assert port.startswith("127.0.0.1:"), f"{name} is open to the network"
    for mount in service.get("volumes", ()):
        source = mount.split(":")[0]
        if source.startswith("."):
            assert (COMPOSE.parent / source).exists(), f"{source} is not there"
        else:
            assert source in held["volumes"]


def test_three_bookies_three_brokers_and_oxia_with_many_writers() -> None:
    bookies = {name: each for name, each in services().items() if name.startswith("bookie-")}
    assert len(bookies) == len(brokers()) == 3
    for name, bookie in bookies.items():
        assert bookie["environment"]["advertisedAddress"] == name
        assert list(bookie["depends_on"]) == ["bookkeeper-init"]
    version = services()["oxia"]["image"].rpartition(":")[2]
    assert tuple(int(part) for part in version.split(".")) >= (0, 14, 4)


@pytest.mark.parametrize("name", sorted(brokers()))
def test_a_broker_of_compose_has_settings_that_hold(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = brokers()[name]
    command, option, path = service["command"]
    mounts = {mount.split(":")[1]: mount.split(":")[0] for mount in service["volumes"]}
    settings = settings_of(COMPOSE.parent / mounts[path], service["environment"], monkeypatch)
    assert (command in commands(), option) == (True, "--config")
    assert settings.in_cluster
    assert settings.advertised_host == name
    for port in (settings.port, settings.http_port):
        assert f"127.0.0.1:{port}:{port}" in service["ports"]
    # Everybody on this machine may use it, so nobody else may reach it.
    assert settings.insecure
    assert len(service["ports"]) == 2
    assert service["read_only"], "the health check reads where the broker is from /data"
    assert "/data" in service["tmpfs"]
    assert service["healthcheck"]["test"][1:] == ["magnetar", "health"]
    assert int(service["stop_grace_period"].removesuffix("s")) > settings.drain_timeout_s
    assert service["image"] == f"magnetar:{project_version()}"
    store = {
        each["environment"]["metadataServiceUri"]
        for key, each in services().items()
        if key.startswith("book")
    }
    assert store == {settings.bookkeeper_metadata_service_uri}


def test_prometheus_scrapes_what_compose_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(PROMETHEUS / "prometheus.yml")
    targets = {
        each["job_name"]: set(each["static_configs"][0]["targets"])
        for each in config["scrape_configs"]
    }
    assert targets["magnetar"] == {
        f"{name}:{each['environment']['MAGNETAR_HTTP_PORT']}" for name, each in brokers().items()
    }
    assert {target.split(":")[0] for held in targets.values() for target in held} <= set(services())
    assert all((PROMETHEUS / file).is_file() for file in config["rule_files"])


# Kubernetes


def manifests() -> list[dict[str, Any]]:
    kustomization = load(KUBERNETES / "kustomization.yaml")
    return [each for file in kustomization["resources"] for each in load_all(KUBERNETES / file)]


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [each for each in manifests() if each["kind"] == kind]


def stateful_set() -> dict[str, Any]:
    (found,) = of_kind("StatefulSet")
    return found


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = stateful_set()["spec"]["template"]["spec"]
    return spec


def container() -> dict[str, Any]:
    (found,) = pod()["containers"]
    return dict(found)


def test_every_manifest_is_in_the_kustomization() -> None:
    held = load(KUBERNETES / "kustomization.yaml")
    files = {path.name for path in KUBERNETES.glob("*.yaml")}
    assert files == {*held["resources"], "kustomization.yaml"}
    (image,) = held["images"]
    assert (image["name"], image["newTag"]) == (container()["image"], project_version())


@pytest.mark.parametrize("path", [KUBERNETES, MONITORING], ids=lambda path: path.name)
def test_kubectl_builds_it(path: Path) -> None:
    run_tool("kubectl", "kustomize", str(path), cwd=ROOT)


@pytest.mark.parametrize("path", [KUBERNETES, MONITORING], ids=lambda path: path.name)
def test_all_that_is_made_has_the_labels_that_tools_look_for(path: Path) -> None:
    (labels,) = load(path / "kustomization.yaml")["labels"]
    assert labels["pairs"] == {
        "app.kubernetes.io/name": "magnetar",
        "app.kubernetes.io/instance": "magnetar",
        "app.kubernetes.io/version": project_version(),
        "app.kubernetes.io/component": "broker" if path == KUBERNETES else "monitoring",
        "app.kubernetes.io/part-of": "magnetar",
        "app.kubernetes.io/managed-by": "kustomize",
    }
    assert not labels.get("includeSelectors"), "a selector cannot be changed, and a version can"
    assert bool(labels.get("includeTemplates")) is (path == KUBERNETES)


def test_rules_and_dashboard_come_with_the_monitoring() -> None:
    """The operator reads rules from an object of its own, Grafana's sidecar from marked maps."""
    held = load(MONITORING / "kustomization.yaml")
    files = {path.name for path in MONITORING.glob("*.yaml")}
    assert files | {"../../grafana"} == {*held["resources"], "kustomization.yaml"}
    rule = load(MONITORING / "prometheus-rule.yaml")
    assert rule["kind"] == "PrometheusRule"
    wanted = load(PROMETHEUS / "rules.yml")["groups"]
    assert rule["spec"]["groups"] == wanted, "bring the groups of prometheus/rules.yml over"
    boards = load(DEPLOY / "grafana" / "kustomization.yaml")
    (made,) = boards["configMapGenerator"]
    assert sorted(made["files"]) == [path.name for path in DASHBOARDS]
    assert made["options"]["labels"] == {"grafana_dashboard": "1"}
    assert all(path.stat().st_size < APPLIED_BYTES for path in DASHBOARDS)


def test_brokers_of_kubernetes_have_settings_that_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    (made,) = load(KUBERNETES / "kustomization.yaml")["configMapGenerator"]
    (volume,) = (each for each in pod()["volumes"] if each["name"] == "config")
    (mount,) = (each for each in container()["volumeMounts"] if each["name"] == "config")
    assert volume["configMap"]["name"] == made["name"]
    command, option, path = container()["args"]
    assert (command in commands(), option) == (True, "--config")
    assert path in [f"{mount['mountPath']}/{file}" for file in made["files"]]
    environment = {each["name"]: each.get("value", "x") for each in container()["env"]}
    settings = settings_of(KUBERNETES / "broker.toml", environment, monkeypatch)
    ports = {each["name"]: each["containerPort"] for each in container()["ports"]}
    assert settings.in_cluster
    assert not settings.plaintext_ports
    assert ports == {"pulsar-ssl": settings.port_tls, "https": settings.http_port_tls}
    assert (settings.authorization, settings.insecure) == ("on", False)
    assert pod()["terminationGracePeriodSeconds"] > settings.drain_timeout_s
    headless = stateful_set()["spec"]["serviceName"]
    assert settings.advertised_host.startswith(f"$(POD_NAME).{headless}.")


def made_security_files() -> dict[str, str]:
    """The variables of the settings that name files, and the secrets' files that they must be."""
    settings = tomllib.loads((KUBERNETES / "broker.toml").read_text("utf-8"))
    texts = [each for value in settings.values() for each in ([value], value)[type(value) is list]]
    paths = {str(each).removeprefix("file://") for each in texts}
    return {path: Path(path).name for path in paths if path.startswith("/")}


def test_secrets_have_the_files_that_the_settings_name_for_the_broker_alone() -> None:
    (volume,) = (each for each in pod()["volumes"] if each["name"] == "security")
    (mount,) = (each for each in container()["volumeMounts"] if each["name"] == "security")
    assert (mount["readOnly"], volume["projected"]["defaultMode"]) == (True, 0o400)
    # The files belong to root: the broker reads them by its group.
    context = pod()["securityContext"]
    assert context["fsGroup"] == context["runAsGroup"]
    sources = [each["secret"] for each in volume["projected"]["sources"]]
    items = {item["path"] for each in sources for item in each["items"]}
    assert made_security_files() == {f"{mount['mountPath']}/{name}": name for name in items}
    page = OPERATIONS.read_text("utf-8")
    for each in sources:
        (line,) = re.findall(rf"create secret generic {each['name']} (.+)", page)
        given = {word.partition("=")[2].partition("=")[0] for word in line.split()}
        assert given == {item["key"] for item in each["items"]}
        assert not any(kind["kind"] == "Secret" for kind in manifests())


async def test_keys_and_certificates_of_the_page_serve_the_probes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made by its commands, used by the settings of Kubernetes, on a broker that is alone."""
    require_tool("openssl")
    monkeypatch.chdir(tmp_path)
    for command in re.findall(
        r"^((?:magnetar tokens|openssl) .+?[^\\])$", OPERATIONS.read_text("utf-8"), re.M | re.S
    ):
        await asyncio.to_thread(run_command, command.replace("\\\n", ""))
    (tmp_path / "ca.crt").write_bytes((tmp_path / "tls.crt").read_bytes())
    text = (KUBERNETES / "broker.toml").read_text("utf-8")
    for path, name in made_security_files().items():
        text = text.replace(path, str(tmp_path / name))
    kept = tomllib.loads(text)
    settings = {
        name: value
        for name, value in kept.items()
        if not name.startswith(("metadata_", "bookkeeper_", "ledger_", "log_"))
    }
    namespace = load(KUBERNETES / "kustomization.yaml")["namespace"]
    service = f"{namespace}.svc.cluster.local"
    headless = stateful_set()["spec"]["serviceName"]
    settings |= {"port_tls": 0, "http_port_tls": 0}
    async with running(tmp_path / "data", **settings) as broker:
        admin = AdminServer(broker)
        await admin.start()
        try:
            for host in (f"magnetar-0.{headless}.{service}", f"magnetar.{service}"):
                status = await asyncio.to_thread(ask_over_tls, admin, host)
                assert status == {"/metrics": 200, "/admin/v2": 401, **dict.fromkeys(PROBED, 200)}
        finally:
            await admin.stop()
    (endpoint,) = load(MONITORING / "pod-monitor.yaml")["spec"]["podMetricsEndpoints"]
    assert endpoint["tlsConfig"]["serverName"] == f"magnetar.{service}"
    assert endpoint["tlsConfig"]["ca"]["secret"] == {"name": "magnetar-tls", "key": "ca.crt"}


def run_command(command: str) -> None:
    """A line of the page; `magnetar` runs in this process."""
    name, *words = shlex.split(command)
    if name != "magnetar":
        subprocess.run([name, *words], check=True, timeout=TOOL_TIMEOUT_S, capture_output=True)
        return
    words, target = (words[:-2], words[-1]) if words[-2] == ">" else (words, None)
    done = CliRunner().invoke(build_commands(), words)
    assert done.exit_code == 0, done.output
    if target is not None:
        write_secret(Path(target), done.stdout.encode())


def ask_over_tls(admin: AdminServer, host: str) -> dict[str, int]:
    """The status of paths that are asked without credentials, by a name of the certificate."""
    assert admin.port_tls is not None
    found = {}
    context = ssl.create_default_context(cafile="ca.crt")
    for path in ("/metrics", "/admin/v2", *PROBED):
        with (
            socket.create_connection(("127.0.0.1", admin.port_tls), TOOL_TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as connection,
        ):
            connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            found[path] = int(connection.makefile("rb").readline().split()[1])
    return found


def test_probes_ask_paths_that_are_there(exposed: Exposed) -> None:
    asked = {}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        call = container()[probe]["httpGet"]
        assert (call["scheme"], call["port"]) == ("HTTPS", "https")
        assert call["path"] in exposed.paths
        # A kubelet has no token.
        assert access_rules()[("GET", call["path"])] is Need.NOTHING
        asked[probe] = call["path"]
    assert set(asked.values()) == set(PROBED)
    assert asked["readinessProbe"].endswith("/ready")
    assert asked["livenessProbe"] != asked["readinessProbe"], "a restart mends no store"
    annotations = stateful_set()["spec"]["template"]["metadata"]["annotations"]
    (endpoint,) = load(MONITORING / "pod-monitor.yaml")["spec"]["podMetricsEndpoints"]
    ports = {each["name"]: str(each["containerPort"]) for each in container()["ports"]}
    for scheme, path, port in (
        (*(annotations[f"prometheus.io/{name}"] for name in ("scheme", "path", "port")),),
        (endpoint["scheme"], endpoint["path"], ports[endpoint["port"]]),
    ):
        assert (scheme, path in exposed.paths, port) == ("https", True, ports["https"])


def test_everything_selects_the_pods() -> None:
    labels = stateful_set()["spec"]["template"]["metadata"]["labels"]
    assert stateful_set()["spec"]["selector"]["matchLabels"] == labels
    by_name = {each["metadata"]["name"]: each["spec"] for each in of_kind("Service")}
    assert by_name[stateful_set()["spec"]["serviceName"]]["clusterIP"] == "None"
    names = {each["name"] for each in container()["ports"]}
    for service in by_name.values():
        assert service["selector"] == labels
        assert {port["targetPort"] for port in service["ports"]} == names
    (budget,) = of_kind("PodDisruptionBudget")
    (policy,) = of_kind("NetworkPolicy")
    assert budget["spec"]["selector"]["matchLabels"] == labels
    assert budget["spec"]["maxUnavailable"] < stateful_set()["spec"]["replicas"]
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    (rule,) = policy["spec"]["ingress"]
    assert {each["port"] for each in rule["ports"]} == names
    numbers = {each["name"]: each["containerPort"] for each in container()["ports"]}
    for service in by_name.values():
        assert {port["name"]: port["port"] for port in service["ports"]} == numbers


def test_services_set_no_setting() -> None:
    """A service named magnetar would give its pods MAGNETAR_PORT=tcp://..., which is a setting."""
    assert any(each["metadata"]["name"] == "magnetar" for each in of_kind("Service"))
    assert pod()["enableServiceLinks"] is False


def dockerfile() -> dict[str, str]:
    """The last stage of the image: the words of each instruction that occurs once."""
    text = (ROOT / "Dockerfile").read_text("utf-8").replace("\\\n", " ").rpartition("\nFROM ")[2]
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line[:1].isupper()]
    return {name: " ".join(words.split()) for name, words in lines}


def test_image_is_secure_and_exposes_the_ports_that_a_broker_may_have() -> None:
    told = dict(word.split("=", 1) for word in dockerfile()["ENV"].split())
    assert told["MAGNETAR_SECURE"] == "true"
    known = {f"MAGNETAR_{name.upper()}" for name in Settings.model_fields}
    assert {name for name in told if name.startswith("MAGNETAR_")} <= known | {"MAGNETAR_SECURE"}
    ports = {6650, 8080, 6651, 8443}
    assert {int(port) for port in dockerfile()["EXPOSE"].split()} == ports
    defaults = Settings()
    secure = SecurityFiles.of(Path("data")).settings
    tls = {secure["port_tls"], secure["http_port_tls"]}
    assert ports == {defaults.port, defaults.http_port, *tls}
    assert json.loads(dockerfile()["HEALTHCHECK"].partition("CMD ")[2]) == ["magnetar", "health"]
    assert json.loads(dockerfile()["CMD"]) == ["standalone"]


def test_commands_of_the_readme_publish_the_ports_of_the_secure_image() -> None:
    (section,) = re.findall(
        r"^## Container\n(.+?)(?=^## )", (ROOT / "README.md").read_text("utf-8"), re.M | re.S
    )
    runs = re.findall(r"^docker run .+?[^\\]$", section, re.M | re.S)
    published = [re.findall(r"127\.0\.0\.1:(\d+):(\d+)", each) for each in runs]
    assert [bool(" --insecure" in each) for each in runs] == [False, True]
    assert published == [[("6651",) * 2, ("8443",) * 2], [("6650",) * 2, ("8080",) * 2]]
    for each in runs:
        assert {"--read-only", "--cap-drop=ALL", "magnetar:/data"} <= set(each.split())


def test_pods_have_no_rights_and_write_nowhere() -> None:
    context, own = pod()["securityContext"], container()["securityContext"]
    assert f"--uid {context['runAsUser']} " in (ROOT / "Dockerfile").read_text("utf-8")
    assert context["runAsNonRoot"] is True
    assert own["readOnlyRootFilesystem"] is True
    assert own["allowPrivilegeEscalation"] is False
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert container()["resources"]["limits"]["memory"]


# Spark


def test_the_image_of_spark_copies_what_lies_beside_its_file() -> None:
    """The wheel is made there; the build's context is that directory alone."""
    text = (SPARK / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
    copied = [line.split()[1:] for line in text.splitlines() if line.startswith("COPY ")]
    assert copied
    for *sources, target in copied:
        assert target.endswith("/")
        missing = [each for each in sources if not (SPARK / each).exists()]
        assert missing == ["magnetar-*.whl"]
        used = re.findall(rf"{target}(\S+)", text)
        assert set(used) <= set(sources)
    (guide,) = re.findall(r"local://(/\S+)", (ROOT / "docs" / "spark.md").read_text("utf-8"))
    assert guide == copied[0][-1] + "jobs.py"


# The page for operators


def test_commands_settings_and_metrics_of_the_page_exist(exposed: Exposed) -> None:
    text = OPERATIONS.read_text("utf-8")
    named = set(re.findall(r"(?:^|`)magnetar ([a-z]+)", text, re.MULTILINE))
    assert named
    assert named <= commands()
    words = set(re.findall(r"`(\w+)(?: = [^`]+)?`", text))
    told = ("pulsar_", "process_", "magnetar_", "bookie_")
    metrics = {each for each in words if each.startswith(told)}
    assert metrics <= {*exposed.metrics, *OF_BOOKIES}
    prefixes = (
        "ledger_",
        "metadata_store_",
        "bookkeeper_m",
        "bookkeeper_c",
        "drain_",
        "transaction_",
        "entry_",
    )
    settings = {each for each in words if each.startswith(prefixes)}
    assert settings
    assert settings <= set(Settings.model_fields)
