"""The public fixtures, for the bundled suite and a user's own tests alike; torch is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    import torch

    from oracles import Truth

    from .cases import Case
    from .implementation import Implementation
    from .inputs import Inputs
    from .verdict import Verdict

PUBLIC = frozenset(
    ("flashattn_impl", "flashattn_case", "flashattn_inputs", "flashattn_oracle", "flashattn_check", "flashattn_device")
)


class RunCheck(Protocol):
    """The type of `flashattn_check`: the name of a check and a case in, its verdict out."""

    def __call__(self, name: str, case: Case, /) -> Verdict: ...


@pytest.fixture(scope="session")
def _flashattn_implementation(request: pytest.FixtureRequest) -> Implementation | None:
    from . import state

    run = state.of(request.config)
    names = list(run.settings.names())
    if not names:
        return None
    try:
        return run.implementation(getattr(request, "param", names[0]))
    except ValueError as error:  # in an xdist worker only: elsewhere the session start has loaded it
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def flashattn_impl(_flashattn_implementation: Implementation | None) -> Implementation:
    """The implementation under test (--flashattn-impl); parametrised when several are named."""
    from . import state

    if _flashattn_implementation is None:
        pytest.fail(state.NAME_ONE, pytrace=False)
    return _flashattn_implementation


@pytest.fixture
def flashattn_case(request: pytest.FixtureRequest, _flashattn_implementation: Implementation | None) -> Case:
    """One case. The suite parametrises it; own tests do so with @pytest.mark.flashattn_cases("forward").

    A case that the implementation declares it lacks, or that the machine cannot hold, ends the test here.
    """
    from . import outcomes, state
    from .collection import with_seed

    if not hasattr(request, "param"):
        pytest.fail('flashattn_case needs cases: mark the test @pytest.mark.flashattn_cases("forward")', pytrace=False)
    case = with_seed(request.param, state.of(request.config).settings.seed)
    if _flashattn_implementation is not None:
        from . import trial

        if (verdict := trial.gate(_flashattn_implementation, case)) is not None:
            outcomes.settle(request.node, verdict)
    return case


@pytest.fixture
def flashattn_device(request: pytest.FixtureRequest, _flashattn_implementation: Implementation | None) -> torch.device:
    """The torch.device of the run (--flashattn-device)."""
    import torch

    if _flashattn_implementation is not None:
        return torch.device(_flashattn_implementation.device)
    from . import state

    asked = state.of(request.config).settings.device
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if asked == "auto" else asked)


@pytest.fixture
def flashattn_inputs(
    flashattn_case: Case, flashattn_device: torch.device, _flashattn_implementation: Implementation | None
) -> Inputs:
    """The tensors of the case, on the device, in the layout that the implementation takes."""
    from .inputs import make_inputs

    native = "bhsd" if _flashattn_implementation is None else _flashattn_implementation.convention.layout
    return make_inputs(flashattn_case, flashattn_device, native=native)


@pytest.fixture
def flashattn_oracle(flashattn_inputs: Inputs, flashattn_impl: Implementation) -> dict[str, Truth]:
    """The float64 truth of the case and how far from it a correct kernel may be, by quantity: o, lse, dq, …"""
    from . import examination

    backward = "backward" in flashattn_impl.support.features
    return examination.truth(flashattn_impl, flashattn_inputs, backward=backward)


@pytest.fixture
def flashattn_check(request: pytest.FixtureRequest, flashattn_impl: Implementation) -> RunCheck:
    """`flashattn_check("forward.matches_oracle", case)`: run a check, record its verdict, fail or skip the test."""
    from . import outcomes, state

    def check(name: str, case: Case, /) -> Verdict:
        from . import fuzz, trial

        verdict = trial.run_check(name, flashattn_impl, case)
        if verdict.status == "failed" and name.startswith(f"{fuzz.CHAPTER}."):
            verdict = fuzz.explain(name, flashattn_impl, case, verdict, state.of(request.config))
        return outcomes.settle(request.node, verdict)

    return check
