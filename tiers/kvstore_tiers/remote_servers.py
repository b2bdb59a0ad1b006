"""The servers that a configuration names: one, a master behind sentinels, or a cluster."""

import asyncio
import ssl
from dataclasses import replace

from kvstore_tiers.remote_cluster import ClusterServers
from kvstore_tiers.remote_node import NodeSettings
from kvstore_tiers.remote_sentinel import SentinelServers
from kvstore_tiers.remote_tls import TlsFolder
from kvstore_tiers.remote_topology import Servers, SingleServer
from kvstore_tiers.remote_url import RemoteUrl, Topology


def servers_of(url: RemoteUrl, settings: NodeSettings, *, sentinel_master: str) -> Servers:
    """Return the servers at a URL, not open yet."""
    if url.topology is Topology.CLUSTER:
        return ClusterServers(url.seeds, settings)
    if url.topology is Topology.SENTINEL:
        return SentinelServers(url.seeds, sentinel_master, settings)
    return SingleServer(url.seeds[0], settings)


async def with_tls(
    settings: NodeSettings, url: RemoteUrl, tls: TlsFolder | ssl.SSLContext | None
) -> NodeSettings:
    """Return settings with what encrypts connections, if the URL says that they are.

    Raises:
        TierUnavailable: a TLS file cannot be used.
    """
    if not url.is_tls:
        return settings
    source = tls or TlsFolder()
    context = source if isinstance(source, ssl.SSLContext) else await asyncio.to_thread(source.context)
    return replace(settings, tls=context)
