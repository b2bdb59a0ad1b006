"""RequestGroups: in which namespaces one request's blocks are, by its tenant and its LoRA adapter."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvstore.keys import Namespace
from kvstore_engine_adapter.request_wishes import RequestWishes
from kvstore_engine_adapter.vllm.adapters import AdapterGroups, Groups
from kvstore_engine_adapter.vllm.identity import GroupIdentity

_MAX_TENANTS = 4096
_TAG = b"kvstore.vllm.tenant.v1"


class RequestGroups:
    """The groups of an engine's requests. Called from the scheduler's thread."""

    def __init__(self, groups: Groups, open_namespace: Callable[[Namespace], object]) -> None:
        self._groups = groups
        self._open_namespace = open_namespace
        self._adapters = AdapterGroups(groups, open_namespace)
        self._of_tenants: dict[tuple[str, str], Groups] = {}
        for group in groups:
            open_namespace(group.namespace)

    def groups(self, lora_request: Any, wishes: RequestWishes) -> Groups | None:
        """Return the groups for a request; None: it shares nothing.

        So it is with an adapter whose files are not hashed yet, and with more than 4096 tenants.
        """
        groups = self._groups if lora_request is None else self._adapters.groups(lora_request)
        if groups is None or not wishes.tenant:
            return groups
        named = (wishes.tenant, groups[0].namespace.adapter)
        if named not in self._of_tenants:
            if len(self._of_tenants) >= _MAX_TENANTS:
                return None
            self._of_tenants[named] = tuple(self._of_tenant(group, wishes.tenant) for group in groups)
        return self._of_tenants[named]

    def close(self) -> None:
        """End the thread that hashes adapters."""
        self._adapters.close()

    def _of_tenant(self, group: GroupIdentity, tenant: str) -> GroupIdentity:
        salt = group.namespace.tenant_salt
        mixed = hashlib.sha256(_TAG + len(salt).to_bytes(4, "big") + salt + tenant.encode()).digest()
        namespace = replace(group.namespace, tenant_salt=mixed)
        self._open_namespace(namespace)
        return replace(group, namespace=namespace)
