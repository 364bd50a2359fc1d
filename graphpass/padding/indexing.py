"""Relations of operators that read or write by index, and what is known of indices: bounds, positions.

Along a padded dimension the indices must be known to be real.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from graphpass.ledger import PaddingFinding
from graphpass.padding.opcall import (
    OpCall,
    PaddingReason,
    PaddingRule,
    Returned,
    tensors_of,
    words,
)
from graphpass.padding.pointwise import cast, copied, dropout, entry_by_entry, filled, random_numbers, zeroed
from graphpass.padding.sizes import as_size, product
from graphpass.padding.values import (
    Approximate,
    Factors,
    PaddedValue,
    Place,
    Size,
    is_finite,
)

BAGS = ("_embedding_bag", "_embedding_bag_forward_only")
ROW_FOR_EACH_BAG = (
    "pass ids of two dimensions, a row for each bag that is filled up with padding_idx, and declare what the padding"
    " holds (padding={'ids': 0} for padding_idx=0)"
)
ArgumentPath: TypeAlias = "tuple[str] | tuple[str, int]"
"""The name of an argument, and a position in it if it is a list."""


def stays_real(call: OpCall, index: PaddedValue, of_dim: Factors) -> bool:
    """Whether each clean index selects the same, real entry of a dimension in both runs."""
    if call.asks_independence:
        return is_whole(index, of_dim)
    if index.counted is not None:  # guard: made_index_counts
        return index.counted == product(of_dim) and call.sizes.is_prefix(of_dim)
    if index.index is None or len(of_dim) > 1:
        return False  # guard: proof_picked_unknown
    along = index.factors[index.index.dim][index.index.factor]
    left = as_size(product(of_dim) - along - index.index.offset)
    return index.index.offset >= 0 and isinstance(left, int) and left >= 0


def is_whole(index: PaddedValue, of_dim: Factors) -> bool:
    """Whether the indices are 0, 1, 2, ... along one factor, over exactly one dimension."""
    if index.index is None or index.index.offset != 0 or len(of_dim) != 1:
        return False
    return index.factors[index.index.dim] == of_dim


def by_contents(what: str, size: Size | None) -> PaddingReason:
    """The reason that only the contents of a call decide whether padding is read or written."""
    return PaddingReason(what, is_by_contents=True, size=size)


def check_order(call: OpCall, of_dim: Factors) -> None:
    """Refuse data that names entries of a dimension which stand at other indices in a padded run."""
    if not call.asks_independence and not call.sizes.is_prefix(of_dim):  # guard: proof_index_into_flattened
        inside = call.sizes.first_padded(of_dim[1:])
        why = f"data names entries of {list(of_dim)}, which stand at other indices in a padded run"
        raise call.refuse(why, inside, "index each size by itself: `x[i, j]` in place of `x.flatten(0, 1)[k]`")


def _picked(
    call: OpCall, value: PaddedValue, hit: Mapping[int, PaddedValue]
) -> tuple[Sequence[Factors], int, PaddedValue]:
    """The factors of the indices ``hit``, broadcast together, where they stand in ``x[i, :, j]``, and the rest there.

    They stand in place of the indexed dimensions if these are adjacent, else in front.
    """
    picked: list[Factors] = [()] * max(index.rank for index in hit.values())
    for index in hit.values():
        picked = call.unify_into(picked, index)
    dims = list(hit)
    at = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    rest = [dim for dim in range(value.rank) if dim not in hit]
    to = {dim: position + (len(picked) if position >= at else 0) for position, dim in enumerate(rest)}
    kept = [value.factors[dim] for dim in rest]
    return picked, at, replace(value.moved((*kept[:at], *picked, *kept[at:]), to), index=None)


def _selects(call: OpCall, index: PaddedValue, dim: int, of_dim: Factors) -> list[PaddingReason]:
    """The reason why the entries that an index selects along one dimension may be padding, if they may."""
    if not call.sizes.any_padded(of_dim) or stays_real(call, index, of_dim):
        return []
    return [by_contents(f"data selects entries of the padded dimension {dim}", call.sizes.first_padded(of_dim))]


def index(call: OpCall) -> PaddedValue:
    """``x[i, j]`` with index tensors; the broadcast indices replace the indexed dimensions."""
    value = call.tensor("self")
    indices: Sequence[PaddedValue | None] = call.argument("indices")
    hit = {dim: index for dim, index in enumerate(indices) if index is not None}
    if any(index.dtype in (torch.bool, torch.uint8) for index in hit.values()):
        raise call.refuse("a mask picks entries, as many as contents say")
    picked, at, moved = _picked(call, value, hit)
    result, pads, reasons = PaddedValue(moved.factors), moved.pads, list[PaddingReason]()
    for dim, index in hit.items():
        check_order(call, value.factors[dim])
        if is_whole(index, value.factors[dim]) and index.index is not None:
            along = len(picked) - index.rank + index.index.dim
            others = (PaddedValue(((),) * (len(picked) - i.rank) + i.factors) for d, i in hit.items() if d != dim)
            if not any(other.factors[along] for other in others):  # this index alone varies along that dimension
                pads[at + along, index.index.factor] = value.pad_at((dim, 0))
        reasons += _selects(call, index, dim, value.factors[dim])
    places = call.places(result)
    return call.reached(result.with_pads({at: pad for at, pad in pads.items() if at in places}), *reasons)


def index_select(call: OpCall) -> PaddedValue:
    """``index_select`` and ``embedding``: the index's dimensions take the place of one."""
    return index(_along_dim(call, call.tensor("self", "weight"), call.tensor("index", "indices")))


