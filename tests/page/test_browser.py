"""The page in a real Chromium, beside a real store under load."""

import json
import re
import urllib.request

import pytest

from kvstore import KVStore, Namespace
from kvstore.auth import Scope
from kvstore.cli.store_figures import sample
from kvstore.drill.store_process import StoreProcess, StoreSettings
from kvstore.keyring_file import add_key, create_keyring
from kvstore.keys import BlockKey, PrefixChain
from tests.page.browser import browser, complaints, needs_browser, table_of, text_of, wait_for
from tests.page.traffic import LAYOUT, SPACE, Traffic, conversation
from tests.redis_server import free_port

pytestmark = [needs_browser, pytest.mark.timeout(400)]

MIB = 1 << 20
RECORDING = """(() => {
    window.recorded = [];
    const plain = window.fetch;
    window.fetch = async (path, options) => {
        const response = await plain(path, options);
        if (path === 'v1/stats') window.recorded.push([performance.now(), await response.clone().json()]);
        return response;
    };
})()"""
"""Notes what the page is told, and when."""

CURVES = """return Object.fromEntries([...document.querySelectorAll(`#${arguments[0]} .chart .curve`)].map(
    (curve) => [curve.dataset.name, curve.getAttribute('d')]))"""


@pytest.fixture(scope="module")
def driver():
    with browser() as made:
        made.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": RECORDING})
        yield made


@pytest.fixture
def store(tmp_path):
    (tmp_path / "ssd").mkdir()
    settings = StoreSettings(
        dram_bytes=4 * MIB, ssd_bytes=64 * MIB, ssd_folder=tmp_path / "ssd", http_port=free_port()
    )
    with StoreProcess(tmp_path, settings) as running:
        yield running


@pytest.fixture
def keyed(tmp_path):
    """A store with keys, and a key for each of some sets of scopes."""
    keyring = tmp_path / "keys"
    create_keyring(keyring)
    keys = {
        name: add_key(keyring, name, tenant=tenant, scopes=frozenset(scopes))
        for name, tenant, scopes in (
            ("admin", "acme", {Scope.ADMIN}),
            ("reader", "acme", {Scope.READ}),
            ("all", "acme", set(Scope)),
            ("stranger", "other", set(Scope)),
        )
    }
    settings = StoreSettings(http_port=free_port(), http_more=f'api_keys = "file:{keyring}"\n')
    with StoreProcess(tmp_path, settings) as running:
        yield running, keys


def hold_open(store, namespace):
    """Have a block stored in a namespace, which is forgotten otherwise when its last client is gone."""
    with KVStore.connect(store.socket_path) as client:
        client.open_namespace(namespace)
        client.put(namespace.chain([7] * namespace.block_tokens), [b"\0" * LAYOUT.block_bytes])


def show(driver, store, *, width=1000, height=900, scheme="light"):
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    driver.get("about:blank")
    driver.get_log("browser")
    driver.get(f"http://127.0.0.1:{store.settings.http_port}/ui")


def wait_up(driver):
    wait_for(driver, lambda: text_of(driver, "#status") == "Up", "the page is up")


def wait_samples(driver, count):
    """Wait until the page has drawn so many answers."""
    script = "return window.recorded.length > arguments[0]"
    wait_for(driver, lambda: driver.execute_script(script, count), f"{count} samples")


def stats_of(store):
    with urllib.request.urlopen(
        f"http://127.0.0.1:{store.settings.http_port}/v1/stats", timeout=60
    ) as answer:
        return json.load(answer)


def share(text):
    """The ratio that a percentage says; it is rounded, and not by all in the same way."""
    return pytest.approx(float(text.removesuffix(" %")) / 100, abs=0.000501)


def focus_of(driver):
    script = "return document.activeElement.id || document.activeElement.className"
    return driver.execute_script(script)


def press(driver, *keys):
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(driver).send_keys(*keys).perform()


