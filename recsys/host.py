"""`recsys doctor --host`: checks whether this machine can be part of a job of several machines.

`collect_host` inspects the machine. `diagnose_host` only reads these facts, so tests can run it
with facts of any machine.
"""

from __future__ import annotations

import array
import ctypes
import os
import shutil
import socket
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, final

from recsys.base.findings import Finding

__all__ = ["HostFacts", "collect_host", "diagnose_host"]

_LEAST_SHARED: Final = 1 << 30
_LEAST_FILES: Final = 4096
_CONNECT_S: Final = 5.0
_SETTINGS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_GET_ADDRESS: Final = 0x8915  # SIOCGIFADDR of Linux
_CLOCK_ERROR: Final = 5  # TIME_ERROR of adjtimex


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """Facts about a machine and its network; the defaults are a machine without a problem."""

    name: str = "host1"
    """Host name, which gloo resolves to find the address of this machine."""
    addresses: tuple[str, ...] = ("10.0.0.2",)
    """Addresses of the host name; empty if it does not resolve."""
    interfaces: Mapping[str, Sequence[str]] = field(
        default_factory=lambda: {"lo": ["127.0.0.1"], "eth0": ["10.0.0.2"]}
    )
    """Addresses of each network interface, without link-local addresses of IPv6."""
    chosen: Mapping[str, str] = field(default_factory=dict)
    """Names of interfaces, by the environment variable that chooses them."""
    shared_bytes: int | None = 64 << 30
    """Free bytes of /dev/shm; None if there is none."""
    open_files: int | None = 1 << 16
    """Limit of the open files of a process; None if there is none."""
    has_synchronized_clock: bool | None = True
    """None if it is unknown."""
    rendezvous: str = ""
    """Address `HOST:PORT` of the rendezvous; empty if it was not named."""
    rendezvous_error: str | None = None
    """Error of the connection to the rendezvous; None without an error or a rendezvous."""


def diagnose_host(facts: HostFacts) -> list[Finding]:
    """Return findings about a machine of a job, the most basic ones first.

    Args:
        facts: The result of `collect_host`.

    Returns:
        The findings. The machine is fine if no finding has the level `problem`.

    Example:
        >>> debian = HostFacts(name="host1", addresses=("127.0.1.1",))
        >>> [problem] = [f for f in diagnose_host(debian) if f.level == "problem"]
        >>> problem.fix
        'export GLOO_SOCKET_IFNAME=eth0'
    """
    return [
        *_judge_addresses(facts),
        *_judge_rendezvous(facts),
        *_judge_shared_memory(facts),
        *_judge_open_files(facts),
        *_judge_clock(facts),
    ]


def _judge_addresses(facts: HostFacts) -> Iterator[Finding]:
    interfaces = facts.interfaces.items()
    outside = {name: all_of for name, all_of in interfaces if not all(map(_is_loopback, all_of))}
    if not outside:
        yield Finding(
            "problem", "No network interface has an address that other machines can reach."
        )
        return
    known = ", ".join(f"{name} {' '.join(all_of)}" for name, all_of in outside.items())
    for setting, names in facts.chosen.items():
        # NCCL_SOCKET_IFNAME may contain prefixes, and "^" before names to exclude: not checked
        is_exact = setting.startswith("GLOO")
        missing = [name for name in names.split(",") if name not in outside] if is_exact else []
        if missing:
            yield Finding(
                "problem",
                f"{setting} must name an interface with an address; received {names!r}, and "
                f"there are {known}.",
                f"export {setting}={next(iter(outside))}",
            )
        else:
            yield Finding("ok", f"{setting} is {names}.")
    if "GLOO_SOCKET_IFNAME" in facts.chosen:
        return
    remedy = f"export GLOO_SOCKET_IFNAME={next(iter(outside))}"
    if not facts.addresses:
        text = (
            f"The host name {facts.name} must resolve, as gloo listens at its address. Add it to "
            "/etc/hosts or the DNS, or name an interface on each machine."
        )
        yield Finding("problem", text, remedy)
    elif all(map(_is_loopback, facts.addresses)):
        text = (
            f"The host name {facts.name} must resolve to an address that other machines reach; it "
            f"resolves to {', '.join(facts.addresses)}, as by the line 127.0.1.1 of /etc/hosts on "
            "Debian. Remove this line, or name an interface on each machine."
        )
        yield Finding("problem", text, remedy)
    elif not set(facts.addresses) & set(chain.from_iterable(outside.values())):
        text = (
            f"The host name {facts.name} resolves to {', '.join(facts.addresses)}, which no "
            f"interface of this machine has; there are {known}. Gloo cannot listen there."
        )
        yield Finding("problem", text, remedy)
    else:
        yield Finding("ok", f"{facts.name} resolves to {', '.join(facts.addresses)} ({known}).")


