"""Configuration: what is read, what is refused, and how clearly."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.config import Config, cache_folder, config_keys, default_address, load_config
from kvstore.config_sections import RemoteConfig
from kvstore.config_values import size_text
from kvstore.errors import InvalidConfig
from kvstore.secret_source import SecretSource

FULL = """
[server]
socket = "/tmp/kv.sock"
[store]
timeout_s = 1
[tiers.dram]
capacity_bytes = "4GiB"
staging_bytes = 1048576
[tiers.ssd]
path = "/var/lib/kvstore"
capacity_bytes = "512 MiB"
[tiers.remote]
url = "redis://127.0.0.1:6379/0"
"""


def _load(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "kvstore.toml"
    path.write_text(text, encoding="utf-8")
    return Config.load(path)


def _refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(InvalidConfig) as caught:
        _load(tmp_path, text)
    return str(caught.value)


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert _load(tmp_path, "") == Config()


def test_every_section_is_read_with_its_types(tmp_path: Path) -> None:
    config = _load(tmp_path, FULL)
    assert config.server.socket == Path("/tmp/kv.sock")
    assert config.store.timeout_s == 1.0
    assert isinstance(config.store.timeout_s, float)
    assert config.dram.capacity_bytes == 4 << 30
    assert config.dram.staging_bytes == 1 << 20
    assert config.ssd is not None
    assert config.ssd.capacity_bytes == 512 << 20
    assert config.remote is not None
    assert config.remote.url == "redis://127.0.0.1:6379/0"


def test_absent_tier_sections_mean_no_such_tier(tmp_path: Path) -> None:
    config = _load(tmp_path, "[store]\nlease_s = 5.0\n")
    assert config.ssd is None
    assert config.remote is None


def test_there_are_at_most_forty_keys_and_each_is_explained() -> None:
    keys = config_keys()
    assert len(keys) <= 40
    assert all(key.rule.doc.endswith(".") for key in keys)


def test_every_default_is_allowed_by_its_own_rule() -> None:
    for key in config_keys():
        if key.is_required or key.default is None:
            continue
        raw = str(key.default) if isinstance(key.default, Path) else key.default
        assert key.rule.read(raw) == key.default


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[store]\ntimeout = 1", ["[store]", "unknown key timeout", "timeout_s"]),
        ("[sever]\n", ["unknown section [sever]", "server"]),
        ("[tiers.dran]\n", ["[tiers.dran]", "did you mean [tiers.dram]?"]),
        ("[tier.dram]\ncapacity_bytes = 1", ["section [tier.dram]", "did you mean [tiers.dram]?"]),
        ("[tier.remote]\n", ["section [tier.remote]", "did you mean [tiers.remote]?"]),
        ("[dram]\n", ["section [dram]", "did you mean [tiers.dram]?"]),
        ("[tier]\n", ["section [tier]", "there are [server], [http], [store], [tiers.dram]"]),
        ("[store]\nio_threads = 2", ["[store]", "io_threads", "[tiers.ssd]"]),
        ("[store]\nxyzzy = 2", ["[store]", "xyzzy", "--reference"]),
        ("[tiers.ssd]\npaths = []", ["[tiers.ssd] unknown key paths", "did you mean path?"]),
        ("[tiers.remote]\npassword_env = 1", ["unknown key password_env", "did you mean password?"]),
        ("[tiers.remote]\npassword_file = 1", ["unknown key password_file", "did you mean password?"]),
        ("[tiers.remote]\ntls_ca_file = 1", ["unknown key tls_ca_file", "did you mean tls_folder?"]),
        ("[tiers.remote]\ntls_cert_file = 1", ["unknown key tls_cert_file", "did you mean tls_folder?"]),
        ("[tiers.remote]\ntls_key_file = 1", ["unknown key tls_key_file", "did you mean tls_folder?"]),
        ("socket = 1", ["socket", "outside any section"]),
        ("tiers = 5", ["tiers", "[tiers.dram]"]),
        ("store = 5", ["store", "[store]"]),
        ("[tiers.ssd]\npath = '/x'", ["[tiers.ssd]", "capacity_bytes", "missing"]),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest_one(tmp_path: Path, text: str, parts: list[str]) -> None:
    message = _refusal(tmp_path, text)
    assert all(part in message for part in [str(tmp_path / "kvstore.toml"), *parts]), message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("section", "key", "value", "expected"),
    [
        ("tiers.dram", "capacity_bytes", '"1 gigs"', "1MiB to 64TiB"),
        ("tiers.dram", "capacity_bytes", "true", "1MiB"),
        ("tiers.dram", "capacity_bytes", "-1", "1MiB"),
        ("tiers.dram", "capacity_bytes", "1.5", "1MiB"),
        ("tiers.dram", "capacity_bytes", '"1KiB"', "1MiB"),
        ("tiers.dram", "lock_memory", '"yes"', "true or false"),
        ("store", "timeout_s", "nan", "0.001 to 60"),
        ("store", "timeout_s", "inf", "0.001 to 60"),
        ("store", "timeout_s", "1" + "0" * 400, "0.001 to 60"),
        ("store", "timeout_s", "0x" + "f" * 5000, "is a whole number of 20000 bits"),
        ("server", "max_connections", "1" + "0" * 400, "is a whole number of 1329 bits"),
        ("tiers.dram", "capacity_bytes", "1" + "0" * 400, "1MiB"),
        ("store", "timeout_s", "0", "0.001 to 60"),
        ("store", "timeout_s", '"1s"', "0.001 to 60"),
        ("store", "high_water_ratio", "1.5", "0.01 to 1"),
        ("store", "policy", '"belady"', "lru"),
        ("store", "write_queue_blocks", "0", "1 to 1000000"),
        ("server", "max_connections", "1.0", "1 to 65536"),
        ("server", "log_level", '"loud"', '"debug"'),
        ("server", "socket", '"kv.sock"', "absolute path"),
        ("server", "socket", f'"/{"s" * 107}"', "107 bytes"),
        ("server", "socket", '"/a\\u0000b"', "absolute path"),
        ("tiers.remote", "url", '"http://host"', "redis://HOST:PORT/DB"),
        ("tiers.remote", "url", '"redis://host:99999"', "redis://HOST:PORT/DB"),
        ("tiers.remote", "url", '"redis://host/a"', "redis://HOST:PORT/DB"),
        ("tiers.remote", "url", '"redis://a:1,b:2"', "redis+cluster://HOST:PORT,HOST:PORT"),
        ("tiers.remote", "url", '"redis+cluster://a:1,b:2/1"', "redis+cluster://HOST:PORT,HOST:PORT"),
        ("tiers.remote", "url", '"redis+sentinel://a:1,,b:2"', "redis+sentinel://HOST:PORT,HOST:PORT/DB"),
        ("tiers.remote", "url", '"redis+other://a:1"', "redis://HOST:PORT/DB"),
    ],
)
def test_a_bad_value_is_refused_with_what_is_allowed(
    tmp_path: Path, section: str, key: str, value: str, expected: str
) -> None:
    message = _refusal(tmp_path, f"[{section}]\n{key} = {value}\n")
    assert f"[{section}] {key}" in message
    assert expected in message
    assert "\n" not in message


def test_a_socket_path_of_107_bytes_is_allowed(tmp_path: Path) -> None:
    path = "/" + "s" * 106
    assert str(_load(tmp_path, f'[server]\nsocket = "{path}"').server.socket) == path


@pytest.mark.parametrize(
    "url", ["redis://user:hunter2@host:1", "redis://:hunter2@host", "redis://host?password=hunter2"]
)
def test_a_secret_in_the_url_is_refused_and_never_shown(tmp_path: Path, url: str) -> None:
    message = _refusal(tmp_path, f'[tiers.remote]\nurl = "{url}"\n')
    assert "hunter2" not in message
    assert "not shown" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[store]\nlow_water_ratio = 0.99", "low_water_ratio"),
        ('[tiers.remote]\nurl = "redis://h"\nbreaker_backoff_s = 11.0', "breaker_backoff_max_s"),
        ('[tiers.remote]\nurl = "redis://h"\ntls_folder = "/c"', "let it begin with rediss"),
    ],
)
def test_values_that_do_not_fit_together_are_refused(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in _refusal(tmp_path, text)


@pytest.mark.parametrize(
    "data", [b"[store", b"\xff\xfe", b"a = 1\na = 2", b"x=" + b"[" * 5000, b"x=" + b"1" * 5000]
)
def test_a_file_that_is_not_toml_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "kvstore.toml"
    path.write_bytes(data)
    with pytest.raises(InvalidConfig, match=r"kvstore\.toml: not"):
        Config.load(path)


@pytest.mark.parametrize("name", ["absent.toml", ".", "a\0b"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidConfig, match="cannot be read"):
        Config.load(f"{tmp_path}/{name}")


def test_an_oversized_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kvstore.toml"
    path.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(InvalidConfig, match="larger than 1MiB"):
        Config.load(path)


def test_the_effective_configuration_names_the_source_of_each_value(tmp_path: Path) -> None:
    values = {(item.section, item.name): item for item in _load(tmp_path, FULL).effective()}
    assert values["store", "timeout_s"].source == str(tmp_path / "kvstore.toml")
    assert values["store", "lease_s"].source == "default"
    assert values["tiers.ssd", "io_threads"].value == 4


def test_the_password_comes_from_the_place_that_the_configuration_names() -> None:
    remote = RemoteConfig(url="redis://h", password=SecretSource.parse("env:KV_SECRET"))
    assert remote.read_password({"KV_SECRET": "hunter2"}) == "hunter2"
    with pytest.raises(InvalidConfig, match=r"\[tiers.remote\] password: env:KV_SECRET"):
        remote.read_password({})


def test_no_place_for_a_password_means_none() -> None:
    assert RemoteConfig(url="redis://h").read_password({}) is None


@pytest.mark.parametrize(
    "value", ['"hunter2"', '"env:hunter-2"', '["hunter2"]', "20220704", '"file:hunter2"']
)
def test_a_password_in_place_of_its_place_is_refused_and_never_shown(tmp_path: Path, value: str) -> None:
    message = _refusal(tmp_path, f'[tiers.remote]\nurl = "redis://h"\npassword = {value}\n')
    assert 'expected "env:NAME" or "file:/PATH"' in message
    assert not any(secret in message for secret in ("hunter", "20220704"))


def test_the_file_is_found_through_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "kvstore.toml"
    path.write_text("[store]\nlease_s = 5\n", encoding="utf-8")
    assert load_config(None, {"KVSTORE_CONFIG": str(path)}).store.lease_s == 5
    assert load_config(None, {}) == Config()


def test_the_default_address_is_the_environments_socket_or_the_default_one() -> None:
    assert default_address({"KVSTORE_SOCKET": "/tmp/a.sock"}) == "unix:/tmp/a.sock"
    assert default_address({}) == "unix:/run/kvstore/kvstore.sock"


def test_the_cache_folder_follows_the_environment_if_that_is_absolute() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/kvstore")
    assert cache_folder({"XDG_CACHE_HOME": "c"}) == cache_folder({}) == Path.home() / ".cache/kvstore"


@given(st.integers(1 << 20, 1 << 50))
def test_a_size_survives_being_written_and_read(num_bytes: int) -> None:
    tree = {"tiers": {"ssd": {"path": "/x", "capacity_bytes": size_text(num_bytes)}}}
    ssd = Config.from_dict(tree).ssd
    assert ssd is not None
    assert ssd.capacity_bytes == num_bytes


_NAMES = st.sampled_from(["server", "store", "tiers", "dram", "ssd", "remote", "timeout_s", "url", "path"])
_TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda leaf: st.lists(leaf, max_size=3) | st.dictionaries(_NAMES | st.text(max_size=5), leaf, max_size=4),
)


def _one_line_or_keys(tree: dict[str, object]) -> bool:
    try:
        return bool(Config.from_dict(tree).effective())
    except InvalidConfig as error:
        return "\n" not in str(error)


@given(st.dictionaries(_NAMES, _TREES, max_size=4))
def test_any_tree_is_read_or_refused_in_one_line(tree: dict[str, object]) -> None:
    assert _one_line_or_keys(tree)
