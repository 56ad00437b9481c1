"""Data movement of 2**20 rows: offsets exceed 31 bits. Only the last rows and columns hold numbers and are compared.

On a CPU only the CTAs at the ends of each launch are interpreted, and memory that none of them touches costs
nothing.
"""

import pytest
import torch

from tests.kernels.compare import assert_same_bits, column_major_scale, fp8_rows, randn
from tests.kernels.conftest import INTERPRETED
from titan_fp8moe import ops, recipe
from titan_fp8moe.kernels import permute, quantize, routing, swiglu, transpose
from titan_fp8moe.recipe import BLOCK, E8M0, TRANSPOSE_MODES
from titan_fp8moe.spec import ExpertSpec

M, D = 2**20, 2176
LAST = slice(-BLOCK, None)


@pytest.fixture
def interpreted_axes(monkeypatch) -> dict[int, list[int]]:
    """CTAs to interpret along the axes of a grid, negative ones from its end; without an entry the last 4."""
    axes = {}
    monkeypatch.undo()  # poisoned memory is memory in use
    if INTERPRETED:
        from triton.runtime.interpreter import GridExecutor, interpreter_builder

        launch = GridExecutor.__call__
        set_dim, set_index = interpreter_builder.set_grid_dim, interpreter_builder.set_grid_idx

        def launch_ends(self, *args, **kwargs):
            whole = (*self.grid, 1, 1)[:3]
            assert max(whole[1:]) <= 65535, whole
            ctas = [axes.get(axis, range(max(n - 4, 0), n)) for axis, n in enumerate(whole)]
            monkeypatch.setattr(interpreter_builder, "set_grid_dim", lambda *_: set_dim(*whole))
            monkeypatch.setattr(
                interpreter_builder,
                "set_grid_idx",
                lambda *index: set_index(*(p[i] % n for p, i, n in zip(ctas, index, whole, strict=True))),
            )
            self.grid = tuple(map(len, ctas))
            launch(self, *args, **kwargs)

        monkeypatch.setattr(GridExecutor, "__call__", launch_ends)
        # It copies whole tensors onto themselves.
        monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
    return axes


