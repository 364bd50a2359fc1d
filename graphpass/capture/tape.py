"""The CPU tape: a captured region as a list of ops at fixed addresses, replayed without the region's Python.

It is as strict as a GPU: it refuses what CUDA capture refuses (host reads, data-dependent shapes), freezes Python
state, and fills outputs with NaN where a replay on a GPU would overwrite them. So a test on any machine catches an
error that a GPU does not report.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from graphpass.capture.outputs import fill_with_sentinel
from graphpass.capture.staging import distinct_elements, storage_id
from graphpass.compat import dynamo, operators, processgroups, trees
from graphpass.compat.subclasses import is_wrapper
from graphpass.context import current_context
from graphpass.errors import CaptureError, named

_HOST_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_UNDEFINED_CONTENTS = frozenset(
    {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
)
_LIFT = "aten::lift_fresh"
"""``torch.tensor`` returns its new tensor through this op, which on the CPU returns its argument."""


class TrackedCompiledCall(functools.partial[Any]):
    """Code that the cgpass backend compiled: Dynamo would skip it under the tape's dispatch mode."""


def call_compiled(runnable: Callable[..., Any], *args: Any) -> Any:
    """Call code that the cgpass backend compiled; during an outer capture, the call goes through its RegionCalls."""
    context = current_context()
    if context is None or context.capture is None:
        return runnable(*args)
    return context.capture.call("compiled", TrackedCompiledCall(runnable), args, {})


_Targets = tuple[tuple[int, torch.Tensor], ...]
"""(number among a result's tensors, the tensor that it is copied into)."""


def _step(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], targets: _Targets) -> None:
    result = function(*args, **kwargs)
    if targets:
        results = trees.tensors(result)
        for number, target in targets:
            made = results[number]
            target.copy_(made if made.shape == target.shape else distinct_elements(made, name="a result"))


