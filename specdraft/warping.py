"""Temperature, top-k and top-p: one warp, applied alike to the target's and the drafter's logits.

Verification is exact only when q is the very law that a token was drawn from, and alpha means something only when
p and q were warped alike, so both sides call the same `Warp`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


@dataclass(frozen=True)
class Warp:
    """How logits become the law that tokens are drawn from, in transformers' order: temperature, top-k, top-p.

    temperature 0 is greedy decoding: the law is one-hot at the argmax (the lowest id of equal ones), and top-k and
    top-p say nothing. Raises ValueError for a setting out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits [..., V] to probabilities [..., V], in float32 (float64 for float64 logits)."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self.greedy:
            law = torch.zeros_like(logits)
            return law.scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        flat = logits.reshape(-1, logits.shape[-1])
        for warper in self._warpers():
            flat = warper(None, flat)
        return flat.softmax(-1).view_as(logits)

    def _warpers(self) -> list:
        warpers: list = []
        if self.temperature != 1:
            warpers.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k is not None:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p is not None and self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        return warpers
