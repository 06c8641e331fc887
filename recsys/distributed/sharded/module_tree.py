"""Model traversal that stops at given leaf modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import nn


def walk(
    module: nn.Module, is_leaf: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module once, with its first path, but no submodules of leaves.

    Args:
        module: The root, whose path is empty.
        is_leaf: Whether to skip the submodules of a module.

    Example:
        >>> model = nn.Sequential(nn.Sequential(nn.ReLU()), nn.ModuleList([nn.ReLU()]))
        >>> [path for path, _ in walk(model, lambda m: isinstance(m, nn.ModuleList))]
        ['', '0', '0.0', '1']
    """
    seen: set[int] = set()

    def visit(path: str, found: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(found) in seen:
            return
        seen.add(id(found))
        yield path, found
        if not is_leaf(found):
            for name, child in found.named_children():
                yield from visit(f"{path}.{name}" if path else name, child)

    return visit("", module)


def outermost(
    module: nn.Module, is_leaf: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the leaves of `walk` with their paths.

    Example:
        >>> model = nn.Sequential(nn.Sequential(nn.Sequential()), nn.ReLU())
        >>> [path for path, _ in outermost(model[0], lambda m: len(m) == 0)]
        ['0']
    """
    return (leaf for leaf in walk(module, is_leaf) if is_leaf(leaf[1]))


def check_untied(model: nn.Module, weights: Iterable[nn.Parameter]) -> None:
    """Check that no weight of a table is shared with another parameter.

    Sharding would end the sharing, and training would differ from the unsharded model.

    Args:
        model: The modules that may share a weight.
        weights: Weights of tables to shard.

    Raises:
        ValueError: If a weight is shared; it names both uses.
    """
    placed = {id(weight) for weight in weights}
    first: dict[int, str] = {}
    spans: list[tuple[int, int, bool, str]] = []
    for path, module in model.named_modules():
        # model.named_parameters() would omit the second use of a shared parameter
        for name, weight in module._parameters.items():
            if weight is None:
                continue
            use = f"{path}.{name}" if path else name
            if id(weight) in first:
                if id(weight) in placed and use != first[id(weight)]:
                    raise _tied(first[id(weight)], use)
                continue
            first[id(weight)] = use
            # tensors on meta and empty ones have no address; a subclass may have none of its own
            if type(weight) is nn.Parameter and not weight.is_meta and weight.numel():
                start = weight.data_ptr()
                size = weight.numel() * weight.element_size()
                spans.append((start, start + size, id(weight) in placed, use))
    end, is_placed, before = 0, False, ""
    for start, stop, placed_too, use in sorted(spans):
        if start < end and (is_placed or placed_too):
            raise _tied(before, use)
        # a span inside an earlier one must not hide the rest of the earlier one
        if stop > end:
            end, is_placed, before = stop, placed_too, use


def _tied(one: str, other: str) -> ValueError:
    return ValueError(
        "The weight of a sharded table cannot be shared with another parameter; received "
        f"{one!r} and {other!r}, which are one or overlap in memory. Give each its own parameter: "
        "nn.Parameter(weight.detach().clone())."
    )
