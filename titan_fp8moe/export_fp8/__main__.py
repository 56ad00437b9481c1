"""Write a trained model in DeepSeek's FP8 format, with the values that training multiplies with.

    python -m titan_fp8moe.export_fp8 outputs/checkpoint/step-1000 OUT --config train_configs/deepseek_v3_16b.toml \\
        --world-size 8 --verify                                              # a checkpoint of torchtitan's
    python -m titan_fp8moe.export_fp8 HF_FOLDER OUT --verify                 # a folder of Hugging Face's

SOURCE is a checkpoint of torchtitan's (DCP), or a folder of safetensors. OUT gets shards, index, config.json and the
tokenizer. Run the same command again after an interruption: shards that are complete stay.

With --config the job's converter decides what is FP8, and further arguments override the TOML file as in training.
Without it the routed experts are, or what --quantize names.
"""

import argparse
import logging
import sys
from pathlib import Path

import torch

from titan_fp8moe.export_fp8 import shards
from titan_fp8moe.export_fp8.format import ROUTED
from titan_fp8moe.export_fp8.model_config import check_config
from titan_fp8moe.export_fp8.sources import ConfigValues, HuggingFaceSource, Source, published_fp32
from titan_fp8moe.recipe import TILE

_NAMED = 20  # files that an export leaves behind


def _parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m titan_fp8moe.export_fp8",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, help="the trained model's folder")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--config", help="the run's TOML file; a checkpoint of torchtitan's needs it")
    parser.add_argument(
        "--assets", type=Path, help="folder with config.json and tokenizer; by default model.hf_assets_path or SOURCE"
    )
    parser.add_argument(
        "--world-size", type=int, help="the run's number of ranks: with --config it tells what training quantized"
    )
    parser.add_argument(
        "--quantized-from",
        choices=("fp32", "bf16", "fp32-routed"),
        help="or say it: bf16 under FSDP with mixed_precision_param = bfloat16, fp32 without; fp32-routed is fp32 for "
        "routed experts and bf16 for the rest, with fp8_all_gather or if expert parallelism takes all ranks of FSDP",
    )
    parser.add_argument(
        "--quantize",
        nargs="+",
        metavar="PART",
        help="quantize the matrices with one of these strings in their name, such as .experts. .shared_experts.",
    )
    parser.add_argument(
        "--filter-fqns",
        nargs="+",
        default=[],
        metavar="PART",
        help="of those, leave in bf16 what has one of these strings in its name; with --config the TOML file says it",
    )
    parser.add_argument("--shard-gb", type=float, default=5.0, help="size of a shard (default 5)")
    parser.add_argument("--verify", action="store_true", help="then compare every tensor with the source, bit for bit")
    parser.add_argument("--verify-only", action="store_true", help="compare, and write nothing")
    args, overrides = parser.parse_known_args()
    if overrides and args.config is None:
        parser.error(f"unknown arguments: {' '.join(overrides)}")
    if args.world_size is not None and (args.config is None or args.quantized_from is not None):
        parser.error("--world-size needs --config, and replaces --quantized-from")
    if args.config is not None and (args.quantize or args.filter_fqns):
        parser.error(
            "--config decides what is FP8; override it with --fp8_flow_moe.filter_fqns, not --quantize or --filter-fqns"
        )
    return args, overrides


def _open(args: argparse.Namespace, overrides: list[str]) -> tuple[Source, set[str], str | None, ConfigValues, Path]:
    """The checkpoint, what training multiplies in FP8 and quantizes it from, its settings, and config.json's folder."""
    source, is_dcp = args.source, (args.source / ".metadata").exists()
    if not is_dcp and not any(source.glob("*.safetensors")):
        raise ValueError(f"{source} has neither .metadata, as torchtitan's checkpoints (step-N) do, nor safetensors")
    if is_dcp and args.config is None:
        raise ValueError(
            f"{source} is a checkpoint of torchtitan's: name its TOML file with --config. A run of torchtitan 0.3 has "
            "none: let it save with checkpoint.last_save_in_hf, and export that folder"
        )
    if args.out.resolve() == source.resolve():
        raise ValueError("OUT is SOURCE; choose another folder")
    if args.config is None:
        checkpoint = HuggingFaceSource(source)
        fp8 = _select(checkpoint, args.quantize, args.filter_fqns)
        return checkpoint, fp8, args.quantized_from, {}, args.assets or source
    from titan_fp8moe.torchtitan.checkpoint import DcpSource, Job

    job = Job(args.config, overrides, args.world_size)
    checkpoint = DcpSource(source, job) if is_dcp else HuggingFaceSource(source)
    if not is_dcp:
        job.check_source(source, checkpoint.tensors)
    return checkpoint, job.fp8, args.quantized_from or job.quantized_from, job.settings, args.assets or job.assets


