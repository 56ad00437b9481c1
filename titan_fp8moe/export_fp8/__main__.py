"""Write a trained model in DeepSeek's FP8 format, with the values that training multiplies with.

    python -m titan_fp8moe.export_fp8 outputs/checkpoint/step-1000 OUT --config train_configs/deepseek_v3_16b.toml \\
        --world-size 8 --verify                                              # a checkpoint of torchtitan's
    python -m titan_fp8moe.export_fp8 HF_FOLDER OUT --verify                 # a folder of Hugging Face's

SOURCE is a checkpoint of torchtitan's (DCP), or a folder of safetensors. OUT gets shards, index, config.json and the
tokenizer. It must be empty: after an interruption remove it and export again.

With --config the job's converter decides what is FP8, and further arguments override the TOML file as in training.
Without it the routed experts are, or what --quantize names, but for what --filter-fqns names.

Training quantizes bf16 under FSDP with mixed_precision_param = bfloat16, and fp32 without it. It quantizes fp32-routed,
which is fp32 for routed experts and bf16 for the rest, with fp8_all_gather, or if expert parallelism takes all ranks of
FSDP. --world-size finds it out.

Fp32 tensors of a bf16 model stay fp32. Those of an fp32 model are rounded to bf16, except for the router's balance and
for tensors that are fp32 in published weights, if the assets' folder has some.
"""

import argparse
import logging
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from titan_fp8moe import ops
from titan_fp8moe.export_fp8.files import Checkpoint, Export, open_folder
from titan_fp8moe.export_fp8.format import ROUTED, is_matrix
from titan_fp8moe.export_fp8.model_config import check_config


def _parse() -> tuple[argparse.Namespace, list[str]]:
    name, style = "python -m titan_fp8moe.export_fp8", argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=name, description=__doc__, formatter_class=style)
    add = parser.add_argument
    add("source", type=Path, help="the trained model's folder")
    add("out", type=Path, help="the folder to write")
    add("--config", help="the run's TOML file; a checkpoint of torchtitan's needs it")
    add("--assets", type=Path, help="config.json and tokenizer, by default model.hf_assets_path or SOURCE")
    origin = parser.add_mutually_exclusive_group().add_argument
    origin("--world-size", type=int, help="the run's number of ranks: with --config it tells what training quantized")
    origin("--quantized-from", choices=("fp32", "bf16", "fp32-routed"), help="or say it")
    add("--quantize", nargs="+", metavar="PART", help="quantize matrices with such a part in their name: .experts.")
    add("--filter-fqns", nargs="+", default=[], metavar="PART", help="of those, leave matrices with such a part")
    add("--shard-gb", type=float, default=5.0, help="size of a shard (default 5)")
    add("--verify", action="store_true", help="then compare every tensor with the source, bit for bit")
    add("--verify-only", action="store_true", help="compare, and write nothing")
    args, overrides = parser.parse_known_args()
    if args.config is None and (overrides or args.world_size is not None):
        parser.error(f"only --config takes --world-size and settings of a job: {' '.join(overrides)}")
    if args.config is not None and (args.quantize or args.filter_fqns):
        parser.error("--config decides what is FP8; override it with --fp8_flow_moe.filter_fqns instead")
    return args, overrides


def _plan(args: argparse.Namespace, overrides: list[str]) -> tuple[Export, list[str]]:
    """The export, and the keys of config.json that were compared."""
    if args.config is not None:
        from titan_fp8moe.torchtitan.checkpoint import Job

        job = Job(args.config, overrides, args.world_size)
        source, names, assets = job.open(args.source), job.fp8, args.assets or job.assets
        quantized_from, settings = args.quantized_from or job.quantized_from, job.settings
        if not (assets / "config.json").exists():
            raise ValueError(
                f"{assets} has no config.json; name the model's folder with --assets. {job.starting_config}"
            )
    elif (args.source / ".metadata").exists():
        raise ValueError(
            f"{args.source} is a checkpoint of torchtitan's: name its TOML file with --config. A run of torchtitan 0.3 "
            "has none: let it save with checkpoint.last_save_in_hf, and export that folder"
        )
    else:
        source, assets = open_folder(args.source), args.assets or args.source
        names, quantized_from, settings = _select(source, args.quantize, args.filter_fqns), args.quantized_from, []
    export = Export(source, names, quantized_from, assets)
    origin = "" if quantized_from is None else f" from {quantized_from}"
    print(f"{len(export.fp8)} matrices in FP8{origin}, {export.rounded} tensors rounded from fp32 to bf16")
    return export, check_config(source.tensors, settings, assets)


def _select(source: Checkpoint, parts: list[str] | None, filters: list[str]) -> set[str]:
    """The matrices with one of ``parts`` in their name, by default the routed experts, and none of ``filters``.

    Raises:
        ValueError: for a part or a filter that matches none.
    """
    chosen = {
        name
        for name, value in source.tensors.items()
        if any(part in name for part in parts or [ROUTED]) and is_matrix(name, value)
    }
    for part in [*(parts or []), *filters]:
        if not any(part in name for name in chosen):
            raise ValueError(f"{part!r} matches no matrix; correct or remove it in --quantize or --filter-fqns")
    return {name for name in chosen if not any(part in name for part in filters)}


def main() -> None:
    args, overrides = _parse()
    logging.getLogger().setLevel(logging.WARNING)
    has_kernels = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    device = torch.device("cuda" if has_kernels else "cpu")  # both give the same bits
    try:
        export, compared = _plan(args, overrides)
        if not args.verify_only:
            export.write(args.out, lambda w: ops.quantize_weight(w.to(device)), args.shard_gb * 1e9)
        if args.verify or args.verify_only:
            said = f"{export.verify(args.out)} tensors are the checkpoint's, bit for bit after these roundings"
            print(f"verified: {said}; it has what config.json states of {', '.join(compared)}")
    except KeyError as error:  # a name that torchtitan does not know, such as a converter's
        sys.exit(f"error: KeyError: {error}")
    except (AssertionError, CheckpointException, ImportError, OSError, SafetensorError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
