"""``asyncflow follow``: refused at once where no run goes on, which nothing would ever answer."""

import shutil
import socket

import pytest

from asyncflow.cli import invoke
from asyncflow.local.folder import RunFolder
from asyncflow.local.record import Record


@pytest.mark.parametrize("run", ["finished", "none"])
def test_where_no_run_goes_on_there_is_nothing_to_follow(tmp_path, manifest, capsys, run):
    if run == "finished":
        folder = RunFolder.claim(tmp_path / "run")
        shutil.copy(manifest, folder.job)
        record = Record(mark="m", supervisor=1, started="", driver="tcp://127.0.0.1:9", http="")
        record.save(folder.processes)
        folder.release()
    assert invoke(["follow", str(tmp_path / "run")]) == 2
    hint = {"finished": "Continue it with asyncflow run FILE --resume", "none": "Pass the folder of a run"}[run]
    assert f"no run is active there. {hint}" in capsys.readouterr().err


def test_a_file_is_no_folder_of_a_run(manifest, capsys):
    assert invoke(["follow", str(manifest)]) == 2
    assert f"{manifest}: no run is active there. Pass the folder of a run" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--serve-port", "--http-port"])
def test_a_port_that_is_taken_is_refused_before_an_engine_starts(tmp_path, manifest, capsys, option):
    folder = RunFolder.claim(tmp_path / "run")
    shutil.copy(manifest, folder.job)
    Record(mark="m", supervisor=1, started="", driver="tcp://127.0.0.1:9", http="").save(folder.processes)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert invoke(["follow", str(folder.path), option, str(port)]) == 1
    assert f"port {port} of 127.0.0.1 is taken" in capsys.readouterr().err
    folder.release()
