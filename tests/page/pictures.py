"""Take the pictures of docs/images: the page and ``kvstore top`` beside a real store under load.

``scripts/screenshots`` runs it; the tests do not.
"""

import io
import re
import tempfile
import time
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME, TerminalTheme

from kvstore import KVStore
from kvstore.cli.top_view import Marks, view
from kvstore.cli.watching import Watch
from kvstore.drill.redis_server import RedisServer, free_port
from kvstore.drill.store_process import StoreProcess, StoreSettings, wait_until
from tests.page.browser import browser, text_of
from tests.page.traffic import SPACE, Traffic, conversation

IMAGES = Path(__file__).parents[2] / "docs" / "images"
MIB = 1 << 20
SAMPLES = 30
FAULT_AT = 14
BACK_AT = 19
ADDRESS = "/run/kvstore/kvstore.sock"
SIZES = {"page-light.png": (1000, False), "page-dark.png": (1000, True), "page-phone.png": (360, True)}

_GROUND, _TEXT, _MUTED = (255, 255, 255), (27, 31, 36), (87, 96, 106)
_COLOURS = [(164, 14, 38), (17, 99, 41), (122, 82, 0), (5, 80, 174), (122, 61, 184), (11, 98, 110)]
"""Red, green, yellow, blue, magenta and cyan, dark enough for a light ground."""


def main() -> None:
    """Run a store with three tiers, its traffic and an outage of Redis, and take the pictures meanwhile."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("ssd", "redis"):
            (folder / part).mkdir()
        redis = RedisServer(folder / "redis")
        redis.start()
        settings = StoreSettings(
            dram_bytes=6 * MIB,
            ssd_bytes=48 * MIB,
            ssd_folder=folder / "ssd",
            redis_url=f"redis://127.0.0.1:{redis.port}/0",
            http_port=free_port(),
        )
        try:
            with StoreProcess(folder, settings) as store, Traffic(store.socket_path) as traffic:
                wait_until(lambda: traffic.requests > 200, 60.0, pause_s=0.1)
                take(store, redis)
        finally:
            redis.kill()


def take(store: StoreProcess, redis: RedisServer) -> None:
    """Watch for a while, with Redis away for a part of it."""
    url = f"http://127.0.0.1:{store.settings.http_port}/ui"
    with browser() as driver, KVStore.connect(store.socket_path) as client:
        driver.get(url)
        watch = Watch(client.stats, of="fetch")
        for number in range(SAMPLES):
            if number == FAULT_AT:
                redis.kill()
            if number == BACK_AT:
                redis.start()
            watch.next()
            time.sleep(2.0)
        draw_top(watch)
        keys = [key.hex() for key in (*conversation(1, 6).keys, *conversation(999, 3).keys[4:])]
        driver.execute_script(
            "document.getElementById('namespace').value = arguments[0];"
            "document.getElementById('blocks').value = arguments[1];"
            "document.querySelector('#why-form button').click()",
            SPACE.digest.hex(),
            "\n".join(keys),
        )
        wait_until(lambda: "stored as a prefix" in text_of(driver, "#answer"), 60.0, pause_s=0.1)
        for name, (width, is_dark) in SIZES.items():
            photograph(driver, name, width=width, is_dark=is_dark)


def photograph(driver, name: str, *, width: int, is_dark: bool) -> None:
    """Save the whole page as a browser of that width shows it."""
    scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    height = 900
    for _ in range(2):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        time.sleep(2.5)
        height = driver.execute_script("return document.documentElement.scrollHeight")
    with Image.open(io.BytesIO(driver.get_screenshot_as_png())) as picture:
        picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
            IMAGES / name, optimize=True
        )


def draw_top(watch: Watch) -> None:
    """Save what ``kvstore top`` shows as SVG, light and dark; the fonts are those of whoever looks at it."""
    light = TerminalTheme(_GROUND, _TEXT, [_TEXT, *_COLOURS, _MUTED], [_MUTED, *_COLOURS, _TEXT])
    for name, theme in (("top-light.svg", light), ("top-dark.svg", SVG_EXPORT_THEME)):
        console = Console(
            record=True, width=80, file=io.StringIO(), force_terminal=True, color_system="truecolor"
        )
        console.print(view(watch, ADDRESS, width=80, marks=Marks.of("utf-8"), interval_s=2.0))
        svg = console.export_svg(title="kvstore top", theme=theme)
        # Rich has the picture load fonts from elsewhere.
        (IMAGES / name).write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S), encoding="utf-8")


if __name__ == "__main__":
    main()
