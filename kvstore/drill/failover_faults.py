"""Faults of several Redis-protocol servers together: a master dies, behind sentinels or in a cluster."""

from dataclasses import replace

from kvstore.drill.load import Load
from kvstore.drill.redis_cluster import RedisCluster
from kvstore.drill.redis_content import RedisContent
from kvstore.drill.redis_sentinel import MASTER, RedisSentinels
from kvstore.drill.redis_server import RedisServer, redis_obstacle
from kvstore.drill.remote_faults import SHORT_CALL_S, RemoteFault
from kvstore.drill.stage import HEAL_S, Stage, pause
from kvstore.drill.store_process import PartFailed, wait_until
from kvstore.keys import PrefixChain

_FAILOVER_S = 20.0
_REPLICATION_S = 5.0


class _SeveralServers(RemoteFault):
    """A store over servers of the fault's own."""

    needs_redis = False
    shares_stage = False

    def obstacle(self) -> str:
        """Return why there can be no such servers."""
        return redis_obstacle()

    def ask_briefly(self, stage: Stage) -> None:
        """Ask for what is stored and for what is not, within a short time."""
        stage.get(stage.rng.choice(self.written), timeout_s=SHORT_CALL_S)
        stage.match(stage.new_chain(3), timeout_s=SHORT_CALL_S)
        stage.put(stage.new_chain(2))


class RedisFailover(_SeveralServers):
    """See the description."""

    name = "redis_failover"
    description = "the master behind three sentinels is killed or frozen: the store follows to the replica"
    effect = "failovers"
    try_s = 6.0

    def __init__(self) -> None:
        super().__init__()
        self._sentinels: RedisSentinels | None = None

    @property
    def sentinels(self) -> RedisSentinels:
        """The servers."""
        assert self._sentinels is not None, "setup starts the servers"
        return self._sentinels

    def setup(self, stage: Stage) -> None:
        """Start the servers, and the store over them."""
        more = f"sentinel failover-timeout {MASTER} 1000"
        self._sentinels = RedisSentinels(stage.folder / "servers", more)
        self._sentinels.start()
        stage.store.settings = replace(
            stage.store.settings, redis_url=self._sentinels.url, sentinel_master=MASTER
        )
        super().setup(stage)

    def teardown(self, stage: Stage) -> None:
        """End the store and the servers."""
        stage.store.kill()
        if self._sentinels is not None:
            self._sentinels.stop()
            self._sentinels = None

    def inject(self, stage: Stage) -> None:
        """Take the master away under load, until the replica is the master."""
        self.write(stage)
        if not wait_until(self.sentinels.is_replicated, _REPLICATION_S):
            raise PartFailed("redis: the replica does not follow its master")
        former = self.sentinels.master
        with Load(stage, acknowledges=False):
            pause(stage.rng.uniform(0.0, 0.05))
            (former.kill if stage.rng.random() < 0.5 else former.pause)()

            def is_over() -> bool:
                self.ask_briefly(stage)
                return self.sentinels.has_failed_over

            if not wait_until(is_over, _FAILOVER_S):
                raise PartFailed(f"redis: no failover within {_FAILOVER_S:.0f} s")
        former.kill()
        self.sentinels.follow_failover()
        stage.ledger.note_effect(self.effect, 1)

    def verify(self, stage: Stage) -> None:
        """Check every promise, that all that was written is served by the new master, and that it is used."""
        super().verify(stage)
        self.verify_is_used(stage)


class RedisClusterMasterLost(_SeveralServers):
    """See the description."""

    name = "redis_cluster_master_lost"
    description = "one of a cluster's three masters is killed or frozen: only its blocks are missed meanwhile"
    effect = "blocks_served_by_the_others"
    try_s = 3.0

    def __init__(self) -> None:
        super().__init__()
        self._cluster: RedisCluster | None = None

    @property
    def cluster(self) -> RedisCluster:
        """The servers."""
        assert self._cluster is not None, "setup starts the servers"
        return self._cluster

    def setup(self, stage: Stage) -> None:
        """Start the servers, and the store over them."""
        self._cluster = RedisCluster(stage.folder / "servers")
        self._cluster.start()
        stage.store.settings = replace(stage.store.settings, redis_url=self._cluster.url)
        super().setup(stage)

    def teardown(self, stage: Stage) -> None:
        """End the store and the servers."""
        stage.store.kill()
        if self._cluster is not None:
            self._cluster.stop()
            self._cluster = None

    def inject(self, stage: Stage) -> None:
        """Take a master away under load, use the others, and let it come back."""
        # Blocks of one chain lie on different masters: what one of them holds shows in chains of one block.
        self.write(stage, 10, most_blocks=1)
        lost = stage.rng.choice(self.cluster.masters)
        is_killed = stage.rng.random() < 0.5
        kept = [
            chain for node in self.cluster.masters if node is not lost for chain in self._held(stage, node)
        ]
        (lost.kill if is_killed else lost.pause)()
        try:
            with Load(stage, acknowledges=False):
                for _ in range(stage.rng.randint(4, 12)):
                    self.ask_briefly(stage)
                self._expect(stage, kept)
        finally:
            if is_killed:
                lost.start()
            else:
                lost.resume()
            self.cluster.wait_well()
        self.forget_missing(stage, [node.port for node in self.cluster.masters])

    def verify(self, stage: Stage) -> None:
        """Check every promise, that what is in the cluster is served, and that new blocks get there."""
        super().verify(stage)
        self.verify_is_used(stage)

    def _expect(self, stage: Stage, chains: list[PrefixChain]) -> None:
        """Expect these chains to be served soon."""
        for chain in chains:
            if not wait_until(lambda: stage.get(chain).blocks == len(chain), HEAL_S, pause_s=0.02):  # noqa: B023
                stage.ledger.note_violation("a block of a living master is not served while another is away")
                return
            stage.ledger.note_effect(self.effect, len(chain))

    def _held(self, stage: Stage, node: RedisServer) -> list[PrefixChain]:
        """Return the chains that one master holds all of."""
        with RedisContent(node.port) as content:
            keys = [key for chain in self.written for key in chain.keys]
            there = content.find(keys, stage.block_bytes)
        return [chain for chain in self.written if all(key in there for key in chain.keys)]


def failover_faults() -> tuple[RemoteFault, ...]:
    """Return one of each kind."""
    return (RedisFailover(), RedisClusterMasterLost())
