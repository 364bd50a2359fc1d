"""The captured keys of a manager: captures all keys in order within a memory limit, or one key in a step.

A captured key has its replay plan and arguments, see Note [Steps without Dynamo].
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from graphpass.capture.cuda import total_bytes
from graphpass.capture.modelstate import ModelState
from graphpass.capture.replay import ContextReads, ReplayPlan
from graphpass.capture.scope import CallObserver
from graphpass.capture.settings import replay_settings
from graphpass.compat import trees
from graphpass.dispatch.owngraphs import NO_ROOM, CaptureBytes, OwnGraph, OwnGraphs, bytes_allowed, due, is_faster
from graphpass.errors import CaptureError, StaticInputError
from graphpass.keys import CUDAGraphMode
from graphpass.ledger import Row, why_failed
from graphpass.paddedcalls import ServedSize
from graphpass.progress import capture_progress
from graphpass.ranks.conversation import AgreedSteps
from graphpass.ranks.lockstep import Lockstep
from graphpass.serving.buffers import PaddedInputs, RealInputs, Sizes
from graphpass.serving.estimate import DeviceMemory, Key, MemoryEstimate, PoolModel, capture_within, estimated
from graphpass.serving.model import Model, fields_named, nothing_reached
from graphpass.serving.recipe import Reached, Recipe, StepResults, leaf_sources
from graphpass.serving.stats import keys_by_group
from graphpass.serving.traffic import CapturedGraph, timed_s

_TIMED_STEPS = 10
_MOST_STEPS = 512
"""The real sizes of which a captured key keeps what their steps look up; beyond it, all are looked up again."""


ServedStep: TypeAlias = ServedSize[RealInputs, StepResults]
"""What serves steps of one real size over a captured key."""


@dataclass(frozen=True, slots=True, eq=False)
class CapturedKey:
    """One captured key, ready to replay."""

    inputs: PaddedInputs
    recipe: Recipe  #: how results are cut and built
    cost: CapturedGraph  #: seconds and memory of the capture
    plan: ReplayPlan | None = None  #: replays the graph; None if steps of this key go through Dynamo
    #: flat arguments of the graph: the padded inputs, their sizes, the model's parameters and buffers; a list, as the
    #: native comparison of addresses requires, and never changed
    args: list[Any] = field(default_factory=list)
    model: ModelState | None = None  #: of the capture, compared before a step without Dynamo; None through Dynamo
    generation: int = 0  #: the pool's generation at capture
    flat_of: Callable[[Any], Sequence[Any]] | None = None  #: the flat outputs of PIECEWISE graphs; None for a FULL one
    beside_metadata: ContextReads | None = None  #: what the graph reads of the context besides attention metadata
    is_bare: bool = False  #: the key has a FULL graph that reads nothing of the forward context
    steps: dict[tuple[int, ...], ServedStep] = field(default_factory=dict)  #: {real size of each key field: its steps}


Checked: TypeAlias = dict[CapturedKey, Any]
"""{captured key whose weights and settings are known to be those of the capture: the attention metadata of its last
step, whose fields are known to be those that the graph reads}"""


RecurringTokens: TypeAlias = tuple[Key, tuple[Key, ...]]
"""A number of tokens that padding keeps serving: the key that serves most of these steps, and keys for exactly so many
tokens: what that key would be, then one for each value of other key fields."""

_Kind: TypeAlias = tuple[CUDAGraphMode, bool, int]
"""What keys that differ in sizes alone have in common: mode, whether for uniform decode, number of adapters."""

StepOf: TypeAlias = Callable[[Key, CapturedKey, Sizes | None], Callable[..., Any]]
"""Makes a step of a captured key, from inputs of these sizes; None: over padding alone."""


class CapturedKeys:
    """The captured keys of a manager; captures missing ones and drops all of them on :meth:`close`."""

    def __init__(self, model: Model, ranks: AgreedSteps | Lockstep | None, *, owns_runtime: bool) -> None:
        self.is_alone = ranks is None  #: no other rank has to capture the same keys
        self._model, self._ranks, self._owns_runtime = model, ranks, owns_runtime
        self._dispatcher, self._inputs, self._runtime = model.dispatcher, model.inputs, model.runtime
        self._memory = DeviceMemory(model.inputs.device, model.runtime)
        self._estimate: MemoryEstimate | None = None
        self._states: dict[Any, ModelState] = {}  # {callable: state of the model}, shared by its keys
        self._by_key: dict[Key, CapturedKey] = {}
        self.costs: dict[Key, CapturedGraph] = {}  #: in the order of capture; steps of replaced weights included
        self.left_out: tuple[Key, ...] = ()  #: keys that were not captured because of ``max_bytes``
        self._max_bytes: int | None = None  # of the last capture
        self._own: set[Key] = set()  # keys of recurring sizes
        self._padded: set[Key] = set()  # keys of recurring sizes that stay padded: their graphs fail or are no faster
        self._unused: dict[Key, int] = {}  # {key of a graph that is tried, or cannot be dropped: what counts for it}
        self._bytes = CaptureBytes()
        self._shared = OwnGraphs.on(model.inputs.device)
        self._shared.adopt(self)

    def missing(self) -> list[Key]:
        """The keys without a graph, in the order of capture."""
        return [key for key in self._all() if key not in self._by_key]

    def _all(self) -> list[Key]:
        """All keys in the order of capture: mixed batches before uniform ones."""
        keys = [(mode, key) for mode, keys in self._dispatcher.capture_plan() for key in keys]
        return sorted(keys, key=lambda key: key[1].uniform)

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Report a failure of the body to the other ranks."""
        return contextlib.nullcontext() if self._ranks is None else self._ranks.capturing()

    def _on_some_rank(self, here: bool) -> bool:
        return here if self._ranks is None else self._ranks.stops(here, len(self.missing()))

    # -- all of them --------------------------------------------------------------------------------------------------

    def capture_missing(self, max_bytes: int | None) -> None:
        """Capture every key that has no graph, see :meth:`CudaGraphManager.capture`."""
        self._add_used()
        if not self.missing():
            again, none = "call recapture() to capture them again", "create the dispatcher with a mode and sizes"
            raise CaptureError(
                "there is nothing to capture",
                expected="a key without a graph (needs_capture())",
                found=f"{len(self.costs)} keys, all captured" if self.costs else "a dispatcher without keys",
                remedy=again if self.costs else none,
            )
        self._max_bytes = max_bytes
        limited = self._on_some_rank(max_bytes is not None)
        fits = self.estimate().pool if limited else PoolModel({}, {}, {})
        with (
            self._changed(self.missing()),
            self._runtime.capturing(by_calls=False),
            # Here, because the first run may have removed the FULL keys.
            capture_progress(missing := self.missing(), self._model.settings.progress) as progress,
        ):

            def captured(key: Key) -> None:
                progress.set_postfix_str(f"{key[0]} {key[1]}")
                self._capture(key)
                progress.update()

            num_bytes = int if max_bytes is None else self._runtime.pool_bytes  # reading the size of a pool takes time
            self.left_out = capture_within(
                max_bytes,
                list(self.costs),
                missing,
                fits,
                num_bytes=num_bytes,
                capture=captured,
                drop=self._drop_graphs,
                on_some_rank=self._on_some_rank,
            )
        self._memory.settle()  # release the memory that warm-ups have left in the allocator's cache
        if self.left_out:
            mode, descriptor = self.left_out[0]
            self._runtime.warn(
                f"keys left out: the pool would exceed {max_bytes} bytes",
                "raise max_bytes, or pass fewer or smaller capture sizes: batches of these keys run without a graph",
                at=f"{mode} {descriptor}" + (f" and {len(self.left_out) - 1} more" if len(self.left_out) > 1 else ""),
                is_recorded=True,
            )

    def give_saved_bits(self, step_of: StepOf) -> bool:
        """Whether a step of each compiled graph has the result that was saved with it, see :class:`SavedCalls`.

        Not compared are models with attention metadata, whose example requests overwrite each other's pages; with
        hooks, whose weights are elsewhere; and on several ranks, none of which may compile alone.
        """
        model = self._model
        if model.saved.used is None or any(one is not None for one in (model.attention, model.hooks, self._ranks)):
            return True
        of_graphs = {id(captured.model): (key, captured) for key, captured in reversed(self._by_key.items())}
        with self._changed(()):
            return all(self._gives_saved_bits(c, step_of(key, c, c.inputs.sizes)) for key, c in of_graphs.values())

    def _gives_saved_bits(self, captured: CapturedKey, step: Callable[..., Any]) -> bool:
        def run(*inputs: Any) -> Any:
            returned = step(dict(zip(captured.inputs.arguments, inputs, strict=True)))
            return trees.map_tensors(lambda tensor: tensor.clone(), returned)  # the next step overwrites it

        self._inputs.blank()
        given = captured.inputs.arguments
        return self._model.saved.gives_saved_bits(tuple(given), [one.clone() for one in given.values()], run)

    def estimate(self) -> MemoryEstimate:
        """Estimate the memory of all keys, see :meth:`CudaGraphManager.estimate`."""
        with replay_settings():
            self._model.recipe(beyond_one=_is_beyond_one(self._all()))
            keys, known = self._all(), self._estimate
            if self._on_some_rank(known is None or known.keys != tuple(keys)):  # guard: estimates_of_the_ladder
                with self._inputs.restoring():  # guard: throwaway_buffers_kept
                    known = estimated(
                        keys_by_group(keys),
                        self._memory,
                        lambda key: self._captured(key).cost.memory,
                        self._model.restoring_state,
                        buffer_bytes=self._model.buffer_bytes(),
                    )
            assert known is not None, "an estimate without keys"
            self._estimate = known
            return known

    def refuse_unready(self) -> None:
        """Check that this rank can replay its graphs, before the other ranks rely on it."""
        self.refuse_none_captured()
        for key, captured in {id(captured.model): (key, captured) for key, captured in self._by_key.items()}.values():
            if not self._is_valid(captured):
                raise _moved_weights(key, "call recapture() on every rank")

    def refuse_none_captured(self) -> None:
        """Raise a CaptureError if the dispatcher has keys and none of them is captured."""
        if not (self._by_key or self.left_out) and self.missing():
            raise CaptureError(
                "nothing has been captured yet",
                expected="capture() before the first run",
                found=f"{len(self.missing())} keys without a graph",
                remedy="call capture(), or create the dispatcher with lazy=True to capture each key at its first use",
            )

    # -- one of them --------------------------------------------------------------------------------------------------

    def of(self, key: Key, checked: Checked) -> CapturedKey:
        """A captured key; captures one that is missing or reads replaced weights, where that is allowed.

        Weights and settings are those of the capture for keys in ``checked``, to which it is added.
        """
        captured = self._by_key.get(key)
        if captured is not None:
            is_known = captured in checked and captured.generation == self._runtime.lease.generation
            if is_known or self._is_valid(captured):
                checked.setdefault(captured)
                return captured
        checked.clear()  # what is captured below runs code of the model
        mode, descriptor = key
        # A rank that captures during a step would keep the other ranks waiting.
        if self._ranks is not None or (key in self.costs and self._model.settings.policy.on_moved_input == "error"):
            remedy = " on every rank" if self._ranks is not None else ", or set on_moved_input='copy'"
            raise _moved_weights(key, "call recapture()" + remedy)
        if key in self.costs:
            self._runtime.warn(
                "captured again, because weights were replaced or a graph was dropped",
                "call recapture() after a change of weights, or copy the new weights into the old parameters",
                at=f"{mode} {descriptor}",
            )
        if captured is not None:  # drop all keys of the old weights, which would stay allocated until their next use
            stale = captured.model
            self._by_key = {other: one for other, one in self._by_key.items() if one.model is not stale}
            del captured, stale
        self._runtime.lease.order_after_last_forward()
        with self._changed([key]), self._runtime.scopes.opened():
            return self._capture(key)

    def _is_valid(self, captured: CapturedKey) -> bool:
        """Whether the graph can be replayed: weights and plan are those of the capture, and the pool still has it."""
        if captured.plan is None or captured.model is None:
            return True
        if not captured.model.matches_modules(self._model.modules):
            return False
        generation = self._runtime.lease.generation
        return generation == captured.generation and captured.plan.serves(captured.args)  # guard: manager_dead_graphs

    def steps_of(self, captured: CapturedKey, sizes: Sizes, row: Row) -> ServedStep:
        """What serves the steps of a captured key at these real sizes; ``row`` counts those of the key."""
        known = captured.steps.get(tuple(sizes.values()))
        if known is None:
            if len(captured.steps) >= _MOST_STEPS:
                captured.steps.clear()
            known = captured.steps[tuple(sizes.values())] = self.step_of_sizes(captured, sizes, row)
        return known

    def step_of_sizes(self, captured: CapturedKey, sizes: Sizes, row: Row) -> ServedStep:
        """:meth:`steps_of`, which nothing remembers."""
        inputs = RealInputs(self._inputs, sizes, captured.inputs, captured.args)
        return ServedSize(inputs, StepResults.of(captured.recipe, inputs, captured.flat_of), captured.plan, row)

    @contextlib.contextmanager
    def _changed(self, keys: Sequence[Key]) -> Iterator[None]:
        """Run the model as for a replay, which may capture these keys; restore inputs and state after the body."""
        with replay_settings():
            self._model.recipe(beyond_one=_is_beyond_one(keys))
            with (
                self._inputs.restoring(),
                self._model.restoring_state(),  # guard: manager_state
            ):
                yield

    def _capture(self, key: Key) -> CapturedKey:
        return self._add(key, self._captured(key))

    def _add(self, key: Key, captured: CapturedKey) -> CapturedKey:
        self._by_key[key], self.costs[key] = captured, captured.cost
        self._bytes.add(captured.cost.memory.pool_bytes, captured.cost.memory.driver_bytes)
        self._dispatcher.mark_captured(*key)
        return captured

    def _captured(self, key: Key) -> CapturedKey:
        mode, descriptor = key
        model, inputs = self._model, self._inputs.at(self._model.sizes_of(descriptor))
        before, started = self._memory.reading(), time.perf_counter()
        with model.learning_writes(inputs) as learn:
            calls = _observing(model, inputs, key, learn)
            metadata, reached = calls.prepare(), calls.reached
            context = model.context(metadata, inputs, mode, descriptor, descriptor.num_tokens, observer=calls)
            with context, model.hooked(mode), fields_named(model.attention, metadata):
                result = model.compiled(**inputs.arguments)
                model.save_call(inputs, reached)  # guard: saved_calls_of_sizes
        recipe = model.recipe()
        if not reached:
            raise nothing_reached(f"{mode} {descriptor}")
        # The graph for this size may have side effects in Python that the graph of the first run did not have.
        # guard: manager_side_effects_of_sizes
        is_direct = recipe.why_through_dynamo is None and not any(c.callable.side_effects for c in reached)
        without_dynamo = self._without_dynamo(mode, reached, recipe, inputs, result) if is_direct else {}
        reached.clear()  # release the results, which keep pool memory alive
        del result
        seconds = time.perf_counter() - started
        cost = CapturedGraph(mode, descriptor, seconds, self._memory.reading() - before)
        return CapturedKey(inputs, recipe, cost, **without_dynamo)

    def _without_dynamo(
        self, mode: CUDAGraphMode, reached: Reached, recipe: Recipe, inputs: PaddedInputs, result: Any
    ) -> dict[str, Any]:
        leaves, spec = trees.flatten(result)
        if spec != recipe.spec or recipe.sources != leaf_sources(leaves, reached, inputs):
            raise recipe.other_structure(str(spec))
        self._model.find_modules()
        call = reached[0]
        state = self._states.get(call.callable)
        if state is None or not state.matches_modules(self._model.modules):
            state = self._model.state_of(call.args)
            if state is None:  # a graph of some sizes reads a tensor that the model does not own
                return {}
            self._states[call.callable] = state
        plan, has_context = call.plan, self._model.attention is not None
        flat_of = tuple if call.callable.returns_flat else _flat
        if plan is not None and plan.reads.values:
            has_context = True  # guard: steps_that_read_the_context
        return {
            "plan": plan,
            "args": list(call.args),
            "model": state,
            "generation": self._runtime.lease.generation,
            "flat_of": flat_of if mode is CUDAGraphMode.PIECEWISE else None,
            "beside_metadata": None if plan is None else plan.reads.beside("attn_metadata"),
            "is_bare": plan is not None and mode is CUDAGraphMode.FULL and not has_context,
        }

    # -- sizes that recur ---------------------------------------------------------------------------------------------

    def adapt(self, max_sizes: int, step_of: StepOf) -> tuple[Key, ...]:
        """Capture keys for each size that padding keeps serving, see :meth:`CudaGraphManager.adapt`.

        ``step_of`` makes a step of a captured key over padding alone, to be timed.
        """
        self.refuse_none_captured()
        # guard: adapted_to_weights
        sizes = [size for size in self.recurring() if self._is_valid(self._by_key[size[0]])][:max_sizes]
        tried: dict[Key, CapturedKey] = {}
        kept: list[Key] = []
        try:
            with (
                self._changed([key for _, keys in sizes for key in keys]),
                self._runtime.capturing(by_calls=False),
                capture_progress(sizes, self._model.settings.progress) as progress,
            ):
                faster: list[Key] = []
                for padded, keys in progress:
                    progress.set_postfix_str(at := str(keys[0][1]))
                    expected = max(1, len(keys) * sum(self._bytes.mean()))  # no room at all is none
                    if self._room() < expected:  # guard: adapted_bytes
                        self._runtime.warn(NO_ROOM.why, NO_ROOM.remedy, at=at, is_recorded=True)
                        break
                    if self._is_faster(padded, keys, tried, step_of):
                        faster += keys
                    else:
                        self._padded.update(keys)
            for key in faster:
                self._dispatcher.add_key(*key)
                self._own.add(key)
                self._add(key, tried[key])
            kept = faster
        finally:
            self._drop(tried.keys() - kept)
            for key in kept:
                del self._unused[key]
        return tuple(kept)

    def _is_faster(self, padded: Key, keys: Sequence[Key], tried: dict[Key, CapturedKey], step_of: StepOf) -> bool:
        """Capture the keys of a size; whether their graphs fit, and are faster than the one that pads the size."""
        try:
            for key in keys:
                tried[key] = captured = self._captured(key)
                self._unused[key] = self._charged(captured)
        except Exception as error:
            why = why_failed(error, otherwise="leave it padded")  # guard: adapted_after_failure
            text, at = f"a size that recurs stays padded: {why}", str(keys[0][1])
            self._runtime.warn(text, why.remedy, at=at, is_recorded=True)
            return False
        own_s = self._seconds(keys[0], tried[keys[0]], step_of)
        padded_s = self._seconds(padded, self._by_key[padded], step_of)
        # The graphs may take more than was expected.
        return self._room() >= 0 and is_faster(own_s, padded_s)  # guard: adapted_if_faster

    def recurring(self) -> list[RecurringTokens]:
        """The sizes that padding has served often, those with the most padding first."""
        if "num_tokens" not in self._dispatcher.capture_fields:
            return []
        replays: dict[tuple[_Kind, int], Counter[Key]] = {}
        for key, captured in list(self._by_key.items()):
            for sizes, known in list(captured.steps.items()):
                size = (_kind_of(key), dict(zip(self._inputs.largest, sizes, strict=True))["num_tokens"])
                replays.setdefault(size, Counter())[key] += known.replays
        found, of_all = list[tuple[RecurringTokens, int, int]](), self._all()
        for (kind, num_tokens), by_key in replays.items():
            (padded, _), times = by_key.most_common(1)[0], by_key.total()
            mode, descriptor = padded
            served = (mode, self._dispatcher.at_size(descriptor, num_tokens))
            keys = tuple(dict.fromkeys((served, *self._at_size(of_all, kind, descriptor.num_tokens, num_tokens))))
            if not any(key in self._by_key or key in self._padded for key in keys):
                found.append(((padded, keys), times, descriptor.num_tokens - num_tokens))
        return due(found)

    def _at_size(self, keys: Sequence[Key], kind: _Kind, padded: int, num_tokens: int) -> list[Key]:
        """Keys for exactly ``num_tokens``, like those of a kind with ``padded`` tokens.

        Each value of the other key fields has one: a longer one must not take the batches of shorter keys.
        """
        alike = [key for key in keys if _kind_of(key) == kind and key[1].num_tokens == padded]
        return [(mode, self._dispatcher.at_size(descriptor, num_tokens)) for mode, descriptor in alike]

    def _add_used(self) -> None:
        used = () if self._model.saved.used is None or self._ranks is not None else self._model.saved.used.keys
        if not used or "num_tokens" not in self._dispatcher.capture_fields:
            return
        with replay_settings():
            self._model.recipe()  # the first run may remove the FULL keys
        for (of_mode, uniform, loras, num_tokens), _ in used:
            kind, keys = (CUDAGraphMode(of_mode), bool(uniform), loras), self._all()
            larger = [
                of.num_tokens for mode, of in keys if _kind_of((mode, of)) == kind and of.num_tokens >= num_tokens
            ]
            is_whole = num_tokens % (self._dispatcher.uniform_decode_query_len if uniform else 1) == 0
            if is_whole and larger and min(larger) != num_tokens:
                for key in self._at_size(keys, kind, min(larger), num_tokens):
                    self._dispatcher.add_key(*key)
                    self._own.add(key)

    def _save_used(self) -> None:
        if self._model.saved.used is None:
            return
        own = [(key, captured) for key in self._own if (captured := self._by_key.get(key)) is not None]
        # guard: saved_sizes_served
        served = [key for key, captured in own if any(known.replays for known in captured.steps.values())]
        sizes = {(mode.value, int(of.uniform), of.num_active_loras, of.num_tokens) for mode, of in served}
        problem = self._model.saved.used.write([(size, True) for size in sorted(sizes)])
        if problem is not None:
            self._runtime.warn(problem.why, problem.remedy)

    def graphs(self) -> list[OwnGraph]:
        """The graphs of recurring sizes, for the bound of the process; a manager does not give them back for others."""
        own = [captured for key in list(self._own) if (captured := self._by_key.get(key)) is not None]
        charged = [*map(self._charged, own), *list(self._unused.values())]
        return [OwnGraph(num_bytes, math.inf, drop=lambda: None) for num_bytes in charged]

    def _seconds(self, key: Key, captured: CapturedKey, step_of: StepOf) -> float:
        """Seconds of a step of a key; on the CPU, where time is no measure, its tokens."""
        device = self._inputs.device
        if device.type == "cpu":
            return float(key[1].num_tokens)
        return timed_s(step_of(key, captured, None), device, runs=_TIMED_STEPS)

    def _room(self) -> int:
        given, device = self._model.settings.graph_bytes, self._inputs.device
        limit = bytes_allowed(given, total_bytes(device), has_ladder=False) or 0
        room = limit - self._shared.num_bytes()
        if self._max_bytes is None:
            return room
        return min(room, self._max_bytes - self._runtime.pool_bytes())  # guard: adapted_within_max_bytes

    def _charged(self, captured: CapturedKey) -> int:
        return self._bytes.charged(captured.cost.memory.pool_bytes, captured.cost.memory.driver_bytes)

    def _drop(self, keys: Collection[Key]) -> None:
        """Drop graphs that serve no steps. Beside other users of the runtime, whose keys may be equal, they stay."""
        before = self._runtime.lease.generation
        if keys and self._owns_runtime and self._runtime.drop(keys):  # guard: adapted_beside_others
            now = self._runtime.lease.generation  # what was valid before stays so
            self._by_key = {
                key: replace(one, generation=now) if one.generation == before else one  # guard: adapted_generations
                for key, one in self._by_key.items()
            }
            for key in keys:
                self._unused.pop(key, None)

    # -- closing ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Drop all graphs, release the pool, and discard the compiled code and the description of the results."""
        self._save_used()
        self._drop_graphs()
        self.left_out, self._estimate = (), None
        self._states.clear()
        self._model.recompile()

    def _drop_graphs(self) -> None:
        self._by_key.clear()
        self.costs.clear()
        self._padded.clear()
        self._unused.clear()
        self._dispatcher.forget_captured()
        self._runtime.close()


