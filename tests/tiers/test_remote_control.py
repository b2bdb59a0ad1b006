"""ControlLine and the look at a server: questions end in time, and what is amiss is told."""

import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from kvstore.tier import ReadStatus, WriteStatus
from kvstore_tiers.remote_control import ControlLine, Refused, Reply, control_line
from kvstore_tiers.remote_look import Look, Use, look
from kvstore_tiers.remote_tls import TlsFolder
from kvstore_tiers.resp_address import RespAddress
from kvstore_tiers.resp_stream import RespFault
from tests.redis_cluster import RedisCluster
from tests.redis_sentinel import MASTER, RedisSentinels
from tests.redis_server import RedisServer
from tests.tiers.certificates import Authority
from tests.tiers.remote_calls import opened, put, statuses, until, within
from tests.tiers.scripted_server import Answer, ScriptedServer
from tests.tiers.tls_relay import TlsRelay

SLACK_S = 3.0
"""How late a bounded call may end on a busy machine."""


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(
        tmp_path / "redis", "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"
    ).start()
    yield server
    server.stop()


@pytest.fixture
def scripted() -> Iterator[Callable[[Answer], ScriptedServer]]:
    servers: list[ScriptedServer] = []

    def start(answer: Answer) -> ScriptedServer:
        servers.append(ScriptedServer(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def line_to(
    url: str, *, user: str = "", password: str = "", seconds: float = 5
) -> AbstractContextManager[ControlLine]:
    address = RespAddress.parse(url, user=user, password=password)
    return control_line(address, deadline_s=within(seconds), clock=time.monotonic)


def asked(url: str, *words: str, seconds: float = 5) -> Reply:
    with line_to(url, seconds=seconds) as line:
        return line.ask(*words)


# Answers


@pytest.mark.parametrize(
    ("data", "reply"),
    [
        (b"+OK\r\n", "OK"),
        (b":-7\r\n", -7),
        (b"$-1\r\n", None),
        (b"*-1\r\n", None),
        (b"$5\r\na\r\nbc\r\n", "a\r\nbc"),
        (b"$2\r\n\xff\xfe\r\n", "\ufffd\ufffd"),
        (b"*0\r\n", []),
        (b"*3\r\n:1\r\n*2\r\n$1\r\nx\r\n$-1\r\n+y\r\n", [1, ["x", None], "y"]),
    ],
)
def test_an_answer_of_any_kind_is_read(
    scripted: Callable[[Answer], ScriptedServer], data: bytes, reply: Reply
) -> None:
    assert asked(scripted(lambda _: [data]).url, "X") == reply


@pytest.mark.parametrize(
    "data",
    [
        *(
            b"?\r\n",
            b"\r\n",
            b"$1x\r\n",
            b"*1e3\r\n",
            b":\r\n",
            b"-MOVED x\r\n",
            b"*1\r\n" * 100_000,
            b"$99999999999999\r\n",
        ),
        *(
            b"+" + b"x" * (9 << 20),
            b"$9999999\r\n" + b"x" * (9 << 20),
            b"*9999999\r\n" + b":1\r\n" * (3 << 20),
        ),
    ],
    ids=lambda data: repr(data[:12]),
)
def test_an_answer_that_is_malformed_or_too_long_is_a_fault_in_time(
    scripted: Callable[[Answer], ScriptedServer], data: bytes
) -> None:
    server = scripted(lambda _: [data])
    began_s = time.monotonic()
    with pytest.raises(RespFault):
        asked(server.url, "X", seconds=2)
    assert time.monotonic() - began_s < 2 + SLACK_S


def test_noise_is_an_answer_or_a_fault(scripted: Callable[[Answer], ScriptedServer]) -> None:
    dice = random.Random(7)
    alphabet = b"+-:$*_\r\n0123456789abcMOVEDASK \xff"
    server = scripted(lambda _: [bytes(dice.choices(alphabet, k=dice.randrange(1, 60))) + b"\r\n"])
    seen = set()
    for _ in range(300):
        try:
            asked(server.url, "X", seconds=0.01)
            seen.add("answer")
        except RespFault:
            seen.add("fault")
    assert "fault" in seen


@pytest.mark.parametrize("piece", [b"x", b":1\r\n"], ids=["inside a text", "item by item"])
def test_a_server_that_answers_a_byte_at_a_time_is_left_at_the_deadline(
    scripted: Callable[[Answer], ScriptedServer], piece: bytes
) -> None:
    def dribble(_: bytes) -> Iterable[bytes]:
        yield b"*100000\r\n" if piece[:1] == b":" else b"$100000\r\n"
        yield from server.every(0.05, piece)

    server = scripted(dribble)
    began_s = time.monotonic()
    with pytest.raises(RespFault) as caught:
        asked(server.url, "X", seconds=0.3)
    assert time.monotonic() - began_s < 0.3 + SLACK_S
    assert caught.value.is_timeout


def test_a_login_that_is_answered_a_byte_at_a_time_is_left_at_the_deadline(
    scripted: Callable[[Answer], ScriptedServer],
) -> None:
    server = scripted(lambda _: server.every(0.05, b"+"))
    began_s = time.monotonic()
    with pytest.raises(RespFault), line_to(server.url, password="pw", seconds=0.3):
        raise AssertionError("it never answered")
    assert time.monotonic() - began_s < 0.3 + SLACK_S


async def test_opening_a_cluster_whose_node_dribbles_takes_bounded_time(
    scripted: Callable[[Answer], ScriptedServer],
) -> None:
    server = scripted(lambda _: server.every(0.05, b"*"))
    began_s = time.monotonic()
    async with opened(server.url.replace("redis:", "redis+cluster:")) as tier:
        assert time.monotonic() - began_s < 0.6 + SLACK_S
        assert await statuses(tier, 1) == [ReadStatus.UNAVAILABLE]
        await until(lambda: "no answer in time" in tier.health().reason)


def test_after_an_error_the_line_goes_on(redis: RedisServer) -> None:
    with line_to(redis.url) as line:
        with pytest.raises(Refused, match="the server answers ERR unknown command") as caught:
            line.ask("NONSENSE")
        assert caught.value.code == "ERR"
        assert line.ask("ECHO", "x") == "x"


def test_several_questions_are_answered_in_one_go(redis: RedisServer) -> None:
    with line_to(redis.url) as line:
        first, second, third = line.ask_all([("ECHO", "a"), ("NONSENSE",), ("ECHO", "b")])
    assert (first, third) == ("a", "b")
    assert isinstance(second, Refused)


def test_a_server_that_answers_nobody_now_ends_the_questions(
    scripted: Callable[[Answer], ScriptedServer],
) -> None:
    server = scripted(lambda _: [b"-LOADING Redis is loading the dataset in memory\r\n+OK\r\n"])
    with line_to(server.url) as line, pytest.raises(Refused, match="the server answers LOADING Redis is"):
        line.ask_all([("GET", "a"), ("GET", "b")])


def test_a_line_works_over_a_unix_socket_in_another_database(redis: RedisServer) -> None:
    with line_to(f"unix://{redis.socket_path}?db=3") as line:
        assert line.ask("SET", "a", "b") == "OK"
    assert asked(redis.url, "GET", "a") is None


def test_a_line_works_over_tls_and_checks_the_certificate(redis: RedisServer, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    ours = authority.sign("server", alternative="DNS:localhost")
    relay = TlsRelay(redis.port, ours.cert, ours.key)
    context = TlsFolder(authority.folder("trusting")).context()

    def greeted(host: str) -> Reply:
        address = RespAddress.parse(f"rediss://{host}:{relay.port}/0")
        with control_line(address, deadline_s=within(5), clock=time.monotonic, tls=context) as line:
            return line.ask("ECHO", host)

    assert greeted("localhost") == "localhost"
    with pytest.raises(RespFault, match="certificate is not accepted"):
        greeted("127.0.0.1")
    relay.stop()


# Logins


LOGINS = [
    ({}, "NOAUTH: it wants a login: set password in [tiers.remote]"),
    (
        {"password": "wrongsecret"},
        "refused the login: WRONGPASS: check username and password in [tiers.remote]",
    ),
    ({"user": "nobody", "password": "wrongsecret"}, "refused the login: WRONGPASS: check username"),
    ({"user": "nobody"}, "refused the login: WRONGPASS: check username"),
]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(("login", "told"), LOGINS, ids=["none", "wrong", "wrong user", "user alone"])
async def test_a_login_that_is_no_use_is_one_warning_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, login: dict[str, str], told: str
) -> None:
    server = RedisServer(tmp_path / "r", password="sesame").start()
    try:
        async with opened(server.url, **login) as tier:
            [warning] = warnings_of(caplog)
            assert "not reachable yet" in warning
            assert told in warning
            assert await put(tier, 1) == [WriteStatus.UNAVAILABLE]
        assert not any(secret in caplog.text for secret in ("sesame", "wrongsecret"))
    finally:
        server.stop()


async def test_a_login_that_turns_out_to_be_no_use_later_is_a_warning_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = RedisServer(tmp_path / "r", password="sesame")
    async with opened(server.url, breaker_backoff_s=0.01, breaker_backoff_max_s=0.05) as tier:
        assert "not reachable yet: cannot connect" in caplog.text
        server.start()
        await until(lambda: "not used for now" in caplog.text)
        assert warnings_of(caplog)[-1].endswith(LOGINS[0][1])
        assert LOGINS[0][1] in tier.health().reason
    assert len(warnings_of(caplog)) == 2
    server.stop()


async def test_a_password_for_a_server_that_has_none_is_one_warning(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(redis.url, password="sesame"):
        [warning] = warnings_of(caplog)
        assert "refused the login: ERR: check username and password" in warning


@pytest.mark.parametrize(("login", "told"), LOGINS[:2], ids=["none", "wrong"])
async def test_a_login_that_a_cluster_does_not_take_is_one_warning_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, login: dict[str, str], told: str
) -> None:
    cluster = RedisCluster(tmp_path).start()
    try:
        for node in cluster.nodes:
            node.ask(b"CONFIG", b"SET", b"requirepass", b"sesame")
        async with opened(cluster.url, **login):
            [warning] = warnings_of(caplog)
            assert told in warning
            assert warning.count("[tiers.remote]") == 1
    finally:
        cluster.stop()


async def test_a_login_that_a_master_behind_sentinels_does_not_take_is_one_warning_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = RedisSentinels(tmp_path)
    try:
        made.start()
        made.master.ask(b"ACL", b"SETUSER", b"kv", b"on", b">right", b"~*", b"+@all")
        async with opened(made.url, sentinel_master=MASTER, user="kv", password="wrong"):
            [warning] = warnings_of(caplog)
            assert f":{made.master.port}" in warning
            assert "refused the login: WRONGPASS: check username" in warning
    finally:
        made.stop()


# A look at a server


def seen(url: str, use: Use, *, user: str = "", password: str = "") -> Look:
    with line_to(url, user=user, password=password) as line:
        return look(line, use, user=user)


def test_a_server_that_is_set_up_well_gives_no_remark(redis: RedisServer) -> None:
    found = seen(redis.url, Use())
    assert found.remarks == ()
    assert found.server.split(" ")[0] in {"Redis", "Valkey"}
    assert found.server.endswith(", maxmemory 64 MiB, allkeys-lru")
    assert redis.ask(b"DBSIZE") == b":0\r\n"


def test_missing_rights_are_named_with_the_command_that_gives_them(redis: RedisServer) -> None:
    redis.ask(b"ACL", b"SETUSER", b"kv", b"on", b">pw", b"~kvstore:*", b"+get", b"+exists")
    found = seen(redis.url, Use(is_cluster=True), user="kv", password="pw")
    assert found.server == ""
    assert found.remarks == (
        "user kv may not SET, DEL, ASKING there, so blocks are lost:"
        " ACL SETUSER kv ~kvstore:* +set +del +asking",
    )


def test_keys_that_the_user_may_not_touch_are_missing_rights(redis: RedisServer) -> None:
    redis.ask(b"ACL", b"SETUSER", b"kv", b"on", b">pw", b"~other:*", b"+@all")
    [remark] = seen(redis.url, Use(), user="kv", password="pw").remarks
    assert remark.startswith("user kv may not GET, SET, DEL, EXISTS there")


@pytest.mark.parametrize(
    ("limit", "policy", "expires", "told"),
    [
        (b"0", b"noeviction", False, ("has no maxmemory and grows until its machine is full",)),
        (
            b"64mb",
            b"noeviction",
            True,
            ("has maxmemory-policy noeviction: when it is full, writes are refused",),
        ),
        (b"64mb", b"volatile-lru", False, ("has maxmemory-policy volatile-lru: when it is full",)),
        (b"64mb", b"volatile-lru", True, ()),
        (b"64mb", b"allkeys-random", False, ()),
    ],
)
def test_memory_that_will_cost_blocks_is_a_remark(
    redis: RedisServer, limit: bytes, policy: bytes, expires: bool, told: tuple[str, ...]
) -> None:
    redis.ask(b"CONFIG", b"SET", b"maxmemory", limit)
    redis.ask(b"CONFIG", b"SET", b"maxmemory-policy", policy)
    remarks = seen(redis.url, Use(expires=expires)).remarks
    assert len(remarks) == len(told)
    assert all(remark.startswith(start) for remark, start in zip(remarks, told, strict=True))


def test_a_replica_is_a_remark(redis: RedisServer, tmp_path: Path) -> None:
    options = (
        "--replicaof",
        f"127.0.0.1 {redis.port}",
        "--maxmemory",
        "64mb",
        "--maxmemory-policy",
        "allkeys-lru",
    )
    replica = RedisServer(tmp_path / "replica", *options).start()
    assert seen(replica.url, Use()).remarks == (
        "is a replica and refuses writes: name its master in the url",
    )
    replica.stop()


@pytest.mark.parametrize(
    ("told", "server", "remarks"),
    [
        (
            b"redis_version:5.0.7\r\n",
            "Redis 5.0.7, no maxmemory",
            ("is version 5.0.7: 6 or later is needed",),
        ),
        (b"redis_version:8.2.1\r\n", "Redis 8.2.1, no maxmemory", ()),
        (b"redis_version:x\r\nmaxmemory:1e9\r\n", "Redis x, no maxmemory", None),
        (b"nonsense", "Redis of unknown version, no maxmemory", ()),
        (b"", "", ()),
    ],
)
def test_what_a_server_tells_of_itself_is_read_with_care(
    scripted: Callable[[Answer], ScriptedServer], told: bytes, server: str, remarks: tuple[str, ...] | None
) -> None:
    answers = b"+OK\r\n" * 4 + b"$%d\r\n%s\r\n" % (len(told), told)
    found = seen(scripted(lambda _: [answers]).url, Use())
    assert found.server == server
    assert remarks is None or found.remarks == remarks


async def test_a_tier_tells_what_is_amiss_once_for_all_servers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    cluster = RedisCluster(tmp_path).start()
    try:
        async with opened(cluster.url):
            [warning] = warnings_of(caplog)
            assert "has no maxmemory" in warning
            assert caplog.text.count("no maxmemory\n") == 3
    finally:
        cluster.stop()


async def test_a_server_that_comes_later_is_looked_at_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = RedisServer(tmp_path / "redis")
    async with opened(server.url):
        assert "no maxmemory" not in caplog.text
        server.start()
        await until(lambda: "has no maxmemory" in caplog.text)
    server.stop()
