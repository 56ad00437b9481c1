"""An expert for each activation, with parameters that moderate values of h reach; and every recomputation."""

from titan_fp8moe.activations import ACTIVATIONS
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.spec import ExpertSpec

REACHED = {
    "clamped_swiglu": dict(limit=1.5, alpha=1.702, offset=1.0),
    "softcapped_swiglu": dict(gate_cap=3.0, up_cap=1.5),
}
SPECS = [ExpertSpec.of(name, REACHED.get(name), first) for name in ACTIVATIONS for first in (False, True)]
SETTINGS = [
    Fp8FlowMoEConfig(recompute=recompute, save_h=save_h)
    for recompute, save_h in (("none", "bf16"), ("activation", "bf16"), ("activation", "fp8"), ("experts", "bf16"))
]