def _observing(model: Model, inputs: PaddedInputs, key: Key, learn: Callable[[Reached], None]) -> CallObserver:
    """Observes the capture of a key: prepares its inputs, and keeps the results of a FULL graph in the buffers."""

    def entering(calls: Reached) -> None:
        model.check_graphs(inputs, calls)  # guard: manager_mixing_of_sizes
        if len(calls) == 1:
            learn(calls)

    def keep_results(outputs: list[Any]) -> list[Any]:
        if model.hooks is not None:
            model.hooks.join_after_forward()
        recipe = model.recipe()  # what the graph writes, and whether Python runs beside it, is known by now
        return recipe.keep(inputs, outputs) if recipe.why_through_dynamo is None else outputs

    mode, descriptor = key
    return CallObserver(model.runtime, entering, partial(model.prepared, inputs, descriptor, mode), keep_results)


def _flat(outputs: Any) -> Sequence[Any]:
    return trees.flatten(outputs)[0]


def _is_beyond_one(keys: Sequence[Key]) -> bool:
    return any(descriptor.num_tokens > 1 for _, descriptor in keys)


def _kind_of(key: Key) -> _Kind:
    mode, descriptor = key
    return mode, descriptor.uniform, descriptor.num_active_loras


def _moved_weights(key: Key, remedy: str) -> StaticInputError:
    return StaticInputError(
        f"the graph of {key[0]} {key[1]} reads weights that were replaced or moved since its capture",
        expected="the parameters and buffers of the capture, updated in place",
        found="other tensors, or other addresses",
        remedy=remedy,
    )
