"""The numbers of FP8-Flow-MoE in plain PyTorch: the specification that tests compare every op and kernel with.

Three decisions free the recipe of double quantization (FP8-Flow-MoE, arXiv 2511.02302, sections 3 and 4):

* Values are ``float8_e4m3fn`` and every scale is a power of two: ``x = q * 2**e``. A new scale changes a value's
  exponent only, so a tensor quantized along rows is transposed without a detour through bf16.
* A scale covers a *tile* of 1x128 values along the contraction dim (activations, gradients) or a *block* of 128x128
  (weights). A weight and its transpose therefore hold the same values.
* A scale is stored as its biased exponent ``e + 127``, one ``float8_e8m0fnu`` byte.

Frozen weights of published checkpoints may have blocks whose scales are fp32 or bf16 numbers. They are read as they
are: a block keeps its scale when it is transposed, so only rows need powers of two.

Shape suffixes::

    T  tokens of this rank           E  experts of this rank
    C  dispatched tokens             D  model dim
    M  rows in expert order          H  hidden dim of an expert
    R  rows of all tokens as one     K  top_k after T or C, else a GEMM's contraction dim
       group, or an adapter's rank   N  a GEMM's output dim, or the number of ranks where tokens are dispatched

Rows in expert order are grouped by expert, each group padded to a multiple of 128 rows. ``offsets_E`` (int32) holds the
end of each group. Buffers are sized without a host-device sync, so rows at and past ``offsets_E[-1]`` hold arbitrary
bytes. Scales in expert order have shape (M, D // 128) and are column-major, stride (1, M). A GEMM thus reads the scales
of one K block from contiguous memory.

D and H need not be multiples of 128. Quantized rows and weights, and h, are *padded* with zeros to multiples of 128,
and the shapes below mean these sizes. Results of the recipe have the model's sizes: GEMM 2's output, and gradients of
the input and the weights.

A *routed pair* ``(token, k)`` is a token's k-th choice of an expert; it becomes one row in expert order.
``topk_ids_TK`` holds its expert, ``topk_scores_TK`` its score, ``row_TK`` its row. A dispatched token counts once for
each rank that serves it.
"""

import itertools
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor

from titan_fp8moe.activations import ACTIVATIONS
from titan_fp8moe.spec import ExpertSpec

FP8 = torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu
SCALE_BITS = {E8M0: (torch.uint8, 23), torch.bfloat16: (torch.int16, 16), torch.float32: (torch.int32, 0)}
"""By dtype of a weight's scales: integers of that size, and by how many bits these are shifted to be those of an fp32
number."""
SCALE_TILE = 128  # values of a row that share a scale; D and H are padded to multiples of it
BLOCK = 128  # rows and columns of a weight, or of a transpose, that share a scale
ROW_ALIGN = 128  # a group of rows in expert order is padded to a multiple of it, so that a tile has one expert
GEMM_TILE = 128  # rows, columns and contraction dim of the tiles of a GEMM, which reads one scale for each of them
STEP = 16  # D and H are multiples of it on every rank: TMA needs rows of 16 bytes
FP8_NAN = 0x7F
MIN_EXPONENT = -126  # byte 1: bytes 0 (2**-127, an fp32 subnormal) and 255 (NaN) are never written
TRANSPOSE_MODES = ("balanced", "scaling_aware")


def larger(a: int, b: int) -> int:
    """``max`` of sizes. Python's would ask which one it is of a symbol, such as the number of tokens that a mask
    selects. torch.compile takes Python's for torch's by itself."""
    return cast(int, torch.sym_max(a, b)) if isinstance(a, torch.SymInt) else max(a, b)


def smaller(a: int, b: int) -> int:
    """``min`` of sizes, as :func:`larger`."""
    return cast(int, torch.sym_min(a, b)) if isinstance(a, torch.SymInt) else min(a, b)


# --- scales -----------------------------------------------------------------------------------------------------------


def amax_bits(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Largest absolute value of fp32 ``x`` over ``dim``, as int32 bit pattern. NaN and Inf sort above every number."""
    return (x.view(torch.int32) & 0x7FFFFFFF).amax(dim)


def scale_byte(bits: Tensor) -> Tensor:
    """Biased exponent of the smallest power of two with ``amax / 2**e <= 448``.

    448 is 1.75 * 2**8, so with amax = f * 2**E the exponent is E - 8 if f <= 1.75, else E - 7. Adding 0x1FFFFF carries
    into the exponent field exactly when f > 1.75. A logarithm would be wrong for amax one ulp above 448 * 2**k.

    Args:
        bits: int32 bit patterns of amax, from :func:`amax_bits`.

    Returns:
        int32 in 1..254; 1 for NaN, Inf and zero.
    """
    finite = bits < 0x7F800000
    byte = ((torch.where(finite, bits, 0) + 0x1FFFFF) >> 23) - 8
    return byte.clamp(1, 254)


def exp2(exponent: Tensor) -> Tensor:
    """Exact fp32 ``2**exponent`` for int32 exponents in -126..127."""
    return ((exponent + 127) << 23).view(torch.float32)


def exponent(scale: Tensor) -> Tensor:
    """int32 exponents of e8m0 scales."""
    return scale.view(torch.uint8).to(torch.int32) - 127


def to_scale(e: Tensor) -> Tensor:
    """e8m0 scales of int32 exponents in -126..127."""
    return (e + 127).to(torch.uint8).view(E8M0)


def column_major(scale: Tensor) -> Tensor:
    """(M, G) e8m0 scales in column-major memory, stride (1, M); copies unless they already are."""
    return scale.view(torch.uint8).t().contiguous().t().view(E8M0)


def quantize_tiles(x: Tensor, dim: int | tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Quantizes fp32 ``x`` with one scale over ``dim``; returns e4m3 values and int32 scale bytes, ``dim`` kept."""
    bits = amax_bits(x, dim)
    for d in sorted([dim] if isinstance(dim, int) else dim):
        bits = bits.unsqueeze(d)
    byte = scale_byte(bits)
    q = (x * exp2(127 - byte)).to(FP8)
    # A tile that holds a NaN or Inf becomes NaN codes: loud, and its neighbours stay intact. The cast alone does not do
    # this: on a CPU it saturates Inf.
    q = torch.where(bits < 0x7F800000, q.view(torch.uint8), FP8_NAN).view(FP8)
    return q, byte


def note_nan(q: Tensor, nan_flag: Tensor | None) -> None:
    """Stores 1 to ``nan_flag``, uint8, if a tile of the e4m3 values ``q`` is NaN. Nothing in a graph reads the flag, so
    no op declares that it changes."""
    if nan_flag is not None:  # .data: its version stays, as with kernels, since autograd has saved it
        nan_flag.data.masked_fill_((q.view(torch.uint8) & 0x7F == FP8_NAN).any(), 1)


# --- quantization -----------------------------------------------------------------------------------------------------


def check_values(x: Tensor) -> None:
    """Raises ValueError for values that are not quantized."""
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"quantization: x must be bf16 or fp32, got {x.dtype}; use x.bfloat16()")