def ask_why(driver, namespace, blocks):
    script = """document.getElementById('namespace').value = arguments[0];
        document.getElementById('blocks').value = arguments[1];
        document.querySelector('#why-form button').click()"""
    driver.execute_script(script, namespace, blocks)
    wait_for(driver, lambda: text_of(driver, "#answer") not in ("", "Asking …"), "an answer")
    return text_of(driver, "#answer")


def test_under_load_charts_and_tables_show_what_the_store_counts(driver, store):
    with Traffic(store.socket_path):
        show(driver, store)
        wait_samples(driver, 4)
        # In one go: what the page was told, and what it shows of that.
        told, hits, rates, curves, moves = driver.execute_script(
            f"""const rows = (section) => [...document.querySelectorAll(`#${{section}} tbody tr`)].map(
                    (row) => [...row.cells].map((cell) => cell.textContent.replaceAll('\\u202f', '')));
                const curves = (section) => (function () {{ {CURVES} }})(section);
                document.getElementById('pause').click();
                return [window.recorded, rows('hits'), rows('transfers'),
                    curves('hits'), curves('transfers')]"""
        )
    shown = [stats for _, stats in told if stats["fetch"]["requests"] > 0]
    # Which answer was drawn last is seen by its count of lookups.
    drawn = next(
        at
        for at in range(len(told) - 1, 0, -1)
        if str(sum(told[at][1]["fetch"]["hits_blocks"].values())) == hits[0][3]
    )
    (before_ms, before), (now_ms, now) = told[drawn - 1], told[drawn]
    expected = sample(now, of="fetch", time_s=0.0, before=(before, (now_ms - before_ms) / 1000))
    assert len(shown) >= 3

    assert [row[0] for row in hits] == ["all tiers", "dram", "ssd"]
    for (_, now_text, total_text, blocks), tier in zip(hits, (None, "dram", "ssd"), strict=True):
        assert expected.now.ratio(tier) == share(now_text)
        assert expected.total.ratio(tier) == share(total_text)
        if tier is not None:
            assert int(blocks) == expected.total.hits.get(tier, 0)
    assert expected.total.ratio() > 0.3
    for name, tier in (("all tiers", None), ("dram", "dram"), ("ssd", "ssd")):
        assert height(curves[name]) == pytest.approx(expected.now.ratio(tier), abs=0.01)
    assert {row[0]: int(row[3]) for row in rates} == {
        name: moved.blocks for name, moved in expected.transfers.items()
    }
    assert moves.keys() == expected.transfers.keys()
    assert complaints(driver) == []


def height(path):
    """The last value of a curve on a chart whose top is 1."""
    *_, last = re.findall(r"[ML][\d.]+ ([\d.]+)", path)
    return 1 - (float(last) - 14) / (150 - 14 - 18)


def test_at_rest_the_page_says_what_the_stats_say(driver, store):
    with Traffic(store.socket_path, pause_s=0.0) as traffic:
        show(driver, store)
        wait_for(driver, lambda: traffic.requests > 50, "traffic")
    with KVStore.connect(store.socket_path) as client:
        client.flush(60)
    count = driver.execute_script("return window.recorded.length")
    wait_samples(driver, count + 1)
    stats = stats_of(store)

    fetch = stats["fetch"]
    assert f"{fetch['lookups_blocks']} looked up by {fetch['requests']} requests" in text_of(
        driver, "#hits"
    ).replace("\u202f", "")
    misses = {row[0]: int(row[3]) for row in table_of(driver, "misses")}
    assert misses == fetch["misses_blocks"]
    for tier, told in stats["tiers"].items():
        text = text_of(driver, f'#occupancy [data-tier="{tier}"]').replace("\u202f", "")
        assert told["used_bytes"] / told["capacity_bytes"] == share(re.findall(r"([\d.]+ %):", text)[0])
        assert f"{told['blocks']} blocks" in text
    activity = {row[0]: row[1] for row in table_of(driver, "activity")}
    assert f"{stats['puts_blocks']['stored']} stored" in activity["puts, blocks"]
    assert text_of(driver, "#faults .body") == "None: every tier is up."


