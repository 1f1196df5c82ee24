"""What our own layers cost: `pair` against the same kernel through torch, `overhead` a call against other callers."""
