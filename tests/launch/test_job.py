"""One job to a run folder."""

import subprocess
import sys

import pytest

from unilab_fabric.errors import UserError
from unilab_fabric.launch.job import claim_run_folder


def test_a_folder_belongs_to_one_job_at_a_time(tmp_path):
    folder, lock = claim_run_folder(tmp_path / "run", own_name=False)
    assert folder == tmp_path / "run"
    code = (
        "import sys\nfrom pathlib import Path\nfrom unilab_fabric.launch.job import claim_run_folder\n"
        "try:\n    claim_run_folder(Path(sys.argv[1]), own_name=False)\nexcept Exception as error:\n    print(error)\n"
    )
    told = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=60).stdout
    assert "training.run_name is run; " in told
    assert "belongs to a running job, process " in told
    lock.close()
    assert not subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, timeout=60).stdout


def test_with_a_name_of_our_own_the_slower_of_two_jobs_takes_another(tmp_path):
    wanted = tmp_path / "run"
    first, lock = claim_run_folder(wanted, own_name=True)
    second, other = claim_run_folder(wanted, own_name=True)
    third, another = claim_run_folder(wanted, own_name=True)
    assert [first.name, second.name, third.name] == ["run", "run-2", "run-3"]
    for each in (lock, other, another):
        each.close()


def test_a_folder_of_a_running_job_is_refused_in_this_process_too(tmp_path):
    _, lock = claim_run_folder(tmp_path / "run", own_name=False)
    with pytest.raises(UserError, match="belongs to a running job"):
        claim_run_folder(tmp_path / "run", own_name=False)
    lock.close()
