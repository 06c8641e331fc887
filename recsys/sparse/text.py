"""What jagged and keyed tensors look like.

`print` shows the first values in TorchRec's layout; `repr`, which debuggers show, says sizes, types
and devices first.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from recsys.sparse.jagged import JaggedTensor
    from recsys.sparse.keyed import KeyedTensor
    from recsys.sparse.keyed_jagged import KeyedJaggedTensor

MAX_ITEMS = 8
"""Keys, bags, values of a bag and rows beyond this number are shown as `...`."""


def format_jagged(jt: JaggedTensor) -> str:
    """Describe a JaggedTensor in a header line and its first bags."""
    sizes = f"{jt.lengths().numel()} bags, {len(jt.values())} values"
    return _header(jt, sizes, jt.weights_or_none()) + _format_bags(jt)


def format_keyed_jagged(kjt: KeyedJaggedTensor) -> str:
    """Describe a KeyedJaggedTensor in a header line and the first bags of its first keys."""
    keys = kjt.keys()
    stride = kjt.stride_per_key() if kjt.variable_stride_per_key() else kjt.stride()
    sizes = f"{len(keys)} keys, stride {stride}, {len(kjt.values())} values"
    lines = [_header(kjt, sizes, kjt.weights_or_none())]
    if kjt.values().is_meta:
        return lines[0]
    try:
        lines += [f'    "{key}":{_format_bags(kjt[key], indent=8)}' for key in keys[:MAX_ITEMS]]
    except ValueError as error:  # a repr that raises would hide the very object to debug
        lines.append(f"    invalid: {error}")
    return "\n".join(lines + ["    ..."] * (len(keys) > MAX_ITEMS))


def format_keyed(kt: KeyedTensor) -> str:
    """Describe a KeyedTensor in a header line and its first rows per key."""
    keys = kt.keys()
    lines = [_header(kt, f"{len(keys)} keys, shape {tuple(kt.values().shape)}")]
    if kt.values().is_meta:
        return lines[0]
    lines += [f'    "{key}": {_format_values(kt[key].detach())}' for key in keys[:MAX_ITEMS]]
    return "\n".join(lines + ["    ..."] * (len(keys) > MAX_ITEMS))


def show_jagged(jt: JaggedTensor) -> str:
    """Return what `print` shows of a JaggedTensor."""
    if jt.values().is_meta:
        return format_jagged(jt)
    return _braces("JaggedTensor", _bags_by_part(jt, is_top=True))


def show_keyed_jagged(kjt: KeyedJaggedTensor) -> str:
    """Return what `print` shows of a KeyedJaggedTensor."""
    try:
        return _show(kjt, lambda key: _bags_by_part(kjt[key]))
    except ValueError:
        return format_keyed_jagged(kjt)  # which says what is wrong with it


def show_keyed(kt: KeyedTensor) -> str:
    """Return what `print` shows of a KeyedTensor."""
    return _show(kt, lambda key: _format_values(kt[key].detach()))


def _show(keyed: KeyedJaggedTensor | KeyedTensor, text_of: Callable[[str], str]) -> str:
    if keyed.values().is_meta:
        return repr(keyed)
    keys = keyed.keys()
    parts = [f'"{key}": {text_of(key)}' for key in keys[:MAX_ITEMS]]
    return _braces(type(keyed).__name__, ",\n".join(parts + ["..."] * (len(keys) > MAX_ITEMS)))


def _header(
    jagged: JaggedTensor | KeyedJaggedTensor | KeyedTensor,
    sizes: str,
    weights: Tensor | None = None,
) -> str:
    values = jagged.values()
    weighted = "" if weights is None else ", weighted"
    dtype = str(values.dtype).removeprefix("torch.")
    return f"{type(jagged).__name__}({sizes}{weighted}, {dtype}, {values.device})"


def _bags_by_part(jt: JaggedTensor, *, is_top: bool = False) -> str:
    weights = jt.weights_or_none()
    bags = _format_segments(jt.values(), jt)
    if weights is None:
        return bags
    body = f'"values": {bags},\n"weights": {_format_segments(weights, jt)}'
    return body if is_top else f"{{\n{_indented(body)}\n}}"


def _braces(name: str, body: str) -> str:
    return f"{name}({{\n{_indented(body)}\n}})\n" if body else f"{name}()\n"


def _indented(text: str) -> str:
    return textwrap.indent(text, " " * 4)


def _format_bags(jt: JaggedTensor, indent: int = 4) -> str:
    values, weights = jt.values(), jt.weights_or_none()
    if values.is_meta:
        return ""
    start = "\n" + " " * indent
    text = f"{start}{_format_segments(values, jt)}"
    if weights is not None:
        text += f"{start}weights {_format_segments(weights, jt)}"
    return text


def _format_segments(tensor: Tensor, jt: JaggedTensor) -> str:
    lengths = jt.lengths()[: MAX_ITEMS + 1].tolist()
    texts, start = [], 0
    for length in lengths:
        texts.append(_format_values(tensor[start : start + length].detach()))
        start += length
    return _cut(texts)


def _format_values(values: Tensor) -> str:
    if values.dim() == 0:
        if not values.is_floating_point():
            return str(values.item())
        text = f"{values.item():.4g}"
        return text if set(text) & set(".en") else f"{text}.0"  # not 1e+04, inf and nan
    return _cut([_format_values(value) for value in values[: MAX_ITEMS + 1]])


def _cut(texts: list[str]) -> str:
    shown = texts[:MAX_ITEMS] + ["..."] * (len(texts) > MAX_ITEMS)
    return f"[{', '.join(shown)}]"
