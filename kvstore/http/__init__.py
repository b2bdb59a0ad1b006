"""The store over HTTP: the API of ``docs/http.md``, served by aiohttp."""

from kvstore.http.face import HttpFace
from kvstore.http.limits import Limits

__all__ = ["HttpFace", "Limits"]
