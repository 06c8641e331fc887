"""Numbers that differ from rank to rank, as TorchRec's users give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, final

from recsys.distributed.planner.hardware import NUMBERS, per_rank


@final
class CustomTopologyData:
    """Numbers that differ from rank to rank, by field.

    They win over the arguments of :class:`~recsys.distributed.planner.Topology`.

    Args:
        data: for each field, such as "hbm_cap", the numbers of all ranks.
        world_size: number of ranks.

    Raises:
        ValueError: if a field is unknown, or has not one number in range per rank.
        TypeError: if a number is not one.

    Example:
        >>> data = CustomTopologyData({"hbm_cap": [40 << 30, 80 << 30]}, world_size=2)
        >>> data.has_data("ddr_cap"), data.get_data("hbm_cap")
        (False, [42949672960, 85899345920])
    """

    supported_fields: ClassVar[list[str]] = list(NUMBERS)

    def __init__(self, data: Mapping[str, Sequence[float]], world_size: int) -> None:
        unknown = sorted(data.keys() - set(NUMBERS))
        if unknown:
            raise ValueError(
                f"CustomTopologyData.data must have keys among {', '.join(NUMBERS)}; received "
                f"{', '.join(map(repr, unknown))}."
            )
        self._data = {
            name: per_rank("CustomTopologyData", name, values, world_size)
            for name, values in data.items()
        }
        self.world_size = world_size

    def has_data(self, key: str) -> bool:
        """Returns whether this field was given."""
        return key in self._data

    def get_data(self, key: str) -> list[float]:
        """Returns the number of each rank.

        Raises:
            KeyError: if the field was not given.
        """
        return list(self._data[key])

    def all_of(self, world_size: int) -> dict[str, list[float]]:
        """Returns all fields that were given.

        Raises:
            ValueError: if they were given for another number of ranks.
        """
        if self.world_size != world_size:
            raise ValueError(
                f"Topology.custom_topology_data must be made for {world_size} ranks; received "
                f"data for {self.world_size}."
            )
        return {name: list(values) for name, values in self._data.items()}
