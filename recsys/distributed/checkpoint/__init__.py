"""Checkpoints that do not depend on the plan: save on any ranks, load on any others.

State is named by table and global row. `torch.distributed.checkpoint` lays the values out on ranks
and files. The files of this folder in reading order:

- `errors`: exceptions, raised on every rank.
- `safe_pickle`: plain data, the values that may be saved besides tensors, and metadata.
- `state`: state of model and optimizer, by the names of whole tables.
- `settings`: learning rates and other settings of optimizers.
- `versions`: the `step-N` folders and their manifests.
- `blocks`: reads and writes blocks with a CRC each.
- `chain` reads a delta with its base, and `delta` finds the rows to save.
- `rank_state`: state of each rank, such as data loaders.
- `background`: saves during training.
- `save`, `load`, and `read` (without a model).
- `export`: weights as safetensors.
- `resize`: tables with more or fewer rows than saved; `hashed`: tables with hashed ids; `values`:
  tables of another fit, whose rows follow their values.
- `table`: loads a table from an array, and `table_ids`: one with hashed ids.
- `torchrec_names` and `sharded_tensors` (for torchsnapshot).
"""

from recsys.distributed.checkpoint.background import PendingSave
from recsys.distributed.checkpoint.errors import CheckpointError
from recsys.distributed.checkpoint.export import export_safetensors
from recsys.distributed.checkpoint.load import load_checkpoint
from recsys.distributed.checkpoint.rank_state import RandomState, Stateful
from recsys.distributed.checkpoint.read import HashedRows, read_checkpoint, read_hashed_table
from recsys.distributed.checkpoint.save import save_checkpoint, save_checkpoint_async
from recsys.distributed.checkpoint.table import load_table
from recsys.distributed.checkpoint.values import NewRows
from recsys.distributed.checkpoint.versions import newest_version

__all__ = [
    "CheckpointError",
    "HashedRows",
    "NewRows",
    "PendingSave",
    "RandomState",
    "Stateful",
    "export_safetensors",
    "load_checkpoint",
    "load_table",
    "newest_version",
    "read_checkpoint",
    "read_hashed_table",
    "save_checkpoint",
    "save_checkpoint_async",
]
