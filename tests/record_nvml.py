"""Record every answer of NVML that the probe asks for, to be replayed by `fake_nvml.FakeNvml`.

By hand, on a machine with NVIDIA cards: ``python tests/record_nvml.py > tests/cases/nvml/NAME.json``. What a person
should compare goes to stderr: the time that the probe takes, free memory before and after, the wheel's architectures.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

from fake_nvml import call_text  # noqa: E402
from planner.machine import arches, nvml, probe, toolchain  # noqa: E402


class Recorder:
    """Passes every question on to ``module`` and keeps its answer under the question's text."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._names: dict[int, str] = {}
        self.NVMLError = module.NVMLError
        self.answers: dict[str, Any] = {}

    def __getattr__(self, function: str) -> Any:
        if not function.startswith("nvml"):
            return getattr(self._module, function)
        return lambda *arguments: self._ask(function, arguments)

    def _ask(self, function: str, arguments: tuple[Any, ...]) -> Any:
        asked = call_text(function, arguments, self._name)
        try:
            answer = getattr(self._module, function)(*arguments)
        except self.NVMLError as error:
            self.answers[asked] = {"error": error.value, "text": str(error)}
            raise
        except AttributeError:
            self.answers[asked] = {"absent": True}
            raise
        if function in ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByUUID"):
            self._names.setdefault(address(answer), f"device {arguments[0]}")
        elif function == "nvmlDeviceGetMigDeviceHandleByIndex":
            self._names[address(answer)] = f"{self._name(arguments[0])} slice {arguments[1]}"
        self.answers[asked] = self._plain(answer)
        return answer

    def _name(self, part: Any) -> str | None:
        return self._names.get(address(part)) if isinstance(part, ctypes._Pointer) else None

    def _plain(self, answer: Any) -> Any:
        if isinstance(answer, ctypes._Pointer):
            return {"handle": self._name(answer)}
        if isinstance(answer, bytes):
            return answer.decode("utf-8", "replace")
        if isinstance(answer, ctypes.Structure):
            return {row[0]: self._plain(getattr(answer, row[0])) for row in answer._fields_}
        if isinstance(answer, list | tuple):
            return [self._plain(part) for part in answer]
        return answer if answer is None or isinstance(answer, str | int | float) else self._plain_object(answer)

    def _plain_object(self, answer: Any) -> Any:
        return {key: self._plain(value) for key, value in vars(answer).items()}


def address(handle: Any) -> int:
    """Where the C pointer ``handle`` leads: NVML gives one device the same handle each time."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _free(module: Any) -> list[int]:
    module.nvmlInit()
    try:
        handles = [module.nvmlDeviceGetHandleByIndex(index) for index in range(module.nvmlDeviceGetCount())]
        return [int(module.nvmlDeviceGetMemoryInfo(handle).free) for handle in handles]
    finally:
        module.nvmlShutdown()


def _judge_arches() -> None:
    """Say what torch's libraries hold, which of them, and in what time, beside torch's own word."""
    folder = toolchain.torch_folder()
    start = time.perf_counter()
    found = folder and arches.constant(folder)
    print(f"architectures in {time.perf_counter() - start:.3f} s: {found}", file=sys.stderr)
    code = "import torch; print(torch._C._cuda_getArchFlags())"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    print(f"architectures by torch: {asked.stdout.strip() or asked.stderr.strip()[-200:]}", file=sys.stderr)
    for path in [] if found or folder is None else sorted((folder / "lib").glob("*.so*")):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
            print(f"{path.name}: {arches.constants(held)}", file=sys.stderr)


def main() -> None:
    module = nvml.module()
    if module is None:
        sys.exit("nvidia-ml-py is not installed")
    before = _free(module)
    start = time.perf_counter()
    body = probe.fleet("auto")
    seconds = time.perf_counter() - start
    after = _free(module)
    recorder = Recorder(module)
    nvml.read(recorder, {}, "node-00000000")
    shown = [device["name"]["value"] for device in body["devices"].values()]
    print(json.dumps({"about": f"recorded: {shown}", "answers": recorder.answers}, indent=1, ensure_ascii=False))
    _judge_arches()
    for line in (
        f"probe took {seconds:.3f} s; torch imported by it: {'torch' in sys.modules}",
        f"free before and after: {before} {after}; the same: {before == after}",
        f"architectures read: {toolchain.read().get('arch_list')}",
        f"devices: {json.dumps(body['devices'], indent=1)}",
        f"links: {json.dumps(body.get('links'), indent=1)}",
        f"nodes: {json.dumps(body['nodes'], indent=1)}",
        f"environment: { {key: os.environ[key] for key in sorted(os.environ) if key.startswith(('CUDA_', 'NCCL_'))} }",
    ):
        print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
