"""What programs are made of: templates of lines, and custom ops that return fresh tensors, write in place, or both."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


@torch.library.custom_op("graphpassfuzz::fresh", mutates_args=())
def fresh(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


fresh.register_fake(torch.empty_like)


@torch.library.custom_op("graphpassfuzz::write", mutates_args=("target",))
def write(target: torch.Tensor, source: torch.Tensor) -> None:
    target.mul_(0.5).add_(source)


write.register_fake(lambda target, source: None)


@torch.library.custom_op("graphpassfuzz::mixed", mutates_args=("target",))
def mixed(target: torch.Tensor) -> torch.Tensor:
    target.add_(0.25)
    return target.cos()


mixed.register_fake(torch.empty_like)


@dataclass(frozen=True, slots=True)
class Op:
    """A template of one or more lines.

    ``{a}`` is any tensor, ``{m}`` a matrix, ``{r}`` one with the rows of ``x``, ``{like}`` a tensor that broadcasts
    to it, ``{other}`` the same in other memory, ``{s}`` a number, ``{t}``, ``{u}`` and ``{v}`` new names.
    """

    text: str  #: the lines
    mixes_rows: bool = False  #: what it does to one row depends on others, or on how many there are
    random: bool = False  #: it draws random numbers
    reshapes: bool = False  #: it changes a shape in place

    @property
    def writes(self) -> bool:
        """Whether it writes to its first operand."""
        return (
            re.search(r"^{[amr]}(\.\w+_\(|\[.*\] =| = )|= {[amr]}\.\w+_\(|^write|mixed|inplace", self.text) is not None
        )


# Dynamo ends its graph at a masked assignment to a tensor without dimensions; [:] is what such a tensor refuses.
_BY_ROW = """
{t} = {a} + {like}
{t} = {a} - {like}
{t} = {a} * {like}
{t} = {a} * {s}
{t} = {a} + 1
{t} = torch.maximum({a}, {like})
{t} = {a}.sigmoid()
{t} = torch.tanh({a})
{t} = F.relu({a})
{t} = F.relu({a}, inplace=True)
{t} = torch.where({a} > 0.3, {a}, {like})
{t} = {a}.clamp(-1, 0.5)
{t} = {a}.clone()
{t} = {a}.detach()
{t} = {a}.contiguous()
{t} = {m} @ self.w
{t} = F.linear({m}, self.w, self.c)
{t} = {m}.softmax(-1)
{t} = {m}.cumsum(-1)
{t} = torch.cat([{m}, {like}], 1)
{t} = {m}.mean(-1, keepdim=True)
{t} = {m}.sum(-1) * 0.5
{u} = {m}.max(-1); {t} = {u}[0]
{t} = {m}[:, 1:]
{t} = {m}[:, :2]
{t} = {m}[..., 0]
{t} = {m}[:, 1::2]
{t} = {m}.narrow(1, 0, 2)
{u} = {m}.chunk(2, 1); {t} = {u}[0]; {v} = {u}[1]
{u} = {m}.split([1, 3], 1); {t} = {u}[1]
{u} = {m}.unbind(1); {t} = {u}[0]; {v} = {u}[2]
{t} = {m}.unsqueeze(1)
{t} = {m}.unsqueeze(1).expand(-1, 2, -1)
{t} = {m}.reshape({m}.size(0), -1)
{t} = {m}.view({m}.size())
{t} = {m}.reshape({m}.shape[0], 2, 2)
{t} = {m}.view_as({m})
{a}.add_({s})
{a}.mul_(0.5)
{a}.add_({other})
{a}.copy_({other})
{a}.clamp_(-1, 1)
{a}.sigmoid_()
{t} = {a}.mul_(0.5)
{a} = operator.iadd({a}, {s})
{a} = operator.imul({a}, 0.5)
{a}.zero_()
{a}.fill_({s})
{m}[:, 0] = {s}
{m}[:, 1:] = {s}
{m}[:, :2] = {m}[:, 2:]
{a}.masked_fill_({a} > 0.3, 0.1)
{a}[:][{a} > 0.4] = 0.2
{t} = {a} * 1; torch.add({a}, {s}, out={t})
{t} = torch.zeros({m}.size(0), {m}.size(1), device=device); torch.mul({m}, {like}, out={t})
{t} = {r}.gather(1, i.unsqueeze(1))
{t} = {r}.scatter(1, i.unsqueeze(1), 0.5)
{r}.scatter_(1, i.unsqueeze(1), 0.5)
{t} = torch.take_along_dim({r}, i.unsqueeze(1), 1)
{t} = F.embedding(i, self.w)
{t} = self.w[i]
{t} = torch.zeros_like({a}); {t}.add_({like})
{t} = torch.empty_like({a}); {t}.copy_({like})
{t} = torch.full(({m}.size(0), 4), 0.5, device=device)
{t} = {a}.new_ones({a}.size())
{t} = {a}.new_zeros({m}.shape[0], 4); {t}[:, 1] = {s}
{t} = fresh({a})
write({a}, {other})
{t} = mixed({a})
{t} = fresh({a}); write({t}, {like})
"""

_MIXING = """
{t} = {a} + {like}.mean()
{t} = {a} * {like}.sum().tanh()
{t} = {m}.cumsum(0)
{t} = {m}.mean(0)
{t} = {m}.amax(0, keepdim=True)
{u} = {m}.max(0); {t} = {u}[0]; {v} = {u}[1].to(torch.float32)
{t} = torch.cat([{m}, {like}])
{t} = torch.stack([{a}, {like}])
{t} = {a}[1:]
{t} = {a}[:-1]
{t} = {a}[::2]
{t} = {a}[0]
{t} = {a}[-1]
{t} = {a}.select(0, 1)
{t} = {m}[: {m}.size(0) - 1]
{t} = {m}.t()
{t} = {m}.transpose(0, 1)
{t} = {m}.unsqueeze(0).expand(2, -1, -1)
{t} = {a}.flatten()
{t} = {a}.view(-1)
{t} = {a}.reshape(-1)[:4].view(2, 2)
{t} = {m}.reshape({m}.size(0) * {m}.size(1))
{t} = {m}.reshape({m}.shape[1], {m}.shape[0])
{t} = {m}.diagonal()
{t} = {m}.as_strided((2, 2), (2, 1), 1)
{t} = {m}.unfold(0, 2, 2)
{u} = {m}.chunk(2); {t} = {u}[0]; {v} = {u}[1]
{u} = {m}.split(1); {t} = {u}[0]; {v} = {u}[1]
{u} = {m}.unbind(0); {t} = {u}[1]
{t} = {m}.flip(0)
{t} = {m}.roll(1, 0)
{t} = self.b[: {m}.size(0)]
{t} = {m}.expand_as({like})
{a}[0] = {s}
{a}[1:] = {s}
{a}[:1] = {a}[1:2]
{m}[0] = {like}[-1]
{m}[-1].copy_({m}[0])
{a}[0].add_({s})
{a}.flatten()[0:1].fill_({s})
{a}.copy_({like}.mean())
{a}.fill_({like}.mean())
{a}.add_({like}.mean() * 0.5)
self.b[: {m}.size(0)] = {m}
self.b[1].add_({m}[0])
self.b[: {m}.size(0)].add_({m}, alpha=0.5)
self.b.index_copy_(0, i[:1], {m}[:1])
self.c.add_({m}.mean(0))
self.w.mul_(0.5)
self.b.index_add_(0, i, {m})
{m}[i] = 0.5
{m}.index_put_((i,), {like}, accumulate=True)
{m}.index_fill_(0, i, 0.3)
{t} = {m}.index_select(0, i)
{t} = {m}[i]
{t} = {m}[i, i]
{t} = {m}.index_add(0, i, {like})
{t} = torch.arange({m}.size(0), device=device).to(torch.float32) * 0.1
{t} = torch.full_like({a}, 0.5); {t}[0] = {s}
{t} = torch.zeros({m}.size(0), {m}.size(1), device=device); {t}[1:] = {m}[1:]
{t} = {a} * {m}.size(0) * 0.1
{t} = torch.zeros_like({m}); {u} = {t}[0]; {u}.add_(1)
{t} = fresh({m}[1:])
write({m}[1:], {m}[:1])
{t} = mixed({m}[:, 1:])
{t} = {m}.t().contiguous()
"""

# Dynamo follows changes of shape in place; a graph that comes without metadata has none to be followed in.
_RESHAPING = """
{t} = {m}.clone(); {t}.t_()
{t} = {m}.clone(); {t}.transpose_(0, 1)
{t} = {m} + 1; {t}.unsqueeze_(0)
{t} = {m}.sigmoid(); {u} = {t}.t_()
"""

_DRAWING = """
{t} = torch.rand_like({a})
{t} = {a} + torch.rand(1, device=device)
{t} = F.dropout({a}, 0.5)
{a}.uniform_()
{t} = torch.bernoulli(torch.full_like({a}, 0.5))
"""


def _lines(table: str, **flags: bool) -> tuple[Op, ...]:
    return tuple(Op(line, **flags) for line in table.strip().splitlines())


OPS = (
    *_lines(_BY_ROW),
    *_lines(_MIXING, mixes_rows=True),
    *_lines(_RESHAPING, mixes_rows=True, reshapes=True),
    *_lines(_DRAWING, mixes_rows=True, random=True),
)

SPLITTABLE = (
    *(f"graphpassfuzz::{name}" for name in ("fresh", "write", "mixed")),
    *(f"aten::{name}" for name in ("sigmoid", "tanh", "add", "add_", "mul", "mul_", "copy_", "cat", "chunk")),
    *(f"aten::{name}" for name in ("clone", "reshape", "zeros_like", "mean", "relu", "fill_")),
)


def namespace(device: torch.device | str = "cpu") -> dict[str, Any]:
    """What a program's lines may name besides their arguments."""
    given = {"torch": torch, "F": F, "operator": operator, "fresh": fresh, "write": write, "mixed": mixed}
    return {**given, "device": torch.device(device)}
