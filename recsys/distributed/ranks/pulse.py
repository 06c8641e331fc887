"""Process that reports whether its parent lives, even while the parent holds Python's lock.

Heartbeats of a rank need Python's lock, so a rank in a long call of C code sends none. Ranks of the
same machine look at its process; ranks of other machines read the pulse: the count and the state of
the process, written by this process into the store of the job. It runs as a script with the
standard library alone, and speaks the protocol of torch's `TCPStore` (`SET` only).
"""

import os
import socket
import struct
import sys
import time

_MAGIC = 0x3C85F7CE  # `validationMagicNumber` of TCPStoreBackend.hpp
_VALIDATE, _SET = b"\0", b"\1"  # its `QueryType`


def state_of(process: int) -> str:
    """Return the state letter of a process on Linux, such as R, S or T (stopped); X for none."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _text(value: str) -> bytes:
    return struct.pack("=Q", len(value)) + value.encode()


def main(host: str, port: str, key: str, interval: str, process: str) -> None:
    """Write the pulse of a process until it or the store ends."""
    parent = int(process)
    with socket.create_connection((host, int(port)), timeout=60) as store:
        store.sendall(_VALIDATE + struct.pack("=I", _MAGIC))
        count, state = 0, ""
        while state != "X":
            state = state_of(parent) if os.getppid() == parent else "X"
            # TCPStore keeps its keys below "/"
            store.sendall(_SET + _text(f"/{key}") + _text(f"{count} {state}"))
            count += 1
            time.sleep(float(interval))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except OSError:
        sys.exit(1)  # the store has ended