def _select(source: Source, parts: list[str] | None, filters: list[str]) -> set[str]:
    """The matrices with one of ``parts`` in their name and none of ``filters``. Each must match one."""
    if parts is None:  # not a router's bias, which Laguna stores with the experts
        chosen = {name for name, info in source.tensors.items() if ROUTED in name and len(info.shape) > 1}
    else:
        chosen = {name for name in source.tensors if any(part in name for part in parts)}
    for option, strings, names in (("quantize", parts or [], source.tensors), ("filter-fqns", filters, chosen)):
        if unused := [part for part in strings if not any(part in name for name in names)]:
            raise ValueError(f"--{option} has {unused[0]!r}, which matches no tensor; correct or remove it")
    return {name for name in chosen if not any(part in name for part in filters)}


def _precisions(source: Source, fp8: set[str], quantized_from: str | None) -> dict[str, torch.dtype]:
    """By name, the precision that each matrix is quantized from."""
    if quantized_from is None:
        if fp32 := [name for name in sorted(fp8) if source.tensors[name].dtype == torch.float32]:
            raise ValueError(
                f"{fp32[0]} is fp32, but training may have quantized it from bf16: pass --config and --world-size of "
                "the run, or --quantized-from"
            )
        quantized_from = "bf16"

    def precision(name: str) -> torch.dtype:
        routed = quantized_from == "fp32-routed" and ROUTED in name
        return torch.float32 if quantized_from == "fp32" or routed else torch.bfloat16

    return {name: precision(name) for name in source.tensors if name in fp8}


def _device() -> torch.device:
    """A GPU that has kernels, else the CPU; both give the same bits."""
    has_kernels = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return torch.device("cuda" if has_kernels else "cpu")


def _warnings(plan: shards.Plan) -> list[str]:
    """Warnings about properties of the export that a server may not expect."""
    found = []
    if left_out := plan.source.left_out:
        found.append(
            f"left out are {len(left_out)} tensors such as {left_out[0]}, for which Hugging Face's format has no name. "
            "The served model differs from the trained one unless they are zero"
        )
    if partial := [name for name in plan.fp8 if any(dim % TILE for dim in plan.source.tensors[name].shape)]:
        found.append(
            f"{len(partial)} matrices such as {partial[0]} have dims that are no multiples of {TILE}. Transformers "
            "loads them, but servers that fuse matrices may not; to leave them in bf16, filter them"
        )
    return found


def main() -> None:
    args, overrides = _parse()
    logging.getLogger().setLevel(logging.WARNING)
    try:
        source, fp8, quantized_from, trained, assets = _open(args, overrides)
        precisions = _precisions(source, fp8, quantized_from)
        plan = shards.make_plan(source, precisions, published_fp32(assets), int(args.shard_gb * 1e9))
        compared = check_config(source, trained, assets)
        kept = plan.modules_to_not_convert
        origin = "" if quantized_from is None else f" from {quantized_from}"
        print(f"{len(plan.fp8)} matrices in FP8{origin}, {len(kept)} modules not, {len(plan.shards)} shards")
        if plan.rounded:
            print(f"{plan.rounded} tensors are rounded from fp32 to bf16")
        for warning in _warnings(plan):
            print(f"warning: {warning}", file=sys.stderr)
        if not args.verify_only:
            shards.write_shards(plan, args.out, _device(), lambda line: print(line, flush=True))
            if left := shards.write_config(plan, assets, args.out):
                print(f"not copied from {assets}: {', '.join(left[:_NAMED])}{', ...' * (len(left) > _NAMED)}")
        if args.verify or args.verify_only:
            count, keys = shards.verify(plan, assets, args.out), ", ".join(compared)
            rounded = f" after rounding {plan.rounded} from fp32 to bf16" if plan.rounded else ""
            print(
                f"verified: {count} tensors are the checkpoint's, bit for bit{rounded}; it has what config.json states "
                f"of {keys}"
            )
    except (AssertionError, ImportError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
