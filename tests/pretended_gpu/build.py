"""Builds the library that pretends GPUs: the C files of this folder, and stubs for NVIDIA's other
functions that torch uses.
"""

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
SITE = Path(torch.__file__).parents[1]  # also holds torchvision and NVIDIA's packages
SOURCES = ("runtime.c", "nccl.c", "libraries.c")
ASKED = re.compile(r"^(cu[A-Z]|cuda[A-Z]|cublas|cudnn|cusparse|cusolver|curand|cufft|nccl|nvjpeg)")
OWN = re.compile(r"^(cu[A-Z]|cuda[A-Z]|nccl)")  # CUDA itself and NCCL; the other libraries compute
REAL = re.compile(r"Version|GetError|GetLastError|Property")  # need no device
# Functions of the runtime, the driver and NCCL whose stubs may do nothing. A call of any other is
# an error.
HARMLESS = re.compile(
    "Destroy|Release|Profiler|EnablePeerAccess|SetAttribute|MemPool|GraphMem|CaptureMode|ncclGroup|SetCurrent|Unload|CacheConfig"
)
# Functions of the libraries that compute nothing. All others count as kernels.
PREPARES = re.compile(r"Create|Destroy|Set|Get|Init|Size|Descriptor|Check|Finalize|MakePlan")
STUBS = (
    "#include <stdlib.h>\nint pretended_computed(const char *), pretended_missing(const char *);\n"
)


def get_skip_reason() -> str:
    """The reason why this machine can't pretend GPUs; empty if it can."""
    if platform.system() != "Linux":
        return "GPUs can only be pretended on Linux"
    if not torch.version.cuda:
        return f"torch {torch.__version__} is not a build for CUDA"
    if torch.cuda.is_available():
        return "there is a real GPU"
    missing = [tool for tool in ("gcc", "nm") if not shutil.which(tool)]
    if missing:
        return f"{' and '.join(missing)} (Debian: gcc, binutils) are needed to pretend GPUs"
    if not _find_headers(SITE):
        return "the headers of CUDA's runtime are not installed beside torch"
    return ""


def build() -> dict[str, str]:
    """Builds the library if needed; returns the environment in which torch's CUDA build sees pretended GPUs.

    The library is kept in the temporary folder, for all processes of this user, these sources and this torch.
    """
    headers = _find_headers(SITE)
    contents = [(HERE / name).read_bytes() for name in SOURCES]
    contents += [(HERE / name).read_bytes() for name in ("nvrtc.c", "pretended.h", "build.py")]
    contents += [str(headers).encode(), torch.__version__.encode()]
    key = hashlib.sha256(b"\0".join(contents)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"pretended-gpu-{os.getuid()}" / key
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.parent.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder.parent} belongs to somebody else, whose code would be run")
    built = folder / "built"
    nvrtc = next(SITE.glob("nvidia/*/lib/libnvrtc.so.*")).name
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():  # written last
            _compile(headers, folder, nvrtc)
    return {
        "PYTHONPATH": str(HERE.parents[1]),
        "LD_PRELOAD": f"{folder / 'libcuda.so.1'}:{folder / nvrtc}",
        "TORCH_CUDNN_V8_API_DISABLED": "1",
    }


def _find_headers(site: Path) -> Path | None:
    """CUDA's headers in torch's wheels: nvidia/cu13/include, before CUDA 13 nvidia/cuda_runtime/include."""
    return next((path.parent for path in site.glob("nvidia/*/include/cuda_runtime_api.h")), None)


def _compile(headers: Path, folder: Path, nvrtc: str) -> None:
    libraries = []
    for pattern in (
        "torch/lib/lib*cuda*.so",
        "torchvision/*_stable.so",
        "torchvision/_C.so",
        "torch/lib/libtorch_python.so",
        "torch/lib/libtorch_cpu.so",
        "torch/lib/libcaffe2_nvrtc.so",
    ):
        libraries += SITE.glob(pattern)
    symbols = set()
    for library in libraries:
        listing = subprocess.run(
            ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
        )
        symbols |= {line.split()[-1].split("@")[0] for line in listing.stdout.splitlines()}
    names = [name for name in sorted(symbols) if ASKED.match(name) and not REAL.search(name)]
    (folder / "stubs.c").write_text(STUBS + "".join(map(_write_stub, names)))
    flags = ["-O3", "-w", "-shared", "-fPIC", f"-I{HERE}", f"-I{headers}"]
    sources = [HERE / name for name in SOURCES] + [folder / "stubs.c"]
    output = ["-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so.1"]
    _run_gcc(flags + output + sources + ["-ldl", "-lpthread"])
    # torch finds NVRTC by the name of its file, and its functions only there.
    (folder / "versions").write_text(f"{nvrtc} {{ *; }};")
    versions = f"-Wl,-soname,{nvrtc},--version-script={folder / 'versions'}"
    _run_gcc(flags + [versions, "-o", folder / nvrtc, HERE / "nvrtc.c"])
    (folder / "built").touch()


def _run_gcc(argv: list) -> None:
    done = subprocess.run(["gcc"] + argv, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the pretended runtime does not compile:\n{done.stderr}")


def _write_stub(name: str) -> str:
    """A weak function that succeeds, or reports an error if it would have to compute. Hand-written
    ones replace it.
    """
    start = f"__attribute__((weak)) int {name}"
    if OWN.match(name) and not HARMLESS.search(name):
        return f'{start}() {{ return pretended_missing("{name}"); }}\n'
    if not OWN.match(name) and not PREPARES.search(name):
        return f'{start}() {{ return pretended_computed("{name}") ? 0 : 8; }}\n'
    if "Create" in name:
        return f"{start}(void **handle) {{ *handle = calloc(1, 4096); return 0; }}\n"
    return f"{start}() {{ return 0; }}\n"


if __name__ == "__main__":
    print(" ".join(f"{name}={value}" for name, value in build().items()))
