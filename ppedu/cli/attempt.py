"""Run a learner's cells and check one answer: the process that `ppedu grade` starts for each exercise.

usage: python -m ppedu.cli.attempt PARENT NUMBER NAME, with the cells as a JSON list on stdin and the verdict on stdout
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any

from ppedu.launch.launcher import exit_with_parent

MEMORY = 4 << 30  # bytes; an endless list raises MemoryError before the machine runs out of memory


def attempt(number: str, name: str, cells: list[str]) -> dict[str, Any]:
    """Run the cells that define an answer; return whether it is right, the feedback, and the score if there is one."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    import ppedu.notebook
    from ppedu.course.exercises import EXERCISES, find_fault

    for checking in ("check_answer", "hint"):  # the answer is checked below, without pictures
        setattr(ppedu.notebook, checking, lambda *_, **__: None)
    shell = InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))
    failure = f"`{name}` is not defined in this notebook"
    for cell in cells:
        result = shell.run_cell(cell)
        if error := result.error_before_exec or result.error_in_exec:
            where = f" at line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else f": {error}"
            failure = f"your cell fails, {type(error).__name__}{where}"
    if name not in shell.user_ns:
        return {"right": False, "feedback": failure}
    answer, task = shell.user_ns[name], EXERCISES[number]
    if fault := find_fault(number, answer):
        return {"right": False, "feedback": fault}
    return {"right": True, "feedback": "right"} | ({"score": task.score(answer)} if task.score else {})


if __name__ == "__main__":
    exit_with_parent(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    _, _, number, name = sys.argv
    given, verdict = json.load(sys.stdin), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)  # input() raises EOFError
    os.dup2(0, 1)  # learners' own output is not the verdict
    try:
        found = attempt(number, name, given)
    except BaseException as error:
        found = {"right": False, "feedback": f"your answer fails: {type(error).__name__}: {error}"}
    os.write(verdict, json.dumps(found).encode())
    os._exit(0)  # threads that learners have started do not delay the verdict
