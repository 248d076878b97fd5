import dataclasses
import sys
from types import SimpleNamespace

import pytest

from kernels.tpu.block_sizes import TPU_FORWARD
from tools.lib.tpu_compiler.tile_program import (
    SPLASHES,
    Splash,
    Tile,
    make_program,
    read_request,
    read_vmem,
    write_request,
)

PROGRAM = """
  %flash_forward.2 = f32[8]{0} custom-call(%q), frontend_attributes={kernel_metadata={
"a": 1}}, backend_config={"used_scoped_memory_configs":[
{"memory_space":"1","offset":"0","size":"4096"},{"memory_space":"5","size":"7"}]}
  %flash_backward = f32[8]{0} custom-call(%flash_forward.2), backend_config={
"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"512"}]}
"""


SPLASH = Splash("causal", False, 512, 1024, 512)
FUSED = Splash("full", True, 1024, 1024, 1024)


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


def describe(direction, group, way):
    """Kernels of a program, and the shapes of its arguments."""
    program = make_program(make_tile(direction, group), way)
    return *program.kernels, [argument.shape for argument in program.arguments]


def test_our_program_has_the_kernel_and_shapes_of_the_direction():
    q, k, bound, row = (1, 2048, 8, 64), (1, 2048, 2, 64), (1, 2048), (1, 2, 2048)
    forward = describe("forward", 4, TPU_FORWARD["v5e"])
    assert forward == ("flash_forward", [q, k, k, bound, bound])
    backward = describe("backward", 1, None)
    rows, sums = [row, row, bound, bound], [k, k, k]  # dq, dk and dv so far
    assert backward == ("flash_backward", [k, k, k, k, *rows, *sums])


def test_splash_program_has_the_kernels_and_shapes_of_the_direction():
    q, k = (8, 2048, 64), (2, 2048, 64)
    forward = describe("forward", 4, SPLASH)
    assert forward == ("splash_mha_fwd_no_residuals", [q, k, k])
    dkv, dq = "splash_mha_dkv_no_residuals", "splash_mha_dq_no_residuals"
    assert describe("backward", 1, SPLASH) == (dkv, dq, [k, k, k, k])
    assert describe("backward", 1, FUSED) == (dkv, [k, k, k, k])


def test_tokamax_is_given_the_options_of_the_variant(monkeypatch):
    """Stands in for the package, which has an environment of its own."""
    given = {}

    def make_splash_mha(mask, config, q_seq_shards):
        given.update(config, mask=mask, shards=q_seq_shards)
        return lambda q, k, v: q

    kernel = SimpleNamespace(SplashConfig=dict, make_splash_mha=make_splash_mha)
    masks = SimpleNamespace(CausalMask=lambda shape: ("causal", shape), FullMask=None)
    for name, module in ("kernel", kernel), ("mask", masks):
        name = f"{SPLASHES['tokamax']}.splash_attention_{name}"
        monkeypatch.setitem(sys.modules, name, module)
    way = Splash("causal", True, 512, 1024, 256, "tokamax", True, 0.0)
    program = make_program(make_tile("backward", soft_cap=50.0), way)
    assert program.kernels == ("splash_mha_dkv_no_residuals",)
    assert given == {
        "mask": ("causal", (2048, 2048)),
        "shards": 1,
        "block_q": 512,
        "block_kv": 1024,
        "block_kv_compute": 256,
        "block_q_dkv": 512,
        "block_kv_dkv": 1024,
        "block_kv_dkv_compute": 256,
        "attn_logits_soft_cap": 50.0,
        "use_experimental_scheduler": True,
        "max_logit_const": 0.0,
    }


def test_request_is_read_as_it_was_written():
    tile = make_tile("backward", group=2, soft_cap=50.0)
    blocks = dataclasses.replace(TPU_FORWARD["v6e"], rows=128)
    tokamax = dataclasses.replace(FUSED, kernel="tokamax", max_logit=0.0)
    for way in (None, blocks, FUSED, tokamax):
        assert read_request(write_request(tile, way)) == (tile, way)