def ending_in(rows: torch.Tensor, num_rows: int = M) -> torch.Tensor:
    """(num_rows, D) whose last rows are these, the others anything."""
    out = torch.empty(num_rows, *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    out[-rows.shape[0] :] = rows
    return out


def expert_rows(generator, width):
    """Rows and column-major scales, of which only the last ones are set, and those."""
    q, scale = fp8_rows(generator, BLOCK, width), column_major_scale(generator, BLOCK, width, 60, 200)
    far_scale = torch.empty(width // BLOCK, M, dtype=torch.uint8, device=q.device).t()
    far_scale[LAST] = scale.view(torch.uint8)
    return (ending_in(q), far_scale.view(E8M0)), (q, scale)


def all_rows(device):
    return torch.tensor([0, M], dtype=torch.int32, device=device)


def test_quantize_rows(interpreted_axes, generator):
    rows = randn(generator, 2, D).bfloat16()
    assert_same_bits([t[-2:] for t in quantize.quantize_rows(ending_in(rows))], recipe.quantize_rows(rows))


def test_quantize_weight(interpreted_axes, generator):
    block = randn(generator, 1, BLOCK, BLOCK).bfloat16()
    w = torch.empty(256, 4096, D, dtype=torch.bfloat16, device=block.device)
    w[-1:, LAST, LAST] = block
    want, want_scale = recipe.quantize_weight(block)
    q, q_t, scale = quantize.quantize_weight([w], True, True)
    got = q[-1:, LAST, LAST], q_t[-1:, LAST, LAST], scale[-1:, -1:, -1:]
    assert_same_bits(got, (want, want.transpose(1, 2), want_scale))


def test_swiglu(interpreted_axes, generator, device):
    H, spec = 1152, ExpertSpec()
    rows, score = randn(generator, BLOCK, 2 * H).bfloat16(), randn(generator, BLOCK).sigmoid()
    h = ending_in(rows)
    q, scale, h_q, h_scale = swiglu.swiglu_quantize(h, ending_in(score), all_rows(device), spec, True)
    for (got, got_scale), (want, want_scale) in (
        ((q, scale), recipe.swiglu_quantize(rows, score, spec)),
        ((h_q, h_scale), recipe.quantize_rows(rows)),
    ):
        assert_same_bits(got_scale[LAST, -1:], want_scale[:, -1:])
        got, want = (recipe.dequantize(x[LAST, LAST], want_scale[:, -1:]) for x in (got, want))
        torch.testing.assert_close(got, want, rtol=0.13, atol=1e-2)

    d = randn(generator, BLOCK, H).bfloat16()
    args = (ending_in(d), h, None, ending_in(score), all_rows(device), spec, True)
    got = swiglu.swiglu_quantize_backward(*args)
    want = recipe.swiglu_quantize_backward(d, rows, score, spec)
    for i in (0, 2):
        got_rows, want_rows = (recipe.dequantize(x[i][-64:], x[i + 1][-64:]) for x in (got, want))
        torch.testing.assert_close(got_rows, want_rows, rtol=0.13, atol=1e-2)
    torch.testing.assert_close(got[4][-64:], want[4][-64:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", TRANSPOSE_MODES)
@pytest.mark.parametrize("of_tokens", [False, True])
def test_transpose_pair(interpreted_axes, generator, device, mode, of_tokens):
    interpreted_axes[1] = [D // BLOCK - 1, -1]
    (x, last_x), (dy, last_dy) = expert_rows(generator, D), expert_rows(generator, BLOCK)
    maps, order = (), ()
    if of_tokens:
        order = (torch.randperm(BLOCK, generator=generator, device=device).int(),)
        token_M = torch.full((M,), -1, dtype=torch.int32, device=device)
        token_M[LAST] = M - BLOCK + order[0]
        # Scales as far apart as those of a payload.
        far_scale = torch.empty(M, D, dtype=torch.uint8, device=device)[:, : D // BLOCK]
        far_scale[LAST] = last_x[1].view(torch.uint8)
        x, maps = (x[0], far_scale.view(E8M0)), (token_M,)
    got = transpose.transpose_pair(*x, *dy, all_rows(device), mode, *maps)
    want = recipe.transpose_pair(*last_x, *last_dy, all_rows(device), mode, *order)
    for i in (0, 2):
        assert_same_bits(got[i][LAST, LAST], want[i][LAST])
        assert_same_bits(got[i + 1][-1:, -1:], want[i + 1][-1:])


def test_permute_rows(interpreted_axes, generator, device):
    blocks = -(-D // permute.COLUMNS)
    interpreted_axes[0] = [M // BLOCK, *range(-2 * blocks, 0)]  # the last of scales and padding, and of values
    tokens = 2 * permute.TOKENS
    q, scale = fp8_rows(generator, tokens, D), column_major_scale(generator, tokens, D).contiguous()
    row_TK = torch.full((M, 1), -1, dtype=torch.int32, device=device)
    row_TK[-tokens:, 0] = torch.arange(M, M + tokens, device=device)
    token_M = torch.full((M + BLOCK,), -1, dtype=torch.int32, device=device)
    token_M[M : M + tokens] = torch.arange(M - tokens, M, device=device)
    got = permute.permute_rows(ending_in(q), ending_in(scale), row_TK, token_M, all_rows(device) + BLOCK)
    token = torch.full((BLOCK,), -1, dtype=torch.int32, device=device)
    token[:tokens] = torch.arange(tokens, device=device)
    assert_same_bits([t[LAST] for t in got], recipe.permute_rows(q, scale, token))


def far_apart(x_TK: torch.Tensor) -> torch.Tensor:
    """The same rows, so far apart that the last one begins 2**31 elements behind the first."""
    T, K = x_TK.shape
    stride = 2**31 // (T - 1)
    out = torch.empty((T - 1) * stride + K, dtype=x_TK.dtype, device=x_TK.device).as_strided((T, K), (stride, 1))
    return out.copy_(x_TK)


def test_strided_choices(interpreted_axes, generator, device):
    tokens, top_k, ranks, experts = 129, 2, 2, 3
    interpreted_axes[0] = range(1 + tokens // routing.MAX_BLOCK)  # all
    ids = torch.rand(tokens, ranks * experts, generator=generator, device=device).topk(top_k).indices.int()
    scores, capacity = randn(generator, tokens, top_k), recipe.row_capacity(tokens * top_k, ranks * experts)
    far_ids, far_scores = far_apart(ids), far_apart(scores)
    got = routing.expert_routing(far_ids, far_scores, ranks * experts, capacity)
    assert_same_bits(got, recipe.expert_routing(ids, scores, ranks * experts, capacity))
    sent_TK, token_C, counts_N = recipe.dispatch_routing(ids, ranks, experts)
    got_sent, _, got_counts = routing.dispatch_routing(far_ids, ranks, experts)
    assert_same_bits((got_sent, got_counts), (sent_TK, counts_N))

    token_C = token_C[: int(counts_N[:, 0].sum())]
    interpreted_axes[0] = range(-(-token_C.shape[0] // permute.PACK_ROWS) + -(-tokens // permute.TOKENS))  # all
    q, scale = fp8_rows(generator, tokens, 128), column_major_scale(generator, tokens, 128).contiguous()
    args = (q, scale, token_C, sent_TK, ids, scores, experts)
    want = ops.pack_dispatch(*(arg.cpu() if isinstance(arg, torch.Tensor) else arg for arg in args))
    got = permute.pack_dispatch(*args[:4], far_ids, far_scores, experts)
    assert_same_bits(got.cpu(), want)


def test_payloads(interpreted_axes, generator, device):
    index = torch.arange(M, dtype=torch.int32, device=device)
    sent_TK, score = index.unsqueeze(1), randn(generator, M, 1)
    q, scale = fp8_rows(generator, BLOCK, D), column_major_scale(generator, BLOCK, D).contiguous()
    tails, values = M // permute.PACK_ROWS, BLOCK // permute.TOKENS * -(-D // permute.COLUMNS)
    interpreted_axes[0] = [*range(tails - BLOCK // permute.PACK_ROWS, tails), *range(-values, 0)]
    payload = permute.pack_dispatch(ending_in(q), ending_in(scale), index, sent_TK, sent_TK, score, 2 * M)
    got = [t[LAST].contiguous() for t in ops.unpack_dispatch(payload, D, 1)]
    assert_same_bits(got, (q, scale, sent_TK[LAST], score[LAST]))
    del payload

    blocks = -(-D // permute.SUM_COLUMNS)
    interpreted_axes[0] = range(-4 * blocks, 0)
    y, ds = randn(generator, BLOCK, D).bfloat16(), randn(generator, M)
    payload = permute.pack_combine(ending_in(y), ds, sent_TK)
    rows, ds_C1 = ops.unpack_combine(payload, D, 1)
    assert_same_bits(rows[-4:].contiguous(), y[-4:])
    assert_same_bits(ds_C1[-4:, 0].contiguous(), ds[-4:])
    # Its rows are a payload's.
    assert_same_bits(permute.unpermute_sum(rows, sent_TK, torch.bfloat16)[-4:], y[-4:])
