"""RemoteUrl, and that the configuration takes the same urls."""

import pytest

from kvstore.config import Config
from kvstore.errors import InvalidConfig
from kvstore_tiers.remote_url import RemoteUrl, Topology


@pytest.mark.parametrize(
    ("url", "topology", "seeds"),
    [
        ("redis://h", Topology.SINGLE, "redis://h:6379/0"),
        ("rediss://[::1]:1/3", Topology.SINGLE, "rediss://[::1]:1/3"),
        ("unix:///run/r.sock", Topology.SINGLE, "unix:///run/r.sock"),
        ("redis+cluster://a:1,b", Topology.CLUSTER, "cluster redis://a:1/0, redis://b:6379/0"),
        (
            "rediss+cluster://[::1]:1,[::2]",
            Topology.CLUSTER,
            "cluster rediss://[::1]:1/0, rediss://[::2]:6379/0",
        ),
        ("redis+sentinel://a,b:2/5", Topology.SENTINEL, "sentinel redis://a:26379/5, redis://b:2/5"),
        ("rediss+sentinel://[::1]", Topology.SENTINEL, "sentinel rediss://[::1]:26379/0"),
    ],
)
def test_a_url_names_one_server_or_several(url: str, topology: Topology, seeds: str) -> None:
    config = Config.from_dict({"tiers": {"remote": {"url": url}}})
    assert config.remote is not None
    parsed = RemoteUrl.parse(config.remote.url)
    assert parsed.topology is topology
    assert str(parsed) == seeds
    assert parsed.is_tls == url.startswith("rediss")


def test_a_login_in_the_url_is_that_of_every_server_and_is_never_shown() -> None:
    parsed = RemoteUrl.parse("redis+cluster://us%40er:p%3Aw@a:1,b:2")
    assert [(seed.user, seed.password, seed.host) for seed in parsed.seeds] == [
        ("us@er", "p:w", "a"),
        ("us@er", "p:w", "b"),
    ]
    assert "p:w" not in repr(parsed) + str(parsed)


@pytest.mark.parametrize(
    "url",
    [
        *("redis+cluster://", "redis+cluster://a:1/2", "redis+cluster://a:x", "redis+cluster://a:1,,b:2"),
        *("redis+other://a", "unix+cluster:///s", "redis+sentinel://a:1/x", "redis://[::1"),
    ],
)
def test_a_url_that_names_no_servers_is_refused(url: str) -> None:
    with pytest.raises(InvalidConfig, match="remote: the url"):
        RemoteUrl.parse(url)
    with pytest.raises(InvalidConfig, match="url"):
        Config.from_dict({"tiers": {"remote": {"url": url}}})
