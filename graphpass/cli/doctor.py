"""``graphpass doctor``: what this machine offers to graphpass, and what will be slow on it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed
from torch.utils import collect_env

import graphpass
from graphpass.capture.runtime import NEWEST_TORCH, OLDEST_TORCH, torch_release
from graphpass.cli.explain import quiet_compiler
from graphpass.cli.usermodel import Result
from graphpass.compile import summary
from graphpass.ranks.lockstep import Lockstep, would_hang
from graphpass.report.drawing import Heading, Part, Table
from graphpass.text.paged.kernels import fault_in_place

_BFLOAT16_CAPABILITY = (8, 0)


def doctor(device: torch.device, *, tries: bool) -> Result:
    """Look at the device, the compilers and the attention kernels."""
    machine, compilers = _machine(device), _compilers()
    kernels = _attention(device)
    checks = _checks(device) if tries else []
    ranks = facts_of_ranks(device)
    slow = list(_slow(device, machine, compilers, kernels))
    slow += [("collectives in graphs", f"they hang: {reason.why}", reason.remedy) for reason in would_hang(ranks)]
    figures = {
        "machine": machine,
        "compilers": compilers,
        "attention": kernels,
        "checks": checks,
        "ranks": ranks,
        "slow": [{"what": what, "why": why, "remedy": remedy} for what, why, remedy in slow],
    }
    failed = [check["name"] for check in checks if check["problem"] is not None]
    parts: tuple[Part, ...] = (
        Table("Machine", ("what", "value"), tuple((name, _shown(value)) for name, value in machine.items())),
        Table("Compilers", ("what", "value"), tuple((name, _shown(value)) for name, value in compilers.items())),
        Table("Attention", ("kernel", "available"), tuple((name, _shown(value)) for name, value in kernels.items())),
        Table(
            "Checks",
            ("check", "seconds", "result"),
            tuple((check["name"], f"{check['seconds']:.2f}", check["problem"] or "passed") for check in checks),
        ),
        Table("Ranks", ("rank", "node", "NCCL"), tuple((str(n), r["node"], r["nccl"]) for n, r in enumerate(ranks))),
        Heading("What will be slow here"),
        Table("Slow", ("what", "why", "what to do"), tuple(slow)),
        *(() if slow else ("Nothing that graphpass knows of.",)),
    )
    return Result("doctor", str(device), figures, parts, f"failed checks: {', '.join(failed)}" if failed else None)


def facts_of_ranks(device: torch.device) -> list[Any]:
    """What each rank says of collectives, see ``graphpass.ranks.lockstep``; empty if ``torchrun`` started none."""
    if not distributed.is_torchelastic_launched():
        return []
    if device.type == "cuda":
        torch.cuda.set_device(distributed.get_node_local_rank())
    distributed.init_process_group()
    try:
        distributed.all_reduce(torch.ones(1, device=device.type))
        return Lockstep().facts()
    finally:
        distributed.destroy_process_group()


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _machine(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "device": str(device),
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "graphpass": graphpass.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "driver": collect_env.get_nvidia_driver_version(collect_env.run),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "float32_matmul_precision": torch.backends.cuda.matmul.fp32_precision,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["compute_capability"] = f"{properties.major}.{properties.minor}"
        found["memory_bytes"] = properties.total_memory
        found["free_bytes"] = torch.cuda.mem_get_info(device)[0]
    return found


def _compilers() -> dict[str, Any]:
    backends = {point.name for point in importlib.metadata.entry_points(group="torch_dynamo_backends")}
    return {
        "inductor": importlib.util.find_spec("torch._inductor") is not None,
        "triton": _version("triton"),
        "c++": next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), None),
        "backend_cgpass": "cgpass" in backends or importlib.util.find_spec("cgpass") is not None,
        "transformers": _version("transformers"),
    }


def _attention(device: torch.device) -> dict[str, bool]:
    """{kernel: whether it runs here}; each kernel of ``scaled_dot_product_attention`` is called once."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    query = torch.ones(1, 2, 16, 64, device=device, dtype=dtype)

    def runs(kernel: SDPBackend) -> bool:
        try:
            with sdpa_kernel(kernel), torch.no_grad():
                torch.nn.functional.scaled_dot_product_attention(query, query, query)
        except RuntimeError:
            return False
        return True

    named = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }
    with warnings.catch_warnings():  # torch warns of each reason why a kernel does not run
        warnings.simplefilter("ignore")
        found = {name: runs(kernel) for name, kernel in named.items()}
    found["flash over pages"] = device.type == "cuda" and fault_in_place(device, dtype, head_dim=64) is None
    found["flex_attention"] = importlib.util.find_spec("torch.nn.attention.flex_attention") is not None
    found["flash_attn package"] = _version("flash-attn") is not None
    return found


