"""RemoteTier over TLS: through a relay that ends it, so that any server will do, and to one that has it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.drill.store_process import PartFailed
from kvstore.errors import TierUnavailable
from kvstore.tier import ReadStatus, WriteStatus
from kvstore_tiers.remote import RemoteTier
from kvstore_tiers.remote_tls import TlsFiles
from tests.redis_cluster import RedisCluster
from tests.redis_server import RedisServer, find_binary, free_port
from tests.tiers.certificates import Authority, Certificate
from tests.tiers.remote_calls import opened, put, statuses
from tests.tiers.tls_relay import TlsRelay


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other-ca"))


@pytest.fixture(scope="module")
def server_cert(authority: Authority) -> Certificate:
    return authority.sign("server", alternative="DNS:localhost")


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.stop()


@pytest.fixture
def relay(redis: RedisServer, server_cert: Certificate) -> Iterator[TlsRelay]:
    made = TlsRelay(redis.port, server_cert.cert, server_cert.key)
    yield made
    made.stop()


def url(host: str, port: int) -> str:
    return f"rediss://{host}:{port}/0"


async def test_a_server_of_the_given_authority_is_trusted(relay: TlsRelay, authority: Authority) -> None:
    async with opened(url("localhost", relay.port), tls=TlsFiles(authority.own.cert), timeout_s=2) as tier:
        assert await put(tier, *range(6)) == [WriteStatus.OK] * 6
        assert await statuses(tier, *range(6)) == [ReadStatus.OK] * 6
        assert tier.counters == {}


async def test_a_server_of_another_authority_is_not_trusted(relay: TlsRelay, stranger: Authority) -> None:
    for files in (TlsFiles(stranger.own.cert), None):
        async with opened(url("localhost", relay.port), tls=files, timeout_s=2) as tier:
            assert "its certificate is not accepted" in tier.health().reason
            assert await put(tier, 1) == [WriteStatus.UNAVAILABLE]


async def test_a_certificate_for_another_host_is_not_accepted(relay: TlsRelay, authority: Authority) -> None:
    async with opened(url("127.0.0.1", relay.port), tls=TlsFiles(authority.own.cert), timeout_s=2) as tier:
        assert "its certificate is not accepted: IP address mismatch" in tier.health().reason


async def test_a_server_without_tls_is_not_talked_to(redis: RedisServer, authority: Authority) -> None:
    async with opened(url("localhost", redis.port), tls=TlsFiles(authority.own.cert), timeout_s=1) as tier:
        assert not tier.health().is_up
        assert await put(tier, 1) == [WriteStatus.UNAVAILABLE]


async def test_a_server_that_asks_for_a_certificate_gets_ours(
    redis: RedisServer, server_cert: Certificate, authority: Authority, stranger: Authority
) -> None:
    relay = TlsRelay(redis.port, server_cert.cert, server_cert.key, client_ca=authority.own.cert)
    ours = authority.sign("node-a", alternative="DNS:node-a")
    theirs = stranger.sign("node-b", alternative="DNS:node-b")
    address = url("localhost", relay.port)
    async with opened(address, tls=TlsFiles(authority.own.cert, ours.cert, ours.key), timeout_s=2) as tier:
        assert await put(tier, 1) == [WriteStatus.OK]
        assert await statuses(tier, 1) == [ReadStatus.OK]
    for files in (TlsFiles(authority.own.cert), TlsFiles(authority.own.cert, theirs.cert, theirs.key)):
        async with opened(address, tls=files, timeout_s=2) as tier:
            assert not tier.health().is_up
            assert await put(tier, 1) == [WriteStatus.UNAVAILABLE]
    relay.stop()


async def test_a_tls_file_that_is_no_use_stops_the_start(tmp_path: Path, authority: Authority) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    own = authority.own
    for files, named in (
        (TlsFiles(tmp_path / "absent.pem"), "tls_ca_file"),
        (TlsFiles(empty), "tls_ca_file"),
        (TlsFiles(own.cert, tmp_path / "absent.pem", own.key), "tls_cert_file"),
        (TlsFiles(own.cert, own.cert, empty), "tls_cert_file"),
    ):
        tier = RemoteTier(url("localhost", 1), tls=files)
        with pytest.raises(TierUnavailable, match=named):
            await tier.open()
        assert not tier.health().is_up


async def test_a_server_that_has_tls_itself(tmp_path: Path, authority: Authority) -> None:
    ours = authority.sign("both", alternative="DNS:localhost")
    tls_port = free_port()
    server = RedisServer(tmp_path / "redis", *tls_options(authority, ours, tls_port))
    start_or_skip(server.start)
    files = TlsFiles(authority.own.cert, ours.cert, ours.key)
    async with opened(url("localhost", tls_port), tls=files, timeout_s=2) as tier:
        assert await put(tier, *range(6)) == [WriteStatus.OK] * 6
        assert await statuses(tier, *range(6)) == [ReadStatus.OK] * 6
    async with opened(url("localhost", tls_port), tls=TlsFiles(authority.own.cert), timeout_s=2) as tier:
        assert not tier.health().is_up
    server.stop()


async def test_a_cluster_whose_nodes_have_tls(tmp_path: Path, authority: Authority) -> None:
    ours = authority.sign("node", alternative="IP:127.0.0.1")
    # Without tls-cluster Redis before 7.2 names the ports without TLS to everybody.
    cluster = RedisCluster(
        tmp_path, tls_options=lambda port: (*tls_options(authority, ours, port), "--tls-cluster", "yes")
    )
    try:
        start_or_skip(cluster.start)
        files = TlsFiles(authority.own.cert, ours.cert, ours.key)
        async with opened(cluster.tls_url, tls=files, timeout_s=2) as tier:
            assert await put(tier, *range(20)) == [WriteStatus.OK] * 20
            assert await statuses(tier, *range(20)) == [ReadStatus.OK] * 20
            assert tier.counters == {}
    finally:
        cluster.stop()


def tls_options(authority: Authority, ours: Certificate, port: int) -> tuple[str, ...]:
    files = ("--tls-cert-file", str(ours.cert), "--tls-key-file", str(ours.key))
    return ("--tls-port", str(port), "--tls-ca-cert-file", str(authority.own.cert), *files)


def start_or_skip(start: Callable[[], object]) -> None:
    try:
        start()
    except PartFailed as refusal:
        if "TLS support" not in str(refusal):
            raise
        pytest.skip(f"{find_binary()} was built without TLS")
