"""Rolling updates under load of what the chart renders, as kubelets do them, with real stores."""

import logging
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kvstore import KVStore, MissReason
from kvstore.drill.redis_server import free_port, redis_obstacle
from kvstore.drill.store_process import wait_until
from tests.helm.chart import render
from tests.helm.installed import PASSWORD, Installed
from tests.helm.kubelet import Place, Pod, template_of
from tests.helm.replicas import PATIENT, Ledger, Replica, missing
from tests.metrics.vllm_events import END_OF_REPLAY, Subscriber
from tests.tiers.certificates import Authority

logger = logging.getLogger(__name__)

MIB = 1 << 20
LATE_S = 20.0
"""How much later than its deadline a call may return on a busy machine; one that hangs does not."""

DAEMONSET = {
    "mode": "daemonset",
    "image": {"tag": "1"},
    "daemonset": {"prepareFolder": False},
    "config": {
        "tiers": {
            "dram": {"capacity_bytes": "32MiB", "staging_bytes": "1MiB"},
            # A busy machine may be slow: no write is given up for it.
            "remote": {"timeout_s": 30},
        },
        "store": {"lease_s": 30},
    },
    "ssd": {"enabled": True, "capacityBytes": "64MiB", "volume": "hostPath"},
    "redis": {"bundled": {"maxmemoryBytes": "256MiB"}},
}

SIDECAR = DAEMONSET | {
    "mode": "sidecar",
    "sidecar": {"gateReadiness": True},
    "replica": {"enabled": True, "container": {"image": "engine:1"}},
    "ssd": {"enabled": False},
    "http": {"enabled": True, "apiKeys": {"existingSecret": "keys"}, "tls": {"existingSecret": "tls"}},
    "events": {"enabled": True, "topic": "kv@$(KVSTORE_POD_IP)@rollout", "open": True},
}

pytestmark = [
    pytest.mark.skipif(bool(redis_obstacle()), reason=redis_obstacle()),
    # Processes start one after the other, on a machine that may be busy.
    pytest.mark.timeout(600),
]


def changed(values, **sections):
    """Return values with other sections of the configuration, and another image."""
    return values | {"config": values["config"] | sections, "image": {"tag": "2"}}


class Node:
    """A machine of the cluster: the folder that is its disk, and the pod that runs on it."""

    def __init__(self, cluster, number):
        self.number = number
        self.place = Place(
            disk=cluster.folder / f"n{number}",
            addresses={
                "demo-kvstore-redis:6379": f"127.0.0.1:{cluster.redis_port}",
                "0.0.0.0:8470": f"127.0.0.1:{free_port()}",
                "*:5557": f"127.0.0.1:{free_port()}",
                "*:5558": f"127.0.0.1:{free_port()}",
            },
            secrets=cluster.secrets,
        )
        for path in ("run/kvstore", "var/lib/kvstore"):
            (self.place.disk / path).mkdir(parents=True)
        self.pod = None
        self.ended = []
        self.acknowledged = []

    @property
    def socket_folder(self):
        """What lies in the folder that the node's pods share."""
        return sorted(path.name for path in self.pod.socket_path.parent.iterdir())