def _judge_rendezvous(facts: HostFacts) -> Iterator[Finding]:
    if not facts.rendezvous:
        return
    if facts.rendezvous_error is None:
        yield Finding("ok", f"The rendezvous {facts.rendezvous} answers.")
    elif facts.rendezvous_error == "refused":
        text = (
            f"The machine of {facts.rendezvous} answers, but nothing listens at this port. That is "
            "right before torchrun starts there."
        )
        yield Finding("note", text)
    else:
        text = (
            f"The rendezvous {facts.rendezvous} cannot be reached: {facts.rendezvous_error}. Check "
            "the name, the port and firewalls between the machines."
        )
        yield Finding("problem", text)


def _judge_shared_memory(facts: HostFacts) -> Iterator[Finding]:
    if facts.shared_bytes is None:
        text = "There is no /dev/shm: workers of a DataLoader and NCCL need shared memory."
        yield Finding("problem", text, "docker run --shm-size=16g ...")
    elif facts.shared_bytes < _LEAST_SHARED:
        text = (
            f"/dev/shm has {facts.shared_bytes / 2**20:.0f} MiB free; workers of a DataLoader and "
            "NCCL need about 1 GiB. Containers have 64 MiB by default."
        )
        yield Finding("problem", text, "docker run --shm-size=16g ...")
    else:
        yield Finding("ok", f"/dev/shm has {facts.shared_bytes / 2**30:.0f} GiB free.")


def _judge_open_files(facts: HostFacts) -> Iterator[Finding]:
    if facts.open_files is not None and facts.open_files < _LEAST_FILES:
        text = (
            f"A process can open {facts.open_files} files. Each process group opens a connection "
            "to each other rank, so hundreds of ranks need more."
        )
        yield Finding("note", text, "ulimit -n 65536")
    else:
        number = "any number of" if facts.open_files is None else f"{facts.open_files}"
        yield Finding("ok", f"A process can open {number} files.")


def _judge_clock(facts: HostFacts) -> Iterator[Finding]:
    if facts.has_synchronized_clock:
        yield Finding("ok", "The clock is synchronized.")
    elif facts.has_synchronized_clock is not None:
        text = (
            "The clock is not synchronized, so times in logs and traces of several machines cannot "
            "be compared."
        )
        yield Finding("note", text, "systemctl enable --now systemd-timesyncd")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def collect_host(rendezvous: str = "") -> HostFacts:
    """Inspect this machine and its network.

    Args:
        rendezvous: Address `HOST:PORT` of the rendezvous of a job, to which it connects; empty: it
            connects to nothing.

    Returns:
        The facts.

    Raises:
        ValueError: `rendezvous` has no port.
    """
    name = socket.gethostname()
    return HostFacts(
        name=name,
        addresses=_addresses_of(name),
        interfaces=_interfaces(),
        chosen={setting: os.environ[setting] for setting in _SETTINGS if os.environ.get(setting)},
        shared_bytes=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
        open_files=_open_files(),
        has_synchronized_clock=_has_synchronized_clock(),
        rendezvous=rendezvous,
        rendezvous_error=_error_of_connection(rendezvous) if rendezvous else None,
    )


def _addresses_of(name: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(address[4][0]).partition("%")[0] for address in found))


def _interfaces() -> dict[str, list[str]]:
    """Return the IPv4 and IPv6 addresses of each interface."""
    addresses: dict[str, list[str]] = defaultdict(list)
    with suppress(OSError), open("/proc/net/if_inet6") as lines:
        for line in lines:
            digits, _, _, scope, _, name = line.split()
            if scope != "20":  # not link-local
                addresses[name].append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    if sys.platform == "linux":
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            for _, name in socket.if_nameindex():
                request = array.array("b", struct.pack("256s", name.encode()[:15]))
                with suppress(OSError):  # it has no IPv4 address
                    fcntl.ioctl(asked.fileno(), _GET_ADDRESS, request, True)
                    addresses[name].append(socket.inet_ntoa(request.tobytes()[20:24]))
    return dict(addresses)


def _open_files() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if limit == resource.RLIM_INFINITY else limit


def _has_synchronized_clock() -> bool | None:
    if sys.platform != "linux":
        return None
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # modes 0: it reads
    except (AttributeError, OSError):
        return None
    return None if state < 0 else state != _CLOCK_ERROR


def _error_of_connection(rendezvous: str) -> str | None:
    name, _, port = rendezvous.rpartition(":")
    if not name or not port.isdecimal():
        raise ValueError(
            f"--host must be the HOST:PORT of the rendezvous, such as host0:29500; received "
            f"{rendezvous!r}."
        )
    try:
        with socket.create_connection((name.strip("[]"), int(port)), _CONNECT_S):
            return None
    except ConnectionRefusedError:
        return "refused"
    except (OSError, OverflowError) as error:
        return f"{error}" or type(error).__name__
