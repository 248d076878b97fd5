import pytest

from tools.lib.compiled.tile_program import Tile, read_vmem

PROGRAM = """
  %flash_forward.2 = f32[8]{0} custom-call(%q), frontend_attributes={kernel_metadata={
"a": 1}}, backend_config={"used_scoped_memory_configs":[
{"memory_space":"1","offset":"0","size":"4096"},{"memory_space":"5","size":"7"}]}
  %flash_backward = f32[8]{0} custom-call(%flash_forward.2), backend_config={
"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"512"}]}
"""


def make_tile(direction, group=1, **options):
    shape = 1024, 1024, 64, "bfloat16", group, 2048
    return Tile("v5e", direction, *shape, **options)


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
