"""A reference MoE layer: the recipe's quantization around plain PyTorch, expert by expert.

It shares :mod:`titan_fp8moe.recipe`'s quantization and transposes with the package, and the activations' forwards. Row
maps, the order of steps and sums are its own, and derivatives are autograd's of an activation's forward.

GEMM 1 has a list of matrices, gate and up or one, since each is padded and quantized for itself.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from titan_fp8moe import recipe
from titan_fp8moe.activations import ACTIVATIONS
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.recipe import BLOCK, dequantize, padded, quantize_rows, quantize_weight
from titan_fp8moe.spec import ExpertSpec


class Adapter(NamedTuple):
    """A LoRA adapter: A (r, K), B (N, r), its scale, and the N columns of the GEMM's output that it adds to."""

    A: Tensor
    B: Tensor
    scale: float
    columns: slice


class Expert(NamedTuple):
    """The weights of one expert, or one gradient for each.

    Attributes:
        w13: matrices (N, D); w2: (D, H).
        b13: a bias for all columns of h; b2: (D,); or None.
        lora13, lora2: adapters of the two GEMMs; or pairs of gradients.
    """

    w13: list[Tensor]
    w2: Tensor
    b13: Tensor | None = None
    b2: Tensor | None = None
    lora13: Any = ()
    lora2: Any = ()


class Group(NamedTuple):
    """An expert, and the tokens that it serves. ``k``: which of each token's choices it is; None if shared by all."""

    expert: Expert
    spec: ExpertSpec
    token: Tensor
    k: Tensor | None = None


class Quantized(NamedTuple):
    """Quantized rows of matrices side by side, each of which is padded; ``columns`` are their own."""

    q: Tensor
    scale: Tensor
    columns: list[int]

    @classmethod
    def of(cls, matrices: list[Tensor]) -> "Quantized":
        parts = [quantize_rows(m) for m in matrices]
        q, scale = (torch.cat([part[i].view(torch.uint8) for part in parts], 1) for i in (0, 1))
        return cls(q.view(recipe.FP8), scale.view(recipe.E8M0), [m.shape[1] for m in matrices])

    def values(self) -> Tensor:
        """(rows, columns) fp32 without padding."""
        return unpadded(dequantize(self.q, self.scale), self.columns)

    def take(self, rows: Tensor) -> "Quantized":
        return self._replace(q=self.q[rows], scale=self.scale.view(torch.uint8)[rows].view(recipe.E8M0))

    def whole_blocks(self) -> tuple[Tensor, Tensor]:
        """Values and scales with rows of zeros up to a multiple of 128."""
        more = (0, 0, 0, -len(self.q) % BLOCK)
        q, scale = pad(self.q.view(torch.uint8), more), pad(self.scale.view(torch.uint8), more, value=1)
        return q.view(recipe.FP8), scale.view(recipe.E8M0)


def unpadded(x: Tensor, columns: list[int]) -> Tensor:
    parts = x.split([padded(n) for n in columns], 1)
    return torch.cat([part[:, :n] for part, n in zip(parts, columns, strict=True)], 1)


def quantized_weight(w_NK: Tensor) -> Tensor:
    """The values that FP8 keeps of a weight (N, K)."""
    return dequantize(*quantize_weight(w_NK.unsqueeze(0)))[0, : w_NK.shape[0], : w_NK.shape[1]]


@torch.no_grad()
def reference_layer(
    x: Tensor,
    scores: Tensor,
    shared_scores: Tensor | None,
    groups: list[Group],
    config: Fp8FlowMoEConfig,
    dout: Tensor,
    travels: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Expert | None]]:
    """The output (T, D); gradients of x, of scores (T, K) and shared scores (T,); those of each group's expert, None
    for one without tokens. ``travels``: a rank's sums for a token are rounded to bf16."""
    x_q, dy_q = Quantized.of([x.float()]), Quantized.of([dout.float()])
    out, dx, shared, d_shared = torch.zeros(4, *x.shape)
    ds, ds_shared, grads = torch.zeros_like(scores), torch.zeros(len(x)), []
    for expert, spec, token, k in groups:
        if len(token) == 0:
            grads.append(None)
            continue
        score = scores[token, k] if k is not None else torch.ones(len(x)) if shared_scores is None else shared_scores
        y, d_rows, d_score, grad = _run(expert, spec, config, x_q.take(token), score.unsqueeze(1), dy_q.take(token))
        grads.append(grad)
        if k is None:
            shared, d_shared, ds_shared = y, d_rows, d_score
        else:
            out.index_add_(0, token, y)
            dx.index_add_(0, token, d_rows)
            ds[token, k] = d_score
    if travels:
        out, dx = _bf16(out), _bf16(dx)
    return (out + shared).to(x.dtype), (dx + d_shared).to(x.dtype), ds, ds_shared, grads


