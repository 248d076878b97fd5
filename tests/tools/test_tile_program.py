import dataclasses

import pytest

from kernels.tpu.block_sizes import TPU_FORWARD
from tools.lib.tpu_compiler.tile_program import (
    Splash,
    Tile,
    make_program,
    read_request,
    read_vmem,
    splash_program,
    write_request,
)

PROGRAM = """
  %flash_forward.2 = f32[8]{0} custom-call(%q), frontend_attributes={kernel_metadata={
"a": 1}}, backend_config={"used_scoped_memory_configs":[
{"memory_space":"1","offset":"0","size":"4096"},{"memory_space":"5","size":"7"}]}
  %flash_backward = f32[8]{0} custom-call(%flash_forward.2), backend_config={
"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"512"}]}
"""


def make_tile(direction, group=1):
    return Tile("v5e", direction, 1024, 1024, 64, "bfloat16", group, 2048)


def test_vmem_is_that_of_the_kernel():
    assert read_vmem(PROGRAM, "flash_forward") == 4096
    assert read_vmem(PROGRAM, "flash_backward") == 512
    with pytest.raises(ValueError, match="0 kernels 'flash' were compiled"):
        read_vmem(PROGRAM, "flash")


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="self.length=1536 is not a multiple"):
        Tile("v5e", "forward", 1024, 512, 128, "bfloat16", 1, 1536)
    with pytest.raises(ValueError, match="self.block_q=1024 is not a multiple of"):
        make_tile("forward", group=3)


def test_splash_program_has_the_kernels_and_shapes_of_the_direction():
    splash = Splash("causal", False, 512, 1024, 512)
    forward = splash_program(make_tile("forward", group=4), splash)
    assert forward.kernels == ("splash_mha_fwd_no_residuals",)
    shapes = [argument.shape for argument in forward.arguments]
    assert shapes == [(8, 2048, 64), (2, 2048, 64), (2, 2048, 64)]
    two = splash_program(make_tile("backward"), splash)
    assert two.kernels == ("splash_mha_dkv_no_residuals", "splash_mha_dq_no_residuals")
    fused = splash_program(
        make_tile("backward"), Splash("full", True, 1024, 1024, 1024)
    )
    assert fused.kernels == ("splash_mha_dkv_no_residuals",)


def test_request_is_read_as_it_was_written():
    tile = make_tile("backward", group=2)
    blocks = dataclasses.replace(TPU_FORWARD["v6e"], rows=128)
    for way in (None, blocks, Splash("causal", True, 512, 1024, 256)):
        assert read_request(write_request(tile, way)) == (tile, way)


def test_our_program_has_the_kernel_and_shapes_of_the_direction():
    forward = make_program(make_tile("forward", group=4), TPU_FORWARD["v5e"])
    assert forward.kernels == ("flash_forward",)
    q, keys, bounds = (1, 2048, 8, 64), (1, 2048, 2, 64), (1, 2048)
    shapes = [argument.shape for argument in forward.arguments]
    assert shapes == [q, keys, keys, bounds, bounds]
    backward = make_program(make_tile("backward"), None)
    assert backward.kernels == ("flash_backward",)
    assert [argument.shape for argument in backward.arguments[3:6]] == [
        (1, 2048, 2, 64),
        (1, 2, 2048),
        (1, 2, 2048),
    ]
