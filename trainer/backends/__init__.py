"""Where the weights live: one contract, one module per training library. This file imports nothing."""