def grouped_gemm(
    x: Tensor, w_ENK: Tensor, rows: list[Tensor], dout: Tensor, mode: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Each group's rows times its weight: the output, and gradients of x and of the weights; zeros for other rows."""
    out, dx, dw = torch.zeros_like(dout), torch.zeros_like(x), torch.zeros_like(w_ENK)
    for e, of_group in enumerate(rows):
        if of_group.any():
            (x_q, dy_q), w = (Quantized.of([t[of_group]]) for t in (x, dout)), quantized_weight(w_ENK[e])
            out[of_group], dx[of_group] = x_q.values() @ w.T, dy_q.values() @ w
            dw[e] = _weight_gradient(dy_q, x_q, mode)
    return out, dx, dw


def _run(
    expert: Expert, spec: ExpertSpec, config: Fp8FlowMoEConfig, x_q: Quantized, score: Tensor, dy_q: Quantized
) -> tuple[Tensor, Tensor, Tensor, Expert]:
    """An expert's rows: the output, gradients of rows and scores, and of the weights."""
    x, dy, sizes = x_q.values(), dy_q.values(), [len(w) for w in expert.w13]
    w13, w2 = torch.cat([quantized_weight(w) for w in expert.w13]), quantized_weight(expert.w2)
    h = _product(x, w13, expert.lora13)
    a_q = Quantized.of([_activate(h.float(), score, expert.b13, spec)])
    y = _product(a_q.values(), w2, expert.lora2).float()

    d = _input_gradient(dy, w2, expert.lora2)
    rounded = config.save_h == "fp8" and config.recompute != "experts"
    h = _rounded(h, score, expert.b13, spec, sizes) if rounded else h.float()
    b13 = torch.zeros_like(h) if expert.b13 is None else expert.b13.expand_as(h)
    with torch.enable_grad():
        leaves = [t.clone().requires_grad_() for t in (h, score, b13)]
        a = _activate(*leaves, spec)
        dh, ds, db13 = torch.autograd.grad(a, leaves, d)
    a_q = a_q if config.recompute == "none" else Quantized.of([a.detach()])
    dh_q = Quantized.of(list(dh.split(sizes, 1)))
    dx = _input_gradient(dh_q.values(), w13, expert.lora13)

    db2 = None
    if expert.b2 is not None:
        weight = torch.ones_like(score) if spec.score_before_experts else score
        y, db2 = y + weight * expert.b2, (weight * dy).sum(0)
        ds = ds if spec.score_before_experts else ds + (dy * expert.b2).sum(1, keepdim=True)
    dw13 = list(_weight_gradient(dh_q, x_q, config.wgrad).split(sizes))
    dw2 = _weight_gradient(dy_q, a_q, config.wgrad)
    lora13 = [_adapter_gradients(adapter, x, dh_q.values()) for adapter in expert.lora13]
    lora2 = [_adapter_gradients(adapter, a_q.values(), dy) for adapter in expert.lora2]
    return y, dx, ds[:, 0], Expert(dw13, dw2, db13.sum(0), db2, lora13, lora2)


def _activate(h: Tensor, score: Tensor, bias: Tensor | None, spec: ExpertSpec) -> Tensor:
    """GEMM 2's input before its quantization."""
    h = score * h if spec.score_before_experts else h
    h = h if bias is None else h + bias
    gate, up = h, None
    if spec.gated:
        gate, up = (h[:, ::2], h[:, 1::2]) if spec.interleaved else h.chunk(2, 1)
    a = ACTIVATIONS[spec.activation].forward(gate, up, *spec.parameters)
    return a if spec.score_before_experts else a * score


def _rounded(h: Tensor, score: Tensor, bias: Tensor | None, spec: ExpertSpec, sizes: list[int]) -> Tensor:
    """h as it is kept in FP8."""

    def padded_parts(t: Tensor) -> Tensor:
        return torch.cat([pad(part, (0, -part.shape[1] % BLOCK)) for part in t.split(sizes, 1)], 1)

    bias = None if bias is None else padded_parts(bias.expand_as(h))
    return unpadded(dequantize(*recipe.quantize_hidden(padded_parts(h), score[:, 0], spec, bias)), sizes)


def _bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _product(x: Tensor, w: Tensor, adapters: Any) -> Tensor:
    """x w^T in bf16, with the adapters' x A^T B^T added to their columns: products and sum are rounded to bf16."""
    out = (x @ w.T).bfloat16()
    more = torch.zeros_like(out)
    for A, B, scale, columns in adapters:
        more[:, columns] += (_bf16(x @ _bf16(A).T) @ _bf16(B * scale).T).bfloat16()
    return out + more if adapters else out


def _input_gradient(dy: Tensor, w: Tensor, adapters: Any) -> Tensor:
    """dy w in fp32 of bf16, with the adapters' dy B A, which share one sum."""
    out, more = _bf16(dy @ w), torch.zeros(len(dy), w.shape[1])
    for A, B, scale, columns in adapters:
        more += _bf16(dy[:, columns] @ _bf16(B * scale)) @ _bf16(A)
    return _bf16(out + _bf16(more))


def _adapter_gradients(adapter: Adapter, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    A, B, scale, columns = adapter
    dy, u, du = dy[:, columns], _bf16(x @ _bf16(A).T), _bf16(dy[:, columns] @ _bf16(B * scale))
    return _bf16(du.T @ x), _bf16(dy.T @ u) * scale


def _weight_gradient(dy: Quantized, x: Quantized, mode: str) -> Tensor:
    """dy^T x, (N, K) fp32."""
    if mode == "bf16":
        return _bf16(dy.values().T @ x.values())
    rows = x.whole_blocks(), dy.whole_blocks()
    operands = recipe.transpose_pair(*rows[0], *rows[1], torch.tensor([len(rows[0][0])]), mode)
    x_t, dy_t = dequantize(*operands[:2]), dequantize(*operands[2:])
    return unpadded((dy_t @ x_t.T).T, dy.columns).T[:, : sum(x.columns)]
