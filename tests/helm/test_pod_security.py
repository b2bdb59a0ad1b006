"""Pods under the Pod Security standards: each control of the profiles baseline and restricted."""

import pytest

from tests.helm.chart import pod_specs, render
from tests.helm.value_sets import VALUE_SETS

RESTRICTED_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
ADDABLE = {"NET_BIND_SERVICE"}
SAFE_SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
}
SELINUX_TYPES = {None, "", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}


def breaches(spec):
    """Yield what of a pod's spec the restricted profile forbids."""
    yield from pod_breaches(spec)
    kinds = ("initContainers", "containers", "ephemeralContainers")
    for container in (at for kind in kinds for at in spec.get(kind, [])):
        for text in container_breaches(container, spec.get("securityContext", {})):
            yield f"{container['name']}: {text}"


def pod_breaches(spec):
    pod = spec.get("securityContext", {})
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield name
    for volume in spec.get("volumes", []):
        for kind in volume.keys() - {"name"} - RESTRICTED_VOLUMES:
            yield f"volume {volume['name']}: {kind}"
    for sysctl in pod.get("sysctls", []):
        if sysctl["name"] not in SAFE_SYSCTLS:
            yield f"sysctl {sysctl['name']}"
    yield from shared_breaches(pod)


def container_breaches(container, pod):
    own = container.get("securityContext", {})
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation"
    capabilities = own.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", []):
        yield "capabilities are not dropped"
    yield from (f"capability {name}" for name in set(capabilities.get("add", [])) - ADDABLE)
    if own.get("procMount", "Default") != "Default":
        yield "procMount"
    if not own.get("runAsNonRoot", pod.get("runAsNonRoot")):
        yield "runAsNonRoot"
    if own.get("seccompProfile", pod.get("seccompProfile", {})).get("type") not in {
        "RuntimeDefault",
        "Localhost",
    }:
        yield "seccompProfile"
    yield from (f"hostPort {at['hostPort']}" for at in container.get("ports", []) if at.get("hostPort"))
    for name, handler in (container.get("lifecycle") or {}).items():
        yield from (f"{name}: host" for kind in handler.values() if "host" in kind)
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        if any(isinstance(kind, dict) and "host" in kind for kind in container.get(name, {}).values()):
            yield f"{name}: host"
    yield from shared_breaches(own)


def shared_breaches(context):
    if context.get("runAsUser") == 0:
        yield "runAsUser 0"
    if context.get("seccompProfile", {}).get("type") == "Unconfined":
        yield "seccompProfile Unconfined"
    if context.get("appArmorProfile", {}).get("type") == "Unconfined":
        yield "appArmorProfile"
    selinux = context.get("seLinuxOptions", {})
    if selinux.get("type") not in SELINUX_TYPES or selinux.get("user") or selinux.get("role"):
        yield "seLinuxOptions"
    if (context.get("windowsOptions") or {}).get("hostProcess"):
        yield "hostProcess"


SIDECARS = {name: values for name, values in VALUE_SETS.items() if values.get("mode") != "daemonset"}


@pytest.mark.parametrize("values", SIDECARS.values(), ids=SIDECARS)
def test_every_pod_passes_the_restricted_profile(values):
    specs = pod_specs(render(values))
    # The replica's container in the patch brings its own settings; the patch adds user and mounts.
    for title, spec in specs.items():
        if title.startswith("ConfigMap"):
            spec["containers"] = [at for at in spec["containers"] if at["name"] == "kvstore"]

    assert {title: list(breaches(spec)) for title, spec in specs.items()} == {title: [] for title in specs}


def test_one_store_per_node_breaches_it_by_folders_of_the_node_alone():
    values = VALUE_SETS["daemonset"] | {"daemonset": {"prepareFolder": False}}
    spec = pod_specs(render(values))["DaemonSet/demo-kvstore"]

    assert list(breaches(spec)) == ["volume kvstore-socket: hostPath", "volume kvstore-ssd: hostPath"]


def test_preparing_the_nodes_folder_takes_root_with_one_capability():
    spec = pod_specs(render(VALUE_SETS["daemonset"]))["DaemonSet/demo-kvstore"]

    assert [text for text in breaches(spec) if "volume" not in text] == [
        "prepare-folder: capability CHOWN",
        "prepare-folder: runAsNonRoot",
        "prepare-folder: runAsUser 0",
    ]


@pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS)
def test_root_file_systems_are_read_only_and_no_token_is_mounted(values):
    for title, spec in pod_specs(render(values)).items():
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            if not (title.startswith("ConfigMap") and container["name"] in {"engine", "vllm"}):
                assert container["securityContext"]["readOnlyRootFilesystem"] is True
        if not title.startswith("ConfigMap"):
            assert spec["automountServiceAccountToken"] is False


@pytest.mark.parametrize(
    ("spec", "breach"),
    [
        ({"hostIPC": True}, "hostIPC"),
        ({"volumes": [{"name": "v", "hostPath": {}}]}, "volume v: hostPath"),
        ({"containers": [{"name": "c", "securityContext": {"privileged": True}}]}, "c: privileged"),
        ({"containers": [{"name": "c", "ports": [{"hostPort": 1}]}]}, "c: hostPort 1"),
        ({"containers": [{"name": "c"}]}, "c: capabilities are not dropped"),
        ({"initContainers": [{"name": "c"}]}, "c: seccompProfile"),
    ],
)
def test_the_check_finds_breaches(spec, breach):
    assert breach in list(breaches(spec))
