"""Accumulators on two ranks give what one gives on all samples."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from recsys.metrics import AUC, BinnedAUC, NormalizedEntropy, auc

METRICS = {"auc": AUC, "binned": BinnedAUC, "entropy": NormalizedEntropy}


def samples():
    generator = torch.Generator().manual_seed(0)
    return torch.rand(101, generator=generator), torch.arange(101) % 3 == 0


def worker(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    predictions, labels = samples()
    mine = [slice(0, 40), slice(40, 101), slice(0, 0)][rank]
    found = {}
    for name, make in METRICS.items():
        metric = make()
        if rank < 2:
            metric.update(predictions[mine], labels[mine])
        metric.sync()
        found[name] = metric.compute()
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_synced_equals_whole(tmp_path):
    mp.spawn(worker, args=(str(tmp_path),), nprocs=3)
    predictions, labels = samples()
    for rank in range(3):
        found = torch.load(tmp_path / f"{rank}.pt")
        for name, make in METRICS.items():
            whole = make()
            whole.update(predictions, labels)
            torch.testing.assert_close(found[name], whole.compute())
        torch.testing.assert_close(found["auc"], auc(predictions, labels))
