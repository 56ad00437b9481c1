"""Times the data-movement kernels with other values of their tuning constants.

    python -m experiments.kernels.sweep [--only permute]

Each constant is varied alone, at the large shapes with balanced routing. The kernels do not tune themselves: copy the
best value into the constant.
"""

from experiments.kernels.data_movement import LAYERS, cases, device_copy, gb_per_s
from experiments.records import begin, script_parser
from titan_fp8moe.kernels import permute, quantize, swiglu, transpose

SWEEP = {
    "quantize": [(quantize, "TILES", (16, 32, 64)), (quantize, "WARPS", (2, 4, 8))],
    "weight_quantize": [(quantize, "WEIGHT_WARPS", (4, 8))],
    "transpose_balanced": [(transpose, "WARPS", (4, 8))],
    "swiglu": [(swiglu, "ROWS", (16, 32, 64)), (swiglu, "WARPS", (2, 4, 8))],
    "swiglu_backward": [
        (swiglu, "BACKWARD_ROWS", (8, 16, 32)),
        (swiglu, "BACKWARD_STAGES", (1, 2, 3, 4)),
        (swiglu, "BACKWARD_WARPS", (2, 4, 8)),
    ],
    "permute": [
        (permute, "TOKENS", (4, 8, 16, 32)),
        (permute, "COLUMNS", (256, 512, 1024)),
        (permute, "WARPS", (4, 8)),
    ],
    "unpermute": [
        (permute, "SUM_COLUMNS", (512, 1024, 2048)),
        (permute, "SUM_WARPS", (2, 4, 8)),
    ],
}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--only", default="", help="sweep the kernels whose name contains this")
    args = parser.parse_args()
    begin()
    copy = device_copy()
    for layer in LAYERS[:4]:
        for routing, case in cases(layer):
            if args.only not in case.name or routing.startswith("skewed"):
                continue
            for module, constant, values in SWEEP.get(case.name, ()):
                shipped = getattr(module, constant)
                shares = []
                for value in values:
                    setattr(module, constant, value)
                    shares.append(f"{value}{'*' * (value == shipped)}: {gb_per_s(case.bytes, case.run) / copy:.1%}")
                setattr(module, constant, shipped)
                print(f"{layer.name} E{layer.E} {case.name:20}{constant:18}{'  '.join(shares)}", flush=True)


if __name__ == "__main__":
    main()
