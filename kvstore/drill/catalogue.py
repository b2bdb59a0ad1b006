"""Every kind of fault the drill knows."""

from kvstore.drill import (
    client_faults,
    clock_faults,
    crowd_faults,
    disk_faults,
    failover_faults,
    host_faults,
    io_faults,
    local_faults,
    power_faults,
    process_faults,
    remote_faults,
    sealed_faults,
)
from kvstore.drill.fault import Fault


def all_faults() -> tuple[Fault, ...]:
    """Return one of each kind; kinds that can share their parts follow one another."""
    return (
        *process_faults.process_faults(),
        *disk_faults.disk_faults(),
        *io_faults.io_faults(),
        *power_faults.power_faults(),
        *client_faults.client_faults(),
        *crowd_faults.crowd_faults(),
        *local_faults.local_faults(),
        *host_faults.host_faults(),
        *clock_faults.clock_faults(),
        *remote_faults.remote_faults(),
        *sealed_faults.sealed_faults(),
        *failover_faults.failover_faults(),
    )
