"""Time to the first token of a stock Qwen3-VL, with and without ``attach``: ``python -m tests.bench.first_token``.

A model of the size of Qwen3-VL 2B with random weights, after the processor: one call of its own ``generate`` for a new
token, over one and twenty images of 440 tokens, in interleaved rounds; and in the same rounds ``get_image_features``
alone, the part that ``attach`` changes. The rest, the decoder's prefill and what ``generate`` does around it, is in
both sides of the ratio. Before anything is timed, the first token with ``attach`` is compared with the stock model's,
and the tower's features with the stock tower's.

``--tune`` lets Inductor's settings for the tower be measured. ``--smoke`` runs tiny sizes on a CPU: the code, not the
figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console

from graphpass import EncoderOptions
from graphpass.encoder import AttachedEncoder, attach
from tests.bench.timing import (
    Step,
    Timing,
    environment,
    gpu_or_cpu,
    interleaved,
    is_skipped,
    parser_of,
    table_of,
    write_json,
)

STOCK, ATTACHED = "stock", "attached"
FIRST_TOKEN, TOWER, REST = "first token", "tower", "rest"
IMAGE_TOKEN = 90
ROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True}
TOLERANCE = 5e-2
"""Relative norm of features, bfloat16 over 24 layers of random weights."""


def make_model(smoke: bool, device: torch.device) -> Any:
    """The model with random weights, in bfloat16, or tiny in float32."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text, vision = {"image_token_id": IMAGE_TOKEN, "vision_start_token_id": 92, "vision_end_token_id": 93}, {}
    sizes = {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 32768,
        "rope_parameters": {**ROPE, "mrope_section": [24, 20, 20]},
    }  # fmt: skip
    vision = {
        "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048,
        "deepstack_visual_indexes": [5, 11, 17],
    }  # fmt: skip
    if smoke:
        sizes |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97}
        sizes["rope_parameters"] = {**ROPE, "mrope_section": [2, 1, 1]}
        vision |= {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
        vision |= {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1, 2]}
    torch.manual_seed(0)
    with device:
        model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=sizes, vision_config=vision, **text))
    return model.to(torch.float32 if smoke else torch.bfloat16).eval()


def make_inputs(model: Any, num_images: int, grid: tuple[int, int, int]) -> dict[str, torch.Tensor]:
    """What the processor returns, on the device."""
    weight = next(model.parameters())
    grids = torch.tensor([grid] * num_images, device=weight.device)
    count = int(grids[0].prod())
    ids = [5, *([92, *[IMAGE_TOKEN] * (count // 4), 93] * num_images), 7, 11]
    tokens = torch.tensor([ids], device=weight.device)
    pixels = torch.randn(num_images * count, 1536, device=weight.device, dtype=weight.dtype)
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "mm_token_type_ids": (tokens == IMAGE_TOKEN).int(),
        "image_grid_thw": grids,
        "pixel_values": pixels,
    }


class Served:
    """The model with its stock tower and with the served one, which are exchanged without capturing again."""

    def __init__(self, model: Any, attached: AttachedEncoder, tower: Any) -> None:
        self.model, self._towers = model, {STOCK: tower, ATTACHED: model.get_encoder("image")}
        self.attached = attached

    def first_token(self, form: str, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Generate one token."""
        self.model.set_encoder(self._towers[form], "image")
        with torch.no_grad():
            tokens: torch.Tensor = self.model.generate(**inputs, max_new_tokens=1, do_sample=False)
        return tokens[0, -1]

    def features(self, form: str, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Of all images."""
        self.model.set_encoder(self._towers[form], "image")
        with torch.no_grad():
            found = self.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
        return torch.cat(list(found.pooler_output))


def _medians(timings: Mapping[str, Timing], part: str, form: str) -> tuple[float, float]:
    """Milliseconds of a part, and those that the host takes to enqueue it."""
    if part == REST:
        whole, tower = _medians(timings, FIRST_TOKEN, form), _medians(timings, TOWER, form)
        return whole[0] - tower[0], whole[1] - tower[1]
    timing = timings[f"{part} {form}"]
    return timing.step.median / 1e3, timing.host.median / 1e3


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one and twenty images."""
    parser = parser_of("first_token", __doc__, rounds=None)
    parser.add_argument("--tune", action="store_true", help="measure Inductor's settings for the tower")
    options = parser.parse_args(arguments)
    if is_skipped("first_token", options):
        return
    device, rounds = gpu_or_cpu(options.smoke), options.rounds or (1 if options.smoke else 15)
    grid, counts, most = ((1, 4, 6), (1, 3), 64) if options.smoke else ((1, 40, 44), (1, 20), 8800)
    model = make_model(options.smoke, device)
    tower = model.get_encoder("image")
    given = EncoderOptions(token_budgets=[16, 64], costs=None, compile=False)
    if not options.smoke:
        given = EncoderOptions(tune="measure" if options.tune else None)
    served = Served(model, attach(model, options=given, min_tokens=16, max_tokens=most), tower)
    rows = []
    for count in counts:
        inputs = make_inputs(model, count, grid)
        stock, found = (served.features(form, inputs).double() for form in (STOCK, ATTACHED))
        differs_by = float((found - stock).norm() / stock.norm())
        assert differs_by < TOLERANCE, f"features of {count} images differ by {differs_by:.1e}"
        tokens = [int(served.first_token(form, inputs)) for form in (STOCK, ATTACHED)]
        parts = {FIRST_TOKEN: served.first_token, TOWER: served.features}
        steps: dict[str, Step] = {
            f"{part} {form}": partial(call, form, inputs) for part, call in parts.items() for form in (STOCK, ATTACHED)
        }
        timings = interleaved(steps, device=device, rounds=rounds, steps_a_round=1, host_calls=1)
        for part in (FIRST_TOKEN, TOWER, REST):
            stock_ms, attached_ms = (_medians(timings, part, form) for form in (STOCK, ATTACHED))
            row: dict[str, Any] = {
                "images": count,
                "part": part,
                STOCK: stock_ms[0],
                ATTACHED: attached_ms[0],
                "host": attached_ms[1],
            }
            rows.append({**row, "difference": differs_by, "equal_token": tokens[0] == tokens[1]})
    columns = (
        "images | part | stock, ms | attached, ms | faster by | attached, host ms | features differ by | same token"
    )
    cells = [
        (r["images"], r["part"], f"{r[STOCK]:.1f}", f"{r[ATTACHED]:.1f}", f"{r[STOCK] / r[ATTACHED]:.2f} x",
         f"{r['host']:.1f}", f"{r['difference']:.1e}", r["equal_token"]) for r in rows
    ]  # fmt: skip
    Console(width=140).print(table_of("Time to the first token, after the processor", columns, cells))
    Console(width=120).print(str(served.attached.manager.get_cumulative_stats()))
    write_json(options.json, {"environment": environment(device), "rows": rows})


if __name__ == "__main__":
    main()