class _Tape(operators.TorchDispatchMode):
    """Records every op that is dispatched, and replays them in the inference mode that they were recorded in.

    It references all argument tensors, so no recorded address is reused.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Callable[[], None]] = []
        self.filled: list[torch.Tensor] = []  # by each replay
        self.made: set[int] = set()  # addresses of the storages that its ops allocated
        self._is_inside_opaque = False
        self._reads: list[_HostReads] = []
        self._announced: list[list[torch.Tensor]] | None = None
        self._inference = torch.is_inference_mode_enabled()

    def replay(self) -> None:
        with torch.inference_mode(self._inference), torch.no_grad():
            for step in self.steps:
                step()

    def reset(self) -> None:
        self.steps, self.filled = [], []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_inside_opaque:
            return func(*args, **kwargs)
        if any(map(is_wrapper, trees.tensors((args, kwargs)))):  # guard: tape_wrappers
            return NotImplemented  # the wrapper's class makes the ops on the tensors in it, which come here
        if operators.is_higher_order(func):
            return self._through_implementation(func, args, kwargs)
        _refuse_what_cuda_refuses(func, args, kwargs)
        _refuse_collectives(func)
        if operators.runs_python_kernel(func, "CPU"):
            # Recorded through its implementation: replaying the op itself would read Python state anew.
            with self.recording():  # guard: tape_kernel_host_reads
                return operators.call_kernel(func, "CPU", args, kwargs)
        name = operators.schema_of(func).name
        if name == _LIFT and args[0].untyped_storage().resizable():  # torch's own memory, not that of a NumPy array
            # Eager code makes the tensor anew in every call, so each replay fills a tensor of the tape with its data.
            func = torch.ops.aten.clone.default  # guard: tape_lifted_data
        frozen_args, frozen_kwargs = trees.map_tensors(_alias_of, (args, kwargs))
        inputs = trees.tensors((args, kwargs))
        before = set(map(storage_id, inputs))
        run = functools.partial(processgroups.finished, func) if func.namespace in processgroups.COLLECTIVES else func
        result = run(*args, **kwargs)
        after = set(map(storage_id, inputs))  # ``out=`` may have given an argument new memory
        results = trees.tensors(result)
        self.made |= after.union(map(storage_id, results)) - before
        mutates = operators.schema_of(func).is_mutable
        if name in _UNDEFINED_CONTENTS or torch.Tag.inplace_view in func.tags:
            return result
        targets = _fresh_results(results, after)
        if targets or mutates:
            self._add(run, frozen_args, frozen_kwargs, targets)
        return result

    def _add(self, function: Callable[..., Any], args: Any, kwargs: Any, targets: _Targets) -> None:
        self.steps.append(functools.partial(_step, function, args, kwargs, targets))
        self.filled += [target for _, target in targets]

    def _through_implementation(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a higher-order operator, such as AOTAutograd's for an op that writes, as the ops of its code."""
        implementation = operators.composite_kernel(operator)
        if implementation is None:
            raise _refusal(str(operator))
        with self.recording():
            return implementation(*args, **kwargs)

    def call(self, runnable: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Record a region: its ops, or one call of a compiled artifact whose kernels no dispatch mode sees."""
        if not getattr(runnable, "opaque", False):
            return runnable(*args, **kwargs)
        self._is_inside_opaque = True
        try:
            frozen_args, frozen_kwargs = trees.map_tensors(_alias_of, (args, dict(kwargs)))
            result = runnable(*args, **kwargs)
        finally:
            self._is_inside_opaque = False
        results, known = trees.tensors(result), set(map(storage_id, trees.tensors((args, kwargs))))
        targets = _fresh_results(results, known)
        self.made |= set(map(storage_id, results)) - known
        self._add(runnable, frozen_args, frozen_kwargs, targets)
        return result

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the ops of the body, and refuse host reads that dispatch no op. Inside of an op they are allowed."""
        with _HostReads() as reads, self:
            self._reads.append(reads)
            try:
                yield
            finally:
                self._reads.pop()

    def call_compiled(self, runnable: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call compiled code outside of the modes in which Dynamo would skip it; :meth:`resume_recording` records."""
        reads = self._reads[-1]
        announced = self._announced = []
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        reads.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            result = runnable(*args)
        finally:
            reads.__enter__()  # type: ignore[no-untyped-call]
            self.__enter__()  # type: ignore[no-untyped-call]
            self._announced = None
        within = {storage_id(leaf) for leaf in announced[0]} if len(announced) == 1 else set()
        if not within.issuperset(map(storage_id, trees.tensors(result))):  # guard: tape_compiled_within
            raise CaptureError(
                "a compiled callable cannot be captured on the CPU tape",
                expected="one graph of the cgpass backend that makes all of its results",
                found="a result made outside of it" if within else f"{len(announced)} graphs",
                remedy="remove the graph breaks (torch._logging.set_logs(graph_breaks=True)), or do not compile it",
            )
        return result

    def resume_recording(self, runnable: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        announced, self._announced = self._announced, None
        assert announced is not None
        with self.recording():
            result = self.call(runnable, args, kwargs)  # guard: tape_opaque_within
        announced.append(trees.tensors(result))
        self._announced = announced
        return result

    @property
    def is_paused(self) -> bool:
        return self._announced is not None


class _HostReads(TorchFunctionMode):
    """Refuses host reads that dispatch no op on the CPU: a dispatch mode does not see them."""

    _NAMES: Mapping[Any, str] = MappingProxyType(
        {
            torch.Tensor.tolist: "Tensor.tolist",
            torch.Tensor.numpy: "Tensor.numpy",
            torch.Tensor.__array__: "numpy.array",
        }
    )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self._NAMES:
            raise _refusal(self._NAMES[func])
        return func(*args, **(kwargs or {}))


class TapeDevice:
    """Records and replays on the CPU, with the methods of :class:`~graphpass.capture.cuda.CudaDevice`.

    The fixed tensors of the tapes stand for the pool.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.recordings: tuple[Any, ...] = ()
        self._tape: _Tape | None = None
        self._made: frozenset[int] = frozenset()
        self._num_bytes = 0

    def open(self) -> None:
        """Nothing: there is no pool."""

    def warm_up(self, body: Callable[[], Any]) -> Callable[[], float | None]:
        """Run ``body`` once, and drop its results."""
        with torch.no_grad():
            body()
        return lambda: None

    def record(
        self, body: Callable[[], Sequence[Any]], generators: Sequence[torch.Generator]
    ) -> tuple[_Tape, Sequence[Any]]:
        """Record ``body``, which takes effect; the generators need no registration."""
        self._tape = tape = _Tape()
        try:
            with torch.no_grad(), tape.recording():
                outputs = body()
        finally:
            self._tape = None
        self._made = frozenset(tape.made)
        self._num_bytes += sum({storage_id(made): made.untyped_storage().nbytes() for made in tape.filled}.values())
        return tape, outputs

    def timed(self, replay: Callable[[], object]) -> Callable[[], float | None]:
        """Nothing: a tape is no measure of a graph's time."""
        return lambda: None

    def reading(self) -> tuple[int, int]:
        """(bytes of all tapes so far, 0: there is no driver)."""
        return self._num_bytes, 0

    def drop(self, graph: Any) -> None:
        """Reset a graph that is never replayed again."""
        graph.reset()

    def refuse_frozen(self, outputs: Sequence[torch.Tensor]) -> None:
        """Refuse results of the last :meth:`record` in memory that the recording neither reads nor allocated."""
        if any(output.numel() and storage_id(output) not in self._made for output in outputs):
            raise CaptureError(
                "a result of the region cannot be captured on the CPU tape",
                expected="results of ops, which a replay computes again",
                found="a tensor that no op made, such as one in the memory of a new NumPy array",
                remedy="make it with torch.tensor, or outside of the captured region",
            )

    def call(self, runnable: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a region's runnable inside :meth:`warm_up` or :meth:`record`; compiled code is one step of the tape."""
        if dynamo.is_dynamo_compiled(runnable):
            raise CaptureError(
                f"a compiled callable cannot be captured on the CPU tape ({named(runnable)})",
                expected="a plain callable, or a region that the cgpass backend compiled",
                found="a torch.compile'd callable, which Dynamo skips while ops are being recorded",
                remedy="compile with torch.compile(model, backend='cgpass') instead of wrapping the compiled callable",
            )
        tape, args = self._tape, tuple(args)
        if isinstance(runnable, TrackedCompiledCall):
            return runnable(*args) if tape is None else tape.call_compiled(runnable.func, args)
        if tape is None:
            return runnable(*args, **kwargs)
        return (tape.resume_recording if tape.is_paused else tape.call)(runnable, args, kwargs)

    def without_ownership(self, tensor: torch.Tensor) -> torch.Tensor:
        """An alias of ``tensor``."""
        return tensor.detach()  # the caller who gets the recorded result may turn it in place

    def make_stale(self, outputs: Sequence[torch.Tensor]) -> None:
        """Overwrite ``outputs``, because another forward replays: late reads show."""
        fill_with_sentinel(outputs)

    def begin_forward(self) -> None:
        """Nothing to order: the CPU is synchronous."""

    def pool_bytes(self) -> int:
        """0: tensors of the tapes are ordinary CPU memory."""
        return 0

    def close(self) -> None:
        """Do nothing: the tapes own their tensors."""


_alias_of = torch.Tensor.detach
"""An alias, so that a later ``t_()`` does not change the tape's arguments. It references memory, not the tensor object:
a parameter can die while a tape reads its memory."""


def _fresh_results(results: Sequence[torch.Tensor], inputs: Collection[int]) -> _Targets:
    fresh = []
    for number, result in enumerate(results):
        if result.numel() and storage_id(result) not in inputs:
            # An alias: a later ``t_()`` turns the result itself, and not the memory that a replay fills.
            fresh.append((number, distinct_elements(result.detach(), name="a result")))  # guard: results_reshaped_later
    return tuple(fresh)


def _refuse_what_cuda_refuses(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    reads_host = any(tag in func.tags for tag in _HOST_TAGS)
    name = operators.schema_of(func).name
    if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        masks = any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        # index_put_ of one value under a mask is a masked fill, which needs no host read, unless it accumulates.
        reads_host = masks and (name == "aten::index" or args[2].numel() != 1 or (len(args) > 3 and args[3]))
    if name == "aten::repeat_interleave":
        reads_host = kwargs.get("output_size") is None
    if reads_host:  # guard: tape_refuses_host_reads
        raise _refusal(name)


def _refuse_collectives(func: Any) -> None:
    if func.namespace == "c10d":
        raise CaptureError(
            f"op {func} cannot be captured on the CPU tape",
            expected="ops that are done when they return",
            found="a collective, which a replay would not wait for",
            remedy="let the op that calls it run eagerly: list it in splitting_ops",
        )


def _refusal(name: str) -> CaptureError:
    return CaptureError(
        f"op {name} cannot be captured",
        expected="ops whose results stay on the device and whose output shapes follow from input shapes",
        found="a host read or a data-dependent shape",
        remedy="let the op run eagerly: list it in splitting_ops, or move it out of the captured region",
    )
