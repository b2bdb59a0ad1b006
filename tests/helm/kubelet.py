"""What a kubelet does with a rendered pod, by real processes: volumes, probes, hook, signals, grace."""

import http.client
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from kvstore.drill.store_process import guarded
from tests.helm.chart import named, store_container

_LOOK_S = 0.1
_RESTARTS = 2
"""After so many restarts of a container that ends by itself its pod counts as one that never gets ready."""


@dataclass(frozen=True)
class Place:
    """Where a pod runs: ``disk`` stands for the node's root, ``addresses`` replace those of the cluster.

    ``secrets``: file contents of each Secret, by its keys.
    """

    disk: Path
    addresses: dict[str, str]
    secrets: dict[str, dict[str, str]]


@dataclass(frozen=True)
class Ended:
    """How a pod's store ended: what its hook said, both statuses; ``was_killed`` when grace was over."""

    hook_status: int
    hook_output: str
    status: int
    was_killed: bool
    hook_s: float
    stop_s: float


def template_of(found):
    """Return the pod template of the workload that runs the store: DaemonSet or Deployment."""
    (template,) = [
        at["spec"]["template"]
        for at in found
        if at["kind"] in {"DaemonSet", "Deployment"}
        and at["spec"]["template"]["metadata"]["labels"].get("kvstore-store")
    ]
    return template


class Pod:
    """The store of one pod. Nothing runs before ``start``."""

    def __init__(self, found, template, place, folder):
        self.folder = folder
        self.annotations = template["metadata"]["annotations"]
        self.spec = template["spec"]
        self.container = store_container(self.spec)
        self.process = None
        self.restarts = 0
        self._place = place
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        self._mounts = {
            mount["mountPath"]: self._folder_of(volumes[mount["name"]])
            for mount in self.container["volumeMounts"]
        }
        paths = sorted(map(re.escape, self._mounts), key=len, reverse=True)
        self._paths = re.compile(rf"(?<![\w/.])({'|'.join(paths)})(?![\w-])")
        for mount in self.container["volumeMounts"]:
            self._fill(volumes[mount["name"]], self._mounts[mount["mountPath"]], found)
        (folder / "bin").mkdir()
        (folder / "bin/kvstore").symlink_to(Path(sys.executable).parent / "kvstore")

    def _folder_of(self, volume):
        if "hostPath" not in volume:
            made = self.folder / volume["name"].removeprefix("kvstore-")
            made.mkdir(parents=True)
            return made
        path = self._place.disk / volume["hostPath"]["path"].lstrip("/")
        if volume["hostPath"]["type"] == "DirectoryOrCreate":
            path.mkdir(parents=True, exist_ok=True)
        assert path.is_dir(), f"{path}: the pod cannot start: no such folder on its node"
        return path

    def _fill(self, volume, folder, found):
        if "configMap" in volume:
            for name, text in named(found, "ConfigMap", volume["configMap"]["name"])["data"].items():
                (folder / name).write_text(self.here(text))
        if "secret" in volume:
            content = self._place.secrets[volume["secret"]["secretName"]]
            for item in volume["secret"]["items"]:
                (folder / item["path"]).write_text(content[item["key"]])
                (folder / item["path"]).chmod(0o400)

    def here(self, text):
        """Return the text with paths of the container and addresses of the cluster as they are here."""
        text = self._paths.sub(lambda at: str(self._mounts[at[0]]), text)
        for there, here in self._place.addresses.items():
            text = text.replace(there, here)
        return text

    @property
    def socket_path(self):
        """The store's socket, as replicas see it."""
        return self._mounts["/run/kvstore"] / "kvstore.sock"

    @property
    def log(self):
        """What the container has said."""
        return (self.folder / "store.log").read_text()

    @property
    def _environment(self):
        facts = {"metadata.name": self.folder.name, "status.podIP": "127.0.0.1"}
        given = {
            at["name"]: self.here(at["value"])
            if "value" in at
            else facts[at["valueFrom"]["fieldRef"]["fieldPath"]]
            for at in self.container["env"]
        }
        return {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", **given}

    def start(self):
        """Start the container. The image's entry point is ``kvstore``."""
        told = self._environment
        words = [self.here(word) for word in ["kvstore", *self.container["args"]]]
        words = [re.sub(r"\$\((\w+)\)", lambda at: told[at[1]], word) for word in words]
        with (self.folder / "store.log").open("a") as out:
            self.process = subprocess.Popen(guarded(words), env=told, stdout=out, stderr=out)

    def execute(self, action, timeout_s):
        """Run a command in the container; returns its status (None: not in time) and what it wrote."""
        words = [self.here(word) for word in action["command"]]
        try:
            done = subprocess.run(
                words, env=self._environment, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            return None, str(error)
        return done.returncode, done.stdout + done.stderr

    def answers(self, probe):
        """Whether a probe succeeds now."""
        if "exec" in probe:
            return self.execute(probe["exec"], probe["timeoutSeconds"])[0] == 0
        asked = probe["httpGet"]
        host, port = self.here(f"0.0.0.0:{asked['port']}").split(":")
        assert asked["scheme"] == "HTTPS"
        # The kubelet looks at no certificate either.
        context = ssl._create_unverified_context()
        line = http.client.HTTPSConnection(host, int(port), timeout=probe["timeoutSeconds"], context=context)
        try:
            line.request("GET", asked["path"])
            return 200 <= line.getresponse().status < 400
        except (OSError, http.client.HTTPException):
            return False
        finally:
            line.close()

    def becomes_ready(self):
        """Wait until the pod is ready; False if its container ends again and again, or is not in time.

        Probes are asked more often than a kubelet would; the time that a start may take is the rendered one.
        """
        for name in ("startupProbe", "readinessProbe"):
            probe = self.container.get(name)
            give_up_s = time.monotonic() + _patience_s(self.container.get("startupProbe"))
            while probe is not None and not self.answers(probe):
                if self.process.poll() is not None:
                    if self.restarts == _RESTARTS:
                        return False
                    self.restarts += 1
                    self.start()
                elif time.monotonic() >= give_up_s:
                    return False
                time.sleep(_LOOK_S)
        return self.process.poll() is None

    def end(self, *, end_replica=lambda: None):
        """End the pod: hook; SIGTERM once its replica has ended; SIGKILL after the grace."""
        begun_s = time.monotonic()
        give_up_s = begun_s + self.spec.get("terminationGracePeriodSeconds", 30)
        hooked = []
        action = self.container["lifecycle"]["preStop"]["exec"]
        hook = threading.Thread(
            target=lambda: hooked.append(self.execute(action, give_up_s - time.monotonic()))
        )
        hook.start()
        end_replica()
        hook.join()
        hook_s = time.monotonic() - begun_s
        self.process.send_signal(signal.SIGTERM)
        was_killed = False
        try:
            status = self.process.wait(max(0.0, give_up_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            was_killed = True
            self.process.kill()
            status = self.process.wait()
        return Ended(*hooked[0], status, was_killed, hook_s, time.monotonic() - begun_s - hook_s)

    def kill(self):
        """End the process if there is one. Idempotent."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def _patience_s(startup):
    return 60.0 if startup is None else float(startup["periodSeconds"] * startup["failureThreshold"])
