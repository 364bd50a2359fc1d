"""The callable that Dynamo gets: compiled regions in stitched code, with FULL and PIECEWISE wrappers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from cgpass.autodispatch import AutoDispatcher
from cgpass.keyrules import calls_collectives, nodes_of, reads_real_sizes
from cgpass.wrappers import CallableGraphs, CompiledGraph
from graphpass.capture.replay import ReplayPlan
from graphpass.capture.runtime import GraphRuntime
from graphpass.capture.scope import CallObserver, ReachedCall
from graphpass.capture.settings import restoring
from graphpass.compat import dynamo, memory, operators, processgroups, saving, trees
from graphpass.compile import CompiledRegion, WaitingFunction
from graphpass.context import ForwardContext, current_context, entered
from graphpass.errors import CaptureError, ContextError, ShapeError
from graphpass.keys import BatchDescriptor, CUDAGraphMode
from graphpass.options import Settings
from graphpass.ranks.lockstep import LockstepGroups
from graphpass.saved.files import UsedKeys

_RUNS_BEFORE_ADVICE = 8


@saving.runs_compiled_ahead
class GraphedCallable:
    """One graph of a model: ``g0``, ``g1``, ...

    Of a FULL wrapper around the stitched code and PIECEWISE wrappers around its regions, those that the context's mode
    names capture or replay.
    """

    def __init__(self, graph: CompiledGraph, runtime: GraphRuntime, settings: Settings) -> None:
        self.name, ends = graph.record.name, graph.record.ends
        self.side_effects, self.traces, self.returns_flat = graph.side_effects, graph.traces, graph.returns_flat
        self.code, self.ends_early = graph.code, None if ends is None else f"graph break: {ends}"
        self.partition, self.runtime = graph.partition, runtime
        if calls_collectives(graph.partition):
            runtime.owned(processgroups.ClosedBeforeGroups).register(runtime)
            if settings.ranks is not None:
                runtime.lockstep[self.name] = runtime.owned(LockstepGroups).of(list(nodes_of(graph.partition)))
        self._arguments, self._appended = graph.arguments, graph.appended
        if graph.appended is not None and graph.appended.sizes is not None:
            # guard: real_sizes_that_are_read
            graph.appended.sizes.is_read = reads_real_sizes(graph.partition, graph.traces)
        reads = graph.arguments.reads
        self._num_passed = len(reads) if reads == tuple((p, None) for p in range(len(reads))) else None
        self._modes = settings.runtime_modes()
        self._compiled = dict(graph.compiled)
        functions = [region.function for region in graph.compiled.values()]
        self._waiting = [function for function in functions if isinstance(function, WaitingFunction)]
        self._graphs = CallableGraphs(graph, runtime, settings)
        self._stitched, self.static = self._graphs.stitched, self._graphs.static
        self._sizes = graph.sizes
        self._runs_without_graph = 0
        self.never_full = graph.partition.never_full()
        self._auto = None if graph.rules is None else AutoDispatcher(graph.rules, self._graphs)
        fields = {
            field: (position, dim)
            for position, dim, field in reversed(graph.sizes.counted if graph.rules is None else ())
        }
        self._seen = tuple((runtime.ledger.sizes[field], *place) for field, place in fields.items())

    def runs(self, compiled: Mapping[str, CompiledRegion]) -> bool:
        """Whether the callable's regions are exactly the compiled objects in ``compiled``."""
        return self._compiled.keys() == compiled.keys() and all(
            region is compiled[name] for name, region in self._compiled.items()
        )

    def __call__(self, *given: Any) -> Any:
        """Run with Dynamo's arguments."""
        returned = self._with_plain(given if len(given) == self._num_passed else self._arguments.read(given))
        return self._arguments.made(returned) if self._arguments.makes else returned

    def _with_plain(self, args: tuple[Any, ...]) -> Any:
        if self._appended is None:
            return self.call(args)
        changed = self._appended.changed()  # guard: attributes_layout
        args = self._appended.after(args)
        if changed is None:
            return self.call(args)
        text = "a tensor that compiled code reads has another layout than in its trace"
        remedy = "call torch.compiler.reset() after `tensor.data = other` of another layout"
        _, expected, found = changed
        if _is_at_key(current_context()):
            raise ShapeError(f"{self.name}: {text}", expected=expected, found=found, remedy=remedy)
        return self._as_traced(
            args,
            f"{text}: its calls run without compiled code and graphs",
            remedy,
            at=f"{self.name} ({found}, traced as {expected})",
        )

    @classmethod
    def serialize_compile_artifacts(cls, _: Any) -> bytes:
        """Refuse to be saved by ``aot_compile``: graphs cannot leave their process."""
        raise CaptureError(
            "a callable with graphs cannot be saved by aot_compile",
            expected="a function that runs in this process",
            found=cls.__name__,
            remedy="leave out save_compiled_function(); warm_start=DIR saves what torch.compile compiled",
        )

    deserialize_compile_artifacts = serialize_compile_artifacts

    def call(self, args: tuple[Any, ...]) -> Any:
        """Run with one argument for each of the partition's inputs."""
        context = current_context()
        self.runtime.given_up.entered[self.name] += 1
        if (transform := operators.transform_over(args)) is not None:
            return self._transformed(context, args, transform)
        if self._waiting:
            self._compile_waiting(context)
        if context is None or context.capture is not None:
            return self._without_user_context(context, args)
        observer = context.observer
        observer = observer if observer is not None and observer.runtime is self.runtime else None
        if observer is not None:
            observer.entering(self, args)
        elif context.owner is not None:
            return self._without_user_context(context, args)
        if not context.runtime_mode:
            return self._observed(observer, args, self._stitched(*args))
        if context.runtime_mode not in self._modes:
            raise ContextError(
                f"{self.name} was not built for runtime mode {context.runtime_mode}",
                expected=" or ".join(sorted(map(str, self._modes))) or "NONE",
                found=str(context.runtime_mode),
                remedy=f"compile with options mode={str(context.runtime_mode)!r}, or a pair that contains it",
            )
        for position in self._graphs.staged:
            if not args[position].numel():
                return self._stitched(*args)
        full = context.runtime_mode is CUDAGraphMode.FULL
        if full and self.never_full is not None:
            raise CaptureError(
                f"{self.name} cannot be captured as a whole",
                expected="runtime mode PIECEWISE, or a model without such an op",
                found=str(self.never_full),
                remedy="dispatch with mode PIECEWISE: the region stays eager and costs one split",
            )
        assert context.batch_descriptor is not None, "PIECEWISE and FULL come with a descriptor"
        self._sizes.check(context.batch_descriptor, args)
        if full and observer is None:
            return self._graphs.full.call_flat(context, args)
        outputs, plan = self._graphs.whole(context, args) if full else self._graphs.piecewise(context, args)
        return self._observed(observer, args, outputs, plan)

    def _compile_waiting(self, context: ForwardContext | None) -> None:
        is_first = self.runtime.given_up.entered[self.name] == 1
        if is_first and context is None and self.runtime.scopes.current() is None:  # guard: compiled_when_needed
            return
        if memory.is_capturing_stream(self._graphs.device):  # guard: no_compilation_inside_a_capture
            return
        start_s = time.perf_counter()
        with restoring((), (), self._graphs.device), dynamo.errors_of_backend("cgpass"):
            compiled = [function.compile() for function in self._waiting]
        self._waiting = []
        self.runtime.compiled_later(self.name, sum(compiled), time.perf_counter() - start_s)

    def _transformed(self, context: ForwardContext | None, args: tuple[Any, ...], transform: str) -> Any:
        """Run a call under ``vmap`` or forward-mode AD: compiled kernels would drop the tangents."""
        if _is_at_key(context):
            operators.refuse_transform(self.name, transform)
        text = "a call under vmap or forward-mode AD runs without compiled code and graphs"
        remedy = "transform the model itself, or compile a function that has the transform inside"
        return self._as_traced(args, text, remedy, at=self.name)

    def _as_traced(self, args: tuple[Any, ...], text: str, remedy: str, at: str) -> Any:
        self.runtime.warn(text, remedy, at=at)
        return self.partition.bind({r.name: r.graph_module.forward for r in self.partition.regions})(*args)

    def _observed(
        self, observer: CallObserver | None, args: tuple[Any, ...], outputs: Any, plan: ReplayPlan | None = None
    ) -> Any:
        if observer is not None:
            observer.reached.append(ReachedCall(self, args, tuple(trees.flatten(outputs)[0]), plan))
        return outputs

    def _without_user_context(self, context: ForwardContext | None, args: tuple[Any, ...]) -> Any:
        """Run a call without a user's context: in a capture, by the callable's own dispatcher, or without graphs."""
        if context is not None and context.capture is not None:
            return self._stitched(*args)
        if context is not None:  # set by the dispatcher of an enclosing callable, which holds the pool lease
            with entered(None):
                return self._without_user_context(None, args)
        if self._auto is not None:
            return self._auto.call(args, self.runtime.scopes.current())
        for seen, position, dim in self._seen:
            seen[args[position].shape[dim]] += 1
        self._runs_without_graph += 1
        if self._runs_without_graph == _RUNS_BEFORE_ADVICE:
            self.runtime.warn(
                f"ran {_RUNS_BEFORE_ADVICE} times without a forward context and therefore without graphs",
                "set dispatch='auto', which chooses the keys by itself; or call it in `with "
                "graphpass.set_forward_context(runtime_mode=..., batch_descriptor=...):`, each key for the first time "
                "inside `with runtime.capturing():`",
                at=self.name,
            )
        return self._stitched(*args)

    def ladder(self, args: Sequence[Any]) -> list[BatchDescriptor]:
        """The keys of all capture sizes, largest first; without capture sizes, the key of ``args`` alone."""
        return [] if self._auto is None else [key.descriptor for key in self._auto.ladder(args)]

    def remember_keys(self, used: UsedKeys) -> None:
        """Add the keys that an earlier process used to the ladder; ``close()`` writes those of this process."""
        if self._auto is not None:
            self._auto.used = used

    def capture_key(self, descriptor: BatchDescriptor, args: Sequence[Any]) -> None:
        """Capture one key of :meth:`ladder`; afterwards, restore all tensors that the graph writes."""
        assert self._auto is not None, "only a callable that dispatches by itself has a ladder"
        self._auto.capture_key(descriptor, args)


def _is_at_key(context: ForwardContext | None) -> bool:
    return context is not None and bool(context.runtime_mode) and context.capture is None and context.owner is None
