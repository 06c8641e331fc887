"""Text of jagged and keyed tensors, for `print` and `repr`.

`print` has the format of TorchRec, with long contents shortened. `repr`, as in debuggers, starts
with sizes, dtypes and devices.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from recsys.sparse.jagged import JaggedTensor
    from recsys.sparse.keyed import KeyedTensor
    from recsys.sparse.keyed_jagged import KeyedJaggedTensor

MAX_ITEMS = 8
"""Maximum number of keys, bags, values of a bag and rows to show; more are `...`."""
MAX_WHOLE = 1000
"""Maximum number of values that `print` shows in full, as for tensors in torch."""


def format_jagged(jt: JaggedTensor) -> str:
    """Return the `repr` of a JaggedTensor: a header line and the first bags."""
    sizes = f"{jt.lengths().numel()} bags, {len(jt.values())} values"
    return _header(jt, sizes, jt.weights_or_none()) + _format_bags(jt)


def format_keyed_jagged(kjt: KeyedJaggedTensor) -> str:
    """Return the `repr` of a KeyedJaggedTensor: a header line and the first bags and keys."""
    keys = kjt.keys()
    stride = kjt.stride_per_key() if kjt.variable_stride_per_key() else kjt.stride()
    sizes = f"{len(keys)} keys, stride {stride}, {len(kjt.values())} values"
    lines = [_header(kjt, sizes, kjt.weights_or_none())]
    if kjt.values().is_meta:
        return lines[0]
    try:
        lines += [f'    "{key}":{_format_bags(kjt[key], indent=8)}' for key in keys[:MAX_ITEMS]]
    except ValueError as error:  # a repr must not raise in a debugger
        lines.append(f"    invalid: {error}")
    return "\n".join(lines + ["    ..."] * (len(keys) > MAX_ITEMS))


def format_keyed(kt: KeyedTensor) -> str:
    """Return the `repr` of a KeyedTensor: a header line and the first rows per key."""
    keys = kt.keys()
    lines = [_header(kt, f"{len(keys)} keys, shape {tuple(kt.values().shape)}")]
    if kt.values().is_meta:
        return lines[0]
    lines += [f'    "{key}": {_format_values(kt[key].detach())}' for key in keys[:MAX_ITEMS]]
    return "\n".join(lines + ["    ..."] * (len(keys) > MAX_ITEMS))


def show_jagged(jt: JaggedTensor) -> str:
    """Return the text that `print` shows for a JaggedTensor."""
    if jt.values().is_meta:
        return format_jagged(jt)
    is_whole = _is_small(jt.values(), jt.lengths())
    return _braces("JaggedTensor", _bags_by_part(jt, is_whole, is_top=True))


def show_keyed_jagged(kjt: KeyedJaggedTensor) -> str:
    """Return the text that `print` shows for a KeyedJaggedTensor."""
    try:
        is_whole = not kjt.values().is_meta and _is_small(kjt.values(), kjt.lengths())
        return _show(kjt, is_whole, lambda key: _bags_by_part(kjt[key], is_whole))
    except ValueError:
        return format_keyed_jagged(kjt)  # includes the error


def show_keyed(kt: KeyedTensor) -> str:
    """Return the text that `print` shows for a KeyedTensor."""
    is_whole = _is_small(kt.values())
    return _show(kt, is_whole, lambda key: _format_values(kt[key].detach(), is_whole))


def _is_small(*tensors: Tensor) -> bool:
    return sum(tensor.numel() for tensor in tensors) <= MAX_WHOLE


def _show(
    keyed: KeyedJaggedTensor | KeyedTensor, is_whole: bool, text_of: Callable[[str], str]
) -> str:
    if keyed.values().is_meta:
        return repr(keyed)
    keys = keyed.keys()
    shown = keys if is_whole else keys[:MAX_ITEMS]
    parts = [f'"{key}": {text_of(key)}' for key in shown]
    return _braces(type(keyed).__name__, ",\n".join(parts + ["..."] * (len(keys) > len(shown))))


def _header(
    jagged: JaggedTensor | KeyedJaggedTensor | KeyedTensor,
    sizes: str,
    weights: Tensor | None = None,
) -> str:
    values = jagged.values()
    weighted = "" if weights is None else ", weighted"
    dtype = str(values.dtype).removeprefix("torch.")
    return f"{type(jagged).__name__}({sizes}{weighted}, {dtype}, {values.device})"


def _bags_by_part(jt: JaggedTensor, is_whole: bool, *, is_top: bool = False) -> str:
    weights = jt.weights_or_none()
    bags = _format_segments(jt.values(), jt, is_whole)
    if weights is None:
        return bags
    body = f'"values": {bags},\n"weights": {_format_segments(weights, jt, is_whole)}'
    return body if is_top else f"{{\n{_indented(body)}\n}}"


_indented = partial(textwrap.indent, prefix=" " * 4)


def _braces(name: str, body: str) -> str:
    return f"{name}({{\n{_indented(body)}\n}})\n" if body else f"{name}()\n"


def _format_bags(jt: JaggedTensor, indent: int = 4) -> str:
    values, weights = jt.values(), jt.weights_or_none()
    if values.is_meta:
        return ""
    start = "\n" + " " * indent
    text = f"{start}{_format_segments(values, jt)}"
    if weights is not None:
        text += f"{start}weights {_format_segments(weights, jt)}"
    return text


def _format_segments(tensor: Tensor, jt: JaggedTensor, is_whole: bool = False) -> str:
    lengths: list[int] = jt.lengths()[: None if is_whole else MAX_ITEMS + 1].tolist()
    texts, start = [], 0
    for length in lengths:
        texts.append(_format_values(tensor[start : start + length].detach(), is_whole))
        start += length
    return f"[{', '.join(texts)}]" if is_whole else _cut(texts)


def _format_values(values: Tensor, is_whole: bool = False) -> str:
    if is_whole:
        return str(values.tolist())
    if values.dim() == 0:
        if not values.is_floating_point():
            return str(values.item())
        text = f"{values.item():.4g}"
        return text if set(text) & set(".en") else f"{text}.0"  # not 1e+04, inf and nan
    return _cut([_format_values(value) for value in values[: MAX_ITEMS + 1]])


def _cut(texts: list[str]) -> str:
    shown = texts[:MAX_ITEMS] + ["..."] * (len(texts) > MAX_ITEMS)
    return f"[{', '.join(shown)}]"