def _along_dim(call: OpCall, value: PaddedValue, index: PaddedValue, **others: Any) -> OpCall:
    """The call with its index in place of the dimension that it indexes, as in ``x[:, i]``."""
    dim = call.dim(call.argument("dim", default=0), value.rank)
    return call.with_arguments(self=value, indices=(*[None] * dim, index), **others)


def embedding_bag(call: OpCall) -> Returned:
    """Sums of the rows of a table that each bag names, where bags are no rows: each ends where the next one begins."""
    for value in tensors_of(call.arguments.values()):
        call.unpadded(value, range(value.rank), "ends bags by", ROW_FOR_EACH_BAG)  # guard: proof_padded_offsets
    return call.each(call.fresh)


def gather(call: OpCall) -> PaddedValue:
    """In all dimensions except the gathered one, entry i comes from entry i."""
    value, index = call.tensor("self"), call.tensor("index")
    dim = call.dim(call.argument("dim"), value.rank)
    _check_aligned(call, value, index, [at for at in range(value.rank) if at != dim])
    result, of_dim = call.carried(PaddedValue(index.factors), value), value.factors[dim] if value.rank else ()
    check_order(call, of_dim)
    return call.reached(result, *_selects(call, index, dim, of_dim))


def _check_aligned(call: OpCall, value: PaddedValue, index: PaddedValue, dims: Sequence[int]) -> None:
    """Refuse an index that is not aligned with ``value`` in ``dims``: entry i must select from entry i.

    An index may be shorter than the tensor along a dimension; it then selects from the first entries.
    """
    for dim in dims:
        ours, theirs = value.factors[dim], index.factors[dim]
        if ours == theirs or not call.sizes.any_padded((*ours, *theirs)):
            continue
        if (not theirs and call.sizes.starts_clean(ours)) or (theirs and call.sizes.unified(ours, theirs) is not None):
            continue
        why = f"an index of factors {list(theirs)} names entries of {list(ours)}"
        raise call.refuse(why, call.sizes.first_padded(ours, theirs))


def bucketize(call: OpCall) -> PaddedValue:
    """Each entry is looked up in a table, which must be unpadded."""
    call.unpadded_weights("boundaries")
    return PaddedValue(call.tensor("self").factors)


# --- writes: refused if the index or the source is padded along the written dimension


WRITES = words("index_put _unsafe_index_put scatter scatter_add scatter_reduce index_add index_copy index_fill")
"""Operators that write the entries that an index names."""


