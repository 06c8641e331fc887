"""Small TorchRec models and helper functions, for scripts that import them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from recsys.modules.deepfm_model import SimpleDeepFMNN
from recsys.modules.dlrm import DLRM
from recsys.modules.feature_processor import BaseFeatureProcessor
from recsys.modules.losses import mean_loss
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
    given = list(modules)
    assert len(given) == sizes[0], f"expected {sizes[0]} modules; received {len(given)}"
    if len(sizes) > 1:
        given = [convert_list_of_modules_to_modulelist(inner, sizes[1:]) for inner in given]
    return nn.ModuleList(given)


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
