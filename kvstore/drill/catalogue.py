"""Every kind of fault the drill knows."""

from kvstore.drill import client_faults, disk_faults, host_faults, process_faults, remote_faults
from kvstore.drill.fault import Fault


def all_faults() -> tuple[Fault, ...]:
    """Return one of each kind; kinds that can share their parts follow one another."""
    return (
        *process_faults.process_faults(),
        *disk_faults.disk_faults(),
        *client_faults.client_faults(),
        *host_faults.host_faults(),
        *remote_faults.remote_faults(),
    )
