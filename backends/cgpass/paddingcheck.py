"""The run-time check of padding: with other contents in the padding, all real entries must be equal bit by bit.

A control replay with equal contents runs first. If its results already differ (atomic additions), the comparison allows
a multiple of that difference. Then each input without declared padding is replayed with other contents in its padding:
floats are random numbers, small and large; integers are copies of real entries, so that indices stay valid. So are
floats, if the model may compute an index from them.

Where no proof covers a size, other contents do not suffice: declared padding has no others, copies of entries that are
all equal change nothing, and a mean over n rows leaks only 1/n. There the graph also runs in float64, at the real sizes
and with two amounts of padding. Other sizes round otherwise, but far below such a leak. An operator without float64
rounds as visibly as a leak changes results; but a leak grows with the amount of padding, and rounding does not.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch
from torch import fx

from cgpass.auto import AutoCall
from cgpass.keyrules import AutoRules
from cgpass.outputs import OutputCuts
from graphpass.capture.compare import has_fractions, in_double, largest_difference
from graphpass.capture.settings import restoring
from graphpass.compat import operators, trees
from graphpass.context import ForwardContext, entered
from graphpass.errors import GraphpassError
from graphpass.paddedinputs import PaddedInput, prefix
from graphpass.regions.assign import Region
from graphpass.regions.execute import value_of
from graphpass.regions.split import Partition

_LARGE: Mapping[torch.dtype, float] = MappingProxyType({torch.float16: 1e2, torch.bfloat16: 1e2})
_LARGE_OTHERWISE = 1e4
_SPREADS_ALLOWED = 4.0
_ATTEMPTS = 3
_SEEDS = itertools.count()  # other contents in each check
_FLOAT64_ROUNDING = 1e-8
"""Allowed difference in float64 of real entries at padded and at real sizes, as a share of the largest."""
_OF_OWN_ROUNDING = 1e-7
"""The same, as a share of what the replay in the graph's own types has rounded."""
_ROUNDING: Mapping[torch.dtype, float] = MappingProxyType({torch.float64: 1e-6, torch.float32: 1e-2})
_ROUNDING_OTHERWISE = 5e-2
"""The same, at most, where an operator has run in its own type."""
_OF_ONE_RUN: Mapping[torch.dtype, float] = MappingProxyType({torch.float64: 1e-4, torch.float32: 1e-4})
_OF_ONE_RUN_OTHERWISE = 2e-2
"""Allowed difference of real entries from a run without padding in own types, as a share of the largest that differ."""
_Entries: TypeAlias = dict[str, torch.Tensor]
"""Real entries by name: of an output, or of a tensor that the graph has written to."""

_GROWTH_ALLOWED = 1.5
"""Of a difference by rounding, from less padding to more; that of a leak grows by twice or more."""


