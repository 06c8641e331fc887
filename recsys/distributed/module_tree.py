"""Walking a model down to the modules that answer for everything below them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn


def walk(
    module: nn.Module, is_leaf: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    """Yields every module once, by the first path it has, and nothing below a leaf.

    Args:
        module: the root, whose path is empty.
        is_leaf: whether to stay out of a module.

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
    """Yields the modules that are leaves of :func:`walk`, by path.

    Example:
        >>> model = nn.Sequential(nn.Sequential(nn.Sequential()), nn.ReLU())
        >>> [path for path, _ in outermost(model[0], lambda m: len(m) == 0)]
        ['0']
    """
    return (found for found in walk(module, is_leaf) if is_leaf(found[1]))
