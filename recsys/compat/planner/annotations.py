"""Decorators for a user's `HardwarePerfConfig`, and a registry of such configs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from recsys.compat.planner.estimator_types import (
    HardwarePerfConfig,
    PerfCoefficient,
    PrefetchCoefficients,
    ShardPerfContext,
)
from recsys.compat.planner.shard_estimators import EmbeddingPerfEstimator
from recsys.compat.planner.topology import Topology
from recsys.distributed.planner.types import ParameterConstraints

_Config = TypeVar("_Config", bound=type[HardwarePerfConfig])
_Kinds = str | list[str] | None


def _listed(kinds: _Kinds) -> list[str]:
    return [kinds] if isinstance(kinds, str) else list(kinds or ())


def _formula(part: str, method: Any, kinds: _Kinds) -> Any:
    if not callable(method):
        kinds = method if kinds is None else kinds

    def mark(method: Any) -> Any:
        method.computes = part, frozenset(_listed(kinds))
        return method

    return mark(method) if callable(method) else mark


def forward_compute(
    method_or_sharding_type: Callable[..., float] | _Kinds = None, *, sharding_type: _Kinds = None
) -> Any:
    """Decorate a method that computes the milliseconds of a shard's lookup.

    It is called as `(self, ctx: ShardPerfContext) -> float`.

    Args:
        method_or_sharding_type: Method, or the value of `sharding_type`.
        sharding_type: One or several sharding types of the shards; all if None.

    Example:
        >>> class Machine(HardwarePerfConfig):
        ...     @forward_compute(sharding_type="row_wise")
        ...     def of_rows(self, ctx):
        ...         return ctx.batch_inputs / 1e6
        >>> list(Machine().formulas_of("row_wise")), list(Machine().formulas_of("table_wise"))
        (['fwd_compute'], [])
    """
    return _formula("fwd_compute", method_or_sharding_type, sharding_type)


def backward_compute(
    method_or_sharding_type: Callable[..., float] | _Kinds = None, *, sharding_type: _Kinds = None
) -> Any:
    """Decorate a method that computes the milliseconds of a shard's backward pass.

    Args:
        method_or_sharding_type: As for `forward_compute`.
        sharding_type: As for `forward_compute`.
    """
    return _formula("bwd_compute", method_or_sharding_type, sharding_type)


def fwd_coefficient(sharding_type: _Kinds = None) -> Callable[..., Any]:
    """Decorate a method that returns the `PerfCoefficient` of lookups, for some sharding types."""
    return _coefficient(True, sharding_type)


def bwd_coefficient(sharding_type: _Kinds = None) -> Callable[..., Any]:
    """Decorate a method that returns the `PerfCoefficient` of the backward pass."""
    return _coefficient(False, sharding_type)


def _coefficient(is_fwd: bool, sharding_type: _Kinds) -> Callable[..., Any]:
    def mark(method: Callable[[Any], PerfCoefficient]) -> Any:
        def milliseconds(self: Any, ctx: ShardPerfContext) -> float:
            return method(self).milliseconds(ctx, self.output_bytes(ctx, is_fwd=is_fwd))

        milliseconds.is_linear = is_fwd  # type: ignore[attr-defined]
        return _formula("fwd_compute" if is_fwd else "bwd_compute", milliseconds, sharding_type)

    return mark


def prefetch_coefficient() -> Callable[..., Any]:
    """Decorate a method that returns the `PrefetchCoefficients` of shards with a cache.

    Example:
        >>> class Machine(HardwarePerfConfig):
        ...     @prefetch_coefficient()
        ...     def of_caches(self):
        ...         return PrefetchCoefficients(expected_num_lookups_coefficient=1e-6)
        >>> list(Machine().formulas_of("table_wise"))
        ['prefetch_compute']
    """

    def mark(method: Callable[[Any], PrefetchCoefficients]) -> Any:
        def milliseconds(self: Any, ctx: ShardPerfContext) -> float:
            return method(self).milliseconds(ctx)

        return _formula("prefetch_compute", milliseconds, None)

    return mark


def output_write_size(
    method_or_sharding_type: Callable[..., float] | _Kinds = None, *, sharding_type: _Kinds = None
) -> Any:
    """Decorate a method that computes the bytes of embeddings that a lookup writes.

    It is called as `(self, ctx: ShardPerfContext, is_fwd: bool) -> float`. Coefficients of the
    output are multiplied by its result.

    Args:
        method_or_sharding_type: As for `forward_compute`.
        sharding_type: As for `forward_compute`.
    """
    return _formula("output", method_or_sharding_type, sharding_type)


def supported_sharding_types(*sharding_types: str) -> Callable[[_Config], _Config]:
    """Decorate a config that supports some sharding types only; others raise ValueError."""

    def decorate(config: _Config) -> _Config:
        config.supported = frozenset(sharding_types)
        return config

    return decorate


def ssd_mem_bw(value: float) -> Callable[[_Config], _Config]:
    """Decorate a config with the disk bandwidth in bytes per millisecond."""

    def decorate(config: _Config) -> _Config:
        config.ssd_mem_bw = value
        return config

    return decorate


def device_bw(
    bandwidth: float | None = None, *, device: str | None = None, compute_kernel: _Kinds = None
) -> Callable[[_Config], _Config]:
    """Decorate a config with the bytes per millisecond at which tables are read.

    Args:
        bandwidth: Bandwidth.
        device: "cpu" or "cuda", the device of the bandwidth; together with `compute_kernel`.
        compute_kernel: One or several compute kernels of the bandwidth; all if None.
    """

    def decorate(config: _Config) -> _Config:
        if device is None or bandwidth is None:
            config.device_bw = bandwidth
        else:
            pairs = {(device, kernel): bandwidth for kernel in _listed(compute_kernel)}
            config.kernel_device_bandwidths = {**config.kernel_device_bandwidths, **pairs}
        return config

    return decorate


class EmbeddingPerfEstimatorFactory:
    """Creates estimators for registered configs.

    Example:
        >>> @EmbeddingPerfEstimatorFactory.register("my_machine")
        ... class Slow(HardwarePerfConfig):
        ...     ddr_mem_bw = 1e6
        >>> machine = Topology(1, "cpu", ddr_cap=1 << 30)
        >>> EmbeddingPerfEstimatorFactory.create("my_machine", topology=machine).config.ddr_mem_bw
        1000000.0
    """

    _registry: ClassVar[dict[str, type[HardwarePerfConfig]]] = {
        "default_estimator": HardwarePerfConfig
    }

    @classmethod
    def register(cls, name: str) -> Callable[[_Config], _Config]:
        """Decorate a config to register it under a name."""

        def decorate(config: _Config) -> _Config:
            cls._registry[name] = config
            return config

        return decorate

    @classmethod
    def list_registered(cls) -> list[str]:
        """Return all registered names."""
        return list(cls._registry)

    @classmethod
    def is_registered(cls, name: str) -> bool:
        """Return whether a name is registered."""
        return name in cls._registry

    @classmethod
    def create(
        cls,
        hardware_name: str,
        is_inference: bool = False,
        topology: Topology | None = None,
        constraints: dict[str, ParameterConstraints] | None = None,
    ) -> EmbeddingPerfEstimator:
        """Return an estimator with the config of a name, as by `create_with_config`.

        Raises:
            ValueError: No config has this name.
        """
        if hardware_name not in cls._registry:
            raise ValueError(
                f"A config must be one of {cls.list_registered()}; received {hardware_name!r}. "
                "Register it with EmbeddingPerfEstimatorFactory.register."
            )
        config = cls._registry[hardware_name]()
        return cls.create_with_config(config, is_inference, topology, constraints)

    @staticmethod
    def create_with_config(
        config: HardwarePerfConfig,
        is_inference: bool = False,
        topology: Topology | None = None,
        constraints: dict[str, ParameterConstraints] | None = None,
    ) -> EmbeddingPerfEstimator:
        """Return an estimator.

        Args:
            config: Speeds that override the machine's speeds.
            is_inference: Whether to count forward only.
            topology: Machine.
            constraints: Constraints by table name.
        """
        if topology is None:
            raise ValueError("An estimator needs a topology; received None.")
        return EmbeddingPerfEstimator(topology, constraints, is_inference, config)
