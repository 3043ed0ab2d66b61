"""Policy-gradient losses as pure functions over packed tokens.

`contract` holds the types, `registry` finds a loss by name, one module per family holds the formulas,
`aggregation` turns step-wide counts into one weight per sequence. This file imports nothing, so that
numpy-only callers of `trainer.losses.aggregation` do not load torch.
"""
