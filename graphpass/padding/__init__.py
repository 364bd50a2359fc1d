"""Prove which sizes of a graph may be padded, from its aten operators alone. See Note [Padding verdicts].

The pass runs a graph over abstract values and asks one of two questions (:class:`Question`). *Is padding harmless?*
Then the real entries are the first ones, and a padded call must compute in them what the call without padding does.
*Are the rows independent?* Then any entries may be the real ones, as in a packed batch of requests.

Vocabulary
    size        an int or a sympy expression; *padded* if it has a candidate symbol, and so differs between the runs
    key field   the name under which a size is padded; several symbols may share one
    factors     a dimension as a product of sizes, outermost first: ``[b * s, 768]`` has ``(b, s)`` and ``(768,)``, so
                it is known after a view in which entries padding stands
    place       one factor of a tensor: (dimension, position among its factors)
    clean       an entry whose index along every padded factor is below the real size: what the caller sees
    pad         what entries in padding hold at one place, with real indices along all others: a number, a kind of
                numbers (:class:`Approximate`), or None: unknown, but finite
    neutral     a pad that changes nothing: 0 in a sum, -inf in a maximum
    constant    the value of all entries, real and padding
    index       a tensor whose entries are their own index along a factor, plus an offset: ``arange``
    fresh       a value of which only the shape is known: one factor for each dimension, no pads
    carried     a pad that goes through an operator as finite or not finite, and otherwise unknown
    finding     a way in which clean entries depend on padding; it follows the values to the results
    reason      what a rule returns, or raises, for an operator that makes such a finding
    assumption  a condition on contents under which the proof holds
    whole       a place whose pad is also that of entries with other indices in padding; made padding is
    repair      a change of the graph that makes padding neutral: see Note [Padding made]
    new field   a key field along which padding may have values that no real entry has: an index may not exist

A softmax over a padded dimension
    ``(q @ k.T + bias).softmax(-1) @ v`` with ``q, k, v`` of ``[s, 64]`` and a bias of ``[s]`` declared as -inf in
    padding::

        q @ k.T     factors ((s,), (s,))   pads: none known. Products are summed over 64, which is not padded.
        + bias      factors ((s,), (s,))   pads {(1, 0): -inf}: that of the bias along keys, which stays so when finite
                                           scores are added. Along queries, (0, 0), nothing is known.
        softmax     factors ((s,), (s,))   pads {(1, 0): 0.0}: it is over (1, 0), which is -inf, so real weights are
                                           those of the call without padding, and padded keys have none.
        @ v         factors ((s,), (64,))  the sum over s meets zeros at (1, 0), and v is assumed to be finite there:
                                           zero times finite is zero. No finding, so ``s`` is PROVED.

    Without the bias, the softmax meets an unknown pad and is refused: a finding for ``s`` reaches the output, with the
    operator, the line, and a remedy. Padded queries are garbage in rows that are cut off.

Files, each above those that it uses: ``lowering`` (writes repairs into a graph), ``deciding`` (which sizes get them),
``repairs`` (what is tried for each operator; ``moving``: those that move entries),
``making`` (the walk that repairs), ``proof`` (verdicts), ``interpreter`` (one graph), ``program`` (a graph as a
record) and ``fused`` (operators in parts), ``table`` (what each operator does) with its relations ``rearranging``,
``indexing``, ``attending``, ``combining`` and ``pointwise``, ``opcall`` (what a rule sees), ``sizes`` and ``values``.
"""

from graphpass.ledger import PaddingFinding, Verdict
from graphpass.padding.deciding import Asked, fills, made
from graphpass.padding.interpreter import NO_RULE, Interpretation, input_values, interpret
from graphpass.padding.lowering import write
from graphpass.padding.making import Made
from graphpass.padding.opcall import (
    DECLARE_MASK,
    HIDE_PADDING,
    OpCall,
    PaddingReason,
    PaddingRule,
)
from graphpass.padding.program import AtenGraph, Insertion
from graphpass.padding.proof import PaddingProof, padding_of
from graphpass.padding.sizes import Question, Sizes
from graphpass.padding.table import ignores_numbers, register_padding_rule
from graphpass.padding.values import PaddedValue

__all__ = [
    "DECLARE_MASK",
    "HIDE_PADDING",
    "NO_RULE",
    "Asked",
    "AtenGraph",
    "Insertion",
    "Interpretation",
    "Made",
    "OpCall",
    "PaddedValue",
    "PaddingFinding",
    "PaddingProof",
    "PaddingReason",
    "PaddingRule",
    "Question",
    "Sizes",
    "Verdict",
    "fills",
    "ignores_numbers",
    "input_values",
    "interpret",
    "made",
    "padding_of",
    "register_padding_rule",
    "write",
]
