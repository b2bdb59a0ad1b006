"""What the chart renders: valid objects, a configuration that the store accepts, memory that is enough."""

import functools
import re
import shutil
from pathlib import Path

import pytest
import yaml

from kvstore.config import load_config
from tests.helm.chart import CHART, helm, named, objects, pod_specs, render, render_text, store_container
from tests.helm.chart import toml_text as toml
from tests.helm.value_sets import VALUE_SETS

validation = pytest.importorskip("kubernetes_validate.utils", reason="there is no kubernetes-validate")

GIB = 1 << 30
MIB = 1 << 20
VERSIONS = ["1.28", "1.33", validation.latest_version()]
WITHOUT_SCHEMA = {"Certificate", "PodMonitor", "ServiceMonitor", "PrometheusRule"}

sets = pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS)


@pytest.fixture
def validate(monkeypatch):
    # It reads megabytes of definitions again for every object.
    monkeypatch.setattr(validation, "schema_contents", functools.cache(validation.schema_contents))
    return validation.validate


def test_lint_finds_nothing_but_the_missing_icon():
    report = helm.lint(CHART, strict=True)

    assert report["errors"] == []
    assert [at["error"] for at in report["messages"]] == ["icon is recommended"]


@sets
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(values, version, validate):
    found = [at for at in render(values) if at["kind"] not in WITHOUT_SCHEMA]

    for at in found:
        validate(at, version, strict=True)
    assert len(found) >= 3


@sets
def test_the_patched_pod_is_valid(values, validate):
    specs = {
        title: spec for title, spec in pod_specs(render(values)).items() if title.startswith("ConfigMap")
    }

    for spec in specs.values():
        spec["containers"][0]["image"] = "engine"
        validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec}, "1.33", strict=True
        )
    assert len(specs) == (values.get("mode") != "daemonset")


@sets
def test_names_are_unique_and_selectors_find_their_pods(values):
    found = render(values)
    names = [(at["kind"], at["metadata"]["name"]) for at in found]

    assert len(set(names)) == len(names)
    for at in found:
        if at["kind"] in {"Deployment", "DaemonSet", "StatefulSet"}:
            labels = at["spec"]["template"]["metadata"]["labels"]
            assert at["spec"]["selector"]["matchLabels"].items() <= labels.items()
    labels_of_pods = [
        at["metadata"]["labels"] if at["kind"] == "Pod" else at["spec"]["template"]["metadata"]["labels"]
        for at in found
        if at["kind"] == "Pod" or "template" in at.get("spec", {})
    ]
    for service in (at for at in found if at["kind"] == "Service"):
        assert any(service["spec"]["selector"].items() <= labels.items() for labels in labels_of_pods)


