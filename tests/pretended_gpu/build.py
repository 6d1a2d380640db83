"""Builds the runtime: what is written by hand, and a success for every other function that torch asks of NVIDIA's libraries."""

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
ASKED = re.compile(r"^(cu[A-Z]|cuda[A-Z]|cublas|cudnn|cusparse|cusolver|curand|cufft|nccl|nvjpeg)")
REAL = re.compile(r"Version|GetError|GetLastError|Property")  # need no device
# What a function of CUDA itself or of NCCL would have had to do is missed; what these would have done is not.
HARMLESS = re.compile(
    r"Destroy|Release|Profiler|EnablePeerAccess|SetAttribute|MemPool|GraphMem|ncclGroup|ncclCommAbort|ncclCommFinal"
)
# Functions of the libraries that compute nothing; the others are kernels.
PREPARES = re.compile(r"Create|Destroy|Set|Get|Init|Size|Descriptor|Check|Finalize|^nvjpeg|MakePlan|^cuFile")


def stub(name: str) -> str:
    """A function that succeeds, or fails loudly where it would have had something to do."""
    if re.match("cuda|cu[A-Z]|nccl", name) and not HARMLESS.search(name):
        return f'int {name}() {{ return pretended_missing("{name}"); }}'
    if not re.match("cuda|cu[A-Z]|nccl", name) and not PREPARES.search(name):
        return f'int {name}() {{ return pretended_computed("{name}") ? 0 : 8; }}'
    if "Create" in name:
        return f"int {name}(void **p) {{ *p = calloc(1, 4096); return 0; }}"
    return f"int {name}() {{ return 0; }}"


def build(folder: Path) -> dict[str, str]:
    """The environment in which torch's CUDA build sees the pretended GPUs."""
    site = Path(find_spec("torch").origin).parents[1]
    headers = next(site.glob("nvidia/*/include/cuda_runtime_api.h")).parent
    libraries = [
        *site.glob("torch/lib/lib*cuda*.so"),
        *site.glob("torchvision/*_stable.so"),
        *site.glob("torchvision/_C.so"),
    ]
    libraries += [site / "torch/lib" / name for name in ("libtorch_python.so", "libtorch_cpu.so", "libcaffe2_nvrtc.so")]
    own, asked = (HERE / "runtime.c").read_text(), set()
    for library in libraries:
        lines = subprocess.run(
            ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
        ).stdout
        asked |= {line.split()[-1].split("@")[0] for line in lines.splitlines()}
    names = [n for n in sorted(asked) if ASKED.match(n) and not REAL.search(n) and not re.search(rf"\b{n}\s*\(", own)]
    (folder / "stubs.c").write_text(
        "#include <stdlib.h>\nint pretended_computed(const char *), pretended_missing(const char *);\n"
        + "\n".join(map(stub, names))
    )
    built = folder / "libcuda.so.1"
    sources = [HERE / "runtime.c", folder / "stubs.c"]
    flags = ["-O1", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{HERE}", f"-I{headers}"]
    subprocess.run(["gcc", *flags, "-o", built, *sources, "-ldl", "-lpthread", "-lrt"], check=True)
    (folder / "libcuda.so").symlink_to(built)
    return {
        "PYTHONPATH": str(HERE.parents[1]),
        "LD_PRELOAD": str(built),
        "TORCH_CUDNN_V8_API_DISABLED": "1",
        "TRITON_LIBCUDA_PATH": str(folder),
    }
