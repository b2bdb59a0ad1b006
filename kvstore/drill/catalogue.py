"""Every kind of fault the drill knows."""

from kvstore.drill import client_faults, disk_faults, host_faults, process_faults, remote_faults
from kvstore.drill.fault import Fault


def all_faults() -> tuple[Fault, ...]:
    """Return one of each kind."""
    return (
        process_faults.KillUnderLoad(),
        process_faults.KillDuringStart(),
        process_faults.TerminateUnderLoad(),
        process_faults.FreezeServer(),
        disk_faults.SlabBitFlips(),
        disk_faults.SlabForeignBlock(),
        disk_faults.SlabTruncated(),
        disk_faults.IndexBitFlips(),
        disk_faults.FolderDeleted(),
        disk_faults.DiskWriteErrors(),
        *remote_faults.remote_faults(),
        *client_faults.client_faults(),
        *host_faults.host_faults(),
    )
