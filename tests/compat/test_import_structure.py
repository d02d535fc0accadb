"""An import of transformers with a kept scan finds what a plain import finds, whatever the cache has."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMPORT = """
import json, sys
if sys.argv[1:]:
    from gearbx_mlx.compat.import_structure import keep_scan
    keep_scan()
import transformers
from transformers import AutoTokenizer
from transformers.models.llama import LlamaConfig
scanned = sys.modules["transformers.utils.import_utils"].create_import_structure_from_path.cache_info().misses
print(json.dumps([sorted(dir(transformers)), LlamaConfig.__name__, scanned]))
"""


@pytest.fixture
def imported(tmp_path):
    """Imports transformers in a process of its own: names that it has, and folders that it scanned."""

    def run(*flags):
        code = [sys.executable, "-c", IMPORT, *flags]
        env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        env.pop("PYTHONPATH", None)  # its startup/sitecustomize.py keeps a scan for the tests
        done = subprocess.run(code, env=env, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        names, kind, scanned = json.loads(done.stdout.splitlines()[-1])
        assert kind == "LlamaConfig"
        return names, scanned

    return run


def kept_file(tmp_path):
    (place,) = (tmp_path / "gearbx-mlx").glob("transformers-*.json")
    return place


def test_second_import_scans_no_source(imported, tmp_path):
    plain, first, second = imported(), imported("kept"), imported("kept")
    assert plain[0] == first[0] == second[0]
    assert plain[1] > first[1] > 100 > second[1]  # some packages scan their own folder
    assert stat.S_IMODE(kept_file(tmp_path).stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"", b"[", b"{}", b'[[["torch"],{"a":"b"}]]'])
def test_damaged_scan_is_replaced(imported, tmp_path, content):
    whole, kept = imported("kept"), imported("kept")
    kept_file(tmp_path).write_bytes(content)
    assert imported("kept") == whole
    assert imported("kept") == kept != whole


def test_scan_writable_by_others_is_ignored(imported, tmp_path):
    imported("kept")
    kept_file(tmp_path).chmod(0o666)
    names, scanned = imported("kept")
    assert names == imported()[0]
    assert scanned > 100


def test_uncreatable_cache_costs_a_scan(imported, tmp_path):
    (tmp_path / "gearbx-mlx").write_text("")
    names, scanned = imported("kept")
    assert names == imported()[0]
    assert scanned > 100
