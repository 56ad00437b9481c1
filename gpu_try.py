"""Temporary: variants of the Hopper kernels. python gpu_try.py compile|check|bench"""
import random, sys, time, statistics, itertools, os
import torch, triton
from titan_fp8moe import recipe
from titan_fp8moe.kernels import grouped_mm as plain, grouped_mm_hopper as gh, wgrad_hopper as wh
from titan_fp8moe.recipe import TILE
BF16 = torch.bfloat16
FV = {"base": {}, "u2": dict(unroll=2), "early": dict(early=True), "earlyu2": dict(early=True, unroll=2),
 "s16": dict(super_row=16), "u2s16": dict(unroll=2, super_row=16), "u2s32": dict(unroll=2, super_row=32)}
WV = {k: FV[k] for k in ("base", "u2", "early", "s16", "u2s16", "u2s32")}
CV = ("base", "u2", "early")
FS = [(32768, 8, 4096, 7168), (32768, 8, 7168, 2048), (98304, 64, 2816, 2048), (98304, 64, 1408, 2048)]
WS = [(32768, 8, 4096, 7168), (98304, 64, 2048, 1408)]
CF = [(384, 256, 128, (128, 256, 384)), (768, 384, 640, (0, 256, 256, 640, 640)), (1408, 1408, 1408, (128, 1408)), (4096, 512, 2048, (1024, 1024, 4096))]
def ends(M, E):
    t = (torch.linspace(0.7, 1.3, E) * (M / E / TILE)).round().long(); t[E // 2] += M // TILE - t.sum()
    return (t[torch.randperm(E, generator=torch.Generator().manual_seed(0))] * TILE).cumsum(0).to(torch.int32).cuda()
def fops(M, N, K, E):
    x = torch.randn(M, K, device="cuda", dtype=BF16) * (torch.rand(M, 1, device="cuda") * 4 + .1).to(BF16)
    w = torch.randn(E, N, K, device="cuda", dtype=BF16)
    (a, s), (b, t) = recipe.quantize_rows(x), recipe.quantize_weight(w)
    return a, recipe.column_major(s), b, t
def wops(M, N, K):
    x, dy = (torch.randn(M, n, device="cuda", dtype=BF16) for n in (K, N))
    b, bs, a, as_ = recipe.transpose_pair(*recipe.quantize_rows(x), *recipe.quantize_rows(dy))
    return a, as_, b, bs
def job(j):
    kind, kw, dt, M, N, K, e = j
    off = torch.tensor(e, dtype=torch.int32, device="cuda")
    (a, b) = (torch.zeros(M, K, device="cuda").to(recipe.FP8), torch.zeros(len(e), N, K, device="cuda").to(recipe.FP8)) if kind == "f" else (torch.zeros(N, M, device="cuda").to(recipe.FP8), torch.zeros(K, M, device="cuda").to(recipe.FP8))
    u = lambda *s: torch.zeros(*s, dtype=torch.uint8, device="cuda").view(recipe.E8M0)
    if kind == "f": gh.grouped_mm(a, u(K // 128, M).t(), b, u(len(e), N // 128, K // 128), off, dt, **kw)
    else: wh.grouped_mm_wgrad(a, u(N // 128, M // 128), b, u(K // 128, M // 128), off, dt, **kw)
    torch.cuda.synchronize()
def jobs():
    out = []
    for kind, V, S in (("f", FV, FS), ("w", WV, WS)):
        for name, kw in V.items():
            for M, E, N, K in S: out.append((kind, kw, BF16, 256, N, K, (0,) * (E - 1) + (256,)))
            for M, N, K, e in CF * (name in CV):
                for dt in (BF16, torch.float32): out.append((kind, kw, dt, 256, N, K, (0,) * (len(e) - 1) + (256,)))
    return out
def rel(o, r): return ((o.double() - r).norm() / r.norm().clamp_min(1e-300)).item()
def check():
    torch.manual_seed(0); bad = 0
    torch.utils.deterministic.fill_uninitialized_memory = True
    for M, N, K, e in CF:
        off = torch.tensor(e, dtype=torch.int32, device="cuda"); E = len(e); n = e[-1]
        ops, w = fops(M, N, K, E), wops(M, N, K)
        st = [0] + list(e[:-1])
        A = recipe.dequantize(ops[0], ops[1], torch.float64)
        ref = torch.cat([A[s:t] @ recipe.dequantize(ops[2][i], ops[3][i], torch.float64).t() for i, (s, t) in enumerate(zip(st, e))])
        WA, WB = recipe.dequantize(w[0], w[1], torch.float64), recipe.dequantize(w[2], w[3], torch.float64)
        wref = torch.stack([WA[:, s:t] @ WB[:, s:t].t() for s, t in zip(st, e)])
        for dt, tol in ((BF16, 2e-3), (torch.float32, 2e-4)):
            r = {}
            for k, v in ((k, FV[k]) for k in CV):
                x = torch.full((M, N), float("nan"), dtype=dt, device="cuda"); del x
                r["f" + k] = rel(gh.grouped_mm(*ops, off, dt, **v)[:n], ref)
            for k, v in ((k, WV[k]) for k in CV): r["w" + k] = rel(wh.grouped_mm_wgrad(*w, off, dt, **v), wref)
            p = rel(plain.grouped_mm(*ops, off, dt)[:n], ref), rel(plain.grouped_mm_wgrad(*w, off, dt), wref)
            wrong = {k: f"{x:.1e}" for k, x in r.items() if not x < tol}
            bad += len(wrong)
            print(M, N, K, e, dt, "plain %.1e %.1e" % p, "max ours %.2e" % max(r.values()), "WRONG" if wrong else "ok", wrong, flush=True)
    print("bad", bad)
def bench(rounds=4, rep=25):
    refs_only = {}
    for kind, V, S in (("f", FV, FS), ("w", WV, WS)):
        for M, E, N, K in S:
            off = ends(M, E); one = torch.ones((), device="cuda")
            o = fops(M, N, K, E) if kind == "f" else wops(M, N, K)
            c = {}
            mod, pl = (gh.grouped_mm, plain.grouped_mm) if kind == "f" else (wh.grouped_mm_wgrad, plain.grouped_mm_wgrad)
            for k, v in V.items(): c[k] = (lambda v=v: mod(*o, off, BF16, **v))
            c["plain"] = lambda: pl(*o, off, BF16)
            if kind == "f":
                bT = o[2].transpose(1, 2); s1, s2 = torch.ones(M, device="cuda"), torch.ones(E, N, device="cuda")
                c["dense"] = lambda: torch._scaled_mm(o[0], bT[0], one, one, out_dtype=BF16, use_fast_accum=True)
            else:
                bT = o[2].t(); s1, s2 = torch.ones(E * N, device="cuda"), torch.ones(E * K, device="cuda")
                c["dense"] = lambda: torch._scaled_mm(o[0], bT, one, one, out_dtype=BF16, use_fast_accum=True)
            c["rowwise"] = lambda: torch._scaled_grouped_mm(o[0], bT, s1, s2, offs=off, out_dtype=BF16, use_fast_accum=True)
            t = {k: [] for k in c}; rest = {k: [] for k in c}
            for k in c: c[k]()
            torch.cuda.synchronize()
            for _ in range(rounds):
                for k in random.sample(list(c), len(c)): t[k].append(triton.testing.do_bench(c[k], warmup=8, rep=rep, return_mode="median"))
            for _ in range(5):
                for k in random.sample(list(c), len(c)):
                    torch.cuda.synchronize(); time.sleep(0.05)
                    torch.cuda._sleep(1000000); x, y = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    x.record(); c[k](); y.record(); torch.cuda.synchronize(); rest[k].append(x.elapsed_time(y))
            tf = lambda ms: 2 * M * N * K / statistics.median(ms) * 1e-9
            print(kind, M, E, N, K, " ".join(f"{k} {tf(t[k]):.0f}/{tf(rest[k]):.0f}" for k in c), flush=True)
if __name__ == "__main__":
    if sys.argv[1] == "compile":
        import multiprocessing as mp
        t = time.time(); ctx = mp.get_context("spawn")
        with ctx.Pool(15) as p:
            for _ in p.imap_unordered(job, jobs()): pass
        print("compiled", len(jobs()), f"{time.time()-t:.0f}s")
    else: globals()[sys.argv[1]]()
