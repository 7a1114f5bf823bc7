"""The widgets' script: its files, joined into one module."""

import re
from collections import Counter

from ppedu.view.script import HERE, file, script

FILES = [path.stem for path in (HERE / "js").glob("*.js") if path.stem != "named"]


def test_each_file_stands_in_the_script_after_those_that_it_imports_from():
    places = {name: script().index(file(name).split("\n", 2)[1]) for name in FILES}
    for name in FILES:
        imported = re.findall(r'from "\./(\w+)\.js"', file(name))
        assert all(places[other] < places[name] for other in imported), name
    assert not re.search(r"^import", script(), re.MULTILINE)


def test_no_two_files_of_the_script_define_the_same_name():
    defined = re.findall(r"^(?:export )?(?:function|const|let|class) (\w+)", script(), re.MULTILINE)
    assert len(defined) > 50 and [name for name, times in Counter(defined).items() if times > 1] == []
