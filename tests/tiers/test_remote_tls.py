"""RemoteTier over TLS: through a relay that ends it, so that any server will do, and to one that has it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.drill.store_process import PartFailed
from kvstore.errors import TierUnavailable
from kvstore.tier import ReadStatus, WriteStatus
from kvstore_tiers.remote import RemoteTier
from kvstore_tiers.remote_tls import TlsFolder
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
def trusting(authority: Authority) -> TlsFolder:
    return TlsFolder(authority.folder("trusting"))


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


async def test_a_server_of_the_given_authority_is_trusted(relay: TlsRelay, trusting: TlsFolder) -> None:
    async with opened(url("localhost", relay.port), tls=trusting, timeout_s=2) as tier:
        assert await put(tier, *range(6)) == [WriteStatus.OK] * 6
        assert await statuses(tier, *range(6)) == [ReadStatus.OK] * 6
        assert tier.counters == {}


async def test_a_server_of_another_authority_is_not_trusted(relay: TlsRelay, stranger: Authority) -> None:
    for files in (TlsFolder(stranger.folder("trusting")), None):
        async with opened(url("localhost", relay.port), tls=files, timeout_s=2) as tier:
            assert "its certificate is not accepted" in tier.health().reason
            assert await put(tier, 1) == [WriteStatus.UNAVAILABLE]


async def test_a_certificate_for_another_host_is_not_accepted(relay: TlsRelay, trusting: TlsFolder) -> None:
    async with opened(url("127.0.0.1", relay.port), tls=trusting, timeout_s=2) as tier:
        assert "its certificate is not accepted: IP address mismatch" in tier.health().reason


async def test_a_server_without_tls_is_not_talked_to(redis: RedisServer, trusting: TlsFolder) -> None:
    async with opened(url("localhost", redis.port), tls=trusting, timeout_s=1) as tier:
        assert not tier.health().is_up
        assert await put(tier, 1) == [WriteStatus.UNAVAILABLE]


async def test_a_server_that_asks_for_a_certificate_gets_ours(
    redis: RedisServer,
    server_cert: Certificate,
    authority: Authority,
    stranger: Authority,
    trusting: TlsFolder,
) -> None:
    relay = TlsRelay(redis.port, server_cert.cert, server_cert.key, client_ca=authority.own.cert)
    ours = authority.sign("node-a", alternative="DNS:node-a")
    theirs = stranger.sign("node-b", alternative="DNS:node-b")
    address = url("localhost", relay.port)
    async with opened(address, tls=TlsFolder(authority.folder("ours", ours)), timeout_s=2) as tier:
        assert await put(tier, 1) == [WriteStatus.OK]
        assert await statuses(tier, 1) == [ReadStatus.OK]
    for files in (trusting, TlsFolder(authority.folder("theirs", theirs))):
        async with opened(address, tls=files, timeout_s=2) as tier:
            assert not tier.health().is_up
            assert await put(tier, 1) == [WriteStatus.UNAVAILABLE]
    relay.stop()


async def assert_stops_the_start(folder: Path, named: str) -> None:
    tier = RemoteTier(url("localhost", 1), tls=TlsFolder(folder))
    with pytest.raises(TierUnavailable, match=rf"tls_folder:? {folder}.*{named}"):
        await tier.open()
    assert not tier.health().is_up


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({}, "holds neither ca.crt nor tls.crt and tls.key"),
        ({"ca.crt": ""}, "ca.crt: .*expected PEM"),
        ({"tls.crt": "cert"}, "holds one of tls.crt and tls.key"),
        ({"tls.key": "key"}, "holds one of tls.crt and tls.key"),
        ({"tls.crt": "cert", "tls.key": ""}, "tls.crt with tls.key: .*expected PEM"),
        ({"tls.crt": "", "tls.key": "key"}, "tls.crt with tls.key: .*expected PEM"),
    ],
)
async def test_a_tls_folder_that_is_no_use_stops_the_start(
    tmp_path: Path, authority: Authority, files: dict[str, str], named: str
) -> None:
    good = {"cert": authority.own.cert.read_text(), "key": authority.own.key.read_text(), "": ""}
    for name, content in files.items():
        (tmp_path / name).write_text(good[content])
    await assert_stops_the_start(tmp_path, named)


async def test_an_absent_tls_folder_or_a_link_to_nowhere_stops_the_start(tmp_path: Path) -> None:
    await assert_stops_the_start(tmp_path / "absent", "No such file")
    (tmp_path / "ca.crt").symlink_to(tmp_path / "gone")
    await assert_stops_the_start(tmp_path, "ca.crt: No such file")


async def test_a_server_that_has_tls_itself(
    tmp_path: Path, authority: Authority, trusting: TlsFolder
) -> None:
    ours = authority.sign("both", alternative="DNS:localhost")
    tls_port = free_port()
    server = RedisServer(tmp_path / "redis", *tls_options(authority, ours, tls_port))
    start_or_skip(server.start)
    files = TlsFolder(authority.folder("both-ours", ours))
    async with opened(url("localhost", tls_port), tls=files, timeout_s=2) as tier:
        assert await put(tier, *range(6)) == [WriteStatus.OK] * 6
        assert await statuses(tier, *range(6)) == [ReadStatus.OK] * 6
    async with opened(url("localhost", tls_port), tls=trusting, timeout_s=2) as tier:
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
        files = TlsFolder(authority.folder("nodes", ours))
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
