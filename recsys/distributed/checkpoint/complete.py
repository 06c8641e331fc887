"""The planner of loads: what is to be read must be there, whole."""

from __future__ import annotations

import io
from math import prod

from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from recsys.distributed.checkpoint.errors import CheckpointError
from recsys.distributed.checkpoint.plain import decode


class CompleteLoadPlanner(DefaultLoadPlanner):
    """Refuses a checkpoint whose parts do not cover what this rank loads; unpickles nothing."""

    def create_local_plan(self) -> LoadPlan:
        """Return what is to be read.

        Raises:
            CheckpointError: if the checkpoint does not hold all of it.
        """
        plan: LoadPlan = super().create_local_plan()
        covered: dict[tuple[str, tuple[int, ...]], int] = {}
        for item in plan.items:
            key = (item.dest_index.fqn, tuple(item.dest_index.offset or ()))
            covered[key] = covered.get(key, 0) + int(prod(item.lengths))
        for name, value in self.state_dict.items():
            if not hasattr(value, "local_shards"):
                continue
            for offsets, tensor in dict(value.local_shards()).items():
                found = covered.get((name, offsets), 0)
                if found < tensor.numel() and not self.allow_partial_load:
                    raise CheckpointError(
                        f"{name}: the checkpoint holds {found} of the {tensor.numel()} values of "
                        f"the part at {offsets}"
                    )
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Set what is no tensor."""
        name = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[name], decode(name, value))
