"""Flash attention on a TPU, v3 and later: drawn, file by file, in docs/kernels/tpu.md.

Letters of shapes, beside those of the public functions: M batch rows with bounds of
their own (1 if the batch shares them), X = B / M * K key/value heads of each, G query
heads that are stacked in a tile, R = G * block_q its rows, D the head size padded to
whole lanes. [rows, 128] "equal lanes" means one number a row, repeated in every lane.
"""