def _written(
    call: OpCall, factors: tuple[Factors, ...], source: object, reason: PaddingReason | None = None
) -> PaddedValue:
    result = call.carried(PaddedValue(factors), call.tensor("self"))
    pads = [source.pad_at(place) for place in call.places(source)] if isinstance(source, PaddedValue) else []
    if not all(map(is_finite, pads)):  # guard: proof_infinities_written
        result = result.with_pads(dict.fromkeys(call.places(result), Approximate.NOT_FINITE))
    return result if reason is None else call.reached(result, reason)


def drops_padding(call: OpCall, index: PaddedValue, of_dim: Factors) -> bool:
    """Whether an index names real entries, and in its padding the one behind the last, where a write is cut off."""
    is_counted = index.counted is not None and stays_real(call, index, of_dim)
    return is_counted and all(index.pad_at(place) is Approximate.BEHIND for place in call.places(index))


def scatter(call: OpCall) -> PaddedValue:
    """``scatter``: in all dimensions except the written one, entry i goes to entry i."""
    value, index = call.tensor("self"), call.tensor("index")
    dim = call.dim(call.argument("dim"), value.rank)
    others = [at for at in range(value.rank) if at != dim]
    _check_aligned(call, value, index, others)
    source = call.argument("src", "value")
    if isinstance(source, PaddedValue) and source.rank:
        _check_aligned(call, source, index, range(index.rank))
    # guard: proof_scattered_by_data
    size = call.sizes.first_padded(value.factors[dim], index.factors[dim]) if value.rank else None
    if size is None or drops_padding(call, index, value.factors[dim]):
        return _written(call, value.factors, source)
    return _written(call, value.factors, source, _by_data(call, value, [dim], size))


def _by_data(call: OpCall, value: PaddedValue, dims: Sequence[int], size: Size) -> PaddingReason:
    for dim in dims:
        check_order(call, value.factors[dim])
    return by_contents(f"data selects which entries of dimension {', '.join(map(str, dims))} are written", size)


def index_add(call: OpCall) -> PaddedValue:
    """``index_add``, ``index_copy``, ``index_fill``: an index selects the rows. Parts would wrap negative ones."""
    source = call.argument("source", "value")
    values = source if isinstance(source, PaddedValue) else PaddedValue(())
    return index_put(_along_dim(call, call.tensor("self"), call.tensor("index"), values=values))


def index_put(call: OpCall) -> PaddedValue:
    """``x[i, j] = values``: aligned along factors whose index is 0, 1, 2, ...; refused along other padded ones."""
    value, values = call.tensor("self"), call.tensor("values")
    indices: Sequence[PaddedValue | None] = call.argument("indices")
    hit = {dim: index for dim, index in enumerate(indices) if index is not None}
    if any(of is not None and (of.is_floating_point or of.itemsize == 1) for of in (i.dtype for i in hit.values())):
        return _masked_put(call, value, values, list(hit.values()))
    picked, _, target = _picked(call, value, hit)
    given = values.factors if values.constant is None else ()
    for dim, of_dim in enumerate(given, target.rank - len(given)):
        if call.sizes.unified(target.factors[dim], of_dim) != target.factors[dim]:
            why = f"values of factors {list(of_dim)} for entries {list(target.factors[dim])}"
            raise call.refuse(why, call.sizes.first_padded(of_dim))
    walked = {
        len(picked) - index.rank + index.index.dim
        for dim, index in hit.items()
        if index.index is not None and is_whole(index, value.factors[dim])
    }
    dropped = {dim for dim, index in hit.items() if drops_padding(call, index, value.factors[dim])}
    walked |= {len(picked) - hit[dim].rank + at for dim in dropped for at, _ in call.places(hit[dim])}
    at_fault = [size for position, of_dim in enumerate(picked) if position not in walked for size in of_dim]
    at_fault += [
        size
        for dim, index in hit.items()
        if dim not in dropped and not is_whole(index, value.factors[dim])
        for size in value.factors[dim]
    ]
    size = call.sizes.first_padded(tuple(at_fault))  # guard: proof_put_by_data
    return _written(call, value.factors, values, _by_data(call, value, list(hit), size) if size is not None else None)


