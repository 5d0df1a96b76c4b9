"""Compiler processes, seen from the outside: send jobs, collect results, survive crashes."""

from __future__ import annotations

import base64
import contextlib
import importlib
import io
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .expectations import ARCHITECTURES
from .messages import reason_in
from .results import Case, Compiled, Dot

#: Seconds that one compile may take. The slowest reference kernel needs a tenth of it on two cores.
TIME_LIMIT = 300.0


def compile_case(case: Case, capability: int) -> Compiled:
    """Compile one case for one capability (80, 89, …) in a process of its own; the compiler's failures are results.

    ValueError for a capability that is not in `ARCHITECTURES`, or a kernel that another process cannot import because
    it is not at the top level of a module.
    """
    return compile_all([(case, capability)])[0]


def compile_all(
    jobs: Sequence[tuple[Case, int]],
    *,
    processes: int | None = None,
    time_limit: float = TIME_LIMIT,
    done: Callable[[Compiled], None] | None = None,
) -> list[Compiled]:
    """Compile every (case, capability), in the order given; the errors are those of `compile_case`.

    `processes` compilers work side by side (default: the cores that this process may use). One that dies, or works
    longer than `time_limit` seconds on a job, is replaced. `done` is called with each result as it arrives, from one
    thread at a time.
    """
    pending: queue.SimpleQueue[int] = queue.SimpleQueue()
    messages = []
    for index, (case, capability) in enumerate(jobs):
        if capability not in ARCHITECTURES:
            known = ", ".join(map(str, ARCHITECTURES))
            raise ValueError(f"compute capability {capability} is not one the lane knows ({known}).")
        messages.append(pack(case, capability))
        pending.put(index)
    results: dict[int, Compiled] = {}
    lock = threading.Lock()

    def work() -> None:
        compiler = None
        try:
            while True:
                try:
                    index = pending.get_nowait()
                except queue.Empty:
                    return
                if compiler is not None and not compiler.alive:
                    compiler.close()
                    compiler = None
                compiler = compiler or Compiler()
                case, capability = jobs[index]
                answer = compiler.ask(messages[index], time_limit)
                result = Compiled(
                    name=case.name,
                    capability=capability,
                    num_warps=case.num_warps,
                    instructions=tuple(getattr(case, "instructions", ())),
                    specialised=getattr(case, "specialised", False),
                    **answer,
                )
                with lock:
                    results[index] = result
                    if done is not None:
                        done(result)
        finally:
            if compiler is not None:
                compiler.close()

    count = max(1, min(len(jobs), processes or len(os.sched_getaffinity(0))))
    with ThreadPoolExecutor(count) as threads:
        for worker in [threads.submit(work) for _ in range(count)]:
            worker.result()
    return [results[index] for index in range(len(jobs))]


class Compiler:
    """One compiler process. A question is a line on its stdin, an answer a line on its stdout, its chatter a file."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="compile-lane-")
        self._log = Path(self._folder.name, "log")
        # Triton's own switches change what is compiled; the lane speaks for a run without them.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
        environment |= {
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(os.path.abspath(p) for p in sys.path)),
            "TRITON_CACHE_DIR": str(Path(self._folder.name, "cache")),  # a cache hit would run no ptxas
            "TRITON_DUMP_PTXAS_LOG": "1",
            "TRITON_DEFAULT_FP_FUSION": "1",  # 3.9 warns that this default will change in 3.10
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__package__}.worker import serve; serve()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, message: bytes, time_limit: float) -> dict[str, Any]:
        """Send one job and return the fields of `Compiled` that the compiler knows; a crash is a `fault`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        started = time.monotonic()
        expired = threading.Event()

        def kill() -> None:
            expired.set()
            self._process.kill()

        timer = threading.Timer(time_limit, kill)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(message + b"\n")
                self._process.stdin.flush()
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if line:
            answer: dict[str, Any] = json.loads(line)
            answer["dots"] = tuple(Dot(*dot) for dot in answer.get("dots", ()))
            answer["warnings"] = tuple(answer.get("warnings", ()))
        else:
            code = self._process.wait()
            cause = f"took longer than {time_limit:g} s" if expired.is_set() else _ending(code)
            reason = "" if expired.is_set() else reason_in(self._log.read_text(errors="replace"))
            answer = {"fault": f"the compiler {cause}{': ' + reason if reason else ''}."}
        return answer | {"seconds": time.monotonic() - started}

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()  # end of input ends the compiler
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()


def _ending(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit status {code}"


class _Pickler(pickle.Pickler):
    """Writes a Triton function as the place it is imported from: the object itself holds compiler state."""

    def persistent_id(self, obj: Any) -> tuple[str, str] | None:
        from triton.runtime.jit import KernelInterface

        # Under TRITON_INTERPRET=1 `triton.jit` makes another class in this process, and a JITFunction in the compiler.
        if not (isinstance(obj, KernelInterface) or type(obj).__name__ == "InterpretedFunction"):
            return None
        function = obj
        while hasattr(function, "fn"):  # the autotuner and heuristics wrap a function, which wraps the Python one
            function = function.fn
        if "<locals>" in function.__qualname__:
            raise ValueError(f"kernel {function.__qualname__} must be at the top level of a module to be compiled.")
        return function.__module__, function.__qualname__


class Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: tuple[str, str]) -> Any:
        from triton.runtime.jit import JITFunction

        found = importlib.import_module(pid[0])
        for part in pid[1].split("."):
            found = getattr(found, part)
        while not isinstance(found, JITFunction) and hasattr(found, "fn"):
            found = found.fn
        return found


def pack(case: Case, capability: int) -> bytes:
    job = (case.kernel, dict(case.signature), dict(case.constexprs), case.num_warps, case.num_stages, capability)
    buffer = io.BytesIO()
    _Pickler(buffer).dump(job)
    return base64.b64encode(buffer.getvalue())
