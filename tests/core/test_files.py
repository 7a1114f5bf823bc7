"""Writing files: a file that exists is replaced at once, and stays what it was otherwise."""

import os
import subprocess
import sys

import pytest

from ppedu import PipelineError
from ppedu.core.files import write_bytes

# Kills itself while it writes: the system sends SIGXFSZ for more than 10 bytes.
KILLED = """
import resource, signal, sys
from ppedu.core.files import write_bytes
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
write_bytes(sys.argv[1], b"new" * 100)
"""


def test_a_kill_while_a_file_is_written_leaves_its_old_content(tmp_path):
    file = tmp_path / "x.json"
    file.write_bytes(b"old" * 50)
    assert subprocess.run([sys.executable, "-c", KILLED, str(file)], check=False).returncode < 0
    assert file.read_bytes() == b"old" * 50


def test_an_error_while_a_file_is_written_leaves_its_old_content_and_no_other_file(tmp_path):
    resource = pytest.importorskip("resource")
    file = tmp_path / "x.json"
    file.write_bytes(b"old" * 50)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(PipelineError, match=r"cannot write .*: File too large; name a file in a folder"):
            write_bytes(file, b"new" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_bytes() == b"old" * 50 and list(tmp_path.iterdir()) == [file]


def test_a_file_keeps_its_permissions_and_a_new_one_gets_the_usual_ones(tmp_path):
    old, new, usual = (tmp_path / name for name in ("old", "x" * 255, "usual"))
    old.touch(mode=0o640)
    usual.touch()
    for file in old, new:
        write_bytes(file, b"new")
        assert file.read_bytes() == b"new"
    assert old.stat().st_mode & 0o777 == 0o640 and new.stat().st_mode == usual.stat().st_mode


def test_links_and_special_files_stay_what_they_are(tmp_path):
    file, link, hard, pipe = (tmp_path / name for name in ("file", "link", "hard", "pipe"))
    file.touch()
    link.symlink_to(file)
    hard.hardlink_to(file)
    for path in link, hard:
        write_bytes(path, path.name.encode())
        assert link.is_symlink() and hard.samefile(file) and file.read_bytes() == path.name.encode()
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_bytes(pipe, b"new")
    assert os.read(reader, 10) == b"new" and pipe.is_fifo()
    os.close(reader)
