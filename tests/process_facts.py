"""What the kernel tells of a live process."""

from pathlib import Path


def arena_flags(pid):
    """Return the flags of each mapping of an arena, two letters each: VmFlags of smaps in proc(5)."""
    found, is_arena = [], False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            is_arena = "kvstore-arena" in line
        elif is_arena and line.startswith("VmFlags:"):
            found.append(line.split()[1:])
    return found


def listening_ports(pid):
    """Return (address, port) of each listening TCP socket of a process; the address as /proc writes it."""
    descriptors = Path(f"/proc/{pid}/fd").iterdir()
    targets = [str(descriptor.readlink()) for descriptor in descriptors if descriptor.is_symlink()]
    ours = {target.removeprefix("socket:[").removesuffix("]") for target in targets}
    found = set()
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]
        for row in rows:
            if row[3] == "0A" and row[9] in ours:
                address, port = row[1].split(":")
                found.add((address, int(port, 16)))
    return found


def command_line(pid):
    """Return the words a process was started with, as everybody may read them."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