def _masked_put(call: OpCall, value: PaddedValue, values: PaddedValue, masks: Sequence[PaddedValue]) -> PaddedValue:
    """``x[mask] = number``, for a mask over the leading dimensions: entry by entry."""
    if len(masks) > 1 or call.argument("indices")[0] is None:
        raise call.refuse("masks pick the entries that are written")
    if any(values.factors) and (call.places(values) or call.places(value) or call.places(masks[0])):
        raise call.refuse("values are written one by one to the entries that a mask picks")
    leading = PaddedValue((*masks[0].factors, *[()] * (value.rank - masks[0].rank)))
    return PaddedValue(tuple(call.unify_into(value.factors, leading)))


# --- bounds: index tensors stay in bounds in their padding, so that no kernel reads outside of its tensor
# Note [Contents of padding] says which indices need a check.

_COUNTS = words("arange iota linspace real_size")
_RUNNING = words("cumsum cumprod logcumsumexp cummax cummin")
_BY_POSITION = words("index _unsafe_index index_put _unsafe_index_put _unsafe_masked_index")
_ALONG_DIM = words("index_select gather scatter scatter_add scatter_reduce index_add index_copy index_fill")
_PROBABILITIES = words("bernoulli binary_cross_entropy binomial multinomial poisson")

_PLACES = words("argmax argmin bucketize searchsorted sort topk kthvalue max min median nanmedian mode cummax cummin")
"""Operators that return integers for floats: places among the entries, which exist for all contents."""


def needs_real_contents(call: OpCall, tensors: Sequence[PaddedValue]) -> bool:
    """Whether an operator may fail for floats that no real entry has: it converts them to integers, or checks them.

    A table's index may be among those integers, and an index beyond the table ends the process on a GPU.
    """
    if checks_numbers(call.name):
        return True
    from_floats = any(value.dtype is not None and value.dtype.is_floating_point for value in tensors)
    not_integers = (torch.bool, torch.complex64, torch.complex128)
    to_integers = any(not shape.dtype.is_floating_point and shape.dtype not in not_integers for shape in call.shapes)
    return from_floats and to_integers and call.name not in _PLACES


def checks_numbers(name: str) -> bool:
    """Whether the operator with this base name fails for numbers that are no probabilities."""
    return name in _PROBABILITIES


def new_fields(call: OpCall, tensors: Sequence[PaddedValue], value: PaddedValue) -> frozenset[str]:
    """The key fields along which the padding of a result may have values that no real entry has."""
    sizes = call.sizes
    present = frozenset(field for dim, at in sizes.places(value) for field in sizes.fields_of(value.factors[dim][at]))
    if not present:
        return present
    if call.name in _COUNTS or _counts_padding(call):
        return present
    inherited = frozenset[str]().union(*(tensor.new_fields for tensor in tensors))
    if call.name in _RUNNING:
        dim = call.dim(call.argument("dim"), value.rank)
        inherited |= {field for size in value.factors[dim] for field in sizes.fields_of(size)}
    filled = frozenset(field for dim, at in value.whole for field in sizes.fields_of(value.factors[dim][at]))
    rest = (place for place in sizes.places(value) if place not in value.whole)
    return (inherited & present) - (  # guard: made_contents
        filled - {field for dim, at in rest for field in sizes.fields_of(value.factors[dim][at])}
    )


def _counts_padding(call: OpCall) -> bool:
    """Whether the places that it returns are among more entries than the real ones."""
    value = call.argument("self")
    if call.name not in ("argmax", "argmin") or not isinstance(value, PaddedValue):
        return False
    return bool(call.places(value, call.dims(call.argument("dim"), value.rank)))


def reads_outside(call: OpCall) -> PaddingReason | None:
    """Why indices in padding may be out of bounds for an operator; None if all are in bounds."""
    if call.asks_independence:
        return None
    for _, index, of_dim in index_operands(call):
        if not index.new_fields or is_whole(index, of_dim) or stays_real(call, index, of_dim):
            continue
        for dim, at in new_places(call, index):
            size = index.factors[dim][at]
            if not _exists(index.pad_at((dim, at)), of_dim):
                why = f"its padding may index beyond the {product(of_dim)} entries"
                return PaddingReason(why, size=size)
    return None