def get_json(store, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{store.settings.http_port}{path}", timeout=60) as answer:
        return json.load(answer)


def test_the_hottest_branches_and_the_size_curve_are_what_the_store_tells(driver, store):
    with Traffic(store.socket_path, pause_s=0.0) as traffic:
        wait_for(driver, lambda: traffic.requests > 400, "traffic")
    show(driver, store)
    wait_for(driver, lambda: text_of(driver, "#branches table"), "branches")
    wait_for(driver, lambda: text_of(driver, "#size table"), "a curve")
    told, sizes = get_json(store, "/v1/branches"), get_json(store, "/v1/size")

    rows = {row[0].split("\u2514")[-1].strip(): row for row in table_of(driver, "branches")}
    assert rows.keys() == {branch["key"][:12] for branch in told["branches"]}
    for branch in told["branches"]:
        _, _, lookups, whole, blocks, tokens, _, _, whose = rows[branch["key"][:12]]
        assert [int(lookups), int(blocks), int(tokens)] == [
            branch["fetch"]["lookups"],
            branch["blocks"],
            branch["tokens"],
        ]
        assert share(whole) == branch["fetch"]["hits"] / branch["fetch"]["lookups"]
        assert whose == f"{branch['namespace'][:12]} / {branch['tenant'][:12]}"
    # The system prompt that all conversations begin with is the hottest; each of them is a branch of it.
    system = conversation(1, 1).keys[-1].hex()[:12]
    hottest = table_of(driver, "branches")[0]
    assert hottest[0] == system
    assert int(hottest[2]) == told["lookups"]
    # Of so many lookups in a second, not every one is sampled.
    assert told["lookups"] == pytest.approx(stats_of(store)["fetch"]["requests"], rel=0.2)
    assert [row[0] for row in table_of(driver, "size")] == ["dram", "all tiers of this node"]
    shown = [float(cell.removesuffix(" %")) / 100 for cell in table_of(driver, "size")[0][2:]]
    assert shown == pytest.approx(list(sizes["hit_ratio"]["dram"].values()), abs=0.011)
    assert driver.execute_script("return document.querySelectorAll('#size .curve').length") == 1
    assert complaints(driver) == []


def test_a_branch_that_has_the_key_of_what_it_leaves_is_shown_once(driver, store):
    hold_open(store, SPACE)
    key = BlockKey(b"k" * 32)
    first = PrefixChain(SPACE.digest, (key,), SPACE.block_tokens)
    with KVStore.connect(store.socket_path) as client:
        client.open_namespace(SPACE)
        for _ in range(4):
            client.match(first)
        client.match(PrefixChain(SPACE.digest, (key,), SPACE.block_tokens, 1, key))
    wait_for(driver, lambda: len(get_json(store, "/v1/branches")["branches"]) == 2, "two branches")
    show(driver, store)
    wait_for(driver, lambda: text_of(driver, "#branches table"), "branches")
    assert [row[0].split("\u2514")[-1].strip() for row in table_of(driver, "branches")] == [
        key.hex()[:12]
    ] * 2
    assert complaints(driver) == []


def test_branches_are_scrolled_by_keyboard_on_a_phone_and_keep_the_focus(driver, store):
    from selenium.webdriver.common.keys import Keys

    with Traffic(store.socket_path, pause_s=0.0) as traffic:
        wait_for(driver, lambda: traffic.requests > 100, "traffic")
    show(driver, store, width=360, height=740)
    wait_for(driver, lambda: text_of(driver, "#branches table"), "branches")
    scrolled = "return document.querySelector('#branches .scroll').scrollLeft"

    driver.execute_script("document.getElementById('pause').focus()")
    press(driver, Keys.TAB)
    assert driver.execute_script("return document.activeElement.matches('#branches .scroll')")
    press(driver, *[Keys.ARROW_RIGHT] * 5)
    wait_for(driver, lambda: driver.execute_script(scrolled) > 0, "scrolling")
    driver.execute_script("document.querySelector('#branches .scroll').dataset.old = '1'")
    fresh = """const region = document.querySelector('#branches .scroll');
        return !region.dataset.old && document.activeElement === region && region.scrollLeft > 0"""
    wait_for(driver, lambda: driver.execute_script(fresh), "new figures")
    widths = "const page = document.documentElement; return [page.scrollWidth, page.clientWidth]"
    assert driver.execute_script(widths) == [360, 360]


def test_a_reader_is_shown_its_own_branches_though_the_rest_needs_admin(driver, keyed):
    store, keys = keyed
    ours, theirs = (opened_by(store, keys[name], times) for name, times in (("reader", 3), ("stranger", 2)))
    show(driver, store)
    wait_for(driver, lambda: "wants an API key" in text_of(driver, "#status"), "a demand")
    assert "Not told: " in text_of(driver, "#branches .body")

    script = """document.getElementById('key').value = arguments[0];
        document.querySelector('#key-form button').click()"""
    driver.execute_script(script, keys["reader"])
    wait_for(driver, lambda: text_of(driver, "#branches table"), "branches")

    (row,) = table_of(driver, "branches")
    assert row[-1].startswith(ours[:12])
    assert theirs[:12] not in driver.page_source
    assert "lacks the scope admin" in text_of(driver, "#status")
    opacity = "return getComputedStyle(document.querySelector('#branches .body')).opacity"
    assert driver.execute_script(opacity) == "1"


def opened_by(store, key, times):
    """Have the holder of a key look up blocks of a namespace of its own; returns its digest."""
    with KVStore.connect(f"http://127.0.0.1:{store.settings.http_port}", api_key=key) as client:
        namespace = client.open_namespace(SPACE)
        for _ in range(times):
            client.match(namespace.chain(range(64)))
    return namespace.digest.hex()


def test_every_control_is_reached_and_used_by_keyboard(driver, store):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    hold_open(store, SPACE)
    show(driver, store)
    wait_up(driver)

    walked = []
    while not walked or walked[-1] != "why-button":
        press(driver, Keys.TAB)
        style = (
            "const at = getComputedStyle(document.activeElement); return [at.outlineStyle, at.outlineWidth]"
        )
        assert driver.execute_script(style) == ["solid", "3px"], walked
        inside = "return document.activeElement.matches('#why-form button')"
        walked.append("why-button" if driver.execute_script(inside) else focus_of(driver))
        assert len(walked) < 20, walked
    assert walked == ["skip", "lookups", "pause", "namespace", "blocks", "why-button"]

    ActionChains(driver).key_down(Keys.SHIFT).send_keys(Keys.TAB * 3).key_up(Keys.SHIFT).perform()
    assert focus_of(driver) == "pause"
    press(driver, Keys.SPACE)
    wait_for(driver, lambda: text_of(driver, "#status") == "Paused", "a pause")
    press(driver, Keys.TAB, SPACE.digest.hex(), Keys.TAB, "1 2 3 " * 12, Keys.TAB, Keys.ENTER)
    wait_for(driver, lambda: "0 of 2 blocks are stored" in text_of(driver, "#answer"), "a report")
    assert "Block 0 misses: never_seen." in text_of(driver, "#answer")
    press(driver, Keys.TAB)
    assert focus_of(driver) == "scroll"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_is_wider_than_the_screen(driver, store, scheme):
    with Traffic(store.socket_path):
        show(driver, store, width=360, height=740, scheme=scheme)
        wait_samples(driver, 2)
    ask_why(driver, SPACE.digest.hex(), " ".join(key.hex() for key in conversation(1, 8).keys))

    widths = "const page = document.documentElement; return [page.scrollWidth, page.clientWidth, innerWidth]"
    assert driver.execute_script(widths) == [360, 360, 360]
    ground = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}[scheme]