@dataclass(frozen=True, slots=True)
class PaddedCall:
    """One call at a key larger than its real sizes, which can be repeated."""

    call: AutoCall  #: its key, padded inputs and cuts
    rules: AutoRules  #: of the graph's dispatcher
    args: Sequence[Any]  #: the caller's arguments
    filled: Sequence[Any]  #: the graph's arguments at the key's sizes
    replay: Callable[[], Sequence[Any]]  #: replays with the buffers' contents; returns the flat outputs, uncut
    run_unpadded: Callable[[], Sequence[Any]]  #: runs without a graph at the real sizes; returns the flat outputs
    partition: Partition  #: the graph, for runs in float64
    #: the call for runs in float64; before it, one with less padding, where the graph admits a size in between. Empty
    #: where a proof covers all sizes.
    amounts: Sequence[AutoCall]
    context: ForwardContext  #: what the graph's operators see, but for the mask of padded rows
    device: torch.device  #: where the graph runs

    def restoring(self, written: Iterable[torch.Tensor] = ()) -> AbstractContextManager[None]:
        """Restore ``written`` and all random number generators after the body."""
        return restoring(tuple(written), [arg for arg in self.args if isinstance(arg, torch.Generator)], self.device)

    def observed(self, magnitude: Callable[[torch.dtype], float] | None) -> _Entries:
        """Replay, restore the state, and return copies of all real entries of the replay.

        ``magnitude`` is the scale of random contents in the padding, by dtype; None: the contents by the padding rules.
        """
        others = _OtherContents(self.device, self.rules.check_contents)
        for padded in self.call.inputs.all:
            padded.fill(self.args[padded.position])
            if magnitude is not None and padded.position not in self.rules.declared:
                others.fill(padded, magnitude)
        with self.restoring(self.filled[p] for p in self.rules.written):  # guard: padding_check_undone
            found = self.real_entries(self.replay())
            found |= self._written({padded.position: padded.real for padded in self.call.written})
            return {name: tensor.clone() for name, tensor in found.items()}

    def unpadded(self) -> _Entries:
        """The results of a run at the real sizes; restores the state."""
        written = self._written({padded.position: self.args[padded.position] for padded in self.call.written})
        with self.restoring(written.values()):
            outputs = self.run_unpadded()
            found = {f"output {index}": outputs[index] for index in self._cuts.real_parts(outputs)}
            return {name: tensor.clone() for name, tensor in (found | written).items()}

    def real_entries(self, outputs: Sequence[Any]) -> _Entries:
        """The real parts of the outputs."""
        return {f"output {index}": part for index, part in self._cuts.real_parts(outputs).items()}

    @property
    def _cuts(self) -> OutputCuts:
        assert self.call.cuts is not None, "a padded call is cut"
        return self.call.cuts

    def _written(self, padded: Mapping[int, torch.Tensor]) -> _Entries:
        """The tensors that the graph writes to; ``padded`` has those that are padded, by position."""
        order = (*padded, *(position for position in self.rules.written if position not in padded))
        return {f"written input {position}": padded.get(position, self.filled[position]) for position in order}


@dataclass(frozen=True, slots=True)
class PaddingCheck:
    """What a check found."""

    #: why the graph cannot be padded: real entries depend on the padding, or the model fails for other contents
    fault: str | None
    is_noisy: bool  #: whether two replays differ although their contents are equal
    in_own_type: tuple[str, ...] = ()  #: the operators that have run in their own type, because they have no float64

    def limits(self) -> Iterator[tuple[str, str]]:
        """(text, remedy) of each way in which the comparison was weaker than it should be."""
        if self.is_noisy:
            text = "replays of equal contents differ; padding was compared within their spread"
            yield text, "set torch.use_deterministic_algorithms(True) for a check by bits"
        if self.in_own_type:
            text = f"no float64 for {', '.join(self.in_own_type)}; padding was compared within their rounding"
            has_own = any("::" in name and not operators.is_of_torch(name) for name in self.in_own_type)
            leave_out = "leave the dimension out of dynamic_dims, which captures its sizes exactly"
            yield (
                text,
                "register_padding_rule, which proves what an operator does with padding" if has_own else leave_out,
            )


def check_padding(call: PaddedCall) -> PaddingCheck:
    """Repeat a call with other contents of its padding, and in float64 with other amounts; compare all real entries.

    Another thread may change the weights meanwhile: a fault counts if a last replay equals the first, or after the last
    attempt.
    """
    with call.restoring():  # random contents come from the default generator
        for _ in range(_ATTEMPTS):
            expected = call.observed(None)
            found = _compared(call, expected)
            if found.fault is None:
                break
            last = call.observed(None)
            moved = any(largest_difference(one, last[name]) for name, one in expected.items())
            if not moved:  # guard: weights_moved
                break
    return found


def _compared(call: PaddedCall, expected: _Entries) -> PaddingCheck:
    control = call.observed(None)
    spreads = {name: largest_difference(one, control[name]) for name, one in expected.items()}
    is_noisy = any(spreads.values())
    unpadded = functools.cache(call.unpadded)
    # guard: padding_that_is_not_finite
    fault = _fault_of_contents(call, expected, spreads) or _fault_of_infinities(expected, unpadded)
    if fault is None and not call.amounts:
        fault = _fault_of_sizes(expected, unpadded())
    if fault is not None or not call.amounts:  # guard: padding_against_no_padding
        return PaddingCheck(fault, is_noisy)
    in_own_type: dict[str, torch.dtype] = {}
    fault = _fault_of_amounts(call, in_own_type, expected)
    return PaddingCheck(fault, is_noisy, tuple(sorted(in_own_type)))


