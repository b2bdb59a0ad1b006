"""A real ``kvstore serve`` with API keys and TLS, and a plain client of it."""

import http.client
import json
import re
import ssl
from dataclasses import dataclass

from kvstore.drill.store_process import StoreProcess, StoreSettings

WAIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class GuardedSettings(StoreSettings):
    """A store's configuration with further lines."""

    more: str = ""
    log_level: str = "debug"

    def toml(self, socket_path):
        text = super().toml(socket_path)
        return text.replace("[server]\n", f'[server]\nlog_level = "{self.log_level}"\n') + self.more


class GuardedProcess(StoreProcess):
    """``kvstore serve`` with the ``[http]`` section that is given, on a free port of loopback.

    ``more`` are further keys of the last section that the settings write.
    """

    def __init__(self, folder, http, *, more="", **settings):
        text = '[http]\nlisten = "127.0.0.1:0"\n' + "".join(f'{k} = "{v}"\n' for k, v in http.items())
        super().__init__(folder, GuardedSettings(more=more + text, **settings))

    @property
    def log(self):
        return (self.folder / "store.log").read_text()

    @property
    def port(self):
        return int(re.findall(r"http: listening on https?://127\.0\.0\.1:(\d+)", self.log)[-1])

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def connect(self, context=None):
        if context is None:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=WAIT_S, context=context)

    def ask(self, path, key=None, *, method="GET", body=None, context=None, connection=None):
        """Return status and body; 0 and the error's name where there was no answer."""
        client = connection or self.connect(context)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        try:
            client.request(method, path, body=data, headers=headers)
            answer = client.getresponse()
            return answer.status, answer.read().decode()
        except (OSError, ssl.SSLError, http.client.HTTPException) as error:
            return 0, type(error).__name__
        finally:
            if connection is None:
                client.close()
