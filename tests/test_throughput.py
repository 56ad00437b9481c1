"""The parts of experiments/throughput that decide what its numbers mean, and what is left when something fails."""

import contextlib
import functools
import json
import math
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torchtitan.models.moe import kernels as torchtitan_kernels
from torchtitan.models.moe.moe import MoE

from experiments import ablations, records
from experiments.reference import relative_error
from experiments.throughput import first_step, fused_bf16, layer, sweep, train, variants
from experiments.throughput.routing import balanced_random_experts
from experiments.throughput.train import Run
from tests.processes import run_script
from titan_fp8moe import ops

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("tokens,top_k,experts", [(1024, 8, 32), (512, 8, 8), (0, 2, 4)])
def test_balanced_random_experts(tokens, top_k, experts):
    chosen = balanced_random_experts(tokens, top_k, experts, torch.device("cpu"))
    assert chosen.shape == (tokens, top_k)
    assert (chosen.sort(1).values.diff(dim=1) > 0).all(), "a token has an expert twice"
    assert (torch.bincount(chosen.flatten(), minlength=experts) == tokens * top_k // experts).all()


def test_balanced_random_experts_spread_like_uniform_ones():
    """A token's 6 of 64 experts touch as many of 4 ranks as a uniform draw does; consecutive ones touch 1.25."""
    ranks = balanced_random_experts(4096, 6, 64, torch.device("cpu")) // 16
    touched = torch.stack([(ranks == r).any(1) for r in range(4)]).sum(0).double().mean()
    assert float(touched) == pytest.approx(4 * (1 - math.comb(48, 6) / math.comb(64, 6)), abs=0.03)


def test_times_of_several_processes():
    """The medians of each process's rounds, for variants that ran in all; all else is the first process's."""
    first, second = ({"ms": {"fp8": [1.0 * n, 9.0, 2.0 * n]}, "saved": n} for n in (1, 2))
    second["ms"]["bf16"] = [5.0]
    assert layer.median_of([first]) is first
    found = layer.median_of([first, second])
    assert found == {"ms": {"fp8": [2.0, 4.0]}, "saved": 1, "processes": 2}


TINY = variants.Shape("tiny", 64)
KEPT = "fp8 with weights kept for 4 microbatches"


@torch.library.custom_op("titan_fp8moe_tests::fill_indices", mutates_args=())
def fill_indices(counts: Tensor, starts: Tensor, offsets: Tensor, experts: int, ranks: int, length: int) -> Tensor:
    """torchtitan's function for CPUs, whose loop over values no graph can hold; its Triton kernel can be in one."""
    return FILL_INDICES(counts, starts, offsets, experts, ranks, length)


FILL_INDICES = torchtitan_kernels.fill_indices_cpu
fill_indices.register_fake(lambda counts, *rest: counts.new_empty(rest[-1], dtype=torch.int32))


def test_variants_of_a_layer(monkeypatch):
    """Each computes the layer; those compiled whole are one graph, compiled once; the weights' quantization is inside
    one of two that are equal bit for bit, and of the ablations one changes the gradients of weights."""
    monkeypatch.setattr(torchtitan_kernels, "fill_indices_cpu", fill_indices)
    monkeypatch.setattr(ablations, "requantize", ablations.requantize.__wrapped__)  # here eager, for speed
    for name, op in variants._OPS.items():  # which variants replace: put back behind the test
        monkeypatch.setattr(ops, name, op)
    names = ["bf16 whole", "bf16 fused", "fp8 with weight quantization", "fp8"]
    names += [KEPT, "fp8 with bf16 shared experts", *variants.ABLATIONS]
    chosen, missing = layer.choose(TINY, 1, names)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    bench = variants.Bench(TINY, 1, chosen)
    assert not missing and not layer.warm_up(bench)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 8
    result = layer.measure(bench, {}, 1, 1e-3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 8
    outs = {name: bench.forwards[name]().detach() for name in names}
    with torch.autocast("cpu", torch.bfloat16):
        eager = bench.layers["bf16 whole"](bench.x).detach()
    errors = {name: relative_error(out, eager) for name, out in outs.items()}
    assert max(errors["bf16 whole"], errors["bf16 fused"]) < 0.01
    assert 0.01 < errors["fp8 with bf16 shared experts"] < errors["fp8"] < 0.1
    assert torch.equal(outs["fp8"], outs["fp8 with weight quantization"]) and torch.equal(outs["fp8"], outs[KEPT])
    for name in names:
        bench.first.tokens_per_expert.zero_()
        bench.step(name)
        forwards = 4 if name == KEPT else 1
        assert bench.first.tokens_per_expert.sum() == TINY.tokens * variants.MODELS["tiny"].top_k * forwards, name
    grads = {}
    for name in ("fp8", *variants.ABLATIONS):
        bench.step(name)
        grads[name] = [p.grad.clone() for p in bench.first.experts.parameters()]
    requantized = [relative_error(a, b) for a, b in zip(grads["fp8 requantize"], grads["fp8"], strict=True)]
    assert all(0 < error < 0.05 for error in requantized)
    assert all(map(torch.equal, grads["fp8 unfused permute"], grads["fp8"]))
    assert layer.references("fp8 requantize") == [*layer.REFERENCES, "fp8"]
    assert {*result["saved_bytes_per_token"]} == {*names} - {"fp8 with weight quantization", KEPT}


@pytest.mark.parametrize("amp", [True, False], ids=["autocast of fp32", "bf16"])
def test_fused_experts_are_torchtitans(amp):
    """The strongest bf16 computes torchtitan's layer and all of its gradients, in one graph."""
    torch.manual_seed(0)
    arguments = TINY.moe_args(1)
    arguments._debug_force_load_balance = False  # groups of many sizes
    moe = MoE(arguments, 256, 128)
    with torch.no_grad():
        moe.init_weights(0.02, torch.device("cpu"))
    moe = moe if amp else moe.bfloat16()
    x = torch.randn(2, 32, 256, dtype=moe.experts.w1.dtype).requires_grad_()
    leaves, dout = {"x": x} | dict(moe.named_parameters()), torch.randn_like(x)

    def step(call: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            out = call(x)
        return {"out": out.detach()} | dict(zip(leaves, torch.autograd.grad(out, leaves.values(), dout), strict=True))

    want = step(moe)
    moe.__class__ = fused_bf16.FusedMoE
    got = step(torch.compile(moe, fullgraph=True, backend="aot_eager"))
    assert max(relative_error(got[name], tensor) for name, tensor in want.items()) < 0.01
    assert {name: tensor.dtype for name, tensor in got.items()} == {name: t.dtype for name, t in want.items()}


def test_variants_of_a_shape():
    """Nothing compiles whole under expert parallelism, and a layer without shared experts has one variant less."""
    shape = variants.Shape("Qwen3-30B", 4096)
    names = ["bf16", "bf16 whole", "fp8", "fp8 with bf16 shared experts"]
    chosen, missing = layer.choose(shape, 2, names)
    assert {name: v.compiled for name, v in chosen.items()} == {"bf16": "parts", "fp8": "parts"}
    assert missing.keys() == {*names} - {"bf16", "fp8"}
    chosen, _ = layer.choose(shape, 1, ["fp8", "bf16"])
    assert {name: v.compiled for name, v in chosen.items()} == {"fp8": "whole", "bf16": "parts"}
    assert shape.moe_args(2).num_experts == 256


def result_of(gpus: int) -> dict:
    ms = {"bf16": [10.0, 30.0, 8.0], "bf16 whole": [9.0], "fp8": [4.0, 5.0, 6.0], "fp8 with weight quantization": [8.0]}
    ms["fp8 requantize"] = [4.0]
    saved = {"bf16": 8.0, "fp8": 4.0, "fp8 requantize": 6.0}
    shape = variants.Shape("671B", 4096)._asdict()
    return dict(shape=shape, gpus=gpus, failed={}, ms=ms, saved_bytes_per_token=saved)


@pytest.mark.parametrize("release,named", [("2.11.0+cu130", ""), ("2.14.1", ", torch 2.14.1")])
def test_names_of_layer_records(release, named, monkeypatch):
    monkeypatch.setattr(torch, "__version__", release)
    found = layer.records(result_of(2))
    assert {r["shape"] for r in found} == {f"671B, 64 experts per GPU, 4096 tokens{named}, 2 GPUs"}
    assert {(r["name"], r["reference"]): r["speedup"] for r in found} == {
        ("moe_layer", "bf16"): 2.0,
        ("moe_layer", "bf16 whole"): 1.8,
        ("moe_layer_with_weights", "bf16"): 1.25,
        ("moe_layer_with_weights", "bf16 whole"): 1.125,
        ("moe_layer requantize", "bf16"): 2.5,
        ("moe_layer requantize", "bf16 whole"): 2.25,
        ("moe_layer requantize", "fp8"): 1.25,
        ("moe_layer saved", "bf16"): 2.0,
        ("moe_layer saved requantize", "bf16"): pytest.approx(4 / 3),
        ("moe_layer saved requantize", "fp8"): pytest.approx(2 / 3),
    }


def stub_run(folder: Path, log: str, program: str = "import time; time.sleep(60)") -> Run:
    run = Run.__new__(Run)
    run.variant, run.steps, run.seed, run.log = "bf16", 12, 0, folder / "log"
    run.log.write_text(log)
    run.process = subprocess.Popen([sys.executable, "-c", program])
    return run


@pytest.mark.parametrize(
    "log,program,answer",
    [
        ("[rank0]:[titan] - step: 12  loss: 1\n", "", None),
        ("[rank1]:[titan] - step: 12  loss: 1\n", "raise SystemExit(1)", "ended with exit code 1"),
        ("[rank1]:torch.OutOfMemoryError: CUDA out of memory.\n", "import time; time.sleep(60)", "out of memory"),
        ("Last error:\nFailed to CUDA calloc async 4 bytes\n", "import time; time.sleep(60)", "out of memory"),
        ("[rank0]:[titan] - step: 10  loss: 1\n", "import time; time.sleep(60)", "not done after 1 s"),
    ],
)
def test_end_of_a_run(tmp_path: Path, log, program, answer):
    run = stub_run(tmp_path, log, program)
    if "sleep" not in program:
        run.process.wait()
    assert run.wait(1) == answer
    run.process.kill()
    run.process.wait()


def climb(fitting: int) -> dict[int, bool]:
    """What a curve tries, where so many sequences fit."""
    fits = {}
    while batch := sweep.next_batch(fits):
        assert batch not in fits and len(fits) < 12
        fits[batch] = batch <= fitting
    return fits


@pytest.mark.parametrize("fitting", [1, 30, 100])
def test_the_sweep_finds_the_largest_batch(fitting):
    fits = climb(fitting)
    largest = max(batch for batch, fitted in fits.items() if fitted)
    assert largest <= fitting <= largest + largest // 8
    assert not any(climb(0).values())


def point(variant: str, batch: int, speed: float | None, error: str | None = None) -> dict:
    return dict(variant=variant, local_batch=batch, tokens_per_second=speed, memory_gib=10.0 * batch, error=error)


def test_records_of_a_sweep():
    """The fastest point and the largest batch differ."""
    points = [point("bf16_fused:a", 4, 50.0), point("bf16_fused:b", 4, 40.0), point("bf16_fused:b", 8, 45.0)]
    points += [point("bf16_fused:a", 8, None, train.OUT_OF_MEMORY), point("fp8_flow", 4, 90.0)]
    points += [point("fp8_flow", 6, 80.0), point("fp8_flow:c", 4, None, "ended with exit code 1")]
    found = sweep.records(points, "16b", "shape")
    assert [(r["name"], r["value"], r["reference_value"], r["speedup"]) for r in found] == [
        ("train_16b fastest", 90.0, 50.0, 1.8), ("train_16b largest local batch", 6, 8, 0.75),
    ]  # fmt: skip
    assert found[0]["points"]["reference"]["variant"] == "bf16_fused:a"
    assert sweep.records(points[:4], "16b", "shape") == []


def test_a_point_of_a_sweep(tmp_path: Path, monkeypatch):
    """Median of the steps after the warm-up; a run without memory has no speed."""
    step = "[rank0]:[titan] step: {:2}  loss:  8.2  grad_norm:  1.2  memory: {}GiB(97.78%)  tps: {}  tflops: 1\n"
    log = "".join(step.format(n, 60 + n, speed) for n, speed in ((2, 1), (4, 5), (6, "9,300"), (8, 800), (12, 900)))
    monkeypatch.setattr(sweep, "Run", lambda *_: stub_run(tmp_path, log))
    monkeypatch.setattr(Run, "begin", lambda self: None)
    monkeypatch.setattr(Run, "end", lambda self: self.process.kill() or self.process.wait())
    found = sweep.measure(*sweep.prepare("fp8_flow", 8, None), 5)
    assert (found["tokens_per_second"], found["memory_gib"]) == (900, 72)
    log = f"{log[: log.index('step: 12')]}\n[rank0]:torch.OutOfMemoryError: CUDA out of memory."
    found = sweep.measure(*sweep.prepare("fp8_flow", 8, None), 5)
    assert found["error"] == train.OUT_OF_MEMORY and found["tokens_per_second"] is None


def test_checkpointing_of_a_variant():
    args = train.parser("").parse_args(["--out", "o", "--layers", "6", "--attention", "sdpa"])
    found = {mode: train.overrides(f"bf16_fused:checkpointing={mode}", args, 0) for mode in train.CHECKPOINTING}
    assert "--model.converters=balanced_random,save_grouped_mm,fused_bf16,whole_blocks" in found["saved"]
    assert [flag for flag in found["none"] if "check" in flag] == ["--activation_checkpoint.mode=none"]
    assert [flag for flag in found["full"] if "check" in flag] == ["--activation_checkpoint.mode=full"]
    ours = train.overrides("fp8_flow:checkpointing=none,save_h=fp8", args, 0)
    assert "--fp8_flow_moe.save_h=fp8" in ours and not any("fp8_flow_moe.checkpointing" in flag for flag in ours)
    args.gpus = 4
    assert "--parallelism.expert_parallel_degree=4" in train.overrides("bf16", args, 0)
    assert "--parallelism.expert_parallel_degree=1" in train.overrides("bf16_fused:ep=1", args, 0)
    train.require_fit(["bf16_fused:ep=1", "fp8_flow"], 4)
    with pytest.raises(SystemExit, match="bf16_fused compile blocks as one graph.*add ep=1"):
        train.require_fit(["bf16_fused:ep=1", "bf16_fused"], 4)
    for variant in ("bf17", "bf16:checkpointing=some"):
        with pytest.raises(SystemExit, match=f"no variant {variant}"):
            train.overrides(variant, args, 0)


def test_a_variant_under_torchtitan_0_3(tmp_path: Path, monkeypatch):
    """Its config is named, its options are flags, and its records and shapes do not mix with 0.2.2's."""
    monkeypatch.setattr(train, "WORK", tmp_path)
    options = ["--out", "o", "--gpus", "2", "--layers", "6", "--torchtitan", "0.3.0", "--cuda-graphs"]
    args = train.parser("").parse_args(options)
    shape = train.finish(args, "train")
    assert shape == "16B, 6 layers, flex, local batch 4, forced routing, 2 GPUs, CUDA graphs"
    assert train.record_model(args) == "16b_titan03"
    flags = train.overrides_03("fp8_flow:checkpointing=full,cache_weights=true,save_h=fp8", args, 3)
    assert "--config=16b:6:full:fp8_flow" in flags and "--training.no-disable_cuda_graphs" in flags
    assert {"--fp8_flow_moe.cache_weights", "--fp8_flow_moe.save_h=fp8", "--debug.seed=3"} <= {*flags}
    args.cuda_graphs = False
    assert {"--training.disable_cuda_graphs", "--config=16b:6:selective:bf16"} <= {*train.overrides_03("bf16", args, 0)}
    for variant in ("bf16_whole", "bf16:checkpointing=saved"):
        with pytest.raises(SystemExit, match=f"no variant {variant}"):
            train.overrides_03(variant, args, 0)


def test_records_come_from_a_commit(monkeypatch):
    for commit, trial in (("c1", False), ("c1+", True)):
        monkeypatch.setattr(records, "commit", lambda commit=commit: commit)
        records.require_commit(trial)
    for commit, message in (("c1+", "files differ from commit c1; commit them"), (None, "there is no checkout")):
        monkeypatch.setattr(records, "commit", lambda commit=commit: commit)
        with pytest.raises(SystemExit, match=message):
            records.require_commit(False)


def test_an_invocation_goes_on_with_the_runs_that_it_lacks(tmp_path: Path, monkeypatch):
    ran: list[tuple[str, int]] = []
    monkeypatch.setattr(train, "WORK", tmp_path)
    monkeypatch.setattr(train, "other_torch", list)
    monkeypatch.setattr(train, "write_records", lambda path, found: None)
    monkeypatch.setattr(train, "begin", lambda trial: None)

    def in_turn(todo, args):
        for variant, seed in todo[:2]:
            ran.append((variant, seed))
            error = "out of memory" if len(ran) == 2 else None
            figures = {"tokens_per_second": [], "median_tokens_per_second": None, "peak_memory_gib": None, "losses": {}}
            yield {"variant": variant, "seed": seed, "error": error} | figures

    monkeypatch.setattr(train, "in_turn", in_turn)
    monkeypatch.setattr("sys.argv", ["train", "--out", str(tmp_path), "--variants", "bf16", "fp8_flow", "--seeds", "0"])
    for state, count in (("a", 2), ("a", 3), ("a", 3), ("b", 5)):
        made = dict(hardware=state, versions={}, commit="c")
        monkeypatch.setattr(train, "environment", lambda made=made: made)
        with pytest.raises(SystemExit) if count == 2 else contextlib.nullcontext():
            train.main()
        assert len(ran) == count
    assert ran[1] == ran[2]  # the failed one


def test_names_and_shapes_of_training_records(tmp_path: Path, monkeypatch):
    """A variant is compared with bf16 and with the defaults; the shape says what was trained."""
    monkeypatch.setattr(train, "WORK", tmp_path)
    monkeypatch.setattr(torch, "__version__", "2.11.0")  # another is a part of the shape
    args = train.parser("").parse_args(
        ["--out", "o", "--gpus", "1", "--layers", "6", "--attention", "sdpa", "--", "--training.seq_len=8192"]
    )
    shape = train.finish(args, "train")
    assert shape == "16B, 6 layers, sdpa, local batch 4, random routing, 1 GPU, training.seq_len=8192"
    assert args.work.is_dir() and args.work.parent == tmp_path
    assert "--model.flavor=16B_6_layers_sdpa" in train.overrides("bf16", args, 0)
    speeds = {"bf16": 10.0, "fp8_flow": 20.0, "fp8_flow:save_h=fp8,recompute=none": 16.0}
    speeds["torchao:checkpointing=none"] = 8.0
    results = [dict(variant=v, error=None, median_tokens_per_second=s, peak_memory_gib=None) for v, s in speeds.items()]
    option = "train_qwen3_30b save_h=fp8 recompute=none"
    assert [(r["name"], r["reference"], r["speedup"]) for r in train.records(results, "qwen3_30b", shape)] == [
        ("train_qwen3_30b", "bf16", 2.0), ("train_qwen3_30b", "torchao:checkpointing=none", 2.5),
        (option, "bf16", 1.6), (option, "fp8_flow", 0.8), (option, "torchao:checkpointing=none", 2.0),
    ]  # fmt: skip


def test_first_steps(tmp_path: Path, monkeypatch):
    """Each run has empty caches of its own, and its step lasts between two lines of rank 0."""
    line = "[rank{}]:[titan] 2026-11-27 23:59:{} - root - INFO - {}\n".format
    log = line(0, "58,500", "Training starts at step 1") + line(1, "59,900", "step:  1  loss: 1")
    with pytest.raises(ValueError, match="no time of 'step:  1 '"):
        first_step.first_step(log)
    assert first_step.first_step(log + line(0, "59,750", "step:  1  loss: 1")) == 1.25

    caches = []

    class Started:
        def __init__(self, variant, args, seed, label, caches):
            self.log = tmp_path / label
            self.caches = {name: Path(folder) for name, folder in caches.items()}

        def begin(self):
            caches.append(self.caches)
            for folder in self.caches.values():
                folder.mkdir()  # fails where a run before left something

        def wait(self, timeout, until):
            self.log.write_text(log + line(0, "59,750", until))

        def end(self):
            pass

    monkeypatch.setattr(first_step, "Run", Started)
    results = [first_step.measure(variant, SimpleNamespace(timeout=1), 0) for variant in ("bf16", "fp8_flow")]
    assert {*caches[0]} == {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"} and caches[0] != caches[1]
    assert [r["first_step"] for r in results] == [1.25, 1.25] and results[0]["from_launch"] < 1


def test_flavors_of_the_setting():
    """torchtitan takes every model's command line, in a process that imports the setting as its trainer does."""
    script = """
import json, sys
from torchtitan.config import ConfigManager
from torchtitan.protocols.train_spec import get_train_spec
for arguments in json.loads(sys.argv[1]):
    config = ConfigManager().parse_args(arguments)
    args = get_train_spec(config.model.name).model_args[config.model.flavor]
    print(args.n_layers, args.attn_type, args.attn_mask_type, config.training.local_batch_size)
"""
    runs = []
    for model in train.MODELS:
        options = f"--out o --model {model} --layers 5 --attention flex --local-batch 2"
        overrides = train.overrides("bf16", train.parser("").parse_args(options.split()), 0)
        runs.append([f"--job.config_file={train.CONFIG}", *overrides])
    found = run_script("-c", script, json.dumps(runs))
    assert found.stdout.splitlines() == ["5 flex block_causal 2"] * len(train.MODELS), found.stderr


def test_a_dense_model_has_no_routing(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(train, "WORK", tmp_path)
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    args = train.parser("").parse_args(["--out=o", "--gpus=1", "--model=llama3_8b", "--layers=8"])
    assert train.finish(args, "train") == "Llama 3 8B, 8 layers, sdpa, local batch 4, 1 GPU"
    flags = train.overrides("fp8_flow:linear_fqns=attention.", args, 0)
    assert {"--model.converters=fp8_flow_moe", "--fp8_flow_moe.linear_fqns=attention."} <= {*flags}
    assert "--model.converters=float8_rowwise" in train.overrides("float8_rowwise", args, 0)


@pytest.mark.parametrize("variant", ["float8_tensorwise", "float8_rowwise", "fp8_flow:linear_fqns=attention."])
def test_what_a_dense_model_has_in_fp8(variant):
    """All linears but the output, on the meta device."""
    args = train.parser("").parse_args(["--out=o", "--gpus=1", "--model=llama3_1b", "--layers=2", "--attention=sdpa"])
    args.routing = "model"
    script = """
import sys, torch
from torchtitan.config import ConfigManager
from titan_fp8moe.torchtitan import dry_run
from titan_fp8moe.trainer import preflight
config = ConfigManager().parse_args(sys.argv[1:])
with preflight.for_other_machines():
    model = dry_run.build_model(config, dry_run.make_parallel_dims(config, 1))[2]
print(*(name for name, m in model.named_modules() if type(m) is torch.nn.Linear and "Fp8" not in str(type(
    model.get_submodule(name.rpartition(".")[0])))))
print(*model.layers["1"].feed_forward.w1.weight.shape)
"""
    flags = [f"--job.config_file={train.CONFIG}", *train.overrides(variant, args, 0)]
    found = run_script("-c", script, *flags)
    assert found.stdout.splitlines()[-2:] == ["output", "8192 2048"], found.stderr


def test_log(tmp_path: Path):
    line = (
        "[rank0]:[titan] 2026-11-21 13:13:01,717 - root - INFO - step: {step:2}  loss:  8.21696  grad_norm:  1.2345  "
        "memory: 91.90GiB({step}.50%)  tps: 11,{step:03}  tflops: 1.00  mfu: 20.70%\n"
    )
    run = Run.__new__(Run)
    run.variant, run.seed, run.log = "bf16", 0, tmp_path / "log"
    lines = "".join(line.format(step=step) for step in range(10, 41, 10))
    run.log.write_text(lines + lines.replace("rank0", "rank1").replace("tps: 11", "tps: 99"))
    result = run.result(None)
    assert result["tokens_per_second"] == [11020, 11030, 11040] and result["median_tokens_per_second"] == 11030
    assert result["peak_memory_gib"] == 91.9
    assert list(result["losses"]) == ["10", "20", "30", "40"] and result["losses"]["10"] == 8.21696
    failed = result | {"seed": 1, "error": "out of memory", "peak_memory_gib": 1}
    fp8 = result | {"variant": "fp8_flow", "median_tokens_per_second": 22060, "peak_memory_gib": 80.0}
    records = train.records([result, failed, fp8], "16b", "shape")
    assert [(r["name"], r["reference"]) for r in records] == [("train_16b", "bf16"), ("train_16b memory", "bf16")]
    assert [r["speedup"] for r in records] == pytest.approx([2.0, 91.9 / 80])
    assert "spread" not in records[0]
    faster = result | {"median_tokens_per_second": 1.1 * result["median_tokens_per_second"]}
    # Medians, and the largest less the least.
    repeated, _ = train.records([result, faster, faster, *[fp8] * 3], "16b", "shape")
    assert repeated["spread"] == {"ours": 0, "reference": pytest.approx(0.1 / 1.1)}
    line = "bf16, seed 1, 11,030 tokens/s/GPU (11,020 to 11,040), 1 GiB, loss 8.21696, out of memory"
    assert train.line(failed) == line
    run.log.write_text(lines.replace("8.21696", "nan", 2))
    assert run.result(None)["error"] == "the loss is nan at step 10"
    assert tomllib.loads(Path(train.CONFIG).read_text())["metrics"]["log_freq"] == 10  # what help says of --steps
