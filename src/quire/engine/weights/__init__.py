"""Quantized weights: `registry` finds how a checkpoint stores them, a module for each format reads its tensors as a
`Matrix` (`layouts`), and `quantizer` does so while Transformers loads a model.
"""
