"""Small TorchRec models and helper functions, for scripts that import them."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.optim import Optimizer

from recsys.base.checked import checked, checked_late
from recsys.kernels.types import EmbeddingLocation
from recsys.modules.deepfm_model import SimpleDeepFMNN
from recsys.modules.dlrm import DLRM
from recsys.modules.embedding_configs import BaseEmbeddingConfig, PoolingType
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.feature_processor import PositionWeightedModuleCollection
from recsys.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)
from recsys.modules.losses import mean_loss
from recsys.modules.position_weights import ScriptedPositions
from recsys.modules.tables.embedding_tables import TableCollection
from recsys.sparse import JaggedTensor, KeyedJaggedTensor


class DLRMWrapper(DLRM):
    """A `DLRM` whose input is a batch, and which also returns the loss in training mode.

    Batches have `float_features` `[B, dense_in_features]`, `idlist_features`, a
    KeyedJaggedTensor, and `label` `[B]`, from 0 to 1.
    """

    def forward(self, model_input: Any) -> Any:  # type: ignore[override]
        """Return the mean binary cross entropy and the logits `[B, 1]`; in eval mode the logits."""
        logits = super().forward(model_input.float_features, model_input.idlist_features)
        if not self.training:
            return logits
        return mean_loss(logits.squeeze(-1), model_input.label), logits


class SimpleDeepFMNNWrapper(SimpleDeepFMNN):
    """A `SimpleDeepFMNN` whose input is a batch as in `DLRMWrapper`.

    The loss is TorchRec's: it treats the predictions, which are probabilities, as logits.
    """

    def forward(self, model_input: Any) -> Any:  # type: ignore[override]
        """Return the loss and the predictions `[B, 1]`; in eval mode the predictions."""
        predictions = super().forward(model_input.float_features, model_input.idlist_features)
        if not self.training:
            return predictions
        return mean_loss(predictions.squeeze(-1), model_input.label), predictions


class BaseFeatureProcessor(nn.Module, abc.ABC):
    """Base of processors of a dict of features; new code uses `FeatureProcessorsCollection`."""

    @abc.abstractmethod
    def forward(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Return the same ids in the same bags, with weights."""


