"""Flash attention on a TPU, v3 and later (drawn in docs/kernels/tpu.md).

- launch: `forward` and `backward`, and their steps in a ring, which run the kernels.
- setup: what launches on the same queries share, and what they read of bounds.
- forward, query_tile, softmax: the kernel of out and lse, and its online softmax.
- backward, backward_tile, backward_dq: the kernel of dq, dk and dv, the gradients of a
  tile, and where dq is accumulated.
- diagonal: causal diagonal tiles.
- bounds: visible keys of programs, rows and sub-blocks: live tiles and granules, masks.
- orientation: which way scores and accumulators lie in vector registers.
- dma: copies between HBM and VMEM, and double buffers.
- vector: matmuls, lanes, bytes. tile_config: constants of a kernel, soft caps.
- cut, block_sizes: the blocks that a problem gets.

Letters of shapes, beside those of the public functions: M batch rows with bounds of
their own (1 if the batch shares them), X = B / M * K key/value heads of each, G query
heads that are stacked in a tile, R = G * block_q its rows, D the head size padded to
whole lanes. [rows, 128] "equal lanes" means one number a row, repeated in every lane.
"""