def quantize_rows(x_TD: Tensor, nan_flag: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """1x128 quantization. Columns are padded with zeros to a multiple of 128.

    Args:
        x_TD: (T, D) bf16 or fp32; another dtype is a ValueError.
        nan_flag: see :func:`note_nan`.

    Returns:
        q_TD (T, D) e4m3 and scale (T, D // 128) e8m0, with the padded D, both row-major.
    """
    check_values(x_TD)
    if x_TD.shape[1] % SCALE_TILE:
        x_TD = torch.nn.functional.pad(x_TD, (0, -x_TD.shape[1] % SCALE_TILE))
    T, D = x_TD.shape
    q, byte = quantize_tiles(x_TD.float().contiguous().view(T, D // SCALE_TILE, SCALE_TILE), -1)
    note_nan(q, nan_flag)
    return q.view(T, D), byte.squeeze(-1).to(torch.uint8).view(E8M0)


def padded(size: int) -> int:
    """``size``, of D or H, rounded up to a multiple of 128."""
    return size + -size % SCALE_TILE  # torch.export sees that this is not less than size


def group_rows(num_tokens: int) -> int:
    """R: ``num_tokens`` padded to a multiple of 128, and at least 128."""
    rows = larger(num_tokens, 1)
    return rows + -rows % ROW_ALIGN


def quantize_group(x_TD: Tensor, nan_flag: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`quantize_rows` for an FFN whose rows are one group: T is padded to R, a multiple of 128.

    Returns:
        q (R, D) e4m3, scale (R, D // 128) e8m0 row-major, the same scales column-major, and the group's end (1,) int32,
        which is R. Padding is zeros; a tile of padding has the smallest scale (byte 1). D is padded.
    """
    rows = group_rows(x_TD.shape[0])
    q, scale = quantize_rows(torch.nn.functional.pad(x_TD, (0, 0, 0, rows - x_TD.shape[0])), nan_flag)
    # A copy, also of one column, which lies both ways: no result of an op may be another's memory.
    return q, scale, column_major(scale.clone()), torch.full((1,), q.shape[0], dtype=torch.int32, device=q.device)


def quantize_weight(w_ENK: Tensor) -> tuple[Tensor, Tensor]:
    """128x128 quantization. Rows and columns are padded with zeros to multiples of 128.

    The transpose needs no second quantization: it is ``q.transpose(1, 2)`` with ``scale.transpose(1, 2)``.

    Args:
        w_ENK: (E, N, K) bf16 or fp32.

    Returns:
        q_ENK (E, N, K) e4m3 and scale (E, N // 128, K // 128) e8m0, with the padded N and K.
    """
    w_ENK = torch.nn.functional.pad(w_ENK.float(), (0, -w_ENK.shape[2] % BLOCK, 0, -w_ENK.shape[1] % BLOCK))
    E, N, K = w_ENK.shape
    blocks = w_ENK.contiguous().view(E, N // BLOCK, BLOCK, K // BLOCK, BLOCK)
    q, byte = quantize_tiles(blocks, (2, 4))
    return q.view(E, N, K), byte.reshape(E, N // BLOCK, K // BLOCK).to(torch.uint8).view(E8M0)


def dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``q * scale`` in ``dtype``; a scale covers an equal, contiguous part of every dim (1x128 tile, 128x128 block).

    It is exact with powers of two. Products with other scales are rounded.
    """
    factor = exp2(exponent(scale)).to(dtype) if scale.dtype == E8M0 else scale.float()
    for d in range(q.ndim):
        factor = factor.repeat_interleave(q.shape[d] // factor.shape[d], d)
    return (q.to(dtype) * factor).to(dtype)


def dequantize_rows(q_MK: Tensor, scale: Tensor, offsets_E: Tensor) -> Tensor:
    """(M, K) bf16, exactly ``q * scale``, of rows in expert order."""
    return dequantize(q_MK, scale, torch.bfloat16)


# --- weights that are kept quantized ----------------------------------------------------------------------------------

SAMPLES = 1024
"""A weight of up to 32 experts is sampled at so many values; one of more experts at a multiple of it."""


def num_samples(w_ENK: Tensor) -> int:
    return max(-(-w_ENK.shape[0] // 32), 1) * SAMPLES


def sample_step(w_ENK: Tensor) -> int:
    """Distance of the samples in the flat weight: odd, so that they meet all columns. Small weights are met again."""
    return max(w_ENK.numel() // num_samples(w_ENK) - 1, 0) | 1


STATE_HEADER = 3
"""Entries of a state before its samples: the step in which the weights were seen last, -1 for never; the generation of
the copies; the last generation that was given."""


def seen_weights(
    weights: list[Tensor], state: Tensor, steps: Tensor | None, force: bool, generation: Tensor | None
) -> tuple[bool, Tensor]:
    """Whether quantized copies must be made anew of these weights, and the state of the copies afterwards.

    A forward takes copies that are of its weights' present values. Otherwise new ones are made, of a new generation. A
    backward takes the copies of its forward. If they are of another generation by then, it makes its own again, of the
    weights as its forward saw them.

    Args:
        weights: one or two (E, N, K) of one shape, bf16 or fp32.
        state: (:data:`STATE_HEADER` + samples,) int32. The samples are bit patterns of :func:`num_samples` values of
            each weight.
        steps: (1,) int32, the number of the current step; None for weights that no step changes.
        force: a forward's copies are stale in any case.
        generation: a backward's; its first entry is the number that its forward was given. None in a forward.
    """
    seen, current, given = state[:STATE_HEADER].tolist()
    now = seen if steps is None else int(steps)
    if generation is not None and current == generation[0]:
        return False, state
    at = torch.arange(num_samples(weights[0]), device=state.device) * sample_step(weights[0]) % weights[0].numel()
    _, N, K = weights[0].shape
    samples = torch.cat([w[at // K // N, at // K % N, at % K] for w in weights])
    bits = samples.view(torch.int16 if samples.dtype == torch.bfloat16 else torch.int32).int()
    changed = True
    if generation is None:
        changed = force or seen < 0 or seen != now or not torch.equal(bits, state[STATE_HEADER:])
        given += changed
        current = given if changed else current
    else:
        current = int(generation[0])
    return changed, torch.cat([state.new_tensor([max(now, 0), current, given]), bits])


# --- transposes: (M, D) with a scale per 1x128 tile -> (D, M) with a scale per 128x128 block --------------------------


def shift_exponent(q: Tensor, shift: Tensor) -> Tensor:
    """e4m3 codes of ``q * 2**shift`` for int32 ``shift <= 0``.

    Exact unless the result is subnormal; that is rounded to nearest even. Some kernels subtract from the exponent field
    and keep the mantissa, which amplifies values below the smallest subnormal.
    """
    # 2**-20 already sends every value to zero; the clamp keeps the factor a normal fp32 number.
    return (q.float() * exp2(shift.clamp(min=-32))).to(FP8)


def balance_exponent(x_scale: Tensor, dy_scale: Tensor) -> Tensor:
    """Exponents that balance the rows of a weight gradient's operands: ``a[m] = (e_x[m] - e_dy[m] - r) >> 1``.

    e is the largest tile exponent of a row. Scaling row m of x by 2**-a[m] and row m of dy by 2**a[m] leaves
    dW = sum_m dy[m]^T x[m] unchanged. Both operands then carry half of the row's common magnitude. So the block scale
    that other rows need does not flush a row that is small in x and large in dy, or the reverse.

    r (0 or 1) is the parity of the largest e_x - e_dy in the block's 128 rows, rows of zeros excluded. It makes dW
    scale exactly with dy. Without r, multiplying dy by an odd power of two would round rows of even and of odd
    difference differently.

    Args:
        x_scale, dy_scale: (M, D // 128) and (M, N // 128) e8m0, M a multiple of 128.

    Returns:
        (M,) int32.
    """
    e_x, e_dy = exponent(x_scale).amax(1), exponent(dy_scale).amax(1)
    difference = e_x - e_dy
    nonzero = (e_x > MIN_EXPONENT) & (e_dy > MIN_EXPONENT)
    largest = torch.where(nonzero, difference, -1024).view(-1, BLOCK).amax(1)
    return (difference - (largest & 1).repeat_interleave(BLOCK)) >> 1


def check_mode(mode: str) -> None:
    if mode not in TRANSPOSE_MODES:
        raise ValueError(f"transpose_pair: mode is {mode!r}; set it to one of {TRANSPOSE_MODES}")


def transpose_pair(
    x_MD: Tensor,
    x_scale: Tensor,
    dy_MN: Tensor,
    dy_scale: Tensor,
    offsets_E: Tensor,
    mode: str = "balanced",
    token_M: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Transposes both operands of dW = dy^T x, so that tokens become the contraction dim.

    Every 128x128 block gets one scale, the largest of its 128 tiles. Values move to it by a change of exponent
    (:func:`shift_exponent`); nothing is dequantized.

    Args:
        x_MD, dy_MN: (M, D) and (M, N) e4m3, M a multiple of 128.
        x_scale, dy_scale: (M, D // 128) and (M, N // 128) e8m0.
        offsets_E: (E,) int32; columns of the results at and past ``offsets_E[-1]`` are undefined.
        mode: ``balanced`` moves each row's scale between the operands first (:func:`balance_exponent`).
            ``scaling_aware`` is the transpose of arXiv 2511.02302, section 3.2, but rounds to nearest even.
        token_M: (M,) int32 or None. If given, x and its scale are in token order, (T, D) and (T, D // 128). Row m of
            the operand is row ``token_M[m]`` of them, or padding for -1 (:func:`permute_rows`). Rows may be strided.

    Returns:
        xT (D, M) e4m3, its scale (D // 128, M // 128) e8m0, dyT (N, M) e4m3, its scale (N // 128, M // 128) e8m0.

    Raises:
        ValueError: for another ``mode``.
    """
    check_mode(mode)
    if token_M is not None:
        x_MD, x_scale = permute_rows(x_MD, x_scale, token_M)
    e_x, e_dy = exponent(x_scale), exponent(dy_scale)
    if mode == "balanced":
        a_M1 = balance_exponent(x_scale, dy_scale).unsqueeze(1)
        e_x, e_dy = e_x - a_M1, e_dy + a_M1
    return *_transpose_shifted(x_MD, e_x), *_transpose_shifted(dy_MN, e_dy)


def _transpose_shifted(q_MD: Tensor, e_MG: Tensor) -> tuple[Tensor, Tensor]:
    """Transposes rows with tile exponents ``e_MG`` to one exponent per 128x128 block, the largest of its 128 tiles."""
    M, D = q_MD.shape
    e_block = e_MG.view(M // BLOCK, BLOCK, D // SCALE_TILE).amax(1).clamp(min=MIN_EXPONENT)
    shift = e_MG - e_block.repeat_interleave(BLOCK, 0)
    q = shift_exponent(q_MD, shift.repeat_interleave(SCALE_TILE, 1))
    return q.view(torch.uint8).t().contiguous().view(FP8), to_scale(e_block.t().contiguous())


# --- activation -------------------------------------------------------------------------------------------------------


def swiglu_quantize(
    h_M2H: Tensor, score_M: Tensor | None, spec: ExpertSpec, bias_M2H: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """GEMM 2's quantized operand ``act(g, u) * s``, computed in fp32, with h = [g | u]; SwiGLU's act is silu(g) * u.
    Without a gate it is ``act(h) * s``, and 2H reads H in all of this section.

    ``spec.score_before_experts`` multiplies the experts' input by the score. GEMM 1 is linear, so the score is applied
    to h instead: ``act(s * g, s * u)``. A bias is added after that.

    Args:
        h_M2H: (M, 2H) bf16 or fp32, gate then up. With ``spec.interleaved`` it is (M, N), N a multiple of 128, with
            gate and up of a hidden unit side by side. The operand's H is then N / 2, padded to a multiple of 128.
        score_M: (M,) fp32, the router's score of each row; None for an FFN without a router, whose scores are 1.
        bias_M2H: (M, 2H) fp32 or None, GEMM 1's bias of each row's expert.

    Returns:
        q_MH (M, H) e4m3 and scale (M, H // 128) e8m0, column-major.
    """
    s = _scores(score_M, h_M2H)
    g, u = _activation_input(h_M2H, s, spec, bias_M2H)
    out = ACTIVATIONS[spec.activation].forward(g, u, *spec.parameters)
    q, scale = quantize_rows(out if spec.score_before_experts else out * s)
    return q, column_major(scale)


def split_gate_up(h_M2H: Tensor, spec: ExpertSpec) -> tuple[Tensor, Tensor | None]:
    """Gate and up; h and None where there is no gate."""
    if not spec.gated:
        return h_M2H, None
    g, u = h_M2H.unflatten(1, (-1, 2)).unbind(2) if spec.interleaved else h_M2H.chunk(2, dim=1)
    return g, u


def join_gate_up(g: Tensor, u: Tensor | None, spec: ExpertSpec) -> Tensor:
    """The inverse of :func:`split_gate_up`."""
    if u is None:
        return g
    return torch.stack([g, u], 2).flatten(1) if spec.interleaved else torch.cat([g, u], 1)


def _activation_input(
    h_M2H: Tensor, s_M1: Tensor, spec: ExpertSpec, bias_M2H: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Gate and up (M, H) fp32 as the activation reads them."""
    h = h_M2H.float()
    h = s_M1 * h if spec.score_before_experts else h
    return split_gate_up(h if bias_M2H is None else h + bias_M2H, spec)


def _scores(score_M: Tensor | None, like: Tensor) -> Tensor:
    """(M, 1) fp32 scores; ones where there is no router."""
    if score_M is None:
        return torch.ones(like.shape[0], 1, dtype=torch.float32, device=like.device)
    return score_M.unsqueeze(1)


def quantize_hidden(
    h_M2H: Tensor, score_M: Tensor | None, spec: ExpertSpec, bias_M2H: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """h in FP8, for a backward that keeps it so: :func:`quantize_rows`, but no value crosses the activation's clamp.

    A value that is rounded across the clamp would get another gradient than in the forward, such as 7.2 that becomes
    7.0 at a limit of 7. It takes the neighbouring code on the other side of the value.

    Returns:
        (M, 2H) e4m3 and scale (M, 2H // 128) e8m0.
    """
    q, scale = quantize_rows(h_M2H)
    if (beyond := ACTIVATIONS[spec.activation].beyond) is None:
        return q, scale
    s, rounded = _scores(score_M, h_M2H), dequantize(q, scale)
    inputs = (_activation_input(x, s, spec, bias_M2H) for x in (h_M2H, rounded))
    side, side_of_rounded = (join_gate_up(*beyond(*g_u, *spec.parameters), spec) for g_u in inputs)
    stays = (side == side_of_rounded) | rounded.isnan()
    step = torch.where(rounded.abs() > h_M2H.float().abs(), -1, 1).masked_fill(stays, 0)  # of magnitudes
    return (q.view(torch.uint8) + step).to(torch.uint8).view(FP8), scale


def swiglu_quantize_backward(
    d_MH: Tensor, h_M2H: Tensor, score_M: Tensor | None, spec: ExpertSpec, bias_M2H: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Backward of :func:`swiglu_quantize`; also recomputes the operand, for the weight gradient of GEMM 2.

    With a = act(g, u) the operand is s * a, so ds = <d, a> and da = s * d. With ``spec.score_before_experts`` and
    h' = s * h: ds = <dh', h> and dh = s * dh'.

    Args:
        d_MH: (M, H) bf16 or fp32, the gradient of the operand before its quantization.
        h_M2H, score_M, spec, bias_M2H: as in the forward.

    Returns:
        dh (M, 2H) and the operand (M, H), e4m3, each followed by its column-major scale, e8m0. Then ds (M,) fp32, and
        the gradient of each row's bias, (M, 2H) fp32.
    """
    s = _scores(score_M, d_MH)
    g, u = _activation_input(h_M2H, s, spec, bias_M2H)
    d = d_MH.float()[:, : g.shape[1]]
    activation = ACTIVATIONS[spec.activation]
    operand = activation.forward(g, u, *spec.parameters)
    dg, du = activation.backward(g, u, d if spec.score_before_experts else s * d, *spec.parameters)
    dh = dbias_M2H = join_gate_up(dg, du, spec)
    if spec.score_before_experts:
        ds = (dh * h_M2H.float()).sum(1)
        dh = s * dh
    else:
        ds = (d * operand).sum(1)
        operand = operand * s
    dh, dh_scale = quantize_rows(dh)
    q, scale = quantize_rows(operand)
    return dh, column_major(dh_scale), q, column_major(scale), ds, dbias_M2H


# --- biases -----------------------------------------------------------------------------------------------------------
#
# h = W1 x + b13 and y = s * (W2 a + b2), or y = W2 a + b2 with ``spec.score_before_experts``. GEMM 2's operand holds
# the score already, so b2 is added where a token's rows are summed.


def _groups(offsets_E: Tensor) -> list[slice]:
    """Each expert's rows."""
    return [slice(start, end) for start, end in itertools.pairwise([0, *offsets_E.tolist()])]


def expert_rows(bias_EN: Tensor, offsets_E: Tensor, M: int) -> Tensor:
    """(M, N) fp32, the bias of each row's expert; zeros past the last group."""
    expert_M = torch.searchsorted(offsets_E, torch.arange(M, device=offsets_E.device), right=True)
    return torch.nn.functional.pad(bias_EN.float(), (0, 0, 0, 1))[expert_M]


def output_bias(b2_ED: Tensor, score_M: Tensor | None, offsets_E: Tensor, M: int) -> Tensor:
    """(M, D) fp32, the bias that each of GEMM 2's rows gets; ``score_M`` None with ``spec.score_before_experts``."""
    rows = expert_rows(b2_ED, offsets_E, M)
    return rows if score_M is None else score_M.unsqueeze(1) * rows


def output_bias_backward(
    dy_MD: Tensor, b2_ED: Tensor, score_M: Tensor, offsets_E: Tensor, spec: ExpertSpec
) -> tuple[Tensor, Tensor]:
    """Backward of :func:`output_bias`: its part of ds, (M,) fp32, and the gradient of each row's b2, (M, D) fp32."""
    if spec.score_before_experts:
        return torch.zeros_like(score_M), dy_MD
    rows = expert_rows(b2_ED, offsets_E, score_M.shape[0])
    return (dy_MD * rows).sum(1), score_M.unsqueeze(1) * dy_MD


def bias_gradient(rows_MN: Tensor, offsets_E: Tensor) -> Tensor:
    """(E, N) fp32, each expert's sum of its rows. Padding rows are zeros."""
    return torch.stack([rows_MN[group].sum(0) for group in _groups(offsets_E)])


# --- expert order -----------------------------------------------------------------------------------------------------


def row_capacity(num_rows: int, num_experts: int) -> int:
    """Rows that hold ``num_rows`` routed pairs in expert order however they spread over the experts, padding included.

    At least 128, so that no buffer is empty.
    """
    rows = (num_rows + (ROW_ALIGN - 1) * smaller(num_rows, num_experts)) // ROW_ALIGN * ROW_ALIGN
    return larger(rows, ROW_ALIGN)


def expert_routing(
    topk_ids_TK: Tensor, topk_scores_TK: Tensor, num_experts: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Assigns each routed pair a row in expert order. An expert's rows are sorted by token, then by k.

    With expert parallelism the tokens are those dispatched to this rank, and their ids are local.

    Args:
        topk_ids_TK: (T, K) int32, or int64 that fits in 32 bits. A pair gets a row if its id is in 0..num_experts - 1.
        topk_scores_TK: (T, K) fp32.
        capacity: M, at least the padded rows of all experts; :func:`row_capacity` always suffices.

    Returns:
        offsets_E: (num_experts,) int32, end of each expert's group, padded to a multiple of 128.
        token_M: (M,) int32, each row's token; -1 for padding.
        score_M: (M,) fp32, each row's score; 0 for padding.
        row_TK: (T, K) int32, each pair's row; -1 for a pair without one.
    """
    (T, K), device = topk_ids_TK.shape, topk_ids_TK.device
    ids = topk_ids_TK.flatten().long()
    pairs = ((ids >= 0) & (ids < num_experts)).nonzero().squeeze(1)
    pairs = pairs[ids[pairs].argsort(stable=True)]
    experts = ids[pairs]
    counts_E = torch.bincount(experts, minlength=num_experts)
    padding_E = -counts_E % ROW_ALIGN
    # Sorted pair i lies at row i, moved by the padding of the experts before its own.
    rows = torch.arange(pairs.shape[0], device=device) + (padding_E.cumsum(0) - padding_E)[experts]
    token_M = torch.full((capacity,), -1, dtype=torch.int32, device=device)
    token_M[rows] = (pairs // K).int()
    score_M = torch.zeros(capacity, dtype=torch.float32, device=device)
    score_M[rows] = topk_scores_TK.flatten()[pairs]
    row_TK = torch.full((T, K), -1, dtype=torch.int32, device=device)
    row_TK.view(-1)[pairs] = rows.int()
    return (counts_E + padding_E).cumsum(0).int(), token_M, score_M, row_TK


# --- token exchange ---------------------------------------------------------------------------------------------------
#
# Rank n holds experts n * E to (n + 1) * E - 1. A token is sent once to each rank that holds one of its experts. This
# dispatched token has the local ids and scores of the pairs that the rank serves. Dispatched tokens are sorted by
# destination, then by token. The receiver finds them sorted by source, then by token, and calls :func:`expert_routing`.


def dispatch_routing(
    topk_ids_TK: Tensor, num_ranks: int, num_local: int, signature: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Decides which tokens this rank sends to which rank.

    Args:
        topk_ids_TK: (T, K) int32, or int64 that fits in 32 bits. A pair is sent if its id is in 0..N * E - 1.
        num_ranks: N, ranks that the experts are spread over.
        num_local: E, experts on each rank.
        signature: int32 of what ranks must have in common.

    Returns:
        sent_TK: (T, K) int32, the dispatched token c that carries the pair: c for the token's first pair on that rank,
            -2 - c for its further pairs there. A pair that is not sent has -1. Hence
            ``unpermute_sum(rows, sent_TK, dtype)`` adds the row that each rank returned for a token exactly once.
        token_C: (T * min(K, N),) int32, the token that each dispatched token is; entries from C on are -1.
        counts_N: (N, 3 + E) int32 for each rank: dispatched tokens, then routed pairs of each of its experts. The last
            two, T * K and ``signature``, let all ranks find the same faults.
    """
    (T, K), N, device = topk_ids_TK.shape, num_ranks, topk_ids_TK.device
    served_TK = (topk_ids_TK >= 0) & (topk_ids_TK < N * num_local)
    rank_TK = (topk_ids_TK.long() // num_local).masked_fill(~served_TK, N)  # N: to no rank
    is_sent_NT = torch.zeros(T, N + 1, dtype=torch.bool, device=device).scatter_(1, rank_TK, True)[:, :N].t()
    index_NT = is_sent_NT.flatten().cumsum(0).view(N, T) - 1
    sent_TK = torch.cat([index_NT, index_NT.new_full((1, T), -1)]).t().gather(1, rank_TK)
    earlier_KK = torch.ones(K, K, dtype=torch.bool, device=device).tril(-1)
    same_rank_TKK = rank_TK.unsqueeze(2) == rank_TK.unsqueeze(1)
    further_TK = (same_rank_TKK & earlier_KK).any(2) & served_TK
    tokens = is_sent_NT.nonzero()[:, 1]
    token_C = torch.full((T * min(K, N),), -1, dtype=torch.int32, device=device)
    token_C[: tokens.shape[0]] = tokens.int()
    pairs_NE = torch.bincount(topk_ids_TK[served_TK].long(), minlength=N * num_local).view(N, num_local)
    common_N = pairs_NE.new_tensor([T * K, signature]).expand(N, 2)
    counts_N = torch.cat([is_sent_NT.sum(1, keepdim=True), pairs_NE, common_N], 1)
    return torch.where(further_TK, -2 - sent_TK, sent_TK).int(), token_C, counts_N.int()


# --- rows -------------------------------------------------------------------------------------------------------------


def permute_rows(q_TD: Tensor, scale: Tensor, token_M: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and scales in expert order: row m is row ``token_M[m]``; padding is zeros with the smallest scale (byte 1).

    Returns:
        (M, D) e4m3 and (M, D // 128) e8m0, column-major.
    """
    # One row more, for padding to come from: index -1.
    q = torch.nn.functional.pad(q_TD.view(torch.uint8), (0, 0, 0, 1), value=0)
    s = torch.nn.functional.pad(scale.view(torch.uint8), (0, 0, 0, 1), value=1)
    index = token_M.long()
    return q[index].view(FP8), column_major(s[index].view(E8M0))


def unpermute_sum(
    y_MD: Tensor,
    row_TK: Tensor,
    out_dtype: torch.dtype,
    addend_RD: Tensor | None = None,
    b2: Tensor | None = None,
    score_M: Tensor | None = None,
    offsets_E: Tensor | None = None,
) -> Tensor:
    """Sums each token's rows in fp32, in the order k = 0..K-1, then the token's row of ``addend_RD``, and rounds once.

    With expert parallelism ``y_MD`` holds the bf16 row that came back for each dispatched token and ``row_TK`` is
    ``sent_TK`` of :func:`dispatch_routing`. A token's ranks are then added in the order of its first pair on each.

    Args:
        y_MD: (M, D) bf16 or fp32.
        row_TK: (T, K) int32. A negative row adds nothing.
        addend_RD: (R, D) bf16 or fp32, R >= T, the output of an FFN that serves every token; or None.
        b2, score_M, offsets_E: :func:`output_bias` is added to each row, unless b2 (E, D) is None.

    Returns:
        (T, D) out_dtype.
    """
    bias_MD = None if b2 is None or offsets_E is None else output_bias(b2, score_M, offsets_E, y_MD.shape[0])
    out = torch.zeros(row_TK.shape[0], y_MD.shape[1], dtype=torch.float32, device=y_MD.device)
    for row_T in row_TK.unbind(1) if y_MD.shape[0] else ():
        index = row_T.long().clamp(min=0)
        row = y_MD[index].float()
        if bias_MD is not None:
            row = row + bias_MD[index]
        out = out + row.masked_fill((row_T < 0).unsqueeze(1), 0)
    if addend_RD is not None:
        out = out + addend_RD[: out.shape[0]].float()
    return out.to(out_dtype)


def unpermute_gradients(
    dx_MD: Tensor, ds: Tensor, row_TK: Tensor, out_dtype: torch.dtype, addend_RD: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`unpermute_sum` of a backward, and the score gradients of the routed pairs.

    Args:
        dx_MD: (M, D) bf16 and ds: fp32, (M, 1) with the score gradient of each row or (M, K) with one for each k.
        row_TK: (T, K) int32: ``row_TK`` of :func:`expert_routing` with (M, 1), ``sent_TK`` of :func:`dispatch_routing`
            with (M, K). In the latter -2 - c stands for row c, whose score gradient counts although the sum has the
            row already. The score gradient at -1 is zero.

    Returns:
        (T, D) out_dtype, (T, K) fp32.
    """
    row = torch.where(row_TK < -1, -2 - row_TK, row_TK).long()
    column = torch.arange(row_TK.shape[1], device=ds.device) if ds.shape[1] > 1 else 0
    ds_TK = torch.cat([ds, ds.new_zeros(1, ds.shape[1])])[row, column]  # row -1: the zeros
    return unpermute_sum(dx_MD, row_TK, out_dtype, addend_RD), ds_TK


# --- payloads ---------------------------------------------------------------------------------------------------------
#
# A row of a dispatch payload: D value bytes; in a forward, K int32 local ids and K fp32 scores; D // 128 scale bytes. D
# is padded to a multiple of 128.
# A row of a combine payload: D bf16 values; in a backward, K fp32 score gradients.
# Both rows are padded to 16 bytes.


def dispatch_width(D: int, top_k: int) -> int:
    """Bytes of a dispatched token; ``top_k`` is 0 in a backward."""
    return (D + 8 * top_k + D // SCALE_TILE + 15) // 16 * 16


def combine_width(D: int, top_k: int) -> int:
    """Bytes of a token's sum; ``top_k`` is 0 in a forward."""
    return (2 * D + 4 * top_k + 15) // 16 * 16


def pack_dispatch(
    q_TD: Tensor,
    scale: Tensor,
    token_C: Tensor,
    sent_TK: Tensor,
    topk_ids_TK: Tensor | None,
    topk_scores_TK: Tensor | None,
    num_local: int,
) -> Tensor:
    """Packs the dispatched tokens: values and scales; in a forward also each pair's local expert id and score.

    A pair that the destination does not serve gets the id -1 and the score 0.

    Args:
        q_TD: (T, D) e4m3; scale: (T, D // 128) e8m0 row-major.
        token_C, sent_TK: of :func:`dispatch_routing`; token_C cut to the C dispatched tokens, all that sent_TK names.
        topk_ids_TK, topk_scores_TK: as in :func:`expert_routing`, with ids of all ranks' experts; None in a backward.
        num_local: experts on each rank.

    Returns:
        (C, width) uint8; see :func:`unpack_dispatch`.
    """
    C, D, top_k = token_C.shape[0], q_TD.shape[1], 0 if topk_ids_TK is None else sent_TK.shape[1]
    payload = torch.zeros(C, dispatch_width(D, top_k), dtype=torch.uint8, device=q_TD.device)
    q, payload_scale, ids_CK, scores_CK = unpack_dispatch(payload, D, top_k)
    token_C = token_C.long()
    q.view(torch.uint8).copy_(q_TD.view(torch.uint8)[token_C])
    payload_scale.view(torch.uint8).copy_(scale.view(torch.uint8)[token_C])
    if topk_ids_TK is not None and topk_scores_TK is not None:
        c, sent_CK = torch.arange(C, device=token_C.device).unsqueeze(1), sent_TK[token_C]
        served = (sent_CK == c) | (sent_CK == -2 - c)
        ids_CK.copy_((topk_ids_TK[token_C] % num_local).masked_fill(~served, -1))
        scores_CK.copy_(topk_scores_TK[token_C].masked_fill(~served, 0))
    return payload


def unpack_dispatch(payload: Tensor, D: int, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of a dispatch payload (C, width) uint8; D is padded here, ``top_k`` is 0 in a backward.

    Returns:
        q (C, D) e4m3, scale (C, D // 128) e8m0, topk_ids_CK (C, top_k) int32, topk_scores_CK (C, top_k) fp32.
    """
    D = padded(D)
    sizes = [D, 4 * top_k, 4 * top_k, D // SCALE_TILE]
    values, ids, scores, scale, _ = payload.split([*sizes, payload.shape[1] - sum(sizes)], dim=1)
    return values.view(FP8), scale.view(E8M0), ids.view(torch.int32), scores.view(torch.float32)


def pack_combine(
    y_MD: Tensor,
    ds_M: Tensor | None,
    row_CK: Tensor,
    b2: Tensor | None = None,
    score_M: Tensor | None = None,
    offsets_E: Tensor | None = None,
) -> Tensor:
    """Packs what goes back for each dispatched token: its rows' sum, fp32 in the order of k, rounded to bf16 once.

    With ``ds_M`` also the score gradient of each of its pairs, 0 for a pair that this rank does not serve.

    Args:
        y_MD: (M, D) bf16; ds_M: (M,) fp32, None in a forward.
        row_CK: (C, K) int32, ``row_TK`` of :func:`expert_routing`.
        b2, score_M, offsets_E: as in :func:`unpermute_sum`.

    Returns:
        (C, width) uint8; see :func:`unpack_combine`.
    """
    D, (C, K) = y_MD.shape[1], row_CK.shape
    width = combine_width(D, 0 if ds_M is None else K)
    payload = torch.zeros(C, width, dtype=torch.uint8, device=y_MD.device)
    rows, ds_CK = unpack_combine(payload, D, K)
    rows.copy_(unpermute_sum(y_MD, row_CK, torch.bfloat16, None, b2, score_M, offsets_E))
    if ds_M is not None and ds_CK is not None:
        ds_CK.copy_(ds_M[row_CK.long().clamp(min=0)].masked_fill(row_CK < 0, 0))
    return payload


def unpack_combine(payload: Tensor, D: int, K: int) -> tuple[Tensor, Tensor | None]:
    """Views of a combine payload: rows (C, D) bf16, and in a backward score gradients (C, K) fp32, else None."""
    rows = payload[:, : 2 * D].view(torch.bfloat16)
    if payload.shape[1] == 2 * D:
        return rows, None
    return rows, payload[:, 2 * D : 2 * D + 4 * K].view(torch.float32)


# --- GEMMs ------------------------------------------------------------------------------------------------------------


def _fp32_matmul(a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast(a.device.type, enabled=False):  # a trainer's mixed precision would round products to bf16
        return a @ b


def _rows_mm(x_MK: Tensor, weights: Iterable[Tensor], N: int, offsets_E: Tensor, out_dtype: torch.dtype) -> Tensor:
    """(M, N), x[m] @ w[e]^T for fp32 ``weights`` (N, K) of each expert; zeros in rows past the last group."""
    out = torch.zeros(x_MK.shape[0], N, dtype=out_dtype, device=x_MK.device)
    for group, w_NK in zip(_groups(offsets_E), weights, strict=True):
        # Always the same shape: a row's result must not depend on how many rows its expert got.
        for m in range(group.start, group.stop, GEMM_TILE):
            out[m : m + GEMM_TILE] = _fp32_matmul(x_MK[m : m + GEMM_TILE], w_NK.t())
    return out


def grouped_mm(
    a_MK: Tensor,
    a_scale: Tensor,
    b_ENK: Tensor,
    b_scale: Tensor,
    offsets_E: Tensor,
    out_dtype: torch.dtype,
    columns: int | None = None,
) -> Tensor:
    """out[m] = a[m] @ b[e]^T for the expert e whose group holds row m; products accumulated in fp32.

    Args:
        a_MK: (M, K) e4m3 in expert order; a_scale: (M, K // 128) e8m0.
        b_ENK: (E, N, K) e4m3; b_scale: (E, N // 128, K // 128) e8m0, fp32 or bf16.
        offsets_E: (E,) int32, the end of each expert's group. Rows past the last are undefined.
        out_dtype: bf16 or fp32.
        columns: how many of the N columns to return, where the others are b's padding; by default all.

    Returns:
        (M, N or columns) out_dtype, contiguous.
    """
    weights = (dequantize(q, scale) for q, scale in zip(b_ENK, b_scale, strict=True))  # one at a time, for memory
    return _rows_mm(dequantize(a_MK, a_scale), weights, b_ENK.shape[1], offsets_E, out_dtype)[:, :columns].contiguous()


WGRAD_LAYOUTS = ("apart", "joined", "transposed")


def check_wgrad(
    N: int, K: int, out_dtype: torch.dtype, parts: int, rows: int | None, columns: int | None
) -> tuple[int, int]:
    """The rows and columns of a matrix of :func:`grouped_mm_wgrad`, which raises the errors of this function."""
    if N % (parts * BLOCK):
        raise ValueError(f"grouped_mm_wgrad: N is {N}, but {parts} weights need a multiple of {parts * BLOCK}")
    for name, size, most in (("rows", rows, N // parts), ("columns", columns, K)):
        if size is not None and not (0 < size <= most and size * out_dtype.itemsize % 16 == 0):
            raise ValueError(
                f"grouped_mm_wgrad: {name} is {size}; it must be in 1..{most}, and as many values of {out_dtype} a "
                "multiple of 16 bytes"
            )
    return rows or N // parts, columns or K


def grouped_mm_wgrad(
    aT_NM: Tensor,
    aT_scale: Tensor,
    bT_KM: Tensor,
    bT_scale: Tensor,
    offsets_E: Tensor,
    out_dtype: torch.dtype,
    parts: int = 1,
    rows: int | None = None,
    columns: int | None = None,
    layout: str = "apart",
) -> Tensor:
    """out[e] = sum over the rows m of expert e of a[m]^T b[m], from operands of :func:`transpose_pair`.

    Args:
        aT_NM: (N, M) e4m3; aT_scale: (N // 128, M // 128) e8m0.
        bT_KM: (K, M) e4m3; bT_scale: (K // 128, M // 128) e8m0.
        parts: how many matrices of equal shape N is made of, each of them padded; 2 for gate and up.
        rows: how many rows of a matrix to return, where the others are its padding; by default all, N // parts.
        columns: the same of the K columns.
        layout: how the matrices of an expert lie in the result.

    Returns:
        Results of experts without rows are zero, all are contiguous. By ``layout``:

        * ``apart``: (parts * E, rows, columns) out_dtype, all experts' first matrices before their second.
        * ``joined``: (E, parts * rows, columns), one weight per expert.
        * ``transposed``: (E, columns, parts * rows), its transpose.

    Raises:
        ValueError: N is no multiple of 128 for each of ``parts``. Or ``rows`` or ``columns`` is too large, or as many
            values of ``out_dtype`` take no multiple of 16 bytes.
    """
    E, N, K = offsets_E.shape[0], aT_NM.shape[0], bT_KM.shape[0]
    rows, columns = check_wgrad(N, K, out_dtype, parts, rows, columns)
    out = torch.zeros(E, N, K, dtype=out_dtype, device=aT_NM.device)
    for e, group in enumerate(_groups(offsets_E)):
        acc = torch.zeros(N, K, dtype=torch.float32, device=aT_NM.device)
        for m in range(group.start, group.stop, BLOCK):
            step, block = slice(m, m + BLOCK), slice(m // BLOCK, m // BLOCK + 1)
            a = dequantize(aT_NM[:, step], aT_scale[:, block])
            acc += _fp32_matmul(a, dequantize(bT_KM[:, step], bT_scale[:, block]).t())
        out[e] = acc
    matrices = out.unflatten(1, (parts, -1))[:, :, :rows, :columns]
    if layout == "apart":
        return matrices.transpose(0, 1).flatten(0, 1).contiguous()
    joined = matrices.flatten(1, 2)
    return (joined if layout == "joined" else joined.transpose(1, 2)).contiguous()


# --- low-rank adapters ------------------------------------------------------------------------------------------------
#
# An adapter (LoRA) of a weight W (N, K) adds B A to it: A (R, K), and B (N, R) times the adapter's scale, both rounded
# to bf16. It runs beside the GEMM of W, on the same quantized rows, because quantizing W + B A would round the adapter
# away. Dequantized rows are exact in bf16. Every product accumulates in fp32 and rounds to bf16 once.


def low_rank(q_MK: Tensor, scale: Tensor, a_ERK: Tensor, b_ENR: Tensor, offsets_E: Tensor) -> Tensor:
    """out[m] = (x[m] @ A[e]^T) @ B[e]^T for the expert e whose group holds row m. The input's gradient is the same
    product of dy's rows, with B^T in the place of A and A^T in the place of B.

    Args:
        q_MK: (M, K) e4m3 in expert order; scale: (M, K // 128) e8m0.
        a_ERK: (E, R, K) bf16; b_ENR: (E, N, R) bf16.

    Returns:
        (M, N) bf16.
    """
    return _low_rank_mm(_low_rank_mm(dequantize(q_MK, scale), a_ERK, offsets_E), b_ENR, offsets_E)


def low_rank_grads(
    x_MK: Tensor, x_scale: Tensor, dy_MN: Tensor, dy_scale: Tensor, a_ERK: Tensor, b_ENR: Tensor, offsets_E: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`low_rank`: dA = (dy B)^T x and dB = dy^T (x A^T).

    Args:
        x_MK, x_scale: rows of the forward; dy_MN, dy_scale: the gradient of its result, quantized like them.

    Returns:
        dA (E, R, K) and dB (E, N, R) bf16; zero for an expert without rows.
    """
    x, dy = dequantize(x_MK, x_scale), dequantize(dy_MN, dy_scale)
    u = _low_rank_mm(x, a_ERK, offsets_E).float()
    du = _low_rank_mm(dy, b_ENR.transpose(1, 2), offsets_E).float()
    da, db = a_ERK.new_zeros(a_ERK.shape), b_ENR.new_zeros(b_ENR.shape)
    for e, rows in enumerate(_groups(offsets_E)):
        da[e] = _fp32_matmul(du[rows].t(), x[rows])
        db[e] = _fp32_matmul(dy[rows].t(), u[rows])
    return da, db


def _low_rank_mm(x_MK: Tensor, w_ENK: Tensor, offsets_E: Tensor) -> Tensor:
    return _rows_mm(x_MK.float(), w_ENK.float(), w_ENK.shape[1], offsets_E, torch.bfloat16)