class PositionWeightedModule(BaseFeatureProcessor):
    """Learned weights of ids by their position in the bag.

    Args:
        max_feature_lengths: Length of the longest bag by feature; weights start at 1.
        device: Device of the weights.
    """

    def __init__(
        self, max_feature_lengths: dict[str, int], device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.max_feature_lengths = max_feature_lengths
        self.position_weights = nn.ParameterDict(
            {
                name: nn.Parameter(torch.ones(length, device=device))
                for name, length in max_feature_lengths.items()
            }
        )

    def reset_parameters(self) -> None:
        """Set all weights to 1."""
        for weights in self.position_weights.values():
            nn.init.ones_(weights)

    def forward(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Return the features; a feature with position weights has them as its weights."""
        weighted = {
            name: JaggedTensor(
                bags.values(),
                weights=self.position_weights[name][
                    offsets_to_range_traceble(bags.offsets(), bags.values())
                ],
                lengths=bags.lengths(),
                offsets=bags.offsets(),
            )
            for name, bags in features.items()
            if name in self.position_weights
        }
        return {**features, **weighted}


def offsets_to_range_traceble(offsets: Tensor, values: Tensor) -> Tensor:
    """Return each value's position in its bag, `[number of values]`.

    Args:
        offsets: Offsets of the bags, `[B + 1]`.
        values: Values of the bags.

    Example:
        >>> offsets_to_range_traceble(torch.tensor([0, 2, 3]), torch.tensor([7, 8, 9]))
        tensor([0, 1, 0])
    """
    starts = torch.repeat_interleave(offsets[:-1], offsets.diff(), output_size=values.numel())
    return torch.arange(values.numel(), device=values.device) - starts


class LazyModuleExtensionMixin(LazyModuleMixin):
    """`LazyModuleMixin` of torch whose `apply` raises an error before the first forward pass.

    `initialize_parameters` receives the arguments of `forward`, including keyword arguments.

    Example:
        >>> class Doubling(LazyModuleExtensionMixin, nn.Module):
        ...     def initialize_parameters(self, *args, **kwargs): ...
        ...     def forward(self, x):
        ...         return 2 * x
        >>> module = Doubling()
        >>> module(torch.ones(2)), module.apply(lambda m: None) is module
        (tensor([2., 2.]), True)
    """

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call a function on the module and all its submodules.

        Raises:
            RuntimeError: The module has run no forward pass yet; use `lazy_apply`.
        """
        if hasattr(self, "_initialize_hook"):
            raise RuntimeError(
                f"{type(self).__name__}.apply needs initialized parameters: call the module on a "
                "batch first, or use lazy_apply."
            )
        return super().apply(fn)  # type: ignore[misc,no-any-return]


def lazy_apply(module: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
    """Call a function on a module and all its submodules after its next forward pass.

    Use it for modules that create their parameters in the first forward pass.

    Args:
        module: Module.
        fn: Function, as in `nn.Module.apply`.

    Returns:
        The module.
    """

    def apply_once(module: nn.Module, inputs: Any, output: Any) -> None:
        handle.remove()
        module.apply(fn)

    handle = module.register_forward_hook(apply_once)
    return module


def extract_module_or_tensor_callable(
    module_or_callable: Callable[..., Any],
) -> Callable[..., Any]:
    """Return the result of a function that creates a module; return other arguments unchanged."""
    if isinstance(module_or_callable, nn.Module):
        return module_or_callable
    try:
        made = module_or_callable()
    except TypeError:  # it takes a tensor
        return module_or_callable
    if not isinstance(made, nn.Module):
        raise ValueError(
            "module_or_callable without arguments must return an nn.Module; received a function "
            f"that returns {type(made).__name__}."
        )
    return made


def get_module_output_dimension(module: Callable[[Tensor], Tensor], in_features: int) -> int:
    """Return the number of output columns of a module for `in_features` input columns."""
    return module(torch.zeros(1, in_features)).size(-1)


def check_module_output_dimension(
    module: Iterable[nn.Module] | nn.Module, in_features: int, out_features: int
) -> bool:
    """Return whether every module maps `in_features` to `out_features` columns."""
    modules = [module] if isinstance(module, nn.Module) else module
    return all(get_module_output_dimension(m, in_features) == out_features for m in modules)


def init_mlp_weights_xavier_uniform(m: nn.Module) -> None:
    """Initialize a linear layer: weights by Glorot and Bengio (2010), biases 0. Skip others."""
    if isinstance(m, nn.Linear):
        nn.init.xavier_uniform_(m.weight)
        if m.bias is not None:
            nn.init.zeros_(m.bias)


def construct_modulelist_from_single_module(
    module: nn.Module, sizes: tuple[int, ...]
) -> nn.ModuleList:
    """Return copies of a module with newly initialized linear layers.

    Args:
        module: Module to copy.
        sizes: Lengths of the nested lists, outermost first.
    """
    if len(sizes) > 1:
        return nn.ModuleList(
            construct_modulelist_from_single_module(module, sizes[1:]) for _ in range(sizes[0])
        )
    copies = nn.ModuleList(copy.deepcopy(module) for _ in range(sizes[0]))
    return copies.apply(init_mlp_weights_xavier_uniform)


def convert_list_of_modules_to_modulelist(
    modules: Iterable[Any], sizes: tuple[int, ...]
) -> nn.ModuleList:
    """Convert nested lists of modules to ModuleLists.

    Args:
        modules: Lists of modules, nested once for each size.
        sizes: Lengths of the nested lists, outermost first.

    Raises:
        AssertionError: A list has another length.
    """
    items = list(modules)
    assert len(items) == sizes[0], f"expected {sizes[0]} modules; received {len(items)}"
    if len(sizes) > 1:
        items = [convert_list_of_modules_to_modulelist(inner, sizes[1:]) for inner in items]
    return nn.ModuleList(items)


def reorder_inverse_indices(
    inverse_indices: tuple[list[str], Tensor] | None, feature_names: list[str]
) -> Tensor:
    """Return the inverse indices of some features, `[features, B]`; empty if None."""
    if inverse_indices is None:
        return torch.empty(0)
    keys, indices = inverse_indices
    return indices[[keys.index(name) for name in feature_names]]


def process_pooled_embeddings(pooled_embeddings: list[Tensor], inverse_indices: Tensor) -> Tensor:
    """Expand pooled embeddings of distinct samples to the whole batch.

    Args:
        pooled_embeddings: Embeddings of each feature, `[distinct samples, D]`.
        inverse_indices: Number of each sample's distinct sample, `[features, B]`.

    Returns:
        Embeddings, `[B, sum of D]`.
    """
    pairs = zip(pooled_embeddings, inverse_indices, strict=True)
    return torch.cat([pooled[indices] for pooled, indices in pairs], dim=1)


def maybe_td_to_kjt(features: Any, keys: list[str] | None = None) -> KeyedJaggedTensor:
    """Convert a TensorDict of jagged nested tensors to a KeyedJaggedTensor.

    Args:
        features: TensorDict, or a KeyedJaggedTensor, which is returned unchanged.
        keys: Keys to convert, in this order; all if None.
    """
    if isinstance(features, KeyedJaggedTensor):
        return features
    bags = {}
    for key in keys or list(features.keys()):
        nested = features[key]
        bags[key] = JaggedTensor(nested.values(), lengths=nested.offsets().diff())
    return KeyedJaggedTensor.from_jt_dict(bags)


class BaseGroupedFeatureProcessor(nn.Module, abc.ABC):
    """Base of processors of some features; new code uses `FeatureProcessorsCollection`."""

    @abc.abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the ids of these features in the same bags, with weights."""


class PositionWeightedProcessor(PositionWeightedModuleCollection, BaseGroupedFeatureProcessor):
    """A `PositionWeightedModuleCollection` that drops other features from the batch.

    Example:
        >>> batch = KeyedJaggedTensor(
        ...     ["a", "b"], torch.tensor([7, 8, 9]), lengths=torch.tensor([1, 2])
        ... )
        >>> PositionWeightedProcessor({"b": 2})(batch).keys()
        ['b']
    """

    @checked_late
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Set the weights of a batch and drop other features; arguments and errors as the base."""
        keys = features.keys()
        known = [i for i, key in enumerate(keys) if key in self.max_feature_lengths]
        return super().forward(features if len(known) == len(keys) else features.permute(known))

    def script_form(self) -> nn.Module:
        """Return the module that TorchScript compiles in place of this module."""
        weights, owner = self.position_weights_dict, type(self).__name__
        return ScriptedPositions(weights, owner, keeps_others=False)


@checked
def pooling_type_to_pooling_mode(
    pooling_type: PoolingType, sharding_type: object = None
) -> PoolingType:
    """Return the pooling itself, which the kernels use too.

    Args:
        pooling_type: The pooling.
        sharding_type: Ignored; the result does not depend on the placement of a table.
    """
    return pooling_type


@checked
def pooling_type_to_str(pooling_type: PoolingType) -> str:
    """Return the `mode` of `torch.nn.EmbeddingBag` for a pooling.

    Raises:
        ValueError: `pooling_type` is NONE.

    Example:
        >>> pooling_type_to_str(PoolingType.MEAN)
        'mean'
    """
    if pooling_type not in (PoolingType.SUM, PoolingType.MEAN):
        raise ValueError(
            f"pooling_type must be PoolingType.SUM or MEAN; received {pooling_type!r}."
        )
    return "sum" if pooling_type is PoolingType.SUM else "mean"


@dataclass
class EmbeddingTableConfig(BaseEmbeddingConfig):
    """A table of a grouped lookup, with or without pooling and weights."""

    pooling: PoolingType = PoolingType.SUM
    """NONE for a sequence table."""
    is_weighted: bool = False
    """Ids have weights."""
    has_feature_processor: bool = False
    """A feature processor computes the weights."""
    embedding_names: list[str] = field(default_factory=list)
    """Names of the outputs, one per feature."""


@checked
def fuse_embedding_optimizer(
    model: nn.Module,
    optimizer_type: type[Optimizer],
    optimizer_kwargs: Mapping[str, Any],
    device: torch.device,
    location: EmbeddingLocation | None = None,
) -> nn.Module:
    """Replace every collection of a model in place by a fused collection with the same weights.

    Args:
        model: The model, or a collection.
        optimizer_type: Class of the tables' optimizer.
        optimizer_kwargs: Arguments of the optimizer.
        device: Device of the new tables.
        location: As for `FusedEmbeddingBagCollection`.

    Returns:
        The model, or the fused collection.

    Raises:
        ValueError: As `FusedEmbeddingBagCollection`.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> films = EmbeddingBagConfig(100, 4, "films", feature_names=["film"])
        >>> model = nn.Sequential(EmbeddingBagCollection([films]))
        >>> cpu = torch.device("cpu")
        >>> type(fuse_embedding_optimizer(model, torch.optim.SGD, {"lr": 0.1}, cpu)[0]).__name__
        'FusedEmbeddingBagCollection'
    """
    made: dict[int, nn.Module] = {}
    settings: dict[str, Any] = {"device": device, "location": location}
    for module in model.modules():
        new: TableCollection
        if type(module) is EmbeddingBagCollection:
            new = FusedEmbeddingBagCollection(
                module.embedding_bag_configs(), optimizer_type, optimizer_kwargs,
                module.is_weighted(), bounds_check_mode=module.bounds_check_mode, **settings,
            )  # fmt: skip
        elif type(module) is EmbeddingCollection:
            new = FusedEmbeddingCollection(
                module.embedding_configs(), optimizer_type, optimizer_kwargs,
                need_indices=module.need_indices(), bounds_check_mode=module.bounds_check_mode,
                **settings,
            )  # fmt: skip
        else:
            continue
        if "meta" not in (module.device.type, new.device.type):
            new.load_state_dict(module.state_dict())
        made[id(module)] = new.train(module.training)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            parent._modules[name] = made.get(id(child), child)
    return made.get(id(model), model)
