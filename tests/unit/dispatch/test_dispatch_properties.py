"""The dispatcher against a brute-force reading of its keys."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpass import CudagraphDispatcher, DispatchReason, LoraKeys
from graphpass.errors import DispatchError
from graphpass.keys import BatchDescriptor, CUDAGraphMode

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
RUNTIME_MODES = (NONE, PIECEWISE, FULL)
LADDERS = st.lists(st.integers(1, 20), min_size=1, max_size=5)
CONFIGURATIONS = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(list(CUDAGraphMode)),
        "capture_sizes": LADDERS,
        "max_num_reqs": st.integers(1, 12),
        "uniform_decode_query_len": st.integers(1, 4),
        "lora": st.none() | st.builds(LoraKeys, st.integers(1, 5), st.booleans(), st.booleans()),
        "lazy": st.booleans(),
    }
)
EXTRAS = st.sampled_from([(), (("width", 1),), (("width", 2),)])
ADDED = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 8), st.sampled_from([(), (("width", 1),)])), max_size=4)


def adapters_match(key: BatchDescriptor, num_active_loras: int, counts: Iterable[int]) -> bool:
    return key.num_active_loras == min(count for count in counts if count >= num_active_loras)


@given(CONFIGURATIONS, ADDED, st.data())
def test_choice_is_the_smallest_fitting_key(
    configuration: dict[str, object], added: list[tuple[int, int, tuple[tuple[str, int], ...]]], data: st.DataObject
) -> None:
    untouched = copy.deepcopy(configuration)
    dispatcher = CudagraphDispatcher(**configuration)  # type: ignore[arg-type]
    lora, mode = configuration["lora"], dispatcher.mode
    counts = lora.key_counts() if isinstance(lora, LoraKeys) else (0,)
    for key_tokens, key_reqs, extra in added:
        adapters = counts[-1]
        shared = {"has_lora": adapters > 0, "num_active_loras": adapters, "extra": extra}
        if mode.has_mode(FULL):
            dispatcher.add_key(FULL, BatchDescriptor(key_tokens, key_reqs, **shared))  # type: ignore[arg-type]
        if mode.has_mode(PIECEWISE):
            dispatcher.add_key(PIECEWISE, BatchDescriptor(key_tokens, **shared))  # type: ignore[arg-type]
    keys = dispatcher.keys
    captured = set()
    for runtime_mode, descriptors in dispatcher.capture_plan():
        for descriptor in data.draw(st.sets(st.sampled_from(descriptors))):
            dispatcher.mark_captured(runtime_mode, descriptor)
            captured.add((runtime_mode, descriptor))

    query_len = dispatcher.uniform_decode_query_len
    num_tokens = data.draw(st.integers(0, 40))
    num_reqs = data.draw(st.none() | st.integers(0, 14))
    uniform = data.draw(st.booleans()) and (num_tokens % query_len == 0 or not mode.separate_routine())
    num_active_loras = data.draw(st.integers(0, counts[-1]))
    extra = data.draw(EXTRAS)
    allowed = data.draw(st.none() | st.sets(st.sampled_from(RUNTIME_MODES), min_size=1))
    allowed_before = None if allowed is None else set(allowed)

    expected = None
    for runtime_mode, for_uniform in ((FULL, True), (FULL, False), (PIECEWISE, False)):
        fitting = [
            key
            for key in keys[runtime_mode]
            if key.uniform == for_uniform
            and (uniform or not for_uniform)
            and key.num_tokens >= num_tokens
            and (key.num_reqs is None or key.num_reqs >= (num_reqs or 0))
            and adapters_match(key, num_active_loras, counts)
            and key.extra == extra
            and (allowed is None or runtime_mode in allowed)
        ]
        if not fitting or num_tokens == 0:
            continue
        smallest = min(fitting, key=lambda key: (key.num_tokens, key.num_reqs or 0))
        if configuration["lazy"] or (runtime_mode, smallest) in captured:
            expected = (runtime_mode, smallest)
            break

    arguments = {
        "num_reqs": num_reqs,
        "uniform_decode": uniform,
        "num_active_loras": num_active_loras,
        "allowed_modes": allowed,
        "extra": extra,
    }
    if expected is None and allowed is not None and NONE not in allowed:
        with pytest.raises(DispatchError, match="no graph serves"):
            dispatcher.dispatch(num_tokens, **arguments)  # type: ignore[arg-type]
    else:
        step = dispatcher.dispatch(num_tokens, **arguments)  # type: ignore[arg-type]
        assert (step.mode, step.descriptor) == (expected or (NONE, BatchDescriptor(num_tokens)))
        assert step == dispatcher.dispatch(num_tokens, **arguments)  # type: ignore[arg-type]
        if allowed is None:
            described = BatchDescriptor(num_tokens, num_reqs, uniform, num_active_loras > 0, num_active_loras, extra)
            assert dispatcher.dispatch_descriptor(described) == step
        relaxed = uniform and mode.separate_routine() and expected is not None and not expected[1].uniform
        if expected is not None:
            exact = DispatchReason.EXACT if step.descriptor.num_tokens == num_tokens else DispatchReason.PADDED
            assert step.reason is (DispatchReason.RELAXED if relaxed else exact)
        else:
            assert (step.reason is DispatchReason.EMPTY) is (num_tokens == 0)
    assert (configuration, allowed) == (untouched, allowed_before)
    assert dispatcher.keys == keys


@given(CONFIGURATIONS)
def test_keys_stay_within_the_limits(configuration: dict[str, object]) -> None:
    dispatcher = CudagraphDispatcher(**configuration)  # type: ignore[arg-type]
    query_len = dispatcher.uniform_decode_query_len
    largest = max(configuration["capture_sizes"])  # type: ignore[call-overload]
    max_num_reqs = configuration["max_num_reqs"]
    for mode, keys in dispatcher.keys.items():
        for key in keys:
            assert 1 <= key.num_tokens < largest + query_len
            assert (key.num_reqs is None) is (mode is PIECEWISE)
            assert key.num_reqs is None or key.num_reqs <= max_num_reqs  # type: ignore[operator]
            assert not key.uniform or key.num_tokens == key.num_reqs * query_len  # type: ignore[operator]
        if keys and not dispatcher.mode.separate_routine():
            assert largest in {key.num_tokens for key in keys}
    planned = [(mode, key) for mode, keys in dispatcher.capture_plan() for key in keys]
    assert sorted(map(repr, planned)) == sorted(
        repr((mode, key)) for mode, keys in dispatcher.keys.items() for key in keys
    )


@given(
    st.dictionaries(st.sampled_from(["batch", "num_reqs", "seq_len"]), LADDERS, min_size=2),
    st.sampled_from([FULL, PIECEWISE]),
    st.lists(
        st.fixed_dictionaries({name: st.integers(1, 25) for name in ("batch", "num_reqs", "seq_len")}), max_size=3
    ),
    st.data(),
)
def test_fields_round_up_to_the_smallest_fitting_key(
    ladders: dict[str, list[int]], mode: CUDAGraphMode, added: list[dict[str, int]], data: st.DataObject
) -> None:
    untouched = copy.deepcopy(ladders)
    dispatcher = CudagraphDispatcher(mode, ladders, max_num_reqs=10**6, lazy=True)
    real = {name: data.draw(st.integers(1, 25), label=name) for name in ladders}

    shapes = set(product(*ladders.values()))
    for sizes in added:
        values = tuple(sizes[name] for name in ladders)
        shapes.add(values)
        num_tokens = math.prod(values)
        num_reqs = sizes["num_reqs"] if "num_reqs" in ladders else num_tokens
        pairs = tuple((name, sizes[name]) for name in ladders if name != "num_reqs")
        dispatcher.add_key(mode, BatchDescriptor(num_tokens, num_reqs if mode is FULL else None, extra=pairs))
    assert {tuple(dispatcher.fields(key).values()) for key in dispatcher.keys[mode]} == shapes

    wanted = tuple(real.values())
    fitting = [shape for shape in shapes if all(padded >= size for padded, size in zip(shape, wanted, strict=True))]
    step = dispatcher.dispatch(extra=tuple(real.items()))
    if not fitting:
        assert (step.mode, step.reason) == (NONE, DispatchReason.TOO_LARGE)
        assert dispatcher.fields(step.descriptor) == real
    else:
        assert step.mode is mode
        assert step.descriptor in dispatcher.keys[mode]
        padded = tuple(dispatcher.fields(step.descriptor).values())
        assert padded in fitting
        assert math.prod(padded) == step.descriptor.num_tokens == min(map(math.prod, fitting))
        assert step.reason is (DispatchReason.EXACT if padded == wanted else DispatchReason.PADDED)
    assert ladders == untouched
