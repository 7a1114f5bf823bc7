"""Ask a constraint solver so that Ctrl+C and an answer from elsewhere end it at once."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING

from ppedu.core import PipelineError

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver, CpSolverStatus

MOST_WORKERS = 64
POLL = 0.01  # seconds between two attempts to stop a solver


def answers(
    models: Mapping[str, CpModel], seconds: float, workers: int, seed: int = 0
) -> Generator[tuple[str, CpSolver, str], None, None]:
    """Solve models side by side, and yield their names, solvers and the solvers' statuses as they end.

    The solvers that still run are stopped when the caller closes the generator, or is interrupted.
    """
    from ortools.sat.python.cp_model import CpSolver

    solvers = {name: CpSolver() for name in models}
    for solver in solvers.values():
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.random_seed = seed
        solver.parameters.num_workers = max(1, min(workers, MOST_WORKERS) // len(solvers))
        solver.parameters.catch_sigint_signal = False  # two solvers that catch it abort the process
    with ThreadPoolExecutor(len(solvers) or 1) as pool:  # a solver in the main thread would keep Ctrl+C waiting
        asked: dict[Future[CpSolverStatus], str] = {
            pool.submit(solvers[name].solve, model): name for name, model in models.items()
        }
        try:
            for each in as_completed(asked):
                solver = solvers[asked[each]]
                yield asked[each], solver, solver.status_name(each.result())
        finally:
            while not all(each.done() for each in asked):  # a solver that has not begun yet ignores that it should stop
                for solver in solvers.values():
                    solver.stop_search()
                time.sleep(POLL)


def require_solver() -> None:
    try:
        import ortools.sat.python.cp_model  # noqa: F401
    except ImportError:
        raise PipelineError('a search needs OR-tools; install it with: pip install "ppedu[search]"') from None
