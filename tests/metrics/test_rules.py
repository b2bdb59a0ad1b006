import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from kvstore import KVLayout, KVStore, Namespace
from kvstore.drill.store_process import StoreProcess, StoreSettings, wait_until
from kvstore.http.metric_table import METRICS
from tests.metrics.prometheus import FILES, PAGE, Prometheus, binary, obstacle
from tests.metrics.scrape import read
from tests.redis_server import free_port

pytestmark = pytest.mark.skipif(bool(obstacle()), reason=obstacle())

HERE = Path(__file__).parent
MIB = 1 << 20
SPACE = Namespace("m", KVLayout.opaque(block_bytes=4096, block_tokens=16))
NEED_MORE = ("kvstore_records_", "kvstore_transfers_failures_total")
"""Beginnings of metrics that a store without records, and one whose moves all succeed, does not tell."""


def rules():
    return [rule for group in yaml.safe_load(rules_text())["groups"] for rule in group["rules"]]


def rules_text():
    return (FILES / "rules.yaml").read_text() if FILES.is_dir() else "groups: []"


def alerts():
    return [rule for rule in rules() if "alert" in rule]


def dashboard():
    return json.loads((FILES / "dashboard.json").read_text()) if FILES.is_dir() else {"panels": []}


def expressions():
    return {
        (panel["title"], target["refId"]): target["expr"]
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
    }


def promtool(*words, cwd=None, text=None):
    ended = subprocess.run(
        [binary("promtool"), *words],
        cwd=cwd,
        input=text,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


def test_the_rules_are_valid():
    status, said = promtool("check", "rules", str(FILES / "rules.yaml"))

    assert (status, f"{len(rules())} rules found" in said) == (0, True), said


@pytest.mark.parametrize("name", ["rules_test.yaml", "rules_days_test.yaml"])
def test_each_rule_gives_what_it_should(name, tmp_path):
    for file in (FILES / "rules.yaml", HERE / name):
        shutil.copy(file, tmp_path)

    status, said = promtool("test", "rules", name, cwd=tmp_path)

    assert status == 0, said


def test_each_alert_is_tested_to_fire_and_to_be_silent():
    tested = [
        (test["alertname"], bool(test["exp_alerts"]))
        for name in ("rules_test.yaml", "rules_days_test.yaml")
        for case in yaml.safe_load((HERE / name).read_text())["tests"]
        for test in case.get("alert_rule_test", ())
    ]

    assert set(tested) == {(alert["alert"], fires) for alert in alerts() for fires in (True, False)}


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_each_alert_says_how_bad_it_is_and_where_to_read_what_to_do(alert):
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert alert["annotations"]["runbook"] == f"docs/operations.md#{alert['alert'].lower()}"
    assert f"\n### {alert['alert']}\n" in PAGE.read_text()


def test_the_table_of_faults_says_which_alert_tells_of_each_and_leaves_none_out():
    table = PAGE.read_text().split("\n## Faults\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if "|" in line][
        2:
    ]

    named = {word for *_, told in rows for word in told.split(", ")}

    assert all(len(row) == 4 and all(row) for row in rows)
    assert named - {"none"} == {alert["alert"] for alert in alerts()}


def test_rules_and_dashboard_name_only_metrics_that_there_are():
    told = {metric.name for metric in METRICS}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    texts = [*(rule["expr"] for rule in rules()), *expressions().values()]

    named = {name for text in texts for name in re.findall(r"\bkvstore[_:][\w:]+", text)}

    assert {re.sub("_bucket$", "", name) for name in named} <= told | recorded


@pytest.fixture(scope="module")
def scraped(tmp_path_factory):
    """A store with work under way, and a Prometheus that has scraped it some times."""
    folder, port = tmp_path_factory.mktemp("scraped"), free_port()
    (folder / "disk").mkdir()
    (folder / "prometheus").mkdir()
    settings = StoreSettings(ssd_bytes=16 * MIB, ssd_folder=folder / "disk", http_port=port)
    store = StoreProcess(folder, settings)
    store.start(more=("--prefill-tokens-per-s", "5000"))
    try:
        with KVStore.connect(store.socket_path) as client, Prometheus(folder / "prometheus", port) as server:
            client.open_namespace(SPACE)
            work = iter(range(10_000))

            def has_seen_work():
                chain = SPACE.chain([next(work)] * 64)
                client.put(chain, bytes(4 * 4096))
                client.flush()
                client.demote(chain)
                client.match(chain)
                client.get(chain)
                read(f"http://127.0.0.1:{port}/nothing")
                moved = 'rate(kvstore_transfers_blocks_total{origin="ssd",target="dram"}[1m]) > 0'
                return bool(server.query(moved) and server.query("kvstore:hit_ratio:rate5m"))

            assert wait_until(has_seen_work, 90, pause_s=0.2)
            yield server, f"http://127.0.0.1:{port}/metrics"
    finally:
        store.kill()


def test_prometheus_finds_no_fault_with_what_the_store_tells(scraped):
    _, url = scraped

    status, said = promtool("check", "metrics", text=read(url))

    assert (status, said) == (0, "")


def test_every_expression_of_the_dashboard_has_an_answer(scraped):
    server, _ = scraped
    stand_ins = {"$__rate_interval": "1m", "$job": ".*", "$instance": ".*"}
    unanswered = []
    for (title, ref), expression in expressions().items():
        for name, value in stand_ins.items():
            expression = expression.replace(name, value)
        assert "$" not in expression
        if not server.query(expression) and not any(name in expression for name in NEED_MORE):
            unanswered.append((title, ref))

    assert expressions()
    assert unanswered == []


def test_every_rule_can_be_evaluated_by_a_real_server(scraped):
    server, _ = scraped

    def found():
        groups = server.ask("rules")["groups"]
        return [
            (rule["name"], rule["health"], rule.get("lastError")) for at in groups for rule in at["rules"]
        ]

    assert wait_until(lambda: all(health != "unknown" for _, health, _ in found()), 60, pause_s=0.2)
    assert [rule for rule in found() if rule[1] != "ok"] == []
    assert len(found()) == len(rules())


def test_no_alert_fires_over_a_healthy_store(scraped):
    server, _ = scraped

    assert server.query('ALERTS{alertstate="firing"}') == []
