"""A pool of processes that run a function on several ranks, shared by the whole test session."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_GRACE_S = 5.0  # how long the other ranks get to report after one has failed
_START_S = 240.0  # the time in which a process must start and import the function's modules


class RankError(AssertionError):
    """A function failed on some rank; the message has every rank's traceback."""


def _stacks_path(store_path: str, rank: int) -> str:
    """Return the file of a rank's stack, which it writes shortly before its time is over."""
    return f"{store_path}-{rank}"


def _serve(conn: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", "TBE B200 optimization")  # FBGEMM 1.6's kernels, once each
    num_modules = 0
    with contextlib.suppress(EOFError):  # from recv_bytes: the pool has ended
        while True:
            job = conn.recv_bytes()
            try:
                # imports the function's module
                fn, args, rank, world_size, store_path, timeout = pickle.loads(job)
            except Exception:
                conn.send_bytes(pickle.dumps((False, traceback.format_exc())))
                continue
            if len(sys.modules) != num_modules:
                # Imported modules stay: a collection need not look through them after every
                # function, which takes 0.2 s, longer than many a function.
                num_modules = len(sys.modules)
                gc.freeze()
            conn.send_bytes(pickle.dumps((True, "ready")))
            conn.recv_bytes()  # all ranks are
            with Path(_stacks_path(store_path, rank)).open("w") as stacks:
                faulthandler.dump_traceback_later(max(timeout - 2, 1), file=stacks)
                data = _run(conn, partial(fn, *args), rank, world_size, store_path, timeout)
                faulthandler.cancel_dump_traceback_later()
            conn.send_bytes(data)


def _run(
    conn: Connection,
    fn: Callable[[], Any],
    rank: int,
    world_size: int,
    store_path: str,
    timeout: float,
) -> bytes:
    """Calls ``fn`` in a process group of its own; returns its pickled result or traceback."""
    import torch
    import torch.distributed as dist

    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store_path, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        dist.barrier()  # a rank that ends at once must not leave before all are connected
        torch.manual_seed(rank)
        data = pickle.dumps((True, fn()))
    except Exception:
        data = pickle.dumps((False, traceback.format_exc()))
    else:
        conn.send_bytes(pickle.dumps((True, "done")))
        conn.recv_bytes()  # all ranks are: one may have been connecting to this one until now
    # Models in cycles hold the group. It must not be they that end it: gloo's threads are
    # then joined under the interpreter's lock, which they sometimes want themselves.
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        # In torch 2.11 the next group would get DTensors on a mesh of this one.
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
    return data


class RankPool:
    """Runs functions on 1 to 4 ranks over gloo on the loopback interface."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[Any, Connection]] = []

    def _grow(self, size: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        os.environ["OMP_NUM_THREADS"] = "1"
        while len(self._workers) < size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    @staticmethod
    def _taken(path: str) -> str:
        """Reads a file and removes it, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            text = Path(path).read_text(errors="replace")
            os.unlink(path)
            return text
        return ""

    def _answers(self, world_size: int, timeout: float) -> dict[int, tuple[bool, Any]]:
        """Return each rank's next answer, without ranks that do not answer in time."""
        answers: dict[int, tuple[bool, Any]] = {}
        rank_of = {conn: rank for rank, (_, conn) in enumerate(self._workers[:world_size])}
        deadline = time.monotonic() + timeout
        while len(answers) < world_size and time.monotonic() < deadline:
            pending = [conn for conn, rank in rank_of.items() if rank not in answers]
            for conn in wait(pending, timeout=max(deadline - time.monotonic(), 0)):
                assert isinstance(conn, Connection)
                try:
                    answers[rank_of[conn]] = pickle.loads(conn.recv_bytes())
                except EOFError:
                    answers[rank_of[conn]] = (False, "the process died")
                if not answers[rank_of[conn]][0]:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        return answers

    def __call__(
        self, world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0
    ) -> list[Any]:
        """Calls ``fn(*args)`` on every rank, in a fresh process group; returns the results by rank.

        ``fn`` must be a module-level function. ``timeout`` counts the seconds from when every
        process has imported it. Raises RankError if it fails or does not return in time on any
        rank; the pool is then restarted, so that the next test finds it whole.
        """
        self._grow(world_size)
        handle, path = tempfile.mkstemp(prefix="recsys-store-")
        os.close(handle)
        os.unlink(path)
        for rank, (_, conn) in enumerate(self._workers[:world_size]):
            conn.send_bytes(pickle.dumps((fn, args, rank, world_size, path, timeout)))
        answers = self._answers(world_size, _START_S)  # the clock starts when all are ready
        for word in (b"start", b"end"):
            if len(answers) == world_size and all(ok for ok, _ in answers.values()):
                for _, conn in self._workers[:world_size]:
                    conn.send_bytes(word)
                answers = self._answers(world_size, timeout)
        stacks = {rank: self._taken(_stacks_path(path, rank)) for rank in range(world_size)}
        self._taken(path)
        failed = {rank: text for rank, (ok, text) in answers.items() if not ok}
        silent = [rank for rank in range(world_size) if rank not in answers]
        if failed or silent:
            self.close()
            report = "".join(f"\n--- rank {rank} ---\n{text}" for rank, text in failed.items())
            report += "".join(f"\n--- rank {rank} ---\n{stacks[rank]}" for rank in silent)
            raise RankError(f"ranks without an answer: {silent}{report}")
        return [answers[rank][1] for rank in range(world_size)]

    def close(self) -> None:
        """Ends the processes."""
        for process, conn in self._workers:
            conn.close()
            process.kill()
            process.join()
        self._workers.clear()
