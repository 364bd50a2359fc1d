"""Checks of users' values: what passes, and the error of what does not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphpass.errors import DispatchError, OptionError, is_integer, one_of, positive


@pytest.mark.parametrize("value", [0, -1, 1.5, 2.0, "4", None, True, np.float64(4), np.True_])
def test_what_is_not_positive(value: object) -> None:
    with pytest.raises(DispatchError, match="max_num_reqs cannot be used: expected an integer of at least 1") as caught:
        positive(value, "max_num_reqs", error=DispatchError)
    assert caught.value.found == repr(value)
    assert caught.value.remedy == "pass 1 or more"


@pytest.mark.parametrize("value", [4, np.int32(4), np.uint8(4), torch.tensor(4)])
def test_integers_of_other_types_become_ints(value: object) -> None:
    assert type(positive(value, "a size", at_least=4)) is int
    with pytest.raises(OptionError, match=r"at least 5; found .*4.*; remedy: raise it"):
        positive(value, "a size", at_least=5, remedy="raise it")


@pytest.mark.parametrize("_", range(2))
def test_each_test_draws_the_numbers_of_one_seed(_: int) -> None:
    assert torch.equal(torch.randn(4), torch.randn(4, generator=torch.Generator().manual_seed(0)))


def test_ints() -> None:
    assert is_integer(0, at_least=0)
    assert not is_integer(0, at_least=1)
    assert not any(is_integer(value, at_least=0) for value in (True, 1.0, "1", None, np.int64(1)))


def test_one_of() -> None:
    one_of("view", ("clone", "view"), "no such outputs", remedy="leave it out")
    one_of(None, ("auto", None), "no such dispatch", remedy="leave it out")
    with pytest.raises(DispatchError) as caught:
        one_of("clon", ("clone", "view", None), "no such outputs", remedy="leave it out", error=DispatchError)
    assert caught.value.problem == "no such outputs"
    assert caught.value.expected == "'clone', 'view' or None"
    assert caught.value.found == "'clon'"
    assert caught.value.remedy == "did you mean 'clone'?"


@pytest.mark.parametrize("value", ["other", 3, None, ["clone"]])
def test_no_name_is_close(value: object) -> None:
    with pytest.raises(OptionError, match=r"expected 'clone'; .*; remedy: leave it out"):
        one_of(value, ("clone",), "no such outputs", remedy="leave it out")
