"""Shrink the standard library, and compile what the front page starts with; `compiled.mjs` runs this in Pyodide.

The other modules stay sources, which are smaller.
"""

import sys
from importlib import import_module
from importlib._bootstrap_external import _code_to_hash_pyc  # type: ignore[attr-defined]
from importlib.util import source_hash
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

LIBRARY, PROGRAM = Path("/site/pyodide/python_stdlib.zip"), Path("/site/playground.zip")
HOME = "/home/pyodide"  # where the page unpacks programs
# What neither ppedu needs nor a reader who writes a schedule.
DROPPED = {
    "_pydatetime", "_pyio", "bdb", "cProfile", "cmd", "code", "compileall", "configparser", "doctest", "fileinput",
    "ftplib", "http", "imaplib", "mailbox", "mimetypes", "modulefinder", "netrc", "optparse", "pdb", "pickletools",
    "plistlib", "poplib", "profile", "pstats", "pyclbr", "smtplib", "socketserver", "sqlite3", "tabnanny", "tarfile",
    "trace", "unittest", "wave", "webbrowser", "wsgiref", "xml", "xmlrpc", "zipapp", "zoneinfo",
}  # fmt: skip
# What other systems need.
ELSEWHERE = {
    "asyncio/proactor_events", "asyncio/windows_events", "asyncio/windows_utils", "ctypes/_aix", "ctypes/wintypes",
}  # fmt: skip
# Packages of which only these modules stay.
PARTS = {
    "_pyrepl": ("pager",),  # for `help`
    "encodings": ("aliases", "ascii", "cp437", "latin_1", "unicode_escape", "utf_8", "utf_8_sig", "utf_16", "utf_32"),
    "logging": (),
    "multiprocessing": ("connection", "context", "process", "reduction", "util"),
}


def stays(name: str) -> bool:
    """Return whether a file of an archive stays."""
    module = name.removesuffix(".py")
    first, *rest = module.split("/")
    if first in DROPPED or module in ELSEWHERE:
        return False
    return first not in PARTS or rest[-1] in ("__init__", *PARTS[first])


def compile_loaded(path: Path, home: str) -> None:
    """Put bytecode in place of the loaded modules in an archive; `home` is the folder of its files in the page."""
    loaded = {getattr(module, "__file__", None) for module in sys.modules.values()}
    with ZipFile(path) as archive:
        files = {name: archive.read(name) for name in sorted(archive.namelist()) if stays(name)}
    with ZipFile(path, "w") as archive:
        for name, content in files.items():
            if (file := f"{home}/{name}") in loaded:
                code = compile(content, file, "exec", dont_inherit=True)
                name, content = f"{name}c", _code_to_hash_pyc(code, source_hash(content), False)
            archive.writestr(ZipInfo(name), content, ZIP_DEFLATED, 9)


with ZipFile(PROGRAM) as archive:
    archive.extractall(HOME)
sys.path.insert(0, HOME)
import_module("playground").start().ask('{"open": ""}')
compile_loaded(LIBRARY, next(path for path in sys.path if path.endswith(".zip")))
compile_loaded(PROGRAM, HOME)
