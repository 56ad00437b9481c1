"""One MoE layer: its autograd functions, the expert FFN, and what they read of the weights."""