class Cluster:
    """Nodes, one Redis that their stores share, and the controller that replaces pods."""

    def __init__(self, folder, redis_port, secrets):
        self.folder = folder
        self.redis_port = redis_port
        self.secrets = secrets
        self.ledger = Ledger()
        self.replicas = []
        self.nodes = []
        self._num_pods = 0

    def new_pod(self, node, values):
        """Make a pod of a release's values on a node; nothing runs yet."""
        self._num_pods += 1
        folder = self.folder / f"p{self._num_pods}"
        folder.mkdir()
        found = render(values)
        return Pod(found, template_of(found), node.place, folder)

    def add_node(self, values):
        """Start a pod on one more node."""
        node = Node(self, len(self.nodes))
        node.pod = self.new_pod(node, values)
        self.nodes.append(node)
        node.pod.start()
        return node

    def install(self, values, num_nodes):
        """Start a pod on each node and wait until all are ready."""
        for _ in range(num_nodes):
            self.add_node(values)
        assert all(node.pod.becomes_ready() for node in self.nodes), [node.pod.log for node in self.nodes]

    def load(self, per_node):
        """Have replicas work on each node, and wait until each has flushed something."""
        for _ in range(per_node):
            for node in self.nodes:
                self.add_replica(node)

    def add_replica(self, node):
        number = len(self.replicas) + 1
        replica = Replica(node.number, node.pod.socket_path, number, self.ledger)
        self.replicas.append(replica)
        replica.start()
        assert replica.has_begun.wait(120)

    def roll_out(self, values, nodes=None):
        """Replace pods node by node while the new one gets ready; yields each node that was replaced."""
        for node in nodes or self.nodes:
            node.ended.append(node.pod.end())
            node.acknowledged = self.ledger.of(node.number)
            assert node.socket_folder == []
            node.pod = self.new_pod(node, values)
            node.pod.start()
            if not node.pod.becomes_ready():
                return
            self.wait_served(node)
            yield node

    def wait_served(self, node):
        """Wait until the replicas of a node, which nobody has told of anything, are served again."""
        for replica in self.replicas:
            hits = replica.calls["fetch: hit"]
            back = lambda replica=replica, hits=hits: replica.calls["fetch: hit"] > hits  # noqa: E731
            assert replica.node != node.number or wait_until(back, 60)

    def end_load(self):
        for replica in self.replicas:
            replica.end()

    def summary(self):
        """What the replicas saw, in one dict."""
        return {
            "calls": sum((replica.calls for replica in self.replicas), Counter()),
            "durable": len(self.ledger.durable()),
            "longest_late_s": max(replica.longest_late_s for replica in self.replicas),
            "ended": [ended for node in self.nodes for ended in node.ended],
        }


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    release = Installed(tmp_path_factory.mktemp("k"), {"redis": DAEMONSET["redis"]})
    with release.redis():
        yield release.redis_port


@pytest.fixture(scope="module")
def secrets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("s")
    certificate = Authority(folder / "ca").sign("store", alternative="IP:127.0.0.1")
    program = Path(sys.executable).parent / "kvstore"
    subprocess.run([program, "keys", "init", folder / "keys"], check=True, capture_output=True)
    return {
        "demo-kvstore-redis": {"password": f"{PASSWORD}\n"},
        "keys": {"keys": (folder / "keys").read_text()},
        "tls": {"tls.crt": certificate.cert.read_text(), "tls.key": certificate.key.read_text()},
    }


@pytest.fixture
def cluster(tmp_path_factory, redis, secrets):
    made = Cluster(tmp_path_factory.mktemp("c"), redis, secrets)
    yield made
    made.end_load()
    for node in made.nodes:
        node.pod.kill()


def was_orderly(ended):
    return (ended.hook_status, ended.status, ended.was_killed) == (0, 0, False)


def assert_nobody_was_harmed(cluster):
    """No wrong byte, no call that raised or came late, no miss but for reasons that an update explains."""
    assert [failure for replica in cluster.replicas for failure in replica.failures] == []
    assert max(replica.longest_late_s for replica in cluster.replicas) < LATE_S
    reasons = {reason for replica in cluster.replicas for reason in replica.known_misses}
    assert reasons <= {MissReason.UNAVAILABLE, MissReason.TIMED_OUT}


