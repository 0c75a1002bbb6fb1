"""A drafter in integers, and what that changed. `stage.quantize` is the verb; `lowbit` reads what it writes."""

from specdraft.quantization.stage import QuantizeRecipe, quantize

__all__ = ["QuantizeRecipe", "quantize"]
