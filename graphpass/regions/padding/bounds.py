"""Checks that index tensors stay in bounds in their padding, so that no kernel reads outside of its tensor.

See Note [Contents of padding] for the indices that need a check.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from graphpass.regions.padding.calls import CHECK_IF_DECLARED, OpCall, PaddingReason
from graphpass.regions.padding.rules.indexing import is_whole, stays_real
from graphpass.regions.padding.sizes import product
from graphpass.regions.padding.values import Factors, PaddedValue

__all__ = ["checks_numbers", "needs_real_contents", "new_fields", "reads_outside"]

_COUNTS = frozenset({"arange", "iota", "linspace"})
_RUNNING = frozenset({"cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"})
_BY_POSITION = frozenset({"index", "_unsafe_index", "index_put", "_unsafe_index_put", "_unsafe_masked_index"})
_ALONG_DIM = frozenset(
    {
        "index_select",
        "gather",
        "take_along_dim",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "index_add",
        "index_copy",
        "index_fill",
        "index_reduce",
    }
)
_PLACES = frozenset(
    (
        *("argmax", "argmin", "argsort", "sort", "topk", "kthvalue", "max", "min", "cummax", "cummin"),
        *("median", "nanmedian", "mode", "bucketize", "searchsorted"),
    )
)
"""Operators that return integers for floats: places among the entries, which exist for all contents."""
_PROBABILITIES = frozenset({"bernoulli", "binary_cross_entropy", "binomial", "multinomial", "poisson"})


def needs_real_contents(call: OpCall, tensors: Sequence[PaddedValue]) -> bool:
    """Whether an operator may fail for floats that no real entry has: it converts them to integers, or checks them.

    A table's index may be among those integers, and an index beyond the table ends the process on a GPU.
    """
    if checks_numbers(call.name):
        return True
    from_floats = any(value.dtype is not None and value.dtype.is_floating_point for value in tensors)
    to_integers = any(_is_integer(shape.dtype) for shape in call.shapes)
    return from_floats and to_integers and call.name not in _PLACES


def checks_numbers(name: str) -> bool:
    """Whether the operator with this base name fails for numbers that are no probabilities."""
    return name in _PROBABILITIES


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def new_fields(call: OpCall, tensors: Sequence[PaddedValue], value: PaddedValue) -> frozenset[str]:
    """The key fields along which the padding of a result may have values that no real entry has."""
    sizes = call.sizes
    present = frozenset(field for dim, at in sizes.places(value) for field in sizes.fields_of(value.factors[dim][at]))
    if not present:
        return present
    if call.name in _COUNTS:
        return present
    inherited = frozenset[str]().union(*(tensor.new_fields for tensor in tensors))
    if call.name in _RUNNING:
        dim = call.dim(call.argument("dim"), value.rank)
        inherited |= {field for size in value.factors[dim] for field in sizes.fields_of(size)}
    return inherited & present


def reads_outside(call: OpCall) -> PaddingReason | None:
    """Why indices in padding may be out of bounds for an operator; None if all are in bounds."""
    if not call.sizes.ordered:
        return None
    for index, of_dim in picked(call):
        if not index.new_fields or is_whole(index, of_dim) or stays_real(call, index, of_dim):
            continue
        for dim, at in call.sizes.places(index):
            size = index.factors[dim][at]
            is_new = not index.new_fields.isdisjoint(call.sizes.fields_of(size))
            if is_new and not _exists(index.pad_at((dim, at)), of_dim):
                why = f"its padding may index beyond the {product(of_dim)} entries"
                return PaddingReason(why, size=size, remedy=CHECK_IF_DECLARED)
    return None


def _exists(pad: object, of_dim: Factors) -> bool:
    """Whether a known index is in bounds of a dimension for all sizes."""
    length = product(of_dim)
    return type(pad) is int and (pad == 0 or (isinstance(length, int) and -length <= pad < length))


def picked(call: OpCall) -> Iterator[tuple[PaddedValue, Factors]]:
    """Each index tensor of an operator, with the factors of the dimension that it indexes."""
    if call.name == "embedding":
        yield call.tensor("indices"), call.tensor("weight").factors[0]
    elif call.name in _BY_POSITION:
        value = call.tensor("self")
        for of_dim, index in zip(value.factors, call.argument("indices"), strict=False):
            if isinstance(index, PaddedValue) and index.dtype is not torch.bool:
                yield index, of_dim
    elif call.name in _ALONG_DIM:
        value, index = call.tensor("self"), call.tensor("index", "indices")
        dim = call.argument("dim")
        if isinstance(dim, int) and value.rank:
            yield index, value.factors[call.dim(dim, value.rank)]
        else:
            yield index, tuple(size for of_dim in value.factors for size in of_dim)
