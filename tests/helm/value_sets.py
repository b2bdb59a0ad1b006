"""Values as people give them: one set for each way to run the store."""

REPLICA = {
    "image": "registry.example/engine:1",
    "command": ["kvstore", "engine"],
    "args": ["--model", "/models/m", "--store", "unix:/run/kvstore/kvstore.sock"],
    "ports": [{"containerPort": 8000}],
    "env": [{"name": "HF_HOME", "value": "/models"}],
    "resources": {
        "requests": {"cpu": "1", "memory": "8Gi"},
        "limits": {"memory": "8Gi", "hugepages-2Mi": "512Mi", "nvidia.com/gpu": 1},
    },
    "readinessProbe": {"httpGet": {"path": "/health", "port": 8000}},
    "volumeMounts": [{"name": "huge", "mountPath": "/hugepages"}],
}

VALUE_SETS = {
    "defaults": {},
    "replicas": {
        "image": {"repository": "registry.example/kvstore", "digest": "sha256:" + "0" * 64},
        "replica": {
            "enabled": True,
            "count": 3,
            "container": REPLICA,
            "volumes": [{"name": "huge", "emptyDir": {"medium": "HugePages"}}],
        },
        "config": {
            "store": {"write_mode": "back", "timeout_s": 0.1, "records_bytes": "1GiB"},
            "tiers": {
                "dram": {"capacity_bytes": "64GiB", "staging_bytes": "1GiB"},
                "ssd": {"io_threads": 8, "write_budget_bytes_per_day": "2TiB"},
                "remote": {"key_prefix": "kv-prod", "ttl_s": 86400},
            },
            "http": {"public_models": ["tiny", 'a "quoted" <model>']},
        },
        "ssd": {
            "enabled": True,
            "capacityBytes": "800GiB",
            "volume": "ephemeral",
            "storageClassName": "local-nvme",
        },
        "http": {"enabled": True, "apiKeys": {"existingSecret": "kv-keys", "key": "ring"}},
        "certManager": {"enabled": True, "issuerRef": {"name": "internal", "kind": "ClusterIssuer"}},
        "encryption": {"existingSecret": "kv-master"},
        "metrics": {
            "keySecret": "kv-admin",
            "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        },
        "redis": {
            "auth": {"existingSecret": "kv-redis"},
            "bundled": {"maxmemoryBytes": "16GiB", "persistence": {"enabled": True, "size": "40Gi"}},
            "tls": {"enabled": True},
        },
        "events": {
            "enabled": True,
            "topic": "kv@$(KVSTORE_POD_IP)@tiny",
            "args": ["--events-form", "array"],
            "open": True,
        },
        "networkPolicy": {
            "replicaFrom": [{"namespaceSelector": {"matchLabels": {"team": "web"}}}],
            "eventsFrom": [{"podSelector": {"matchLabels": {"app": "router"}}}],
        },
        "podAnnotations": {"example.com/owner": "inference"},
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "imagePullSecrets": ["pull"],
    },
    "daemonset": {
        "mode": "daemonset",
        "config": {"tiers": {"dram": {"capacity_bytes": "256GiB"}}, "server": {"max_connections": 1024}},
        "ssd": {"enabled": True, "capacityBytes": "2TiB", "volume": "hostPath"},
        "redis": {
            "mode": "external",
            "username": "nodes",
            "external": {"url": "rediss+cluster://a.example:6379,b.example:6379"},
            "auth": {"existingSecret": "cluster", "key": "pass"},
            "tls": {"enabled": True, "secret": "cluster-ca"},
        },
        "http": {
            "enabled": True,
            "apiKeys": {"existingSecret": "kv-keys"},
            "tls": {"existingSecret": "kv-tls"},
        },
        "metrics": {"keySecret": "kv-admin", "serviceMonitor": {"enabled": True}},
        "daemonset": {"priorityClassName": "system-node-critical", "maxUnavailable": 3},
        "events": {"enabled": True, "keysSecret": "kv-events", "clients": ["router", "indexer"]},
    },
    "container": {
        "sidecar": {
            "kind": "container",
            "waitForStore": True,
            "gateReadiness": True,
            "replicaContainer": "vllm",
        },
        "redis": {"mode": "none"},
        "ssd": {"enabled": True, "capacityBytes": 10737418240},
        "http": {"enabled": True, "address": "127.0.0.1", "port": 9000},
        "resources": {"requests": {"cpu": 2}, "limits": {"cpu": 4, "memory": "3Gi"}},
        "networkPolicy": {"enabled": False},
    },
    "secrets": {
        "http": {
            "enabled": True,
            "address": "::",
            "apiKeys": {"text": "keyring"},
            "tls": {"existingSecret": "kv-tls", "requireClientCertificate": True},
        },
        "encryption": {"text": "00" * 32},
        "redis": {
            "username": "stores",
            "tls": {"enabled": True, "secret": "redis-tls"},
            "bundled": {"program": "redis", "image": "docker.io/library/redis:8"},
        },
        "sidecar": {"waitForStore": True},
        "tracing": {"endpoint": "http://collector.monitoring:4318", "sampleRatio": 0.05},
        "env": [{"name": "TZ", "value": "UTC"}],
    },
}
