"""Errors of a reader's code, in one line."""

OWN_CODE = "<your code>"  # the beginning of the name of every file with a reader's code


def said(error: BaseException) -> str:
    """Return an error of the reader's code in one line, with the line of the code."""
    trace, line = error.__traceback__, getattr(error, "lineno", None)
    while trace:
        if trace.tb_frame.f_code.co_filename.startswith(OWN_CODE):
            line = trace.tb_lineno
        trace = trace.tb_next
    where = f"line {line}: " if line else ""
    return f"{where}{type(error).__name__}: {getattr(error, 'msg', None) or error}"