def _fault_of_contents(call: PaddedCall, expected: _Entries, spreads: Mapping[str, float]) -> str | None:
    for magnitude in (_small, _large):  # guard: padding_of_large_values
        try:
            found = call.observed(magnitude)
        except (GraphpassError, torch.AcceleratorError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            return f"it fails for other contents of the padding: {error}"
        for name, one in expected.items():
            if largest_difference(one, found[name]) > _SPREADS_ALLOWED * spreads[name]:
                return f"real entries of {name} depend on the padding"
    return None


def _fault_of_infinities(expected: _Entries, unpadded: Callable[[], _Entries]) -> str | None:
    """NaN and infinity in a real entry may come from the padding, whatever its contents, or from the model."""
    suspects = {name: one for name, one in expected.items() if has_fractions(one) and not bool(one.isfinite().all())}
    for name, one in suspects.items():
        for kind in (torch.isnan, torch.isinf):
            if not torch.equal(kind(one), kind(unpadded()[name])):
                return f"real entries of {name} are not finite, and differ from a run without padding"
    return None


def _fault_of_sizes(expected: _Entries, unpadded: _Entries) -> str | None:
    """Whether real entries differ from a run without padding by more than rounding, in the graph's own types."""
    for name, one in expected.items():
        other = unpadded[name]
        if one.shape != other.shape:
            return f"{name} has another shape than in a run without padding"
        spread = largest_difference(one, other)
        if not spread:
            continue
        allowed = _OF_ONE_RUN.get(one.dtype, _OF_ONE_RUN_OTHERWISE) if has_fractions(one) else 0.0
        if spread > allowed * _largest(other, one != other):  # guard: padding_against_one_run
            return f"real entries of {name} differ from a run without padding"
    return None


def _fault_of_amounts(call: PaddedCall, in_own_type: dict[str, torch.dtype], replayed: _Entries) -> str | None:
    """Also adds {operator: type} of the operators that ran without float64 to ``in_own_type``."""
    regions = call.partition.regions
    run = call.partition.bind({region.name: _Interpreter(region.graph_module, in_own_type).run for region in regions})
    try:
        unpadded = _in_float64(call, run, None)
        padded = [_in_float64(call, run, amount) for amount in call.amounts]
    except torch.AcceleratorError:
        raise
    except Exception as error:  # out of memory, too: what cannot be checked is not padded
        return f"it cannot be checked in float64: {error}"
    own_types = set(in_own_type.values())
    rounding = min((_ROUNDING.get(dtype, _ROUNDING_OTHERWISE) for dtype in own_types), default=0.0)
    for name, expected in unpadded.items():
        found = [results[name] for results in padded]
        noise = (replayed[name], found[-1])
        if not any(_is_leak(one, expected, noise) for one in found):
            continue
        if not own_types or not _is_rounding(found, expected, rounding):
            return f"real entries of {name} differ from a run without padding"
    return None


def _in_float64(call: PaddedCall, run: Callable[..., Any], padded: AutoCall | None) -> _Entries:
    """The real entries of a run in float64; nothing that it reads changes."""
    args = call.args if padded is None else padded.filled(call.args)
    with call.restoring(), entered(call.context):
        outputs, written = _run_wide(run, call.partition.mutated_inputs, args)
    real = {position: prefix(tensor, call.args[position].shape) for position, tensor in written.items()}
    return call.real_entries(outputs) | {f"written input {position}": tensor for position, tensor in real.items()}


def _is_leak(found: torch.Tensor, expected: torch.Tensor, noise: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether results in float64 differ by more than rounding; ``noise``: equal results but for the rounding of types.

    Entries that agree do not count: beside a masked logit of -1e30 any leak is small. Of an entry that cancels out only
    rounding is left, in float64 far below that of the graph's own types.
    """
    if any(one.shape != expected.shape for one in (found, *noise)):  # the padding's contents decide how many there are
        return True
    spread = largest_difference(found, expected)
    if not spread or not has_fractions(expected):
        return bool(spread)
    differs = found != expected
    if spread <= _FLOAT64_ROUNDING * _largest(expected, differs):
        return False
    return spread > _OF_OWN_ROUNDING * _largest(in_double(noise[0]) - in_double(noise[1]), differs)


def _is_rounding(found: Sequence[torch.Tensor], expected: torch.Tensor, rounding: float) -> bool:
    """Whether the differences at growing amounts of padding are as small as rounding and do not grow with them."""
    if len(found) < 2 or not has_fractions(expected) or any(one.shape != expected.shape for one in found):
        return False
    if any(largest_difference(one, expected) > rounding * _largest(expected, one != expected) for one in found):
        return False
    less, more = (in_double(one).sub(in_double(expected)).nan_to_num(0.0, 0.0, 0.0).norm() for one in found)
    return bool(more <= _GROWTH_ALLOWED * less)  # guard: padding_in_own_type


def _largest(tensor: torch.Tensor, where: torch.Tensor) -> float:
    """The largest finite magnitude among some entries."""
    return float(in_double(tensor).abs().nan_to_num(0.0, 0.0, 0.0).masked_fill(~where, 0.0).max())


def _small(_: torch.dtype) -> float:
    return 1.0


def _large(dtype: torch.dtype) -> float:
    return _LARGE.get(dtype, _LARGE_OTHERWISE)


class _OtherContents:
    """Other finite contents for the padding of all inputs of a call.

    A model may compute an index from several integers: the width of a box from its corners, a row from two inputs. So a
    slice of copied padding is one whole real slice, the same one in all inputs that are padded alike.
    """

    def __init__(self, device: torch.device, of_floats: Literal["random", "real"]) -> None:
        self._device, self._of_floats = device, of_floats
        # Its own generator: the model may draw from the default one, which has to be the same in all replays.
        self._generator = torch.Generator(device).manual_seed(next(_SEEDS))
        self._indices: dict[tuple[int, int], torch.Tensor] = {}

    def fill(self, padded: PaddedInput, magnitude: Callable[[torch.dtype], float]) -> None:
        """Write other contents to the padding of one input; ``magnitude`` is the scale of random numbers."""
        buffer = padded.buffer
        if buffer.dtype is torch.bool:  # a mask that marks the padding must stay correct
            return
        if self._of_floats == "real" or not (buffer.dtype.is_floating_point or buffer.dtype.is_complex):
            self._copy_slices(padded)
            return
        real = padded.real.clone()
        random = torch.randn(buffer.shape, generator=self._generator, dtype=torch.float32, device=self._device)
        buffer.copy_(random * magnitude(buffer.dtype))
        padded.real.copy_(real)

    def _copy_slices(self, padded: PaddedInput) -> None:
        """Write copies to the padding; zeros if there is a single real slice, whose copies would change nothing."""
        buffer = padded.buffer
        for dim, (real, size) in enumerate(zip(padded.real.shape, buffer.shape, strict=True)):
            if real == size:
                continue
            if real == 1:
                buffer.narrow(dim, 1, size - 1).zero_()
                continue
            index = self._indices.get((real, size))
            if index is None:
                index = torch.arange(size, device=self._device)
                index[real:] = torch.randint(real, (size - real,), generator=self._generator, device=self._device)
                self._indices[real, size] = index  # guard: padding_integer_slices
            buffer.copy_(buffer.index_select(dim, index))


# -- runs in float64 ---------------------------------------------------------------------------------------------------

_WIDE: Mapping[torch.dtype, torch.dtype] = MappingProxyType(
    {
        torch.float16: torch.float64,
        torch.bfloat16: torch.float64,
        torch.float32: torch.float64,
        torch.complex32: torch.complex128,
        torch.complex64: torch.complex128,
    }
)
_OWN_OPERATORS = frozenset({"graphpass::zero_padding"})


def _run_wide(
    run: Callable[..., Any], written: Iterable[int], args: Sequence[Any]
) -> tuple[Sequence[Any], dict[int, torch.Tensor]]:
    """Call ``run``, which interprets a graph in float64, on copies of the inputs at ``written``.

    Returns the flat outputs, and {position: copy of a written input after the run}.

    Results of another size differ there by a leak, hardly by rounding. Floating-point tensors become float64 when an
    operator reads them, and results in narrower types are asked for in float64. So float64 copies of parameters live as
    long as an operator needs them, intermediate results until their last use, and copies of written inputs for a whole
    run. An operator without float64 runs in the types of the traced graph; its results become float64 after it.
    """
    with torch.no_grad():
        # Written inputs share no memory, or the call would not be padded.
        copies = {position: _wide(args[position].clone()) for position in written}  # guard: padding_float64_copies
        outputs = trees.flatten(run(*(copies.get(position, arg) for position, arg in enumerate(args))))[0]
    return outputs, copies


def region_in_float64(region: Region, args: Sequence[Any]) -> list[torch.Tensor]:
    """Run a region in float64; the tensors that it returns, then copies of its written inputs."""
    returned, written = _run_wide(_Interpreter(region.graph_module, {}).run, sorted(region.mutated_inputs), args)
    return [*(value for value in returned if isinstance(value, torch.Tensor)), *written.values()]


def _wide(value: Any) -> Any:
    """A tensor or type in float64 or complex128 where it is narrower; any other value unchanged."""
    if isinstance(value, torch.Tensor):
        return value.to(_WIDE[value.dtype]) if value.dtype in _WIDE else value
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def _narrow(value: Any, traced: Any) -> Any:
    """``value`` with all tensors in the types of ``traced``, a value of the same structure."""
    if isinstance(value, torch.Tensor) and isinstance(traced, torch.Tensor):
        return value.to(traced.dtype)
    if isinstance(value, (tuple, list)) and isinstance(traced, (tuple, list)):
        return type(value)([_narrow(*pair) for pair in zip(value, traced, strict=True)])
    return value


class _NoFloat64Error(Exception):
    """An operator depends on the type of its arguments."""


class _InFloat64(operators.TorchDispatchMode):
    """Gives operators float64 where they get or ask for a narrower type."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operators.schema_name(func)
        leaves, structure = trees.flatten((args, kwargs or {}))
        narrow = any(isinstance(leaf, torch.Tensor) and leaf.dtype in _WIDE for leaf in leaves)
        if not (name.startswith(("aten::", "prims::")) or name in _OWN_OPERATORS):
            raise _NoFloat64Error(name)
        if func is torch.ops.aten.view.dtype or (narrow and operators.is_mutable(func)):
            raise _NoFloat64Error(name)
        args, kwargs = trees.unflatten([_wide(leaf) for leaf in leaves], structure)
        return trees.map_tensors(_wide, func(*args, **kwargs))


class _Interpreter(fx.Interpreter):
    """Runs the traced graph of one region; adds the operators without float64 to ``in_own_type``."""

    def __init__(self, module: fx.GraphModule, in_own_type: dict[str, torch.dtype]) -> None:
        super().__init__(module)
        self._in_own_type = in_own_type

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, in float64 if it can."""
        if n.op in ("placeholder", "get_attr", "output"):
            return super().run_node(n)
        try:
            with _InFloat64():  # type: ignore[no-untyped-call]
                return trees.map_tensors(_wide, super().run_node(n))
        except (torch.AcceleratorError, torch.OutOfMemoryError):
            raise
        except Exception:
            return self._run_in_own_type(n)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        """The arguments of a node in float64, except for the graph's own result."""
        fetched = super().fetch_args_kwargs_from_env(n)
        return fetched if n.op == "output" else trees.map_tensors(_wide, fetched)

    def _run_in_own_type(self, n: fx.Node) -> Any:
        """Run a node on arguments in the types that they have in the traced graph."""
        wide = {argument: self.env[argument] for argument in n.all_input_nodes}
        narrow = {argument: _narrow(value, value_of(argument)) for argument, value in wide.items()}
        args, kwargs = fx.map_arg((n.args, n.kwargs), narrow.__getitem__)
        result = getattr(self, n.op)(n.target, args, kwargs)
        pairs = [
            (one, other)
            for argument in wide
            for one, other in zip(*(trees.flatten(each[argument])[0] for each in (wide, narrow)), strict=True)
            if isinstance(one, torch.Tensor) and one is not other
        ]
        for one, other in pairs:
            is_kept = other == one.to(other.dtype)
            if not bool(is_kept.all()):  # the operator wrote to it
                one.copy_(torch.where(is_kept, one, other))
        made = [leaf for leaf in trees.flatten(result)[0] if isinstance(leaf, torch.Tensor)]
        types = {tensor.dtype for tensor in (*made, *(other for _, other in pairs)) if tensor.is_floating_point()}
        if types:
            name = operators.operator_name(n.target) or getattr(n.target, "__name__", None)
            self._in_own_type[name or str(n.target)] = max(types, key=lambda dtype: torch.finfo(dtype).eps)
        originals = {id(other): one for one, other in pairs}
        return trees.map_tensors(lambda tensor: _wide(originals.get(id(tensor), tensor)), result)
