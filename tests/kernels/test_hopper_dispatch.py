"""Who serves a call: the choice of dispatch.py, with a Hopper GPU and its kernels played by the test.

What runs on a real one is in measurements/; here every line of the choice runs on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from interpreted import check

pytest.importorskip("triton")

from reference_kernels import dispatch
from reference_kernels.backward import Grads
from reference_kernels.hopper import backward as hopper_backward
from reference_kernels.hopper import launch as hopper_launch
from reference_kernels.hopper import schedule as schedules

TERMS: dict[str, Any] = dict.fromkeys(("softcap", "slopes", "bias", "mask", "sinks"))
WANTS = {"want_q": True, "want_kv": True, "want_bias": False, "want_sinks": False}
Calls = list[tuple[str, dict[str, Any]]]


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape or (1, 2, 64, 64), dtype=dtype)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Every kernel that was called, with its options; a Hopper GPU as far as dispatch and `supports` ask for one."""
    made: Calls = []

    def record(name: str, result: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(*tensors: Any, **options: Any) -> Any:
            made.append((name, options))
            return result(*tensors)

        return kernel

    def outputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return torch.empty_like(q), torch.empty(q.shape[:3])

    monkeypatch.setattr(dispatch, "machine", lambda device: None)
    monkeypatch.setattr(hopper_launch, "forward", record("hopper", outputs))
    monkeypatch.setattr(dispatch.plain_forward, "forward", record("triton", outputs))
    monkeypatch.setattr(hopper_backward, "backward", record("hopper", lambda q, k, v, *rest: (q, k, v)))
    monkeypatch.setattr(dispatch.plain_backward, "backward", record("triton", lambda *_: Grads(*[None] * 5)))
    # Of what the kernels themselves demand, all but the device.
    forward_demands, gpu = hopper_launch.supports, "q is not on a GPU of compute capability 9.0"
    monkeypatch.setattr(
        hopper_launch, "supports", lambda *t, **o: None if (said := forward_demands(*t, **o)) == gpu else said
    )
    monkeypatch.setattr(hopper_backward, "supports", hopper_backward._problem)
    return made


def run_forward(
    q: torch.Tensor | None = None, *, kernel: str | None = None, scale: float = 0.125, left: int | None = None,
    right: int | None = None, **terms: Any,
) -> None:  # fmt: skip
    q = tensor() if q is None else q
    options = TERMS | terms
    dispatch.forward(q, q, q, kernel=kernel, scale=scale, left=left, right=right, input_precision="ieee", **options)


def run_backward(
    q: torch.Tensor | None = None, *, kernel: str | None = None, deterministic: bool = False, left: int | None = None,
    right: int | None = None, **options: Any,
) -> Grads:  # fmt: skip
    q = tensor() if q is None else q
    return dispatch.backward(
        q, None, q, q, q, q, torch.zeros(q.shape[:3]), kernel=kernel, deterministic=deterministic, scale=0.125,
        left=left, right=right, input_precision="ieee", **(TERMS | WANTS | options),
    )  # fmt: skip


@pytest.mark.parametrize("run", [run_forward, run_backward])
@pytest.mark.parametrize(
    ("options", "causal"),
    [
        ({}, False),
        ({"right": 0}, True),
        ({"left": 63, "right": 63}, False),  # a window that hides nothing
        ({"left": 63, "right": 0}, True),
        ({"q": tensor(1, 2, 1, 64), "right": 0}, False),  # one row sees every key
        ({"q": tensor(1, 2, 64, 128, dtype=torch.float16)}, False),
        ({"q": tensor(2, 1, 7, 256)}, False),
        ({"q": tensor(1, 64, 2, 64).transpose(1, 2)}, False),
        ({"kernel": "hopper"}, False),
    ],
)
def test_hopper_serves(calls: Calls, run: Any, options: dict[str, Any], causal: bool) -> None:
    run(**options)
    [(kernel, given)] = calls
    assert kernel == "hopper"
    assert given["causal"] is causal


@pytest.mark.parametrize("run", [run_forward, run_backward])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"left": 5}, "window"),
        ({"right": 1}, "window"),
        ({"left": 5, "right": 0}, "window"),
        *(({name: torch.ones(2)}, f"no {name}") for name in ("slopes", "bias", "mask", "sinks")),
        ({"softcap": 2.0}, "no softcap"),
        ({"q": tensor(dtype=torch.float32)}, "float32"),
        ({"q": tensor(1, 2, 64, 80)}, "80"),
        ({"q": tensor(1, 2, 64, 65)[..., 1:]}, "16 bytes"),
        ({"q": tensor(1, 2, 1, 64).expand(1, 2, 64, 64)}, "stride"),
    ],
)
def test_triton_serves_the_rest_and_hopper_named_says_why_not(
    calls: Calls, run: Any, options: dict[str, Any], reason: str
) -> None:
    run(**options)
    assert [kernel for kernel, _ in calls] == ["triton"]
    with pytest.raises(NotImplementedError, match=rf"kernel='hopper': .*{reason}"):
        run(**options, kernel="hopper")
    assert len(calls) == 1


@pytest.mark.parametrize("run", [run_forward, run_backward])
def test_triton_named_is_triton(calls: Calls, run: Any) -> None:
    run(kernel="triton")
    assert [kernel for kernel, _ in calls] == ["triton"]


