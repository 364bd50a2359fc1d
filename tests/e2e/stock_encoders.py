"""Every stock encoder of the table in docs/models.md."""

from __future__ import annotations

from tests.e2e.stock_encoder import StockEncoder
from tests.e2e.stock_sounds import SOUNDS
from tests.e2e.stock_texts import TEXTS
from tests.e2e.stock_visions import VISIONS

ENCODERS: dict[str, StockEncoder] = {**TEXTS, **VISIONS, **SOUNDS}
"""{class: encoder}."""
