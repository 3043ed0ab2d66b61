"""Stream processors: the assembler of the data plane, the controller of the control plane, and the feeder."""
