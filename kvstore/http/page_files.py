"""The page that a store shows of itself: three files, which hold no data of the store.

What the page shows it asks for as any client does, with the key that its reader enters.
"""

from collections.abc import Mapping
from importlib import resources

from aiohttp import web

from kvstore.http.service import COMMON_HEADERS, HttpService

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",  # the empty icon, so that browsers ask for none
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""What the page may load and do: nothing from elsewhere, nothing inline, no text as markup."""

PAGE_HEADERS: Mapping[str, str] = {
    **COMMON_HEADERS,
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}

_NAMES = ("index.html", "page.css", "page.js")


def page_files() -> dict[str, bytes]:
    """Read the files of the page."""
    folder = resources.files("kvstore.http") / "page"
    return {name: (folder / name).read_bytes() for name in _NAMES}


def page(service: HttpService) -> web.Response:
    """Return the page that shows the state of the store."""
    return _answer(service, "index.html", "text/html")


def page_style(service: HttpService) -> web.Response:
    """Return the page's style."""
    return _answer(service, "page.css", "text/css")


def page_script(service: HttpService) -> web.Response:
    """Return the page's script."""
    return _answer(service, "page.js", "text/javascript")


def _answer(service: HttpService, name: str, kind: str) -> web.Response:
    headers = {**PAGE_HEADERS, "Content-Type": f"{kind}; charset=utf-8"}
    return web.Response(body=service.page[name], headers=headers)
