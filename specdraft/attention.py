"""The attention of an unrolled drafter: step-0 keys seen causally, each later step's keys only by their own slot.

At unroll step j, the query at slot i sees the step-0 keys of the slots up to i and the keys that its own slot made in
steps 1..j (EAGLE-3's training-time test, arXiv 2503.01840). No [T, jT] mask is built: one causal fused attention call
and j elementwise products are merged by their log-sum-exp.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention


def unrolled_attention(query: Tensor, key: Tensor, value: Tensor, own_key: Tensor, own_value: Tensor) -> Tensor:
    """query [batch, heads, T, D]; key, value [batch, kv_heads, T, D] of step 0; own_key, own_value
    [batch, kv_heads, T, j, D] of steps 1..j (j may be 0). Returns [batch, heads, T, D]."""
    groups = query.shape[1] // key.shape[1]
    if own_key.shape[3] == 0:
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=groups > 1)
    own_key, own_value = own_key.repeat_interleave(groups, 1), own_value.repeat_interleave(groups, 1)
    if query.device.type == "cpu":
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return _CausalAndOwn.apply(query, key, value, own_key, own_value)
    return _by_flex(query, key, value, own_key, own_value)


def _own_scores(query: Tensor, own_key: Tensor) -> Tensor:
    """Scaled scores of each slot's query with its own keys, float32 at least: [batch, heads, T, j]."""
    scores = torch.einsum("bhtd,bhtjd->bhtj", query, own_key) * query.shape[-1] ** -0.5
    return scores if scores.dtype == torch.float64 else scores.float()


def merge(causal: Tensor, lse: Tensor, scores: Tensor, own_value: Tensor, total: Tensor) -> Tensor:
    """One softmax over both parts: the causal part's output [.., T, D] with its log-sum-exp [.., T], and the scores
    [.., T, j] of own_value [.., T, j, D]; `total` [.., T] is the log-sum-exp of all."""
    weights = (scores - total[..., None]).exp().to(causal.dtype)
    share = (lse - total).exp().to(causal.dtype)
    return causal * share[..., None] + torch.einsum("bhtj,bhtjd->bhtd", weights, own_value)


def _by_flex(query: Tensor, key: Tensor, value: Tensor, own_key: Tensor, own_value: Tensor) -> Tensor:
    """The merge where the fused kernel differentiates its log-sum-exp; own keys and values are one per query head."""
    blocks, wanted = _causal_blocks(query.shape[2], query.device), AuxRequest(lse=True)
    causal, aux = _compiled_flex()(query, key, value, block_mask=blocks, enable_gqa=True, return_aux=wanted)
    scores = _own_scores(query, own_key)
    total = torch.logsumexp(torch.cat([aux.lse[..., None].to(scores.dtype), scores], -1), -1)
    return merge(causal, aux.lse, scores, own_value, total)


class _CausalAndOwn(torch.autograd.Function):
    """The merge on a CPU, whose fused kernel returns a log-sum-exp without a gradient: its own backward, given the
    *merged* output and log-sum-exp, yields the causal part's gradients under the merged softmax."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, own_key: Tensor, own_value: Tensor) -> Tensor:
        causal, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)
        scores = _own_scores(query, own_key)
        total = torch.logsumexp(torch.cat([lse[..., None], scores], -1), -1)
        output = merge(causal, lse, scores, own_value, total)
        ctx.save_for_backward(query, key, value, own_key, own_value, output, scores, total)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        query, key, value, own_key, own_value, output, scores, total = ctx.saved_tensors
        grad = grad.contiguous()
        grad_query, grad_key, grad_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, output, total, 0.0, True
        )
        weights = (scores - total[..., None]).exp().to(grad.dtype)
        grad_own_value = weights[..., None] * grad[..., None, :]
        pull = torch.einsum("bhtd,bhtjd->bhtj", grad, own_value) - (grad * output).sum(-1, keepdim=True)
        grad_scores = weights * pull * query.shape[-1] ** -0.5
        grad_query = grad_query + torch.einsum("bhtj,bhtjd->bhtd", grad_scores, own_key)
        grad_own_key = grad_scores[..., None] * query[..., None, :]
        return grad_query, grad_key, grad_value, grad_own_key, grad_own_value


@cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention)


@cache
def _causal_blocks(length: int, device: torch.device) -> Any:
    return create_block_mask(lambda _b, _h, q, k: q >= k, None, None, length, length, device=str(device))
