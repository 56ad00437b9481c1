"""Around the layers, for any trainer: checks of a job, the plan of a conversion, watches, corrections of PyTorch."""