def new_places(call: OpCall, index: PaddedValue) -> list[Place]:
    """The places of an index where its padding may have values that no real entry has."""
    places = call.sizes.places(index)
    return [
        place
        for place in places
        if not index.new_fields.isdisjoint(call.sizes.fields_of(index.factors[place[0]][place[1]]))
    ]


def _exists(pad: object, of_dim: Factors) -> bool:
    """Whether a known index is in bounds of a dimension for all sizes."""
    length = product(of_dim)
    return type(pad) is int and (pad == 0 or (isinstance(length, int) and -length <= pad < length))


def index_operands(call: OpCall) -> Iterator[tuple[ArgumentPath, PaddedValue, Factors]]:
    """Each index tensor of an operator: its argument, what it is, and the factors of the dimension that it indexes."""
    if call.name == "embedding":
        yield ("indices",), call.tensor("indices"), call.tensor("weight").factors[0]
    elif call.name in _BY_POSITION:
        value = call.tensor("self")
        for at, (of_dim, index) in enumerate(zip(value.factors, call.argument("indices"), strict=False)):
            if isinstance(index, PaddedValue) and index.dtype is not torch.bool:
                yield ("indices", at), index, of_dim
    elif call.name in _ALONG_DIM:
        value, dim = call.tensor("self"), call.argument("dim")
        yield ("index",), call.tensor("index"), value.factors[call.dim(dim, value.rank)] if value.rank else ()


# --- positions: values that depend on the index of an entry in its batch, where its entries must be independent

_UNIFORM = words(
    "view _unsafe_view reshape _reshape_alias view_copy squeeze unsqueeze split_dim collapse_view permute transpose t",
    "expand broadcast_in_dim view_as_complex view_as_real select mm bmm mv dot vdot addmm baddbmm addmv sum",
    "mean any all prod amax amin var",
)
"""Operators that give all entries along a size the same value if their arguments do; so do those of these rules."""

_UNIFORM_RULES = (entry_by_entry, cast, copied, zeroed, filled, OpCall.fresh, dropout, random_numbers)

_UNIFORM_BESIDE_DIM = words("slice split split_with_sizes unbind cat stack cumsum cumprod flip roll _softmax")
"""Operators of which this holds along all dimensions except ``dim``."""

_INDEX_ARGUMENTS = frozenset({"index", "indices"})


def by_position(
    call: OpCall, rule: PaddingRule | None, value: PaddedValue, *, depends: bool
) -> frozenset[PaddingFinding]:
    """Findings for the indices of entries that a result depends on, apart from those that pair an entry with itself.

    ``depends`` says whether an argument depends on an input with a padded size.
    """
    if value.constant is not None:
        return frozenset()
    places = call.places(value)
    if not depends and places and not _is_uniform(call, rule, value):
        dim, at = places[0]
        reason = PaddingReason("its entries depend on their index in the batch", size=value.factors[dim][at])
        return call.findings_for(reason)
    return frozenset[PaddingFinding]().union(*(tensor.by_position for tensor in _read(call)))


def _is_uniform(call: OpCall, rule: PaddingRule | None, value: PaddedValue) -> bool:
    if call.name in _UNIFORM or (rule in _UNIFORM_RULES and call.name != "randperm"):
        return True
    dim = call.argument("dim", default=0)
    if call.name not in _UNIFORM_BESIDE_DIM or not isinstance(dim, int):
        return False
    tensors = list(tensors_of(call.arguments.values()))
    return not any(call.places(tensor, [dim % max(tensor.rank, 1)]) for tensor in (*tensors, value) if tensor.rank)


def _read(call: OpCall) -> Iterator[PaddedValue]:
    """The tensors whose contents the result depends on: not an index 0, 1, 2, ... over a whole padded dimension."""
    yield from tensors_of(argument for name, argument in call.arguments.items() if name not in _INDEX_ARGUMENTS)
    pairs = {
        id(index)
        for _, index, of_dim in index_operands(call)
        if call.sizes.any_padded(of_dim) and is_whole(index, of_dim)
    }
    for name in _INDEX_ARGUMENTS & call.arguments.keys():
        yield from (index for index in tensors_of([call.arguments[name]]) if id(index) not in pairs)
