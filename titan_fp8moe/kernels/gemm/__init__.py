"""GEMMs over expert groups: `grouped_mm` picks the Hopper kernels (Gluon) or the portable one (Triton)."""
