"""Collectives of NCCL in graphs: each program runs under torchrun, on as many GPUs as it names, and has to end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.captures import TIMEOUT_S
from tests.processes import ROOT, environment

pytestmark = pytest.mark.cuda

PREPARED = """
import datetime, os, sys
import torch
from torch import distributed
import graphpass as gp
from tests.e2e.lockstep_ranks import WIDTH, Halved

torch.cuda.set_device(distributed.get_node_local_rank())
distributed.init_process_group("nccl", timeout=datetime.timedelta(seconds=20))
rank, mode = distributed.get_rank(), sys.argv[1]
model = Halved(distributed.group.WORLD).eval().cuda()
model.whole = tuple(part.cuda() for part in model.whole)
options = {"ranks": "lockstep", "mode": mode, "splitting_ops": [] if mode == "FULL" else ["torch.tanh"]}
fast = torch.compile(model, backend="cgpass", dynamic=True, options=options)

def check(calls):
    sizes = torch.randint(2, 40, (calls,), generator=torch.Generator().manual_seed(0)).tolist()
    for call, size in enumerate(sizes):
        x = torch.randn(size if call % 3 else 7, WIDTH, device="cuda")
        distributed.broadcast(x, 0)
        with torch.no_grad():
            found = fast(x)
        if not call % 50:
            torch.testing.assert_close(found, model.alone(x), rtol=1e-2, atol=1e-2)
"""

MIXED = """
check(2000)
stats = gp.runtime_of(fast).stats()
assert stats.replayed > 1900, stats
counts = [None] * distributed.get_world_size()
distributed.all_gather_object(counts, (stats.captured, stats.replayed))
assert len(set(counts)) == 1, counts
distributed.destroy_process_group()
"""
"""It ends without ``close()``."""

CLOSED = """
check(50)
gp.runtime_of(fast).close()
check(50)
gp.runtime_of(fast).close()
distributed.destroy_process_group()
"""

UNDESTROYED = "check(50)\n"

FAILING = """
from unittest import mock
from graphpass.capture.cuda import CudaDevice

record = CudaDevice.record

def once(self, body, generators):
    mock.patch.stopall()
    def fails():
        raise RuntimeError("put in")
    return record(self, fails, generators)

if rank == distributed.get_world_size() - 1:
    mock.patch.object(CudaDevice, "record", once).start()
check(500)
stats = gp.runtime_of(fast).stats()
assert stats.replayed > 300, stats
distributed.destroy_process_group()
"""

DYING = """
from graphpass.errors import AgreementError
from graphpass.ranks.group import wait_for

check(100)
torch.cuda.synchronize()
distributed.barrier()
if rank == 1:
    os._exit(0)
with torch.no_grad():
    fast(torch.randn(7, WIDTH, device="cuda"))
event = torch.cuda.Event()
event.record()
try:
    wait_for(event, 10)
except AgreementError:
    print("told", flush=True)
    os._exit(0)
"""


GATHERING = """
from graphpass.encoder.sharding import balance_items, gather_rows

tokens = [40, 8, 24, 16]
balance = balance_items(tokens, distributed.get_world_size())
items = [torch.full((count, 4), float(item), device="cuda") for item, count in enumerate(tokens)]
own = [torch.cat([items[item] for item in balance.share(rank)])] * 2
gather_rows(own, balance, tokens, distributed.group.WORLD)
torch.cuda.set_sync_debug_mode("error")
found = gather_rows(own, balance, tokens, distributed.group.WORLD)
torch.cuda.set_sync_debug_mode("default")
for rows in found:
    assert torch.equal(rows, torch.cat(items))
distributed.destroy_process_group()
"""


def ran(program: str, num_ranks: int, mode: str, folder: Path) -> str:
    """What the ranks print; they all end with 0."""
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    path = folder / "program.py"
    path.write_text(PREPARED + program)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    done = subprocess.run(
        [*run, str(path), mode],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("program", [MIXED, CLOSED, UNDESTROYED], ids=["mixed", "closed", "undestroyed"])
def test_programs_with_captured_collectives_end(program: str, num_ranks: int, mode: str, tmp_path: Path) -> None:
    ran(program, num_ranks, mode, tmp_path)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_recording_that_fails_on_one_rank_fails_on_both(mode: str, tmp_path: Path) -> None:
    ran(FAILING, 2, mode, tmp_path)


def test_rows_of_an_encoder_are_gathered_without_a_wait_of_the_host(tmp_path: Path) -> None:
    ran(GATHERING, 2, "FULL", tmp_path)


def test_a_rank_that_dies_is_an_error_where_the_device_is_polled(tmp_path: Path) -> None:
    assert "told" in ran(DYING, 2, "FULL", tmp_path)
