"""Builds the runtime: what is written by hand, and a success for every other function that torch asks of NVIDIA's libraries."""

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
ASKED = re.compile(r"^(cu[A-Z]|cuda[A-Z]|cublas|cudnn|cusparse|cusolver|curand|cufft|nccl|nvjpeg)")
REAL = re.compile(r"Version|GetError|GetLastError|Property")  # need no device


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
    stub = {True: "int %s(void **p) {{ *p = calloc(1, 4096); return 0; }}", False: "int %s() {{ return 0; }}"}
    (folder / "stubs.c").write_text(
        "#include <stdlib.h>\n" + "\n".join(stub["Create" in n].format() % n for n in names)
    )
    built = folder / "libcuda.so.1"
    sources = [HERE / "runtime.c", folder / "stubs.c"]
    flags = ["-O1", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{HERE}", f"-I{headers}"]
    subprocess.run(["gcc", *flags, "-o", built, *sources, "-ldl", "-lpthread", "-lrt"], check=True)
    (folder / "libcuda.so").symlink_to(built)
    # torch looks for NVRTC by the name of its file, and for functions in that file alone.
    name = next(site.glob("nvidia/*/lib/libnvrtc.so.*")).name
    (folder / "versions").write_text(f"{name} {{ *; }};")
    nvrtc, script = folder / name, f"-Wl,--version-script={folder / 'versions'}"
    flags = ["-shared", "-fPIC", f"-Wl,-soname,{name}", script]
    subprocess.run(["gcc", *flags, "-o", nvrtc, HERE / "nvrtc.c"], check=True)
    return {
        "PYTHONPATH": str(HERE.parents[1]),
        "LD_PRELOAD": f"{built}:{nvrtc}",
        "TORCH_CUDNN_V8_API_DISABLED": "1",
        "TRITON_LIBCUDA_PATH": str(folder),
    }
