"""The page's colours are far enough from what they are on, light and dark (WCAG 2.2, 1.4.3 and 1.4.11)."""

import re

import pytest

from kvstore.http.page_files import page_files

CSS = page_files()["page.css"].decode()
LIGHT, DARK = (
    dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
    for block in re.findall(r":root \{(.*?)\}", CSS, re.S)
)
TEXTS = ("text", "muted", "accent", "good", "bad")
LINES = [f"series-{number}" for number in range(6)]


def luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("ground", ["ground", "panel"])
def test_texts_and_lines_stand_out(colours, ground):
    assert min(contrast(colours[name], colours[ground]) for name in TEXTS) >= 4.5
    assert min(contrast(colours[name], colours[ground]) for name in LINES) >= 3


def test_dark_changes_every_colour():
    assert LIGHT.keys() == DARK.keys()
