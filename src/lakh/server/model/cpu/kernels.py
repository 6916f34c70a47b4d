"""A decode step of a few tokens on one CPU core: every weight is read from memory once for all tokens.

Shapes: N tokens (1 to MAX_TOKENS, of one sequence or several), L layers, W width, F ffn, H query heads, K key/value
heads, D head size, C slots, V vocabulary.

Reading the weights is the cost of a step: 4 bytes per weight in float32, 1.06 in int8. A model with quantized weights
runs in native code (decoder.py, on several threads); without the native library, int8 has a kernel here. Beyond
MAX_TOKENS the arithmetic dominates, and a matrix library is faster (inference.py).

Compiled by numba on first use and cached on disk. `fastmath` reorders sums, so they differ from torch's in the last
bits. Independent of torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lakh.server.model.cpu.matmul import compiled, matmul_f32

__all__ = [
    "ARCHITECTURES",
    "MAX_TOKENS",
    "MAX_TOKENS_SMALL_MODEL",
    "SMALL_MODEL_BYTES",
    "attend",
    "head",
    "run",
]

ARCHITECTURES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
)  # whose block these kernels compute, where all attention is plain

MAX_TOKENS = 8
# In a small model torch's calls cost more than its products save: at 16 tokens these kernels take 0.37x of torch's time
# at 0.1M parameters, 0.59x at 2.4M, 0.79x at 12.7M (Neoverse-N1, one core).
SMALL_MODEL_BYTES, MAX_TOKENS_SMALL_MODEL = 64 << 20, 32

f32 = np.float32
i32 = np.int32


@compiled
def _matmul_int8(w: Any, scales: Any, x: Any, y: Any) -> None:
    num, width = x.shape
    groups = width // 32  # quantized.GROUP, written out: a constant length lets the compiler unroll
    q = np.empty((num, width), np.int8)
    q_scales = np.empty((num, groups), np.float32)
    for n in range(num):
        for g in range(groups):
            largest = f32(0)
            for j in range(g * 32, g * 32 + 32):
                largest = max(largest, abs(x[n, j]))
            scale = largest / f32(127)
            q_scales[n, g] = scale
            inverse = f32(0) if scale == 0 else f32(1) / scale
            for j in range(g * 32, g * 32 + 32):
                q[n, j] = np.int8(np.rint(x[n, j] * inverse))
    for i in range(w.shape[0]):
        for n in range(num):
            total = f32(0)
            for g in range(groups):
                left = w[i, g * 32 : g * 32 + 32]
                right = q[n, g * 32 : g * 32 + 32]
                part = i32(0)
                for j in range(32):
                    part += i32(left[j]) * i32(right[j])
                total += f32(part) * (scales[i, g] * q_scales[n, g])
            y[n, i] = total


@compiled
def _matmul(w: Any, layer: int, x: Any, y: Any) -> None:
    """y = x @ w.T for one layer; w: (matrices,) or (int8 matrices, their scales), L first."""
    if len(w) == 1:
        matmul_f32(w[0][layer], x, y, x.shape[0])
    else:
        _matmul_int8(w[0][layer], w[1][layer], x, y)


@compiled
def _norm(x: Any, weight: Any, eps: float, out: Any, num: int) -> None:
    width = x.shape[1]
    for n in range(num):
        total = f32(0)
        for j in range(width):
            total += x[n, j] * x[n, j]
        scale = f32(1) / np.sqrt(total / f32(width) + f32(eps))
        for j in range(width):
            out[n, j] = x[n, j] * scale * weight[j]


@compiled
def _scale(cached: Any, head: int, slot: int) -> Any:
    """Of the numbers at one slot; float32 numbers have none."""
    if len(cached) == 1:
        return f32(1)
    return cached[1][head, slot]


@compiled
def _store(cached: Any, head: int, slot: int, x: Any) -> None:
    """Write the numbers of one head and slot, quantized where the cache is int8."""
    if len(cached) == 1:
        cached[0][head, slot] = x
    else:
        largest = f32(0)
        for d in range(x.shape[0]):
            largest = max(largest, abs(x[d]))
        scale = largest / f32(127)
        cached[1][head, slot] = scale
        inverse = f32(0) if scale == 0 else f32(1) / scale
        for d in range(x.shape[0]):
            cached[0][head, slot, d] = np.int8(np.rint(x[d] * inverse))


@compiled
def _of_layer(cached: Any, layer: int) -> Any:
    if len(cached) == 1:
        return (cached[0][layer],)
    return (cached[0][layer], cached[1][layer])


@compiled
def attend(q: Any, keys: Any, values: Any, slots: Any, starts: Any, lengths: Any, out: Any, scores: Any) -> None:
    """out[n] = softmax(q[n] . keys) values over the first lengths[n] slots from slots[starts[n]] on.

    q and out: N H D; keys and values of one layer: (K C D,), or (int8 K C D, scales K C); scores: scratch for the
    longest length.
    """
    num, heads, size = q.shape
    share = heads // keys[0].shape[0]
    scale = f32(1) / np.sqrt(f32(size))
    for n in range(num):
        first, length = starts[n], lengths[n]
        for h in range(heads):
            kv_head = h // share
            k, v, query = keys[0][kv_head], values[0][kv_head], q[n, h]
            largest = f32(-3e38)  # fastmath has no infinity
            for s in range(length):
                key = k[slots[first + s]]
                total = f32(0)
                for d in range(size):
                    total += query[d] * f32(key[d])
                total *= scale * _scale(keys, kv_head, slots[first + s])
                scores[s] = total
                largest = max(largest, total)
            total = f32(0)
            for s in range(length):
                scores[s] = np.exp(scores[s] - largest)
                total += scores[s]
            result = out[n, h]
            result[:] = f32(0)
            for s in range(length):
                weight = scores[s] / total * _scale(values, kv_head, slots[first + s])
                value = v[slots[first + s]]
                for d in range(size):
                    result[d] += weight * f32(value[d])


@compiled
def _rotate(x: Any, cos: Any, sin: Any) -> None:
    """In place: element i of a head pairs with i + D/2."""
    half = cos.shape[0]
    for i in range(half):
        left, right = x[i], x[i + half]
        x[i] = left * cos[i] - right * sin[i]
        x[i + half] = right * cos[i] + left * sin[i]


@compiled
def _norm_heads(qkv: Any, weights: Any, eps: float, heads: int, kv_heads: int) -> None:
    """Normalize each query head, then each key head, in place. weights: 2 D."""
    size = weights.shape[1]
    for n in range(qkv.shape[0]):
        for h in range(heads + kv_heads):
            x, weight = qkv[n, h * size : (h + 1) * size], weights[0 if h < heads else 1]
            total = f32(0)
            for d in range(size):
                total += x[d] * x[d]
            scale = f32(1) / np.sqrt(total / f32(size) + f32(eps))
            for d in range(size):
                x[d] *= scale * weight[d]


@compiled
def _attention(
    qkv: Any, positions: Any, rope: Any, k: Any, v: Any, heads: int, place: Any, out: Any, scores: Any
) -> None:
    """Rotate, store the new keys and values, attend. `place`: slots, starts, lengths."""
    slots, starts, lengths = place
    num, size = qkv.shape[0], k[0].shape[2]
    kv_heads = k[0].shape[0]
    q = np.empty((num, heads, size), np.float32)
    cos, sin = rope
    for n in range(num):
        here = slots[starts[n] + lengths[n] - 1]
        at = positions[n]
        for h in range(heads):
            q[n, h] = qkv[n, h * size : (h + 1) * size]
            _rotate(q[n, h], cos[at], sin[at])
        for h in range(kv_heads):
            key = qkv[n, (heads + h) * size : (heads + h + 1) * size]
            _rotate(key, cos[at], sin[at])
            _store(k, h, here, key)
            _store(v, h, here, qkv[n, (heads + kv_heads + h) * size : (heads + kv_heads + h + 1) * size])
    attend(q, k, v, slots, starts, lengths, out.reshape(num, heads, size), scores)


@compiled
def _gate(both: Any, out: Any, num: int) -> None:
    """silu(gate) * up, where both = gate | up."""
    ffn = out.shape[1]
    for n in range(num):
        for j in range(ffn):
            g = both[n, j]
            out[n, j] = g / (f32(1) + np.exp(-g)) * both[n, ffn + j]


@compiled
def _keys(kv: Any) -> Any:
    if len(kv) == 2:
        return (kv[0],)
    return (kv[0], kv[2])


@compiled
def _values(kv: Any) -> Any:
    if len(kv) == 2:
        return (kv[1],)
    return (kv[1], kv[3])


@compiled
def run(x: Any, w: Any, vectors: Any, eps: float, positions: Any, rope: Any, kv: Any, heads: int, place: Any) -> Any:
    """The hidden states N W after all layers and the final norm; overwrites x. w: qkv, o, gate_up, down.

    vectors: norms of the residual stream (2 L + 1), norms of queries and keys (L 2 D) and biases of queries, keys and
    values (L X), without layers in a model that does not have them. kv: keys and values L K C D, and where these are
    int8 their scales L K C.
    """
    qkv, o, gate_up, down = w
    norms, head_norms, qkv_bias = vectors
    keys, values = _keys(kv), _values(kv)
    num, width = x.shape
    h = np.empty((num, width), np.float32)
    b_qkv = np.empty((num, qkv[0].shape[1]), np.float32)
    b_attention = np.empty((num, o[0].shape[2]), np.float32)
    b_both = np.empty((num, gate_up[0].shape[1]), np.float32)
    b_inner = np.empty((num, down[0].shape[2]), np.float32)
    scores = np.empty(place[2].max(), np.float32)
    for layer in range(qkv[0].shape[0]):
        _norm(x, norms[2 * layer], eps, h, num)
        _matmul(qkv, layer, h, b_qkv)
        if qkv_bias.shape[0] > 0:
            b_qkv += qkv_bias[layer]
        if head_norms.shape[0] > 0:
            _norm_heads(b_qkv, head_norms[layer], eps, heads, keys[0].shape[1])
        k, v = _of_layer(keys, layer), _of_layer(values, layer)
        _attention(b_qkv, positions, rope, k, v, heads, place, b_attention, scores)
        _matmul(o, layer, b_attention, h)
        x += h
        _norm(x, norms[2 * layer + 1], eps, h, num)
        _matmul(gate_up, layer, h, b_both)
        _gate(b_both, b_inner, num)
        _matmul(down, layer, b_inner, h)
        x += h
    _norm(x, norms[norms.shape[0] - 1], eps, h, num)
    return h


@compiled
def head(w: Any, x: Any, num_ids: int) -> Any:
    """Logits N V of normalized hidden states; w has one layer."""
    out = np.empty((x.shape[0], num_ids), np.float32)
    _matmul(w, 0, x, out)
    return out
