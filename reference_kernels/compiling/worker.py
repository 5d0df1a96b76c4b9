"""Inside a compiler process: answer jobs from stdin, one JSON object each, without a driver."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .messages import reason_in, shorten
from .processes import Unpickler
from .results import Dot

#: PTX instructions that are counted. All counts are static: a loop body counts once.
INSTRUCTIONS: dict[str, re.Pattern[str]] = {
    "mma.sync": re.compile(r"\bmma(?:\.sp)?\.sync\b"),
    "wgmma": re.compile(r"\bwgmma\.mma_async\b"),
    "tcgen05": re.compile(r"\btcgen05\.mma\b"),
    "mma.sync e4m3": re.compile(r"\bmma\.sync\S*\.e4m3\.e4m3\."),
    "wgmma e4m3": re.compile(r"\bwgmma\.mma_async\S*\.e4m3\.e4m3\b"),
    "tcgen05 f8f6f4": re.compile(r"\btcgen05\.mma\S*\.kind::f8f6f4\b"),
    "cp.async": re.compile(r"\bcp\.async\.c[ag]\.shared\b"),
    "tma": re.compile(r"\bcp\.(?:reduce\.)?async\.bulk\.(?:tensor|shared|global)\b"),
}


class NoDevice:
    """Stands in for Triton's driver: kernels may ask which target they are compiled for, and nothing else."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"the compile lane has no GPU: the driver's {name} was asked for")


def serve() -> None:
    """Answer jobs from stdin until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints on stdout must not end up among the answers
    for line in sys.stdin:
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                job = Unpickler(io.BytesIO(base64.b64decode(line))).load()
                compiled, version = _build(*job)
            answer = _measure(compiled, printed.getvalue()) | {"triton": version}
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            sys.stderr.flush()
            answer = {"fault": _explain(error, Path("/proc/self/fd/2").read_text(errors="replace"))}
        print(json.dumps(answer), file=answers, flush=True)


def _build(
    kernel: Any,
    signature: dict[str, str],
    constexprs: dict[str, Any],
    num_warps: int,
    num_stages: int,
    capability: int,
) -> tuple[Any, str]:
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", capability, 32)
    triton.runtime.driver.set_active(NoDevice(target))
    types: dict[str, str] = {}
    hints: dict[tuple[int], list[list[Any]]] = {}
    unknown = sorted((signature.keys() | constexprs.keys()) - set(kernel.arg_names))
    if unknown:
        raise TypeError(f"the kernel has no argument {', '.join(unknown)}")
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in constexprs:
            types[name] = "constexpr"
            continue
        if name not in signature:
            raise TypeError(f"the case gives neither type nor value for argument {name}")
        hint = re.fullmatch(r"(.*):(1|16)", signature[name], re.DOTALL)
        types[name] = hint[1] if hint else signature[name]
        unspecialised = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
        assumed = types[name].startswith("*") and not unspecialised
        if (hint[2] == "16") if hint else assumed:
            hints[index,] = [["tt.divisibility", 16]]
    source = _source_class(kernel)(fn=kernel, signature=types, constexprs=constexprs, attrs=hints)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return triton.compile(source, target=target, options=options), triton.__version__


def _source_class(kernel: Any) -> Any:
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler import ASTSource

    return ASTSource


def _measure(compiled: Any, ptxas_log: str) -> dict[str, Any]:
    """Read the numbers of `Compiled` from Triton's artefacts and from what ptxas printed."""
    ptx = re.sub(r"//.*", "", compiled.asm["ptx"])
    return {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", ptxas_log)), default=0),
        "spills": sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", ptxas_log))),
        "stack": max(map(int, re.findall(r"(\d+) bytes stack frame", ptxas_log)), default=0),
        "shared": compiled.metadata.shared,
        "tensor_memory": getattr(compiled.metadata, "tmem_size", None) or 0,
        "counts": {family: len(pattern.findall(ptx)) for family, pattern in INSTRUCTIONS.items()},
        "partitions": partitions(compiled.asm.get("ttgir", "")),
        "dots": [dataclasses.astuple(dot) for dot in _dots(compiled.asm.get("ttir", ""))],
        "local_in_loops": local_in_loops(_disassemble(compiled.asm["cubin"])),
        "warnings": ptxas_warnings(ptxas_log),
    }


def partitions(ttgir: str) -> int:
    """The most groups into which a `ttg.warp_specialize` divides the warps, the one they were launched as included."""
    found = [
        1 + len(re.findall(r"^ *partition\d+\(", region, re.M))
        for region in re.split(r"\bttg\.warp_specialize\(", ttgir)[1:]
    ]
    return max(found, default=0)


_DOT = re.compile(
    r"\btt\.dot .*?(?:inputPrecision = (?P<precision>\w+).*?)?"
    r": tensor<(?:\d+x)?(?P<m>\d+)x(?P<k>\d+)x(?P<dtype>[A-Za-z]\w*)> \* tensor<(?:\d+x)?\d+x(?P<n>\d+)x"
)


def _dots(ttir: str) -> list[Dot]:
    """The distinct products of a kernel. Triton IR leaves `inputPrecision` out where it is the exact one."""
    return sorted(
        {Dot(int(d["m"]), int(d["n"]), int(d["k"]), d["dtype"], d["precision"] or "ieee") for d in _DOT.finditer(ttir)}
    )


def ptxas_warnings(log: str) -> list[str]:
    """What ptxas complains about: warnings, and the advisories by which it says that it serialised wgmma (C75xx)."""
    said = []
    for line in log.splitlines():
        match = re.match(r"ptxas\S*\s+(?:.*?, line \d+; )?(warning|info)\s*:\s*(.*)", line.strip())
        if match and (match[1] == "warning" or re.match(r"\(C\d+\)", match[2]) or "Performance Loss" in match[2]):
            said.append(match[2])
    return list(dict.fromkeys(said))


def _disassemble(cubin: bytes) -> str:
    import triton

    tool = Path(triton.__file__).with_name("backends") / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout


def local_in_loops(sass: str) -> int:
    """Count loads and stores of local memory between a label and a later branch back to it.

    Not where registers change hands in between (USETMAXREG): that is no loop of the kernel's, but the one in which the
    warp groups of a specialised kernel wait for their part, or the retry of a barrier, which ptxas puts behind the end.
    """
    labels: dict[str, int] = {}
    local: list[int] = []
    handed_over = -1
    inside: set[int] = set()
    for number, line in enumerate(sass.splitlines()):
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = number
        elif re.search(r"\b(?:LDL|STL)\b", line):
            local.append(number)
        elif re.search(r"\bUSETMAXREG\b", line):
            handed_over = number
        elif (branch := re.search(r"\bBRA\b.*`\((\.L\w+)\)", line)) and labels.get(branch[1], -1) > handed_over:
            inside.update(access for access in local if access > labels[branch[1]])
    return len(inside)


def _explain(error: BaseException, log: str) -> str:
    """One sentence for an exception of the compiler. MLIR writes its reason to stderr and raises without it."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error)
    reason = reason_in(text) or (reason_in(log) if "PassManager" in text else "")
    if not reason:
        lines = [line.strip() for line in text.splitlines() if line.strip(" ^\t")]
        reason = lines[-1] if lines else ""
    return f"it does not compile: {type(error).__name__}: {shorten(reason)}.".replace("..", ".")
