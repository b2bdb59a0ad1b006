"""A release's life, as Helm performs it against an API server."""

import pytest

from tests.helm.api_server import ApiServer
from tests.helm.chart import CHART, helm, pod_specs, render, store_container
from tests.helm.value_sets import VALUE_SETS


@pytest.fixture
def cluster():
    with ApiServer() as server:
        yield server


@pytest.fixture
def releases(cluster):
    with helm.Config(
        kubeconfig_content=cluster.kubeconfig, namespace="prod", storage_driver="memory"
    ) as config:
        yield config


def password(cluster):
    return cluster.objects["Secret", "demo-kvstore-redis"]["data"]["password"]


def lease_s(cluster):
    return cluster.objects["ConfigMap", "demo-kvstore"]["data"]["config.toml"].count("lease_s = 7")


@pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS)
def test_an_installation_makes_what_is_rendered_and_its_end_removes_it(releases, cluster, values):
    installed = releases.install(CHART, "demo", values)
    made = {(kind, name) for kind, name in cluster.objects if kind != "Pod"}
    ended = releases.uninstall("demo")

    rendered = {(at["kind"], at["metadata"]["name"]) for at in render(values) if at["kind"] != "Pod"}
    assert installed["status"] == "deployed"
    assert made == rendered
    assert ended["release"]["status"] == "uninstalled"
    assert cluster.objects == {}
    assert cluster.refused == []


def test_an_upgrade_keeps_the_password_and_a_rollback_brings_the_old_values_back(releases, cluster):
    releases.install(CHART, "demo", {})
    first = password(cluster)

    releases.upgrade(CHART, "demo", {"config": {"store": {"lease_s": 7}}})
    upgraded = password(cluster), lease_s(cluster)
    releases.rollback("demo", version=1)
    rolled_back = password(cluster), lease_s(cluster)

    assert upgraded == (first, 1)
    assert rolled_back == (first, 0)
    assert [at["revision"] for at in releases.history("demo")] == [1, 2, 3]


def test_an_upgrade_to_another_mode_removes_what_is_no_longer_wanted(releases, cluster):
    releases.install(CHART, "demo", VALUE_SETS["replicas"])
    releases.upgrade(CHART, "demo", VALUE_SETS["daemonset"], reset_values=True)

    kinds = {kind for kind, _ in cluster.objects}
    assert "DaemonSet" in kinds
    assert kinds.isdisjoint({"Deployment", "StatefulSet", "PodDisruptionBudget", "PodMonitor"})


def test_values_that_are_refused_leave_the_release_as_it_was(releases, cluster):
    releases.install(CHART, "demo", {})
    before = dict(cluster.objects)

    with pytest.raises(helm.HelmError, match=r"redis\.external\.url is required"):
        releases.upgrade(CHART, "demo", {"redis": {"mode": "external"}})

    assert cluster.objects == before


def test_an_upgrade_of_the_image_replaces_the_stores_image_alone(releases, cluster):
    releases.install(CHART, "demo", VALUE_SETS["replicas"])
    releases.upgrade(CHART, "demo", {"image": {"digest": "sha256:" + "1" * 64}}, reuse_values=True)

    spec = pod_specs(list(cluster.objects.values()))["Deployment/demo-kvstore-replica"]
    assert store_container(spec)["image"].endswith("@sha256:" + "1" * 64)
    assert spec["containers"][0]["image"] == "registry.example/engine:1"