def test_where_keys_are_wanted_the_page_asks_for_one_and_says_what_it_lacks(driver, keyed):
    store, keys = keyed
    show(driver, store)

    def enter(key):
        script = """document.getElementById('key').value = arguments[0];
            document.querySelector('#key-form button').click()"""
        driver.execute_script(script, key)

    wait_for(driver, lambda: "wants an API key" in text_of(driver, "#status"), "a demand")
    assert driver.execute_script("return document.getElementById('key-form').checkVisibility()")
    enter("kvs_wrong")
    wait_for(driver, lambda: "needs a known API key" in text_of(driver, "#status"), "a refusal")
    enter(keys["reader"])
    wait_for(driver, lambda: "lacks the scope admin" in text_of(driver, "#status"), "a refusal")
    enter(keys["admin"])
    wait_up(driver)
    assert "lacks the scope read" in ask_why(driver, "0" * 64, "1")
    enter(keys["all"])
    wait_up(driver)
    assert keys["all"] not in driver.page_source
    kept = "return [localStorage.length, sessionStorage.length, document.cookie, location.search]"
    assert driver.execute_script(kept) == [0, 0, "", ""]
    driver.refresh()
    wait_for(driver, lambda: "wants an API key" in text_of(driver, "#status"), "a demand again")


def test_a_store_that_goes_away_is_waited_for(driver, store):
    with Traffic(store.socket_path):
        show(driver, store)
        wait_samples(driver, 2)
        store.kill()
        wait_for(driver, lambda: text_of(driver, "#status").startswith("Away since "), "an outage")
        assert "no answer" in text_of(driver, "#status")
        store.start()
        wait_up(driver)
    assert driver.execute_script("return document.querySelectorAll('#hits .away').length") >= 1


