"""A stand-in for a cluster's API server: discovery, and objects that are created, applied, read and deleted.

It keeps what it is sent and checks little: that an object's kind, group and namespace are those of its path,
and that server-side apply names a field manager. No controller runs, so no pod ever starts.
"""

import json
import re
import threading
import uuid
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

Manifest = dict[str, Any]

RESOURCES = {
    "v1": {
        "configmaps": "ConfigMap",
        "pods": "Pod",
        "secrets": "Secret",
        "services": "Service",
        "namespaces": "Namespace",
    },
    "apps/v1": {
        "daemonsets": "DaemonSet",
        "deployments": "Deployment",
        "replicasets": "ReplicaSet",
        "statefulsets": "StatefulSet",
    },
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "cert-manager.io/v1": {"certificates": "Certificate"},
    "monitoring.coreos.com/v1": {
        "podmonitors": "PodMonitor",
        "prometheusrules": "PrometheusRule",
        "servicemonitors": "ServiceMonitor",
    },
}
VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]

_OBJECT = re.compile(
    r"/(?:api|apis)/(?P<group>.+)/namespaces/(?P<ns>[^/]+)/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?$"
)


def _root(group_version: str) -> str:
    return f"api/{group_version}" if "/" not in group_version else f"apis/{group_version}"


def discovery() -> dict[str, Manifest]:
    """Return what is answered at each path that says what the cluster has."""
    groups = [name.split("/") for name in RESOURCES if "/" in name]
    answers: dict[str, Manifest] = {
        "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [
                {
                    "name": group,
                    "versions": [{"groupVersion": f"{group}/{version}", "version": version}],
                    "preferredVersion": {"groupVersion": f"{group}/{version}", "version": version},
                }
                for group, version in groups
            ],
        },
        "/openapi/v3": {
            "paths": {_root(name): {"serverRelativeURL": f"/openapi/v3/{_root(name)}"} for name in RESOURCES}
        },
    }
    for name, kinds in RESOURCES.items():
        answers[f"/{_root(name)}"] = {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": name,
            "resources": [
                {
                    "name": plural,
                    "kind": kind,
                    "namespaced": kind != "Namespace",
                    "singularName": "",
                    "verbs": VERBS,
                }
                for plural, kind in kinds.items()
            ],
        }
        answers[f"/openapi/v3/{_root(name)}"] = _openapi(name, kinds)
    return answers


def _openapi(group_version: str, kinds: dict[str, str]) -> Manifest:
    """Return the description that Helm looks into for the parameter fieldValidation of PATCH."""
    group, _, version = group_version.rpartition("/")
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": "v1.33.0"},
        "paths": {
            f"/{_root(group_version)}/namespaces/{{namespace}}/{plural}/{{name}}": {
                "patch": {
                    "x-kubernetes-group-version-kind": {"group": group, "version": version, "kind": kind},
                    "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
                    "responses": {"200": {"description": "OK"}},
                }
            }
            for plural, kind in kinds.items()
        },
    }


class ApiServer(AbstractContextManager["ApiServer"]):
    """Listens on a free loopback port while it is entered. ``objects`` by (kind, name)."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Manifest] = {}
        self.refused: list[str] = []
        self.lock = threading.Lock()
        self.version = 0
        self._discovery = discovery()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> "ApiServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def kubeconfig(self) -> str:
        """Text of a configuration that leads here."""
        server = f"http://127.0.0.1:{self._server.server_port}"
        return yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "c", "cluster": {"server": server}}],
                "users": [{"name": "u", "user": {}}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "c",
            }
        )

    def answer(self, method: str, target: str, content_type: str, body: bytes) -> tuple[int, Manifest]:
        """Return status and answer of one request."""
        path = urlsplit(target).path
        if method == "GET" and path in self._discovery:
            return 200, self._discovery[path]
        found = _OBJECT.match(path)
        kind = RESOURCES.get(found["group"], {}).get(found["plural"]) if found else None
        if found is None or kind is None:
            self.refused.append(f"{method} {target}")
            return _failure(404, "NotFound")
        with self.lock:
            if method == "POST":
                return self._create(kind, found["ns"], found["group"], json.loads(body))
            if method == "PATCH":
                return self._apply(kind, found, parse_qs(urlsplit(target).query), content_type, body)
            return self._read_or_delete(method, kind, found)

    def _create(self, kind: str, namespace: str, group: str, made: Manifest) -> tuple[int, Manifest]:
        key = kind, made["metadata"]["name"]
        if key in self.objects:
            return _failure(409, "AlreadyExists")
        return 201, self._keep(kind, namespace, group, made)

    def _apply(
        self, kind: str, found: "re.Match[str]", query: dict[str, list[str]], content_type: str, body: bytes
    ) -> tuple[int, Manifest]:
        if content_type != "application/apply-patch+yaml" or "fieldManager" not in query:
            self.refused.append(f"PATCH {found[0]} {content_type}")
            return _failure(415, "UnsupportedMediaType")
        made = yaml.safe_load(body)
        if made["metadata"]["name"] != found["name"]:
            return _failure(400, "BadRequest")
        is_new = (kind, found["name"]) not in self.objects
        return 201 if is_new else 200, self._keep(kind, found["ns"], found["group"], made)

    def _keep(self, kind: str, namespace: str, group: str, made: Manifest) -> Manifest:
        assert (made["kind"], made["apiVersion"]) == (kind, group)
        assert made["metadata"].setdefault("namespace", namespace) == namespace
        key = kind, made["metadata"]["name"]
        before = self.objects.get(key, {"metadata": {"uid": str(uuid.uuid4())}})
        self.version += 1
        made["metadata"] |= {"uid": before["metadata"]["uid"], "resourceVersion": str(self.version)}
        self.objects[key] = made
        return made

    def _read_or_delete(self, method: str, kind: str, found: "re.Match[str]") -> tuple[int, Manifest]:
        if found["name"] is None:
            items = [at for (of, _), at in self.objects.items() if of == kind]
            return 200, {"kind": f"{kind}List", "apiVersion": found["group"], "metadata": {}, "items": items}
        held = self.objects.get((kind, found["name"]))
        if held is None:
            return _failure(404, "NotFound")
        if method == "DELETE":
            del self.objects[kind, found["name"]]
            return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success"}
        return 200, held

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # head and body are two writes: 40 ms otherwise

            def _reply(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                content_type = self.headers.get("Content-Type", "")
                status, answer = server.answer(self.command, self.path, content_type, body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        for method in ("GET", "POST", "PATCH", "PUT", "DELETE"):
            setattr(Handler, f"do_{method}", Handler._reply)
        return Handler


def _failure(code: int, reason: str) -> tuple[int, Manifest]:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}
    return code, status | {"message": reason}
