"""Values that are refused, each with a message that says what to do."""

import pytest

from tests.helm.chart import helm, render

SCHEMA = {
    "misspelt value": ({"sidecars": {}}, "sidecars"),
    "misspelt nested value": ({"ssd": {"enable": True}}, "enable"),
    "misspelt configuration key": ({"config": {"store": {"lease": 3}}}, "lease"),
    "key of the chart's own": ({"config": {"server": {"socket": "/x"}}}, "socket"),
    "unknown mode": ({"mode": "deployment"}, "sidecar"),
    "unknown policy": ({"config": {"store": {"policy": "random"}}}, "lru"),
    "ratio above one": ({"config": {"store": {"high_water_ratio": 2}}}, "1"),
    "quantity where a size belongs": ({"config": {"tiers": {"dram": {"capacity_bytes": "4Gi"}}}}, "4Gi"),
    "negative size": ({"memory": {"overheadBytes": -1}}, "overheadBytes"),
    "root": ({"runAsUser": 0}, "runAsUser"),
    "password in the address": ({"redis": {"external": {"url": "redis://u:p@host"}}}, "url"),
    "host name to listen on": ({"http": {"address": "localhost"}}, "address"),
    "privileged port": ({"http": {"port": 443}}, "port"),
    "text for a flag": ({"ssd": {"enabled": "yes"}}, "enabled"),
    "digest of another kind": ({"image": {"digest": "sha256:12"}}, "digest"),
    "relative folder": ({"daemonset": {"socketFolder": "run"}}, "socketFolder"),
}

SERVING = {"enabled": True, "apiKeys": {"existingSecret": "k"}, "tls": {"existingSecret": "t"}}

TOGETHER = {
    "no keys": ({"http": SERVING | {"apiKeys": {}}}, "http.apiKeys.existingSecret is required"),
    "no certificate": ({"http": SERVING | {"tls": {}}}, "http.tls.existingSecret or certManager.enabled"),
    "two keyrings": (
        {"http": SERVING | {"apiKeys": {"existingSecret": "k", "text": "x"}}},
        "one of http.apiKeys",
    ),
    "events without keys": ({"events": {"enabled": True}}, "needs events.keysSecret and events.clients"),
    "events for nobody": (
        {"events": {"enabled": True, "keysSecret": "k"}},
        "events.keysSecret and events.clients",
    ),
    "events with keys and open": (
        {"events": {"enabled": True, "keysSecret": "k", "clients": ["a"], "open": True}},
        "one of events.keysSecret and events.open",
    ),
    "open events for some": (
        {"events": {"enabled": True, "clients": ["a"], "open": True}},
        "events.clients keeps out nobody",
    ),
    "open events without a policy": (
        {"events": {"enabled": True, "open": True}, "networkPolicy": {"enabled": False}},
        "events.open without networkPolicy.enabled",
    ),
    "two master keys": ({"encryption": {"existingSecret": "k", "text": "x"}}, "one of encryption.existing"),
    "no issuer": ({"certManager": {"enabled": True}}, "needs certManager.issuerRef.name"),
    "no address": ({"redis": {"mode": "external"}}, "redis.external.url is required"),
    "TLS and a plain address": (
        {"redis": {"mode": "external", "external": {"url": "redis://h"}, "tls": {"enabled": True}}},
        "begins with rediss go together",
    ),
    "TLS without certificate": ({"redis": {"tls": {"enabled": True}}}, "needs redis.tls.secret"),
    "default user": ({"redis": {"username": ""}}, "redis.username is required"),
    "shared folder": ({"ssd": {"enabled": True, "volume": "hostPath"}}, "needs mode daemonset"),
    "replica without image": ({"replica": {"enabled": True}}, "needs replica.container with an image"),
    "replica beside a daemonset": (
        {"mode": "daemonset", "replica": {"enabled": True, "container": {"image": "x"}}},
        "goes with mode sidecar",
    ),
    "metrics without HTTP": ({"metrics": {"podMonitor": {"enabled": True}}}, "metrics are scraped over HTTP"),
    "metrics without key": (
        {"http": SERVING, "metrics": {"serviceMonitor": {"enabled": True}}},
        "metrics.keySecret with a key of scope admin",
    ),
    "monitor without service": (
        {
            "http": SERVING,
            "service": {"enabled": False},
            "metrics": {"keySecret": "k", "serviceMonitor": {"enabled": True}},
        },
        "needs service.enabled",
    ),
    "too little memory": (
        {"resources": {"limits": {"memory": "1Gi"}}},
        "resources.limits.memory is 1Gi, the store needs 2214592512 bytes",
    ),
    "unit of memory": ({"resources": {"limits": {"memory": "1Pi"}}}, "use a unit like Mi or Gi"),
}


@pytest.mark.parametrize(("values", "word"), SCHEMA.values(), ids=SCHEMA)
def test_the_schema_refuses(values, word):
    with pytest.raises(helm.HelmError) as caught:
        render(values)

    assert "don't meet the specifications of the schema" in str(caught.value)
    assert word in str(caught.value)


@pytest.mark.parametrize(("values", "message"), TOGETHER.values(), ids=TOGETHER)
def test_values_that_do_not_go_together_are_refused(values, message):
    with pytest.raises(helm.HelmError, match=message.replace(".", r"\.")):
        render(values)
