"""What is known of the contents of results beside their padding: signs, indices that exist, indices of entries."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch

from graphpass.regions.padding.calls import CHECK_IF_DECLARED, OpCall, PaddingReason, PaddingRule, tensors_of
from graphpass.regions.padding.combining import attention, multi_head_attention, self_attention, softmax, weight_of
from graphpass.regions.padding.indexing import FROM_START, is_whole, stays_real
from graphpass.regions.padding.pointwise import cast, entry_by_entry, real_entries
from graphpass.regions.padding.sizes import product
from graphpass.regions.padding.values import (
    Factors,
    Pad,
    PaddedValue,
    PaddingFinding,
    Sign,
    blurred,
    by_data,
    cast_pad,
    is_finite,
    is_infinite,
    shown,
)


def _words(*lines: str) -> frozenset[str]:
    return frozenset(" ".join(lines).split())


# --- signs: which tensors have no negative entry in the run at the real sizes, so that an index counts from the start

_UNSIGNED = frozenset({torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64})

_NEVER_NEGATIVE = _words(
    "abs square argmax argmin argsort nonzero bincount searchsorted bucketize count_nonzero zeros new_zeros zeros_like",
    "zero ones new_ones ones_like",
)

_WITH_PLACES = _words("sort topk kthvalue max min median nanmedian mode cummax cummin")
"""Operators whose second result is the places of the first among the entries."""

_FROM_VALUES = _words(
    "add mul div true_divide floor_divide pow minimum maximum clamp_max where cumsum cumprod sum prod mean amax amin",
    "max min sort topk kthvalue median nanmedian mode cummax cummin floor ceil round trunc bitwise_or bitwise_xor",
    "clone alias detach lift_fresh lift_fresh_copy _to_copy contiguous to convert_element_type copy",
    "full new_full full_like fill scalar_tensor",
    "view reshape _unsafe_view _reshape_alias view_copy flatten unflatten squeeze unsqueeze permute transpose t",
    "expand broadcast_in_dim repeat select slice narrow split split_with_sizes unbind chunk cat stack flip roll",
    "index _unsafe_index index_select gather take embedding diagonal constant_pad_nd repeat_interleave",
    "masked_fill scatter index_put _unsafe_index_put",
)
"""Operators without a negative result where none of their values is negative."""

_VALUES = _words("self a input x other b min max alpha src source value values tensors fill_value s weight exponent")
"""Names of the arguments that are values, not indices, conditions, dimensions or sizes."""


def sign_of(call: OpCall, value: PaddedValue, at: int) -> Sign:
    """What is known of the signs in ``value``, the result at position ``at``."""
    known = value.index.offset if value.index is not None else value.constant
    if value.dtype in _UNSIGNED or _is_nonnegative(known) or _by_operator(call, at):
        return Sign.NONNEGATIVE
    return Sign.UNKNOWN


def _by_operator(call: OpCall, at: int) -> bool:
    if call.name == FROM_START:
        return _known(call, "self") or call.tensor("length").sign is Sign.REAL_SIZE  # guard: proof_index_from_elsewhere
    if not call.op.startswith(("aten.", "prims.")):
        return False
    if call.name in _NEVER_NEGATIVE or (call.name in _WITH_PLACES and at == 1):
        return True
    if call.name in ("clamp", "clamp_min", "maximum", "bitwise_and"):  # one side decides
        return _known(call, "min", "other", "b") or (_known(call, "self", "a") and _known(call, "max", absent=True))
    if call.name == "remainder":
        return _known(call, "other", "b")
    if call.name == "fmod":
        return _known(call, "self", "a")
    if call.name in ("arange", "iota"):
        return _known(call, "start", absent=True) and _known(call, "step", absent=True)
    values = [argument for name, argument in call.arguments.items() if name in _VALUES and argument is not None]
    return call.name in _FROM_VALUES and all(map(_is_nonnegative, values))


def _known(call: OpCall, *names: str, absent: bool = False) -> bool:
    """Whether the first argument among ``names`` is known not to be negative; ``absent`` if there is none."""
    value = call.argument(*names)
    return absent if value is None else _is_nonnegative(value)


def _is_nonnegative(value: Any) -> bool:
    if isinstance(value, PaddedValue):
        return value.sign is not Sign.UNKNOWN
    if isinstance(value, tuple):
        return all(map(_is_nonnegative, value))
    if isinstance(value, sympy.Basic):
        return value.is_nonnegative is True
    return isinstance(value, (bool, int, float)) and value >= 0


# --- infinities: entries of a result that a mask, or an operator, makes infinite

_OF_ENTRIES = _words(
    "clone alias detach lift_fresh lift_fresh_copy _to_copy contiguous to convert_element_type copy copy_ fill",
    "view reshape _unsafe_view _reshape_alias view_copy flatten unflatten squeeze unsqueeze permute transpose t",
    "movedim expand broadcast_in_dim repeat select slice narrow split split_with_sizes unbind chunk cat stack flip",
    "roll tril triu index _unsafe_index index_select gather take take_along_dim embedding diagonal constant_pad_nd",
    "unfold scatter index_put _unsafe_index_put index_copy index_fill index_add slice_scatter select_scatter",
    "zero_padding amax amin max min sort topk kthvalue cummax cummin",
)
"""Operators whose results hold entries of their arguments, perhaps beside numbers."""


_HIDES = (attention, self_attention, multi_head_attention)
"""Rules of operators that give no weight to what a mask of -inf hides."""


def infinities_of(call: OpCall, rule: PaddingRule | None, value: PaddedValue) -> Pad | None:
    """What real entries of ``value`` hold if the graph makes some of them infinite, else None."""
    held = [tensor.held for tensor in tensors_of(call.arguments.values())]
    numbers = [number for number in call.arguments.values() if is_infinite(number)]
    if call.asks_independence or value.dtype is None or not (numbers or any(not is_finite(pad) for pad in held)):
        return None
    if rule is entry_by_entry:
        found = real_entries(call)
    elif rule is softmax:
        found = weight_of(call.name, *held)
    elif call.name in _OF_ENTRIES:
        found = functools.reduce(by_data, (*held, *numbers))
    else:
        found = blurred(*(map(shown, held) if rule in _HIDES or call.name == "logsumexp" else held))
    found = cast_pad(found, value.dtype)
    return None if is_finite(found) else by_data(None, found)


# --- bounds: index tensors stay in bounds in their padding, so that no kernel reads outside of its tensor
# Note [Contents of padding] says which indices need a check.

_COUNTS = _words("arange iota linspace")
_RUNNING = _words("cumsum cumprod logcumsumexp cummax cummin")
_BY_POSITION = _words("index _unsafe_index index_put _unsafe_index_put _unsafe_masked_index")
_ALONG_DIM = _words(
    "index_select gather take_along_dim scatter scatter_add scatter_reduce index_add index_copy index_fill index_reduce"
)
_PROBABILITIES = _words("bernoulli binary_cross_entropy binomial multinomial poisson")

_PLACES = _WITH_PLACES | _words("argmax argmin argsort bucketize searchsorted")
"""Operators that return integers for floats: places among the entries, which exist for all contents."""


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
    if call.asks_independence:
        return None
    for index, of_dim in index_operands(call):
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


def index_operands(call: OpCall) -> Iterator[tuple[PaddedValue, Factors]]:
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


# --- positions: values that depend on the index of an entry in its batch, where its entries must be independent

_UNIFORM = _words(
    "full new_full zeros new_zeros zero ones new_ones zeros_like ones_like full_like fill scalar_tensor copy copy_"
    " empty new_empty empty_like empty_strided new_empty_strided empty_permuted"
    " view reshape _unsafe_view _reshape_alias view_copy flatten unflatten squeeze unsqueeze split_dim collapse_view"
    " permute transpose t movedim expand broadcast_in_dim repeat view_as_complex view_as_real select"
    " mm bmm matmul mv dot vdot addmm baddbmm addmv linear outer ger"
    " sum mean any all prod amax amin var layer_norm native_layer_norm rms_norm _fused_rms_norm"
    " rand randn randint rand_like randn_like randint_like bernoulli normal normal_functional uniform exponential"
    " inductor_random inductor_randint native_dropout dropout"
)
"""Operators that give all entries along a size the same value, or values drawn alike, if their arguments do."""

_UNIFORM_BESIDE_DIM = _words(
    "slice narrow split split_with_sizes unbind chunk cat stack cumsum cumprod flip roll _softmax softmax"
)
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
    if call.name in _UNIFORM or rule in (entry_by_entry, cast):
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
        id(index) for index, of_dim in index_operands(call) if call.sizes.any_padded(of_dim) and is_whole(index, of_dim)
    }
    for name in _INDEX_ARGUMENTS & call.arguments.keys():
        yield from (index for index in tensors_of([call.arguments[name]]) if id(index) not in pairs)
