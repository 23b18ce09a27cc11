import pytest

from unilab_fabric.learners import precision


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 avx512_vnni", "bf16-mixed"),
        ("flags\t\t: fpu amx_tile amx_bf16", "bf16-mixed"),
        ("flags\t\t: fpu avx2 avx512f", "32-true"),
        ("model name\t: a machine without a flags line", "32-true"),
    ],
)
def test_auto_takes_bf16_only_where_the_processor_multiplies_it_fast(flags, expected, tmp_path, monkeypatch):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{flags}\n\nprocessor\t: 1\n{flags}\n")
    monkeypatch.setattr(precision, "CPUINFO", cpuinfo)
    assert precision.resolve_precision("cpu") == expected


def test_auto_is_float32_where_the_system_does_not_say(tmp_path, monkeypatch):
    monkeypatch.setattr(precision, "CPUINFO", tmp_path / "absent")
    assert precision.resolve_precision("cpu") == "32-true"


@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 5), "32-true"), ((8, 0), "bf16-mixed"), ((9, 0), "bf16-mixed")]
)
def test_auto_follows_the_capability_of_a_cuda_device(capability, expected, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    assert precision.resolve_precision("cuda") == expected