@sets
def test_the_store_accepts_its_configuration(values, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(toml(render(values)))

    config = load_config(str(path))

    assert str(config.server.socket) == "/run/kvstore/kvstore.sock"
    assert (config.http is not None) == values.get("http", {}).get("enabled", False)
    assert (config.ssd is not None) == values.get("ssd", {}).get("enabled", False)
    assert (config.remote is None) == (values.get("redis", {}).get("mode") == "none")
    assert (config.encryption is not None) == ("encryption" in values)


def test_values_of_every_kind_arrive_in_the_configuration(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(toml(render(VALUE_SETS["replicas"])))

    config = load_config(str(path))

    assert config.store.timeout_s == 0.1
    assert config.store.write_mode == "back"
    assert config.dram.capacity_bytes == 64 * GIB
    assert config.ssd.capacity_bytes == 800 * GIB
    assert config.remote.ttl_s == 86400
    assert config.http.public_models == ("tiny", 'a "quoted" <model>')


@sets
def test_files_that_the_configuration_names_are_mounted(values):
    found = render(values)
    places = re.findall(r'"(?:file:)?(/etc/kvstore/[^"]+)"', toml(found))

    for spec in pod_specs(found).values():
        containers = [*spec.get("initContainers", []), *spec["containers"]]
        if not any(at["name"] == "kvstore" for at in containers):
            continue
        volumes = {at["name"]: at for at in spec["volumes"]}
        files = set()
        for mount in store_container(spec)["volumeMounts"]:
            secret = volumes[mount["name"]].get("secret", {})
            files |= {f"{mount['mountPath']}/{item['path']}" for item in secret.get("items", [])}
            files |= {mount["mountPath"]} if secret else set()
        assert files >= set(places)


@pytest.mark.parametrize(
    ("values", "wanted_bytes"),
    [
        ({}, (1024 + 64 + 256 + 768) * MIB),
        ({"config": {"tiers": {"dram": {"capacity_bytes": 4294967296}}}}, (4096 + 64 + 256 + 768) * MIB),
        ({"config": {"store": {"records_bytes": "1 GiB"}}}, (1024 + 64 + 1024 + 768) * MIB),
        ({"ssd": {"enabled": True}}, (1024 + 64 + 768) * MIB),
        ({"resources": {"limits": {"memory": "3Gi"}}}, 3072 * MIB),
    ],
    ids=["defaults", "integer", "records", "ssd", "given"],
)
def test_memory_covers_arena_staging_records_and_process(values, wanted_bytes):
    limits = store_container(pod_specs(render(values))["Pod/demo-kvstore-test"])["resources"]["limits"]

    units = {"Gi": GIB, "": 1}
    number, unit = re.fullmatch(r"(\d+)(\w*)", limits["memory"]).groups()
    assert int(number) * units[unit] == wanted_bytes


def test_the_ssds_volume_holds_slab_index_and_records():
    found = render({"ssd": {"enabled": True, "capacityBytes": "100GiB"}})
    spec = pod_specs(found)["Pod/demo-kvstore-test"]
    (volume,) = [at for at in spec["volumes"] if at["name"] == "kvstore-ssd"]

    assert int(volume["emptyDir"]["sizeLimit"]) == 110 * GIB + 512 * MIB
    requests = store_container(spec)["resources"]["requests"]
    assert requests["ephemeral-storage"] == volume["emptyDir"]["sizeLimit"]


def test_a_native_sidecar_starts_before_the_replica_and_neither_waits_for_the_other():
    deployment = named(render(VALUE_SETS["replicas"]), "Deployment", "demo-kvstore-replica")
    (sidecar,) = deployment["spec"]["template"]["spec"]["initContainers"]

    assert sidecar["restartPolicy"] == "Always"
    assert "startupProbe" not in sidecar
    assert "readinessProbe" not in sidecar
    assert sidecar["lifecycle"]["preStop"]["exec"]["command"][:2] == ["kvstore", "flush"]


def test_an_ordinary_container_stays_while_the_replica_ends():
    specs = pod_specs(render({"sidecar": {"kind": "container", "preStopSeconds": 7}}))
    patch = specs["ConfigMap/demo-kvstore-sidecar"]

    assert "initContainers" not in patch
    assert [at["name"] for at in patch["containers"]] == ["engine", "kvstore"]
    assert store_container(patch)["lifecycle"]["preStop"]["exec"]["command"][2].startswith("sleep 7;")


def test_traces_go_to_the_collector_that_is_named_and_without_one_nowhere():
    def variables(values):
        spec = pod_specs(render(values))["ConfigMap/demo-kvstore-sidecar"]
        env = store_container(spec).get("env", [])
        return {item["name"]: item.get("value") for item in env}

    traced = variables({"tracing": {"endpoint": "http://collector:4318", "sampleRatio": 0.05}})
    plain = variables({})

    assert traced["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://collector:4318"
    assert traced["OTEL_TRACES_SAMPLER"] == "parentbased_traceidratio"
    assert traced["OTEL_TRACES_SAMPLER_ARG"] == "0.05"
    assert not any(name.startswith("OTEL_") for name in plain)


def test_events_are_for_clients_with_keys_or_for_those_whom_the_network_lets_in():
    (node,) = [
        at for name, at in pod_specs(render(VALUE_SETS["daemonset"])).items() if name.startswith("Daemon")
    ]
    guarded = store_container(node)
    (volume,) = [at for at in node["volumes"] if at["name"] == "kvstore-events"]
    found = render(VALUE_SETS["replicas"])
    unguarded = store_container(pod_specs(found)["Deployment/demo-kvstore-replica"])
    policy = named(found, "NetworkPolicy", "demo-kvstore-replica")

    assert guarded["args"][guarded["args"].index("--events-keys") + 1] == "/etc/kvstore/events"
    paths = {item["path"] for item in volume["secret"]["items"]}
    assert paths == {"server.key_secret", "clients/router.key", "clients/indexer.key"}
    assert "--events-open" in unguarded["args"]
    assert {"kvstore-events", "kvstore-replay"} <= {port["name"] for port in unguarded["ports"]}
    (rule,) = [at for at in policy["spec"]["ingress"] if {"port": 5557, "protocol": "TCP"} in at["ports"]]
    assert rule["from"] == [{"podSelector": {"matchLabels": {"app": "router"}}}]
    assert not any(
        "--events" in store_container(at)["args"] for at in [pod_specs(render())["Pod/demo-kvstore-test"]]
    )


def test_the_kubelet_asks_over_http_only_where_it_gets_in():
    def probe(name):
        return store_container(pod_specs(render(VALUE_SETS[name]))["Pod/demo-kvstore-test"])["livenessProbe"]

    assert probe("replicas")["httpGet"] == {"path": "/healthz", "port": 8470, "scheme": "HTTPS"}
    assert "exec" in probe("container")  # on loopback
    assert "exec" in probe("secrets")  # a client certificate is required
    assert "exec" in probe("defaults")


def test_a_changed_configuration_replaces_the_pods_and_an_equal_one_does_not():
    def mark(**store):
        values = {"mode": "daemonset", "config": {"store": store}}
        daemonset = named(render(values), "DaemonSet", "demo-kvstore")
        return daemonset["spec"]["template"]["metadata"]["annotations"]["checksum/config"]

    assert mark(lease_s=5) == mark(lease_s=5) != mark(lease_s=6)


def test_only_stores_reach_the_bundled_redis():
    found = render()
    policy = named(found, "NetworkPolicy", "demo-kvstore-redis")["spec"]

    (rule,) = policy["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": {"kvstore-store": "demo-kvstore"}}}]
    assert policy["egress"] == []
    assert named(found, "Pod", "demo-kvstore-test")["metadata"]["labels"]["kvstore-store"] == "demo-kvstore"


def test_a_replicas_policy_admits_its_own_ports_and_the_stores():
    policy = named(render(VALUE_SETS["replicas"]), "NetworkPolicy", "demo-kvstore-replica")["spec"]

    served, store, _ = policy["ingress"]
    assert served["ports"] == [{"port": 8000, "protocol": "TCP"}]
    assert served["from"] == [{"namespaceSelector": {"matchLabels": {"team": "web"}}}]
    assert store["ports"] == [{"port": 8470, "protocol": "TCP"}]
    assert store["from"] == [{"podSelector": {}}]


def test_prometheus_scrapes_with_a_key_and_checks_the_certificate():
    monitor = named(render(VALUE_SETS["replicas"]), "PodMonitor", "demo-kvstore")

    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    sidecar = store_container(pod_specs(render(VALUE_SETS["replicas"]))["Deployment/demo-kvstore-replica"])
    assert endpoint["port"] in {at["name"] for at in sidecar["ports"]}
    assert endpoint["authorization"] == {"credentials": {"name": "kv-admin", "key": "key"}}
    assert endpoint["tlsConfig"]["ca"] == {"secret": {"name": "demo-kvstore-http-tls", "key": "ca.crt"}}
    certificate = named(render(VALUE_SETS["replicas"]), "Certificate", "demo-kvstore-http-tls")
    assert endpoint["tlsConfig"]["serverName"] in certificate["spec"]["dnsNames"]


def test_a_nodes_service_leads_to_the_store_of_the_clients_node():
    service = named(render(VALUE_SETS["daemonset"]), "Service", "demo-kvstore")

    assert service["spec"]["internalTrafficPolicy"] == "Local"
    assert service["spec"]["selector"]["app.kubernetes.io/component"] == "node"


def with_files(tmp_path: Path, **files: str):
    folder = shutil.copytree(CHART, tmp_path / "chart")
    shutil.rmtree(folder / "files", ignore_errors=True)
    (folder / "files").mkdir()
    for name, text in files.items():
        (folder / "files" / name.replace("_", ".")).write_text(text)
    with helm.Chart.load(folder) as loaded:
        values = {"metrics": {"prometheusRule": {"enabled": True}, "dashboards": {"enabled": True}}}
        return objects(loaded.render(values, name="demo", namespace="prod"))


def test_rules_and_dashboards_come_from_the_charts_files(tmp_path):
    rule = '{alert: Down, expr: up == 0, annotations: {text: "{{ $labels.pod }}"}}'
    rules = f"groups:\n- name: kv\n  rules:\n  - {rule}\n"

    found = with_files(tmp_path, rules_yaml=rules, overview_json='{"title": "kv"}')

    assert named(found, "PrometheusRule", "demo-kvstore")["spec"] == yaml.safe_load(rules)
    dashboards = named(found, "ConfigMap", "demo-kvstore-dashboards")
    assert dashboards["data"] == {"overview.json": '{"title": "kv"}'}
    assert dashboards["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_rules_that_are_not_there_are_an_error_and_not_silence(tmp_path):
    with pytest.raises(helm.HelmError, match="folder files/ has no rules"):
        with_files(tmp_path)


PARENT = """
{{- $store := .Subcharts.kvstore }}
apiVersion: v1
kind: Pod
metadata:
  name: own
  labels: {{- include "kvstore.podLabels" $store | nindent 4 }}
spec:
  securityContext: {{- include "kvstore.podSecurity" $store | nindent 4 }}
  initContainers: {{- include "kvstore.initContainers" $store | nindent 4 }}
  containers:
    - name: engine
      image: engine
      env: {{- include "kvstore.replicaEnv" $store | nindent 8 }}
      volumeMounts: {{- include "kvstore.replicaMounts" $store | nindent 8 }}
  volumes: {{- include "kvstore.volumes" $store | nindent 4 }}
"""


def test_another_chart_includes_the_sidecar(tmp_path, validate):
    parent = tmp_path / "parent"
    (parent / "templates").mkdir(parents=True)
    (parent / "Chart.yaml").write_text("apiVersion: v2\nname: parent\nversion: 1.0.0\n")
    (parent / "templates" / "pod.yaml").write_text(PARENT)
    shutil.copytree(CHART, parent / "charts" / "kvstore")

    with helm.Chart.load(parent) as loaded:
        values = {"kvstore": {"enabled": True, "runAsUser": 4242}, "global": {"region": "x"}}
        found = objects(loaded.render(values, name="demo", namespace="prod"))

    pod = named(found, "Pod", "own")
    validate(pod, "1.33", strict=True)
    assert store_container(pod["spec"])["securityContext"]["runAsUser"] == 4242
    assert {"name": "kvstore-config", "configMap": {"name": "demo-kvstore"}} in pod["spec"]["volumes"]


@sets
def test_the_notes_are_for_this_way_to_run_it(values):
    notes = render_text(values)["NOTES.txt"]

    assert "helm test demo -n prod" in notes
    assert ("patch deployment" in notes) == ("replica" not in values and values.get("mode") != "daemonset")
