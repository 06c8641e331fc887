"""Checkpoints that do not depend on the plan: save on any ranks, load on any others.

State is named by table and global row. `torch.distributed.checkpoint` lays the values out on
ranks and files; the files here read as follows: `errors` (raised on every rank), `plain` (what
may be saved besides tensors), `state` (of model and optimizer, by the names of whole tables),
`settings` (learning rates and the like), `versions` (the `step-N` folders and their
manifests), `metadata` (read without running what a pickle says), `blocks` (written and read
with a CRC each), `progress` (what each rank keeps for itself), `background` (saves while training
goes on), `save`, `load` (of all that `complete` says), `read` (without a model),
`export` (as safetensors), `resize` (tables with more or fewer rows than saved), `table` (from an
array), `torchrec_names`, and `sharded_tensors` (for torchsnapshot).
"""

from recsys.distributed.checkpoint.background import PendingSave
from recsys.distributed.checkpoint.errors import CheckpointError
from recsys.distributed.checkpoint.export import export_safetensors
from recsys.distributed.checkpoint.load import load_checkpoint
from recsys.distributed.checkpoint.progress import RandomState, Stateful
from recsys.distributed.checkpoint.read import read_checkpoint
from recsys.distributed.checkpoint.save import save_checkpoint, save_checkpoint_async
from recsys.distributed.checkpoint.table import load_table
from recsys.distributed.checkpoint.versions import newest_version

__all__ = [
    "CheckpointError",
    "PendingSave",
    "RandomState",
    "Stateful",
    "export_safetensors",
    "load_checkpoint",
    "load_table",
    "newest_version",
    "read_checkpoint",
    "save_checkpoint",
    "save_checkpoint_async",
]
