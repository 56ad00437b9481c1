"""Temporary: python gpu_try.py compile|bench|tiny"""
import json, os, random, statistics, sys, time
import torch, triton
from titan_fp8moe import recipe
from titan_fp8moe.kernels import grouped_mm as ours, grouped_mm_plain as plain
from titan_fp8moe.recipe import TILE
BF16 = torch.bfloat16
LAYERS = [(32768, 8, 7168, 2048), (32768, 32, 7168, 2048), (98304, 64, 2048, 1408), (98304, 8, 2048, 1408)]
S = [("f", M, E, N, K) for M, E, D, H in LAYERS for N, K in ((2 * H, D), (D, H), (H, D), (D, 2 * H))]
S += [("w", M, E, N, K) for M, E, D, H in LAYERS for N, K in ((2 * H, D), (D, H))]
S += [("f", 2048, 8, 4096, 7168), ("f", 2048, 2, 2048, 1408), ("f", 8192, 64, 2816, 2048), ("f", 32768, 256, 4096, 2048), ("w", 2048, 2, 4096, 7168), ("w", 8192, 64, 2816, 2048), ("w", 16384, 128, 2048, 1408)]
def ends(M, E):
    t = (torch.linspace(0.7, 1.3, E) * (M / E / TILE)).round().long(); t[E // 2] += M // TILE - t.sum()
    return (t[torch.randperm(E, generator=torch.Generator().manual_seed(0))] * TILE).cumsum(0).to(torch.int32).cuda()
def fops(M, N, K, E):
    (a, s) = recipe.quantize_rows(torch.randn(M, K, device="cuda", dtype=BF16)); (b, t) = recipe.quantize_weight(torch.randn(E, N, K, device="cuda", dtype=BF16))
    return a, recipe.column_major(s), b, t
def wops(M, N, K):
    x, dy = (torch.randn(M, n, device="cuda", dtype=BF16) for n in (K, N))
    b, bs, a, as_ = recipe.transpose_pair(*recipe.quantize_rows(x), *recipe.quantize_rows(dy))
    return a, as_, b, bs
def job(j):
    kind, E, N, K, dt, impl = j
    e = torch.tensor((0,) * (E - 1) + (256,), dtype=torch.int32, device="cuda"); M = 256
    z = lambda *s: torch.zeros(*s, dtype=torch.uint8, device="cuda").view(recipe.FP8)
    u = lambda *s: torch.zeros(*s, dtype=torch.uint8, device="cuda").view(recipe.E8M0)
    mod = plain if impl else ours
    if kind == "f": mod.grouped_mm(z(M, K), u(K // 128, M).t(), z(E, N, K), u(E, N // 128, K // 128), e, dt)
    else: mod.grouped_mm_wgrad(z(N, M), u(N // 128, M // 128), z(K, M), u(K // 128, M // 128), e, dt)
    torch.cuda.synchronize()
def tiny():
    e = torch.tensor((128, 128, 384), dtype=torch.int32, device="cuda")
    print(ours.grouped_mm(*fops(512, 384, 384, 3), e, BF16).shape, ours.grouped_mm_wgrad(*wops(512, 384, 384), e, torch.float32).shape); torch.cuda.synchronize()
def bench(rounds=3, rep=20):
    rec = []
    for kind, M, E, N, K in S:
        off = ends(M, E); one = torch.ones((), device="cuda"); c = {}
        if kind == "f":
            o = fops(M, N, K, E); bT = o[2].transpose(1, 2); s1, s2 = torch.ones(M, device="cuda"), torch.ones(E, N, device="cuda")
            x, wt = torch.randn(M, K, device="cuda", dtype=BF16), torch.randn(E, N, K, device="cuda", dtype=BF16).transpose(1, 2)
            c["ours"] = lambda: ours.grouped_mm(*o, off, BF16)
            c["plain"] = lambda: plain.grouped_mm(*o, off, BF16)
            c["dense"] = lambda: torch._scaled_mm(o[0], bT[0], one, one, out_dtype=BF16, use_fast_accum=True)
            c["bf16"] = lambda: torch._grouped_mm(x, wt, offs=off, out_dtype=BF16)
        else:
            o = wops(M, N, K); bT = o[2].t(); s1, s2 = torch.ones(E * N, device="cuda"), torch.ones(E * K, device="cuda")
            x, wt = torch.randn(M, K, device="cuda", dtype=BF16), torch.randn(M, N, device="cuda", dtype=BF16)
            c["ours"] = lambda: ours.grouped_mm_wgrad(*o, off, BF16)
            c["fp32"] = lambda: ours.grouped_mm_wgrad(*o, off, torch.float32)
            c["plain"] = lambda: plain.grouped_mm_wgrad(*o, off, BF16)
            c["dense"] = lambda: torch._scaled_mm(o[0], bT, one, one, out_dtype=BF16, use_fast_accum=True)
            c["bf16"] = lambda: torch._grouped_mm(wt.t(), x, offs=off, out_dtype=BF16)
        c["rowwise"] = lambda: torch._scaled_grouped_mm(o[0], bT, s1, s2, offs=off, out_dtype=BF16, use_fast_accum=True)
        t = {k: [] for k in c}; rest = {k: [] for k in c}
        for k in c: c[k]()
        torch.cuda.synchronize()
        for _ in range(rounds):
            for k in random.sample(list(c), len(c)): t[k].append(triton.testing.do_bench(c[k], warmup=8, rep=rep, return_mode="median"))
        for _ in range(5):
            for k in random.sample(list(c), len(c)):
                torch.cuda.synchronize(); time.sleep(0.04); torch.cuda._sleep(1000000)
                e0, e1 = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                e0.record(); c[k](); e1.record(); torch.cuda.synchronize(); rest[k].append(e0.elapsed_time(e1))
        tf = lambda ms: round(2 * M * N * K / statistics.median(ms) * 1e-9)
        print(kind, M, E, N, K, " ".join(f"{k} {tf(t[k])}/{tf(rest[k])}" for k in c), flush=True)
if __name__ == "__main__":
    if sys.argv[1] == "compile":
        import multiprocessing as mp
        t = time.time()
        jobs = sorted({(k, E, N, K, d, i) for k, M, E, N, K in S for d, i in ((BF16, 0), (BF16, 1), (torch.float32, 0)) if k == "w" or d == BF16}, key=str)
        with mp.get_context("spawn").Pool(15) as p:
            for _ in p.imap_unordered(job, jobs): pass
        print("compiled", len(jobs), f"{time.time()-t:.0f}s")
    else: globals()[sys.argv[1]]()
