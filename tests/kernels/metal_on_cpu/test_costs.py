"""What a text takes of a GPU is counted as a GPU would: by SIMD groups, and on registers."""

from types import SimpleNamespace

import mlx.core as mx
import pytest

from gearbx_mlx.kernels.metal import Launch, Prepared

from .costs import blocks_of, costs, executed, launches, registers
from .text import generated_text

CODE = """
  call void @__sanitizer_cov_trace_pc_guard(ptr @__sancov_gen_)
  %1 = lshr i32 %0, 16
  %2 = shl i32 %0, 3
  %3 = fcmp ogt float %a, %b
  %4 = select i1 %3, i32 %1, i32 %2
  %5 = icmp ult i32 %4, 7
  %6 = zext i1 %5 to i32
  %7 = tail call float @llvm.fma.f32(float %a, float %b, float %b)
  %8 = tail call noundef i32 @_ZN5metal12simd_shuffleIjEET_S1_ti(i32 noundef %4, i16 noundef zeroext 3, i32 noundef 9)
  %9 = load volatile <4 x i8>, ptr addrspace(1) %p, align 1
  %10 = load float, ptr addrspace(3) %q, align 4
  br i1 %5, label %11, label %12
"""

OF_64_THREADS = {"grid": (64, 1, 1), "threadgroup": (64, 1, 1), "output_shapes": [(64,)], "output_dtypes": [mx.float32]}


def test_instructions_have_their_cycles():
    """A half of a register, a shift, a comparison that selects, one that counts, fma, another lane, loads, a branch."""
    marked, (_, block) = blocks_of(CODE)
    assert "call void @metal_block(i32 1)" in marked
    assert block.cycles == 1 + 4 + 1 + 1 + 1 + 2 + 1 + 1 + 3
    assert (block.kinds["device load"], block.kinds["threadgroup load"], block.kinds["branch"]) == (1, 1, 1)


@pytest.mark.clang
def test_simd_group_costs_same_as_lane():
    source = "const int i = thread_position_in_grid.x; float y = x[i]; if (i == 37) y += x[i - 1]; out[i] = y;"
    kernel = mx.fast.metal_kernel(name="one_lane", input_names=["x"], output_names=["out"], source=source)
    x, how = mx.zeros((64,)), OF_64_THREADS
    prepared = Prepared(SimpleNamespace(input_names=["x"]), how)
    found = executed(generated_text(kernel, [x], how), Launch(prepared, (x,)))
    assert (found.kinds["device load"], found.kinds["device store"], found.kinds["branch"]) == (3, 2, 2)


@pytest.mark.clang
def test_numbers_without_a_register_are_counted():
    source = """
        const int i = thread_index_in_threadgroup;
        float held[512];
        UNROLL for (int k = 0; k < 512; k++) held[k] = x[i + 64 * k];
        float y = 0.0f;
        UNROLL for (int k = 0; k < 512; k++) { y = fma(held[511 - k], held[k], y); }
        out[i] = y;"""
    unroll = '#define UNROLL _Pragma("clang loop unroll(full)")\n'
    kernel = mx.fast.metal_kernel(name="many", input_names=["x"], output_names=["out"], source=source, header=unroll)
    text = generated_text(kernel, [mx.zeros((64 * 512,))], OF_64_THREADS)
    used, spilled = registers(text, 64)
    assert used >= 200
    assert spilled > 0


@pytest.mark.clang
@pytest.mark.slow
def test_every_kernel_fits_registers():
    for name, made, numbers in launches():
        found = costs(made, numbers)
        assert found.spilled == 0, name
        assert found.registers <= 128, name
