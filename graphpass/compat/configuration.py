"""The configuration of the compilers: AOTAutograd's, Inductor's, and torch's own settings that they read."""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch


def settings_now() -> tuple[Any, ...]:
    """All global state that a compiler reads: modes, precision, and the configuration of AOTAutograd and Inductor."""
    from torch._functorch import config as aot_config
    from torch._inductor import config as inductor_config

    autocast = tuple(
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
    )
    return (
        autocast,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        *float32_precisions().items(),
        torch.are_deterministic_algorithms_enabled(),
        inductor_config.get_hash(),
        aot_config.get_hash(),
    )


def float32_precisions() -> dict[tuple[str, str], str]:
    """{(type of device, kind of product): precision of products in float32}: ``ieee``, ``tf32`` or ``bf16``.

    torch's older ``get_float32_matmul_precision`` raises where these settings were set one by one.
    """
    backends: Any = torch.backends
    of_devices = {"cuda": (backends.cuda.matmul, backends.cudnn), "cpu": (backends.mkldnn.matmul, backends.mkldnn)}
    return {
        (device, kind): "ieee" if setting.fp32_precision == "none" else setting.fp32_precision
        for device, (matmul, others) in of_devices.items()
        for kind, setting in (("matmul", matmul), ("conv", others.conv), ("rnn", others.rnn))
    }


def saved_configuration() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What enters the configuration of AOTAutograd and Inductor that holds now, at any later time."""
    from torch._functorch import config as aot_config
    from torch._inductor import config as inductor_config

    saved = [(config, _copy_of(config)) for config in (aot_config, inductor_config)]

    @contextlib.contextmanager
    def configured() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for config, values in saved:
                now = _copy_of(config)
                stack.enter_context(config.patch({name: one for name, one in values.items() if now[name] != one}))
            yield

    return configured


def _copy_of(config: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of deprecated settings, which torch 2.15 reads there
        copy: dict[str, Any] = config.get_config_copy()
    return copy


def settings_that_are_off(names: Iterable[str]) -> list[str]:
    """Of these settings of Inductor, dotted names, those that this torch has and that nothing has switched on."""
    from torch._inductor import config

    off = []
    for name in names:
        with contextlib.suppress(AttributeError):
            if operator.attrgetter(name)(config) is False:
                off.append(name)
    return off
