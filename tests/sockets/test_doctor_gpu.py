# SPDX-License-Identifier: Apache-2.0
"""What `vllm-pd doctor` says of a GPU machine (B42): judged from facts, and read from a torch that stands in for one.
"""
import msgspec
import pytest

from vllm_pd.ops import doctor_gpu
from vllm_pd.ops.doctor_gpu import LEAST_SHM_BYTES, GpuFacts, check_gpu, judge_gpu

GOOD = GpuFacts("13.0", "13.0", "", "NVIDIA H200", [9, 0])
ENOUGH = 64 << 30


def bad(facts: GpuFacts = GOOD, nixl=("nixl-cu13", ), shm_bytes=ENOUGH, sampler_fails=False) -> list[str]:
    return [" ".join(one.lines) for one in judge_gpu(facts, nixl, shm_bytes, sampler_fails) if not one.ok]


def changed(**fields) -> GpuFacts:
    return msgspec.structs.replace(GOOD, **fields)


@pytest.mark.parametrize("facts", [GOOD, changed(driver="14.1"), changed(cuda="13.2")])
def test_a_good_machine_has_one_line(facts):
    [finding] = judge_gpu(facts, ["nixl-cu13"], LEAST_SHM_BYTES, False)
    assert finding.ok and finding.fact.startswith("NVIDIA H200; torch for CUDA 13")


@pytest.mark.parametrize("facts, said, cure", [
    (changed(driver="", name="", error="no driver"), "driver for CUDA none: there is no libcuda.so.1", "--gpus all"),
    (changed(driver="12.8", name="", error="too old"), "torch for CUDA 13.0, driver for CUDA 12.8",
     "install a driver for CUDA 13.0, or a torch for CUDA 12.8"),
    (changed(error="no CUDA-capable device is detected", name=""), "no CUDA-capable device is detected",
     "CUDA_VISIBLE_DEVICES=7"),
    (changed(kernels="no kernel image is available"), "NVIDIA H200, compute capability 9.0: a kernel of vllm does not "
     "run: no kernel image", "built for this device"),
])
def test_what_is_wrong_is_named_with_its_cure(monkeypatch, facts, said, cure):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    [line] = bad(facts)
    assert said in line and cure in line


@pytest.mark.parametrize("arguments, said", [
    ({"nixl": ["nixl-cu12"]}, "nixl-cu12 beside a torch for CUDA 13.0 -> pip install --no-deps nixl-cu13==1.5.1"),
    ({"sampler_fails": True}, "install the flashinfer-python that vllm requires, or set VLLM_USE_FLASHINFER_SAMPLER=0"),
    ({"shm_bytes": 64 << 20}, "/dev/shm has 64 MiB -> start the container with `--ipc host`"),
])
def test_what_is_around_the_device_is_judged_too(monkeypatch, arguments, said):
    monkeypatch.setattr(doctor_gpu, "version_of", lambda name: "1.5.1")
    [line] = bad(**arguments)
    assert said in " ".join(line.split())


def test_without_a_build_of_nixl_check_nixl_has_said_it():
    assert not bad(nixl=[])


FAKE_TORCH = """
class version: cuda = "13.0"
class cuda:
    init = staticmethod(lambda: {init})
    get_device_name = staticmethod(lambda index: "a GPU")
    get_device_capability = staticmethod(lambda index: (9, 0))
"""


@pytest.fixture
def fake_torch(monkeypatch, tmp_path):
    """A torch whose `init` runs the given code, in the processes that this one starts; they find no vllm."""
    monkeypatch.setattr(doctor_gpu, "version_of", lambda name: None)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # a file that is written twice in a second

    def write(init: str, driver: str = "13000") -> None:
        (tmp_path / "torch.py").write_text(FAKE_TORCH.format(init=init))
        (tmp_path / "sitecustomize.py").write_text(
            "import ctypes, importlib.util as util\nfind = util.find_spec\n"
            "util.find_spec = lambda name, *more: None if name.startswith('vllm') else find(name, *more)\n"
            "class Driver:\n    def __init__(self, name): pass\n"
            f"    def cuDriverGetVersion(self, number): number._obj.value = {driver}\n"
            "ctypes.CDLL = Driver\n" * bool(driver))

    return write


def test_the_facts_are_read_in_a_process_of_its_own(fake_torch):
    fake_torch("None")
    [finding] = check_gpu(v1=False)
    assert finding.ok and finding.fact == "a GPU; torch for CUDA 13.0, driver for CUDA 13.0"
    fake_torch("1 / 0", "12040")
    [finding] = check_gpu(v1=False)
    assert finding.fact == "torch for CUDA 13.0, driver for CUDA 12.4"
    fake_torch("1 / 0")
    [finding] = check_gpu(v1=False)
    assert finding.fact.endswith("division by zero") and "nvidia-smi" in finding.cure
    fake_torch("None", driver="")
    [finding] = check_gpu(v1=False)
    assert "libcuda.so.1" in finding.fact
    fake_torch("__import__('os')._exit(9)")
    [finding] = check_gpu(v1=False)
    assert finding.fact == "exit 9" and "nvidia-smi" in finding.cure


@pytest.mark.parametrize("v1, value, fails", [(True, None, True), (True, "0", False), (True, "1", True),
                                              (False, None, False)])
def test_flashinfer_is_missed_only_where_it_is_imported(fake_torch, monkeypatch, v1, value, fails):
    monkeypatch.delenv(doctor_gpu.SAMPLER, raising=False)
    if value is not None:
        monkeypatch.setenv(doctor_gpu.SAMPLER, value)
    monkeypatch.setattr(doctor_gpu, "find_spec", lambda name: None)
    fake_torch("None")
    assert ("sampler" in [finding.check for finding in check_gpu(v1)]) is fails
