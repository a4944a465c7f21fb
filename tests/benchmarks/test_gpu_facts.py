"""What is told of a GPU: its kernels by group, and what nvidia-smi says, as far as it says anything."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import gpu_facts
from benchmarks.gpu_facts import SMI_FIELDS, parse_smi, under_load
from benchmarks.kernels import Kernel, group_of, kernel_table


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        ("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>", "matrix products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matrix products"),
        ("triton_tem_fused_mm_t_12", "matrix products"),
        ("aten::addmm", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("fmha_cutlassF_f16_aligned_64x64_rf_sm75(PyTorchMemEffAttention::AttentionKernel)", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("triton_per_fused__scaled_dot_product_flash_attention_native_layer_norm_4", "triton"),
        ("triton_poi_fused_cat_8", "triton"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("aten::_fused_adamw_", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("Memset (Device)", "copies"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<...>", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "pointwise and sums"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "pointwise and sums"),
        ("aten::view", "other"),
    ],
)
def test_a_kernel_belongs_to_a_group(name: str, group: str) -> None:
    assert group_of(name) == group


def test_the_table_is_of_one_step() -> None:
    table = kernel_table([Kernel("aten::mm", 0.006, 8), Kernel("nvjet_x", 0.002, 2), Kernel("Memset", 0.002, 4)], 2)
    assert table["ms"] == pytest.approx(5.0) and table["calls"] == 7
    products = table["groups"]["matrix products"]
    assert products["ms"] == pytest.approx(4.0) and products["share"] == pytest.approx(0.8) and products["calls"] == 5
    assert [kernel["name"] for kernel in table["kernels"]] == ["aten::mm", "nvjet_x", "Memset"]


def test_nothing_ran_is_no_division_by_zero() -> None:
    assert kernel_table([Kernel("aten::view", 0.0, 1)], 1)["groups"]["other"]["share"] == 0.0


def test_what_nvidia_smi_does_not_tell_is_absent() -> None:
    said = "580.159.04, Disabled, 33, 345, 1980, 2619, 2619, 71.52, [N/A], 81559, 81000\n"
    facts = parse_smi(said)
    assert facts["driver"] == "580.159.04" and facts["ecc"] == "Disabled"
    assert facts["sm_clock_mhz"] == 345.0 and facts["power_watts"] == 71.52
    assert set(SMI_FIELDS) - set(facts) == {"power_limit_watts"}
    assert parse_smi("") == {}


def test_a_machine_without_nvidia_smi_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert gpu_facts.nvidia_smi() == {}


def test_clocks_are_asked_for_while_the_steps_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    def asked() -> dict[str, Any]:
        before = len(steps)
        while len(steps) < before + 2:
            pass
        return {"sm_clock_mhz": 1980.0, "power_watts": 690.0, "driver": "580"}

    monkeypatch.setattr(gpu_facts, "nvidia_smi", asked)
    assert under_load(lambda: steps.append(1), lambda: None, 0.0) == {"sm_clock_mhz": 1980.0, "power_watts": 690.0}
