"""The page's files over HTTP: what they are sent with, and what is not in them."""

import re
from html.parser import HTMLParser

import pytest

from kvstore.cli import store_figures
from kvstore.http.page_files import page_files
from tests.http.http_store import http_store
from tests.http.keyed_store import keyed_store

FILES = {
    "/ui": ("index.html", "text/html; charset=utf-8"),
    "/ui/page.css": ("page.css", "text/css; charset=utf-8"),
    "/ui/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
TEXTS = {name: data.decode() for name, data in page_files().items()}


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


TAGS = Tags(TEXTS["index.html"]).found


def policy_of(answer):
    parts = answer.headers["Content-Security-Policy"].split("; ")
    return {name: words for name, *words in (part.split() for part in parts)}


@pytest.mark.parametrize("path", FILES)
async def test_a_file_is_sent_as_what_it_is(path):
    name, kind = FILES[path]
    async with http_store() as store, store.client() as client:
        answer = await client.get(path)
        head = await client.ask("HEAD", path)

    assert (answer.status, answer.headers["Content-Type"]) == (200, kind)
    assert answer.body == page_files()[name]
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert (head.status, head.body) == (200, b"")


@pytest.mark.parametrize("path", FILES)
async def test_the_policy_lets_nothing_inline_and_nothing_from_elsewhere_in(path):
    async with http_store() as store, store.client() as client:
        policy = policy_of(await client.get(path))

    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == ["'none'"]
    assert policy["frame-ancestors"] == ["'none'"]
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == ["'self'"]
    assert policy["img-src"] == ["data:"]
    assert "unsafe" not in str(policy)


@pytest.mark.parametrize("path", FILES)
async def test_the_page_needs_no_key_and_says_nothing_of_the_store(path):
    async with keyed_store() as store, store.client() as client:
        first = await client.get(path)
        await client.open()
        again = await client.get(path)

    assert first.status == 200
    assert first.body == again.body == page_files()[FILES[path][0]]


async def test_the_page_is_there_while_the_store_starts():
    async with http_store(is_started=False) as store, store.client() as client:
        assert (await client.get("/ui")).status == 200
        assert (await client.get("/v1/stats")).status == 503


async def test_without_keys_why_is_answered_to_the_page_and_to_no_other():
    async with http_store() as store, store.client() as client:
        namespace = (await client.open()).json["namespace"]
        origin = str(client.session._base_url).rstrip("/")
        answers = [
            await client.ask(
                "POST", "/v1/why", json={"namespace": namespace, "keys": ["0" * 64]}, headers={"Origin": at}
            )
            for at in (origin, "http://attacker.example", "null")
        ]

    assert [answer.status for answer in answers] == [200, 403, 403]


def test_no_file_names_an_address_elsewhere():
    for name, text in TEXTS.items():
        # An XML namespace is a name, and is not fetched.
        addresses = re.findall(r"(?:https?|wss?|ftp):?//\S*", text.replace("http://www.w3.org/2000/svg", ""))
        assert addresses == [], name
        assert not re.search(r"@import|url\(", text), name


def test_the_page_loads_its_own_two_files_and_nothing_else():
    loaded = [attributes[name] for _, attributes in TAGS for name in ("src", "href") if name in attributes]

    assert sorted(loaded) == ["#main", "data:,", "ui/page.css", "ui/page.js"]


def test_nothing_is_inline():
    assert "<style" not in TEXTS["index.html"]
    for tag, attributes in TAGS:
        assert tag != "script" or "src" in attributes
        assert not [name for name in attributes if name == "style" or name.startswith("on")]


def test_the_script_makes_no_markup_and_keeps_nothing():
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert word not in TEXTS["page.js"], word
    for word in ("localStorage", "sessionStorage", "document.cookie", "indexedDB"):
        assert word not in TEXTS["page.js"], word


def test_every_field_has_a_label():
    labelled = {attributes.get("for") for tag, attributes in TAGS if tag == "label"}
    fields = {attributes["id"] for tag, attributes in TAGS if tag in ("input", "select", "textarea")}

    assert fields == labelled
    assert ("html", {"lang": "en"}) in TAGS


def test_every_id_that_the_script_asks_for_is_on_the_page():
    asked = set(re.findall(r'(?:byId|bodyOf|chartOf)\("([\w-]+)"\)', TEXTS["page.js"]))

    assert asked <= {attributes.get("id") for _, attributes in TAGS}
    assert len(asked) > 10


@pytest.mark.parametrize("name", ["FAULT_EVENTS", "SERVER_FAULTS", "HTTP_FAULTS"])
def test_the_page_and_top_take_the_same_counts_for_faults(name):
    (listed,) = re.findall(rf"const {name} = \[(.*?)\];", TEXTS["page.js"])

    assert tuple(re.findall(r'"(\w+)"', listed)) == getattr(store_figures, f"_{name}")
