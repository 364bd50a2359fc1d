"""The tables of small programs: the pass gives the verdicts that were written by hand, and brute force agrees."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from graphpass.padding import Verdict, padding_of
from tests.mutations import mutations
from tests.unit.padding.bruteforce import differences, unsound
from tests.unit.padding.programs import PROGRAMS, TABLES
from tests.unit.padding.table import Program
from tests.unit.padding.tracing import trace


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def problems_of(program: Program, tried: int | None) -> list[str]:
    """What is wrong with the proof of a program, or with its verdicts by hand."""
    traced = trace(program.function)
    proof = padding_of(traced.graph, traced.symbols, traced.declared)
    found = [f"{traced.symbols} against {program.verdicts}"] * (set(traced.symbols.values()) != set(program.verdicts))
    if dict(proof.verdicts) != program.verdicts:
        found.append(f"verdicts {dict(proof.verdicts)}: {'; '.join(map(str, proof.findings))}")
    found += unsound(traced, proof, program.scales, tried)
    for field, verdict in program.verdicts.items():
        if verdict is Verdict.UNPROVED:
            differs = any(True for _ in differences(traced, [field], program.scales))
            if field not in program.by_kernel and differs == (field in program.cautious):
                found.append(f"padding {field!r} {'changes results' if differs else 'changes nothing'}")
            if field not in {finding.field for finding in proof.findings}:
                found.append(f"{field!r} is not proved, and no finding says why")
    return found


def check(program: Program, tried: int | None) -> None:
    found = problems_of(program, tried)
    assert found == [], "\n".join([program.name, *found, trace(program.function).graph.code])


def each_program() -> Iterator[object]:
    """Every second program, and those that a mutation names; the others run where more time is taken."""
    named = " ".join(test for mutation in mutations() for test in mutation.tests)
    for at, program in enumerate(PROGRAMS):
        always = at % 2 == 0 or f"[{program.name}]" in named
        yield pytest.param(program, id=program.name, marks=() if always else pytest.mark.fuzz)


@pytest.mark.parametrize("program", list(each_program()))
def test_a_program_has_the_verdicts_written_by_hand(program: Program) -> None:
    check(program, tried=2)


@pytest.mark.fuzz
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_program_has_its_verdicts_at_more_sizes(program: Program) -> None:
    check(program, tried=None)


def test_the_tables_show_what_they_name() -> None:
    names = [program.name for program in PROGRAMS]
    assert len(set(names)) == len(names) >= 320
    verdicts = [verdict for program in PROGRAMS for verdict in program.verdicts.values()]
    assert min(verdicts.count(verdict) for verdict in Verdict) >= 15
    assert all(len(table) >= 9 for table in TABLES.values())
    assert sum(len(program.cautious | program.by_kernel) for program in PROGRAMS) <= 0.1 * len(verdicts)


def test_the_remedy_for_keys_hidden_by_a_finite_number_is_minus_infinity() -> None:
    """cuDNN's attention adds such a number where a mask is False: to declare the mask changes nothing."""

    def attends(x: torch.Tensor, am: torch.Tensor) -> torch.Tensor:
        heads, hidden = x[:, None], ((1 - am[:, None, None]) * -65504.0).to(x.dtype)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(heads, heads, heads, 0.0, False, attn_mask=hidden)[0]

    traced = trace(attends)
    proof = padding_of(traced.graph, traced.symbols, traced.declared)
    assert proof.verdicts["s"] is Verdict.UNPROVED
    (remedy,) = {finding.remedy for finding in proof.findings if finding.field == "s"}
    assert remedy.startswith("pass a mask of numbers that holds -inf where it hides")
