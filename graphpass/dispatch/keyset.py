"""The keys of one mode: their creation, their validation, and which of them are captured."""

from __future__ import annotations

from graphpass.dispatch.grid import KeyLimits, SizeGrid
from graphpass.dispatch.lora import LoraKeys
from graphpass.dispatch.table import Route
from graphpass.errors import DispatchError
from graphpass.keys import BatchDescriptor
from graphpass.modes import CUDAGraphMode

__all__ = ["KeySet"]


class KeySet:
    """All keys of a dispatcher, derived from its sizes and limits; no key is captured at first.

    Args:
        mode: the graphs to create keys for.
        grid: the capture sizes of each field.
        limits: largest batch, most requests, tokens of a request in a uniform decode batch.
        lora: adapter counts to create keys for; None: batches use no adapter.

    Attributes:
        uniform_routes: the routes for uniform decode batches that have keys, in order of preference.
        mixed_routes: the routes for all other batches that have keys, in order of preference.
        has_decode_routine: the mode has separate keys for uniform decode batches.

    Raises:
        DispatchError: no size is left.
    """

    def __init__(self, mode: CUDAGraphMode, grid: SizeGrid, limits: KeyLimits, lora: LoraKeys | None) -> None:
        self.mode = mode
        self.limits = limits
        self.has_decode_routine = mode.separate_routine()
        self._grid = grid
        self._adapter_counts = (0,) if lora is None else lora.count_table()
        decode = Route(CUDAGraphMode.FULL, uniform=True)
        full = Route(CUDAGraphMode.FULL, uniform=False)
        piecewise = Route(CUDAGraphMode.PIECEWISE, uniform=False)
        for adapters in (0,) if lora is None else lora.key_counts():
            for route in (full, piecewise):
                if mode.mixed_mode() is route.mode:
                    for key in grid.mixed_keys(route.mode, limits, adapters):
                        route.add(key, grid.fields(key))
            if self.has_decode_routine:
                for key in grid.decode_keys(limits, adapters):
                    decode.add(key, grid.fields(key))
        self._routes = (decode, full, piecewise)
        self._choose_routes()

    def _choose_routes(self) -> None:
        self.uniform_routes = tuple(route for route in self._routes if len(route))
        self.mixed_routes = tuple(route for route in self.uniform_routes if not route.uniform)

    def descriptors(self, mode: CUDAGraphMode) -> list[BatchDescriptor]:
        """Every key of a runtime mode, captured or not, in insertion order."""
        return [descriptor for route in self._routes if route.mode is mode for descriptor in route.descriptors()]

    def add(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> None:
        """Add one key, not captured yet; adding a key twice changes nothing.

        Raises:
            DispatchError: no batch can ever dispatch to the key, or it lacks a field of the sizes.
        """
        fault = self._fault(mode, descriptor)
        if fault is not None:
            expected, remedy = fault
            raise DispatchError(
                "the key could never be dispatched", expected=expected, found=f"{mode} {descriptor!r}", remedy=remedy
            )
        self._route(mode, descriptor).add(descriptor, self._grid.fields(descriptor))
        self._choose_routes()

    def _fault(self, mode: CUDAGraphMode, key: BatchDescriptor) -> tuple[str, str] | None:
        """(expected, remedy) for a key that no batch can dispatch to; None for a valid key."""
        if not mode or not mode.is_valid_runtime_mode() or not self.mode.has_mode(mode):
            return (f"a runtime mode of {self.mode}, not NONE", "call initialize_keys() with a mode that includes it")
        if key.num_tokens < 1 or (key.num_reqs is not None and key.num_reqs < 1):
            return ("at least 1 token and 1 request", "pass the padded counts")
        if mode is CUDAGraphMode.PIECEWISE and (key.num_reqs is not None or key.uniform):
            return ("num_reqs=None, uniform=False: PIECEWISE keys serve any requests", "leave both fields out")
        query_len = self.limits.query_len
        if key.uniform and (key.num_tokens % query_len or key.num_reqs not in (None, key.num_tokens // query_len)):
            return (f"{query_len} tokens a request in uniform keys", "set num_tokens and num_reqs accordingly")
        if key.has_lora != (key.num_active_loras > 0) or key.num_active_loras not in self._adapter_counts:
            counts = sorted(set(self._adapter_counts))
            return (f"num_active_loras one of {counts}, and has_lora only where it is not 0", "use one of these counts")
        num_tokens = self._grid.num_tokens(self._grid.fields(key))
        if num_tokens != key.num_tokens:
            return (f"num_tokens={num_tokens}, the product of its fields", "set num_tokens to the product")
        return None

    def _route(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> Route:
        """The route of a valid key."""
        decode, full, piecewise = self._routes
        if mode is CUDAGraphMode.FULL:
            return decode if descriptor.uniform else full
        return piecewise

    def mark_captured(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> None:
        """Record that the key's graph exists.

        Raises:
            DispatchError: there is no such key.
        """
        if not _may_run(mode) or not self._route(mode, descriptor).mark_captured(descriptor):
            raise DispatchError(
                "the dispatcher has no such key to mark as captured",
                expected="a mode and a descriptor of capture_plan()",
                found=f"{mode} {descriptor!r}",
                remedy="call add_key(mode, descriptor) first",
            )

    def is_captured(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> bool:
        """Whether the key's graph exists."""
        return _may_run(mode) and self._route(mode, descriptor).is_captured(descriptor)

    def forget_captured(self) -> None:
        """Clear the captured mark of every key."""
        for route in self._routes:
            route.forget_captured()

    def capture_plan(self) -> list[tuple[CUDAGraphMode, list[BatchDescriptor]]]:
        """Every key in capture order: PIECEWISE, then FULL, each from the largest to the smallest."""
        plan = []
        for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
            descriptors = self.descriptors(mode)
            descriptors.sort(key=lambda key: (key.num_tokens, key.num_reqs or 0, key.num_active_loras), reverse=True)
            if descriptors:
                plan.append((mode, descriptors))
        return plan


def _may_run(mode: CUDAGraphMode) -> bool:
    """Whether the mode is PIECEWISE or FULL: a runtime mode other than NONE."""
    return mode.is_valid_runtime_mode() and bool(mode)