@pytest.mark.parametrize("scale", [0.0, -0.125])
def test_only_the_forward_refuses_a_scale(calls: Calls, scale: float) -> None:
    run_forward(scale=scale)
    assert [kernel for kernel, _ in calls] == ["triton"]


def test_triton_gets_what_the_call_asked_for(calls: Calls) -> None:
    run_forward(left=5, softcap=2.0)
    [(_, given)] = calls
    assert given == TERMS | {"scale": 0.125, "left": 5, "right": None, "input_precision": "ieee", "softcap": 2.0}


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_backward_is_told_whether_it_must_repeat_its_bits(calls: Calls, deterministic: bool) -> None:
    run_backward(deterministic=deterministic)
    assert calls[0][1]["deterministic"] is deterministic


@pytest.mark.parametrize("wants", [(True, False), (False, True)])
def test_where_not_all_gradients_are_wanted_triton_computes_those(calls: Calls, wants: tuple[bool, bool]) -> None:
    want_q, want_kv = wants
    run_backward(want_q=want_q, want_kv=want_kv)
    named = run_backward(want_q=want_q, want_kv=want_kv, kernel="hopper")
    assert [kernel for kernel, _ in calls] == ["triton", "hopper"]
    assert [grad is not None for grad in named[:3]] == [want_q, want_kv, want_kv]


@pytest.fixture
def fresh_machine() -> Iterator[None]:
    dispatch.machine.cache_clear()
    yield
    dispatch.machine.cache_clear()


@pytest.mark.parametrize(
    ("capability", "version", "reason"),
    [
        ((9, 0), "3.6.0", None),
        ((9, 0), "3.9.0+git1234", None),
        ((8, 9), "3.9.0", "8.9"),
        ((10, 0), "3.9.0", "10.0"),
        ((9, 0), "3.5.1", "3.5.1"),
        ((9, 0), "3.10.0", "3.6 to 3.9"),
    ],
)
def test_the_machine(
    monkeypatch: pytest.MonkeyPatch, fresh_machine: None, capability: tuple[int, int], version: str, reason: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(dispatch.triton, "__version__", version)
    said = dispatch.machine(torch.device("cuda", 0))
    assert said is None if reason is None else reason in (said or "")


def test_a_cpu_is_no_hopper_gpu(fresh_machine: None) -> None:
    assert "the tensors are on cpu" in (dispatch.machine(torch.device("cpu")) or "")


def test_lists_of_tiles_are_kept_and_those_of_graphs_outlive_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "MOST_KEPT", 2)
    monkeypatch.setattr(schedules, "_kept", {})
    recorded: dict[Any, Any] = {}
    monkeypatch.setattr(schedules, "_in_graphs", recorded)
    cpu = torch.device("cpu")
    problems = [schedules.Problem(1, 2, 1, 128 * n, 128 * n, 64, 128, 128, False) for n in (1, 2, 3)]
    first = schedules.schedule(problems[0], 4, cpu)
    assert schedules.schedule(problems[0], 4, cpu) is first
    recorded[problems[0], 4, cpu] = first
    for p in problems[1:]:
        assert not schedules.is_kept(p, 4, cpu)
        schedules.schedule(p, 4, cpu)
    assert [schedules.is_kept(p, 4, cpu) for p in problems] == [True, False, True]
    assert schedules.schedule(problems[0], 4, cpu) is first


def test_under_capture_only_shapes_that_ran_before_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnDevice(torch.Tensor):
        device = torch.device("cuda", 0)  # type: ignore[assignment]

    q = tensor().as_subclass(OnDevice)
    capturing = False
    monkeypatch.setattr(schedules, "_kept", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(hopper_launch, "_sms", lambda device: 132)
    assert hopper_launch.supports(q, q, q) is None
    capturing = True
    assert "run them once" in (hopper_launch.supports(q, q, q) or "")
    problem, workers, device = hopper_launch._work(q, q, False, None)
    schedules._kept[problem, workers, device] = schedules._copied([[0]], torch.device("cpu"))
    assert hopper_launch.supports(q, q, q) is None
    assert "run them once" in (hopper_launch.supports(q, q, q, causal=True) or "")


def test_the_public_function_passes_its_wishes_on() -> None:
    check(
        """
import torch
from reference_kernels import dispatch, flash_attention

seen = []
def spy(name):
    honest = getattr(dispatch, name)
    def call(*tensors, kernel, **options):
        seen.append((name, kernel, options.get("deterministic")))
        return honest(*tensors, kernel=kernel, **options)
    setattr(dispatch, name, call)
spy("forward"), spy("backward")

def run(**options):
    seen.clear()
    q, k, v = (torch.randn(1, 2, 20, 16, requires_grad=True) for _ in range(3))
    flash_attention(q, k, v, **options).sum().backward()
    return seen

assert run() == [("forward", None, None), ("backward", None, False)]
assert run(kernel="triton", deterministic=True) == [("forward", "triton", None), ("backward", "triton", True)]
torch.use_deterministic_algorithms(True)
assert run()[1][2] is True
assert run(deterministic=False)[1][2] is False
"""
    )
