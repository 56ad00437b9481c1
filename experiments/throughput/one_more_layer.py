"""The time that one more MoE layer adds to a training step, from train.py's records of models that differ by a layer.

    for layers in 5 6; do
        python -m experiments.throughput.train --out experiments/throughput --gpus 1 --layers $layers --seeds 0 \
            --variants bf16 bf16_whole fp8_flow
    done
    python -m experiments.throughput.one_more_layer experiments/throughput/results.json

Embedding, output, dense layer, loss and most of the optimizer's fixed costs cancel: the difference is what a deep model
is made of. It has the noise of two runs on top of a much smaller value: compare runs of one machine and one day.
"""

import argparse
import json
import re
from pathlib import Path

from titan_fp8moe.testing import write_records

_LAYERS = re.compile(r", (\d+) layers")
UNIT = "tokens/s/GPU"


def differences(records: list[dict]) -> list[dict]:
    """A record ``train_<model> one more layer`` for each pair of records of the same variant, reference and setting."""
    found, out = {}, []
    for r in records:
        if r["unit"] == UNIT and (layers := _LAYERS.search(r["shape"])):
            found[r["name"], r["reference"], _LAYERS.sub(", {} layers", r["shape"], 1), int(layers[1])] = r
    for (name, reference, shape, layers), deep in found.items():
        if shallow := found.get((name, reference, shape, layers - 1)):
            ours, theirs = (1e6 / deep[key] - 1e6 / shallow[key] for key in ("value", "reference_value"))
            r = {"name": f"{name} one more layer", "shape": shape.format(f"{layers - 1} to {layers}"), "value": ours}
            r |= {"unit": "us per token and GPU", "reference": reference, "reference_value": theirs}
            measured = {key: deep[key] for key in ("hardware", "versions", "commit", "date") if key in deep}
            out.append(r | {"speedup": theirs / ours} | measured)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="JSON file of records, which gets the new ones")
    path = parser.parse_args().results
    found = differences(json.loads(path.read_text()))
    for r in found:
        print(
            f"{r['name']}, {r['shape']}: {r['value']:.3f} {r['unit']}, {r['reference']} {r['reference_value']:.3f}, "
            f"{r['speedup']:.2f}x"
        )
    write_records(path, found)


if __name__ == "__main__":
    main()