def test_a_rolling_update_of_a_daemonset_and_its_rollback_lose_nothing(cluster):
    new = changed(DAEMONSET, tiers=DAEMONSET["config"]["tiers"] | {"dram": {"capacity_bytes": "24MiB"}})
    cluster.install(DAEMONSET, num_nodes=3)
    before = cluster.nodes[0].pod
    cluster.load(per_node=2)

    for values, dram_bytes in ((new, 24 * MIB), (DAEMONSET, 32 * MIB)):
        replaced = 0
        for node in cluster.roll_out(values):
            replaced += 1
            assert was_orderly(node.ended[-1]), node.ended[-1]
            assert node.socket_folder == ["kvstore.sock"]
            # It was called ready: it serves what its predecessor had acknowledged.
            assert missing(node.pod.socket_path, node.acknowledged) == []
            assert capacity_bytes(node.pod) == dram_bytes
        assert replaced == 3
        assert (node.pod.annotations == before.annotations) is (values is DAEMONSET)
    cluster.end_load()
    logger.info("%s", cluster.summary())

    assert_nobody_was_harmed(cluster)
    for replica in cluster.replicas:
        assert replica.client_stats.server_restarts == 2
        assert replica.calls["fetch: unavailable"] + replica.calls["put: unavailable"] > 0
    everything = cluster.ledger.durable()
    assert len(everything) > 100
    assert [missing(node.pod.socket_path, everything) for node in cluster.nodes] == [[], [], []]


def test_a_rolling_update_of_sidecars_loses_nothing_that_went_to_redis(cluster):
    new = changed(SIDECAR, store={"lease_s": 20})
    cluster.install(SIDECAR, num_nodes=2)
    cluster.load(per_node=1)

    for old, replica in zip(list(cluster.nodes), list(cluster.replicas), strict=True):
        # The strategy of the chart: one more pod, none less.
        fresh = cluster.add_node(new)
        assert fresh.pod.becomes_ready(), fresh.pod.log
        cluster.add_replica(fresh)
        old.ended.append(old.pod.end(end_replica=replica.end))
        assert was_orderly(old.ended[-1]), old.ended[-1]
        assert missing(fresh.pod.socket_path, cluster.ledger.of(old.number)) == []
    cluster.end_load()
    logger.info("%s", cluster.summary())

    assert_nobody_was_harmed(cluster)
    assert [replica.client_stats.server_restarts for replica in cluster.replicas] == [0] * 4
    everything = cluster.ledger.durable()
    assert [missing(node.pod.socket_path, everything) for node in cluster.nodes[2:]] == [[], []]
    for node in cluster.nodes[2:]:
        with Subscriber(node.pod.here("tcp://*:5557"), node.pod.here("tcp://*:5558")) as router:
            topics = {topic for topic, number, _ in router.frames(0) if number != END_OF_REPLAY}
        assert topics == {b"kv@127.0.0.1@rollout"}


def test_a_rollout_whose_pod_never_gets_ready_stops_and_can_be_taken_back(cluster):
    too_large = changed(DAEMONSET, tiers=DAEMONSET["config"]["tiers"] | {"dram": {"capacity_bytes": "8TiB"}})
    cluster.install(DAEMONSET, num_nodes=2)
    cluster.load(per_node=1)
    broken, other = cluster.nodes
    untouched = other.pod

    assert list(cluster.roll_out(too_large)) == []
    assert "an arena of" in broken.pod.log
    assert other.pod is untouched
    assert missing(other.pod.socket_path, cluster.ledger.of(other.number)) == []

    taken_back = list(cluster.roll_out(DAEMONSET, nodes=[broken]))
    assert taken_back == [broken]
    assert missing(broken.pod.socket_path, cluster.ledger.of(broken.number)) == []
    cluster.end_load()

    assert_nobody_was_harmed(cluster)
    there, here = cluster.replicas
    assert (there.client_stats.server_restarts, here.client_stats.server_restarts) == (1, 0)
    assert here.calls["fetch: unavailable"] == 0


def capacity_bytes(pod):
    with KVStore.connect(pod.socket_path, timeouts=PATIENT) as client:
        return client.stats()["tiers"]["dram"]["capacity_bytes"]