def test_names_that_look_like_markup_are_shown_as_they_are(driver, store):
    model = '<img src=x onerror="document.title=1"><b>model</b>'
    namespace = Namespace(model=model, layout=LAYOUT)
    hold_open(store, namespace)
    show(driver, store)
    wait_up(driver)

    driver.execute_script("document.getElementById('namespace').focus()")
    option = """const found = document.querySelector('#namespaces option');
        return found && [found.value, found.label]"""
    digest, label = wait_for(driver, lambda: driver.execute_script(option), "the namespace")

    assert digest == namespace.digest.hex()
    assert label.startswith(model)
    assert driver.execute_script("return document.querySelectorAll('img, b').length") == 0
    assert "No report: " in ask_why(driver, "<b>x</b>", "<i>1</i>")
    assert driver.execute_script("return document.querySelectorAll('b, i').length") == 0


@pytest.mark.parametrize("how", ["keys", "tokens", "body"])
def test_why_tells_of_each_block(driver, store, how):
    chain = conversation(1, 3)
    with KVStore.connect(store.socket_path) as client:
        client.open_namespace(SPACE)
        client.put(chain[:5], [b"\0" * LAYOUT.block_bytes] * 5)
    keys = [key.hex() for key in chain.keys]
    texts = {
        "keys": ",\n".join(keys),
        "tokens": " ".join(map(str, [*range(64), *(100_000 + at for at in range(128))])),
        "body": json.dumps({"namespace": SPACE.digest.hex(), "keys": keys}),
    }
    show(driver, store)

    answer = ask_why(driver, SPACE.digest.hex(), texts[how])

    assert f"5 of {len(chain)} blocks are stored as a prefix." in answer
    assert "Block 5 misses: never_seen." in answer
    script = (
        "return [...document.querySelectorAll('#answer tbody tr')].map((row) => row.cells[1].textContent)"
    )
    assert driver.execute_script(script) == [key[:12] for key in keys]
