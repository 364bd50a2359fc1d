"""Values that depend on the index of an entry in its batch, where the entries of one batch must be independent."""

from __future__ import annotations

from collections.abc import Iterator

from graphpass.regions.padding.bounds import picked
from graphpass.regions.padding.calls import OpCall, PaddingReason, PaddingRule, tensors_of
from graphpass.regions.padding.rules.indexing import is_whole
from graphpass.regions.padding.rules.pointwise import cast, entry_by_entry
from graphpass.regions.padding.values import PaddedValue, PaddingFinding

__all__ = ["by_position"]

_UNIFORM = (
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

_UNIFORM_BESIDE_DIM = (
    "slice narrow split split_with_sizes unbind chunk cat stack cumsum cumprod flip roll _softmax softmax"
)
"""Operators of which this holds along all dimensions except ``dim``."""

_INDEX_ARGUMENTS = frozenset({"index", "indices"})


def by_position(
    call: OpCall, rule: PaddingRule | None, value: PaddedValue, *, depends: bool
) -> frozenset[PaddingFinding]:
    """Findings for the indices of entries that a result depends on, apart from those that pair an entry with itself.

    Args:
        call: the call.
        rule: the rule of its operator.
        value: its result.
        depends: whether an argument depends on an input with a padded size.
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
    if call.name in _UNIFORM.split() or rule in (entry_by_entry, cast):
        return True
    dim = call.argument("dim", default=0)
    if call.name not in _UNIFORM_BESIDE_DIM.split() or not isinstance(dim, int):
        return False
    tensors = list(tensors_of(call.arguments.values()))
    return not any(call.places(tensor, [dim % max(tensor.rank, 1)]) for tensor in (*tensors, value) if tensor.rank)


def _read(call: OpCall) -> Iterator[PaddedValue]:
    """The tensors whose contents the result depends on: not an index 0, 1, 2, ... over a whole padded dimension."""
    yield from tensors_of(argument for name, argument in call.arguments.items() if name not in _INDEX_ARGUMENTS)
    pairs = {id(index) for index, of_dim in picked(call) if call.sizes.any_padded(of_dim) and is_whole(index, of_dim)}
    for name in _INDEX_ARGUMENTS & call.arguments.keys():
        yield from (index for index in tensors_of([call.arguments[name]]) if id(index) not in pairs)