def _small(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x * 2 + 1)


def _compiles(device: torch.device) -> None:
    x = torch.arange(6.0, device=device)
    torch.testing.assert_close(torch.compile(_small, backend="inductor")(x), _small(x))


def _replays(device: torch.device) -> None:
    x = torch.arange(6.0, device=device)
    fast = torch.compile(_small, backend="cgpass", options={"compiler": "eager"})
    with torch.no_grad():
        for step in range(4):
            torch.testing.assert_close(fast(x + step), _small(x + step))
    replayed = graphpass.runtime_of(fast).stats().replayed
    if not replayed:
        raise RuntimeError("no call replayed a graph")


def _checks(device: torch.device) -> list[dict[str, Any]]:
    named: dict[str, Callable[[torch.device], None]] = {"inductor compiles": _compiles, "graphpass replays": _replays}
    found = []
    for name, check in named.items():
        start_s, problem = time.perf_counter(), None
        try:
            with quiet_compiler():
                check(device)
        except Exception as error:
            problem = summary(error)
        found.append({"name": name, "seconds": time.perf_counter() - start_s, "problem": problem})
    return found


def _slow(
    device: torch.device, machine: dict[str, Any], compilers: dict[str, Any], kernels: dict[str, bool]
) -> Iterator[tuple[str, str, str]]:
    if not OLDEST_TORCH <= torch_release() <= NEWEST_TORCH:
        tested = "torch {}.{} to {}.{}".format(*OLDEST_TORCH, *NEWEST_TORCH)
        yield "everything", f"the tests have not run with torch {torch.__version__}", f"install {tested}"
    if not compilers["backend_cgpass"]:
        yield "everything", "the backend cgpass is not installed", "install graphpass with pip"
    if device.type == "cpu":
        yield (
            "replays",
            "there is no GPU, so graphs are replayed by a tape, which is no faster than eager",
            "use the tape for tests, and a GPU for speed",
        )
        if compilers["c++"] is None:
            yield "compiled regions", "Inductor needs a C++ compiler here", "install g++, or pass compiler='aot_eager'"
    if device.type == "cuda":
        if compilers["triton"] is None:
            yield "compiled regions", "Inductor needs Triton", "pip install triton, or pass compiler='aot_eager'"
        if torch.cuda.get_device_capability(device) < _BFLOAT16_CAPABILITY:
            yield "bfloat16", "this GPU has no bfloat16 units", "use float16"
        if not kernels["flash"]:
            yield "attention", "the flash kernel does not run here", "see the table of attention kernels"
        if not kernels["flash over pages"]:
            yield (
                "text",
                "flash attention cannot read pages in place, so their keys are copied",
                "install a newer torch",
            )
        if machine["float32_matmul_precision"] in ("none", "ieee"):
            yield (
                "float32 matrix products",
                "TF32 is off, which is the default of torch",
                "torch.set_float32_matmul_precision('high') if its error is acceptable, or use bfloat16",
            )
    if (os.cpu_count() or 1) < 4:
        yield "compiling", f"there are {os.cpu_count()} cores, and Inductor compiles in parallel", "use more cores"
