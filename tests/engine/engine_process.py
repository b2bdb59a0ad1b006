"""``kvstore engine`` in a process of its own, and clients of it."""

import json
import signal
import subprocess
import sys
import urllib.request

COMMAND = [sys.executable, "-c", "import sys; from kvstore.cli import main; sys.exit(main())"]

TEXT = "The old pier burned down in 1847. " * 10


class Process:
    """A kvstore command that says when it is ready; killed at the end if it still runs."""

    def __init__(self, *arguments, environ=None):
        self.child = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )

    def __enter__(self):
        self.event = json.loads(self.child.stdout.readline())
        assert self.event["event"] == "ready"
        return self

    def __exit__(self, *_):
        self.kill()

    @property
    def url(self):
        return self.event["url"]

    def kill(self):
        self.child.kill()
        self.child.communicate()

    def stop(self):
        self.child.send_signal(signal.SIGTERM)
        _, errors = self.child.communicate(timeout=30)
        return self.child.returncode, errors

    def ask(self, **changes):
        data = {"model": "tiny", "messages": [{"role": "user", "content": TEXT}], "temperature": 0}
        data |= {"max_tokens": 6, "kvstore": {"output_tokens": True}} | changes
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", data=json.dumps(data).encode())
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)["kvstore"]

    def stats(self):
        with urllib.request.urlopen(f"{self.url}/stats", timeout=30) as response:
            return json.load(response)


def engine(model, *options, environ=None):
    """Start an engine over a model file, with a short context."""
    arguments = ("engine", "--model", model, "--port", 0, "--max-model-len", 512, *options)
    return Process(*arguments, environ=environ)
